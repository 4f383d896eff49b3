"""The values that pages and reports show of recorded rollouts: the groups of a train step, and a rollout token by
token.

    recorded = RecordedGroups(run_dir)
    for place in recorded.of_step(12):
        row = group_row(recorded.group(place), recorded.advantages(12))
        members = [rollout_values(recorded.rollout(place, index, 12), pieces) for index in range(row["size"])]

Values are JSON values: NaN is None. Data are read on request: a page of groups reads only the records of these groups,
not whole files.

Legend: L tokens of a sequence.
"""

from __future__ import annotations

import logging
import mmap
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from trivium.buffers.journal import read_record
from trivium.buffers.rollouts import Columns, Rollout, TokenSequence, kept_means, kept_steps, kept_values
from trivium.buffers.step_log import STEPS, read_steps
from trivium.errors import RunDirError, TriviumError
from trivium.runtime.recorded_run import RecordedRun
from trivium.types import EXPERT_VERSION, AnyArray, Group, Media, Trajectory

_log = logging.getLogger("trivium")
_HEADER = struct.Struct("<II")
_PEEK = 96
"""Bytes of a record that contain its slot and its attempt."""
_PROMPT = 400
"""Characters of a prompt in a row."""
Means = Mapping[tuple[int, int, int], float]
"""(slot, attempt, index) -> a number of each rollout."""
Estimates = Mapping[tuple[int, int, int], tuple[Columns, ...]]
"""(slot, attempt, index) -> the advantages and the mask of trained tokens of each of a rollout's sequences."""


TITLES = {
    "advantages": "advantage",
    "log_prob": "log-prob, engine",
    "old_log_prob": "log-prob, trainer",
    "ref_log_prob": "log-prob, reference",
    "mismatch": "trainer / engine",
    "update_log_prob": "log-prob at the update",
    "ratio": "ratio",
    "clipped": "clipped",
    "update_entropy": "entropy",
    "returns": "return",
    "values": "value",
    "response_mask": "mask",
    "policy_version": "policy version",
}
"""The values of a token, in the order in which pages offer them; the other columns of a sequence follow by name."""


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a recorded group."""

    stage: int
    planned_step: int | None
    path: Path
    offset: int
    slot: int
    attempt: int
    checksum: int
    takers: tuple[int, ...] = ()
    """The train steps that took it."""


class RecordedGroups:
    """The recorded groups of a run directory, by train step. A run may be in progress."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def steps(self) -> list[int]:
        """Returns the train steps that took groups or for which groups were planned, in order."""
        planned = {step for _, step, _ in self._journals() if step is not None}
        return sorted(planned | set(_taken(*_stamp(self.run_dir))))

    def of_step(self, step: int) -> list[Place]:
        """Returns the groups that a train step took, in the order of its batch, followed by those planned for it that
        no step took.

        Raises RunDirError if the step has no groups.
        """
        stage, wanted = _taken(*_stamp(self.run_dir)).get(step, (None, ()))
        planned = {(stage, each) for _, _, each in wanted}
        places: dict[tuple[int, int, int], Place] = {}
        for place in self._recorded(lambda its_stage, number: number == step or (its_stage, number) in planned):
            if step in place.takers or (place.planned_step == step and not place.takers):
                places[place.stage, place.slot, place.attempt] = place
        order = {(stage, slot, attempt): n for n, (slot, attempt, _) in enumerate(wanted)}
        chosen = sorted(places.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
        if not chosen:
            raise RunDirError(f"the rollouts of step {step} of {self.run_dir}", "none", "choose another step")
        return [place for _, place in chosen]

    def of_run(self) -> Iterator[Place]:
        """Yields every group that a train step took or that is planned for one, file by file."""
        return self._recorded(lambda _, number: number is not None)

    def _recorded(self, wanted: Callable[[int, int | None], bool]) -> Iterator[Place]:
        """Yields the groups in the journals of these stages and steps."""
        takers = _takers(*_stamp(self.run_dir))
        for stage, number, path in self._journals():
            for offset, slot, attempt, checksum in _records(path, *_version(path)) if wanted(stage, number) else ():
                by = takers.get((stage, slot, attempt), ())
                yield Place(stage, number, path, offset, slot, attempt, checksum, by)

    def group(self, place: Place) -> Group:
        """Reads a recorded group; its media contain only their hashes."""
        return read_record(place.path, place.offset, media=False)

    def advantages(self, step: int, places: Iterable[Place] | None = None) -> Means:
        """Returns the mean advantage of each rollout that a train step trained on, or only of those in these groups.
        Empty if the run did not keep the advantages and the rewards do not determine them."""
        groups = None if places is None else {(place.slot, place.attempt) for place in places}
        kept = kept_means(self.run_dir, step, "advantages", groups)
        estimated = {} if kept else self._estimated(step)
        return kept or {it: _mean(parts) for it, parts in estimated.items() if groups is None or it[:2] in groups}

    def _estimated(self, step: int) -> Estimates:
        """Returns the advantages that follow from the rewards of the groups that a step took."""
        if (self.run_dir / "tokens" / f"step-{step:06d}.safetensors").is_file():
            return {}
        return _estimated(*_stamp(self.run_dir), step)

    def rollout(self, place: Place, group: Group, trajectory: Trajectory, step: int | None = None) -> Rollout:
        """Returns a rollout of a group with the values that a train step computed for it. With None, or a step that did
        not take the group, uses every step that took it."""
        steps = place.takers if step is None or step not in place.takers else (step,)
        kept = {} if trajectory is group.greedy else dict(self._columns(group, trajectory, steps))
        for taker in steps if trajectory is not group.greedy else ():
            estimated = self._estimated(taker).get((group.slot, group.attempt, trajectory.index), ())
            kept[taker] = kept[taker] or estimated
        return Rollout(place.stage, place.planned_step, group, trajectory, kept, place.takers)

    def place(self, step: int, stage: int, slot: int, attempt: int) -> Place:
        """Returns a group of a step. Raises RunDirError if the step does not have it."""
        wanted = stage, slot, attempt
        for place in self.of_step(step):
            if (place.stage, place.slot, place.attempt) == wanted:
                return place
        raise RunDirError(
            f"the group of slot {slot}, attempt {attempt}, of stage {stage} in step {step} of {self.run_dir}",
            "no such group",
            "choose one of the step's list",
        )

    def _columns(self, group: Group, trajectory: Trajectory, steps: Sequence[int]) -> Any:
        return ((step, kept_values(self.run_dir, step, group, trajectory.index)) for step in steps)

    def _journals(self) -> list[tuple[int, int | None, Path]]:
        """Returns (stage, planned step, file), in order."""
        files: list[tuple[int, int | None, Path]] = []
        for path in sorted((self.run_dir / "rollouts").glob("stage-*/*.msgpack")):
            number = path.stem.removeprefix("step-")
            files.append(
                (int(path.parent.name.removeprefix("stage-")), int(number) if number.isdecimal() else None, path)
            )
        return files


def _version(path: Path) -> tuple[int, int]:
    """Returns a stamp that changes with the content of the file."""
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _stamp(run_dir: Path) -> tuple[Path, tuple[int, int]]:
    path = run_dir / STEPS
    return run_dir, _version(path) if path.is_file() else (0, 0)


@lru_cache(maxsize=16)
def _taken(run_dir: Path, stamp: tuple[int, int]) -> dict[int, tuple[int, list[tuple[int, int, int]]]]:
    """Returns train step -> (stage, (slot, attempt, planned step) of each group that it took). `stamp` changes with
    steps.jsonl."""
    records = read_steps(run_dir) if stamp[0] else {}
    taken = {step: (each.stage, each.taken) for step, each in records.items() if each.taken}
    taken = taken or kept_steps(run_dir)
    return {
        step: (stage, [(each.slot, each.attempt, each.planned_step) for each in groups])
        for step, (stage, groups) in taken.items()
    }


@lru_cache(maxsize=16)
def _takers(run_dir: Path, stamp: tuple[int, int]) -> Mapping[tuple[int, int, int], tuple[int, ...]]:
    """Returns (stage, slot, attempt) -> the train steps that took the group, in order."""
    takers: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for step, (stage, groups) in _taken(run_dir, stamp).items():
        for slot, attempt, _ in groups:
            takers[stage, slot, attempt] = (*takers.get((stage, slot, attempt), ()), step)
    return takers


@lru_cache(maxsize=4)
def _estimated(run_dir: Path, stamp: tuple[int, int], step: int) -> Estimates:
    """Estimates the advantages of a step with the run's own algorithm, from the rewards. Empty if the estimator needs
    more: scores of a model, state from earlier steps, or groups that are not recorded."""
    from trivium.runtime.build import algorithm_of

    recorded, (_, taken) = RecordedGroups(run_dir), _taken(run_dir, stamp).get(step, (0, []))
    places = [place for place in recorded.of_step(step) if step in place.takers]
    try:
        algorithm = algorithm_of(RecordedRun.open(run_dir).stage_config(step))
        derived = algorithm.estimator is not None and not algorithm.advantage_needs and not algorithm.state()
        if not derived or len(places) < sum(slot >= 0 for slot, _, _ in taken):
            return {}
        groups, _ = algorithm.filter([recorded.group(place) for place in places])
        batch, _ = algorithm.advantages(algorithm.batch(groups))
    except TriviumError as error:  # the run's own code is not on this machine, or it refuses these groups
        _log.warning("no advantages of step %d: %s", step, error)
        return {}
    by_id = {group.group_id: (group.slot, group.attempt) for group in groups}
    estimates = defaultdict[tuple[int, int, int], tuple[Columns, ...]](tuple)
    for experience, values in zip(batch.experiences, batch.columns["advantages"], strict=True):
        member = (*by_id[experience.group_id], experience.index)
        estimates[member] += ({"advantages": values, "response_mask": experience.response_mask},)
    return dict(estimates)


def _mean(parts: Sequence[Columns]) -> float:
    """Returns the mean advantage over the trained tokens of a rollout's sequences."""
    trained = np.concatenate([columns["advantages"][columns["response_mask"]] for columns in parts])
    return float(trained.sum(dtype=np.float64)) / max(1, len(trained))


@lru_cache(maxsize=4096)
def _records(path: Path, size: int, written_ns: int) -> list[tuple[int, int, int, int]]:
    """Returns (offset, slot, attempt, checksum) of every whole record of a journal file. Reads only the headers."""
    del written_ns
    if not size:
        return []
    records, offset = list[tuple[int, int, int, int]](), 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        while offset + _HEADER.size <= size:
            length, checksum = _HEADER.unpack_from(data, offset)
            start = offset + _HEADER.size
            if start + length > size:
                break
            slot, attempt = _identity(data[start : start + min(length, _PEEK)])
            records.append((offset, slot, attempt, checksum))
            offset = start + length
    return records


def _identity(beginning: bytes) -> tuple[int, int]:
    """Returns (slot, attempt) of a packed group, which are among its first entries."""
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(beginning)
    unpacker.read_map_header()
    entries: dict[str, int] = {}
    while not {"slot", "attempt"} <= entries.keys():
        name: str = unpacker.unpack()
        entries[name] = unpacker.unpack()
    return entries["slot"], entries["attempt"]


# --------------------------------------------------------------------------- a group


def group_row(place: Place, group: Group, advantages: Means) -> dict[str, Any]:
    """Returns the row of a group in a list."""
    task = group.task
    return {
        "stage": place.stage,
        "slot": group.slot,
        "attempt": group.attempt,
        "planned": place.planned_step,
        "steps": list(place.takers),
        "task": task.task_id,
        "taskset": task.taskset,
        "epoch": group.epoch,
        "dropped": group.dropped,
        "prompt": (task.prompt[-1].content if task.prompt else "")[:_PROMPT],
        "size": len(group.rollouts),
        "members": [member_row(group, each, advantages) for each in group.rollouts],
    }


def member_row(group: Group, trajectory: Trajectory, advantages: Means) -> dict[str, Any]:
    """Returns the row of a rollout in a list."""
    failure, greedy = trajectory.failure, trajectory is group.greedy
    versions = [turn.policy_version for turn in trajectory.turns if len(turn.policy_version)]
    advantage = None if greedy else advantages.get((group.slot, group.attempt, trajectory.index))
    return {
        "index": trajectory.index,
        "greedy": greedy,
        "reward": number(trajectory.reward) if failure is None else None,
        "rewards": {name: number(value) for name, value in trajectory.rewards.items()},
        "metrics": {name: number(value) for name, value in trajectory.metrics.items()},
        "advantage": None if advantage is None else number(advantage),
        "tokens": trajectory.num_tokens,
        "turns": len(trajectory.turns),
        "stop": trajectory.stop_reason.value,
        "versions": [int(min(each.min() for each in versions)), int(max(each.max() for each in versions))]
        if versions
        else [],
        "failure": None if failure is None else f"{failure.side}: {failure.kind}: {failure.message}",
    }


def number(value: float) -> float | None:
    """Replaces NaN and infinities, which JSON lacks, by None."""
    return float(value) if np.isfinite(value) else None


# --------------------------------------------------------------------------- a rollout


def rollout_values(rollout: Rollout, pieces: Callable[[Sequence[int]], list[str]]) -> dict[str, Any]:
    """Returns a rollout token by token. `pieces` returns the text of each token of a sequence.

    Each sequence has `tokens` and `text` (L), `values` by name (L numbers or None each), and `turns`: the range [start,
    stop) of each turn's own tokens, its stop reason and its reward.
    """
    group = rollout.group
    return {
        "messages": [
            {"role": message.role, "content": message.content, "media": _media(message.media)}
            for message in group.task.prompt
        ],
        "columns": dict(group.task.columns),
        "sequences": [_sequence(rollout, each, pieces) for each in rollout.sequences],
        "kept": any("returns" in columns for each in rollout.kept.values() for columns in each),
    }


def _sequence(
    rollout: Rollout, sequence: TokenSequence, pieces: Callable[[Sequence[int]], list[str]]
) -> dict[str, Any]:
    turns = rollout.trajectory.turns
    spans = [
        {
            "number": span.number,
            "start": span.start,
            "stop": span.stop,
            "stop_reason": turns[span.number].stop_reason.value,
            "reward": number(span.reward),
            "text": turns[span.number].text,
            "media": _media(turns[span.number].media),
        }
        for span in sequence.turns
    ]
    ids = sequence.tokens.tolist()
    return {"tokens": ids, "text": pieces(ids), "turns": spans, "values": token_values(sequence)}


def token_values(sequence: TokenSequence) -> dict[str, list[float | None]]:
    """Returns every value of the sequence's tokens by name; None for a token without the value."""
    sampled, trained = sequence.policy_version != EXPERT_VERSION, sequence.response_mask
    columns = {name: array for name, array in sequence.columns.items() if array.ndim == 1}
    old = columns.get("old_log_prob")
    if old is not None:
        columns["mismatch"] = np.exp(old - sequence.log_prob)
    current, before = columns.get("update_log_prob"), sequence.log_prob if old is None else old
    if current is not None:
        columns["ratio"] = np.exp(current - before)
    written = {"log_prob": _numbers(sequence.log_prob, sampled), "response_mask": [int(each) for each in trained]}
    written["policy_version"] = _numbers(sequence.policy_version, sampled)
    written |= {name: _numbers(array, trained) for name, array in columns.items()}
    order = [*TITLES]
    return dict(sorted(written.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _numbers(array: AnyArray, where: Any) -> list[float | None]:
    """Converts to JSON values, with the fewest digits that distinguish 32-bit numbers; None outside `where`, and for
    NaN."""
    if array.dtype.kind in "iub":
        return [value if here else None for value, here in zip(array.tolist(), where, strict=True)]
    there = where & np.isfinite(array)
    return [float(text) if here else None for text, here in zip(array.astype(str), there, strict=True)]


def _media(items: Sequence[Media]) -> list[dict[str, Any]]:
    """Returns media by their hashes: the page fetches the content from the run's media folder."""
    return [{"mime": item.mime, "sha256": item.sha256, "span": item.span and list(item.span)} for item in items]


def piecewise(decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], list[str]]:
    """Returns a function that decodes each token in its context. If several tokens form one character, the first one
    gets it."""

    @lru_cache(maxsize=65536)
    def after(before: int | None, token: int) -> str:
        if before is None:
            return decode([token])
        known, both = decode([before]), decode([before, token])
        return both[len(known) :] if both.startswith(known) else decode([token])

    def pieces(tokens: Sequence[int]) -> list[str]:
        texts, position = list[str](), 0
        while position < len(tokens):
            alone = after(tokens[position - 1] if position else None, tokens[position])
            ends = range(position + 2, min(position + 8, len(tokens)) + 1) if "\ufffd" in alone else ()
            joined = ((stop, text) for stop in ends if "\ufffd" not in (text := decode(tokens[position:stop])))
            stop, text = next(joined, (position + 1, alone))
            texts += [text, *[""] * (stop - position - 1)]
            position = stop
        return texts

    return pieces
