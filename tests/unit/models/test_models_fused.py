"""Layers with gradients of their own compute what transformers' layers compute."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from training_parts import MODELS, VOCABULARY
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel, Qwen2Config, Qwen3MoeConfig
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from trivium.models.cpu.fused import fuse, fuse_adapters, rms_norm, silu_product
from trivium.models.cpu.linear import use_onednn
from trivium.models.weights.lora import adapter_off, adapter_state, attach
from trivium.models.weights.section import LoraConfig

CPU = torch.device("cpu")
SIZE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
HEADS: dict[str, Any] = {"head_dim": 4}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS: dict[str, tuple[Any, int, int, int]] = {
    # norms, MLPs and attentions that are replaced
    "qwen3": (MODELS["qwen3"], 9, 2, 2),
    "llama": (MODELS["llama"], 5, 2, 2),
    "mistral": (MODELS["mistral"], 5, 2, 2),
    "qwen2": (Qwen2Config(**SIZE), 5, 2, 2),
    "gemma3": (Gemma3TextConfig(**(SIZE | HEADS)), 13, 0, 2),
    "qwen3_moe": (Qwen3MoeConfig(**(SIZE | HEADS | EXPERTS)), 9, 0, 2),
    "gpt2": (MODELS["gpt2"], 0, 0, 0),
}


def model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    made = (
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", experts_implementation="eager")
        .to(dtype)
        .eval()
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(8.0) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


def results(made: PreTrainedModel, autocast: bool = False) -> list[torch.Tensor]:
    """Log-probabilities, and the gradient of each parameter."""
    tokens = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = made(input_ids=tokens, use_cache=False).logits
    log_probs = logits.float().log_softmax(-1) if autocast else logits.log_softmax(-1)
    loss = (log_probs * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(2))).mean()
    return [log_probs.detach(), *torch.autograd.grad(loss, [each for each in made.parameters() if each.requires_grad])]


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_whole_models(name: str) -> None:
    config, *counts = CONFIGS[name]
    exact, fused, exactly_fused = (model(config, dtype) for dtype in (torch.float64, torch.float32, torch.float64))
    plain, plain_halved = (results(model(config, torch.float32), autocast) for autocast in (False, True))
    fuse(fused, CPU)
    fuse(exactly_fused, CPU)
    replaced = [type(layer).__name__ for layer in fused.modules() if "forward" in vars(layer)]
    assert [sum(name.endswith(kind) for name in replaced) for kind in ("RMSNorm", "MLP", "Attention")] == counts
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    fuse(empty, CPU)
    assert [name for name, layer in empty.named_modules() if "forward" in vars(layer)] == [
        name for name, layer in fused.named_modules() if "forward" in vars(layer)
    ]
    truth = results(exact)
    assert worst(results(exactly_fused), truth) < 1e-12
    assert worst(results(fused), truth) < max(1e-5, 2 * worst(plain, truth))
    assert worst(results(fused, autocast=True), truth) < 2 * worst(plain_halved, truth)


def test_gradients_of_each() -> None:
    draw = partial(torch.randn, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, scale: rms_norm(x, scale, 1e-2), (draw(2, 3, 5), draw(5)))
    assert gradcheck(silu_product, (draw(3, 5), draw(3, 5)))
    x = draw(7, 6)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    torch.testing.assert_close(rms_norm(x, torch.ones(6, dtype=torch.float64), 1e-3), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_mlp_in_one_is_that_of_its_layers(dtype: torch.dtype) -> None:
    made = model(CONFIGS["qwen3"][0], dtype)
    use_onednn(made, CPU)
    fuse(made, CPU)
    in_one = results(made)
    seen: list[nn.Module] = []
    mlp: Any = made.model.layers[0].mlp
    linear = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    hooks = [each.register_forward_hook(lambda layer, *_: seen.append(layer)) for each in linear]
    for found, expected in zip(results(made), in_one, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if dtype == torch.float32 else 1e-15)
    assert seen == [*linear]
    for hook in hooks:
        hook.remove()
    mlp.up_proj.weight.requires_grad_(False)
    trained = [each for each in made.parameters() if each.requires_grad]
    loss = made(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits.square().sum()
    assert len(torch.autograd.grad(loss, trained)) == len(trained)


def adapted(name: str, dtype: torch.dtype) -> Any:
    """A model with an adapter of random numbers."""
    made = attach(model(CONFIGS[name][0], dtype), LoraConfig(rank=3, alpha=5), seed=0)
    with torch.no_grad():
        for number, tensor in enumerate(dict(adapter_state(made)).values()):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "fused_layers"), [("llama", 14), ("qwen2", 8), ("gpt2", 0)])
def test_adapters_have_the_values_and_gradients_of_peft(name: str, fused_layers: int, dtype: torch.dtype) -> None:
    """Layers with a bias (queries, keys and values of Qwen2) or a weight of the shape (in, out) are left to peft."""
    made = adapted(name, dtype)
    expected = results(made)
    use_onednn(made, CPU)
    fuse_adapters(made, CPU)
    tokens = torch.arange(3, 14)[None]
    logits = made(input_ids=tokens, use_cache=False).logits
    assert operations(logits).count("_AdaptedLinearBackward") == fused_layers
    assert worst(results(made), expected) < (1e-12 if dtype == torch.float64 else 1e-4)
    base = model(CONFIGS[name][0], dtype)
    use_onednn(base, CPU)
    with adapter_off(made):
        assert torch.equal(made(input_ids=tokens, use_cache=False).logits, base(input_ids=tokens).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_adapted_mlp_keeps_its_inner_product_in_no_pass(dtype: torch.dtype) -> None:
    """The adapter of the last projection computes silu(gate) * up itself, with and without hooks on the projection."""
    made = adapted("qwen3", dtype)
    expected = results(made)
    use_onednn(made, CPU)
    fuse_adapters(made, CPU)
    fuse(made, CPU)
    logits = made(input_ids=torch.arange(3, 14)[None], use_cache=False).logits
    assert "_SiluProductBackward" not in operations(logits)
    assert worst(results(made), expected) < (1e-12 if dtype == torch.float64 else 1e-4)
    seen: list[nn.Module] = []
    for layer in (layers := [m for name, m in made.named_modules() if name.endswith("down_proj")]):
        layer.register_forward_hook(lambda layer, *_: seen.append(layer))
    assert worst(results(made), expected) < (1e-12 if dtype == torch.float64 else 1e-4)
    assert set(seen) == set(layers)


def operations(output: torch.Tensor) -> list[str]:
    """The names of the operations that gradients of this tensor pass through."""
    waiting, seen = [output.grad_fn], {}
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen[node] = node.name()
            waiting += [following for following, _ in node.next_functions]
    return [*seen.values()]


class CentredRMSNorm(Qwen3RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class GatedRMSNorm(Qwen3RMSNorm):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden_states) * (1.0 if gate is None else gate)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.act_fn: nn.Module = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.cat(apply_rotary_pos_emb(q, k, cos, sin), 1) * self.weight


class Interleaved(Attention):
    """As an attention of Cohere: in its module the name means another function."""

    forward = FunctionType(Attention.forward.__code__, globals() | {"apply_rotary_pos_emb": interleaved})


@pytest.mark.parametrize(
    "layer", [CentredRMSNorm(8), GatedRMSNorm(8), MLP(), Interleaved()], ids=lambda x: type(x).__name__
)
def test_what_computes_something_else_is_left_alone(layer: nn.Module) -> None:
    fuse(layer, CPU)
    assert "forward" not in vars(layer)


def test_a_rotation_of_a_part_of_the_heads_stays_the_original() -> None:
    layer = Attention()
    fuse(layer, CPU)
    assert "forward" in vars(layer)
    q, k, table = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 1)  # one number for all of a head
    assert torch.equal(layer(q, k, table, table), Attention()(q, k, table, table))


def test_hooks_of_the_linear_layers_are_called() -> None:
    layer = MLP()
    layer.act_fn = nn.SiLU()
    fuse(layer, CPU)
    seen: list[nn.Module] = []
    for child in (layer.gate_proj, layer.up_proj, layer.down_proj):
        child.register_forward_hook(lambda module, inputs, output: seen.append(module))
    layer(torch.randn(2, 4))
    assert seen == [layer.gate_proj, layer.up_proj, layer.down_proj]
