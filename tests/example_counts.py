"""How many examples Hypothesis draws: a quarter of those that a test names, or all with HYPOTHESIS=full. Then runs that
learn are repeated with other seeds and models, too."""

import os

FULL = os.environ.get("HYPOTHESIS") == "full"


def number_of(examples: int) -> int:
    return examples if FULL else max(3, examples // 4)
