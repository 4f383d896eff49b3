"""The tokens of a completion that is sampled again because its process died are reported once."""

from __future__ import annotations

import numpy as np
import pytest
from failing import refused

from trivium.engines.reporting import TokenReport
from trivium.foundation.errors import RolloutError
from trivium.types import Completion, StopReason


@pytest.mark.parametrize("again", [[1, 2, 3, 4], [1, 9, 3, 4]])
def test_a_completion_that_is_sampled_again_continues_its_stream_or_is_refused(again: list[int]) -> None:
    reported: list[tuple[int, float]] = []
    report = TokenReport(lambda tokens, log_probs: reported.extend(zip(tokens, log_probs, strict=True)))
    report.add([1, 2], [-0.5, -0.25])
    done = Completion(np.array(again, np.int32), -np.ones(4, np.float32), np.zeros(4, np.int32), StopReason.LENGTH)
    if again[1] == 2:
        assert report.end(done) is done
        assert reported == [(1, -0.5), (2, -0.25), (3, -1.0), (4, -1.0)]
    else:
        with refused(RolloutError, "2 tokens"):
            report.end(done)
        assert reported == [(1, -0.5), (2, -0.25)]
