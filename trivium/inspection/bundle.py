"""A recorded train step as one zip file, for a replay on another machine.

    config.yaml, bundle.json   the config with paths of the bundle; step, task, package versions, both machines, report
    base-model/, checkpoints/  the run's initial model, the checkpoint that the replay begins from
    rollouts/, tokens/         the groups of the steps since that checkpoint, their media, the computed columns
    steps.jsonl, metrics.jsonl, ...
    code/                      the user's files named in the config, and the files beside them that they import

An extracted bundle is a run directory. A replay of it runs the code in `code/`.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trivium.buffers.media import MediaFiles
from trivium.buffers.step_log import STEPS
from trivium.buffers.step_tokens import tokens_file
from trivium.checkpoint.atomic import writing
from trivium.config import ModelConfig
from trivium.config.merging import is_mapping
from trivium.config.saved import as_yaml
from trivium.errors import RunDirError
from trivium.inspection.replay_stage import replayed_stage, taken_by
from trivium.inspection.rollouts import read_groups
from trivium.inspection.run import RecordedRun
from trivium.registry import resolve
from trivium.runtime.build import build_schedule
from trivium.runtime.stage_models import stage_ends
from trivium.schedule import Schedule
from trivium.training.device import described_machine
from trivium.types import Group, capabilities_of

_ABOUT = "bundle.json"
_CODE = re.compile(r"(/.+\.py):([\w.]+)")
"""A class or function in a file of the user, as the resolved config names it."""
_WHOLE = ("plan.yaml", "summary.json", "changes.jsonl", "metrics.jsonl", STEPS)
"""Files of the run directory that are copied whole, if they exist."""


@dataclass(frozen=True)
class Opened:
    """A run directory to replay, and the step and task that its bundle was made for."""

    path: Path
    step: int | None = None
    task: str | None = None


@contextmanager
def opened(source: Path) -> Generator[Opened]:
    """Yields the run directory or, for a bundle, a temporary directory with its content. Raises RunDirError if the file
    is not a bundle."""
    if not source.is_file():
        yield Opened(source)
        return
    with TemporaryDirectory(prefix="trivium-bundle-") as directory:
        try:
            with zipfile.ZipFile(source) as archive:
                archive.extractall(directory)
            about = json.loads((Path(directory) / _ABOUT).read_text(encoding="utf-8"))
            step, task = about["step"], about["task"]
        except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise RunDirError(
                f"the bundle {source}", found, "name a file that `trivium replay --bundle` wrote"
            ) from error
        yield Opened(Path(directory), step, task)


def write_bundle(run_dir: Path, step: int, task: str | None, report: str, out: Path) -> None:
    """Writes a bundle with the files that a replay of the step needs. Raises RunDirError if the run no longer has
    them."""
    run = RecordedRun.open(run_dir)
    with TemporaryDirectory() as scratch, writing(out), zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        writer = _Writer(archive)
        stage = replayed_stage(run, step, Path(scratch), ())
        schedule = build_schedule(stage)
        groups = _groups(run, step, schedule, writer)
        versions = {int(v) for group in groups for turn in group.turns() for v in turn.policy_version}
        # A replay may need the weights of every version that sampled the groups, so it begins before the oldest one.
        base = run.checkpoint_before(min({*versions, step - 1}), stage.first_version)
        began = stage.first_version if base is None else base.step
        # A strategy that replays groups may take groups of any earlier step.
        for earlier in range(stage.first_version + 1 if schedule.stored_per_step else began + 1, step):
            _groups(run, earlier, schedule, writer)
        if base is not None:
            writer.tree(base.path, f"checkpoints/{base.path.name}")
        for end in stage_ends(run.store)[: stage.number]:  # weights and reward models of earlier stages
            path = run.store.open(end).path
            writer.tree(path, f"checkpoints/{path.name}")
        writer.tree(run.base_model(), "base-model")
        for path in (*(run.path / name for name in _WHOLE), tokens_file(run.path, step)):
            writer.file(path, str(path.relative_to(run.path)))
        values = writer.with_code(run.config.model_dump(mode="json"))
        model = run.config.model
        if isinstance(model, ModelConfig) and model.has_random_weights:  # whose learning rate stays
            values["train"] = run.config.train.for_model(model).model_dump(mode="json")
        values["model"] = {"kind": "hf", "path": "base-model"}
        writer.text("config.yaml", as_yaml(values))
        about = {
            "step": step,
            "task": task,
            "not_included": writer.absent,
            "machine": dict(run.record(step).machine),
            "machine_of_the_bundle": described_machine(stage.config, stage.threads),
            "packages": dict(sorted((each.metadata["Name"], each.version) for each in distributions())),
            "report": report.splitlines(),
        }
        writer.text(_ABOUT, json.dumps(about, indent=1))


def _groups(run: RecordedRun, step: int, schedule: Schedule, writer: _Writer) -> list[Group]:
    """Adds the groups that a step took, and their media, to the bundle. Returns the groups; empty if explorers do not
    fill the buffer."""
    config = run.stage_config(step)
    if not capabilities_of(resolve("buffers", config.buffer.kind)).explored:
        writer.absent.append("the rows of buffer.path and tasks: put them where config.yaml says")
        return []
    taken = [each for each in taken_by(run, step) if each.slot >= 0]
    groups = read_groups(run.path, schedule.stage, taken)
    for planned in sorted({each.planned_step for each in taken}):
        name = f"rollouts/stage-{schedule.stage}/step-{planned:06d}.msgpack"
        writer.file(run.path / name, name)
    media = MediaFiles.beside(run.path / "rollouts").folder
    for group in groups:
        messages = (item for message in group.task.prompt for item in message.media)
        for item in (*messages, *(item for turn in group.turns() for item in turn.media)):
            writer.file(media / item.sha256, f"rollouts/{media.name}/{item.sha256}")
    return groups


@dataclass
class _Writer:
    """Adds files to the zip file of a bundle."""

    archive: zipfile.ZipFile
    absent: list[str] = field(default_factory=list[str])
    """Descriptions of the objects that the bundle refers to but does not contain."""
    code_folders: dict[Path, str] = field(default_factory=dict[Path, str])
    """By directory of the user's code: its folder in the bundle."""

    def text(self, name: str, text: str) -> None:
        self.archive.writestr(name, text)

    def file(self, path: Path, name: str) -> None:
        """Adds a file once, if it exists."""
        if path.is_file() and name not in self.archive.namelist():
            # These formats do not become smaller, and deflating weights is slow.
            packed = path.suffix in (".safetensors", ".png", ".jpg")
            self.archive.write(path, name, zipfile.ZIP_STORED if packed else None)

    def tree(self, directory: Path, name: str) -> None:
        for path in sorted(directory.rglob("*")):
            self.file(path, f"{name}/{path.relative_to(directory)}")

    def with_code(self, values: Any) -> Any:
        """Replaces each `/path/file.py:Name` in the values by the path of a copy, which it adds to the bundle. Notes
        modules and other paths, which it leaves out, in `absent`."""
        if is_mapping(values):
            return {key: self.with_code(value) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return [self.with_code(value) for value in values]
        match = _CODE.fullmatch(values) if isinstance(values, str) else None
        if match is None or not Path(match[1]).is_file():
            if isinstance(values, str) and re.fullmatch(r"[\w.]+:\w+", values):
                self.absent.append(f"the module of {values}")
            elif isinstance(values, str) and values.startswith("/"):
                self.absent.append(values)
            return values
        path = Path(match[1])
        folder = self._code_folder(path.parent)
        for each in _with_siblings(path):
            self.file(each, f"{folder}/{each.name}")
        return f"{folder}/{path.name}:{match[2]}"

    def _code_folder(self, directory: Path) -> str:
        """Returns the folder in the bundle: the directory's own name, numbered if another directory has that folder."""
        name = folder = f"code/{directory.name or 'root'}"
        others = {each for path, each in self.code_folders.items() if path != directory}
        number = 1
        while folder in others:
            number += 1
            folder = f"{name}-{number}"
        return self.code_folders.setdefault(directory, folder)


def _with_siblings(path: Path) -> list[Path]:
    """Returns a Python file and the files beside it that it imports, directly or indirectly."""
    files, waiting = list[Path](), [path]
    while waiting:
        file = waiting.pop()
        if file not in files:
            files.append(file)
            waiting += [beside for name in _imports(file) if (beside := path.with_name(f"{name}.py")).is_file()]
    return files


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
