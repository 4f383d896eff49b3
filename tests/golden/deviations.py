"""What a golden fixture says and this version does not: each entry with its reason. The one place for either kind."""

LATER = {
    "rewards": "reward functions: the issue on distributed training and rewards",
    "balance": "balanced partitions, pass@k over subsets: the issue on distributed training and rewards",
}
"""Families (fixture files) that another issue builds -> what they are."""

DEVIATIONS: dict[tuple[str, str], str] = {}
"""(family, function or case name) -> why another value is right. Such a case has to differ."""
