"""What is exported, what arrives, what is held: every parameter and persistent buffer, each by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_parts import make_engine, write_model

from trivium.engines.torch.engine import TorchEngine
from trivium.errors import SyncError
from trivium.models.heads.trained_models import tensor_names
from trivium.policy import EngineFailure


def engine_for(model_dir: Path, dtype: str = "float32") -> TorchEngine:
    config = TorchEngine.Config.model_validate({"dtype": dtype})
    return TorchEngine(config, model_dir=model_dir, eos_token_ids=frozenset(), decode=lambda _: "", threads=1)


def test_every_parameter_and_persistent_buffer_is_exported_and_ties_once(tmp_path: Path) -> None:
    engine = make_engine(write_model(tmp_path))
    module = engine._policy.module
    shared = torch.arange(6.0)
    module.register_buffer("steps", torch.tensor(3))
    module.register_buffer("nothing", torch.empty(0))
    module.register_buffer("no_more", torch.empty(0, 2))
    module.register_buffer("long", shared)
    module.register_buffer("start_of_it", shared[:2])
    module.register_buffer("derived", torch.ones(2), persistent=False)
    exported = set(tensor_names(module))
    assert module.state_dict().keys() - exported == {"lm_head.weight"}  # tied to the embedding
    assert exported >= {"steps", "nothing", "no_more", "long", "start_of_it"}
    assert "derived" not in exported


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_shows_what_it_holds(dtype: str, tmp_path: Path) -> None:
    trained = make_engine(write_model(tmp_path / "model", seed=1))
    engine = engine_for(write_model(tmp_path / "model"), dtype)
    try:
        sent = {name: tensor + 0.1 for name, tensor in trained.export_weights()}
        before = dict(await engine.weights())
        await engine.load(1, sent.items())
        held = dict(await engine.weights())
        for name, tensor in sent.items():
            assert torch.equal(held[name], tensor.to(held[name].dtype)), name
            assert not torch.equal(held[name], before[name]), name
        assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])
        held["lm_head.weight"].zero_()  # copies: the engine's own are out of reach
        assert dict(await engine.weights())["lm_head.weight"].any()
    finally:
        await engine.close()


async def test_weights_that_contradict_themselves_end_the_engine(tmp_path: Path) -> None:
    """Two names of one tensor, with two values: one of them is not what the engine holds afterwards."""
    trained = make_engine(write_model(tmp_path))
    engine = engine_for(tmp_path)
    sent = dict(trained.export_weights())
    await engine.load(1, [*sent.items(), ("lm_head.weight", sent["model.embed_tokens.weight"])])
    with pytest.raises(EngineFailure, match=r"holds a model.embed_tokens.weight that differs"):
        await engine.load(2, [*sent.items(), ("lm_head.weight", sent["model.embed_tokens.weight"] + 1)])
    with pytest.raises(EngineFailure):
        await engine.weights()
    await engine.close()


async def test_what_is_missing_or_too_much_is_named_and_changes_nothing(tmp_path: Path) -> None:
    trained = make_engine(write_model(tmp_path))
    engine = engine_for(tmp_path)
    try:
        sent = {name: tensor + 1 for name, tensor in trained.export_weights()}
        before = dict(await engine.weights())
        with pytest.raises(SyncError, match=r"unexpected: model.norm.wait \(1\)"):
            await engine.load(1, [*sent.items(), ("model.norm.wait", torch.ones(1))])
        del sent["model.norm.weight"]
        with pytest.raises(SyncError, match=r"missing: model.norm.weight \(1\)"):
            await engine.load(1, sent.items())
        held = dict(await engine.weights())
        assert all(torch.equal(tensor, held[name]) for name, tensor in before.items())
    finally:
        await engine.close()
