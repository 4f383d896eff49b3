"""LightRFT's rewards: reward functions, recipes by label, reward models, and what each of them sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reward_services import computed, json_of, lengths, service
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from tests.failing import refused
from trivium.foundation.errors import ConfigError, DataError, RewardError
from trivium.frontdoors.lightrft.reward_rules import RULES, register_rule
from trivium.frontdoors.lightrft.rewards.reward_scoring import RewardScorer, RolloutSample
from trivium.models.backbone.packed import pack
from trivium.models.heads.classifier import classifier_of
from trivium.models.heads.trained_models import ScoreModel
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.text import hf_tokenizer
from trivium.text.tiny import TinyModel

GEO_PROMPT = "Write <think></think> and \\boxed{}, like this: <think> here </think> \\boxed{answer}.\n3+4="
AQA_PROMPT = "Output <think></think><answer></answer>.\nWhich sound is it?"


def sample(completion: str, prompt: str = GEO_PROMPT, **fields: Any) -> RolloutSample:
    tokens = np.arange(1, 7, dtype=np.int32)
    query = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{completion}<|im_end|>"
    given: dict[str, Any] = {"tokens": tokens, "response_tokens": tokens[4:], "reference": "7", **fields}
    return RolloutSample(prompt, completion, query, **given)


def rewards(scorer: RewardScorer, samples: Sequence[RolloutSample]) -> list[float]:
    return scorer.score(samples).rewards.tolist()


# --------------------------------------------------------------------------- recipes


def test_the_format_reward_does_not_see_the_prompt() -> None:
    """The original gives every answer 0.1: its system prompt shows the format."""
    scorer = RewardScorer(reward_recipe={"geo": [("geo3k_rule", None, 1.0)]})
    texts = [
        "<think>3+4</think> \\boxed{7}",
        "\\boxed{7}",
        "<think>x</think> \\boxed{8}",
        "7",
        "\\boxed{7}<think></think>",
    ]
    scored = scorer.score([sample(text, label="geo") for text in texts])
    np.testing.assert_allclose(scored.rewards, [1.0, 0.9, 0.1, 0.0, 0.9])
    np.testing.assert_allclose(scored.metrics["format_reward"], [1, 0, 1, 0, 0])
    np.testing.assert_allclose(scored.metrics["accuracy_reward"], [1, 1, 0, 0, 1])
    np.testing.assert_allclose(scored.metrics["rule_reward"], scored.rewards)


def test_a_perfect_answer_whose_prompt_shows_empty_tags_scores_in_full() -> None:
    """In the original R1-AQA's perfect answer scores 0 of 2: the prompt's tags come first."""
    scorer = RewardScorer(reward_recipe={"aqa": [("format_rule", None, 1.0), ("accuracy_rule", None, 1.0)]})
    texts = [
        "<think>a dog barks</think>\n<answer>dog</answer>",
        "<answer>dog</answer>",
        "<think>.</think><answer>cat</answer>",
    ]
    scored = scorer.score([sample(text, AQA_PROMPT, label="aqa", reference="dog") for text in texts])
    assert scored.rewards.tolist() == [2, 1, 1]
    assert scored.metrics["accuracy_reward"].tolist() == [1, 1, 0]
    judged = [
        sample(f"<think>.</think><answer>{text}</answer>", label="aqa", reference="B")
        for text in ("Video 2 is better", "Image 1 is better")
    ]
    assert rewards(scorer, judged) == [2, 1]


@pytest.mark.parametrize(
    ("box", "reference", "right"),
    [
        ("1,000", "1000", True),
        ("72", "48 / 2 = 24\n#### 72", True),
        ("42.0", "42", True),
        ("\\frac{1}{2}", "1/2", True),
        ("2\\sqrt{3}", "\\sqrt{12}", True),
        ("71", "72", False),
        ("x", "y", False),
    ],
)
def test_boxed_answers_are_compared_as_mathematics(box: str, reference: str, right: bool) -> None:
    scorer = RewardScorer(reward_recipe={"math": [("gsm8k_rule", None, 1.0)]})
    assert rewards(scorer, [sample(f"\\boxed{{{box}}}", label="math", reference=reference)]) == [0.9 * right]


def test_a_recipe_calls_only_what_the_label_needs_and_weighs_it() -> None:
    seen: list[list[str]] = []

    def length(completions: list[str]) -> list[float]:
        seen.append(completions)
        return [float(len(text)) for text in completions]

    scorer = RewardScorer(
        [length, lambda prompts: [-1.0] * len(prompts)],
        reward_fn_label_map={"length": 0, "constant": 1},
        reward_recipe={
            "chat": [("model", "length", 0.5), ["model", "constant", 0]],
            "both": [
                ("model", "length", 1),
                ("model", "constant", 2),
                (lambda answer: float(answer == "7"), None, 10.0),
            ],
            "rule": [("accuracy_rule", None, 3.0)],
        },
    )
    scored = scorer.score(
        [sample("ab", label="chat"), sample("<answer>7</answer>", label="rule"), sample("abc", label="both")]
    )
    assert scored.rewards.tolist() == [1.0, 3.0, 11.0]
    assert seen == [["ab", "abc"]]
    assert scored.metrics["model_reward"].tolist() == [1.0, 0.0, 1.0]
    assert scored.metrics["rule_reward"].tolist() == [0.0, 3.0, 10.0]


def test_an_unknown_label_is_an_error_and_not_a_zero() -> None:
    scorer = RewardScorer(reward_recipe={"geo": [("geo3k_rule", None, 1.0)]})
    for label in ("geometry", None, ["geo"]):
        with refused(RewardError, "'geo'"):
            scorer.score([sample("\\boxed{7}", label="geo"), sample("\\boxed{7}", label=label)])


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([("geo3k_rul", None, 1.0)], "geo3k_rul"),
        ([("model", "value", 1.0)], "'value'"),
        ([("model", None, 1.0)], "0 reward models"),
        ([("format_rule", 1.0)], "format_rule"),
        ([("format_rule", None, float("nan"))], "nan"),
        ([("format_rule", None, "1")], "'1'"),
        ([], "list"),
        ("format_rule", "str"),
        ([(lambda completion, gold: 0.0, None, 1.0)], "gold"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused_at_once(entries: Any, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        RewardScorer(reward_recipe={"geo": entries})
    assert found in str(error.value)
    assert "'geo'" in str(error.value)


def test_registered_rules_and_paths_are_types_of_a_recipe(tmp_path: Path) -> None:
    register_rule("shout")(lambda completion: float(completion.isupper()))
    (tmp_path / "own.py").write_text("def short(completion, label): return {'reward': 1 / len(completion), 'of': 3}\n")
    try:
        with refused(ConfigError, "'shout'"):
            register_rule("shout")(lambda completion: 0.0)
        recipe = {"x": [("shout", None, 2.0), (f"{tmp_path}/own.py:short", None, 1.0)]}
        scored = RewardScorer(reward_recipe=recipe).score([sample("AB", label="x"), sample("abcd", label="x")])
    finally:
        del RULES["shout"]
    assert scored.rewards.tolist() == [2.5, 0.25]
    assert scored.metrics["of"].tolist() == [3, 3]


@pytest.mark.parametrize(
    "one",
    [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([[0.5]]), np.array([0.5]), [0.5], (0.5,)],
    ids=["number", "scalar", "tensor", "matrix", "array", "list", "tuple"],
)
def test_a_rule_may_return_what_holds_one_number(one: Any) -> None:
    recipe = {"x": [(lambda completion: one, None, 1.0), (lambda answer: {"reward": one, "part": one}, None, 2.0)]}
    scored = RewardScorer(reward_recipe=recipe).score([sample("a", label="x")])
    assert (scored.rewards.tolist(), scored.metrics["part"].tolist()) == ([1.5], [0.5])


@pytest.mark.parametrize(
    "value", [torch.ones(2), [1.0, 2.0], [], "1", None, float("nan"), {"of": 1.0}], ids=lambda v: f"{v}"
)
def test_a_rule_without_a_number_is_an_error_about_the_rule(value: Any) -> None:
    for name, result in (("a score", value), ("part", {"reward": 1.0, "part": value})):
        recipe = {"x": [(lambda completion, result=result: result, None, 1.0)]}
        with refused(RewardError, name, "rule", "a completion") as error:
            RewardScorer(reward_recipe=recipe).score([sample("a completion", label="x")])
        assert "manager" not in error.value.do


def test_a_rule_is_asked_for_all_samples_of_a_label_at_once() -> None:
    waiting, together = list[str](), asyncio.Event()

    async def both(completion: str) -> float:
        waiting.append(completion)
        if len(waiting) == 2:
            together.set()
        await asyncio.wait_for(together.wait(), 30)
        return float(len(completion))

    scorer = RewardScorer(reward_recipe={"x": [(both, None, 1.0)], "y": [("accuracy_rule", None, 1.0)]})
    samples = [sample("a", label="x"), sample("<answer>7</answer>", label="y"), sample("ab", label="x")]
    assert rewards(scorer, samples) == [1, 1, 2]


# --------------------------------------------------------------------------- a user's function


def test_a_reward_function_gets_what_the_original_gives_it() -> None:
    given: list[Any] = []

    def reward_fn(model_reward_list: Any, labels: Any, queries: Any, refs: Any, label_map: Any) -> Any:
        given.extend([model_reward_list, labels, queries, refs, label_map])
        right = torch.tensor([float(f"boxed{{{ref}}}" in query) for query, ref in zip(queries, refs, strict=True)])
        return right + model_reward_list[0], {"accuracy_reward": right}

    scorer = RewardScorer(lambda labels: torch.full((len(labels), 1), 0.5), reward_fn, {"rm": 0})
    samples = [sample("\\boxed{7}", label="geo"), sample("\\boxed{8}", label="gsm")]
    scored = scorer.score(samples)
    assert scored.rewards.tolist() == [1.5, 0.5]
    assert scored.metrics["accuracy_reward"].tolist() == [1, 0]
    assert [each.tolist() for each in given[0]] == [[0.5, 0.5]]
    assert given[0][0].dtype is torch.float32
    assert given[1:] == [["geo", "gsm"], [s.query for s in samples], ["7", "7"], {"rm": 0}]
    assert all("<|im_start|>user" in query for query in given[2])


def test_a_function_without_models_or_metrics_is_enough() -> None:
    scorer = RewardScorer(None, lambda models, labels, queries, refs, label_map: [len(models)] * len(queries))
    assert rewards(scorer, [sample("a"), sample("b")]) == [0, 0]
    assert rewards(scorer, []) == []


def test_a_function_of_one_argument_gets_the_scores_of_the_models() -> None:
    def total(model_reward_list: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(model_reward_list).sum(0)

    models = [lambda labels: torch.ones(len(labels)), lambda labels: torch.full((len(labels),), 0.5)]
    assert rewards(RewardScorer(models, total), [sample("a"), sample("b")]) == [1.5, 1.5]
    with refused(ConfigError, "(one, two)"):
        RewardScorer(models, lambda one, two: one)


def test_a_function_with_recipes_of_its_own_still_saves_the_models_the_samples_they_do_not_need() -> None:
    seen: list[int] = []

    def model(completions: list[str]) -> list[float]:
        seen.append(len(completions))
        return [5.0] * len(completions)

    recipe = {"chat": [("model", "rm", 1.0)], "math": [("a rule of theirs", None, 1.0)]}
    scorer = RewardScorer(model, lambda models, *_: models[0], {"rm": 0}, recipe)
    assert rewards(scorer, [sample("a", label=label) for label in ("math", "chat", "new")]) == [0.0, 5.0, 5.0]
    assert seen == [2]


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ([1.0], r"shape \(1,\)"),
        (1.0, r"shape \(\)"),
        ([1.0, float("nan")], "nan for sample 1"),
        (torch.tensor([float("inf"), 0.0]), "inf for sample 0"),
        (None, "a NoneType|an array of shape"),
        (([1.0, 2.0], {"accuracy_reward": [1.0]}), "accuracy_reward"),
        (torch.ones(2, 2), r"shape \(2, 2\)"),
        (["a", "b"], "list"),
    ],
)
def test_what_is_no_reward_for_each_sample_is_an_error(result: Any, found: str) -> None:
    with pytest.raises(RewardError, match=found):
        RewardScorer(None, lambda *_: result).score([sample("a"), sample("b")])
    if not isinstance(result, tuple):
        with pytest.raises(RewardError, match=found):
            RewardScorer(lambda queries: result).score([sample("a"), sample("b")])


def test_a_function_that_raises_is_named() -> None:
    def reward_fn(*_: Any) -> Any:
        raise KeyError("geo3k")

    with refused(RewardError, "KeyError: 'geo3k'") as error:
        RewardScorer(None, reward_fn).score([sample("a")])
    assert isinstance(error.value.__cause__, KeyError)


def test_nothing_to_score_with_and_several_models_without_a_function_are_errors() -> None:
    with refused(ConfigError, "reward_model", "reward_fn", "reward_recipe", "remote_rm_url"):
        RewardScorer().score([sample("a")])
    models: list[Callable[..., Any]] = [lambda queries: [1.0], lambda queries: [2.0]]
    with refused(ConfigError, 2, "reward_fn", "reward_recipe"):
        RewardScorer(models)
    assert rewards(RewardScorer(models[:1]), [sample("a")]) == [1.0]


# --------------------------------------------------------------------------- reward models


class LastToken(nn.Module):
    """A reward model as the original calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shapes: list[tuple[int, ...]] = []

    def forward(
        self,
        sequences: Any,
        attention_mask: Any,
        prompt_and_output: Any,
        raw_images: Any,
        img_num: Any,
        extra: Any = None,
    ) -> Any:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.shapes.append(tuple(sequences.shape))
        assert [text.count("assistant") for text in prompt_and_output] == [1] * len(sequences)
        last = sequences.shape[1] - 1 - attention_mask.flip(1).argmax(1)
        return {"score": self.scale * sequences.gather(1, last[:, None]).squeeze(1)}


def of_tokens(tokens: Sequence[int], response: int, **fields: Any) -> RolloutSample:
    array = np.array(tokens, np.int32)
    return sample("x", tokens=array, response_tokens=array[-response:], **fields)


def test_a_module_is_called_as_in_the_original_in_micro_batches() -> None:
    model = LastToken().train()
    scorer = RewardScorer(model, tokenizer=SimpleNamespace(pad_token_id=0), batch_size=2)
    samples = [of_tokens([3, 4, 5], 1), of_tokens([3, 4, 5, 6, 7], 4), of_tokens([9, 8], 1)]
    assert rewards(scorer, samples) == [10, 14, 16]
    assert model.shapes == [(2, 6), (1, 2)]


def test_a_module_with_parameters_that_nothing_is_known_of_is_refused() -> None:
    class Chosen(nn.Module):
        def forward(self, chosen_ids: Any, chosen_mask: Any) -> Any: ...

    with refused(ConfigError, "chosen_ids, chosen_mask"):
        RewardScorer(Chosen())
    with refused(ConfigError, "reward_model[0]"):
        RewardScorer([object()])


def reward_model_dir(directory: Path, **config: Any) -> Path:
    """A checkpoint's `reward/`, whose scores differ by token."""
    path = TinyModel(TinyModel.Config(hidden=32, heads=2, mlp=32, **config), seed=1).materialize(directory / "model")
    model = ScoreModel(path, dtype=torch.float32, device=torch.device("cpu"), seed=3)
    model.module.save_pretrained(path)
    head = {name: 100 * value for name, value in model.value_head.state_dict().items()}
    save_file(head, path / f"{VALUE_HEAD}.safetensors")
    return path


def test_directories_modules_and_classifiers_give_the_score_that_training_reads(tmp_path: Path) -> None:
    path = reward_model_dir(tmp_path)
    tokenizer = hf_tokenizer(path)
    samples = [of_tokens([4, 5, 6, 7], 2), of_tokens([5, 6, 7, 8, 9, 4], 2, truncated=True)]
    model = ScoreModel(path, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    ended = [samples[0].tokens, np.append(samples[1].tokens, np.int32(tokenizer.eos_token_id))]
    with torch.no_grad():
        expected = [float(model(pack([tokens]), torch.tensor([len(tokens) - 1]))[0]) for tokens in ended]
    assert expected[0] != expected[1]
    assert rewards(RewardScorer(str(path), tokenizer=tokenizer), samples) == expected
    assert rewards(RewardScorer(model, tokenizer=tokenizer), samples) == expected
    classifier_of(path, pad_token_id=17).save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    assert rewards(RewardScorer(tmp_path / "out", tokenizer=tokenizer), samples) == expected
    hugging = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert rewards(RewardScorer(hugging, tokenizer=tokenizer), samples[:1] * 2) == pytest.approx(
        expected[:1] * 2, abs=1e-5
    )
    other = hf_tokenizer(TinyModel(TinyModel.Config(alphabet="0123456789abc"), seed=1).materialize(tmp_path / "other"))
    with refused(ConfigError, "reward_model[0]", "remote_rm_url"):
        RewardScorer(str(path), tokenizer=other)
    with refused(DataError, tmp_path / "nothing"):
        RewardScorer(str(tmp_path / "nothing"), tokenizer=None)


def test_a_python_file_is_a_reward_model(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "import torch\n"
        "def reward_func(queries, prompts, references):\n"
        "    assert len(queries) == len(prompts)\n"
        "    return {'rewards': torch.tensor([float(f'{{{ref}}}' in q) for q, ref in zip(queries, references)])}\n"
    )
    scorer = RewardScorer(remote_rm_url=[str(file)])
    assert rewards(scorer, [sample("\\boxed{7}"), sample("\\boxed{8}")]) == [1, 0]
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="reward_func"):
        RewardScorer(remote_rm_url=str(tmp_path / "empty.py"))


# --------------------------------------------------------------------------- services


def test_services_score_batches_beside_local_models_and_recipes_name_them() -> None:
    async def scored() -> tuple[list[float], list[Any]]:
        async with service(computed(lengths)) as first, service(computed(lengths)) as second:
            scorer = RewardScorer(
                lambda labels: [1.0] * len(labels),
                reward_fn_label_map={"local": 0, "first": 1, "second": 2},
                reward_recipe={"a": [("model", "first", 1.0), ("model", "local", 0.5)], "b": [("model", "second", 2)]},
                remote_rm_url=[first.url, {"urls": second.url, "max_batch": 1, "protocol": "openrlhf"}],
            )
            samples = [sample("xyz", label=label) for label in "aab"]
            given = await asyncio.to_thread(scorer.score, samples)
            return given.rewards.tolist(), [request.body for service in (first, second) for request in service.requests]

    earned, bodies = asyncio.run(scored())
    query = sample("xyz").query
    assert earned == [len(query) + 0.5, len(query) + 0.5, 2 * len(query)]
    assert bodies[0] == {"queries": [query] * 2, "prompts": [GEO_PROMPT] * 2, "references": ["7", "7"]}
    assert bodies[1] == {"query": [query], "prompts": [GEO_PROMPT], "labels": ["7"]}


def test_a_service_that_gives_no_number_ends_the_rollout_and_is_named() -> None:
    async def failed() -> str:
        async with service(json_of({"rewards": [1.0, float("nan")]})) as here:
            with pytest.raises(RewardError) as error:
                await asyncio.to_thread(RewardScorer(remote_rm_url=here.url).score, [sample("a"), sample("b")])
            return f"{here.url} {error.value}"

    url, _, text = asyncio.run(failed()).partition(" ")
    assert url in text
    assert "sample 1 of 2" in text
    for wrong in ("localhost:8000", {"urls": "http://x/", "tokens": "y"}, 5):
        with refused(ConfigError, "remote_rm_url[0]"):
            RewardScorer(remote_rm_url=[wrong])  # pyright: ignore[reportArgumentType]
