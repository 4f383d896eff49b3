"""Cutting and packing lose nothing, split nothing and keep the budget."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trivium.models.backbone.packed import pack
from trivium.models.heads.loss import LossDenominators
from trivium.training.batching import collate, count, cut, first_pass, joined_shares, units
from trivium.types import Batch, Experience

lengths_of = st.lists(st.integers(1, 60), min_size=1, max_size=24)


def experience(length, group="g", trained=True, first=0):
    mask = np.arange(length) >= max(1, length // 2)
    return Experience(
        tokens=np.arange(first, first + length),
        response_mask=mask & trained,
        rollout_log_prob=np.where(mask & trained, -1.5, 0),
        policy_version=np.zeros(length),
        group_id=group,
        index=0,
    )


@given(
    lengths=lengths_of,
    group_sizes=st.lists(st.integers(1, 5), min_size=24, max_size=24),
    max_tokens=st.integers(1, 150),
    padded=st.booleans(),
)
def test_cut_keeps_units_whole_and_the_budget(lengths, group_sizes, max_tokens, padded):
    together, start = [], 0
    for size in group_sizes:
        if start < len(lengths):
            together.append(list(range(start, min(start + size, len(lengths)))))
        start += size
    micro_batches = cut(together, lengths, max_tokens, padded=padded)
    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
    for rows in micro_batches:
        inside = [unit for unit in together if set(unit) & set(rows)]
        assert sorted(rows) == sorted(row for unit in inside for row in unit)
        cost = len(rows) * max(lengths[r] for r in rows) if padded else sum(lengths[r] for r in rows)
        assert cost <= max_tokens or len(inside) == 1


@given(lengths=lengths_of)
def test_pack_and_its_grids_are_inverse(lengths):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 1000, n).astype(np.int32) for n in lengths]
    packed = pack(sequences)
    flat = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    assert torch.equal(packed.tokens, flat)
    layout = packed.layout()
    assert torch.equal(packed.tokens[layout.spread][layout.collect], flat)
    assert [int(p) for p in packed.positions] == [t for n in lengths for t in range(n)]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    offset = 0
    for rows, length in layout.grids:
        cells = layout.spread[offset : offset + rows * length].view(rows, length)
        assert (owner[cells] == owner[cells[:, :1]]).all()  # not even padding holds another sequence's token
        assert min(lengths[int(owner[row[0]])] for row in cells) >= 0.75 * length
        offset += rows * length
    assert offset == len(layout.spread)


@given(lengths=lengths_of, trained=st.lists(st.booleans(), min_size=24, max_size=24))
def test_collated_numbers_return_to_their_tokens(lengths, trained):
    rows = [
        experience(n, trained=flag, first=100 * i) for i, (n, flag) in enumerate(zip(lengths, trained, strict=False))
    ]
    batch = Batch(tuple(rows)).with_columns(advantages=[e.tokens.astype(np.float32) for e in rows])
    micro = collate(batch, range(len(rows)), ["advantages"], device=torch.device("cpu"), dtype=torch.float64)
    grid = micro.grid(micro.pack.tokens[micro.rows].double())
    assert torch.equal(grid, micro.columns["advantages"] * micro.response_mask)
    assert torch.equal(micro.columns["rollout_log_prob"], -1.5 * micro.response_mask.double())
    assert int(micro.response_mask.sum()) == count(batch, 8).tokens == len(micro.rows)


def test_units_leave_out_what_teaches_nothing():
    batch = Batch(
        (
            experience(4, "a"),
            experience(4, "a", trained=False),
            experience(4, "b", trained=False),
            experience(4, "b"),
            experience(4, "c", trained=False),
            experience(4, "c", trained=False),
        )
    )
    assert units(batch, "sequence") == [[0], [3]]
    assert units(batch, "pair") == units(batch, "group") == [[0, 1], [2, 3]]
    assert count(batch, max_response_length=8) == LossDenominators(tokens=4, sequences=2, max_response_length=8)


def members(numbers):
    """A batch with a sequence of each of these members of one group."""
    return Batch(tuple(replace(experience(5), index=number) for number in numbers))


def numbers(batch):
    return [e.index for e in batch.experiences]


def test_shares_of_ranks_lose_only_members_whose_sequences_are_on_several_of_them():
    assert numbers(joined_shares([members([0, 1, 1]), members([2, 3]), members([3, 4])])) == [0, 1, 1, 2, 4]
    assert joined_shares([]) is None
    assert joined_shares([members([0]), members([0])]) is None


def test_the_first_pass_ends_where_a_member_comes_again():
    assert numbers(first_pass([members([0, 1]), members([2, 2]), members([1, 2]), members([0])])) == [0, 1, 2, 2]
    assert first_pass([]) is None
