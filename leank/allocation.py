"""Gives out bits under a budget of bytes: which width every block of K channels, and every head's V, is worth.

The loss of a layout is taken as a sum: over channels of K, each at its width, over heads of V at theirs, and over heads
that drop their middle. Of a sum like that, the best layouts for all budgets lie on one line of moves: a move makes one
block or one V wider, and the moves are made in the order of their gain, loss per byte. Only widths on the lower convex
hull of losses over bytes are ever taken. A head begins empty. Its first move takes as many of its blocks and of its V's
widths as have the highest gain together, because V is paid for as soon as one block is kept.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from leank.precision import GROUP, KEY_BITS, ROOM, VALUE_BITS, WHOLE, Precision, scale_bytes, value_group


class Move(NamedTuple):
    """A step to a larger width."""

    gain: float  # loss saved per bit
    cost: float  # bits of a token
    unit: int  # what becomes wider: number of the block in its head, or -1 for V
    width: int


class Grid(NamedTuple):
    """What a token costs at each width that a channel of K, and the V of a head, may have; float64, rising, in bits."""

    keys: Tensor  # [W], 0 first
    values: Tensor  # [W'], of all channels of a head

    @classmethod
    def of_layouts(cls, head_dim: int, packed: bool = False) -> "Grid":
        """Of layouts of bits, scales counted; packed: as in `Precision`."""
        return cls(key_costs(packed), value_costs(head_dim, packed))

    @classmethod
    def of_masks(cls) -> "Grid":
        """Of masks, whose budget is a number of channels of K: V is one width, and costs nothing."""
        return cls(torch.tensor([0, WHOLE], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


def key_costs(packed: bool = False) -> Tensor:
    """Bits of a token's number in a channel of K at each of `KEY_BITS`, scales counted, float64."""
    scales = 8 * scale_bytes(packed=packed) / GROUP
    return torch.tensor([bits + scales * (0 < bits < WHOLE) for bits in KEY_BITS], dtype=torch.float64)


def value_costs(head_dim: int, packed: bool = False) -> Tensor:
    """Bits of a token's V in one head at each of `VALUE_BITS`, scales counted, float64."""
    scales = 8 * scale_bytes(packed=packed) / value_group(head_dim)
    return head_dim * torch.tensor([bits + scales * (bits < WHOLE) for bits in VALUE_BITS], dtype=torch.float64)


def allocate(
    keys: Tensor, values: Tensor, empty: Tensor, budgets: Sequence[float], align: int = ROOM, packed: bool = False
) -> list[Precision]:
    """Return the layout of the smallest loss for each budget; a larger budget never makes a width smaller.

    A layout spends its budget but for less than the next move costs. At the budgets where a move ends, no layout of
    these blocks has a smaller loss, if the first step of each head gains less per byte than its best block alone. Where
    it gains more, a first block of fewer bits could save more per byte, as V comes with it. The blocks of a head hold
    channels whose losses are alike: its channels are sorted by their losses, each width's over the mean of its head,
    summed over the widths.

    keys: loss of each channel at each of `KEY_BITS`, [L, H, D, 6].
    values: loss of each head's V at each of `VALUE_BITS`, [L, H, 5].
    empty: loss of each head if it drops its middle, [L, H].
    budgets: shares of dense's bytes (`Precision.middle_bytes`), above 0.
    align: channels of a block, a multiple of `ROOM` that divides head_dim, so that no band has room to spare.
    packed: whether the layouts' scales are; the losses must be of such codes.

    Raises ValueError for an align that does not fit, losses that are not finite, or a budget that keeps no head.
    """
    layers, heads, dim = keys.shape[:3]
    check_align(dim, align)
    if not all(torch.isfinite(losses).all() for losses in (keys, values, empty)):
        raise ValueError("the losses of widths hold NaN or infinite numbers; calibrate again")
    keys, values, empty = (losses.detach().double().cpu().flatten(0, 1) for losses in (keys, values, empty))
    order, of_blocks = blocks(keys, align)
    grid = Grid.of_layouts(dim, packed)
    found = [_of_head(*losses, align, grid) for losses in zip(of_blocks, values, empty.tolist(), strict=True)]
    # sorting is stable, and the gains of a head fall: its moves stay in order
    whole = [(gain, cost, head, count) for head, (_, steps) in enumerate(found) for gain, cost, count in steps]
    whole.sort(key=lambda step: -step[0])
    spent = list(accumulate(cost for _, cost, _, _ in whole))
    layouts = []
    for budget in budgets:
        most = budget * layers * heads * 2 * dim * WHOLE * (1 + 1e-12)
        counts = dict.fromkeys(range(layers * heads), 0)
        counts |= {head: count for (_, _, head, count), bits in zip(whole, spent, strict=True) if bits <= most}
        if not any(counts.values()):
            raise ValueError(f"budget={budget} keeps no head's middle; raise it")
        key_bits = torch.zeros(layers * heads, dim, dtype=torch.uint8)
        value_bits = torch.full((layers * heads,), VALUE_BITS[0], dtype=torch.uint8)
        for head, count in counts.items():
            for move in found[head][0][:count]:
                if move.unit < 0:
                    value_bits[head] = VALUE_BITS[move.width]
                else:
                    key_bits[head, order[head, move.unit * align : (move.unit + 1) * align]] = KEY_BITS[move.width]
        layouts.append(Precision(key_bits.view(layers, heads, dim), value_bits.view(layers, heads), packed=packed))
    return layouts


def blocks(keys: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """Put channels whose losses are alike into blocks, as `allocate` does; keys: [..., D, W].

    Returns the channels in the order of their blocks, int64 [..., D], and the blocks' losses, [..., D / align, W].
    """
    alike = (keys / keys.mean(-2, keepdim=True).clamp(min=1e-300)).sum(-1)  # [..., D]
    order = alike.argsort(dim=-1, descending=True, stable=True)
    return order, keys.gather(-2, order[..., None].expand_as(keys)).unflatten(-2, (-1, align)).sum(-2)


def channel_scores(pruned: Tensor, empty: Tensor, align: int) -> Tensor:
    """Score channels for a mask, whose budget is a number of channels: the best ones make the smallest loss.

    A head's first channels count what its whole middle is worth, so that a head is dropped where few channels would
    keep it from harm. Scores are ranks from 0 to 1: of the loss that a channel's step along its head's hull saves per
    channel, then of its own loss.

    pruned: loss of each channel that is pruned, [L, H, D]; empty: loss of each head if it drops its middle, [L, H].
    align: channels of a block; each head keeps whole blocks of channels whose losses are alike.

    Raises ValueError for losses that are not finite.
    """
    if not (torch.isfinite(pruned).all() and torch.isfinite(empty).all()):
        raise ValueError("the losses of channels hold NaN or infinite numbers; calibrate again")
    losses = pruned.detach().double().cpu()
    order = losses.argsort(dim=-1, descending=True, stable=True)
    of_blocks = losses.gather(-1, order).unflatten(-1, (-1, align)).sum(-1)  # [L, H, D / align]
    rest = of_blocks.flip(-1).cumsum(-1).flip(-1) - of_blocks  # what the blocks after each one are worth together
    curve = torch.cat([empty.detach().double().cpu()[..., None], rest], -1)  # loss of a head with 0, 1, ... blocks
    saved = gains(curve, torch.arange(curve.shape[-1], dtype=torch.float64))
    saved = torch.zeros_like(losses).scatter(-1, order, saved.repeat_interleave(align, -1)).flatten()
    by_loss = losses.flatten().argsort(dim=0, stable=True)
    ranks = by_loss[saved[by_loss].argsort(dim=0, stable=True)].argsort()
    return (ranks / max(1, ranks.numel() - 1)).float().view(losses.shape)


def gains(losses: Tensor, costs: Tensor) -> Tensor:
    """Return the loss saved per bit by each next width along the lower convex hull, [..., W - 1], falling.

    A width that the hull leaves out has the gain of the step across it; beyond the smallest loss a gain is 0.

    losses: [..., W]; costs: [W], rising.
    """
    found = torch.zeros(losses[..., 1:].shape, dtype=torch.float64)
    prices = costs.tolist()
    for row, out in zip(losses.double().cpu().flatten(0, -2).tolist(), found.flatten(0, -2), strict=True):
        for a, b in pairwise(hull(prices, row)):
            out[a:b] = (row[a] - row[b]) / (prices[b] - prices[a])
    return found


def first_gains(of_blocks: Tensor, values: Tensor, empty: Tensor, align: int, grid: Grid) -> Tensor:
    """Return the loss saved per bit by the first step of each head, from no middle to the first layout on its hull.

    of_blocks: [L, H, D / align, W], values: [L, H, W'], losses at the widths of `grid`; empty: [L, H].
    The result is like empty, 0 where nothing gains.
    """
    heads = zip(of_blocks.flatten(0, 1), values.flatten(0, 1), empty.flatten().tolist(), strict=True)
    found = [max([0.0, *(gain for gain, _, _ in _of_head(*one, align, grid)[1][:1])]) for one in heads]
    return torch.tensor(found, dtype=torch.float64).view(empty.shape)


def check_align(head_dim: int, align: int) -> None:
    """Raise ValueError for an align of blocks for which bytes are not what widths cost."""
    if align < 1 or align % ROOM or head_dim % align:
        raise ValueError(
            f"align={align} does not fit a layout of bits for head_dim={head_dim}: give a multiple of {ROOM}, for "
            "which a cache has room, that divides it"
        )


def hull(costs: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Return the points of the lower convex hull of losses over rising costs, from the first to the smallest loss."""

    def gain(a: int, b: int) -> float:
        return (losses[a] - losses[b]) / (costs[b] - costs[a])

    found = [0]
    for i in range(1, len(costs)):
        if losses[i] < losses[found[-1]]:
            while len(found) > 1 and gain(found[-2], found[-1]) <= gain(found[-1], i):
                found.pop()
            found.append(i)
    return found


def _of_head(
    blocks: Tensor, values: Tensor, empty: float, align: int, grid: Grid
) -> tuple[list[Move], list[tuple[float, float, int]]]:
    """Return the moves of a head by gain, and the steps of its hull: gain, bits, and how many moves are made by then.

    blocks: [D / align, W], values: [W'], losses at the widths of `grid`; empty: loss without the middle.
    """
    of_keys, of_values = (align * grid.keys).tolist(), grid.values.tolist()
    moves = []
    for unit, losses in [*enumerate(blocks.tolist()), (-1, values.tolist())]:
        costs = of_values if unit < 0 else of_keys
        for a, b in pairwise(hull(costs, losses)):
            cost = costs[b] - costs[a]
            moves.append(Move((losses[a] - losses[b]) / cost, cost, unit, b))
    moves.sort(key=lambda move: -move.gain)
    first = next((i for i, move in enumerate(moves) if move.unit >= 0), len(moves))
    moves = [*moves[first : first + 1], *moves[:first], *moves[first + 1 :]]  # without a block, V would be dropped
    costs, losses, counts = [0.0], [empty], [0]
    cost, loss = of_values[0], float(blocks[:, 0].sum() + values[0])
    for count, move in enumerate(moves if first < len(moves) else [], 1):
        cost, loss = cost + move.cost, loss - move.gain * move.cost
        costs, losses, counts = [*costs, cost], [*losses, loss], [*counts, count]
    steps = []
    for a, b in pairwise(hull(costs, losses)):
        steps.append(((losses[a] - losses[b]) / (costs[b] - costs[a]), costs[b] - costs[a], counts[b]))
    return moves, steps
