"""Chunks of prompts on a GPU: their past is gathered from pages, and FlashAttention computes them.

The reference is `eval.serving.attention.prefill`, which takes one request at a time.

A `Batch` is requests whose rows follow each other. Its K and V are dense: the past from pages, with zeros for what is
not stored, and behind it the chunk itself. Heads that keep channels see all of it. Heads that keep none see sink,
window and chunk, which are put side by side. So every head has plain causal attention, whose last query is the last
key, and no mask is ever built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from leank.eval.cache.attention import dense
from leank.eval.serving.coded import AnyLayout

# (q [n, Hq, D], k, v [T, H, D], starts of the requests in q and in k, int32 [B + 1] each, their longest parts of q and
# of k, factor of the logits, out like q): causal attention of each request, whose last query is its last key
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, Tensor], None]


def plain(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, _q: int, _k: int, scaling: float, out: Tensor
) -> None:
    """A `Varlen`, one request at a time; where there is no FlashAttention, and the reference of it."""
    for (a, b), (c, d) in zip(pairwise(q_starts.tolist()), pairwise(k_starts.tolist()), strict=True):
        if b > a:
            new, key, value = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            out[a:b] = dense.attend(new, key, value, scaling)[0]


@dataclass(frozen=True)
class Batch:
    """Requests with new positions whose rows follow each other; either all or none of them have a past."""

    rows: slice  # their rows in the step's tokens
    request: int  # number of the first of them in the step
    # int32 [4, B + 1] on the device: the starts of each request in the rows, in K and V of heads with a middle, and in
    # those of heads without; the first new position of each
    plan: Tensor
    longest: tuple[int, int, int]  # of a request's rows, and of its parts of the two K and V
    tokens: tuple[int, int]  # of the two K and V
    past: bool  # whether the requests have a past

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return self.plan.shape[1] - 1


def batches(
    layout: AnyLayout,
    starts: Sequence[int],
    ends: Sequence[int],
    which: Sequence[int],
    room: int,
    device: torch.device,
) -> list[Batch]:
    """Divide requests of a step, numbers `which`, ascending, into batches.

    starts: [R + 1], the first row of each request in the step's tokens
    ends: [R], positions of each request once the step is done
    room: tokens of K and V that a batch may have, unless a single request has more
    """
    found: list[list[int]] = []
    total = 0
    for i in which:
        past = ends[i] > starts[i + 1] - starts[i]
        last = found[-1][-1] if found else None
        follows = last == i - 1 and past == (ends[i - 1] > starts[i] - starts[i - 1])
        if found and follows and total + ends[i] <= room:
            found[-1].append(i)
            total += ends[i]
        else:
            found.append([i])
            total = ends[i]
    return [_batch(layout, starts, ends, of, device) for of in found]


def _batch(
    layout: AnyLayout, starts: Sequence[int], ends: Sequence[int], which: list[int], device: torch.device
) -> Batch:
    new = [starts[i + 1] - starts[i] for i in which]
    full = [ends[i] for i in which]
    first = [end - n for end, n in zip(full, new, strict=True)]
    few = [n + before - max(0, layout.window_start(before) - layout.sink) for before, n in zip(first, new, strict=True)]
    sizes = [[0, *accumulate(x)] for x in (new, full, few)]
    plan = torch.tensor([*sizes, [*first, 0]], dtype=torch.int32)
    if device.type == "cuda":
        plan = plan.pin_memory().to(device, non_blocking=True)  # the host does not wait for the device
    return Batch(
        slice(starts[which[0]], starts[which[-1] + 1]), which[0], plan, (max(new), max(full), max(few)),
        (sizes[1][-1], sizes[2][-1]), any(first),
    )  # fmt: skip
