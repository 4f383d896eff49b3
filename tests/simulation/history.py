"""What a run promises, checked over the history of a world."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation.computer import Computer
from tests.simulation.hardware import UNGRADED, UNTRAINED
from trivium.checkpoint.store import CheckpointStore
from trivium.config import RunConfig
from trivium.foundation.run_role import dead_explorers
from trivium.types import SERVED, Batch


@dataclass(frozen=True)
class Update:
    """One update of the policy."""

    version: int
    """The version that it started from."""
    before: bytes
    after: bytes
    """The digests of the weights."""
    groups: tuple[str, ...]
    rewards: tuple[float, ...]
    """Those of the rollouts."""


class History:
    """The updates of a world and the promises that it broke."""

    def __init__(self, config: RunConfig, problems: list[str], sent: Collection[float]) -> None:
        """`sent` are the rewards that agents have sent. Each is another number."""
        self._config, self._problems, self._sent = config, problems, sent
        self._served = config.tasks["train"].kind == SERVED
        self._updates: list[Update] = []

    def updated(self, version: int, digest: tuple[bytes, bytes], batch: Batch) -> None:
        """Checks a train step: its tokens are at most `max_staleness` versions old and of no later version, and none is
        of a failed rollout."""
        rollouts = {(e.group_id, e.index): e.reward for e in batch.experiences}
        groups = tuple(dict.fromkeys(group for group, _ in rollouts))
        self._updates.append(Update(version, *digest, groups, tuple(rollouts.values())))
        if self._served and (unknown := {*rollouts.values()} - {*self._sent}):
            self._problems.append(f"version {version} trains on rewards that no agent sent: {sorted(unknown)}")
        for each in batch.experiences:
            sampled_by, tokens = each.policy_version[each.response_mask], each.tokens[each.response_mask]
            if (
                len(tokens)
                and not version - self._config.max_staleness <= sampled_by.min() <= sampled_by.max() <= version
            ):
                self._problems.append(
                    f"version {version} trains on tokens of versions {sorted({*sampled_by.tolist()})}"
                )
            if UNGRADED in tokens:
                self._problems.append(f"version {version} trains on a failed rollout of {each.group_id}")

    def check_end(self) -> tuple[str, tuple[str, ...]]:
        """Checks the run directory of a run that has ended: the last checkpoint is that of the last step, metrics have
        one row for each step, and no unfinished file is left. The updates that led to the checkpoint begin with the
        untrained weights, train on no group twice, and leave none out. Returns (the digest of the last weights, the
        groups that led to them)."""
        run_dir, schedule = Path(self._config.run.dir), self._config.schedule
        if not is_complete(self._config):
            self._problems.append(f"the checkpoints do not end with step {schedule.steps}")
            return "", ()
        policy = CheckpointStore(run_dir / "checkpoints").open(schedule.steps).path / "policy"
        digest: str = json.loads((policy / "model.json").read_text(encoding="utf-8"))["digest"]
        trained = self._check_lineage(bytes.fromhex(digest))
        left = [str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.name.endswith((".writing", ".removed"))]
        if left:
            self._problems.append(f"unfinished files are left: {left}")
        rows: list[Any] = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
        logged = [row["step"] for row in rows if "train/version" in row]
        if logged != list(range(1, schedule.steps + 1)):
            self._problems.append(f"metrics.jsonl has the steps {logged}")
        return digest, trained

    def _check_lineage(self, digest: bytes) -> tuple[str, ...]:
        """Checks the updates that led to these weights. Returns the groups that they trained on."""
        schedule, lineage = self._config.schedule, list[Update]()
        by_after = {update.after: update for update in self._updates}
        while (update := by_after.get(digest)) is not None:
            lineage.append(update)
            digest = update.before
        if digest != UNTRAINED:
            self._problems.append(f"the weights before version {lineage[-1:]} come from no update")
        trained = [group for update in reversed(lineage) for group in update.groups]
        versions = [update.version for update in lineage]
        sizes = {len(update.groups) for update in lineage}
        # A group whose rollouts have all failed is not trained on, nor a step without another one.
        if not getattr(self._config.engine, "fail_fraction", 0.0) and not self._served:
            if versions != sorted(range(schedule.steps), reverse=True):
                self._problems.append(f"the weights come from updates of versions {versions}")
            if sizes != {schedule.groups_per_step}:
                self._problems.append(f"updates have {sorted(sizes)} groups instead of {schedule.groups_per_step}")
        if len(set(trained)) != len(trained):
            twice = sorted({group for group in trained if trained.count(group) > 1})
            self._problems.append(f"trained twice: {twice}")
        rewards = [reward for update in lineage for reward in update.rewards]
        if self._served and len({*rewards}) != len(rewards):
            self._problems.append(f"rollouts of agents are trained twice: {sorted(rewards)}")
        return tuple(trained)


def is_complete(config: RunConfig) -> bool:
    """Whether the run has the checkpoint of its last step."""
    return CheckpointStore(Path(config.run.dir) / "checkpoints").steps()[-1:] == [config.schedule.steps]


class Tables:
    """Watches the database of a run as another process would."""

    def __init__(self, computer: Computer, database: Path, run_dir: Path, problems: list[str]) -> None:
        self._computer, self._database, self._run_dir, self._problems = computer, database, run_dir, problems
        self._connection: sqlite3.Connection | None = None
        self._commits = 0
        self._board: Mapping[str, Any] = {}
        self._known = False
        """Whether the board has been read since the start, or since a loss of power, which may have reverted it."""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._board, self._known = None, {}, False

    def check(self) -> None:
        """Checks the board after a commit: its versions increase, and a version is complete once it is published."""
        if self._commits == self._computer.commits:
            return
        self._commits = self._computer.commits
        if self._connection is None:
            self._connection = sqlite3.connect(self._database)
        tables = self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'trivium_boards'").fetchone()
        rows = self._connection.execute("SELECT board FROM trivium_boards").fetchall() if tables else []
        for (text,) in rows:
            before, self._board = self._board, json.loads(text)
            if self._known:
                self._compare(before, self._board)
            self._known = True

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        if before.get("incarnation") != now.get("incarnation"):
            before = {}
        newest, earlier = now.get("versions", [])[-1:], before.get("versions", [])[-1:]
        if newest == earlier:
            return
        if newest < earlier:
            self._problems.append(f"version {newest} is published after {earlier}")
        if newest and not (self._run_dir / "sync" / f"version-{newest[0]:06d}" / "manifest.json").is_file():
            self._problems.append(f"version {newest[0]} is published before it is complete")

    def check_end(self) -> None:
        """Checks the rows after the end of the run."""
        with closing(sqlite3.connect(self._database)) as connection:
            dead = dead_explorers(self._board)
            leased = connection.execute("SELECT slot, owner FROM trivium_slots WHERE state = 'leased'").fetchall()
        left = [f"{slot} of {owner}" for slot, owner in leased if owner in dead]
        if left:
            self._problems.append(f"leases of dead explorers are left: {left}")
