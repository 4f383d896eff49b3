"""Cost of an update through `run.mode: tinker` against the train engine's own.

    python benchmarks/tinker.py [--model DIR] [--sequences 8] [--length 256] [--repeats 5]

Both train one adapter each on the same base weights with the same data: `forward_backward` and `optim_step` as HTTP
requests whose results are fetched, and `TrainEngine.update` on the batch. They alternate. Printed are the processor
seconds of the whole process, the least of all repeats, and their ratio, at most 1.1. The requests are written before.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from trivium.config import build, config_from_mapping
from trivium.runtime.adapter_service import ServiceLog, open_service
from trivium.runtime.stage import Stage
from trivium.serving.tinker.losses import loss_batch
from trivium.serving.tinker.routes import TinkerServer
from trivium.serving.tinker.verbs import Lora
from trivium.serving.tinker.wire import write_message
from trivium.types import IntArray

BODY_BYTES = 2**26


def message(model: str, number: int, rows: Sequence[IntArray]) -> bytes:
    """`forward_backward` on the next tokens of rows."""
    data: list[bytes] = []
    for row in rows:
        chunk = write_message((1, write_message((1, row[:-1].astype("<i4").tobytes()))))
        ones = np.ones(len(row) - 1, "<f4")
        tensors = {"target_tokens": (row[1:].astype("<i8"), 2), "weights": (ones, 1)}
        inputs = (
            write_message((1, key), (2, write_message((1, array.tobytes()), (3, kind))))
            for key, (array, kind) in tensors.items()
        )
        data.append(write_message((1, chunk), *((2, each) for each in inputs)))
    return write_message((1, model), (2, number), *((3, each) for each in data), (4, "cross_entropy"))


async def measure(stage: Stage, sequences: int, length: int, repeats: int) -> tuple[float, float]:
    """(processor seconds of an update by requests, by the engine itself)."""
    service = open_service(stage, ServiceLog(stage))
    engine = service.adapters.new(Lora(rank=16), 0)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, service.adapters.vocabulary, length + 1) for _ in range(sequences)]
    ones = np.ones(length, np.float32)
    batch, loss = loss_batch(
        "cross_entropy", {}, [(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": ones}) for row in rows]
    )
    transport = httpx.ASGITransport(TinkerServer(service, None, BODY_BYTES).app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here/api/v1", timeout=600.0) as http:

        async def sent(path: str, body: Any) -> dict[str, Any]:
            response = await http.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))
            return response.raise_for_status().json()

        async def fetched(answer: dict[str, Any]) -> httpx.Response:
            return (await http.post("retrieve_future", json=answer)).raise_for_status()

        session = (await sent("create_session", {}))["session_id"]
        base, lora = service.names[0], {"rank": 16, "seed": 0}
        form = {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": lora}
        model = (await fetched(await sent("create_model", form))).json()["model_id"]
        bodies = [message(model, 2 * number + 1, rows) for number in range(repeats + 1)]
        seconds: tuple[list[float], list[float]] = [], []
        for number, body in enumerate(bodies):
            before = time.process_time()
            step = {"model_id": model, "seq_id": 2 * number + 2, "adam_params": {}}
            for answer in [await sent("forward_backward", body), await sent("optim_step", step)]:
                await fetched(answer)
            between = time.process_time()
            await asyncio.to_thread(engine.update, "policy", batch, loss)
            for each, spent in zip(seconds, (between - before, time.process_time() - between), strict=True):
                each.append(spent)
    await service.close()
    by_requests, own = (min(each[1:]) for each in seconds)  # the first one is not counted
    return by_requests, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; without it, a tiny model")
    for name, value in (("sequences", 8), ("length", 256), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    tiny = {"kind": "tiny", "hidden": 128, "layers": 4, "max_position": 2048}
    with tempfile.TemporaryDirectory() as directory:
        sections: dict[str, Any] = {
            "run": {"dir": directory, "mode": "tinker"},
            "model": tiny if options.model is None else {"kind": "hf", "path": str(options.model)},
            "tasks": {"train": {"kind": "served"}},
            "cluster": {"threads": 1},
            "monitors": [],
        }
        config = config_from_mapping(sections, None)
        model_dir = build("models", config.model, seed=0).materialize(Path(directory) / "model")
        stage = Stage(config, 0, 0, True, Path(directory), model_dir)
        by_requests, own = asyncio.run(measure(stage, options.sequences, options.length, options.repeats))
    tokens = options.sequences * options.length
    print(f"{tokens} tokens: {by_requests:.3f} s by requests, {own:.3f} s by the engine: ratio {by_requests / own:.3f}")


if __name__ == "__main__":
    main()
