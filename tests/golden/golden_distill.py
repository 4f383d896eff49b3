"""Golden answers: log-probabilities and losses from whole logits."""

from golden_runners import Arguments, answers

from trivium.algorithms import gpt_lm_loss, kd_loss, logprobs_from_logits, sum_pi_squared_from_logits


@answers("entropy", "logprobs")
def _logprobs(inputs: Arguments, kwargs: Arguments) -> Arguments:
    found = logprobs_from_logits(**inputs, **kwargs)
    return {"loss": found.sum(), "logprobs": found}


@answers("entropy", "sum_pi_squared")
def _sum_pi_squared(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"sum_pi_squared": sum_pi_squared_from_logits(**inputs, **kwargs)}


@answers("lightrft", "kd_loss")
def _kd_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"loss": kd_loss(**inputs, **kwargs)}


@answers("lightrft", "gpt_lm_loss")
def _gpt_lm_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"loss": gpt_lm_loss(**inputs, **kwargs)}
