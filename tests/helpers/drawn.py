"""Means of queries that are drawn, in place of those that calibration finds for TriAttention."""

import torch

from leank.eval.methods.tokens.triattention import Centres, TriAttention


def moments(layers, heads, half):
    """E q_f and E |q_f|, complex128 [L, Hq, 2, D / 2]."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(layers, heads, half, dtype=torch.complex128, generator=generator)
    size = mean.abs() * (1 + torch.rand(layers, heads, half, dtype=torch.float64, generator=generator))
    return torch.stack([mean, size + 0j], 2)


def centres(heads, group, dim, future):
    """Those of one layer, at RoPE's frequencies of theta = 10,000."""
    mean, size = moments(1, heads * group, dim // 2)[0].unflatten(0, (heads, group)).unbind(2)
    return Centres(mean, size.real, 1e4 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim), future)


def calibrated(method, config):
    """The method, which has them from now on if its choice of tokens is TriAttention."""
    choice = method.tokens
    if isinstance(choice, TriAttention):
        found = moments(config.num_hidden_layers, config.num_attention_heads, config.head_dim // 2)
        choice._found[choice.calibrated_on] = found
    return method
