"""Whatever a config file holds, reading and checking it ends soon, and only errors of Trivium come out. `TRIVIUM_FUZZ`
sets how many mutations are tried."""

from __future__ import annotations

import copy
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from failing import refused

from trivium.clients.http import read_token
from trivium.config import load_config
from trivium.config.reading import read_bounded
from trivium.foundation.errors import ConfigError, TriviumError
from trivium.runtime.launch import ready

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    path
    for folder in ("recipes", "tests/e2e", "examples")
    for path in (ROOT / folder).glob("*.yaml")
    if path.stem not in ("trinity", "gpu_24gb", "gsm8k", "reasoning_gym")
)
MUTATIONS = int(os.environ.get("TRIVIUM_FUZZ", "400"))
LONGEST_S, HELD_S = 30, 300
"""CPU seconds of one config, since a test may share its machine; seconds after which it is held up."""
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**62, 2**64, 10**400, 1e308, float("nan"), float("inf"), "", "x", "é\u0000", "1"),
    *("/dev/zero", "/nowhere", "file.py:Name", "os:system", "$HOME", "{{", "a" * 5000),
    *([], {}, [[]], {"a": 1}, [None], {"kind": "nope"}, ["x", {"kind": 3}], {1: 2}),
)
PIECES = ("\t", "*a", "&a ", "<<: ", "!!python/object:os.system ", "{", "]", "? ", "|", "\x00", "\ufeff", "---\n", "'")


class TooSlow(BaseException):
    """Not an Exception: nothing may catch it."""


@contextmanager
def at_most(seconds: int) -> Generator[None]:
    def stop(number: int, frame: object) -> None:
        raise TooSlow

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(HELD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    )
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def with_few_tasks(text: str) -> str:
    """A config whose tasks and steps are small: a check looks at up to a thousand tasks alike, of which each picture
    takes milliseconds. `VALUES` has large numbers."""
    return re.sub(r"\b(count|groups_per_step): (\d+)", lambda match: f"{match[1]}: {min(int(match[2]), 16)}", text)


parsed = cache(yaml.safe_load)


def mutated(dice: random.Random, text: str) -> str:
    if dice.random() < 0.3:
        for _ in range(dice.choice((1, 2, 5))):
            place = dice.randrange(len(text) + 1)
            text = text[:place] + dice.choice(PIECES) + text[place + dice.choice((0, 0, 1, 10)) :]
        return text
    tree = copy.deepcopy(parsed(text))
    for _ in range(dice.choice((1, 1, 2, 4))):
        container, key = dice.choice(places(tree) or [(tree, "a")])
        match dice.randrange(5):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[dice.choice((f"{key}s", "kind", "path", 1, "steps"))] = container.pop(key)
            case 2:
                container[key] = copy.deepcopy(dice.choice(dice.choice(places(tree)))) if tree else None
            case _:
                container[key] = copy.deepcopy(dice.choice(VALUES))
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)


@pytest.mark.filterwarnings("ignore")
def test_a_mutated_config_is_an_error_of_trivium_or_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dice, refused = random.Random(20261124), 0
    texts = [with_few_tasks(path.read_text(encoding="utf-8")) for path in CONFIGS]
    for number in range(MUTATIONS):
        text = mutated(dice, dice.choice(texts))
        (tmp_path / "config.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        with at_most(LONGEST_S):
            try:
                ready(load_config(tmp_path / "config.yaml", [f"run.dir={tmp_path / str(number)}"]))
            except TriviumError:
                refused += 1
            except BaseException as error:
                raise AssertionError(f"mutation {number} of the config:\n{text}") from error
    assert refused > MUTATIONS // 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 << 20, "KiB"


def tower(line: str) -> str:
    """An alias for ten aliases for ten aliases, and so on."""
    return "a: &a {x: 1}\n" + "".join(line.format("abcdefghij"[n + 1], "abcdefghij"[n]) for n in range(9))


HOSTILE = {
    "aliases": tower("{0}: &{0} [*{1}, *{1}, *{1}, *{1}, *{1}, *{1}, *{1}, *{1}]\n"),
    "merged aliases": tower("{0}: &{0} {{{{<<: [*{1}, *{1}, *{1}, *{1}, *{1}, *{1}, *{1}, *{1}]}}}}\n")
    .replace("{{", "{")
    .replace("}}", "}"),
    "an alias of itself": "a: &a [*a]\n",
    "unknown keys": "".join(f"unknown_key_{n}: {n}\n" for n in range(20_000)),
    "unknown keys of a section": "model:\n  kind: tiny\n" + "".join(f"  unknown_{n}: {n}\n" for n in range(20_000)),
    "one long value": "a: " + "x" * (2 << 20),
    "deep": "a: " + "[" * 5000 + "]" * 5000,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_config_of_any_size_is_refused_soon(what: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(HOSTILE[what])
    with at_most(LONGEST_S), pytest.raises(TriviumError) as caught:
        load_config(tmp_path / "config.yaml")
    assert len(str(caught.value)) < 100_000
    with at_most(LONGEST_S), pytest.raises(TriviumError):
        load_config(CONFIGS[0], ["model=" + HOSTILE[what].replace("\n", ", ")])


def test_devices_and_pipes_are_read_as_far_as_a_config_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivium.config.reading._READ_S", 1.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), Path("/dev/urandom"), tmp_path):
        with at_most(LONGEST_S), pytest.raises(TriviumError):
            load_config(path)
        with at_most(LONGEST_S), pytest.raises(TriviumError):
            read_token(None, str(path))
    keeper = os.open(pipe, os.O_RDWR)  # a writer that writes nothing
    with at_most(LONGEST_S), refused(ConfigError, pipe, "1 s"):
        load_config(pipe)
    os.close(keeper)

    def write() -> None:
        with pipe.open("w") as file:
            file.write("a: 1\n")
            time.sleep(0.2)  # the reader is at the end of what is there, and must wait
            file.write("b: 2\n")

    writer = threading.Thread(target=write)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # as a shell's `<(...)`: both ends are open
    writer.start()
    time.sleep(0.1)  # it reads between the two lines; what it gets is the same at any moment
    assert read_bounded(pipe) == "a: 1\nb: 2\n"
    writer.join()
    os.close(reader)


@pytest.mark.parametrize(
    "override",
    [
        "tasks={train: {kind: jsonl, path: WHERE}}",
        "tasks={train: {kind: parquet, path: WHERE}}",
        "tasks.train.image_root=WHERE",
        "model={kind: huggingface, path: WHERE}",
        "engine={kind: scripted, script: 'WHERE.py:f'}",
        "buffer={kind: files, tasks: train}",
        "rewards=[{kind: model, path: WHERE}]",
        "rewards=[{kind: 'WHERE.py:f'}]",
        "train.lora.path=WHERE",
    ],
)
@pytest.mark.parametrize("device", ["pipe", "/dev/zero"])
def test_a_path_that_leads_to_no_regular_file_holds_no_check(device: str, override: str, tmp_path: Path) -> None:
    where = tmp_path / "pipe.py"
    os.mkfifo(where)
    path = device if device.startswith("/") else str(where.with_suffix("") if ".py" in override else where)
    with at_most(LONGEST_S), suppress(TriviumError):
        ready(load_config(ROOT / "tests/e2e/tiny.yaml", [override.replace("WHERE", path), f"run.dir={tmp_path / 'r'}"]))
