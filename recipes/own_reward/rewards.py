"""A reward of one's own: any function of the prompt, the completion and the task's columns by name."""


def close(prompt: str, completion: str, answer: str) -> float:
    """1 for the right sum, less the further away it is, 0 for what is no number."""
    if not completion.isdecimal():
        return 0.0
    return 1.0 / (1.0 + abs(int(completion) - int(answer)))
