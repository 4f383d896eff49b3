"""Golden answers: what happens to rewards on their way from the judge to the estimator."""

import numpy as np
import torch
from golden_runners import Arguments, answers, section

from trivium.algorithms import ShapingInputs, build_algorithm
from trivium.algorithms.metadata import ShapingMetadata, resolve_function
from trivium.algorithms.shaping import Moments
from trivium.config import AlgorithmConfig, plugin
from trivium.types import Batch, Experience


@answers("lightrft", "lightrft_compute_reward")
def _compute_reward(inputs: Arguments, kwargs: Arguments) -> Arguments:
    """Clipped rewards on the last trained token, a KL penalty off every one: undiscounted to a single step's return."""
    config = {
        "kind": "reinforce",
        "advantage": {"gamma": 0.0},
        "kl": {"coef": kwargs["kl_coef"], **({"place": "reward", "estimator": "k1"} if kwargs["kl_coef"] else {})},
    }
    if kwargs["reward_clip_range"] is not None:
        low, high = kwargs["reward_clip_range"]
        config["shaping"] = [{"kind": "clip", "low": low, "high": high}]
    algorithm = build_algorithm(plugin("algorithms", AlgorithmConfig)(config))
    # A first column of context: a sequence's first token is never trained on.
    mask, kl = (np.pad(inputs[name].numpy(), ((0, 0), (1, 0))) for name in ("action_mask", "kl"))
    rows = [
        Experience(np.zeros(len(row)), row, log_ratio, np.zeros(len(row)), "group", index, {"r": float(reward)})
        for index, (row, log_ratio, reward) in enumerate(zip(mask, kl, inputs["r"].double(), strict=True))
    ]
    batch = Batch(tuple(rows)).with_columns(ref_log_prob=np.zeros_like(kl))  # k1 is then the engine's log-probability
    returns = algorithm.advantages(batch)[0].columns["returns"]
    return {"reward": torch.from_numpy(np.stack(returns)[:, 1:].copy())}


@answers("lightrft", "lightrft_running_moments")
def _running_moments(inputs: Arguments, kwargs: Arguments) -> Arguments:
    """The moments behind the registered normalisation, read off what it makes of 0 and 1."""
    (scaled, _), (centred, _) = (
        resolve_function("shapings", section("shapings", "running_normalise", minus_mean=both), ShapingMetadata)
        for both in (False, True)
    )

    def read(moments: Moments) -> list[float]:
        probe = torch.tensor([0.0, 1.0], dtype=torch.float64)
        x = ShapingInputs(probe, probe.long(), probe.bool(), probe.long(), 1, moments)
        std = 1 / float(scaled(x)[1])
        return [-float(centred(x)[0]) * std, std]

    running, rows = Moments(), []
    for name in ("a", "b", "c"):
        values, alone = inputs[name].double().tolist(), Moments()
        running.update(values)
        alone.update(values)
        rows.append([*read(running), *read(alone)])
    return {"running_mean_std_batch_mean_std": rows}
