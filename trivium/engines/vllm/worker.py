"""Extension of vLLM's worker processes: they load weights from files, without pickling, and end with their owner."""

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

from trivium.engines.vllm.process import end_with_owner

end_with_owner()  # at import: an orphaned vLLM worker would otherwise never exit or free its memory


class TriviumWorker:
    """Mixed into vLLM's worker class (its `worker_extension_cls`)."""

    add_lora: Any
    """Provided by vLLM's worker."""
    model_runner: Any
    """Provided by vLLM's worker."""

    def adopt_adapter(self, directory: str) -> None:
        """Replaces the adapter, also for completions in flight. Raises ValueError if vLLM would ignore some of its
        layers."""
        self.add_lora(LoRARequest("policy", 1, directory, load_inplace=True))
        manager = self.model_runner.lora_manager._adapter_manager
        if ignored := manager.get_adapter(1).loras.keys() - manager.modules.keys():
            raise ValueError(f"this vLLM adds no adapter to {min(ignored)} ({len(ignored)} layers); use push: merged")


@dataclass
class NoRendezvous(WeightTransferInitInfo):
    """Empty: files need no rendezvous."""


@dataclass
class FromFiles(WeightTransferUpdateInfo):
    """The argument of `update_weights`."""

    paths: list[str]
    """Safetensors files with the tensor names of the model directory."""


class FileTransfer(WeightTransferEngine[NoRendezvous, FromFiles]):
    """Reads weights from files, one tensor at a time, into the layout of its kernels. Keeps only the shard of this
    worker."""

    init_info_cls = NoRendezvous
    update_info_cls = FromFiles

    def init_transfer_engine(self, init_info: NoRendezvous) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Prepares each layer to convert to its kernels' layout once its weights are loaded."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Reads the files. Unlike the base class, it synchronizes only if there is an accelerator."""
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
        """Makes the kernels use the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # On the CPU, an output layer multiplies with a packed copy of its weights. vLLM repacks a layer when its
            # own weights are loaded, but a tied output layer has none.
            if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to do."""


WeightTransferEngineFactory.register_engine("trivium", FileTransfer)
