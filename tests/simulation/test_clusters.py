"""The clusters that docs/cluster.md plans on paper: its figures are those of its commands."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.clusters import CLUSTERS, PASS, RESPONSES, Cluster, rates_of, sent_s
from tests.processes import Forked, trivium
from trivium.config import load_config
from trivium.config.machine_file import read_machine
from trivium.config.plan import plan_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


def shell_lines(name: str) -> list[list[str]]:
    """The words of the page's commands about a cluster."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    return [line.split() for line in lines if f"runs/{name}" in line]


def run_script(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def cells(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if re.match(r" *\d", line)]


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_commands_print_what_the_page_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (_, script, *arguments), check, simulate = shell_lines(name)
    Forked("write", tmp_path / "write.out", run_script, str(ROOT / script), *arguments).ended()
    assert [*check[:2], *simulate[:2]] == ["trivium", "check", "trivium", "simulate"]
    column = list(CLUSTERS).index(name) + 2
    rows = {row[1].strip(): row[column] for row in (line.split("|") for line in PAGE.splitlines()) if len(row) == 5}
    for row, found in figures(CLUSTERS[name], tmp_path / check[2], tmp_path / check[4]).items():
        for shown, value in zip(numbers(rows[row]), found, strict=True):
            assert shown == f"{value:.{len(shown.partition('.')[2])}f}", row
    printed = Forked("simulate", tmp_path / "simulate.out", trivium, *simulate[1:]).ended(seconds=280).text
    shown = PAGE.partition(" ".join(simulate))[2].partition("```text\n")[2].partition("```")[0]
    assert cells(printed) == cells(shown)
    assert printed.splitlines()[-1] == shown.splitlines()[-1]


def figures(cluster: Cluster, config: Path, machine: Path) -> dict[str, list[float]]:
    """The numbers of each row of the page's table, from the cluster and the plan that `trivium check` prints where vLLM
    is installed. The plan must fit."""
    loaded, described = load_config(config), read_machine(machine)
    (stage,) = plan_run(loaded, 16, described, loaded.cluster.ranks).stages
    assert stage.memory is not None
    assert stage.communication is not None
    needed, available = stage.memory["needed"], stage.memory["available"]
    assert needed["host"] < available["host"]
    assert needed["gpu"] < min(available["gpus"])
    rank, host, engine, sent = [
        {name: value / 1024 for name, value in items.items() if isinstance(value, float)}
        for items in (*(stage.memory[f"each {who}"] for who in ("rank", "rank, host", "engine")), stage.communication)
    ]
    rates = rates_of(cluster)
    split = [cluster.tensor] * (cluster.tensor > 1)
    return {
        "nodes of 8 GPUs and 2 TiB": [cluster.nodes],
        "training ranks": [cluster.ranks, *split, cluster.expert],
        "engines": [cluster.engines, cluster.engine_gpus],
        "rollouts of a step (GRPO)": [cluster.groups, loaded.schedule.group_size],
        f"GiB on a rank's GPU, in passes of {PASS:,} tokens": [
            rank[name] for name in ("total", "gathered", "activations")
        ],
        "GiB in host memory for a rank": [
            *(host[name] for name in ("total", "policy weights", "policy gradients", "policy optimizer")),
            host["published versions"],
        ],
        "GiB on an engine's GPU": [engine["engine"], engine["engine reserved"]],
        "sequences that all engines hold at once": [cluster.engines * rates.max_rows],
        "minutes of a response of 16,000 tokens": [(rates.step_s + rates.row_s * rates.max_rows) * RESPONSES[-1] / 60],
        "GiB that a rank sends in a pass": [
            sent[name] for name in ("total", "sharded layers", "tokens for experts", "split layers") if name in sent
        ],
        "seconds of this transfer": [sent_s(cluster)],
    }
