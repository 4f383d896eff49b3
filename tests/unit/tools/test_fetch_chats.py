"""The public chat templates of `make test-real` are what their hashes say, and are whole in the cache or absent."""

import hashlib
import io
import tarfile
from pathlib import Path

import fetch_chats
import pytest


def archive(**files: bytes) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/models/{name.replace('_json', '.json')}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return written.getvalue()


def one_tokenizer(monkeypatch: pytest.MonkeyPatch, cache: Path, digest: str, content: bytes) -> Path:
    """The directory of the one tokenizer that is fetched, from an archive with this content."""
    monkeypatch.setattr(fetch_chats, "CACHE", cache)
    monkeypatch.setattr(fetch_chats, "TEMPLATES", cache / "templates")
    monkeypatch.setattr(fetch_chats, "TOKENIZERS", {"small": digest})
    monkeypatch.setattr(fetch_chats, "_archive", lambda name: content)
    (cache / "templates").mkdir(parents=True)
    return fetch_chats.tokenizer_dir("small")


def test_the_files_of_a_tokenizer_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(tokenizer_json=b"{}", tokenizer_config_json=b"[]", other_json=b"1")
    directory = one_tokenizer(monkeypatch, tmp_path / "cache", hashlib.sha256(content).hexdigest(), content)
    assert fetch_chats.missing() == [directory.name]
    fetch_chats.fetch()
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"[]",
    }
    assert fetch_chats.missing() == []


def test_another_archive_than_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = one_tokenizer(monkeypatch, tmp_path / "cache", "0" * 64, archive(tokenizer_json=b"{}"))
    with pytest.raises(ValueError, match="SHA-256"):
        fetch_chats.fetch()
    assert not directory.exists()
    assert fetch_chats.missing() == [directory.name]
