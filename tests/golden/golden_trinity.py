"""Golden answers: losses of Trinity-RFT and TRL."""

from golden_runners import Arguments, answers, minimised, policy_objective


@answers("trinity", "sft")
def _sft(inputs: Arguments, kwargs: Arguments) -> Arguments:
    mask = inputs["action_mask"]
    objective = policy_objective("sft", kwargs["loss_agg_mode"])
    loss, _ = minimised(objective, inputs["logprob"], mask, {}, expert=mask.new_ones(len(mask)))
    return {"loss": loss, "metrics": {"sft_loss": loss}}
