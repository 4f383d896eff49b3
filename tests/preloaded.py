"""What the fork server of `processes` does before it forks: imports, and caches that every run would fill again.

No thread may start here: what is forked would miss it.
"""

# ruff: noqa: E402, F401

import gc
import os
from pathlib import Path

gc.disable()  # imports leave few cycles behind

import numpy.ma
import peft
import pytest
import torch
import torch.distributed.fsdp
import transformers.models.auto.modeling_auto
import transformers.models.auto.processing_auto
import transformers.models.auto.tokenization_auto
import transformers.models.qwen3.modeling_qwen3
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import trivium.buffers.memory
import trivium.buffers.sql.buffer
import trivium.cli
import trivium.engines.process_pool
import trivium.engines.torch.engine
import trivium.inspection.report
import trivium.models.weights.stream
import trivium.monitors.jsonl
import trivium.runtime.launch
import trivium.runtime.train_process_main
import trivium.sync.memory
import trivium.text.tiny
import trivium.training.distributed.torchrun
import trivium.training.engine
from tests import float64
from trivium.config import load_config
from trivium.foundation.concurrency import usable_cores
from trivium.runtime.launch import ready
from trivium.training.flops import measured_peak

float64.install()
get_checkpoint_conversion_mapping("qwen3")
ready(load_config(Path(__file__).parent / "e2e" / "tiny.yaml"))  # compiles templates and the checks of sections, too
for threads in {1, usable_cores()}:
    measured_peak(torch.device("cpu"), torch.float32, threads)
assert len(os.listdir("/proc/self/task")) == 1, "the fork server has threads"
gc.freeze()  # what is forked shares these pages
gc.enable()
