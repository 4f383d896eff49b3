"""How many of Trinity-RFT's own example configs are translated, and why the others are not."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.peers import PEERS
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.trinity.translation import translate

SERVICES = {
    "Megatron is not supported": "Megatron",
    "Tinker is not supported": "Tinker",
    "'agentscope": "AgentScope",
    "'email_search_workflow'": "AgentScope",
    "'data_juicer'": "Data-Juicer",
    "'sciworld_workflow'": "ScienceWorld",
}
"""A part of a problem -> the program of third parties that the example needs."""


def cause_of(file: Path) -> tuple[str, bool]:
    """(Why a file is not translated, whether that is a program of third parties). Empty for a file that is."""
    try:
        translate(yaml.safe_load(file.read_text()), device="cpu")
    except ConfigError as error:
        texts = [f"{problem.where}: {problem.asked}: {problem.found}: {problem.do}" for problem in error.problems]
        services = [next((name for part, name in SERVICES.items() if part in text), "") for text in texts]
        return (", ".join(sorted({*services})), True) if all(services) else ("; ".join(texts), False)
    return "", True


def test_nine_of_ten_examples_are_translated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = sorted((PEERS / "trinity").glob("*.yaml"))
    if not files:
        pytest.skip(f"{PEERS / 'trinity'} is not on this machine (TRIVIUM_PEERS names the folder above it)")
    for name in ("MODEL", "TASKSET", "SFT_DATASET", "BUFFER"):
        monkeypatch.setenv(f"TRINITY_{name}_PATH", str(tmp_path / name.lower()))
    causes = {file.stem: cause_of(file) for file in files}
    considered = {name: cause for name, (cause, of_others) in causes.items() if not (cause and of_others)}
    translated = [name for name, cause in considered.items() if not cause]
    lines = [f"{len(translated)} of {len(files)} translate; {len(considered)} need no program of third parties"]
    services = Counter(cause for cause, of_others in causes.values() if cause and of_others)
    lines += [f"{count} need {service}" for service, count in services.items()]
    lines += [f"{name}: {cause}" for name, cause in considered.items() if cause]
    sys.stdout.write("\n  ".join(lines) + "\n")
    assert len(translated) >= 0.9 * len(considered)
    assert len(considered) >= 0.6 * len(files), "the programs of third parties explain too much"
