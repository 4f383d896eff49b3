"""`python -m trivium.frontdoors.lightrft --pretrain MODEL --prompt_data DATA ...`: the flags of LightRFT's launcher.

Builds models, data and PPOTrainerVL as they say, and runs `fit`; `torchrun --nproc-per-node N -m
trivium.frontdoors.lightrft ...` on N ranks. A file with the flags may come first. docs/lightrft.md says what becomes of
every flag. Exit codes: 0 finished, 1 failed, 2 invalid arguments.
"""

from __future__ import annotations

import sys

import typer

from trivium.cli import Outcome
from trivium.frontdoors.lightrft.config.launch_args import read
from trivium.runtime.main_loop import exit_without_threads


def main() -> int:
    """Trains and returns the exit code."""
    if not sys.argv[1:] or {"-h", "--help"} & set(sys.argv[1:]):
        typer.echo(__doc__)
        return 0 if sys.argv[1:] else 2
    try:
        with Outcome(debug=False):
            from trivium.frontdoors.lightrft.launcher import train

            train(read(sys.argv[1:]))
    except typer.Exit as left:
        return left.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    exit_without_threads(code)
    sys.exit(code)
