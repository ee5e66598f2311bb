"""TriAttention's score of keys, one by one, in the form of the authors' code: keys before RoPE, angles, cosines."""

import torch


def scores(keys, places, now, means, sizes, frequency, future, first=0):
    """Scores [n] of one KV head's keys [n, D] after RoPE at places [n]; now: the next token's position.

    first: how many keys do not count in mean and deviation
    means: complex [G, D / 2], E q_f of the group's query heads before RoPE; sizes: [G, D / 2], E |q_f|
    """
    offsets, offset = [], 1
    while offset <= future:
        offsets.append(offset)
        offset *= 2
    found = []
    for mean, size in zip(means, sizes, strict=True):
        raw = []
        for key, place in zip(keys, places, strict=True):
            low, high = key.chunk(2)
            cos, sin = (place * frequency).cos(), (place * frequency).sin()
            k = torch.complex(low * cos + high * sin, high * cos - low * sin)  # before RoPE
            phase = torch.angle(mean * k.conj())
            far = [(mean.abs() * k.abs() * torch.cos(frequency * (now - place + o) + phase)).sum() for o in offsets]
            raw.append(sum(far) / len(far) + ((size - mean.abs()) * k.abs()).sum())
        raw = torch.stack(raw)
        mean = raw[first:].mean()
        found.append((raw - mean) / max(1e-6, float(((raw[first:] - mean) ** 2).mean()) ** 0.5))
    return torch.stack(found).amax(0)
