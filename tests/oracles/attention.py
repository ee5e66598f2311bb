"""Softmax attention as whole matrices, in place of blocks, kernels and every form of mask."""

import torch


def causal(new, length, real=None):
    """What the last `new` of `length` tokens see, bool [B or 1, 1, new, length]: all real ones up to themselves.

    real: bool [B, length]; a query that is padding sees nothing. None = all are real.
    """
    seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)[None, None]
    return seen if real is None else seen & real[:, None, None] & real[:, None, length - new :, None]


def weights(q, k, scaling=None, seen=None, softcap=None, sinks=None):
    """Weights [B, Hq, n, T] of queries q [B, Hq, n, D] over keys k [B, H, T, D]; zero where a query sees nothing.

    scaling: D^-0.5 by default.
    seen: bool that broadcasts to the weights; by default `causal` of real tokens.
    softcap: logits become softcap * tanh(logits / softcap). sinks: [Hq], one more logit, whose weight goes nowhere.
    """
    seen = causal(q.shape[2], k.shape[2]) if seen is None else seen
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:-1], 1)], -1)
    found = logits.softmax(-1)[..., : k.shape[2]]
    return found.masked_fill(~seen.any(-1, keepdim=True), 0)


def attention(q, k, v, scaling=None, seen=None, softcap=None, sinks=None):
    """What the weights make of v [B, H, T, D]: [B, Hq, n, D]."""
    return weights(q, k, scaling, seen, softcap, sinks) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
