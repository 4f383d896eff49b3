"""The process of `train.own_process`: builds the train engine of a stage, and executes the calls of the run's process.

python -m trivium.runtime.train_process_main DESCRIPTOR
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import cast

from trivium.protocols import WeightChannel
from trivium.runtime.build import algorithm_of
from trivium.runtime.logs import logging_to
from trivium.runtime.main_loop import interpreter_settings
from trivium.runtime.stage import StageSpec
from trivium.runtime.train_engines import build_rank_engine
from trivium.training.distributed.data_parallel import RankVerbs
from trivium.training.distributed.train_process import serve_driver
from trivium.training.engine import TorchTrainEngine


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # a child process that inherits it would keep the driver waiting
    with ExitStack() as until_the_end, Connection(descriptor) as connection:

        def make(spec: StageSpec, channel: WeightChannel) -> RankVerbs:
            stage = spec.stage()
            until_the_end.enter_context(logging_to(stage.run_dir, "log.txt", role="trainer-rank-0"))
            until_the_end.enter_context(interpreter_settings)
            return RankVerbs(cast(TorchTrainEngine, build_rank_engine(stage, algorithm_of(stage.config), channel)))

        serve_driver(connection, make)


if __name__ == "__main__":
    main()
