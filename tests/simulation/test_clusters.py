"""The clusters that docs/cluster.md plans on paper: its commands run, and its figures are theirs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trivium.config import load_config
from trivium.config.machine_file import read_machine
from trivium.config.plan import plan_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
CLUSTERS = ["30b-a3b", "235b-a22b"]
pytestmark = pytest.mark.slow


def shell_lines(name: str) -> list[list[str]]:
    """The words of the page's commands about a cluster."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    return [line.split() for line in lines if f"runs/{name}" in line]


def cells(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if re.match(r" *\d", line)]


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_commands_print_what_the_page_shows(name: str, tmp_path: Path) -> None:
    (_, script, *arguments), check, simulate = shell_lines(name)
    write = [sys.executable, str(ROOT / script), *arguments]
    subprocess.run(write, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    assert [*check[:2], *simulate[:2]] == ["trivium", "check", "trivium", "simulate"]
    planned_and_shown(name, tmp_path, check[2], check[4])
    command = [sys.executable, "-m", "trivium", *simulate[1:]]
    done = subprocess.run(command, cwd=tmp_path, check=True, timeout=240, capture_output=True, text=True)
    shown = PAGE.partition(" ".join(simulate))[2].partition("```text\n")[2].partition("```")[0]
    assert [row[:4] for row in cells(done.stdout)] == [row[:4] for row in cells(shown)]
    for found, row in zip(cells(done.stdout), cells(shown), strict=True):
        assert float(found[4].replace(",", "")) == pytest.approx(float(row[4].replace(",", "")), rel=0.2)


def planned_and_shown(name: str, folder: Path, config: str, machine: str) -> None:
    """The plan that `trivium check` prints where vLLM is installed fits, and the page shows its sums in GiB."""
    loaded, described = load_config(folder / config), read_machine(folder / machine)
    (stage,) = plan_run(loaded, 16, described, loaded.cluster.ranks).stages
    assert stage.memory is not None
    assert stage.communication is not None
    needed, available = stage.memory["needed"], stage.memory["available"]
    assert needed["host"] < available["host"]
    assert needed["gpu"] < min(available["gpus"])
    column = CLUSTERS.index(name) + 2
    rows = {row[1].strip(): row[column] for row in (line.split("|") for line in PAGE.splitlines()) if len(row) == 5}
    sums = {
        "GiB on a rank's GPU": stage.memory["each rank"]["total"],
        "GiB in host memory for a rank": stage.memory["each rank, host"]["total"],
        "GiB that a rank sends in a pass": stage.communication["total"],
    }
    for row, mib in sums.items():
        assert float(re.findall(r"[\d.]+", rows[row])[0]) == pytest.approx(mib / 1024, rel=0.01), row
