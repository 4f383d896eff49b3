"""Peak memory and time of one update's head: the chunked head against logits held whole.

    python benchmarks/head_memory.py [--tokens 4096] [--vocabulary 151936] [--width 256]

Each side runs in its own process: forward, entropy, backward into hidden states and weight, in float32. What counts
is how far the peak of the resident set rises above the peak before, when the inputs were there already. The gradients
that both must return are part of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

from trivium.models.log_prob_head import log_prob_and_entropy

LIMIT = 0.2
"""The chunked head may need at most this part of the plain path's memory."""


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual way: all logits, their log-softmax, autograd."""
    log_p = (hidden @ weight.T).log_softmax(-1)
    with torch.set_grad_enabled(entropy_grad):
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def chunked(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return log_prob_and_entropy(hidden, weight, None, targets, entropy_grad=entropy_grad)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(side: str, tokens: int, vocabulary: int, width: int, entropy_grad: bool) -> dict[str, float]:
    torch.manual_seed(0)
    head = {"plain": plain, "chunked": chunked}[side]
    weight = torch.randn(vocabulary, width).mul_(0.05).requires_grad_()
    hidden = torch.randn(tokens, width).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    warm = [torch.ones(64, 8, requires_grad=True) for _ in range(2)]  # loads the libraries
    head(warm[0], warm[1], torch.zeros(64, dtype=torch.int64), entropy_grad)[0].sum().backward()
    before = peak_bytes()
    start = time.perf_counter()
    log_prob, entropy = head(hidden, weight, targets, entropy_grad)
    (log_prob.mean() + (0.1 * entropy.mean() if entropy_grad else 0)).backward()
    seconds = time.perf_counter() - start
    return {"bytes": peak_bytes() - before, "seconds": seconds, "log_prob": float(log_prob.detach().mean())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--entropy-grad", action="store_true", help="the loss holds an entropy term")
    parser.add_argument("--side", choices=["plain", "chunked"], help="measure one side in this process, print JSON")
    said = parser.parse_args()
    if said.side:
        print(json.dumps(measure(said.side, said.tokens, said.vocabulary, said.width, said.entropy_grad)))
        return 0
    found = {}
    for side in ("plain", "chunked"):
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--side", side], check=True, stdout=subprocess.PIPE, text=True
        )
        found[side] = json.loads(done.stdout)
        print(f"{side:8} {found[side]['bytes'] / 2**20:9.0f} MiB {found[side]['seconds']:7.2f} s")
    memory = found["chunked"]["bytes"] / found["plain"]["bytes"]
    print(f"memory   {memory:.3f} of the plain path (limit {LIMIT})")
    print(f"time     {found['chunked']['seconds'] / found['plain']['seconds']:.2f} of the plain path")
    print(f"mean log-probability differs by {abs(found['chunked']['log_prob'] - found['plain']['log_prob']):.1e}")
    return int(memory > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
