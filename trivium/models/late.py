"""Large packages that are imported when one of their names is first used.

Reading and checking a config imports the modules of losses and advantages, and the sections of engines. It computes
nothing, and torch takes longer to import than the rest of the check.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch


class _Late:
    """Stands for a module: `from trivium.models.late import torch` instead of `import torch`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if self._module is None:  # an import that does nothing takes longer than many an operation on small tensors
            self._module = importlib.import_module(self._name)
        return getattr(self._module, name)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """A copy is the module itself. Without this, copying would look up `__getattr__`'s own attributes."""
        return importlib.import_module, (self._name,)


if not TYPE_CHECKING:
    torch = _Late("torch")
