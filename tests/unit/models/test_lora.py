"""LoRA: the base never changes, merged is what the adapter computes, and an engine that is sent the adapter alone holds
what it would hold if it had been sent everything."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml
from configs import configured
from failing import refused
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from training_parts import VOCABULARY, Parts, Reinforce, SquaredError, make_batch, make_engine, weights, write_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from trivium.config import config_from_mapping
from trivium.config.resume import resume_differences, to_yaml
from trivium.engines.torch.decoder import Decoder
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.errors import ConfigError, SyncError, TriviumError
from trivium.models.backbone.load import load_lm
from trivium.models.weights.lora import (
    adapter_off,
    adapter_parameters,
    adapter_state,
    attach,
    merged_state,
    pushed_adapter,
    save_adapter,
)
from trivium.models.weights.section import LoraConfig
from trivium.protocols import EngineSettings, WeightChannel
from trivium.training.batching import count
from trivium.training.distributed.ranks import join_ranks
from trivium.training.engine import TorchTrainEngine
from trivium.types import Metrics

SIZE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(3, 14)[None]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_lm(directory, dtype=dtype)


def logits(module: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=TOKENS, use_cache=False).logits


@torch.no_grad()
def change(module: PreTrainedModel, seed: int = 0) -> None:
    """Another adapter, one that does something."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in dict(adapter_state(module)).values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
def test_merged_is_what_the_adapter_computes(name: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, name, scale=2.0)
    base = load(directory)
    module = attach(load(directory), LoraConfig(rank=3, alpha=5), seed=1)
    assert torch.equal(logits(module), logits(base)), "a fresh adapter changes nothing"
    change(module)
    plain = load(directory)
    merged = dict(merged_state(module))
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged)
    assert (logits(module) - logits(base)).abs().max() > 0.1
    assert (logits(module) - logits(plain)).abs().max() < 1e-5
    with adapter_off(module):
        assert torch.equal(logits(module), logits(base))
    assert (logits(module) - logits(plain)).abs().max() < 1e-5


def test_the_base_is_what_it_was_after_a_hundred_cycles(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    module = attach(load(directory), LoraConfig(rank=2), seed=0)
    before = {name: tensor.clone() for name, tensor in load(directory).state_dict().items()}
    for cycle in range(100):
        change(module, cycle)
        merged = dict(merged_state(module))
        with adapter_off(module):
            pass
    held = {name.replace(".base_layer.", "."): tensor for name, tensor in module.state_dict().items()}
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
    changed = {name for name, tensor in before.items() if not torch.equal(merged[name], tensor)}
    assert changed == {name for name in before if "_proj" in name}


def test_every_linear_layer_but_the_output_layer_or_those_that_are_named(tmp_path: Path) -> None:
    directory = write_model(tmp_path)

    def layers(section: LoraConfig) -> set[str]:
        return {name.split(".")[-3] for name, _ in adapter_state(attach(load(directory), section, seed=0))}

    seven = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers(LoraConfig()) == layers(LoraConfig.model_validate({"targets": "all-linear"})) == seven
    assert layers(LoraConfig(targets=("q_proj", "v_proj"))) == {"q_proj", "v_proj"}
    assert layers(LoraConfig(exclude=("q_proj",))) == seven - {"q_proj"}
    assert layers(LoraConfig(exclude=r".*\.(q|k)_proj")) == seven - {"q_proj", "k_proj"}
    for target, found in (("lm_head", "output layer"), ("embed_tokens", "linear layer")):
        with refused(TriviumError, found):
            layers(LoraConfig(targets=("q_proj", target)))
    with refused(TriviumError, "nothing"):
        layers(LoraConfig(targets=("nothing",)))


def test_of_a_mixture_of_experts_attention_gets_an_adapter(tmp_path: Path) -> None:
    """peft would take the experts' own projections, which lie stacked in one parameter, for layers of that name."""
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZE, **experts)).save_pretrained(tmp_path / "model")
    engine = trained(tmp_path / "model", 2)
    names = [name for name, _ in adapter_state(engine._policy.module)]
    assert {name.split(".")[-3] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    engine.save(tmp_path / "saved")
    again = make_engine(tmp_path / "model", NEEDS_REFERENCE, lora={"rank": 2})
    again.load(tmp_path / "saved")
    plain = load(tmp_path / "saved" / "policy").state_dict()
    for name, tensor in weights(engine).items():
        assert torch.equal(weights(again)[name], tensor)
        assert torch.equal(plain[name], tensor)


def test_only_the_adapter_learns_and_its_seed_decides_where_it_begins(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    one, same, other = (attach(load(directory), LoraConfig(rank=2), seed=seed) for seed in (1, 1, 2))
    states = [dict(adapter_state(module)) for module in (one, same, other)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert all(torch.equal(tensor, states[2][name]) == ("lora_B" in name) for name, tensor in states[0].items())
    trained = {name for name, parameter in one.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in one.named_parameters() if "lora_" in name}
    assert len(trained) == len(states[0]) == 2 * 7 * 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
def test_an_adapter_on_disk_is_one_that_peft_knows_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    import peft

    directory = write_model(tmp_path / "model")
    module = attach(load(directory), LoraConfig(rank=2, alpha=6, targets=("q_proj", "up_proj")), seed=0)
    change(module)
    save_adapter(module, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load(directory), str(tmp_path / "adapter"))
    assert torch.equal(logits(theirs), logits(module))
    again = attach(load(directory), LoraConfig(path=str(tmp_path / "adapter")), seed=5)
    assert torch.equal(logits(again), logits(module))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(adapter_state(again), adapter_state(module), strict=True))
    save_adapter(again, tmp_path / "second")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "adapter" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_what_is_more_than_plain_lora_or_of_another_model_is_refused(tmp_path: Path) -> None:
    directory, adapter = write_model(tmp_path / "model"), tmp_path / "adapter"
    module = attach(load(directory), LoraConfig(rank=2), seed=0)
    section = LoraConfig(path=str(adapter), rank=4)
    assert [problem.found for problem in section.own_problems("train.lora", 2)][1] == "no such directory"
    save_adapter(module, adapter)
    assert [problem.where for problem in section.own_problems("train.lora", 2)] == ["train.lora.rank"]
    assert not list(LoraConfig(path=str(adapter)).own_problems("train.lora", 2))
    wider = write_model(tmp_path / "wider", hidden_size=32)
    with refused(TriviumError, adapter, "lora_A.weight"):
        attach(load(wider), LoraConfig(path=str(adapter)), seed=0)
    said = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**said, "use_dora": True}))
    with refused(TriviumError, adapter, "use_dora", "True"):
        attach(load(directory), LoraConfig(path=str(adapter)), seed=0)


def test_an_adapter_that_was_trained_with_dropout_is_a_start_without_it(tmp_path: Path) -> None:
    directory, adapter = write_model(tmp_path / "model"), tmp_path / "adapter"
    module = attach(load(directory), LoraConfig(rank=2), seed=0)
    change(module)
    save_adapter(module, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_dropout": 0.25}))
    section = LoraConfig(path=str(adapter))
    assert not list(section.own_problems("train.lora", 2))
    (warning,) = section.own_warnings("train.lora")
    assert (warning.where, "0.25" in warning.found) == ("train.lora.path", True)
    again = attach(load(directory), section, seed=0)
    assert torch.equal(logits(again), logits(module))
    assert torch.equal(logits(again.train()), logits(module))
    save_adapter(again, tmp_path / "second")
    assert json.loads((tmp_path / "second" / "adapter_config.json").read_text())["lora_dropout"] == 0


def numbered_layers(module: PreTrainedModel) -> set[int]:
    return {int(next(part for part in name.split(".") if part.isdecimal())) for name, _ in adapter_state(module)}


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_only_the_last_layers_get_an_adapter_which_peft_reads_too(name: str, tmp_path: Path) -> None:
    import peft

    directory = write_model(tmp_path / "model", name)
    upper = attach(load(directory), LoraConfig(rank=2, layers=1), seed=0)
    assert numbered_layers(upper) == {1}
    change(upper)
    save_adapter(upper, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["layers_to_transform"] == [1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        theirs = peft.PeftModel.from_pretrained(load(directory), str(tmp_path / "adapter"))
    assert torch.equal(logits(theirs), logits(upper))
    again = attach(load(directory), LoraConfig(path=str(tmp_path / "adapter")), seed=5)
    assert torch.equal(logits(again), logits(upper))
    with refused(TriviumError, "train.lora.layers", 3, 2):
        attach(load(directory), LoraConfig(layers=3), seed=0)
    problems = LoraConfig(layers=3, path=str(tmp_path / "adapter")).own_problems("train.lora", 2)
    assert [problem.where for problem in problems] == ["train.lora.layers", "train.lora.layers"]


def test_the_last_layers_have_the_gradient_of_a_full_adapter_and_no_pass_goes_below_them(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    upper = attach(load(directory, torch.float64), LoraConfig(rank=2, layers=1), seed=0)
    full = attach(load(directory, torch.float64), LoraConfig(rank=2), seed=0)
    change(upper)
    same = dict(adapter_parameters(full))
    with torch.no_grad():
        for name, tensor in adapter_state(upper):
            same[name].copy_(tensor)
    for module in (upper, full):
        module(input_ids=TOKENS, use_cache=False).logits.logsumexp(-1).sum().backward()
    gradients = {name: tensor.grad for name, tensor in adapter_parameters(upper).items()}
    assert len(gradients) == 2 * 7
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients.values())
    assert all(torch.equal(gradient, cast(torch.Tensor, same[name].grad)) for name, gradient in gradients.items())
    assert any(".layers.0." in name and tensor.grad is not None for name, tensor in same.items())


def test_the_layers_below_an_adapter_keep_nothing(tmp_path: Path) -> None:
    """Their outputs have no graph, and an update keeps fewer tensors for the backward pass."""
    directory = write_model(tmp_path)

    def kept(lora: dict[str, Any]) -> tuple[list[bool], int]:
        engine = make_engine(directory, NEEDS_REFERENCE, lora=lora)
        differentiable, sizes = list[bool](), list[int]()
        for layer in cast(Any, engine._policy.module).model.layers:
            layer.register_forward_hook(lambda _, __, output: differentiable.append(output.requires_grad))

        def packed(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            take(engine, 1)
        return differentiable, sum(sizes)

    below, upper = kept({"rank": 2, "layers": 1})
    both, full = kept({"rank": 2})
    assert below[:2] == [False, True]
    assert both[:2] == [True, True]
    assert upper < 0.75 * full


# --------------------------------------------------------------------------- engines


def engine_for(model_dir: Path, dtype: str = "float32") -> TorchEngine:
    config = TorchEngine.Config.model_validate({"dtype": dtype})
    return TorchEngine(config, model_dir=model_dir, eos_token_ids=frozenset(), decode=lambda _: "", threads=1)


@pytest.mark.parametrize(
    ("name", "saved", "dtype"),
    [("qwen3", torch.float32, "float32"), ("gpt2", torch.float32, "bfloat16"), ("llama", torch.bfloat16, "bfloat16")],
)
async def test_an_engine_holds_the_same_bits_from_an_adapter_as_from_everything(
    name: str, saved: torch.dtype, dtype: str, tmp_path: Path
) -> None:
    """Also after other weights, after other adapters, and in a new engine."""
    directory = write_model(tmp_path, name)
    load(directory, saved).save_pretrained(directory)
    module = attach(load(directory), LoraConfig(rank=2), seed=0)
    one, other = engine_for(directory, dtype), engine_for(directory, dtype)
    try:
        for version in range(4):
            change(module, version)
            await one.load(version, list(pushed_adapter(module)))
            await other.load(
                version, [pair for pair in merged_state(module) if pair[0] != "lm_head.weight" or name == "llama"]
            )
            held, expected = dict(await one.weights()), dict(await other.weights())
            assert all(torch.equal(held[key], tensor) for key, tensor in expected.items())
            assert one.version == version
        await other.load(4, list(pushed_adapter(module)))  # it has held nothing but full weights, and others, so far
        late = engine_for(directory, dtype)
        await late.load(4, list(pushed_adapter(module)))
        for engine in (other, late):
            found = dict(await engine.weights())
            assert all(torch.equal(found[key], tensor) for key, tensor in held.items())
        await late.close()
    finally:
        await one.close()
        await other.close()


async def test_an_adapter_after_foreign_weights_is_added_to_the_base(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    module = attach(load(directory), LoraConfig(rank=2, targets=("q_proj",)), seed=0)
    full = attach(load(directory), LoraConfig(rank=2), seed=0)
    change(module)
    change(full)
    engine = engine_for(directory)
    try:
        await engine.load(1, [(name, tensor + 1) for name, tensor in load(directory).state_dict().items()])
        await engine.load(2, list(pushed_adapter(full)))
        await engine.load(3, list(pushed_adapter(module)))
        held = dict(await engine.weights())
        assert all(torch.equal(held[name], tensor) for name, tensor in merged_state(module))
    finally:
        await engine.close()


@pytest.mark.parametrize("form", ["as the model names them", "pickled", "renamed", "converted"])
def test_the_base_is_that_of_the_files_whatever_type_the_config_names(form: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    if form == "converted":  # q_proj is a part of a tensor of the file
        torch.manual_seed(0)
        config = AutoConfig.for_model("hrm_text", **SIZE, head_dim=4, pad_token_id=0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    else:
        write_model(directory)
    if form == "pickled":
        torch.save(load(directory).state_dict(), directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
    if form == "renamed":  # as a file of the model without its output layer
        tensors = load_file(directory / "model.safetensors")
        save_file(
            {name.removeprefix("model."): held for name, held in tensors.items()}, directory / "model.safetensors"
        )
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    module = attach(load(directory), LoraConfig(rank=2, targets=("q_proj",)), seed=0)
    with torch.inference_mode():
        for others in ([], [(name, tensor + 1) for name, tensor in load(directory).state_dict().items()]):
            decoder = Decoder(directory, dtype=torch.float32, device="cpu", exact=False)
            if others:
                decoder.load(others)
            change(module)
            decoder.load(list(pushed_adapter(module)))
            held = dict(decoder.weights())
            assert all(torch.equal(held[name], tensor) for name, tensor in merged_state(module))
            assert bool(decoder._base._kept) == (form == "converted"), "a second copy of what a file has"


async def test_a_base_that_changes_in_its_file_is_refused_and_the_next_adapter_replaces_all_of_the_last(
    tmp_path: Path,
) -> None:
    directory = write_model(tmp_path)
    file = directory / "model.safetensors"
    everything = attach(load(directory), LoraConfig(rank=2), seed=0)
    some = attach(load(directory), LoraConfig(rank=2, targets=("v_proj",)), seed=0)
    engine = engine_for(directory)
    try:
        await engine.load(0, list(pushed_adapter(everything)))
        change(everything)
        whole = file.read_bytes()
        file.write_bytes(whole[: 9 * len(whole) // 10] + bytes(len(whole) - 9 * len(whole) // 10))
        with refused(SyncError, str(directory)):
            await engine.load(1, list(pushed_adapter(everything)))
        file.write_bytes(whole)
        await engine.load(2, list(pushed_adapter(some)))
        held = dict(await engine.weights())
        assert all(torch.equal(held[name], tensor) for name, tensor in merged_state(some))
    finally:
        await engine.close()


def test_tied_layers_take_one_adapter(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    tied = load(directory)
    tied.model.layers[1].mlp.down_proj.weight = tied.model.layers[0].mlp.down_proj.weight
    with refused(TriviumError, "model.layers.0.mlp.down_proj"):
        attach(tied, LoraConfig(rank=2, targets=("down_proj",)), seed=0)
    model = load(directory)
    first, second = (layer.mlp.down_proj for layer in model.model.layers)
    second.weight.data.copy_(first.weight)
    model.save_pretrained(directory)
    module = attach(model, LoraConfig(rank=2, targets=("down_proj",)), seed=0)
    change(module)
    with torch.inference_mode():
        decoder = Decoder(directory, dtype=torch.float32, device="cpu", exact=False)
        held = [layer.mlp.down_proj for layer in decoder.model.model.layers]
        held[1].weight = held[0].weight
        with pytest.raises(RuntimeError, match="tied to a different tensor"):
            decoder.load(list(pushed_adapter(module)))
        adapted = [layer.mlp.down_proj for layer in module.model.layers]
        for part in ("lora_A", "lora_B"):
            getattr(adapted[1], part)["default"].weight.data.copy_(getattr(adapted[0], part)["default"].weight)
        decoder.load(list(pushed_adapter(module)))
        assert torch.equal(held[0].weight, dict(merged_state(module))["model.layers.1.mlp.down_proj.weight"])


async def test_an_adapter_that_is_not_whole_or_of_another_model_changes_nothing(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    module = attach(load(directory), LoraConfig(rank=2), seed=0)
    change(module)
    wide = attach(load(write_model(tmp_path / "wide", hidden_size=32)), LoraConfig(rank=2), seed=0)
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "max_window_layers": 3}
    deep = attach(load(write_model(tmp_path / "deep", **layers)), LoraConfig(rank=2), seed=0)
    strange = attach(load(write_model(tmp_path / "strange", seed=1)), LoraConfig(rank=2), seed=0)
    engine = engine_for(directory)
    try:
        before = dict(await engine.weights())
        for pushed, found in (
            (list(pushed_adapter(module))[1:], "not complete"),
            (list(pushed_adapter(wide)), "layer is"),
            (list(pushed_adapter(deep)), "'model.layers.2"),
            (list(pushed_adapter(strange)), "differs from"),
        ):
            with refused(SyncError, found):
                await engine.load(1, pushed)
        held = dict(await engine.weights())
        assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
    finally:
        await engine.close()


def test_an_adapter_is_a_small_thing_to_send(tmp_path: Path) -> None:
    directory = write_model(tmp_path, hidden_size=64, intermediate_size=128)
    module = attach(load(directory), LoraConfig(rank=2), seed=0)
    sent, everything = (sum(tensor.nbytes for _, tensor in push(module)) for push in (pushed_adapter, merged_state))
    assert sent * 5 < everything


# --------------------------------------------------------------------------- training


ADVANTAGES = {"advantages": 0.5}
NEEDS_REFERENCE = Parts(needs=frozenset({"ref", "old"}))


def trained(directory: Path, steps: int = 3, lora: dict[str, Any] | None = None, **config: Any) -> TorchTrainEngine:
    engine = make_engine(directory, NEEDS_REFERENCE, lora={"rank": 2} if lora is None else lora, **config)
    take(engine, steps)
    return engine


def take(engine: TorchTrainEngine, steps: int) -> list[Metrics]:
    metrics = []
    for _ in range(steps):
        metrics.append(engine.update("policy", make_batch(seed=engine.version, **ADVANTAGES), Reinforce()))
        engine.version += 1
    return metrics


def test_a_policy_begins_as_the_base_and_is_its_own_reference(tmp_path: Path) -> None:
    directory, batch = write_model(tmp_path), make_batch()
    plain, engine = make_engine(directory, NEEDS_REFERENCE), trained(directory, 0)
    assert engine._learner("reference").model is engine._policy, "one model"
    linear = [layer for layer in engine._policy.module.modules() if type(layer) is nn.Linear]
    assert all(isinstance(layer.forward, partial) for layer in linear), "through oneDNN, the adapter's own too"
    assert len(linear) == 2 * 7 * 3 + 1
    first = plain.score(batch, "ref")
    for what in ("old", "ref"):
        assert all(np.array_equal(a, b) for a, b in zip(engine.score(batch, what), first, strict=True))
    take(engine, 3)
    assert all(np.array_equal(a, b) for a, b in zip(engine.score(batch, "ref"), first, strict=True))
    assert any(np.abs(a - b).max() > 1e-2 for a, b in zip(engine.score(batch, "old"), first, strict=True))
    optimized = {name.split(".")[-2] for name in engine._learner("policy").optimizer.parameters}
    assert optimized == {"default"}
    assert weights(plain).keys() == weights(engine).keys()


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    one, other = (trained(directory, 4, dtype="float64", gradient_checkpointing=each) for each in (False, True))
    assert all(
        torch.allclose(a, b, atol=1e-12) for a, b in zip(weights(one).values(), weights(other).values(), strict=True)
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_checkpoint_is_a_plain_model_and_an_adapter_and_training_goes_on_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    import peft

    directory = write_model(tmp_path / "model", name)
    engine = trained(directory, 3)
    engine.save(tmp_path / "saved")
    again = make_engine(directory, NEEDS_REFERENCE, lora={"rank": 2})
    again.load(tmp_path / "saved")
    assert take(engine, 2) == take(again, 2)
    assert all(torch.equal(a, weights(again)[key]) for key, a in weights(engine).items())
    assert all(
        np.array_equal(a, b)
        for a, b in zip(again.score(make_batch(), "ref"), engine.score(make_batch(), "ref"), strict=True)
    )

    merged = load(tmp_path / "saved" / "policy")
    alone = peft.PeftModel.from_pretrained(load(directory), str(tmp_path / "saved" / "policy-adapter"))
    assert (logits(merged) - logits(alone)).abs().max() < 1e-4
    assert (logits(merged) - logits(load(directory))).abs().max() > 1e-2
    engine.save_weights(tmp_path / "weights")
    assert torch.equal(logits(load(tmp_path / "weights")), logits(_loaded(weights(engine), directory)))


def _loaded(state: dict[str, torch.Tensor], directory: Path) -> PreTrainedModel:
    model = load(directory)
    model.load_state_dict(state, strict=False)  # ties come once
    return model


def test_an_adapter_to_start_from_is_part_of_the_reference(tmp_path: Path) -> None:
    directory, batch = write_model(tmp_path / "model"), make_batch()
    trained(directory, 3).save(tmp_path / "saved")
    engine = trained(directory, 0, lora={"path": str(tmp_path / "saved" / "policy-adapter")})
    first = engine.score(batch, "old")
    take(engine, 2)
    assert all(np.array_equal(a, b) for a, b in zip(engine.score(batch, "ref"), first, strict=True))
    assert engine._learner("reference").model is not engine._policy


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, "critic"):
        make_engine(write_model(tmp_path), Parts(objectives=(SquaredError(),)), lora={})
    said = {
        "model": {"kind": "hf", "path": str(tmp_path)},
        "tasks": {"train": {"kind": "arithmetic"}},
        "rewards": ["exact"],
        "engine": {"kind": "scripted", "replies": ["1"]},
        "train": {"lora": {"push": "adapter", "path": "nowhere", "rank": 3}},
    }
    with refused(ConfigError) as caught:
        config_from_mapping(said)
    wrong = {problem.where: problem.found for problem in caught.value.problems}
    assert wrong["train.lora.push"] == "engine.kind 'scripted' cannot"
    assert "no such directory" in wrong["train.lora.path"]
    assert "has its own" in wrong["train.lora.rank"]


@pytest.mark.parametrize(
    ("sections", "push"),
    [
        ({}, "adapter"),
        ({"train": {"lora": {"push": "merged"}}}, "merged"),
        ({"train": {"lora": {}, "frozen_dtype": "bfloat16"}}, "merged"),  # engines read another base from the files
        ({"engine": {"kind": "vllm"}}, "merged"),  # it would add the adapter in every step
        ({"engine": {"kind": "vllm"}, "train": {"lora": {"push": "adapter"}}}, "adapter"),
        ({"engine": {"kind": "vllm"}, "run": {"mode": "tinker"}, "tasks": {"train": {"kind": "served"}}}, "adapter"),
        ({"run": {"mode": "train"}, "buffer": {"kind": "sql"}, "sync": {"method": "checkpoint"}}, "merged"),
    ],
)
def test_explorers_receive_the_adapter_if_they_have_its_base_and_add_it_once(
    sections: dict[str, Any], push: str
) -> None:
    config = config_from_mapping(
        {"model": {"kind": "tiny"}, "tasks": {"train": {"kind": "arithmetic"}}, "rewards": ["exact"]}
        | {"train": {"lora": {}}}
        | sections
    )
    assert config.train.lora.push == push
    assert ("push" in config.train.lora.model_fields_set) == ("push" in sections.get("train", {}).get("lora", {}))


@pytest.mark.parametrize(("before", "now"), [("merged", None), (None, "merged")])
def test_what_explorers_receive_may_change_when_a_run_resumes(before: str | None, now: str | None) -> None:
    """Also by the mode of the commands that continue it, on which the usual value depends."""
    began, config = (configured(train={"lora": {"push": push}}) for push in (before, now))
    assert resume_differences(yaml.safe_load(to_yaml(began)), config) == []


def test_engines_add_no_adapter_to_weights_with_more_bits_than_those_that_it_is_trained_beside(tmp_path: Path) -> None:
    def problems(model: Mapping[str, Any], **lora: Any) -> list[str]:
        sections = {"frozen_dtype": "bfloat16", "lora": {"push": "adapter", **lora}}
        config = configured(model=model, train=sections)
        return [problem.where for problem in config.train.machine_problems(config, "train")]

    wide, narrow = ({"kind": "hf", "path": str(write_model(tmp_path / name, "llama"))} for name in ("wide", "narrow"))
    load_lm(narrow["path"], dtype=torch.bfloat16).save_pretrained(narrow["path"])
    assert problems(wide) == problems({"kind": "tiny"}) == ["train.frozen_dtype"]
    assert problems(narrow) == problems(wide, push="merged") == []


class Kept:
    """A channel that keeps what it was offered."""

    def __init__(self) -> None:
        self.offered: dict[str, torch.Tensor] = {}

    def offer(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> bool:
        self.offered = {name: tensor.clone() for name, tensor in weights}
        return True


def on_ranks(rank: int, size: int, directory: Path, config: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Each trains on the same batch as the others: what is summed over them has their number as a factor."""
    ranks = join_ranks(device="cpu")
    assert (ranks.rank, ranks.size) == (rank, size)
    engine = TorchTrainEngine(
        TorchTrainEngine.Config(device="cpu", optimizer={"lr": 0.1, "eps": 1.0}, max_grad_norm=1e9, **config),
        model_dir=directory / "model",
        algorithm=NEEDS_REFERENCE,
        temperature=0.8,
        max_response_length=32,
        total_steps=10,
        seed=0,
        threads=1,
        ranks=ranks,
    )
    engine.prepare()
    kept = Kept()
    engine.settings = EngineSettings(cast(WeightChannel, kept))
    for step in range(3):
        batch = make_batch(seed=step, **ADVANTAGES)
        totals = count(batch, 32)
        whole = replace(totals, tokens=totals.tokens * ranks.size)
        engine.update("policy", batch, Reinforce(), whole)
        engine.version += 1
    engine.offer_weights()
    engine.save(directory / f"saved-{ranks.size}")
    score = {str(i): torch.from_numpy(row) for i, row in enumerate(engine.score(make_batch(), "ref"))}
    return {"merged": weights(engine), "pushed": kept.offered, "ref": score}


def test_ranks_train_push_and_save_what_one_process_does(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    config = {"dtype": "float64", "lora": {"rank": 2, "push": "adapter"}}
    one = on_ranks(0, 1, tmp_path, config)
    two = run_ranks([2], on_ranks, tmp_path / "two", tmp_path, config)[2]
    for kind, expected in one.items():
        found = two[0][kind]
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-9) for name, tensor in expected.items())
    assert torch.equal(two[0]["merged"]["model.norm.weight"], two[1]["merged"]["model.norm.weight"])
    files = [
        sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        for folder in (tmp_path / "saved-1", tmp_path / "saved-2")
    ]
    assert files[0] == files[1]
    assert "policy-adapter/adapter_config.json" in files[0]
    engine = make_engine(tmp_path / "model", NEEDS_REFERENCE, **config)
    engine.load(tmp_path / "saved-2")
    assert all(torch.allclose(tensor, two[0]["merged"][name], atol=1e-12) for name, tensor in weights(engine).items())


def test_the_base_may_be_bfloat16_under_an_adapter_in_float32(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama")

    def engine(**config: Any) -> TorchTrainEngine:
        return make_engine(directory, Parts((Reinforce(),), frozenset({"ref"})), lora={"rank": 2}, **config)

    wide, narrow = engine(), engine(frozen_dtype="bfloat16")
    module = narrow._learners["policy"].model.module
    types = {"lora" if ".lora_" in name else "base": p.dtype for name, p in module.named_parameters()}
    assert types == {"base": torch.bfloat16, "lora": torch.float32}
    batch = make_batch(advantages=0.5)
    old = [torch.from_numpy(np.concatenate(each.score(batch, "old"))) for each in (wide, narrow)]
    assert old[1].dtype == torch.float32
    torch.testing.assert_close(*old, rtol=0.1, atol=0.3)
    assert not torch.equal(*old)
    np.testing.assert_array_equal(old[1], np.concatenate(narrow.score(batch, "ref")))
    rows = [narrow.update("policy", batch, narrow.algorithm.objectives[0]) for _ in range(3)]
    assert rows[-1]["train/loss/policy"] < rows[0]["train/loss/policy"]
    exported = dict(narrow.export_weights())
    assert exported["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32  # base and adapter, added
    narrow.save(tmp_path / "saved")
    again = engine(frozen_dtype="bfloat16")
    again.load(tmp_path / "saved")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in again.export_weights())
