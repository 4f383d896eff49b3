"""Token custody: the ids that were sampled are the ids that the loss sees, whatever they decode to.

A small engine samples arbitrary ids (broken UTF-8, special tokens in the middle of a reply) through multi-turn
episodes; its own log is the truth.
"""

import asyncio
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import pytest
from example_counts import number_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trivium.foundation.randomness import SampleKey, uniforms
from trivium.models.backbone.huggingface import PLAIN_TEMPLATE as PLAIN
from trivium.models.vision.images import images_of
from trivium.policy import Policy
from trivium.tasks.drawings import png
from trivium.text.renderer import ChatRenderer, renderer_of
from trivium.text.tiny import tiny_tokenizer
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import (
    Capabilities,
    Completion,
    Experience,
    Group,
    Media,
    Message,
    Request,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    experiences_of,
)

DROPS_REASONING = """{%- for m in messages -%}
{%- if m.role == 'assistant' and not loop.last -%}<|assistant|>{{ m.content.split('x')[-1] | trim }}<|end|>
{%- else -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def merging_tokenizer():
    """A byte-level tokenizer with merges, so that most token sequences are not what their text encodes to."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = tiny_tokenizer("bytes")
    vocabulary = dict(plain.get_vocab())
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ã", "©"), ("<", "|"), ("Ċ", "Ċ")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(plain.added_tokens_decoder.values()))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=plain.chat_template,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
    )


PICTURES = [
    Media("image/png", png(np.full(shape, 60 * number, np.uint8)))
    for number, shape in enumerate([(14, 14, 3), (28, 14, 3), (14, 28, 3), (14, 14, 3)])
]
TOKENIZERS = {"bytes": tiny_tokenizer("bytes"), "merges": merging_tokenizer()}
RENDERERS = {
    f"{name}-{kind}": ChatRenderer(tokenizer, chat_template=template)
    for name, tokenizer in TOKENIZERS.items()
    for kind, template in {"own": None, "plain": PLAIN, "drops reasoning": DROPS_REASONING}.items()
}


class IdEngine:
    """A rollout engine whose replies are arbitrary ids, drawn from the request's key; it keeps what it gave."""

    capabilities = Capabilities(exact_sampling=True)

    def __init__(self, vocabulary: Sequence[int], eos: frozenset[int], eos_rate: float) -> None:
        self._vocabulary, self._eos, self._eos_rate = vocabulary, eos, eos_rate
        self.log: list[tuple[Request, Completion]] = []
        self.version = 0

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        length = request.sampling.max_new_tokens
        u = uniforms(request.key.digest(), np.arange(2 * length))
        tokens = [self._vocabulary[int(x * len(self._vocabulary))] for x in u[:length]]
        ends = [i for i, token in enumerate(tokens) if token in self._eos]
        reason = StopReason.LENGTH
        if u[length] < self._eos_rate:
            tokens[-1], reason = min(self._eos), StopReason.EOS
        if ends:
            tokens, reason = tokens[: ends[0] + 1], StopReason.EOS
        elif reason is StopReason.LENGTH and u[-1] < 0.3:
            reason = StopReason.STOP
        self.version += 1
        done = Completion(
            np.asarray(tokens), np.log(u[: len(tokens)] + 1e-9), np.full(len(tokens), self.version), reason
        )
        self.log.append((request, done))
        return done

    async def load(self, version: int, weights) -> None:
        self.version = version

    async def close(self) -> None: ...


def play(
    renderer: ChatRenderer,
    engine: IdEngine,
    asks: Sequence[str],
    length: int,
    seed: int,
    pictures: Sequence[tuple[Media, ...]] = (),
) -> Policy:
    """One episode: ask, reply, ask again; the reply goes into the conversation as text, as in any workflow. Each of the
    asks may come with pictures."""
    policy = Policy(engine, renderer, Sampling(length), SampleKey(seed, "train", "t", "1"), max_context=10_000)

    async def episode() -> None:
        talk: list[Message] = []
        for ask, shown in zip_longest(asks, pictures, fillvalue=()):
            talk.append(Message("user", str(ask), tuple(shown)))  # pyright: ignore[reportArgumentType]
            turn = await policy.generate(talk)
            talk.append(Message("assistant", turn.text))

    asyncio.run(episode())
    return policy


def trained(experience: Experience) -> list[int]:
    return experience.tokens[experience.response_mask].tolist()


def reencoded(renderer_name: str, engine: IdEngine) -> bool:
    """Whether any reply would have changed by going through text."""
    tokenizer = TOKENIZERS[renderer_name.partition("-")[0]]
    texts = [tokenizer.decode(done.tokens.tolist()) for _, done in engine.log]
    again = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return any(ids != done.tokens.tolist() for ids, (_, done) in zip(again, engine.log, strict=True))


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=number_of(40))
@given(
    asks=st.lists(st.text(min_size=1, max_size=8), min_size=3, max_size=3),
    length=st.integers(1, 12),
    eos_rate=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**40),
)
@example(asks=["<|end|>", "sampledreply0", "\n"], length=8, eos_rate=0.5, seed=1)
def test_the_loss_sees_the_tokens_that_were_sampled(name, asks, length, eos_rate, seed):
    renderer = RENDERERS[name]
    tokenizer = TOKENIZERS[name.partition("-")[0]]
    engine = IdEngine(range(len(tokenizer)), renderer.eos_token_ids, eos_rate)
    policy = play(renderer, engine, asks, length, seed)
    trajectory = Trajectory(0, policy.turns)
    (experience,) = experiences_of(Group(0, Task("1", ()), (trajectory,)), trajectory)

    assert trained(experience) == [token for _, done in engine.log for token in done.tokens.tolist()]
    expected = np.zeros(len(experience), np.bool_)
    for request, done in engine.log:
        start, end = len(request.prompt_tokens), len(request.prompt_tokens) + len(done.tokens)
        assert experience.tokens[:start].tolist() == request.prompt_tokens.tolist()
        assert experience.rollout_log_prob[start:end].tolist() == done.log_prob.tolist()
        assert experience.policy_version[start:end].tolist() == done.policy_version.tolist()
        expected[start:end] = True
    assert experience.response_mask.tolist() == expected.tolist()
    assert not experience.rollout_log_prob[~expected].any()


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=number_of(25))
@given(length=st.integers(1, 12), eos_rate=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 2**40))
def test_between_two_replies_stands_what_the_template_says_and_each_turn_is_closed_once(name, length, eos_rate, seed):
    """Context between replies is the same whether the policy closed its turn or was cut, but for the closing itself."""
    renderer = RENDERERS[name]
    tokenizer = TOKENIZERS[name.partition("-")[0]]
    ends = renderer.eos_token_ids
    engine = IdEngine([i for i in range(len(tokenizer)) if i not in ends], ends, eos_rate)
    play(renderer, engine, ["q1", "q2", "q3"], length, seed)
    roles = "" if name.endswith("plain") else "<|user|>"
    for (request, done), (following, _), ask in zip(engine.log, engine.log[1:], ["q2", "q3"], strict=False):
        sampled_end = done.stop_reason is StopReason.EOS
        assert sampled_end == (eos_rate == 1.0)
        between = following.prompt_tokens[len(request.prompt_tokens) + len(done.tokens) :]
        text = ("" if sampled_end else "<|end|>") + roles + ask + ("" if not roles else "<|end|><|assistant|>")
        assert tokenizer.decode(between.tolist()) == text


@pytest.mark.parametrize("name", RENDERERS)
def test_text_would_have_lost_them(name):
    """The negative control: these replies do change when they are decoded and encoded again."""
    renderer = RENDERERS[name]
    engine = IdEngine(range(len(TOKENIZERS[name.partition("-")[0]])), renderer.eos_token_ids, 0.5)
    for seed in range(5):
        play(renderer, engine, ["a", "b", "c"], 10, seed)
    assert reencoded(name, engine)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """(renderer, images, size of the vocabulary) by family."""
    made = {}
    for family in ("qwen2_vl", "smolvlm"):
        config = TinyVisionModel.Config(
            architecture=family, layers=1, hidden=32, mlp=8, vision_layers=1, image_size=14, alphabet="bytes"
        )
        folder = TinyVisionModel(config, seed=0).materialize(tmp_path_factory.mktemp(family) / "model")
        made[family] = renderer_of(folder), images_of(folder), len(config.tokenizer())
    return made


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
@settings(max_examples=number_of(25))
@given(
    asks=st.lists(st.text(min_size=1, max_size=6), min_size=3, max_size=3),
    shown=st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=3, max_size=3),
    length=st.integers(1, 12),
    eos_rate=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**40),
)
def test_pictures_stay_at_their_tokens_whatever_is_sampled_between_them(
    seeing, family, asks, shown, length, eos_rate, seed
):
    """An environment answers with pictures, and the policy samples any token at all, placeholders among them."""
    renderer, images, vocabulary = seeing[family]
    pictures = [tuple(PICTURES[number] for number in numbers) for numbers in shown]
    engine = IdEngine(range(vocabulary), renderer.eos_token_ids, eos_rate)
    policy = play(renderer, engine, asks, length, seed, pictures)
    trajectory = Trajectory(0, policy.turns)
    (experience,) = experiences_of(Group(0, Task("1", ()), (trajectory,)), trajectory)
    assert trained(experience) == [token for _, done in engine.log for token in done.tokens.tolist()]
    assert [item.sha256 for item in experience.media] == [item.sha256 for each in pictures for item in each]
    for item in experience.media:
        start, end = item.span
        assert experience.tokens[start:end].tolist() == images.read(item).tokens.tolist()
        assert not experience.response_mask[start:end].any()
    for number, (request, _) in enumerate(engine.log):
        assert request.media == experience.media[: sum(map(len, pictures[: number + 1]))]
        assert request.media == trajectory.turns[number].media
        if request.unexpanded is not None:
            spare = sum(len(images.read(item).tokens) - 1 for item in request.media)
            assert len(request.unexpanded) == len(request.prompt_tokens) - spare


@settings(max_examples=number_of(20))
@given(seed=st.integers(0, 2**40))
def test_a_workflow_that_rewrites_history_starts_a_new_experience(seed):
    renderer = RENDERERS["bytes-own"]
    engine = IdEngine(range(256), renderer.eos_token_ids, 1.0)
    policy = Policy(engine, renderer, Sampling(4), SampleKey(seed, "train", "t", "1"), max_context=1000)

    async def episode() -> None:
        turn = await policy.generate([Message("user", "a")])
        await policy.generate([Message("user", "a"), Message("assistant", turn.text), Message("user", "b")])
        await policy.generate([Message("user", "summary"), Message("user", "c")])

    asyncio.run(episode())
    trajectory = Trajectory(0, policy.turns)
    experiences = experiences_of(Group(0, Task("1", ()), (trajectory,)), trajectory)
    replies = [done.tokens.tolist() for _, done in engine.log]
    assert [trained(e) for e in experiences] == [replies[0] + replies[1], replies[2]]
