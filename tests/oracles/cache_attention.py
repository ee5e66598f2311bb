"""The slow, obvious form of attention over a compressed layer, one row and KV head at a time, for any device and dtype.

`batched.attend` and the Triton kernels are held equal to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.attention.ranking import Bounds
from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.cache.storage.eviction import Eviction
from leank.eval.cache.storage.store import Store
from leank.eval.methods.reads.double_sparsity import Labels, rounded
from leank.eval.methods.reads.quest import Pages


def attend(store: Store, q: Tensor, position: Tensor, scaling: float, softmax: Softmax = PLAIN) -> Tensor:
    """softmax(q K_sink, q_kept K_middle, q K_window) V, as `batched.attend`; computed in at least fp32.

    The weights go to the layer's eviction policy.
    """
    batch, q_heads, new, dim = q.shape
    heads = store.ring_k.shape[1]
    group = q_heads // heads
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(batch, new, q_heads, dim)
    slots = store.ring_k.shape[2]
    for row in range(batch):
        at = position[row][:, None]  # [Q, 1]
        seen, start = int(store.seen[row]), int(store.start[row])
        sink = torch.arange(min(seen, store.sizes.sink), device=q.device)
        window = torch.arange(start, max(start, seen), device=q.device)
        for head in range(heads):
            mine = slice(head * group, (head + 1) * group)
            q_head = q[row, mine].to(dtype)  # [G, Q, D]
            ring_k, ring_v = (x[row, head, window % slots] for x in (store.ring_k, store.ring_v))
            index = store.channels.index[row, head, : int(store.channels.count[row, head])].long()
            kept, parts = q_head[..., index], [segment.read(row, head) for segment in (store.prompt, store.tail)]
            middle = softmax.cap(torch.cat([kept @ k.to(dtype).T for k, _ in parts], -1) * scaling)
            if store.reads is not None:
                k = torch.cat([k for k, _ in parts]).to(dtype)
                middle = middle.masked_fill(~visible(store.reads, row, head, kept, k, index), -torch.inf)
            first = softmax.cap(q_head @ store.sink_k[row, head, : len(sink)].to(dtype).T * scaling)
            last = softmax.cap(q_head @ ring_k.to(dtype).T * scaling)
            ends = first.masked_fill(sink > at, -torch.inf), last.masked_fill(window > at, -torch.inf)
            sinks = None if softmax.sink_logits is None else softmax.sink_logits[mine]
            weight = softmax._replace(sink_logits=sinks).weights(torch.cat([ends[0], middle, ends[1]], -1))
            weight = weight.masked_fill(at < 0, 0)
            values = torch.cat([store.sink_v[row, head, : len(sink)], *(v for _, v in parts), ring_v])
            out[row, :, mine] = (weight @ values.to(dtype)).transpose(0, 1).to(q.dtype)
            if store.eviction is not None and bool((at >= 0).any()):
                see(store.eviction, row, head, weight.sum((0, 1)))
    return out


def visible(reads: object, row: int, head: int, q: Tensor, k: Tensor, channels: Tensor) -> Tensor:
    """Which tokens of its middle the queries of one KV head read; the slow form of a `ReadState.sees`.

    q: [G, Q, c]
    k: [tokens, c], the prompt's tokens, then the tail's
    channels: [c], the kept channels, which are those of q and k

    Returns bool [G, Q, tokens].
    """
    if isinstance(reads, Labels):
        label = reads.channels.to(q.device)[head, channels]
        score = q[..., label] @ rounded(k[:, label].T, label[label][:, None], reads.bits)
        return highest(score, reads.most)
    assert isinstance(reads, Pages)
    low, high = (bound.to(q.dtype) for bound in bounds_of(reads.bounds, row, head))
    return best_pages(q, low, high, reads.bounds.page, reads.ranking.most)[..., : len(k)]


def bounds_of(bounds: Bounds, row: int, head: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest key of every page of one head, [pages, kept channels] each."""
    first, pages, channels = (int(n[row, head]) for n in (bounds.first, bounds.pages, bounds.channels))
    both = bounds.flat[first : first + 2 * pages * channels].view(pages, 2, channels)
    return both[:, 0], both[:, 1]


def scores_of(policy: Eviction, row: int, head: int) -> Tensor:
    """The scores of one head's tokens, [tokens]."""
    return policy.scores[row, head, : int(policy.held[row, head])]


def see(policy: Eviction, row: int, head: int, weights: Tensor) -> None:
    """Add the attention weights [tokens] of one step to the scores of one head; the slow form of `Eviction.add`."""
    policy.scores = pad(policy.scores, (0, max(0, len(weights) - policy.scores.shape[-1])))
    policy.held[row, head] = len(weights)
    scores_of(policy, row, head).mul_(policy.decay).add_(weights)


def highest(score: Tensor, most: int) -> Tensor:
    """Bool [..., n]: the `most` highest scores of each row."""
    chosen = score.topk(min(most, score.shape[-1])).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, True)


def best_pages(q: Tensor, low: Tensor, high: Tensor, page: int, most: int) -> Tensor:
    """Bool [..., pages * page]: the tokens of the `most` pages whose keys could score highest (Quest, Algorithm 1).

    q: [..., c]; low, high: [pages, c], smallest and largest key of each page
    """
    bound = torch.maximum(q[..., None, :] * low, q[..., None, :] * high).sum(-1)
    return highest(bound, most).repeat_interleave(page, -1)
