"""The student of a layout of bits: answer rows read the middle as a cache stores it, in few bits.

A number x of the middle counts as Q(x) = x + e, where e is what rounding to its width's levels leaves (KIVI's scale and
zero point, `leank.eval.cache.storage.quantised`). Widths may be real numbers, so that they can be learned: between two
widths b < w of the grid, e is that of b, times (2^b - 1) / (2^w - 1), by which the step of the levels is smaller. Below
the smallest width, a key's channel fades: Eq. 1 scales it by alpha = w / 2, to its mean where `Prefix.center_` has
subtracted one. A head may be there in part, by a share of 0 to 1: its middle's weights before the softmax are
multiplied by the share, and at 0 it has no middle, as an empty head.

So at widths of the grid the student is what a cache does, and each width has a gradient. Nothing is drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from leank.eval.cache.attention.softmax import Softmax
from leank.eval.cache.storage.quantised import quantise, quantise_packed, restore, restore_packed
from leank.precision import GROUP, KEY_BITS, VALUE_BITS, WHOLE, Precision, value_group
from leank_train.forward.branching import Branch, Prefix, ScaledPass, answer_positions
from leank_train.forward.fused import fused_attention
from leank_train.forward.hook import run_decoder
from leank_train.forward.plan import Plan, to_device

LEAST = VALUE_BITS[0]  # the smallest width that is stored
MOST_CODED = VALUE_BITS[-2]  # the largest width that has codes
CLOSED = 1e-3  # of the middle's weight: what a head with a share of 0 still sees in training
SPARE = 8  # channels beside a head's own, of which one has the logarithm of the middle's weight; 8 keep lines aligned
NO_FLASH = 2**62  # keys; the flash kernel takes no more channels in K than in V


def rounded(x: Tensor, bits: Tensor, group: int, packed: bool = False) -> Tensor:
    """Return x as a cache gives it back, in its own type; groups that share a scale lie along the last axis but one.

    x: [..., A, N]; the last group may be short.
    bits: of a number, like x but 1 along A; WHOLE leaves x as it is.
    group: numbers that share a scale and a zero point, of its type, or packed (`leank.precision`).
    """
    length = x.shape[-2]
    short = -length % group
    cells = torch.cat([x, x[..., -1:, :].expand(*x.shape[:-2], short, -1)], -2) if short else x
    top = (2.0 ** bits.clamp(max=MOST_CODED) - 1).unsqueeze(-2)
    if packed:
        found = restore_packed(*quantise_packed(cells, group, top), group, top).to(x.dtype)
    else:
        found = restore(*quantise(cells, group, top), group)
    return torch.where(bits == WHOLE, x, found[..., :length, :])


def stored(x: Tensor, widths: Tensor, group: int, packed: bool = False) -> Tensor:
    """Return x at real widths, with a gradient in them; widths like the bits of `rounded`, and the rest as there."""
    grid = torch.tensor(KEY_BITS[1:], device=x.device, dtype=widths.dtype)
    below = grid[(torch.bucketize(widths.detach().contiguous(), grid, right=True) - 1).clamp(min=0)]
    with torch.no_grad():
        error = rounded(x, below, group, packed) - x
    shrunk = (2.0**below - 1) / (2.0 ** widths.clamp(min=LEAST) - 1)
    return x + shrunk.to(x.dtype) * error


class StoredPass(ScaledPass):
    """Attention of answer rows over sink and window as they are, and over the middle at widths.

    Parts 0 to 2 are those of `ScaledPass`, and parts 3 to 5 the same keys and values as they are stored. Cells of
    documents begin behind the sink, as in a cache, those of questions and answers at their own first token. Padding
    counts as the last key before it, so that it widens no group.

    Where ranks have a share of the documents each, the gradient of the widths is that of all shares, on every rank.

    widths: real [L, H, D + 2], of the channels of K, and of V; then the head's share.
    group: numbers that share a scale; None has the sizes of layouts.
    packed: whether scales are.
    """

    def __init__(
        self, prefix: Prefix, question: Branch, positions: Tensor, k_positions: Tensor, widths: Tensor, sink: int,
        window: int, empty_heads: str, group: int | None = None, packed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(prefix, question, positions, k_positions, widths, sink, window, empty_heads)
        self.packed = packed
        self.group, self.widths, self.of_documents = group, self.alpha, self.alpha
        self.first_token, documents = sink, len(prefix.lengths)
        self.before = [_last_real(at, documents) for at in (prefix.k_positions, question.k_positions, k_positions)]
        self.used = {p.part for p in self.plan.pieces if p.scaled}
        pieces = [replace(p, part=p.part + 3) if p.scaled else p for p in self.plan.pieces]
        if prefix.ranks is None:
            self.plan = Plan(pieces)
            return
        if prefix.first_cell is None:
            raise ValueError("the ranks' shares of a document cut cells of a layout; prefill it with whole cells")
        self.plan, self.first_token = Plan(pieces, documents=(0, 3)), prefix.first_cell
        self.used |= {0}  # all ranks do the same, whatever their shares hold
        self.of_documents = _OfAllShares.apply(widths.to(prefix.device), prefix.ranks).unbind(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax) -> Tensor:
        """Attention of this layer's rows, [R, Hq, n, D]; ValueError if soft-capped widths are learned."""
        self.check_means(softmax)
        if softmax.softcap is not None and self.widths[layer].requires_grad:  # a share of 1 adds 0, which is exact
            raise ValueError(
                "this model's softmax has soft-capped logits, under which a head's share does not multiply weights; "
                "set stage1.steps=0 for the closed form, or learn a mask with pruning.learns=scores"
            )
        keys, values = self.parts(layer, k, v)
        of_keys, share = self.widths[layer][:, :-2], self.widths[layer][:, -1:]  # [H, D], [H, 1]
        weight = 1 - (1 - CLOSED) * (1 - share)  # exactly 1 for a head that is stored
        # the last spare channels are 0; the first one adds log(weight) to the logits of the middle
        extra = F.pad(weight.log() / scale, (0, SPARE - 1))
        alpha = torch.cat([(of_keys / LEAST).clamp(max=1), extra], -1)
        whole, middle = [F.pad(x, (0, SPARE)) for x in keys], []
        for part, (x, y) in enumerate(zip(keys, values, strict=True)):
            if part in self.used:
                x, y = self.middle(layer, part, x, y)
            middle.append((F.pad(F.pad(x, (0, 1), value=1.0), (0, SPARE - 1)), y))
        every = [*whole, *(x for x, _ in middle)], [*values, *(y for _, y in middle)]
        q = F.pad(F.pad(q, (0, 1), value=1.0), (0, SPARE - 1))
        return fused_attention(
            q, *every, self.plan, scale, alpha, self.empty_heads, ranks=self.prefix.ranks, flash_from=NO_FLASH,
            softmax=softmax,
        )  # fmt: skip

    def middle(self, layer: int, part: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a part as they are stored."""
        widths = (self.widths if part else self.of_documents)[layer][:, None]  # [H, 1, D + 2]
        first = self.first(part)
        of_keys, keys = widths[:, None, :, :-2], self.branches(part, k)[..., first:, :]
        behind = stored(keys, of_keys, self.group or GROUP, self.packed)
        behind = behind.flatten(2, 3)
        v = stored(v.mT, widths[..., -2:-1], self.group or value_group(v.shape[-1]), self.packed).mT
        return (torch.cat([k[:, :, :first], behind], 2) if first else behind), v

    def first(self, part: int) -> int:
        """The token of each branch of a part at which its groups begin."""
        return 0 if part else self.first_token

    def branches(self, part: int, k: Tensor) -> Tensor:
        """The keys of a part, [B, H, M, T, D], with the key before it in place of padding; a document is one branch."""
        shape, index = self.before[part]
        apart = k.unflatten(2, shape)
        return apart if index is None else apart.gather(3, to_device(index, k.device).expand_as(apart))


def _last_real(at: Tensor, documents: int) -> tuple[tuple[int, int], Tensor | None]:
    """Branches of a document and their tokens, and the last real token up to each, [B, 1, M, T, 1]; None: itself.

    at: positions [R, T], -1 for padding.
    """
    shape = len(at) // documents, at.shape[1]
    if (at >= 0).all():
        return shape, None
    index = torch.where(at >= 0, torch.arange(at.shape[1]), 0).cummax(1).values
    return shape, index.view(documents, 1, *shape, 1)


class _OfAllShares(torch.autograd.Function):
    """Widths that every rank applies to its share: their gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, widths: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        return widths.view_as(widths)

    @staticmethod
    def backward(ctx: Any, d_widths: Tensor) -> tuple[Tensor, None]:
        d_widths = d_widths.clone()
        dist.all_reduce(d_widths, group=ctx.ranks)
        return d_widths, None


class WholePass(StoredPass):
    """A student that reads the numbers of the middle as they are: channels fade, and heads, and nothing is rounded."""

    def middle(self, layer: int, part: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a part as they are."""
        return k, v


def stored_student(
    model: PreTrainedModel, prefix: Prefix, question: Branch, answer_ids: Tensor, lengths: Sequence[int] | Tensor,
    widths: Tensor, *, sink: int, window: int, empty_heads: str, rounds: bool = True, group: int | None = None,
    packed: bool = False,
) -> Tensor:  # fmt: skip
    """Run the answer tokens over a middle at real widths, [L, H, D + 2]; the rest is as in `branching.student`.

    rounds: whether numbers are rounded to their widths; else a key's channel fades below `LEAST`, and no more.
    group, packed: as in `StoredPass`.
    """
    positions, k_positions = answer_positions(question, answer_ids, lengths)
    kind = StoredPass if rounds else WholePass
    how = (sink, window, empty_heads, group, packed)
    state = kind(prefix, question, positions, k_positions, widths, *how)
    hidden = run_decoder(model, answer_ids, to_device(positions, answer_ids.device), state)
    return hidden + 0.0 * widths.sum() if widths.requires_grad and not hidden.requires_grad else hidden


def widths_of(precision: Precision) -> Tensor:
    """Return the widths [L, H, D + 2] of a layout, uint8; a student with `empty_heads="drop"` is then as deployed."""
    heads = precision.value_bits, torch.ones_like(precision.value_bits)  # K without bits drops a middle by itself
    return torch.cat([precision.key_bits, torch.stack(heads, -1)], -1)
