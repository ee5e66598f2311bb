"""Attention over a sealed layer in plain PyTorch: slow, obvious, any device and dtype. The kernel is held equal to
it."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.cache.store import Store


def attend(store: Store, q: Tensor, position: Tensor, scaling: float) -> Tensor:
    """softmax(q K_sink, q_kept K_middle, q K_window) V (LeanK, section 3.3), one row and KV head at a time.

    q [B, Hq, Q, D]; position [B, Q] the real index of each query, -1 = padding (its output is zero). A query sees
    sink and window tokens up to its own index and all of the middle. Returns [B, Q, Hq, D] in q's dtype; computed in
    at least fp32.
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
            logits = [q_head @ store.sink_k[row, head, : len(sink)].to(dtype).T, q_head @ ring_k.to(dtype).T]
            logits = [x.masked_fill(index > at, -torch.inf) for x, index in zip(logits, (sink, window), strict=True)]
            values = [store.sink_v[row, head, : len(sink)], ring_v]
            count = int(store.channels.count[row, head])
            if count:
                kept = q_head[..., store.channels.index[row, head, :count].long()]
                for segment in store.segments:
                    k, v = segment.read(row, head)
                    logits.append(kept @ k.to(dtype).T)
                    values.append(v)
            weight = torch.softmax(torch.cat(logits, -1) * scaling, -1)
            head_out = (weight @ torch.cat(values).to(dtype)).masked_fill(at < 0, 0)  # [G, Q, D]
            out[row, :, head * group : (head + 1) * group] = head_out.transpose(0, 1).to(q.dtype)
    return out
