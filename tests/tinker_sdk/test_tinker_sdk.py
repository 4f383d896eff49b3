"""The Tinker SDK itself against the service, on a tiny model. `make test-tinker` runs it, where it is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import tiny_model

from tests.tinker_sdk.services import KEY, Service, running
from trivium.config import config_from_mapping
from trivium.inspection.run import RecordedRun
from trivium.runtime.launch import run
from trivium.types import Trajectory

if importlib.util.find_spec("tinker") is None:
    pytest.skip("the Tinker SDK is not installed here; `make test-tinker` has it", allow_module_level=True)
import tinker
import torch
from safetensors.numpy import load_file
from tinker import types

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
TOKENS = [1, 2, 10, 3, 4, 11, 4, 6]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("tinker") / "run", tiny_model()) as service:
        yield service


def client_of(service: Service) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=service.url, api_key=KEY)


def model_of(service: Service, **lora: Any) -> tinker.TrainingClient:
    return client_of(service).create_lora_training_client("tiny", **{"rank": 4, "seed": 1, **lora}).result()


def supervised(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def log_probs(model: tinker.TrainingClient, tokens: list[int]) -> np.ndarray:
    return model.forward([supervised(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()


def adam(**changed: float) -> types.AdamParams:
    return types.AdamParams(**{"learning_rate": 1e-2, **changed})


def steps(model: tinker.TrainingClient, number: int) -> list[float]:
    losses = []
    for _ in range(number):
        loss = model.forward_backward([supervised(TOKENS), supervised(TOKENS[2:])], "cross_entropy")
        step = model.optim_step(adam())  # sent before the loss is there
        losses.append(loss.result().metrics["loss:sum"])
        step.result()
    return losses


def test_the_four_verbs(service: Service) -> None:
    model = model_of(service)
    losses = steps(model, 4)
    assert losses == sorted(losses, reverse=True)
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TOKENS)
    assert np.abs(np.array(sampler.compute_logprobs(prompt).result()[1:]) - log_probs(model, TOKENS)).max() < 5e-6
    params = types.SamplingParams(max_tokens=8, seed=3)
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    one, other = (sampler.sample(prompt, 4, params, **options).result() for _ in range(2))
    assert [each.tokens for each in one.sequences] == [each.tokens for each in other.sequences]
    assert len({each.sequence_id for each in (*one.sequences, *other.sequences)}) == 8
    for sequence in one.sequences:
        assert len(sequence.topk_logprobs) == len(sequence.tokens)
        for token, log_prob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert log_prob <= top[0][1] + 1e-4
            assert all(abs(value - log_prob) < 1e-4 for id, value in top if id == token)
    assert one.topk_prompt_logprobs[0] is None
    assert [len(each) for each in one.topk_prompt_logprobs[1:]] == [3] * (len(TOKENS) - 1)
    last = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=2).result()
    assert [each is None for each in last.prompt_logprobs] == [True] * (len(TOKENS) - 2) + [False] * 2
    assert sampler.get_base_model() == "tiny"
    assert len(model.get_tokenizer()("12+").input_ids) == 3


def test_a_custom_loss_is_the_loss_itself(service: Service) -> None:
    one, other = model_of(service, seed=9), model_of(service, seed=9)

    def loss(data: list[types.Datum], log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        value = -sum(
            (each * torch.tensor(d.loss_fn_inputs["weights"].data)).sum()
            for d, each in zip(data, log_probs, strict=True)
        )
        return value, {"own": 1.0}

    data = [supervised(TOKENS), supervised(TOKENS[1:])]
    mine = one.forward_backward_custom(data, loss).result()
    theirs = other.forward_backward(data, "cross_entropy").result()
    assert mine.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-6)
    for model in (one, other):
        model.optim_step(adam()).result()
    assert np.abs(log_probs(one, TOKENS) - log_probs(other, TOKENS)).max() < 1e-6


def test_several_targets_of_a_token(service: Service) -> None:
    """As distillation sends them: (N, K) targets with weights, sparse where that is smaller."""
    model = model_of(service)
    targets = torch.zeros(len(TOKENS), 6, dtype=torch.int64)
    weights = torch.zeros(len(TOKENS), 6)
    targets[:, 0], weights[:, 0] = torch.tensor([*TOKENS[1:], 5]), 0.75
    targets[3, 1], weights[3, 1] = 7, 0.25
    datum = types.Datum(types.ModelInput.from_ints(TOKENS), {"target_tokens": targets, "weights": weights})
    assert datum.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    result = model.forward([datum], "cross_entropy").result()
    found = result.loss_fn_outputs[0]["logprobs"].to_torch()
    assert found.shape == targets.shape
    assert np.allclose(found[:-1, 0], log_probs(model, TOKENS), atol=1e-6)
    assert result.metrics["loss:sum"] == pytest.approx(float(-(weights * found).sum()), rel=1e-5)


def test_saved_states_continue_and_are_listed(service: Service) -> None:
    client = client_of(service)
    model = client.create_lora_training_client("tiny", rank=4, seed=2, train_mlp=False).result()
    steps(model, 2)
    path = model.save_state("a", ttl_seconds=4000, user_metadata={"of": "me"}).result().path
    expected = steps(model, 2)
    loaded = client.create_training_client_from_state_with_optimizer(path).result()
    assert steps(loaded, 2) == expected
    assert steps(client.create_training_client_from_state(path).result(), 2) != expected
    sampler = model.save_weights_for_sampler("b").result().path
    rest = client.create_rest_client()
    rows = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [(row.checkpoint_type, row.tinker_path) for row in rows] == [("training", path), ("sampler", sampler)]
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.lora_rank, info.train_attn, info.train_mlp, info.train_unembed) == (4, True, False, False)
    listed = rest.get_training_run_by_tinker_path(path).result()
    assert (listed.training_run_id, listed.lora_rank, listed.last_checkpoint.tinker_path) == (model.model_id, 4, path)
    assert model.model_id in [run.training_run_id for run in rest.list_training_runs().result().training_runs]
    assert {path, sampler} <= {row.tinker_path for row in rest.list_user_checkpoints().result().checkpoints}
    with pytest.raises(tinker.NotFoundError, match="does not have it"):
        rest.publish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert [row.tinker_path for row in rest.list_checkpoints(model.model_id).result().checkpoints] == [sampler]
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state(path).result()


def test_errors_are_sentences(service: Service) -> None:
    model = model_of(service)
    with pytest.raises(tinker.BadRequestError, match="no such loss"):
        model.forward_backward([supervised(TOKENS)], "hinge").result()  # type: ignore[arg-type]
    with pytest.raises(tinker.RequestFailedError, match="context"):
        model.forward_backward([supervised([4] * 60)], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="lacks data"):
        model.optim_step(adam()).result()
    assert len(steps(model, 1)) == 1  # the client goes on
    with pytest.raises(tinker.BadRequestError, match="another one"):
        client_of(service).create_lora_training_client("other/model").result()


def test_a_kill_in_the_middle_of_a_step_loses_only_what_was_not_saved(tmp_path: Path) -> None:
    service = Service(tmp_path / "run", tiny_model(max_position=1024, layers=2))
    model = model_of(service)
    path = model.save_state("saved").result().path
    data = [supervised([3, 4, *[(7 * i + n) % 10 for i in range(1000)]]) for n in range(64)]
    losing = [model.forward_backward(data, "cross_entropy") for _ in range(8)]
    step = model.optim_step(adam())
    losing[0].result()
    service.kill()  # seven more are queued or computed
    second = Service(tmp_path / "run", tiny_model(max_position=1024, layers=2), port=service.port)
    try:
        for future in (*losing[1:], step):
            with pytest.raises(Exception, match=r"expired|no longer in memory|404|410|poisoned"):
                future.result(timeout=300)
        client = client_of(second)
        again = client.create_training_client_from_state_with_optimizer(path).result()
        assert len(steps(again, 2)) == 2
        assert not [*(tmp_path / "run" / "tinker").glob("*/*/.*")]
        assert "Traceback" not in second.text()
    finally:
        second.end()
        service.end()


@pytest.mark.parametrize(("aggregate", "bound"), [("seq-mean-token-sum", 0.0), ("token-mean", 1e-6)])
def test_grpo_against_the_sdk_is_the_own_loop(tmp_path: Path, aggregate: str, bound: float) -> None:
    """`trivium run` rolls out and trains; a script of the SDK trains on the same rollouts in the same order, with the
    formulas of GRPO written out. Where the divisor is a power of two, here 8 sequences, losses and adapters are equal
    to the bit. Else they are not: the loop divides the sum of the loss, and a script its advantages, which rounds them
    (float32, 6e-8 of each)."""
    lora, optimizer = {"rank": 4, "alpha": 32}, {"lr": 3e-2, "betas": [0.9, 0.95]}
    ppo = {"kind": "ppo", "dual_clip": None}
    sections: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "own"), "seed": 6},
        "model": tiny_model(),
        "tasks": {"train": {"kind": "arithmetic"}},
        "engine": {"sampling": {"max_new_tokens": 5}},
        "algorithm": {"kind": "grpo", "epochs": 2, "aggregate": aggregate, "policy_loss": ppo},
        "train": {"lora": lora, "optimizer": optimizer, "max_grad_norm": 0.5},
        "schedule": {"steps": 3, "groups_per_step": 2, "group_size": 4},
        "cluster": {"threads": 1},
        "monitors": [{"kind": "jsonl"}],
        "checkpoint": {"save_every": 3},
    }
    sections["rewards"] = [{"kind": f"{__name__}:length"}]
    run(config_from_mapping(sections, None))
    own = RecordedRun.open(tmp_path / "own")
    rows = [json.loads(line) for line in (tmp_path / "own/metrics.jsonl").read_text().splitlines()]
    expected = [row["train/loss/policy"] for row in rows if "train/loss/policy" in row]
    with running(tmp_path / "service", {"kind": "hf", "path": str(tmp_path / "own/model")}) as service:
        model = model_of(service, seed=6)
        losses = []
        for step in (1, 2, 3):
            groups = [own.groups.group(place).trajectories for place in own.groups.of_step(step)]
            turns = [(each.turns[0], advantage) for group in groups for each, advantage in advantages(group)]
            divisor = len(turns) if aggregate == "seq-mean-token-sum" else sum(len(turn.tokens) for turn, _ in turns)
            data = []
            for turn, advantage in turns:
                before, tokens = len(turn.prompt_tokens) - 1, [*turn.prompt_tokens.tolist(), *turn.tokens.tolist()]
                of_trainer = log_probs(model, tokens)[before:]
                assert np.abs(turn.log_prob - of_trainer).max() < 1e-5  # the loop's sampler, and the service's trainer
                inputs = {
                    "target_tokens": tokens[1:],
                    "logprobs": [0.0] * before + turn.log_prob.tolist(),
                    "advantages": [0.0] * before + [advantage / divisor] * len(turn.tokens),
                }
                data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
            of_epochs = []
            for _ in range(2):
                loss = model.forward_backward(data, "ppo")
                model.optim_step(adam(learning_rate=3e-2, beta2=0.95, eps=1e-8, grad_clip_norm=0.5)).result()
                of_epochs.append(loss.result().metrics["loss:sum"])
            losses.append(float(np.mean(of_epochs)))
        assert np.abs(np.array(losses) - expected).max() <= bound
        assert max(map(abs, expected)) > 1e-3
        state = model.save_state("end").result().path.split("/")
    mine = load_file(
        tmp_path / "service/tinker" / state[2] / "weights/end/state/policy-adapter/adapter_model.safetensors"
    )
    theirs = load_file(own.store.open(3).path / "policy-adapter" / "adapter_model.safetensors")
    assert mine.keys() == theirs.keys()
    assert max(np.abs(mine[name] - theirs[name]).max() for name in mine) <= bound


def advantages(group: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, float]]:
    """GRPO's: the rewards of a group, relative to their mean and standard deviation. Rewards are float32."""
    rewards = np.array([each.reward for each in group], np.float32).astype(np.float64)
    yield from zip(group, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), strict=True)


def length(prompt: str, completion: str, **columns: Any) -> float:
    """A reward that depends on the completion alone."""
    del prompt, columns
    return len(completion) + 0.1 * completion.count("1")
