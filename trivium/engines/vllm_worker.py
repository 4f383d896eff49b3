"""What runs in vLLM's worker processes: they adopt weights from files, so nothing is pickled on the way, and end with
the process that they work for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from trivium.engines.vllm_process import end_with_owner

end_with_owner()  # from the start on: vLLM by itself goes on for ever, with all its memory


class TriviumWorker:
    """Mixed into vLLM's worker class (its `worker_extension_cls`)."""

    add_lora: Any
    """Of vLLM's worker."""
    model_runner: Any
    """Of vLLM's worker."""

    def adopt_adapter(self, directory: str) -> None:
        """Puts an adapter in the place of the last one, for what is in flight as well. Raises ValueError where vLLM
        would leave out layers that it has."""
        self.add_lora(LoRARequest("policy", 1, directory, load_inplace=True))
        manager = self.model_runner.lora_manager._adapter_manager
        if left := manager.get_adapter(1).loras.keys() - manager.modules.keys():
            raise ValueError(f"this vLLM adds no adapter to {min(left)} ({len(left)} layers); use push: merged")


@dataclass
class NoRendezvous(WeightTransferInitInfo):
    """Files need none."""


@dataclass
class FromFiles(WeightTransferUpdateInfo):
    """What `update_weights` is told."""

    paths: list[str]
    """Safetensors files, under the names of the model's own."""


class FileTransfer(WeightTransferEngine[NoRendezvous, FromFiles]):
    """Reads weights from files that this process sees, into the layout of its kernels: one tensor at a time, of which
    it keeps its part."""

    init_info_cls = NoRendezvous
    update_info_cls = FromFiles

    def init_transfer_engine(self, init_info: NoRendezvous) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Lets each layer be laid out for its kernels once its weights are there."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Reads the files. Unlike the base's, it does not wait for a device where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FromFiles) -> None:
        """Reads the files."""

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            for path in update_info.paths:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  (not a mapping)
                        yield name, file.get_tensor(name)

        self.model.load_weights(named())

    def finish_weight_update(self) -> None:
        """Has the kernels use the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # On the CPU an output layer multiplies with a packed copy of its weights. vLLM packs a layer again when its
            # own weights came; one that is tied to the table has none.
            if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to do."""


WeightTransferEngineFactory.register_engine("trivium", FileTransfer)
