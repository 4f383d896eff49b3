"""`python -m trivium.frontdoors.verl a.b=c ...`: the command line of verl's `main_ppo`, with its overrides.

Exit codes: 0 finished, 1 failed, 2 invalid config or arguments.
"""

from __future__ import annotations

import sys

import typer

from trivium.cli import Outcome, show
from trivium.frontdoors.verl.main_ppo import config_of, train
from trivium.runtime.main_loop import exit_without_threads


def main() -> int:
    """Trains; the exit code."""
    try:
        with Outcome(debug=False):
            show(train(config_of(sys.argv[1:])))
    except typer.Exit as left:
        return left.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    exit_without_threads(code)
    sys.exit(code)
