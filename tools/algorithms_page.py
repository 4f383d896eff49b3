"""docs/algorithms.md, written from the registry: every formula with its paper, its options and what it reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from types_in_words import type_of

from trivium.algorithms.correction import OPTIONS, Correction
from trivium.algorithms.formulas import with_all_clauses
from trivium.algorithms.metadata import (
    EstimatorMetadata,
    FunctionMetadata,
    KlMetadata,
    PolicyLossMetadata,
    TokenWeightMetadata,
    TokenWeightSection,
    format_value,
)
from trivium.config import Plugin
from trivium.foundation.registry import CATALOGUE, resolve

HEAD = """# Algorithms

Generated from the registry by `make docs`: the formulas below are those of the functions that run. An algorithm is an
advantage estimator, a policy loss, terms, gates and an aggregation. A preset names them, and a config can replace each
part. `trivium explain CONFIG` prints the same with the values of a config.

In the formulas `A` is the advantage of a token, `R` a trajectory's reward, `r = exp(log_prob - old_log_prob)`,
`p = exp(log_prob)` the token's probability, `H` the entropy of the distribution it was drawn from, `G` a return or the
size of a group, `V` a critic's value. A *row* is one sequence of tokens. Names of options stand for their values, and
`[option: text]` is there only if the option is set. Losses are minimised. "On policy its gradient is plain" means that
at `r = 1` a loss has the gradient of `-A log_prob`.
"""

KINDS = {
    "advantages": ("Advantage estimators", "`algorithm.advantage: {kind: NAME, ...}`: an advantage for each token."),
    "policy_losses": ("Policy losses", "`algorithm.policy_loss: {kind: NAME, ...}`: the loss of one token."),
    "gates": ("Gates", "`algorithm.gates: [{kind: NAME, ...}]`: how much of a token's policy loss counts."),
    "corrections": (
        "Off-policy corrections",
        "`algorithm.correction: NAME`, or its keys, or both: keys override those of the name. "
        f"The statistics of `rejection`: {', '.join(f'`{option}`' for option in OPTIONS)}, with k1 = -log(trainer / "
        f"engine), "
        "k2 = k1^2 / 2 and k3 = exp(-k1) - 1 + k1 of a token, or their sum, mean or maximum over a sequence. The "
        "narrow bounds of `geo` suit an engine that computes slightly differently; stale groups need wider bounds.",
    ),
    "kl_estimators": ("KL estimators", "`algorithm.kl.estimator: NAME`: from the sampled tokens, in nats."),
    "entropies": ("Entropy terms", "`algorithm.entropy.term: NAME`."),
    "aggregations": ("Aggregations", "`algorithm.aggregate: NAME`: how the losses of tokens are averaged."),
    "filters": ("Filters", "`algorithm.filters: [{kind: NAME, ...}]`: which groups are not trained on."),
    "shapings": (
        "Reward shaping",
        "`algorithm.shaping: [{kind: NAME, ...}]`: functions that change a reward, applied in order.",
    ),
    "pair_losses": (
        "Preference losses",
        "`algorithm.pair_loss: {kind: NAME, ...}`: the loss of a pair of completions.",
    ),
    "score_losses": ("Reward-model losses", "`algorithm.score_loss: {kind: NAME, ...}`: the loss of a pair of scores."),
}


def algorithms_page() -> str:
    """docs/algorithms.md."""
    parts = [HEAD, "## Presets\n", "`algorithm: {kind: NAME}`.\n", _presets()]
    for kind, (title, where) in KINDS.items():
        parts += [f"## {title}\n", f"{where}\n", _shared(kind), *_functions(kind)]
    return "\n".join(part for part in parts if part)


def _presets() -> str:
    rows = ["| name | values | paper |", "|---|---|---|"]
    for name in CATALOGUE["algorithms"]:
        preset = resolve("algorithms", name)
        says = ", ".join(f"`{key}: {_yaml(value)}`" for key, value in preset.says.items())
        rows.append(f"| `{name}` | {says} | {_cell(preset.source)} |")
    return "\n".join([*rows, ""])


def _yaml(value: Any) -> str:
    """A value as YAML in one line; a section of nothing but its kind is that kind."""
    if isinstance(value, dict):
        section: dict[str, Any] = dict(value)
        if set(section) == {"kind"}:
            return str(section["kind"])
        return "{" + ", ".join(f"{key}: {_yaml(inner)}" for key, inner in section.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_yaml(inner) for inner in value) + "]"
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)  # a line break would end the row of the table
    return format_value(value)


def _shared(kind: str) -> str:
    """The keys that every section of a kind has."""
    fields = {"gates": TokenWeightSection, "corrections": Correction}.get(kind, Plugin).model_fields
    return _options({name: field for name, field in fields.items() if name != "kind"})


def _functions(kind: str) -> Iterator[str]:
    """Each function once, under all of its names."""
    names: dict[int, list[str]] = {}
    things: dict[int, Any] = {}
    for name in CATALOGUE[kind]:
        thing = resolve(kind, name)
        names.setdefault(id(thing), []).append(name)
        things[id(thing)] = thing
    for key, thing in things.items():
        yield "### " + ", ".join(f"`{name}`" for name in names[key]) + "\n"
        metadata = getattr(thing, "metadata", None)
        yield from _function(thing, metadata) if isinstance(metadata, FunctionMetadata) else _value(thing)


def _function(function: Any, metadata: FunctionMetadata) -> Iterator[str]:
    yield f"    {with_all_clauses(metadata.formula)}\n"
    yield f"{' '.join((function.__doc__ or '').split())} *{metadata.source}.*\n"
    facts = [
        f"Reads {', '.join(f'`{name}`' for name in sorted(metadata.needs))}." if metadata.needs else "",
        *_facts(metadata),
    ]
    if any(facts):
        yield " ".join(filter(None, facts)) + "\n"
    options = {
        name: field
        for name, field in function.Config.model_fields.items()
        if name not in (TokenWeightSection if isinstance(metadata, TokenWeightMetadata) else Plugin).model_fields
    }
    if options:
        yield "\n".join(
            ["| option | default | meaning |", "|---|---|---|", *map(_option, options, options.values()), ""]
        )


def _facts(metadata: FunctionMetadata) -> Iterator[str]:
    match metadata:
        case PolicyLossMetadata():
            yield f"On policy its gradient is {metadata.on_policy}."
            if metadata.selection is not None:
                yield f"`selected`: {with_all_clauses(metadata.selection.formula)}, over the whole mini-batch."
        case EstimatorMetadata():
            yield f"Needs groups of at least {metadata.min_group}." if metadata.min_group > 1 else ""
            yield "Equal rewards mean advantages of exactly zero." if metadata.centred else ""
            yield "The explorer samples one more completion, greedily, for each task." if metadata.baseline else ""
        case TokenWeightMetadata():
            yield f"Sees one {'sequence' if metadata.scope == 'row' else 'mini-batch'} at a time."
        case KlMetadata():
            yield f"Gradient on policy: {metadata.gradient}."
        case _:
            return


def _options(fields: Mapping[str, FieldInfo]) -> str:
    if not fields:
        return ""
    head = ["| option | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *map(_option, fields, fields.values()), ""])


def _option(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{format_value(field.default)}`"
    return f"| `{name}` | {_cell(type_of(field))} | {default} | {_cell(field.description or '')} |"


def _value(thing: Any) -> Iterator[str]:
    """A named section: what it says, and where it comes from."""
    if thing.says:
        yield f"    {_yaml(dict(thing.says))}\n"
    yield f"*{thing.source}.*\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
