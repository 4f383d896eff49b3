"""`trivium rollouts`: shows recorded rollouts as JSON values or as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trivium.config.saved import config_file, from_yaml
from trivium.foundation.errors import RunDirError
from trivium.inspection.rollouts import Rollout, TokenSequence, planned_steps, read_rollouts
from trivium.text import hf_tokenizer
from trivium.text.tool_formats import FORMATS, REASONING_TAIL, ToolCall
from trivium.types import EXPERT_VERSION, Fork, IntArray, Media, Turn, forks_of

Decode = Callable[[Sequence[int] | IntArray], str]


def rollouts_of(run_dir: Path, step: int | None, task: str | None, failed: bool) -> Iterator[Rollout]:
    """Yields the rollouts that `trivium rollouts` shows: by default, those of the latest step. Raises RunDirError if a
    step or a task has no rollouts."""
    if step is None and task is None and not failed:
        step = planned_steps(run_dir)[-1]
    number = 0
    for rollout in read_rollouts(run_dir, step=step, task=task, failed=failed):
        number += 1
        yield rollout
    if not number and not failed:
        steps = planned_steps(run_dir)
        raise RunDirError(
            f"rollouts of {f'step {step}' if task is None else f'task {task!r}'}",
            f"the run has rollouts of steps {steps[0]} to {steps[-1]}" if steps else "the run has none yet",
            "name a step among these, or a task_id that `trivium rollouts RUN --json` shows",
        )


def decoder(run_dir: Path) -> Decode:
    """Returns a function that decodes tokens, including special tokens, with the tokenizer of the run's model."""
    if not config_file(run_dir).is_file():
        raise RunDirError(f"the run in {run_dir}", "no config.yaml there", "name the directory of a run")
    config: dict[str, Any] = from_yaml(config_file(run_dir).read_text(encoding="utf-8"))
    source = Path(config["model"].get("path") or run_dir / "model")
    places = [source, run_dir / "model", *sorted(run_dir.glob("checkpoints/step-*/policy"))]
    path = next((place for place in places if (place / "tokenizer_config.json").is_file()), None)
    if path is None:
        raise RunDirError(
            f"the tokenizer of {run_dir}",
            f"none in {source} and none in a checkpoint",
            "put the model back at the path in config.yaml",
        )
    if (file := path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer  # transformers takes seconds to import, and decodes with it

        backend = Tokenizer.from_file(str(file))
        return lambda tokens: backend.decode(np.asarray(tokens, np.int64).tolist(), skip_special_tokens=False)
    tokenizer: Any = hf_tokenizer(path, correct_pad_token=False)
    return lambda tokens: tokenizer.decode(np.asarray(tokens, np.int64).tolist(), clean_up_tokenization_spaces=False)


def piecewise(decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], list[str]]:
    """Returns a function that gives each token its own piece of the decoded text. If several tokens form one character,
    the first one gets it and the others are empty."""

    @lru_cache(maxsize=65536)
    def after(before: int | None, token: int) -> str:
        # Decoded after its predecessor, since some tokenizers drop a space at the start of a text.
        if before is None:
            return decode([token])
        before_text, both = decode([before]), decode([before, token])
        return both[len(before_text) :] if both.startswith(before_text) else decode([token])

    def pieces(tokens: Sequence[int]) -> list[str]:
        texts, position = list[str](), 0
        while position < len(tokens):
            alone = after(tokens[position - 1] if position else None, tokens[position])
            # U+FFFD: the token ends inside a character. Joins up to 8 tokens until the text is whole.
            ends = range(position + 2, min(position + 8, len(tokens)) + 1) if "\ufffd" in alone else ()
            joined = ((stop, text) for stop in ends if "\ufffd" not in (text := decode(tokens[position:stop])))
            stop, text = next(joined, (position + 1, alone))
            texts += [text, *[""] * (stop - position - 1)]
            position = stop
        return texts

    return pieces


# --------------------------------------------------------------------------- as JSON values


def json_of(rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """Returns all data of a rollout as JSON values, without NaN and infinities."""
    group, trajectory = rollout.group, rollout.trajectory
    failure = trajectory.failure
    return {
        "steps": list(rollout.steps),
        "planned_step": rollout.planned_step,
        "stage": rollout.stage,
        "slot": group.slot,
        "attempt": group.attempt,
        "taskset": group.task.taskset,
        "task_id": group.task.task_id,
        "epoch": group.epoch,
        "index": trajectory.index,
        "greedy": rollout.greedy,
        "dropped": group.dropped,
        "prompt": [{**message.entry(), **_media(message.media)} for message in group.task.prompt],
        "columns": dict(group.task.columns),
        "turns": _turns(rollout, decode),
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "metrics": dict(trajectory.metrics),
        "failure": None
        if failure is None
        else {"side": failure.side, "kind": failure.kind, "message": failure.message},
        "sequences": [_sequence(sequence, decode) for sequence in rollout.sequences],
    }


def _turns(rollout: Rollout, decode: Decode) -> list[dict[str, Any]]:
    """Returns each turn with its context: the environment's text between the previous completion and this one, in the
    template's form. A turn that starts another sequence has its full context, and the reason."""
    rows: list[dict[str, Any]] = []
    forks = {fork.turn: fork for fork in forks_of(rollout.trajectory.turns)}
    earlier: Turn | None = None
    for number, turn in enumerate(rollout.trajectory.turns):
        context_start = (
            len(earlier.prompt_tokens) + len(earlier.tokens) if earlier is not None and number not in forks else 0
        )
        rows.append(
            {
                "context": decode(turn.prompt_tokens[context_start:]),
                **_media(item for item in turn.media if item.span is None or item.span[0] >= context_start),
                "fork": fork_values(forks[number], decode) if number in forks else None,
                "completion": turn.text,
                "written": decode(turn.tokens),
                "calls": [{"name": call.name, "arguments": call.arguments} for call in _calls(turn, decode)],
                "participant": turn.participant,
                "stop_reason": turn.stop_reason.value,
                "tokens": len(turn.tokens),
                "reward": turn.reward,
            }
        )
        earlier = turn
    return rows


def _calls(turn: Turn, decode: Decode) -> tuple[ToolCall, ...]:
    """Returns the calls of a completion, after its reasoning. A record has no list of tools: any name counts."""
    prompt_end = decode(turn.prompt_tokens[-REASONING_TAIL:])
    texts = [
        (tool_format, tool_format.split(turn.text, opened=tool_format.opens(prompt_end))[1]) for tool_format in FORMATS
    ]
    calls_by_format = (tool_format.read(text) for tool_format, text in texts if tool_format.begins(text))
    return next((calls[1] for calls in calls_by_format if calls is not None), ())


def fork_values(fork: Fork, decode: Decode) -> dict[str, Any]:
    """Returns why a turn starts another sequence, and the first token that differs: its position, and its text in the
    `earlier` turn and in the prompt; null at the end."""
    known_text, sent = (decode(tokens) if len(tokens) else None for tokens in (fork.known, fork.sent))
    return {"reason": fork.reason, "earlier": fork.earlier, "at": fork.at, "known": known_text, "sent": sent}


def _media(items: Iterable[Media]) -> dict[str, Any]:
    """Returns media as an entry of a JSON object, empty if there are none."""
    media = media_values(items)
    return {"media": media} if media else {}


def media_values(items: Iterable[Media]) -> list[dict[str, Any]]:
    """Returns media by their hashes; `rollouts/media` of the run stores each file under its hash."""
    return [{"mime": item.mime, "sha256": item.sha256, "span": item.span and list(item.span)} for item in items]


def _sequence(sequence: TokenSequence, decode: Decode) -> dict[str, Any]:
    return {
        "tokens": sequence.tokens.tolist(),
        "text": [decode([token]) for token in sequence.tokens.tolist()],
        "response_mask": sequence.response_mask.tolist(),
        "log_prob": sequence.log_prob.tolist(),
        "policy_version": sequence.policy_version.tolist(),
        **{name: array.tolist() for name, array in sequence.columns.items()},
    }


# --------------------------------------------------------------------------- as text


def text_of(rollout: Rollout, decode: Decode, tokens: bool) -> str:
    """Formats a rollout for reading; with `tokens`, one line for each token."""
    group, trajectory = rollout.group, rollout.trajectory
    lines = _heading(rollout)
    for turn in _turns(rollout, decode):
        if (fork := turn["fork"]) is not None:
            known_text, sent = ("the end" if text is None else repr(text) for text in (fork["known"], fork["sent"]))
            differs = f"token {fork['at']} is {sent}, and {known_text} in turn {fork['earlier'] + 1}"
            lines.append(_indented("another sequence", f"{fork['reason']}; {differs}"))
        lines.append(_indented("context", turn["context"]))
        for item in turn.get("media", ()):
            place = "" if item["span"] is None else f" at tokens {item['span'][0]} to {item['span'][1]}"
            lines.append(f"  {item['mime']}{place}: media/{item['sha256']}")
        participant = f" of {turn['participant']}" if turn["participant"] else ""
        lines.append(_indented(f"completion{participant}", turn["completion"]))
        if not turn["written"].startswith(turn["completion"]):  # its special tokens were stripped
            lines.append(_indented("as written", turn["written"]))
        earned = f", reward {turn['reward']:.4g}" if turn["reward"] else ""
        lines.append(f"  ({turn['tokens']} tokens, stop reason {turn['stop_reason']}{earned})")
    if (failure := trajectory.failure) is not None:
        lines.append(_indented("failed", f"{failure.side}: {failure.kind}: {failure.message}"))
    if group.dropped:
        lines.append(_indented("dropped", group.dropped))
    for sequence in rollout.sequences if tokens else ():
        lines += _table(sequence, decode)
    return "\n".join(lines) + "\n"


def calls_of(rollout: Rollout, decode: Decode) -> str:
    """Formats the calls of a rollout with their results, and completions without calls that can be read. The results of
    a turn are the context of the next one, in the template's form."""
    turns, lines = _turns(rollout, decode), _heading(rollout)
    for number, turn in enumerate(turns):
        lines += [_indented("call", f"{call['name']} {call['arguments']}") for call in turn["calls"]]
        if not turn["calls"]:
            lines.append(_indented("completion", turn["completion"]))
        if number + 1 < len(turns):
            lines.append(_indented("results", turns[number + 1]["context"]))
    if (failure := rollout.trajectory.failure) is not None:
        lines.append(_indented("failed", f"{failure.side}: {failure.kind}: {failure.message}"))
    return "\n".join(lines) + "\n"


def _heading(rollout: Rollout) -> list[str]:
    """Returns the lines with the task and the reward of a rollout."""
    group, trajectory = rollout.group, rollout.trajectory
    steps = ", ".join(map(str, rollout.steps)) or "none (replaced by a resumed run)"
    member = "greedy" if rollout.greedy else f"{trajectory.index + 1}/{len(group.trajectories)}"
    components = ", ".join(f"{name} {reward:.4g}" for name, reward in trajectory.rewards.items())
    return [
        f"step {steps}  task {group.task.task_id} ({group.task.taskset})  epoch {group.epoch}  rollout {member}  "
        f"policy version {group.version}",
        f"  reward {trajectory.reward:.4g}" + (f" ({components})" if components else ""),
    ]


def _indented(title: str, text: str) -> str:
    """Formats a title and a text, with later lines of the text indented. Escapes control characters of terminals."""
    plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return f"  {title}: " + plain.replace("\n", "\n" + " " * (len(title) + 4))


def _table(sequence: TokenSequence, decode: Decode) -> list[str]:
    """Returns one line for each token of a sequence."""
    names = [name for name, array in sequence.columns.items() if array.ndim == 1]
    names.sort(key=lambda name: (name != "advantages", name))
    titles = {name: f"{name:>{max(11, len(name)) + 2}}" for name in ("log-prob", *names)}
    lines = ["  " + "".join(titles.values()) + "  mask  version  token"]
    for t, token in enumerate(sequence.tokens.tolist()):
        sampled = sequence.policy_version[t] != EXPERT_VERSION
        numbers = (sequence.log_prob[t], *(sequence.columns[name][t] for name in names))
        cells = (f"{number:.5g}" if sampled else "" for number in numbers)
        row = "".join(f"{cell:>{len(title)}}" for cell, title in zip(cells, titles.values(), strict=True))
        version = str(sequence.policy_version[t]) if sampled else ""
        lines.append(f"  {row}{int(sequence.response_mask[t]):>6}{version:>9}  {token} {decode([token])!r}")
    return lines
