"""The train engine: the cut never matters, nothing depends on the thread, a saved engine continues bit for bit."""

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from configs import configured
from episodes import group, turn
from failing import refused
from training_parts import Parts, Reinforce, SquaredError, make_batch, make_engine, weights, write_model
from transformers import AutoModelForCausalLM

from trivium.algorithms import build_algorithm
from trivium.algorithms.presets import SFT
from trivium.foundation.errors import ConfigError, DataError, RunDirError, TriviumError
from trivium.foundation.metrics import checked
from trivium.loops import train_step
from trivium.protocols import EngineSettings
from trivium.runtime.build import algorithm_of
from trivium.runtime.stage import Stage
from trivium.runtime.train_engines import attached
from trivium.sync.memory import MemoryChannel
from trivium.training.device import precision_note, processor_name
from trivium.training.learner import Learner
from trivium.training.passes import Passes
from trivium.types import Batch, Media, Trajectory

PPO = Parts((Reinforce(), SquaredError()), frozenset({"old", "ref", "values"}))


@pytest.fixture
def model_dir(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def batch():
    return make_batch(masked=(4,), advantages=0.3, returns=1.0)


def step(engine, batch):
    """One update of every role."""
    metrics = {}
    for objective in engine.algorithm.objectives:
        metrics.update(engine.update(objective.role, batch, objective))
    engine.version += 1
    return metrics


def all_weights(engine):
    found = weights(engine)
    if "critic" in engine._learners:
        found |= {f"critic/{k}": v.clone() for k, v in engine._learners["critic"].model.state_dict().items()}
    return found


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


class TestCut:
    """B x 1, 1 x B and everything between are one gradient."""

    @pytest.mark.parametrize(
        ("model", "dtype", "tolerance"),
        [
            ("qwen3", "float64", 1e-9),
            ("qwen3", "float32", 1e-5),
            ("gpt2", "float64", 1e-11),
            ("bloom", "float64", 1e-6),
        ],
    )
    @pytest.mark.parametrize(
        "objective",
        [
            Reinforce(entropy_coef=0.1, needs=frozenset({"advantages", "entropy"})),
            Reinforce(unit="group"),
            Reinforce(unit="pair"),
        ],
    )
    def test_micro_batches(self, tmp_path, batch, model, dtype, tolerance, objective):
        write_model(tmp_path, model)
        results = []
        for max_tokens in (1, 25, 40, 100_000):
            engine = make_engine(
                tmp_path,
                Parts((objective,)),
                dtype=dtype,
                max_tokens_per_micro_batch=max_tokens,
                optimizer={"lr": 0.1, "eps": 1.0},
                max_grad_norm=0.5,
            )
            results.append((step(engine, batch), weights(engine)))
        metrics, after = results[0]
        assert metrics["train/grad_norm/policy"] > 0.5  # clipping took part
        for other_metrics, other in results[1:]:
            assert other_metrics == pytest.approx(
                metrics, rel=max(tolerance, 1e-6) if dtype == "float32" else tolerance
            )
            for name in after:
                torch.testing.assert_close(other[name], after[name], rtol=tolerance, atol=tolerance)

    def test_values(self, model_dir, batch):
        results = []
        for max_tokens in (1, 30, 100_000):
            engine = make_engine(model_dir, PPO, dtype="float64", max_tokens_per_micro_batch=max_tokens)
            results.append((step(engine, batch), engine.score(batch, "values")))
        for metrics, values in results[1:]:
            assert metrics == pytest.approx(results[0][0], rel=1e-9)
            assert all(np.allclose(a, b, rtol=0, atol=1e-8) for a, b in zip(values, results[0][1], strict=True))

    def test_checkpointing_changes_nothing(self, model_dir, batch):
        plain, checkpointed = (make_engine(model_dir, PPO, gradient_checkpointing=flag) for flag in (False, True))
        assert step(plain, batch) == step(checkpointed, batch)
        assert_same(all_weights(plain), all_weights(checkpointed))

    def test_order_of_rows(self, model_dir, batch):
        shuffled = batch.select([3, 0, 5, 2, 1, 4])
        results = []
        for rows in (batch, shuffled):
            engine = make_engine(model_dir, dtype="float64", optimizer={"lr": 0.1, "eps": 1.0})
            results.append((step(engine, rows), weights(engine)))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-9)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-9, atol=1e-9)


class TestLongest:
    """On a GPU the first update of a session is followed by the largest micro-batch that the run can meet."""

    @pytest.mark.parametrize("unit", ["sequence", "pair", "group"])
    @pytest.mark.parametrize("options", [{"share_prefix": True}, {"share_prefix": False}, {"model": "bloom"}])
    def test_it_is_as_large_as_the_budget_and_changes_nothing(self, tmp_path, batch, unit, options, monkeypatch):
        options = dict(options)
        write_model(tmp_path, options.pop("model", "qwen3"))
        sizes, collate = [], Passes.collate

        def noted(self, batch, part, columns):
            sizes.append(sum(batch.lengths[row] for row in part.rows))
            return collate(self, batch, part, columns)

        monkeypatch.setattr(Passes, "collate", noted)
        objective, results = Reinforce(unit=unit, entropy_coef=0.1, needs=frozenset({"advantages", "entropy"})), []
        for is_untried in (False, True):
            engine = make_engine(tmp_path, Parts((objective,)), max_tokens_per_micro_batch=300, **options)
            (learner,) = engine._learners.values()
            learner._is_untried = is_untried
            results.append(
                ([step(engine, batch), step(engine, batch)], weights(engine), learner.work.tolist(), sizes[:])
            )
            sizes.clear()
        (plain, one, work, usual), (tried, other, work_tried, longer) = results
        assert (plain, work) == (tried, work_tried)
        assert_same(one, other)
        length = max(max(len(e.tokens), int(e.response_mask.argmax()) + 32) for e in batch.experiences)
        rows = {"sequence": 1, "pair": 2}.get(unit, max(Counter(e.group_id for e in batch.experiences).values()))
        (trial,) = Counter(longer) - Counter(usual)
        assert length * max(rows, 300 // length - rows + 1) <= trial <= max(300, rows * length)

    def test_a_device_that_is_too_small_is_named(self, model_dir, batch, monkeypatch):
        engine, backward, calls = make_engine(model_dir), Learner._backward, []

        def full(self, mini, **options):
            calls.append(mini)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return backward(self, mini, **options)

        monkeypatch.setattr(Learner, "_backward", full)
        engine._learners["policy"]._is_untried = True
        with refused(TriviumError, "CUDA", "train.max_tokens_per_micro_batch"):
            engine.update("policy", batch, Reinforce())


class Failing(Reinforce):
    """A loss that user code fails to compute."""

    def loss(self, inputs, totals):
        raise ZeroDivisionError


class TestUpdate:
    def test_it_knows_whether_a_failed_step_has_changed_weights(self, model_dir, batch):
        engine = make_engine(model_dir)
        engine.version = 3
        before = weights(engine)
        with pytest.raises(ZeroDivisionError):
            engine.update("policy", batch, Failing())
        assert engine.holds_version
        torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)
        engine.update("policy", batch, Reinforce())
        with pytest.raises(ZeroDivisionError):
            engine.update("policy", batch, Failing())
        assert not engine.holds_version
        engine.version = 4
        with pytest.raises(ZeroDivisionError):
            engine.update("policy", batch, Failing())
        assert engine.holds_version

    def test_gradient_against_plain_transformers(self, tmp_path, batch):
        """The whole path (packing, shift, head, normalisation, first AdamW step) against logits and autograd."""
        write_model(tmp_path, "gpt2")
        engine = make_engine(tmp_path, dtype="float64", optimizer={"lr": 0.1, "eps": 1.0}, max_grad_norm=1e9)
        metrics = step(engine, batch)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
        loss, tokens = torch.zeros((), dtype=torch.float64), batch.num_response_tokens
        for e, advantages in zip(batch.experiences, batch.columns["advantages"], strict=True):
            x = torch.tensor(e.tokens, dtype=torch.int64)
            log_p = (model(x[None]).logits[0] / 0.8).log_softmax(-1)
            for t in np.flatnonzero(e.response_mask):
                loss = loss - float(advantages[t]) * log_p[t - 1, x[t]] / tokens
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        assert metrics["train/loss/policy"] == pytest.approx(float(loss.detach()), rel=1e-9)
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        assert metrics["train/grad_norm/policy"] == pytest.approx(float(norm), rel=1e-9)
        for name, after in weights(engine).items():
            g = gradients[name]
            expected = dict(model.named_parameters())[name].detach() - 0.1 * g / (g.abs() + 1.0)
            torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)

    def test_metrics(self, model_dir, batch):
        engine = make_engine(model_dir, PPO)
        metrics = checked(step(engine, batch))
        trained = [(e.response_mask, a) for e, a in zip(batch.experiences, batch.columns["advantages"], strict=True)]
        mean = sum(a[mask].sum() for mask, a in trained) / batch.num_response_tokens
        assert metrics["train/advantage_mean"] == pytest.approx(mean, rel=1e-5)
        assert metrics["train/tokens"] == batch.num_response_tokens
        assert metrics["train/lr/policy"] == metrics["train/lr/value"] == 1e-2
        assert metrics["train/entropy"] == pytest.approx(
            sum(e.sum() for e in make_engine(model_dir).score(batch, "entropy")) / batch.num_response_tokens, rel=1e-5
        )
        assert metrics["mismatch/log_prob_max"] > 0
        assert {"train/loss/policy", "train/loss/value", "train/grad_norm/value"} <= metrics.keys()

    def test_entropy_has_a_gradient_only_where_it_is_wanted(self, model_dir, batch):
        results = [
            make_engine(model_dir).update("policy", batch, Reinforce(entropy_coef=coefficient, needs=frozenset(needs)))
            for coefficient, needs in [(0.0, {"advantages"}), (5.0, {"advantages"}), (5.0, {"advantages", "entropy"})]
        ]
        norms = [metrics["train/grad_norm/policy"] for metrics in results]
        assert norms[0] == norms[1] != norms[2]

    @pytest.mark.parametrize(
        "rows", [make_batch(masked=range(6), advantages=0.3), Batch(()).with_columns(advantages=[])]
    )
    def test_nothing_to_train_on(self, model_dir, rows):
        engine = make_engine(model_dir)
        before = weights(engine)
        assert engine.update("policy", rows, Reinforce()) == {"train/tokens": 0.0}
        assert_same(before, weights(engine))
        assert not engine._learners["policy"].optimizer.state()
        assert [not s.any() for s in engine.score(rows, "old")] == [True] * len(rows)

    def test_masked_rows_change_nothing(self, model_dir):
        batch = make_batch(advantages=0.3)
        padding = make_batch(seed=9, masked=range(6), advantages=0.3)
        columns = {n: [*batch.columns[n], *padding.columns[n]] for n in batch.columns}
        both = Batch((*batch.experiences, *padding.experiences)).with_columns(**columns)
        engines = [make_engine(model_dir) for _ in range(2)]
        assert step(engines[0], batch) == step(engines[1], both)
        assert_same(weights(engines[0]), weights(engines[1]))

    @pytest.mark.parametrize("factor", [float("nan"), float("inf")])
    def test_a_gradient_that_is_not_finite_is_an_error(self, model_dir, batch, factor):
        engine = make_engine(model_dir)
        engine.version = 6
        before = weights(engine)
        with refused(TriviumError, "policy", "step 7"):
            engine.update("policy", batch, Reinforce(factor=factor))
        assert_same(before, weights(engine))
        assert step(engine, batch)["train/grad_norm/policy"] < float("inf")  # nothing of it is left

    def test_a_missing_column_is_named(self, model_dir):
        with refused(DataError, "advantages"):
            make_engine(model_dir).update("policy", make_batch(), Reinforce())

    def test_media_are_refused(self, model_dir, batch):
        first = batch.experiences[0]
        seen = type(first)(
            first.tokens,
            first.response_mask,
            first.rollout_log_prob,
            first.policy_version,
            "g",
            0,
            media=(Media("image/png", b""),),
        )
        with refused(DataError, "images"):
            make_engine(model_dir).score(Batch((seen,)), "old")

    def test_a_sequence_beyond_the_model_s_positions_is_named(self, tmp_path):
        """gpt2 would fail in an embedding, qwen3 would train on where it has never been."""
        batch = make_batch(lengths=(2, 3, 6, 5), advantages=0.3, returns=1.0)
        for name, limit in (("gpt2", {"n_positions": 5}), ("qwen3", {"max_position_embeddings": 5})):
            engine = make_engine(write_model(tmp_path / name, name, **limit), PPO)
            before = all_weights(engine)
            for objective in PPO.objectives:
                with refused(DataError, "'g1'", "6 tokens", "max_position_embeddings"):
                    engine.update(objective.role, batch, objective)
            for what in ("old", "ref", "values"):
                with refused(DataError, "'g1'", "6 tokens", "max_position_embeddings"):
                    engine.score(batch, what)
            assert_same(before, all_weights(engine))
            assert step(engine, batch.select([0, 1, 3]))["train/tokens"] > 0
        assert make_engine(write_model(tmp_path / "bloom", "bloom")).score(make_batch(lengths=(80,)), "old")

    @pytest.mark.parametrize("limit", [8, 64])
    def test_the_norm_divides_by_the_limit_not_by_the_longest_reply(self, model_dir, limit):
        algorithm = build_algorithm(SFT.configure({"kind": "sft", "aggregate": "seq-mean-token-sum-norm"}))
        for batch in (make_batch(lengths=(5, 7)), make_batch(lengths=(5, 7, 30))):
            engine = make_engine(model_dir, algorithm, max_response_length=limit)
            total = -sum(float(a.sum()) for a in engine.score(batch, "old"))
            metrics = engine.update("policy", batch, algorithm.objectives[0])
            assert metrics["train/loss/policy"] == pytest.approx(total / len(batch) / limit, rel=1e-5)

    def test_unknown_unit(self, model_dir, batch):
        with refused(DataError, "batch"):
            make_engine(model_dir).update("policy", batch, Reinforce(unit="batch"))


class TestScores:
    def test_only_what_is_asked_for_is_held(self, model_dir, batch):
        engine = make_engine(model_dir)
        for what in ("ref", "values", "teacher", "teacher_top"):
            with refused(TriviumError, "policy"):
                engine.score(batch, what)
        with refused(TriviumError, "'nonsense'", "old"):
            engine.score(batch, "nonsense")

    def test_the_reference_stays(self, model_dir, batch):
        engine = make_engine(model_dir, PPO)
        old, ref = engine.score(batch, "old"), engine.score(batch, "ref")
        assert all(np.array_equal(a, b) for a, b in zip(old, ref, strict=True))
        assert all((a < 0).sum() == e.num_response_tokens for a, e in zip(old, batch.experiences, strict=True))
        assert all(not a[~e.response_mask].any() for a, e in zip(old, batch.experiences, strict=True))
        assert {a.dtype for a in old} == {np.dtype(np.float32)}
        step(engine, batch)
        assert all(np.array_equal(a, b) for a, b in zip(engine.score(batch, "ref"), ref, strict=True))
        assert not any(np.array_equal(a, b) for a, b in zip(engine.score(batch, "old"), old, strict=True) if a.any())

    def test_old_is_what_the_update_sees(self, model_dir, batch):
        """A ratio of exactly one in the first update: score and update share every number."""
        engine = make_engine(model_dir)
        old = engine.score(batch, "old")
        exact = Batch(
            tuple(
                type(e)(e.tokens, e.response_mask, o, e.policy_version, e.group_id, e.index)
                for e, o in zip(batch.experiences, old, strict=True)
            )
        ).with_columns(advantages=batch.columns["advantages"])
        assert engine.update("policy", exact, Reinforce())["mismatch/log_prob_max"] == 0.0


class TestReproducible:
    def test_twice(self, model_dir, batch):
        engines = [make_engine(model_dir, PPO) for _ in range(2)]
        assert step(engines[0], batch) == step(engines[1], batch)
        assert_same(all_weights(engines[0]), all_weights(engines[1]))

    def test_in_any_thread(self, model_dir, batch):
        """The number of threads belongs to the calling thread, so each verb sets it."""
        here, elsewhere = make_engine(model_dir, PPO, threads=1), make_engine(model_dir, PPO, threads=1)
        found = []

        def work():
            torch.set_num_threads(2)
            found.append((elsewhere.score(batch, "old"), step(elsewhere, batch), torch.get_num_threads()))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        scores, metrics, num_threads = found[0]
        assert num_threads == 1
        assert all(np.array_equal(a, b) for a, b in zip(here.score(batch, "old"), scores, strict=True))
        assert step(here, batch) == metrics
        assert_same(all_weights(here), all_weights(elsewhere))

    @pytest.mark.parametrize("model", ["qwen3", "llama"])
    def test_saved_and_continued(self, tmp_path, batch, model):
        model_dir = write_model(tmp_path / "model", model)
        config = {"optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}}
        whole = make_engine(model_dir, PPO, **config)
        history = [step(whole, batch) for _ in range(4)]
        first = make_engine(model_dir, PPO, **config)
        assert [step(first, batch) for _ in range(2)] == history[:2]
        first.save(tmp_path / "saved")
        second = make_engine(model_dir, PPO, seed=7, **config)
        second.load(tmp_path / "saved")
        assert second.version == 2
        assert [step(second, batch) for _ in range(2)] == history[2:]
        assert_same(all_weights(whole), all_weights(second))
        assert {p.name for p in (tmp_path / "saved").iterdir()} == {
            "policy",
            "critic",
            "policy-optimizer.safetensors",
            "critic-optimizer.safetensors",
            "engine.json",
        }

    def test_saved_before_the_first_step(self, model_dir, tmp_path, batch):
        first, second = make_engine(model_dir), make_engine(model_dir)
        first.save(tmp_path / "saved")
        second.load(tmp_path / "saved")
        assert step(first, batch) == step(second, batch)

    def test_no_checkpoint(self, model_dir, tmp_path):
        with refused(RunDirError, "engine.json"):
            make_engine(model_dir).load(tmp_path)


class TestWeights:
    @pytest.mark.parametrize(("model", "tied"), [("qwen3", True), ("llama", False)])
    def test_exported_names_are_those_of_transformers(self, tmp_path, model, tied):
        write_model(tmp_path, model)
        exported = list(make_engine(tmp_path).export_weights())
        expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        names = [name for name, _ in exported]
        assert names == [n for n in expected if not (tied and n == "lm_head.weight")]
        assert all(torch.equal(tensor, expected[name]) and not tensor.requires_grad for name, tensor in exported)

    @pytest.mark.parametrize(("engine_dtype", "dtype"), [("bfloat16", torch.bfloat16), ("", torch.float32)])
    def test_they_are_offered_in_the_type_of_the_engines(self, model_dir, engine_dtype, dtype):
        engine, channel = make_engine(model_dir), MemoryChannel()
        engine.settings = EngineSettings(channel, engine_dtype)
        assert engine.offer_weights().delivered
        offered = dict(channel.collect(0))
        assert {tensor.dtype for tensor in offered.values()} == {dtype}
        assert all(torch.equal(tensor.to(dtype), offered[name]) for name, tensor in engine.export_weights())

    @pytest.mark.parametrize("level", [0, 2])
    def test_the_memory_of_an_engine_that_wakes_is_not_cached(self, model_dir, batch, monkeypatch, level):
        """Each rank frees its own: a rollout engine may wake on the GPUs of several ranks."""
        freed = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("cache"))
        config = configured(engine={"kind": "vllm", "device": "cuda", "sleep_level": level}, algorithm="grpo")
        stage = Stage(config, 0, 0, True, model_dir, model_dir)
        engine = attached(make_engine(model_dir), stage, MemoryChannel())
        step(engine, batch)
        assert len(freed) == bool(level)
        assert engine.offer_weights().delivered
        assert len(freed) == 2 * bool(level)

    def test_saved_policy_is_a_plain_model_directory(self, model_dir, tmp_path, batch):
        (model_dir / "tokenizer.json").write_text("{}")
        (model_dir / "chat_template.jinja").write_text("{{ messages }}")
        (model_dir / "pytorch_model.bin").write_bytes(b"old weights")
        engine = make_engine(model_dir)
        step(engine, batch)
        engine.save_weights(tmp_path / "out")
        assert {p.name for p in (tmp_path / "out").iterdir()} == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "chat_template.jinja",
        }
        assert "trivium" not in (tmp_path / "out" / "config.json").read_text()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert model.dtype == torch.float32
        assert_same(weights(engine), {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"})

    def test_bfloat16_keeps_full_precision_weights(self, model_dir, batch):
        full, low = make_engine(model_dir), make_engine(model_dir, dtype="bfloat16", optimizer={"lr": 1e-6})
        errors = [abs(a - b).max() for a, b in zip(full.score(batch, "old"), low.score(batch, "old"), strict=True)]
        assert 0 < max(errors) < 0.3
        before = weights(low)
        norms = [step(engine, batch)["train/grad_norm/policy"] for engine in (low, full)]
        assert norms[0] == pytest.approx(norms[1], rel=0.1)
        after = weights(low)
        assert all(t.dtype == torch.float32 for t in after.values())
        assert sum((before[n] != after[n]).float().mean() for n in after) > 0.5 * len(after)  # bf16 would lose 1e-6

    def test_no_gpu(self, model_dir):
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        with refused(ConfigError, "train.device", "'cuda'"):
            make_engine(model_dir, device="cuda")


def test_bfloat16_on_a_cpu_without_it_is_named(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    assert "float32 is faster" in precision_note(torch.device("cpu"), "bfloat16")
    assert precision_note(torch.device("cpu"), "float32") == "float32"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert precision_note(torch.device("cpu"), "bfloat16") == "bfloat16"


def test_the_mismatch_of_a_step_is_that_before_its_first_update(model_dir):
    algorithm = algorithm_of(configured(algorithm={"kind": "grpo", "mini_batches": 2}))
    engine = make_engine(model_dir, algorithm, dtype="float64")
    groups = [
        group(slot, *(Trajectory(index, (turn([5, 6, slot], [7, 8]),), {"exact": index * slot}) for index in (0, 1)))
        for slot in (3, 4)
    ]
    updates = []
    update = engine.update

    def noted(*args):
        metrics = update(*args)
        updates.append(metrics["mismatch/kl"])
        return metrics

    engine.update = noted
    metrics = train_step(engine, groups, algorithm)
    assert len(updates) == 2
    assert metrics["mismatch/kl"] == updates[0] != updates[1]


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="the processor is named by /proc/cpuinfo")
def test_no_process_is_started_to_name_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count in the memory that the run held at most, with all that this process holds."""
    processor_name.cache_clear()
    monkeypatch.setattr("subprocess.Popen.__init__", None)
    monkeypatch.setattr("platform.uname", None)
    assert processor_name()
