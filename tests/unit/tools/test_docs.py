"""The generated pages say what the code says, and the examples of the others do what they say."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import algorithms_page
import generate_docs
import mistakes
import numpy as np
import pytest
import torch
import yaml

from trivium.algorithms import AdvantageInputs, GroupAlgorithm, build_algorithm, policy_inputs
from trivium.algorithms.explain import explain
from trivium.config import AlgorithmConfig, EngineConfig, RunConfig, build, config_from_mapping, load_config, plugin
from trivium.foundation.metrics import METRICS
from trivium.foundation.registry import CATALOGUE
from trivium.protocols import RolloutEngine
from trivium.testing import check_engine
from trivium.types import Group, StopReason, Task, Trajectory, Turn

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, mistakes.Outcome]:
    """What commands say to each mistake, in ten CPU seconds: one of the pages shows it, too."""
    return mistakes.outcomes()


@pytest.mark.parametrize("page", generate_docs.PAGES)
@pytest.mark.usefixtures("outcomes")
def test_the_committed_page_is_up_to_date(page: str) -> None:
    committed = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert committed == generate_docs.PAGES[page](), "run `make docs`"


def test_no_section_kind_or_metric_is_left_out() -> None:
    algorithms, config, metrics = (generate_docs.PAGES[f"{page}.md"]() for page in ("algorithms", "config", "metrics"))
    assert [name for name in RunConfig.model_fields if f"## {name}\n" not in config] == []
    inner = [kind for section in generate_docs.INNER.values() for kind, _ in section.values()]
    kinds = {kind for kind, _ in generate_docs.KINDS.values()} | set(inner)
    assert [name for kind in kinds for name in CATALOGUE[kind] if f"`kind: {name}`" not in config] == []
    assert [name for name in CATALOGUE["algorithms"] if f"| `{name}` |" not in algorithms] == []
    heads = [line for line in algorithms.splitlines() if line.startswith("### ")]
    for kind in algorithms_page.KINDS:
        assert [name for name in CATALOGUE[kind] if not any(f"`{name}`" in head for head in heads)] == []
    # The others are named by workflow.environment, sync.method, cluster.kind and model.tool_calls, are functions of the
    # user, or belong to a front door that a test has imported.
    rest = set(CATALOGUE) - kinds - set(algorithms_page.KINDS)
    others = {"environments", "channels", "renderers", "sessions", "functions", "tools", "tool_calls"}
    assert rest - {"reward_managers"} == others
    assert [key for key in METRICS if f"`{key}`" not in metrics] == []


def test_every_field_has_a_meaning() -> None:
    rows = [line for line in generate_docs.PAGES["config.md"]().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("|  |")] == []
    assert [row for row in rows if "Undefined" in row or "Annotated" in row] == []


def test_every_mistake_is_named_before_a_run_begins_and_its_fix_works(
    outcomes: Mapping[str, mistakes.Outcome],
) -> None:
    assert len(outcomes) == len(mistakes.MISTAKES) >= 25
    for mistake in mistakes.MISTAKES:
        outcome = outcomes[mistake.title]
        assert (outcome.exit_code, outcome.run_code) == ((0, 0) if mistake.warns else (2, 2)), mistake.title
        for text in (outcome.text, outcome.run_text):
            assert all(part in text for part in (": ", "found: ", "do: ")), mistake.title
            assert "Traceback" not in text
        assert outcome.run_text.startswith(outcome.text), f"{mistake.title}: check and run differ"
        assert (outcome.fixed_code, outcome.fixed_text) == (0, ""), mistake.title


def test_every_page_is_in_the_sites_navigation() -> None:
    """Read without mkdocs, which is not installed for the tests; `make site` checks the links."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([\w-]+\.md)$", text.partition("\nnav:")[2], re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {*listed} == {page.name for page in (ROOT / "docs").glob("*.md")}, "name the page under nav in mkdocs.yml"


def test_pages_name_metrics_and_keys_that_exist() -> None:
    """Keys and metrics in code font; of a page about other trainers, in the column of what is here."""
    keys = {line.split("`")[1] for line in generate_docs.config_page().splitlines() if line.startswith("| `")}
    sections = {*RunConfig.model_fields} - {"stages"}
    for page in ("troubleshooting", "hyperparameters", "memory", "concepts"):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for name in re.findall(r"`([a-z_]+(?:[./][a-z_*]+)+)`", text):
            if name.partition(".")[0] in sections:
                known = name in keys or any(key.startswith(f"{name}.") for key in keys)
                assert known, f"{page}.md names {name}"
            elif name.partition("/")[0] in {metric.partition("/")[0] for metric in METRICS}:
                known = name in METRICS or any(fnmatchcase(name, key) or fnmatchcase(key, name) for key in METRICS)
                assert known, f"{page}.md names {name}"


# --------------------------------------------------------------------------- pages with code


def unpacked(page: str, folder: Path) -> dict[str, Any]:
    """Writes the code blocks of a page to the files that their first lines name; returns the YAML ones, read."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:python|yaml)\n# ([\w.]+)[^\n]*\n(.*?)```", text, re.DOTALL)
    for name, code in blocks:
        (folder / name).write_text(code, encoding="utf-8")
    return {name: yaml.safe_load(code) for name, code in blocks if name.endswith(".yaml")}


def algorithm_in(section: dict[str, Any], monkeypatch: pytest.MonkeyPatch, folder: Path) -> GroupAlgorithm:
    monkeypatch.chdir(folder)
    return build_algorithm(plugin("algorithms", AlgorithmConfig)(section["algorithm"]))


def test_the_algorithm_page_holds_a_loss_with_the_gradient_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = algorithm_in(unpacked("extend-algorithm.md", tmp_path)["my_losses.yaml"], monkeypatch, tmp_path)
    (objective,) = algorithm.objectives
    assert objective.on_policy == "plain"
    log_prob = -torch.rand(2, 3, dtype=torch.float64)
    columns = {"advantages": torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -1.0]]), "old_log_prob": log_prob}
    current = log_prob.clone().requires_grad_()
    done = objective.policy_loss(policy_inputs(current, torch.ones(2, 3), **columns))
    done.loss.sum().backward()
    assert torch.equal(current.grad, -columns["advantages"].double())
    far = policy_inputs(log_prob + 3.0, torch.ones(2, 3), **columns)
    expected = -columns["advantages"] * 4.0 * (log_prob + 3.0)  # e^3 is above the bound that the page sets
    torch.testing.assert_close(objective.policy_loss(far).loss, expected)


def test_the_algorithm_page_holds_an_estimator_and_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = algorithm_in(unpacked("extend-algorithm.md", tmp_path)["my_advantages.yaml"], monkeypatch, tmp_path)
    inputs = AdvantageInputs(
        torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        torch.tensor([[False, True, True], [False, True, False]]),
        torch.zeros(2, dtype=torch.int64),
        torch.arange(2),
    )
    assert algorithm.estimator is not None
    assert algorithm.estimator.function(inputs).advantages.tolist() == [[0, 0.75, 0.75], [0, -0.25, 0]]
    mine = algorithm_in({"algorithm": {"kind": "my_algorithms.py:MINE"}}, monkeypatch, tmp_path)
    assert mine.needs == {"ref"}


def test_the_algorithm_page_holds_a_part_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = algorithm_in(unpacked("extend-algorithm.md", tmp_path)["my_parts.yaml"], monkeypatch, tmp_path)
    (objective,) = algorithm.objectives
    x = policy_inputs(
        torch.tensor([[-0.01, -1.0], [-2.0, 5.0]]),
        torch.tensor([[1, 1], [1, 0]]),
        uniform=torch.tensor([[0.1, 0.9]] * 2),
        advantages=torch.ones(2, 2),
        old_log_prob=torch.tensor([[-0.01, -1.0], [-2.0, 5.0]]),
        ref_log_prob=torch.tensor([[-0.01, 1.0], [-2.0, 0.0]]),
    )
    assert objective.select_tokens is not None
    selected = objective.select_tokens(x)
    assert selected.tolist() == [[True, False], [True, False]]
    loss = objective.policy_loss(replace(x, columns={**x.columns, "selected": selected.float()})).loss
    assert loss.tolist() == [[-1, 0], [-1, 0]]
    assert objective.token_weights[0].function(x).tolist() == [[0, 1], [1, 0]]
    assert objective.kl is not None
    assert objective.kl.function(x).tolist() == [[0, 16], [0, 0]]
    (rule,) = algorithm.filters
    group = Group(0, Task("a", ()), (Trajectory(0, rewards={"r": 0.0}), Trajectory(1, rewards={"r": -1.0})))
    assert not rule.keeps(group)
    text = explain(algorithm, "")
    for words in (
        "-A r where the token is selected",
        "a random 0.25 of the tokens",
        "0.95",
        "sum over tokens / sqrt(tokens)",
        "keep if a member got more than 0",
        "max(R, -1)",
        "(p - q)^4",
    ):
        assert words in text


async def test_the_engine_page_holds_an_engine_that_keeps_its_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = unpacked("extend-engine.md", tmp_path)["monkey.yaml"]["engine"]
    monkeypatch.chdir(tmp_path)
    config = plugin("engines", EngineConfig)(section)

    def make() -> RolloutEngine:
        return build("engines", config, model_dir=tmp_path, eos_token_ids=frozenset({7}), decode=str, threads=1)

    prompts = [np.arange(3, dtype=np.int32), np.arange(5, dtype=np.int32)]
    await check_engine(make, prompts, eos_token_ids=frozenset({7}), weights=list)


def test_the_buffer_page_holds_a_strategy_and_an_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = unpacked("extend-buffer.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    tasks = {name: {"kind": "arithmetic"} for name in ("train", "expert")}
    base = {"model": {"kind": "tiny", "alphabet": "0123456789+="}, "tasks": tasks, "rewards": ["exact"]}
    assert config_from_mapping({**base, **sections["mixed.yaml"]}).schedule.groups_per_step == 32
    refined = config_from_mapping({**base, **sections["refined.yaml"]})
    short = build("operators", refined.buffer.operators[-1])
    turn = Turn(np.arange(3), np.arange(101), np.zeros(101), np.zeros(101), StopReason.EOS, "")
    group = Group(0, Task("a", ()), (Trajectory(0, (turn,)), Trajectory(1)))
    assert short(group) == group
    assert short(replace(group, trajectories=group.trajectories[:1])).dropped == "no member is short"


def test_the_readme_counts_the_lines_of_its_example_and_the_example_can_run(tmp_path: Path) -> None:
    unpacked("../README.md", tmp_path)
    text = "".join((tmp_path / name).read_text(encoding="utf-8") for name in ("my_rewards.py", "my_run.yaml"))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert f"## Your own reward in {len(lines)} lines\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    tiny = {"model": {"kind": "tiny"}}  # tests/real runs it with its own model
    config = config_from_mapping({**yaml.safe_load((tmp_path / "my_run.yaml").read_text()), **tiny}, tmp_path)
    assert config.rewards[0].label == "ten_words"


PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """(file, anchor) of every link of a page to a file of ours; the anchor is empty for the whole file."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        yield (page.parent / target).resolve() if target else page, anchor


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", re.sub(r"\]\([^)]*\)", "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    return [
        f"{target.name}#{anchor}"
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_its_heading(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# One `key.b`\n[a](#one-keyb) [b](#two) [c](c.md) [d](a.md#one-keyb) [e](https://x.org/y#z)\n")
    assert broken(page) == ["a.md#two", "c.md#"]


def test_every_answer_is_within_two_clicks() -> None:
    """Of the first page: one to the page that its table names, one more to any other."""
    index = ROOT / "docs" / "index.md"
    rows = [line for line in index.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    assert [row for row in rows if row.count(" | ") != 2 or "](" not in row.rpartition(" | ")[2]] == []
    first = {target for target, _ in links(index)}
    second = {target for page in first if page.suffix == ".md" for target, _ in links(page)}
    assert {*(ROOT / "docs").glob("*.md")} - first - second - {index} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_and_path_of_the_package_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"\btrivium(?:\.(?!db\b)[A-Za-z_]\w*)+", text)))
    paths = sorted(set(re.findall(r"\b(?:trivium|tests|docs|examples|recipes|tools)/[\w/.-]*\w", text)))
    assert [name for name in names if not is_importable(name)] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


def is_importable(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of what precedes its last dot."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_a_name_that_does_not_exist_is_detected() -> None:
    assert is_importable("trivium.loops.train_step")
    assert is_importable("trivium.synchronizer.Synchronizer.heartbeat")
    assert not is_importable("trivium.loops.no_such_step")
    assert not is_importable("trivium.no_such_module")


@pytest.mark.parametrize("recipe", ["arithmetic.yaml", "short.yaml"])
def test_the_recipes_of_the_demos_are_those_in_recipes(recipe: str) -> None:
    packaged = files("trivium.runtime") / recipe
    assert packaged.read_text() == (ROOT / "recipes" / recipe).read_text()


def test_the_files_of_the_cluster_page_are_valid() -> None:
    """Scripts parse, keys of commands exist, and the job of Kubernetes mounts what its command names."""
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    scripts = [block for kind, block in blocks if not kind]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert any("srun torchrun" in script for script in scripts)
    config, job = (yaml.safe_load(block) for kind, block in blocks if kind == "yaml")
    commands = [line.strip() for script in scripts for line in script.splitlines() if "trivium run run.yaml" in line]
    commands.append(job["spec"]["entrypoint"])
    for command in commands:
        options = [word for word in command.partition("#")[0].split() if re.fullmatch(r"[a-z_.]+=\S+", word)]
        if "run.mode" in command:
            options += [f"{key}={json.dumps(value)}" for key, value in config.items()]
        load_config(ROOT / "tests" / "e2e" / "ray.yaml", options)
    ray = job["spec"]["rayClusterSpec"]
    for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,), (volume,) = pod["containers"], pod["volumes"]
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/run"}]
    assert "/run/run.yaml" in job["spec"]["entrypoint"]
