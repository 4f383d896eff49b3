"""The arguments of verl's example scripts as RunConfigs: how many translate, and the causes of the rest."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.peers import peer_file
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.verl.main_ppo import config_of
from trivium.frontdoors.verl.translation import translate

OTHER_BACKENDS = ("megatron", "npu", "veomni", "mindspeed")


REQUIRED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=a/model"]
"""Keys that a call may lack: in the script of PF-PPO, a comment after a backslash ends the command."""


@pytest.mark.parametrize("version", ["v0.5.0", "v0.7.0"])
def test_calls_without_other_backends_translate(version: str) -> None:
    calls: dict[str, list[str]] = json.loads(peer_file("verl", f"scripts-{version}.json").read_text())
    causes, total, translated = Counter[str](), 0, 0
    for name, arguments in calls.items():
        if any(backend in " ".join([name, *arguments]).lower() for backend in OTHER_BACKENDS):
            continue
        total += 1
        try:
            translate(config_of(REQUIRED + [word for word in arguments if not word.startswith("--config")]))
            translated += 1
        except ConfigError as error:
            causes.update(f"{problem.where}: {problem.found}" for problem in error.problems)
    shown = "\n".join(f"{count} {cause}" for cause, count in causes.most_common())
    assert translated == total > 0, f"{translated} of {total}\n{shown}"
