"""What a run promises, checked over the history of a world."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.checkpoint.store import CheckpointStore
from trivium.config import RunConfig
from trivium.simulation.hardware import UNTRAINED
from trivium.types import Batch


@dataclass(frozen=True)
class Update:
    """One update of the policy."""

    version: int
    """The version that it started from."""
    before: bytes
    after: bytes
    """The digests of the weights."""
    groups: tuple[str, ...]
    oldest: int
    """The oldest version that sampled a trained token."""
    newest: int

    @classmethod
    def of(cls, version: int, digest: tuple[bytes, bytes], batch: Batch) -> Update:
        versions = [e.policy_version[e.response_mask] for e in batch.experiences]
        present = [v for v in versions if len(v)]
        oldest = min((int(v.min()) for v in present), default=version)
        newest = max((int(v.max()) for v in present), default=version)
        groups = tuple(dict.fromkeys(e.group_id for e in batch.experiences))
        return cls(version, *digest, groups, oldest, newest)


def check_update(staleness: int, update: Update, problems: list[str]) -> None:
    """Every trained token is at most `max_staleness` versions old, and of no later version."""
    if update.version - update.oldest > staleness:
        problems.append(f"version {update.version} trains on tokens of version {update.oldest}")
    if update.newest > update.version:
        problems.append(f"version {update.version} trains on tokens of version {update.newest}")


def is_complete(config: RunConfig) -> bool:
    """Whether the run has the checkpoint of its last step."""
    return CheckpointStore(Path(config.run.dir) / "checkpoints").steps()[-1:] == [config.schedule.steps]


def check_end(config: RunConfig, updates: list[Update], problems: list[str]) -> tuple[str, tuple[str, ...]]:
    """The last checkpoint is that of the last step. The updates that led to it begin with the untrained weights, train
    on no group twice, and leave none out. No unfinished file is left, and metrics have one row for each step. Returns
    (the digest of the last weights, the groups that led to them)."""
    run_dir = Path(config.run.dir)
    store = CheckpointStore(run_dir / "checkpoints")
    steps = store.steps()
    if not steps or steps[-1] != config.schedule.steps:
        problems.append(f"the last checkpoint is of step {steps[-1:]} of {config.schedule.steps}")
        return "", ()
    policy = store.open(steps[-1]).path / "policy"
    digest: str = json.loads((policy / "model.json").read_text(encoding="utf-8"))["digest"]
    lineage, by_after = list[Update](), {update.after: update for update in updates}
    while (update := by_after.get(lineage[-1].before if lineage else bytes.fromhex(digest))) is not None:
        lineage.append(update)
    trained = [group for update in reversed(lineage) for group in update.groups]
    versions = [update.version for update in lineage]
    never_fails = getattr(config.engine, "fail_fraction", 0.0) == 0  # a step whose rollouts all failed has no update
    if versions != (sorted(range(config.schedule.steps), reverse=True) if never_fails else sorted({*versions})[::-1]):
        problems.append(f"the weights come from updates of versions {versions}")
    if (lineage[-1].before if lineage else bytes.fromhex(digest)) != UNTRAINED:
        problems.append(f"the weights before version {versions[-1:]} come from no update")
    sizes = {len(update.groups) for update in lineage}
    if never_fails and sizes != {config.schedule.groups_per_step}:
        problems.append(f"updates have {sorted(sizes)} groups instead of {config.schedule.groups_per_step}")
    if len(set(trained)) != len(trained):
        twice = sorted({group for group in trained if trained.count(group) > 1})
        problems.append(f"trained twice: {twice}")
    left = [str(path.relative_to(run_dir)) for path in run_dir.rglob("*.writing")]
    if left:
        problems.append(f"unfinished files are left: {left}")
    rows: list[Any] = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    logged = [row["step"] for row in rows if "train/version" in row]
    if logged != list(range(1, config.schedule.steps + 1)):
        problems.append(f"metrics.jsonl has the steps {logged}")
    return digest, tuple(trained)
