"""docs/api.md: the names that users and plugin authors import, each with the first sentence of its docstring."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

from trivium import api
from trivium.foundation.registry import lazy_names

HEAD = """# Python names

Generated from the code by `make docs`. Scripts and plugins import from these five modules, and from the
[front doors](#front-doors). Everything else may move between versions.

```python
from trivium import load_config, run
from trivium.api import Message, Policy, Task
```
"""

MODULES = {
    "trivium": "Starts runs: [Python and notebooks](python.md).",
    "trivium.api": "A name is imported when it is used, so a module that takes `Message` does not load torch.",
    "trivium.algorithms": "Losses, advantages and KL estimators as functions of tensors, and the decorators for "
    "[an algorithm of your own](extend-algorithm.md). `from trivium.algorithms import presets` has the algorithms that "
    "a config names, as `presets.GRPO`.",
    "trivium.text": "Tokenizers and processors.",
    "trivium.testing": "Contract tests, to call on parts of your own.",
}
"""The public modules, and what each is for."""

FRONT_DOORS = """## Front doors

The objects of other trainers, under their original names, for scripts that come from them.

| module | page |
|---|---|
| `trivium.frontdoors.verl` | [RayPPOTrainer](ray-ppo-trainer.md) |
| `trivium.frontdoors.trinity` | [Trinity-RFT](trinity.md) |
| `trivium.frontdoors.lightrft` | [LightRFT](lightrft.md) |
"""

TITLES = {
    "Data types": {"types"},
    "Interfaces": {"protocols"},
    "Bases of config sections": {"config"},
    "Rollouts": {"policy", "engines", "text", "tasks", "workflows"},
    "Rewards": {"rewards", "processes"},
    "Training": {"loops", "training", "sync"},
    "A run directory": {"buffers", "inspection"},
    "Errors, metrics and random numbers": {"foundation"},
}
"""The parts of the list of `trivium.api`, by the packages where the names live."""


def public_names() -> dict[str, dict[str, Any]]:
    """Public module -> name -> value."""
    names = {module: importlib.import_module(module).__all__ for module in MODULES if module != "trivium.api"}
    names["trivium.api"] = [*lazy_names(str(api.__file__))]
    return {
        module: {
            name: getattr(importlib.import_module(module), name) for name in names[module] if not name.startswith("__")
        }
        for module in MODULES
    }


def api_page() -> str:
    """docs/api.md."""
    return "\n".join([HEAD, *_sections(), FRONT_DOORS])


def _sections() -> Iterator[str]:
    for module, values in public_names().items():
        yield f"## {module}\n\n{MODULES[module]}\n"
        if module != "trivium.api":
            yield _table(values)
            continue
        packages = {name: home.split(".")[1] for name, home in lazy_names(str(api.__file__)).items()}
        for title, members in TITLES.items():
            yield f"### {title}\n"
            yield _table({name: value for name, value in values.items() if packages[name] in members})
        assert {*packages.values()} <= set().union(*TITLES.values()), "name the package under TITLES"


def _table(values: dict[str, Any]) -> str:
    rows = [f"| `{name}` | {first_sentence(value)} |" for name, value in sorted(values.items(), key=_without_case)]
    return "\n".join(["| name | what it is |", "|---|---|", *rows, ""])


def _without_case(entry: tuple[str, Any]) -> str:
    return entry[0].lower()


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring, as one cell of a table."""
    paragraph = " ".join((value.__doc__ or "").strip().partition("\n\n")[0].split())
    sentence = re.match(r".*?(?<!et al)\.(?= |$)", paragraph)
    return (sentence.group() if sentence else paragraph).replace("|", "\\|")
