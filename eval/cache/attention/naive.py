"""Attention over a sealed layer in plain PyTorch: slow and obvious, for any device and dtype.

Tests hold the Triton kernel and `batched.attend`, which runs where the kernel cannot, equal to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.cache.storage.store import Store


def attend(store: Store, q: Tensor, position: Tensor, scaling: float, softmax: Softmax = PLAIN) -> Tensor:
    """softmax(q K_sink, q_kept K_middle, q K_window) V (LeanK, section 3.3), one row and KV head at a time.

    A query sees sink and window up to its own index, and the tokens of the middle that the choice of reads shows. The
    weights go to the layer's eviction policy.

    store: the sealed layer
    q: [B, Hq, Q, D]
    position: [B, Q], the real index of each query, -1 for padding, whose output is zero
    scaling: factor of the logits
    softmax: the model's

    Returns [B, Q, Hq, D] in q's dtype, computed in at least fp32.
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
            q_head = q[row, head * group : (head + 1) * group].to(dtype)  # [G, Q, D]
            ring_k, ring_v = (x[row, head, window % slots] for x in (store.ring_k, store.ring_v))
            index = store.channels.index[row, head, : int(store.channels.count[row, head])].long()
            kept, parts = q_head[..., index], [segment.read(row, head) for segment in (store.prompt, store.tail)]
            middle = softmax.cap(torch.cat([kept @ k.to(dtype).T for k, _ in parts], -1) * scaling)
            if store.reads is not None:
                k = torch.cat([k for k, _ in parts]).to(dtype)
                middle = middle.masked_fill(~store.reads.visible(row, head, kept, k, index), -torch.inf)
            first = softmax.cap(q_head @ store.sink_k[row, head, : len(sink)].to(dtype).T * scaling)
            last = softmax.cap(q_head @ ring_k.to(dtype).T * scaling)
            ends = first.masked_fill(sink > at, -torch.inf), last.masked_fill(window > at, -torch.inf)
            of_head = softmax.heads(head * group, (head + 1) * group)
            weight = of_head.weights(torch.cat([ends[0], middle, ends[1]], -1)).masked_fill(at < 0, 0)
            values = torch.cat([store.sink_v[row, head, : len(sink)], *(v for _, v in parts), ring_v])
            head_out = weight @ values.to(dtype)  # [G, Q, D]
            out[row, :, head * group : (head + 1) * group] = head_out.transpose(0, 1).to(q.dtype)
            if store.eviction is not None and bool((at >= 0).any()):
                store.eviction.see(row, head, weight.sum((0, 1)))
    return out
