"""The fused attention of a pass against the same attention in parts (attention.scaled_attention)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank_train.attention import Keys, scaled_attention, visibility
from leank_train.fused import Plan, document_pieces, fused_attention, own_pieces, side_by_side


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    documents=st.integers(1, 2),
    branches=st.integers(1, 3),
    group=st.sampled_from([1, 2]),
    sink=st.integers(0, 5),
    window=st.integers(1, 30),
    empty_heads=st.sampled_from(["zero", "drop"]),
    limit=st.sampled_from([None, 1]),
    flash_from=st.sampled_from([None, 1]),
)
def test_equals_the_parts(seed, documents, branches, group, sink, window, empty_heads, limit, flash_from):
    torch.manual_seed(seed)
    H, D, P, T, n, R = 2, 4, 80, 6, 4, documents * branches
    lengths = torch.randint(70, P + 1, (documents,))
    at = torch.arange(P).expand(documents, P)
    document_positions = at.masked_fill(at >= lengths[:, None], -1)
    q_positions = lengths.repeat_interleave(branches)[:, None] + torch.arange(T - n, T)
    own_positions = lengths.repeat_interleave(branches)[:, None] + torch.arange(T)

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    q, alpha = leaf(R, H * group, n, D), torch.rand(H, D, dtype=torch.float64)
    alpha[0] *= seed % 2  # half of the time a head without channels
    alpha.requires_grad_()
    k, v = (torch.randn(documents, H, P, D, dtype=torch.float64) for _ in range(2))
    own_k, own_v = leaf(R, H, T, D), leaf(R, H, T, D)
    zones = [[visibility(q_positions, p, z, sink, window) for z in ("dense", "middle")]
             for p in (document_positions, own_positions)]  # fmt: skip
    pieces = document_pieces(q_positions, document_positions, zones[0])
    pieces += own_pieces(q_positions, own_positions, documents, zones[1])
    leaves = (q, alpha, own_k, own_v)

    keys, values = ([x, side_by_side(y, documents)] for x, y in ((k, own_k), (v, own_v)))
    out = fused_attention(q, keys, values, Plan(pieces), 0.5, alpha, empty_heads, limit, flash_from=flash_from)
    wanted = scaled_attention(q, [Keys(k, v, *zones[0]), Keys(own_k, own_v, *zones[1])], alpha, 0.5, empty_heads)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-12)
    weights = torch.randn_like(out)
    got = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    want = torch.autograd.grad((wanted * weights).sum(), leaves, allow_unused=True)
    for g, w in zip(got, want, strict=True):
        g, w = (torch.zeros(()) if x is None else x for x in (g, w))
        torch.testing.assert_close(g.expand_as(w) if g.dim() == 0 else g, w.expand_as(g), rtol=1e-8, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_device(dtype):
    torch.manual_seed(0)
    q = torch.randn(4, 8, 16, 64, device="cuda", dtype=dtype)
    k, v = (torch.randn(1, 4, 3000, 64, device="cuda", dtype=dtype) for _ in range(2))
    positions = torch.arange(3000, device="cuda")[None]
    rows = torch.arange(3000, 3016, device="cuda").expand(4, 16)
    alpha = torch.rand(4, 64, device="cuda")
    alpha[0] = 0
    zones = [visibility(rows, positions, z, 16, 144) for z in ("dense", "middle")]
    out = fused_attention(q, [k], [v], Plan(document_pieces(rows, positions, zones)), 0.125, alpha, "drop")
    wide = [x.double() for x in (q, k, v, alpha)]
    wanted = scaled_attention(wide[0], [Keys(wide[1], wide[2], *zones)], wide[3], 0.125, "drop")
    assert (out.double() - wanted).norm() / wanted.norm() < (5e-3 if dtype == torch.bfloat16 else 1e-4)
