"""`python -m trivium.frontdoors.verl a.b=c ...`: the command line of verl's `main_ppo`, with its overrides.

Overrides (`a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`) have values in YAML, and are laid over verl's defaults or the file of
`--config-path DIR --config-name NAME`. docs/ray-ppo-trainer.md says what becomes of every key.
Exit codes: 0 finished, 1 failed, 2 invalid config or arguments.
"""

from __future__ import annotations

import sys

import typer

from trivium.cli import Outcome, show
from trivium.frontdoors.verl.main_ppo import config_of, run_ppo
from trivium.runtime.main_loop import exit_without_threads


def main() -> int:
    """Trains and returns the exit code."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        typer.echo(__doc__)
        return 0
    try:
        with Outcome(debug=False):
            show(run_ppo(config_of(sys.argv[1:])))
    except typer.Exit as left:
        return left.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    # A thread of a reward function that hangs would keep the process after its result.
    exit_without_threads(code)
    sys.exit(code)
