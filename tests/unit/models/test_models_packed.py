"""Packed sequences give what each gives alone, and cannot see one another."""

import numpy as np
import pytest
import torch
from failing import refused
from training_parts import MODELS, VOCABULARY, write_model
from transformers import AutoModelForCausalLM, GPTJConfig

from trivium.foundation.errors import TriviumError
from trivium.models.backbone.packed import pack
from trivium.models.heads.trained_models import LanguageModel, ValueModel

CPU = torch.device("cpu")


@pytest.fixture(params=MODELS)
def directory(request, tmp_path):
    return write_model(tmp_path / request.param, request.param)


def sequences(lengths=(9, 21, 20, 3, 1, 12, 12)):
    rng = np.random.default_rng(1)
    return [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in lengths]


def log_probs(model, many):
    batch = pack(many)
    with torch.no_grad():
        return model(batch, batch.positions.nonzero().squeeze(1))


def by_logits(directory, many, temperature, dtype):
    """Plain transformers: each sequence alone, all logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    log_prob, entropy = [], []
    for tokens in many:
        x = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            log_p = (model(input_ids=x[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        log_prob.append(log_p.gather(1, x[1:, None]).squeeze(1))
        entropy.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_prob), torch.cat(entropy)


def tolerance(directory, dtype):
    """BLOOM computes its softmax in float32 whatever the weights are."""
    close = 1e-6 if directory.name == "bloom" else 1e-11
    return {"rtol": close, "atol": close} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_equals_alone(directory, dtype):
    model = LanguageModel(directory, dtype=dtype, device=CPU, temperature=0.7)
    assert model.backbone.packs == (directory.name != "bloom")
    found = log_probs(model, sequences())
    expected = by_logits(directory, sequences(), 0.7, dtype)
    torch.testing.assert_close(found, expected, **tolerance(directory, dtype))
    assert found[0].std() > 0.1  # the model says something


def test_rounding_does_not_make_a_model_pad_and_padding_is_said(directory, caplog):
    LanguageModel(directory, dtype=torch.float32, device=CPU, temperature=1.0)
    assert ("runs with padding, which takes more time" in caplog.text) == (directory.name == "bloom")
    if directory.name == "bloom":
        return
    for dtype in (torch.float32, torch.bfloat16):
        model = LanguageModel(directory, dtype=torch.float32, weights=dtype, device=CPU, temperature=1.0)
        caplog.clear()
        model.backbone.module.set_attn_implementation("eager")
        with torch.no_grad():
            model.backbone.settle(1e-12)  # below any rounding
        assert model.backbone.packs
        assert not caplog.text
        attention = model.backbone._packed
        model.backbone._packed = lambda batch, attention=attention: attention(batch) * 1.1
        model.backbone.module.set_attn_implementation("eager")
        with torch.no_grad():
            model.backbone.settle(1e-12)
        assert not model.backbone.packs
        assert "more than rounding explains" in caplog.text


def test_a_neighbour_changes_nothing(directory):
    model = LanguageModel(directory, dtype=torch.float32, device=CPU, temperature=1.0)
    many = sequences()
    other = [many[0], (many[1] + 5) % VOCABULARY, *many[2:]]
    before, after = log_probs(model, many)[0], log_probs(model, other)[0]
    own = torch.ones(len(before), dtype=torch.bool)
    own[8:28] = False  # the 20 predictions of the perturbed sequence
    assert torch.equal(before[own], after[own])
    assert not torch.isclose(before[~own], after[~own]).all()


def test_gradients_equal_the_sequences_one_by_one(directory):
    model = LanguageModel(directory, dtype=torch.float64, device=CPU, temperature=1.0)

    def gradients(parts):
        model.module.zero_grad()
        for part in parts:
            batch = pack(part)
            model(batch, batch.positions.nonzero().squeeze(1))[0].sin().sum().backward()
        return [p.grad for p in model.module.parameters()]

    many = [s for s in sequences() if len(s) > 1]
    torch.testing.assert_close(gradients([many]), gradients([[s] for s in many]), **tolerance(directory, torch.float64))


def test_two_passes_are_equal_and_dropout_is_off(tmp_path):
    directory = write_model(tmp_path, "gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    model = LanguageModel(directory, dtype=torch.float32, device=CPU, temperature=1.0)
    assert torch.equal(log_probs(model, sequences())[0], log_probs(model, sequences())[0])


def test_values_are_those_of_the_state_before_the_token(tmp_path):
    model = ValueModel(write_model(tmp_path), dtype=torch.float64, device=CPU, seed=3)
    many = sequences((6, 6))
    changed = [np.concatenate([many[0][:3], [5, 6, 7]]).astype(np.int32), many[1]]
    values, others = (log_probs(model, x) for x in (many, changed))
    assert torch.equal(values[:3], others[:3])  # tokens 1 to 3: the state before token 3 has not seen token 3
    assert not torch.isclose(values[3:5], others[3:5]).any()
    assert values.abs().max() < 0.2


def test_value_heads_differ_by_seed_only(tmp_path):
    write_model(tmp_path)
    heads = [ValueModel(tmp_path, dtype=torch.float32, device=CPU, seed=s).value_head.weight for s in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_soft_capped_logits_are_refused(tmp_path):
    write_model(tmp_path, "qwen3", final_logit_softcapping=30.0)
    with refused(TriviumError, "final_logit_softcapping"):
        LanguageModel(tmp_path, dtype=torch.float32, device=CPU, temperature=1.0)


def test_an_output_bias_counts(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=VOCABULARY, n_positions=64)
    )
    torch.nn.init.normal_(model.lm_head.bias, std=2.0)
    model.save_pretrained(tmp_path)
    model = LanguageModel(tmp_path, dtype=torch.float64, device=CPU, temperature=0.5)
    expected = by_logits(tmp_path, sequences(), 0.5, torch.float64)
    torch.testing.assert_close(log_probs(model, sequences()), expected, rtol=1e-9, atol=1e-9)
