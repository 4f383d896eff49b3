"""Images in the torch engine and in training: both compute what transformers does, however they are cut and ordered."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algebra import number, objectives
from failing import refused
from rank_parts_of_vision import on_ranks
from training_parts import Parts, Reinforce, SquaredError, make_engine
from transformers import AutoModelForImageTextToText
from vision_parts import (
    CONVERSATIONS,
    FAMILIES,
    by_transformers,
    engine_of,
    picture,
    request_of,
    rolled_out,
    sizes,
    tiny,
    user,
    with_plain_text,
)

from tests.rank_processes import run_ranks
from trivium.config import RunConfig, config_from_mapping
from trivium.foundation.errors import ConfigError, DataError, RolloutError
from trivium.foundation.phases import collecting, phase
from trivium.models.backbone.load import load_backbone, load_lm
from trivium.models.backbone.shape import read_shape
from trivium.models.heads.trained_models import LanguageModel, ScoreModel, ValueModel
from trivium.models.vision.encoder import vision_of
from trivium.models.weights.lora import adapter_state, attach
from trivium.models.weights.section import LoraConfig
from trivium.planning.machine import Machine
from trivium.planning.memory_estimate import plan_stage
from trivium.planning.plan import plan_run
from trivium.text.renderer import renderer_of
from trivium.text.tiny_vision import TinyVisionModel
from trivium.training.flops import utilisation
from trivium.training.learner import Learner, RoleModel
from trivium.training.optim import Optimizer
from trivium.training.passes import MicroBatching
from trivium.training.section import OptimizerConfig
from trivium.types import Batch, Media, Teacher

PPO = Parts((Reinforce(), SquaredError()), frozenset({"old", "ref", "values"}))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny(tmp_path_factory.mktemp(name) / "model", name) for name in FAMILIES}


@pytest.fixture(scope="module")
def batches(directories: dict[str, Path]) -> dict[str, Batch]:
    """By family, what an engine said in conversations of two turns, several images in some, none in one."""
    return {name: asyncio.run(rolled_out(path)) for name, path in directories.items()}


@pytest.fixture(scope="module")
def batch(batches: dict[str, Batch]) -> Batch:
    return with_noise(batches["qwen2_vl"])


def with_noise(batch: Batch) -> Batch:
    rng = np.random.default_rng(0)
    lengths = [len(e) for e in batch.experiences]
    return batch.with_columns(
        advantages=[0.3 + rng.normal(size=n) for n in lengths], returns=[1 + rng.normal(size=n) for n in lengths]
    )


def gap(found: Any, expected: Any) -> float:
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_training_agree_and_so_does_transformers(
    directories: dict[str, Path], batches: dict[str, Batch], family: str
) -> None:
    path, said = directories[family], batches[family]
    assert [len(each.media) for each in said.experiences] == [3, 0, 1, 2]
    train = make_engine(path, temperature=1.0)
    assert train._learners["policy"].model.backbone.packs
    assert gap(train.score(said, "old"), [each.rollout_log_prob for each in said.experiences]) < 1e-4
    plain = with_plain_text(path, said)
    expected = [by_transformers(path, each) for each in plain.experiences]
    assert gap(train.score(plain, "old"), expected) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_an_engine_says_does_not_depend_on_what_is_beside_it(
    directories: dict[str, Path], family: str
) -> None:
    renderer, engine = renderer_of(directories[family]), engine_of(directories[family])
    prompts = [renderer.render([first]) for first, _ in CONVERSATIONS]
    try:
        alone = [await engine.generate(request_of(prompt, 1)) for prompt in prompts]
        read = engine.counters["prompts_read"]
        together = await asyncio.gather(*[engine.generate(request_of(p, i)) for p in prompts for i in (1, 2)])
        assert engine.counters["prompts_read"] < read + 2 * len(prompts)  # mostly once for both of its requests
    finally:
        await engine.close()
    for one, other in zip(alone, together[::2], strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.log_prob.tobytes() == other.log_prob.tobytes()


async def test_equal_tokens_with_different_pictures_are_different_prompts(directories: dict[str, Path]) -> None:
    renderer, engine = renderer_of(directories["qwen2_vl"]), engine_of(directories["qwen2_vl"])
    one, other = (renderer.render([user("a <image>", picture(seed))]) for seed in (4, 5))
    assert np.array_equal(one.tokens, other.tokens)
    try:
        said = await asyncio.gather(*[engine.generate(request_of(prompt)) for prompt in (one, other, one)])
    finally:
        await engine.close()
    assert said[0].log_prob[0] == said[2].log_prob[0] != said[1].log_prob[0]


async def test_a_prompt_is_read_in_chunks_that_may_end_inside_an_image(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", "qwen3_vl", image_size=196, max_position=2048)
    pictures = [picture(seed, 196, 196) for seed in range(5)]
    message = user("<image>a" * len(pictures), *pictures)
    said = await rolled_out(path, [(message,)])
    assert any(start < 512 < end for start, end in (item.span for item in said.experiences[0].media if item.span))
    assert gap(make_engine(path, temperature=1.0).score(said, "old"), [said.experiences[0].rollout_log_prob]) < 1e-4


def test_the_length_of_a_files_header_moves_no_parameter(directories: dict[str, Path]) -> None:
    """The bits of matrix products depend on where their factors begin."""
    for load in (load_lm, load_backbone):
        model = load(directories["llava"], dtype=torch.float32)
        assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())


async def test_weights_are_those_of_the_tower_too(directories: dict[str, Path], batch: Batch, tmp_path: Path) -> None:
    engine = engine_of(directories["qwen2_vl"])
    train = make_engine(directories["qwen2_vl"], temperature=1.0)
    prompt = renderer_of(directories["qwen2_vl"]).render([CONVERSATIONS[0][0]])
    try:
        before = await engine.generate(request_of(prompt))
        train.update("policy", batch, Reinforce())
        await engine.load(1, train.export_weights())
        after = await engine.generate(request_of(prompt))
    finally:
        await engine.close()
    assert before.log_prob[0] != after.log_prob[0]
    train.save(tmp_path)
    again = make_engine(tmp_path / "policy", temperature=1.0)
    assert gap(again.score(batch, "old"), train.score(batch, "old")) == 0
    plain = with_plain_text(tmp_path / "policy", batch)
    assert gap([by_transformers(tmp_path / "policy", plain.experiences[0])], again.score(plain, "old")[:1]) < 1e-4


class TestTraining:
    """One update, whatever the cut; every role; what is frozen stays."""

    @pytest.mark.parametrize("family", ["qwen3_vl", "llava", "smolvlm"])
    def test_the_cut_and_the_order_never_matter(
        self, directories: dict[str, Path], batches: dict[str, Batch], family: str
    ) -> None:
        whole = with_noise(batches[family])
        updated = []
        for tokens, rows in ((10_000, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (90, [3, 1, 0, 2])):
            engine = make_engine(directories[family], PPO, dtype="float64", max_tokens_per_micro_batch=tokens)
            shuffled = whole.select(rows)
            metrics = engine.update("policy", shuffled, PPO.objectives[0])
            updated.append((metrics["train/grad_norm/policy"], dict(engine.export_weights())))
        for norm, weights in updated[1:]:
            assert norm == pytest.approx(updated[0][0], rel=1e-9)
            assert all(torch.allclose(weights[name], each, atol=1e-9) for name, each in updated[0][1].items())

    def test_checkpointing_changes_nothing(self, directories: dict[str, Path], batches: dict[str, Batch]) -> None:
        for family in ("qwen3_vl", "llava"):
            norms = [
                make_engine(directories[family], gradient_checkpointing=on).update(
                    "policy", with_noise(batches[family]), Reinforce()
                )["train/grad_norm/policy"]
                for on in (False, True)
            ]
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("which", ["projector", "frozen"])
    def test_what_is_frozen_stays(
        self, directories: dict[str, Path], batches: dict[str, Batch], family: str, which: str
    ) -> None:
        engine = make_engine(directories[family], vision_tower=which)
        before = {name: tensor.clone() for name, tensor in engine.export_weights()}
        engine.update("policy", with_noise(batches[family]), Reinforce())
        moved = {name for name, tensor in engine.export_weights() if not torch.equal(tensor, before[name])}
        vision = vision_of(engine._policy.module)
        assert vision is not None
        decoder, projector = f"model.{vision.family.decoder}", tuple(f"model.{p}" for p in vision.family.projector)
        assert any(name.startswith(decoder) for name in moved)
        assert any(name.startswith(projector) for name in moved) == (which != "frozen")
        tower = {name for name in moved if not name.startswith((decoder, "lm_head", *projector))}
        assert not tower

    def test_an_adapter_is_the_language_parts_alone(
        self, directories: dict[str, Path], batches: dict[str, Batch], tmp_path: Path
    ) -> None:
        lora = {"rank": 2, "targets": ["q_proj", "v_proj"]}
        engine = make_engine(directories["llava"], lora=lora, dtype="float64")
        before = engine.score(batches["llava"], "old")
        engine.update("policy", with_noise(batches["llava"]), Reinforce())
        adapted = {name for name, p in engine._policy.module.named_parameters() if p.requires_grad}
        assert adapted
        assert all(name.startswith("model.language_model.") for name in adapted)
        engine.save(tmp_path)
        again = make_engine(tmp_path / "policy", temperature=0.8, dtype="float64")
        assert gap(again.score(batches["llava"], "old"), engine.score(batches["llava"], "old")) < 1e-6
        assert gap(engine.score(batches["llava"], "old"), before) > 1e-4

    @pytest.mark.parametrize("family", FAMILIES)
    def test_an_adapter_of_the_last_layers_is_in_those_of_the_decoder(
        self, directories: dict[str, Path], family: str
    ) -> None:
        module = load_lm(directories[family], dtype=torch.float32)
        vision, total = vision_of(module), module.config.get_text_config().num_hidden_layers
        assert vision is not None
        adapted = {name for name, _ in adapter_state(attach(module, LoraConfig(rank=2, layers=1), seed=0))}
        assert adapted
        assert all(f"model.{vision.family.decoder}.layers.{total - 1}." in name for name in adapted)

    @pytest.mark.parametrize(
        "name", ["loss:ppo", "value", "loss:sft", "pair:dpo", "score:sigmoid", "loss:distill", "loss:distill_top_k"]
    )
    def test_every_kind_of_objective(self, directories: dict[str, Path], batches: dict[str, Batch], name: str) -> None:
        """Packed all at once, one unit at a time, and padded: the same loss and gradient."""
        objective: Any = objectives()[name]()
        batch = batches["qwen3_vl"]
        for column in sorted(objective.needs - {"entropy"}):
            numbers = [number(column, (1, len(e)), 7 * row)[0].numpy() for row, e in enumerate(batch.experiences)]
            batch = batch.with_columns(**{column: numbers})
        said = []
        for tokens, padded in ((1000, False), (1, False), (1000, True)):
            how: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
            how |= {"temperature": 0.8} if objective.head == "lm" else {"seed": 0}
            model = _HEADS[objective.head](directories["qwen3_vl"], **how)
            if padded:
                model.backbone.packs = False
                model.backbone.module.set_attn_implementation("sdpa")
            optimizer = Optimizer(model if objective.head != "lm" else model.module, OptimizerConfig(lr=0.1, eps=1.0))
            batching = MicroBatching(tokens, model_dir=directories["qwen3_vl"])
            learner = Learner(RoleModel(objective.role, model, optimizer), batching, max_response_length=16)
            said.append(learner.update(objective.select(batch, 0), objective, 0.1, 1e9, step=0, who="a test"))
        for other in said[1:]:
            assert other == pytest.approx(said[0], rel=1e-6, abs=1e-9)
        assert max(value for key, value in said[0].items() if key.startswith("train/grad_norm")) > 0

    def test_a_teacher_sees_what_the_policy_saw(
        self, directories: dict[str, Path], batch: Batch, tmp_path: Path
    ) -> None:
        other = tiny(tmp_path / "model", hidden=48, vision_layers=1)
        algorithm = Parts(needs=frozenset({"teacher", "teacher_top"}), teacher=Teacher(other, 4))
        engine = make_engine(directories["qwen2_vl"], algorithm, temperature=1.0)
        plain = with_plain_text(other, batch)
        scored = engine.score(plain, "teacher")
        assert gap(scored, [by_transformers(other, each) for each in plain.experiences]) < 1e-4
        for top, row in zip(engine.score(plain, "teacher_top"), scored, strict=True):
            assert (top[:, 0, 1] >= row - 1e-5).all()

    @pytest.mark.parametrize("family", ["qwen2_vl", "llava", "idefics3"])
    def test_every_role_reads_images(
        self, directories: dict[str, Path], batches: dict[str, Batch], tmp_path: Path, family: str
    ) -> None:
        engine, batch = make_engine(directories[family], PPO), with_noise(batches[family])
        scored = batch.with_columns(
            old_log_prob=engine.score(batch, "old"), ref_log_prob=engine.score(batch, "ref")
        ).with_columns(values=engine.score(batch, "values"))
        for objective in PPO.objectives:
            assert engine.update(objective.role, scored, objective)[f"train/grad_norm/{_NAME[objective.role]}"] > 0
        engine.save(tmp_path)
        again = make_engine(directories[family], PPO)
        again.load(tmp_path)
        assert gap(again.score(batch, "values"), engine.score(batch, "values")) == 0
        for each in (engine, again):  # one that was loaded goes on with the bits of one that was not
            each.update("policy", scored, PPO.objectives[0])
        assert all(
            torch.equal(a, b) for (_, a), (_, b) in zip(engine.export_weights(), again.export_weights(), strict=True)
        )


_NAME = {"policy": "policy", "critic": "value"}
_HEADS: dict[str, Any] = {"lm": LanguageModel, "value": ValueModel, "score": ScoreModel}


def test_ranks_of_which_some_have_no_image_train_as_one_process(
    directories: dict[str, Path], batches: dict[str, Batch], tmp_path: Path
) -> None:
    """The first rank's shares are images, the second's are text; then both share every sequence."""
    expected = on_ranks(0, 1, directories, batches)
    for said in run_ranks([2], on_ranks, tmp_path / "ranks", directories, batches)[2]:
        assert said.keys() > expected.keys()
        for name, numbers in said.items():
            np.testing.assert_allclose(numbers, expected[name.removesuffix("/sequence")], atol=1e-9)


class TestRefusals:
    def test_media_that_cannot_be_read(self, directories: dict[str, Path], batch: Batch, tmp_path: Path) -> None:
        engine = make_engine(directories["qwen2_vl"])
        first = batch.experiences[0]
        cut = replace(first.media[0], span=(5, len(first) + 2))
        clip = replace(first.media[0], mime="video/mp4")
        short = replace(first.media[0], span=(first.media[0].span[0], first.media[0].span[1] - 1))  # pyright: ignore[reportOptionalSubscript]
        for item, found in ((cut, "its tokens"), (clip, "video/mp4"), (short, "features")):
            with refused(DataError, found):
                engine.score(replace(batch, experiences=(replace(first, media=(item,)),), columns={}), "old")

    async def test_an_engine_goes_on_after_a_damaged_image(self, directories: dict[str, Path]) -> None:
        engine = engine_of(directories["qwen2_vl"])
        prompt = renderer_of(directories["qwen2_vl"]).render([CONVERSATIONS[2][0]])
        damaged = Media("image/png", b"not an image", prompt.media[0].span)
        try:
            with refused(RolloutError, "damaged"):
                await engine.generate(replace(request_of(prompt), media=(damaged,)))
            assert len((await engine.generate(request_of(prompt))).tokens)
        finally:
            await engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_image_side_is_counted(directories: dict[str, Path], batches: dict[str, Batch], family: str) -> None:
    path = directories[family]
    shape = read_shape(path)
    module = AutoModelForImageTextToText.from_pretrained(path)
    vision = vision_of(module)
    assert vision is not None
    assert shape.vision is not None
    assert shape == TinyVisionModel.Config.model_validate(sizes(family)).shape()
    assert shape.parameters == sum(parameter.numel() for parameter in module.parameters())
    projector = tuple(f"model.{part}" for part in vision.family.projector)
    assert shape.vision.projector == sum(p.numel() for n, p in module.named_parameters() if n.startswith(projector))
    with collecting() as phases, phase("update/policy", batches[family]):
        pass
    spans = [end - start for e in batches[family].experiences for start, end in (m.span for m in e.media if m.span)]
    assert phases["update/policy"].image_tokens == sum(spans)
    phases["update/policy"].seconds = 1.0
    rates = [
        utilisation(phases, {"policy": shape}, {}, 1.0, vision_tower=which)["perf/model_flops_per_second"]
        for which in ("trained", "frozen")
    ]
    forward = shape.vision.flops(sum(spans), sum(n * n for n in spans))
    assert rates[0] - rates[1] == pytest.approx(2 * forward)


def test_check_says_what_is_trained(tmp_path: Path) -> None:
    def stage(train: dict[str, Any], kind: str = "tiny_vision") -> RunConfig:
        model = {"kind": kind, "hidden": 64, "heads": 4}
        tasks = {"train": {"kind": "arithmetic", "max_operand": 9}}
        schedule = {"steps": 1, "groups_per_step": 1}
        run = {"run": {"dir": str(tmp_path)}, "model": model, "tasks": tasks, "rewards": ["exact"]}
        return config_from_mapping({**run, "schedule": schedule, "train": train})

    def said(train: dict[str, Any], kind: str = "tiny_vision") -> str | None:
        return plan_run(stage(train, kind), cores=1).text.stages[0].vision

    assert said({}, "tiny") is None
    words = {which: said({"vision_tower": which}) or "" for which in ("trained", "projector", "frozen")}
    assert [text.count("trained") for text in words.values()] == [3, 2, 1]
    assert words["trained"] == said({})
    assert "an adapter trained" in (said({"lora": {"rank": 2}}) or "")
    plans = [plan_run(stage({"vision_tower": which}), cores=1).text.stages[0].memory or {} for which in words]
    held = [plan["each rank"]["policy gradients"] + plan["each rank"]["policy optimizer"] for plan in plans]
    assert held[0] > held[1] > held[2]
    planned = (plan_stage(stage({"sequence_parallel": ranks}), ranks, Machine(2**40)) for ranks in (1, 2))
    whole, part = (memory.rank["vision activations"] for _, _, memory in planned if memory is not None)
    assert part == pytest.approx(whole, rel=0.1)  # each of both runs the tower over all images
    for train, kind in (
        ({"vision_tower": "trained"}, "tiny"),
        ({"vision_tower": "trained", "lora": {"rank": 2}}, "tiny_vision"),
    ):
        with refused(ConfigError, "vision_tower"):
            stage(train, kind)
