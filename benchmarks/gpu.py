"""All measurements of a machine with a GPU, in parts of at most nine minutes, and one JSON file with their figures.

    make gpu                                    on a machine with a GPU and no network
    make gpu DEVICE=cpu                         small shapes, which show that the parts run; their figures mean nothing
    python benchmarks/gpu.py --parts train decode --json gpu.json
    python benchmarks/gpu.py --tables gpu.json  the figures as Markdown tables

Each part is a process. The file is written again after each of them, so an interrupted call keeps the finished parts,
and a later call with other parts adds to the file. A failed part does not stop the others; the call then exits with 1.
The packages that Trivium needs beside torch and transformers are listed in `tools/gpu_wheels.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import trivium
from trivium.planning.machine import host_memory
from trivium.training.device import processor_name

ROOT = Path(__file__).parents[1]
LIMIT_S = 540.0
PACKAGES = ("torch", "transformers", "triton", "vllm", "flash-attn", "bitsandbytes", "peft", "numpy")

TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m"]
TINY = ["--shape", "tiny", "--device", "cpu"]
TINY_HYBRID = ["--shape", "tiny-hybrid", "--device", "cpu"]
PARTS: dict[str, dict[str, list[str]]] = {
    "tests": {
        "cuda": [*TESTS, "gpu", "tests"],
        "cpu": [*TESTS, "gpu", "tests/unit/models/test_quantized.py", "tests/e2e/test_gpu.py"],
    },
    "train": {
        "cuda": ["benchmarks/gpu_train.py", "--turns", "1"],
        "cpu": ["benchmarks/gpu_train.py", *TINY, "--tokens", "64", "--batch", "256", "--turns", "1", "--steps", "1"],
    },
    "train_lora": {
        "cuda": ["benchmarks/gpu_train.py", "--shape", "qwen-8b", "--lora", "16", "--tokens", "2048", "--turns", "1"],
        "cpu": ["benchmarks/gpu_train.py", *TINY, "--lora", "4", "--tokens", "64", "--batch", "256", "--turns", "1"],
    },
    "decode": {
        "cuda": ["benchmarks/gpu_decode.py", "--repeat", "1"],
        "cpu": ["benchmarks/gpu_decode.py", *TINY, "--rows", "2", "--prompt", "8", "--new", "4", "--repeat", "1"],
    },
    "train_hybrid": {
        "cuda": ["benchmarks/gpu_train.py", "--shape", "hybrid-2b", "--tokens", "2048", "--turns", "1"],
        "cpu": ["benchmarks/gpu_train.py", *TINY_HYBRID, "--tokens", "64", "--batch", "256", "--turns", "1"],
    },
    "decode_hybrid": {
        "cuda": ["benchmarks/gpu_decode.py", "--shape", "hybrid-2b", "--rows", "8", "64", "--repeat", "1"],
        "cpu": [
            "benchmarks/gpu_decode.py",
            *TINY_HYBRID,
            "--rows",
            "2",
            "--prompt",
            "8",
            "--new",
            "4",
            "--repeat",
            "1",
        ],
    },
    "prefix": {
        "cuda": ["benchmarks/prefix.py", "--device", "cuda", "--shape", "qwen-1.5b", "--repeat", "2"],
        "cpu": ["benchmarks/prefix.py", *TINY, "--repeat", "1", "--cases", "1"],
    },
    "weights": {
        "cuda": ["benchmarks/weights.py", "--device", "cuda", "--gigabytes", "3"],
        "cpu": ["benchmarks/weights.py", "--gigabytes", "0.05", "--repeats", "1"],
    },
}
"""The arguments of Python for each part, by device."""
if find_spec("vllm") is not None:
    PARTS["vllm"] = {device: [*TESTS, "vllm", "tests/e2e/test_vllm.py"] for device in ("cuda", "cpu")}


def described() -> dict[str, Any]:
    """The machine, and the versions of what computes on it."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    held = [torch.cuda.get_device_properties(gpu) for gpu in gpus]
    known = {each.metadata["Name"]: each.version for each in distributions()}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "gpus": [{"name": gpu.name, "gib": round(gpu.total_memory / 2**30, 1)} for gpu in held],
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "host_gib": round(host_memory() / 2**30),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": {name: known[name] for name in PACKAGES if name in known},
        "commit": commit.stdout.strip() or "unknown",
    }


def described_package(folder: Path) -> Path:
    """A folder with Trivium's name and version, as pip writes them: it is not installed on a machine without pip."""
    written = folder / f"trivium-{trivium.__version__}.dist-info" / "METADATA"
    written.parent.mkdir()
    written.write_text(f"Metadata-Version: 2.1\nName: trivium\nVersion: {trivium.__version__}\n")
    return folder


def run(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs one part: its exit code (None: it took longer than the limit), seconds, figures and last lines. `folder` is
    on the path of its modules."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    began, code = time.monotonic(), None
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children too, which hold the pipe
        output, _ = process.communicate()
    lines = output.splitlines()
    figures = [json.loads(line)["figure"] for line in lines if line.startswith('{"figure"')]
    shown = [line for line in lines if not line.startswith('{"figure"')]
    print("\n".join(shown), flush=True)
    seconds = round(time.monotonic() - began, 1)
    return {
        "command": " ".join(arguments),
        "exit_code": code,
        "seconds": seconds,
        "figures": figures,
        "end": shown[-30:],
    }


def tables(parts: Mapping[str, Any]) -> str:
    """The figures of each part as a Markdown table."""
    text = ""
    for name, part in parts.items():
        if rows := part["figures"]:
            columns = list(rows[0])
            lines = [columns, ["---"] * len(columns), *([_shown(row[each]) for each in columns] for row in rows)]
            text += f"\n{name}: `{part['command']}`\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text


def _shown(value: object) -> str:
    return (
        f"{value:,.0f}"
        if isinstance(value, float) and value >= 100
        else f"{value:.3g}"
        if isinstance(value, float)
        else str(value)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--tables", type=Path, metavar="JSON", help="print the figures of a file, and measure nothing")
    args = parser.parse_args()
    if args.tables is not None:
        print(tables(json.loads(args.tables.read_text())["parts"]), end="")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "asked: a GPU\nfound: torch finds none\ndo: run it on a machine with one, or with DEVICE=cpu",
            file=sys.stderr,
        )
        return 2
    machine = described()
    done = json.loads(args.json.read_text()) if args.json.is_file() else {}
    # Figures of another machine, commit or device are dropped.
    same = machine["commit"] != "unknown" and (done.get("machine"), done.get("device")) == (machine, args.device)
    parts = done["parts"] if same else {}
    with tempfile.TemporaryDirectory() as folder:
        package = described_package(Path(folder))
        for name in args.parts:
            print(f"--- {name}", flush=True)
            parts[name] = run(PARTS[name][args.device], package)
            args.json.write_text(json.dumps({"machine": machine, "device": args.device, "parts": parts}, indent=1))
    failed = {name: part["exit_code"] for name, part in parts.items() if part["exit_code"] != 0}
    for name, code in failed.items():
        print(
            f"FAILED: {name} ({f'no end after {LIMIT_S:.0f} s' if code is None else f'exit code {code}'})",
            file=sys.stderr,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
