"""The overrides of a command line, `a.b=c`, `+a.b=c`, `++a.b=c` and `~a.b`, by OmegaConf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import yaml

from trivium.foundation.errors import ConfigError, Problem
from trivium.frontdoors.plain_values import container_of, imported_omegaconf


def overridden(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the config with the overrides applied in order; their values are YAML. A mapping is merged into an
    existing mapping. Raises a ConfigError that lists all invalid overrides, and MissingPackage without OmegaConf."""
    if not overrides:
        return dict(config)
    omegaconf = imported_omegaconf("overrides (a.b=c)")
    result, problems = container_of(config, "overrides (a.b=c)"), list[Problem]()
    for text in overrides:
        key, equals, value = text.lstrip("+~").partition("=")
        if not key or not (equals or text.startswith("~")):
            do = "write section.key=value, +section.key=value or ~section.key"
            problems.append(Problem(text, "an override", "no `=`" if key else "no key", do))
            continue
        removed = text.startswith("~")
        try:
            parsed = None if removed else value_of(value)
        except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, ValueError) as error:
            cause = str(getattr(error, "problem", None) or error).partition("\n")[0]
            problems.append(Problem(key, value, cause, "correct the value, or quote it: key='...'"))
            continue
        # YAML reads `{k:v}` as the key `k:v` without a value, where Hydra's own grammar reads a pair.
        if joined := _joined(parsed):
            problems.append(Problem(key, value, f"{joined!r} has no value", "write a space after the colon"))
            continue
        try:
            if not removed:
                omegaconf.OmegaConf.update(result, key, parsed)
                continue
            above, _, last = key.rpartition(".")
            section = omegaconf.OmegaConf.select(result, above) if above else result
            if omegaconf.OmegaConf.is_dict(section):
                section.pop(last, None)
        except (IndexError, TypeError, ValueError):  # some are errors of OmegaConf, others of Python
            do = "name an element of the list by its number (a.0.b=c), or write the whole list"
            problems.append(Problem(key, value, "it leads to no element of a list", do))
        except omegaconf.errors.OmegaConfBaseException as error:
            problems.append(Problem(key, value, str(error).partition("\n")[0], "correct the key"))
    if problems:
        raise ConfigError("overrides", f"{len(problems)} problem(s)", "fix them all at once:", problems)
    return omegaconf.OmegaConf.to_container(result, resolve=False)


def value_of(text: str) -> Any:
    """Returns the value that a text stands for in YAML; an empty text is itself."""
    # OmegaConf's YAML reads 1e-6 as a number; PyYAML, as YAML 1.1, reads it as text.
    omegaconf = imported_omegaconf("overrides (a.b=c)").OmegaConf
    return omegaconf.to_container(omegaconf.from_dotlist([f"value={text}"]))["value"] if text.strip() else ""


def _joined(value: object) -> str | None:
    """Returns a key of a mapping in the value that YAML reads from `{k:v}`: `k:v` without a value."""
    if isinstance(value, list):
        return next(filter(None, map(_joined, cast(list[object], value))), None)
    for key, part in cast(dict[object, object], value).items() if isinstance(value, dict) else ():
        joined = key if isinstance(key, str) and ":" in key and part is None else _joined(part)
        if joined:
            return joined
    return None
