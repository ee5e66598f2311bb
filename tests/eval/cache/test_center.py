"""Mean keys in place of pruned channels: a layer's attention against keys that are rebuilt token by token."""

import pytest
import torch

from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.attention.softmax import Softmax
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes

HEADS, GROUP, DIM, SIZES = 3, 2, 16, Sizes(sink=2, window=5, flush=3)


def rebuilt(q, k, v, keep, mean, in_middle):
    """Attention of one query per row [B, Hq, D]: pruned channels of middle keys are their mean, empty heads drop it."""
    k_middle = torch.where(keep[:, None], k, mean[:, None])
    k = torch.where(in_middle[None, None, :, None], k_middle, k).repeat_interleave(GROUP, 1)
    logits = torch.einsum("bhd,bhtd->bht", q, k) / DIM**0.5
    dropped = (~keep.any(-1))[:, None] & in_middle
    logits = logits.masked_fill(dropped.repeat_interleave(GROUP, 0), -torch.inf)
    return torch.einsum("bht,bhtd->bhd", logits.softmax(-1), v.repeat_interleave(GROUP, 1))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunks", [(30,), (7, 23)])
def test_a_pruned_channel_is_its_mean(seed, chunks):
    g = torch.Generator().manual_seed(seed)
    keep, mean = torch.rand(HEADS, DIM, generator=g) > 0.6, torch.randn(HEADS, DIM, generator=g) * 3
    keep[1] = False
    layer = CompressedLayer(Middle(keep, center=mean), SIZES, choose_backend("torch"))
    layer.expect(sum(chunks))
    total = sum(chunks) + 12
    k, v = torch.randn(2, 2, HEADS, total, DIM, generator=g, dtype=torch.float64)
    q = torch.randn(2, HEADS * GROUP, total, DIM, generator=g, dtype=torch.float64)
    at = 0
    for n in (*chunks, 1, 1, 1, 4, 1, 1, 3):
        new = slice(at, at + n)
        layer.update(k[:, :, new], v[:, :, new])
        start = None if layer.store is None else layer.store.start.copy()
        out = layer.attend(q[:, :, new])
        if start is not None and n == 1:
            tokens = torch.arange(at + 1)
            in_middle = (tokens >= SIZES.sink) & (tokens < int(start[0]))
            assert in_middle.any()
            expected = rebuilt(q[:, :, at], k[:, :, : at + 1], v[:, :, : at + 1], keep, mean.double(), in_middle)
            torch.testing.assert_close(out[:, 0], expected, rtol=1e-5, atol=1e-5)
        at += n


def test_a_softmax_that_is_not_plain_is_refused():
    layer = CompressedLayer(Middle(center=torch.zeros(HEADS, DIM)), SIZES, choose_backend("torch"))
    layer.update(*torch.randn(2, 1, HEADS, 9, DIM))
    with pytest.raises(ValueError, match="mean_keys"):
        layer.attend(torch.randn(1, HEADS * GROUP, 9, DIM), softmax=Softmax(softcap=30.0))
