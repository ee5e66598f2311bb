"""Bits under a budget: against every layout there is, on small heads, and what holds for any losses."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leank.allocation import (
    Grid,
    allocate,
    blocks,
    channel_scores,
    check_align,
    first_gains,
    gains,
    hull,
    key_costs,
    value_costs,
)
from leank.mask import ChannelMask
from leank.precision import KEY_BITS, ROOM, Precision
from tests.helpers.layouts import loss_of, random_losses

DIM = 2 * ROOM


def every_head(keys, values, empty):
    """(bits, loss) of every layout of one head: all widths of two blocks and of V, and no middle."""
    of_keys, of_values = (ROOM * key_costs()).tolist(), value_costs(DIM).tolist()
    blocks = keys.unflatten(0, (-1, ROOM)).sum(1).tolist()
    found = [(0.0, float(empty))]
    for widths in product(range(len(of_keys)), repeat=len(blocks)):
        if any(widths):
            cost = sum(of_keys[w] for w in widths)
            loss = sum(block[w] for block, w in zip(blocks, widths, strict=True))
            found += [(cost + of_values[w], loss + float(values[w])) for w in range(len(of_values))]
    return found


def highest_gain(losses, costs):
    """The highest gain of any move from the smallest width."""
    return float(((losses[..., :1] - losses[..., 1:]) / (costs[1:] - costs[0])).max())


def block_gain(given, head):
    """The highest gain of any move of a head's blocks."""
    return ROOM * highest_gain(given[0][0, head, ::ROOM], ROOM * key_costs())


def begins_well(given, head):
    """Whether a head's first step gains less than one of its blocks by itself, as `allocate` needs to be exact."""
    first = first_gains(blocks(given[0], ROOM)[1], *given[1:], ROOM, Grid.of_layouts(DIM))
    return float(first[0, head]) < block_gain(given, head)


def smallest(found, most):
    """The smallest loss of two heads together within so many bits."""
    first, second = found
    return min(a + b for (x, a), (y, b) in product(first, second) if x + y <= most * (1 + 1e-9))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.floats(0.05, 1))
def test_no_layout_of_the_same_bytes_is_better(seed, budget):
    keys, values, empty = random_losses(seed)
    given = keys, values, (keys[..., 0].sum(-1) + values[..., 0]) * empty / 3  # at most what V is worth without keys
    assume(begins_well(given, 0) and begins_well(given, 1))
    found = [every_head(given[0][0, h], given[1][0, h], given[2][0, h]) for h in range(2)]
    whole = 2 * 2 * DIM * 16
    try:
        (layout,) = allocate(*given, [budget])
    except ValueError:
        return  # no head fits
    spent = layout.middle_bytes
    assert spent <= budget * (1 + 1e-9)
    mine = loss_of(layout, *given)
    assert mine == pytest.approx(smallest(found, spent * whole), abs=1e-9)  # greedy is exact where a move ends


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), budgets=st.lists(st.floats(0.25, 1), min_size=2, max_size=5))
def test_layouts_are_nested(seed, budgets):
    given = random_losses(seed, heads=3, blocks=4)
    layouts = allocate(*given, sorted(budgets), align=2 * ROOM if seed % 2 else ROOM)
    for small, large in pairwise(layouts):
        assert (small.key_bits <= large.key_bits).all()
        assert (small.value_bits <= large.value_bits).all()
        assert loss_of(large, *given) <= loss_of(small, *given) + 1e-12
    for layout, budget in zip(layouts, sorted(budgets), strict=True):
        assert layout.middle_bytes <= budget * (1 + 1e-9)
        for bits in KEY_BITS:
            assert ((layout.key_bits == bits).sum(-1) % ROOM == 0).all()


def test_everything_is_given_where_the_budget_allows_it():
    (layout,) = allocate(*random_losses(0), [1.0])
    best = random_losses(0)[0].argmin(-1)
    assert torch.equal(layout.key_bits.long(), torch.tensor(KEY_BITS)[best])
    assert (layout.value_bits == 16).all()


def test_channels_of_a_block_are_alike():
    keys, values, empty = random_losses(3)
    mixed = torch.randperm(DIM, generator=torch.Generator().manual_seed(0))
    (sorted_,), (shuffled,) = (allocate(k, values, empty, [0.3]) for k in (keys, keys[:, :, mixed]))
    assert torch.equal(sorted_.key_bits[:, :, mixed], shuffled.key_bits)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), price=st.floats(0, 2))
def test_no_mask_is_better_than_the_best_scores_at_any_price_of_a_channel(seed, price):
    generator = torch.Generator().manual_seed(seed)
    pruned = torch.rand(1, 2, 4, generator=generator, dtype=torch.float64) ** 3
    empty = pruned.sum(-1) * torch.rand(1, 2, generator=generator, dtype=torch.float64) * 3

    def price_of(keep):
        lost = torch.where(keep.any(-1), (pruned * ~keep).sum(-1), empty)
        return float(lost.sum() + price * keep.sum())

    every = [torch.tensor(keep).view(1, 2, 4) for keep in product([False, True], repeat=8)]
    scores = channel_scores(pruned, empty, 1)
    cuts = [scores >= least for least in [*scores.flatten(), 2]]
    assert min(map(price_of, cuts)) == pytest.approx(min(map(price_of, every)))


def test_channels_of_a_block_have_neighbouring_scores():
    generator = torch.Generator().manual_seed(0)
    scores = channel_scores(torch.rand(2, 3, 8, generator=generator), torch.rand(2, 3, generator=generator), 4)
    for ratio in (0.25, 0.5, 0.75):
        mask = ChannelMask.from_scores(scores, ratio, 4, "exact")
        assert torch.equal(mask.keep, scores >= scores.quantile(ratio))


def test_the_hull_leaves_out_what_no_budget_takes():
    assert hull([0, 1, 2, 3, 4], [10, 9, 2, 2, 0]) == [0, 2, 4]
    assert hull([0, 1, 2], [1, 1, 1]) == [0]


def test_gains_are_the_slopes_of_the_hull():
    found = gains(torch.tensor([[10.0, 9, 2, 2, 0], [1, 1, 1, 1, 1]]), torch.tensor([0.0, 1, 2, 3, 4]))
    assert found.tolist() == [[4, 4, 1, 1], [0, 0, 0, 0]]


def test_the_first_gain_of_a_head_is_the_best_of_all_its_layouts():
    for seed in range(9):
        keys, values, empty = random_losses(seed)
        found = first_gains(blocks(keys, ROOM)[1], values, empty, ROOM, Grid.of_layouts(keys.shape[2]))
        for h in range(2):
            every = every_head(keys[0, h], values[0, h], empty[0, h])
            best = max((float(empty[0, h]) - loss) / cost for cost, loss in every if cost)
            if best < block_gain((keys,), h):  # else V pays for a block
                assert float(found[0, h]) == pytest.approx(max(0.0, best))


def test_what_cannot_be_given_out_is_refused():
    keys, values, empty = random_losses(0)
    with pytest.raises(ValueError, match="keeps no head"):
        allocate(keys, values, empty + 100, [1e-4])
    with pytest.raises(ValueError, match="NaN or infinite"):
        allocate(keys * torch.nan, values, empty, [0.5])
    with pytest.raises(ValueError, match="align=8"):
        check_align(64, 8)
    assert isinstance(allocate(keys, values, empty, [0.5])[0], Precision)
