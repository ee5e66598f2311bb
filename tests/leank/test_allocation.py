"""Bits under a budget: against every layout there is, on small heads, and what holds for any losses."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leank.allocation import allocate, check_align, hull, key_costs, value_costs
from leank.precision import KEY_BITS, ROOM, VALUE_BITS, Precision

DIM = 2 * ROOM


def losses(seed, heads=2, blocks=2):
    """Random losses that fall with the width, of `blocks` blocks of equal channels in each head."""
    generator = torch.Generator().manual_seed(seed)

    def falling(*shape):
        steps = torch.rand(shape, generator=generator, dtype=torch.float64) ** 3
        return steps.flip(-1).cumsum(-1).flip(-1) - steps[..., -1:]

    scale = torch.rand(1, heads, blocks, 1, generator=generator, dtype=torch.float64) ** 4 + 1e-3
    keys = (falling(1, heads, blocks, 6) * scale).repeat_interleave(ROOM, 2) / ROOM
    empty = torch.rand(1, heads, generator=generator, dtype=torch.float64) * 3
    return keys, falling(1, heads, 5) / 4, empty


def loss_of(layout, keys, values, empty):
    """The sum that `allocate` makes small."""
    at = torch.tensor([KEY_BITS.index(b) for b in layout.key_bits.flatten().tolist()]).view_as(layout.key_bits)
    v_at = torch.tensor([VALUE_BITS.index(b) for b in layout.value_bits.flatten().tolist()]).view_as(layout.value_bits)
    kept = keys.gather(-1, at[..., None]).squeeze(-1).sum(-1) + values.gather(-1, v_at[..., None]).squeeze(-1)
    return float(torch.where(layout.keep.any(-1), kept, empty).sum())


def every_head(keys, values, empty):
    """(bits, loss) of every layout of one head: all widths of two blocks and of V, and no middle."""
    of_keys, of_values = (ROOM * key_costs()).tolist(), value_costs(DIM).tolist()
    blocks = keys.unflatten(0, (-1, ROOM)).sum(1).tolist()
    found = [(0.0, float(empty))]
    for widths in product(range(6), repeat=len(blocks)):
        if any(widths):
            cost = sum(of_keys[w] for w in widths)
            loss = sum(block[w] for block, w in zip(blocks, widths, strict=True))
            found += [(cost + of_values[w], loss + float(values[w])) for w in range(5)]
    return found


def gains(losses, costs):
    """The highest gain of any move from the smallest width."""
    return float(((losses[..., :1] - losses[..., 1:]) / (costs[1:] - costs[0])).max())


def smallest(found, most):
    """The smallest loss of two heads together within so many bits."""
    first, second = found
    return min(a + b for (x, a), (y, b) in product(first, second) if x + y <= most * (1 + 1e-9))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.floats(0.05, 1))
def test_no_layout_of_the_same_bytes_is_better(seed, budget):
    given = losses(seed)
    assume(all(gains(given[0][0, h, ::ROOM], ROOM * key_costs()) > gains(given[1][0, h], value_costs(DIM)) / ROOM
               for h in range(2)))  # fmt: skip
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
    given = losses(seed, heads=3, blocks=4)
    layouts = allocate(*given, sorted(budgets), align=2 * ROOM if seed % 2 else ROOM)
    for small, large in pairwise(layouts):
        assert (small.key_bits <= large.key_bits).all()
        assert (small.value_bits <= large.value_bits).all()
        assert loss_of(large, *given) <= loss_of(small, *given) + 1e-12
    for layout, budget in zip(layouts, sorted(budgets), strict=True):
        assert layout.middle_bytes <= budget * (1 + 1e-9)
        assert layout.key_bits.unflatten(-1, (-1, ROOM)).sort(-1).values.shape[-1] == ROOM
        for bits in KEY_BITS:
            assert ((layout.key_bits == bits).sum(-1) % ROOM == 0).all()


def test_everything_is_given_where_the_budget_allows_it():
    (layout,) = allocate(*losses(0), [1.0])
    best = losses(0)[0].argmin(-1)
    assert torch.equal(layout.key_bits.long(), torch.tensor(KEY_BITS)[best])
    assert (layout.value_bits == 16).all()


def test_channels_of_a_block_are_alike():
    keys, values, empty = losses(3)
    mixed = torch.randperm(DIM, generator=torch.Generator().manual_seed(0))
    (sorted_,), (shuffled,) = (allocate(k, values, empty, [0.3]) for k in (keys, keys[:, :, mixed]))
    assert torch.equal(sorted_.key_bits[:, :, mixed], shuffled.key_bits)


def test_bytes_are_those_of_a_cache():
    keys, values, empty = losses(1)
    (layout,) = allocate(keys, values, empty, [0.4])
    costs = dict(zip(KEY_BITS, key_costs().tolist(), strict=True))
    of_values = dict(zip(VALUE_BITS, value_costs(DIM).tolist(), strict=True))
    bits = sum(costs[b] for b in layout.key_bits.flatten().tolist())
    kept = layout.keep.any(-1).flatten().tolist()
    bits += sum(of_values[b] for b, keeps in zip(layout.value_bits.flatten().tolist(), kept, strict=True) if keeps)
    assert layout.middle_bytes == pytest.approx(bits / (32 * layout.key_bits.numel()))


def test_the_hull_leaves_out_what_no_budget_takes():
    assert hull([0, 1, 2, 3, 4], [10, 9, 2, 2, 0]) == [0, 2, 4]
    assert hull([0, 1, 2], [1, 1, 1]) == [0]


def test_what_cannot_be_given_out_is_refused():
    keys, values, empty = losses(0)
    with pytest.raises(ValueError, match="keeps no head"):
        allocate(keys, values, empty + 100, [1e-4])
    with pytest.raises(ValueError, match="NaN or infinite"):
        allocate(keys * torch.nan, values, empty, [0.5])
    with pytest.raises(ValueError, match="align=8"):
        check_align(64, 8)
    assert isinstance(allocate(keys, values, empty, [0.5])[0], Precision)
