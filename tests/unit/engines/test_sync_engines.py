"""What is exported, what arrives, what is held: every parameter and persistent buffer, each by its name."""

from __future__ import annotations

from pathlib import Path

import torch
from failing import refused
from training_parts import make_engine, write_model

from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.errors import SyncError
from trivium.models.heads.trained_models import tensor_names
from trivium.policy import EngineFailure


def engine_for(model_dir: Path) -> TorchEngine:
    return TorchEngine(
        TorchEngine.Config(), model_dir=model_dir, eos_token_ids=frozenset(), decode=lambda _: "", threads=1
    )


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


async def test_an_engine_shows_copies_of_what_it_holds(tmp_path: Path) -> None:
    engine = engine_for(write_model(tmp_path))
    try:
        held = dict(await engine.weights())
        assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])
        held["lm_head.weight"].zero_()
        assert dict(await engine.weights())["lm_head.weight"].any()
    finally:
        await engine.close()


async def test_weights_that_contradict_themselves_end_the_engine(tmp_path: Path) -> None:
    """Two names of one tensor, with two values: one of them is not what the engine holds afterwards."""
    trained = make_engine(write_model(tmp_path))
    engine = engine_for(tmp_path)
    sent = dict(trained.export_weights())
    await engine.load(1, [*sent.items(), ("lm_head.weight", sent["model.embed_tokens.weight"])])
    with refused(EngineFailure, "model.embed_tokens.weight"):
        await engine.load(2, [*sent.items(), ("lm_head.weight", sent["model.embed_tokens.weight"] + 1)])
    with refused(EngineFailure):
        await engine.weights()
    await engine.close()


async def test_what_is_missing_or_too_much_is_named_and_changes_nothing(tmp_path: Path) -> None:
    trained = make_engine(write_model(tmp_path))
    engine = engine_for(tmp_path)
    try:
        sent = {name: tensor + 1 for name, tensor in trained.export_weights()}
        before = dict(await engine.weights())
        with refused(SyncError, "model.norm.wait (1)"):
            await engine.load(1, [*sent.items(), ("model.norm.wait", torch.ones(1))])
        del sent["model.norm.weight"]
        with refused(SyncError, "model.norm.weight (1)"):
            await engine.load(1, sent.items())
        held = dict(await engine.weights())
        assert all(torch.equal(tensor, held[name]) for name, tensor in before.items())
    finally:
        await engine.close()
