"""How many examples Hypothesis draws: a quarter of those that a test names, or all with HYPOTHESIS=full. Then tests
repeat long runs with other seeds, models and layouts of ranks, too."""

import os

FULL = os.environ.get("HYPOTHESIS") == "full"


def number_of(examples: int) -> int:
    return examples if FULL else max(3, examples // 4)
