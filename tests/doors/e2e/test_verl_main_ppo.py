"""verl's launch script with other imports, and nothing of verl installed, learns."""

from __future__ import annotations

import ast
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.processes import Forked
from trivium.text.tiny import TinyModel

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("connected")

SCRIPT = Path(__file__).with_name("verl_main_ppo.py")
EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_ppo_trainer.py"
STEPS = 25
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
"""


def arguments(folder: Path, estimator: str, group_size: int) -> list[str]:
    """What a shell script passes to `main_ppo`."""
    example = runpy.run_path(str(EXAMPLE))
    example["write_data"](folder)
    tiny = TinyModel.Config(alphabet="0123456789,", layers=2, hidden=64, heads=4, mlp=128, max_position=32)
    model = TinyModel(tiny, seed=0).materialize(folder / "model")
    (folder / "scorer.py").write_text(SCORER)
    optimizers = [
        f"{role}.optim.{rest}"
        for role in ("actor_rollout_ref.actor", "critic")
        for rest in ("lr=2e-3", "weight_decay=0.0")
    ]
    return [
        f"algorithm.adv_estimator={estimator}",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=32",
        "data.max_prompt_length=16",
        "data.max_response_length=3",
        "data.filter_overlong_prompts=True",
        "data.seed=1",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.rollout.name=torch",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.rollout.n={group_size}",
        f"critic.model.path={model}",
        *optimizers,
        f"custom_reward_function.path={folder}/scorer.py",
        "trainer.logger=['console']",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        f"trainer.default_local_dir={folder}/run",
    ]


def test_the_page_prints_the_imports_of_the_script() -> None:
    page = (Path(__file__).parents[3] / "docs" / "ray-ppo-trainer.md").read_text(encoding="utf-8")
    block = page.partition("```diff\n")[2].partition("```")[0]
    added = "\n".join(line[1:] for line in block.splitlines() if line.startswith("+"))
    printed, imported = (
        {
            alias.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and node.module == "trivium.frontdoors.verl"
            for alias in node.names
        }
        for text in (added, SCRIPT.read_text(encoding="utf-8"))
    )
    assert imported <= printed
    removed = "\n".join(line[1:] for line in block.splitlines() if line.startswith(("-import", "-from")))
    nodes = [node for node in ast.walk(ast.parse(removed)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in nodes for alias in node.names}
    assert names - {"hydra"} == printed - {"config_of", "with_defaults"}


def launched(*overrides: str) -> None:
    """`python main_ppo.py ...`, where an import of verl or Hydra fails."""
    sys.modules |= dict.fromkeys(("verl", "hydra"))  # pyright: ignore
    sys.argv = [str(SCRIPT), *overrides]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("estimator", "group_size"), [("grpo", 8), ("gae", 4)])
def test_the_launch_script_learns(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: str, group_size: int
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    process = Forked(estimator, tmp_path / "process", launched, *arguments(tmp_path, estimator, group_size))
    assert process.wait(1700) == 0, process.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2, summary
