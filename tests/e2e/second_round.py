"""A rank that meets the other one twice: rank 1 dies after the first meeting, and rank 0 does not notice."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trivium.training.distributed.ranks import open_process_group

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
open_process_group("cpu", 30.0)
total = torch.ones(1)
dist.all_reduce(total)
first = folder / f"first-{rank}"
if not first.exists():
    first.touch()
    dist.barrier()
    past = folder / "past"
    if rank == 1:
        while not past.exists():  # a rank that dies in the barrier would fail rank 0, too
            time.sleep(0.01)
        os._exit(1)
    past.touch()
    threading.Event().wait(60)  # the agent ends it, when the other agent waits for a second round
(folder / f"second-{rank}").write_text(f"{int(total)} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
dist.barrier()
