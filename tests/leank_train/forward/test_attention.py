"""Blockwise attention against its dense reference, in value and gradient; merging; Eq. 1 with empty heads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.kernels import flash_backward, flash_forward
from leank_train.forward.attention import (
    LEAST_LOGIT,
    Keys,
    exp_,
    merge,
    partial_attention,
    scaled_attention,
)
from leank_train.forward.plan import visibility
from tests.oracles.partial_attention import partial_attention_reference

D = 4


@st.composite
def problems(draw):
    """Queries of M branches per document over right-padded keys, some rows seeing little or nothing."""
    B, M, H, G, n = (draw(st.integers(1, high)) for high in (2, 3, 2, 2, 3))
    T = draw(st.integers(1, 14))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    q = torch.randn(B * M, H * G, n, D, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, B, H, T, D, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([draw(st.integers(0, T)) for _ in range(B)])
    k_positions = torch.arange(T).expand(B, T).masked_fill(torch.arange(T) >= lengths[:, None], -1)
    starts = torch.tensor([draw(st.integers(0, 18)) for _ in range(B * M)])
    return q, k, v, starts[:, None] + torch.arange(n), k_positions


@settings(deadline=None, max_examples=80)
@given(
    problems(),
    st.sampled_from(["causal", "dense", "middle"]),
    st.integers(0, 5),
    st.integers(1, 8),
    st.integers(1, 6),
    st.sampled_from(["qkv", "q", "kv", "v"]),
)
def test_blockwise_equals_dense(problem, zone, sink, window, block, learn):
    q, k, v, q_positions, k_positions = problem
    sees = visibility(q_positions, k_positions, zone, sink, window)
    results = []
    for function in (partial_attention, partial_attention_reference):
        leaves = {name: x.clone().requires_grad_(name in learn) for name, x in zip("qkv", (q, k, v), strict=True)}
        out, lse = function(*leaves.values(), 0.7, sees, block)
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        loss = (out * torch.arange(out.numel()).view(out.shape).cos()).sum() + (
            finite * torch.arange(lse.numel()).view(lse.shape).sin()
        ).sum()
        grads = torch.autograd.grad(loss, [x for x in leaves.values() if x.requires_grad], allow_unused=True)
        results.append((out, lse, *(torch.zeros(1) if g is None else g for g in grads)))
    for fast, slow in zip(*results, strict=True):
        assert fast.isnan().sum() == 0
        torch.testing.assert_close(fast, slow.to(fast.dtype), rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(problems(), st.integers(0, 5), st.integers(1, 8))
def test_dense_and_middle_make_up_causal(problem, sink, window):
    q, k, v, q_positions, k_positions = problem
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    parts = [
        partial_attention(*leaves, 1.0, visibility(q_positions, k_positions, zone, sink, window), 4)
        for zone in ("dense", "middle")
    ]
    whole = partial_attention(*leaves, 1.0, visibility(q_positions, k_positions, "causal"), 4)
    for out, lse in (merge(*parts[0], *parts[1]), whole):
        loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves, allow_unused=True)))
    for merged, direct in zip(*results, strict=True):
        torch.testing.assert_close(merged, direct, rtol=1e-9, atol=1e-12)


def test_spans_leave_the_common_middle_unmasked():
    sees = visibility(torch.arange(40, 44)[None], torch.arange(44)[None], "middle", sink=4, window=10)
    assert sees.spans == ((4, 31, False), (31, 34, True))
    sees = visibility(torch.arange(40, 44)[None], torch.arange(44)[None], "dense", sink=4, window=10)
    assert sees.spans == ((0, 4, False), (31, 34, True), (34, 41, False), (41, 44, True))


def test_a_row_that_sees_no_key():
    q, k = torch.randn(1, 1, 1, D, requires_grad=True), torch.randn(1, 1, 3, D, requires_grad=True)
    nothing = visibility(torch.tensor([[5]]), torch.full((1, 3), -1), "causal")
    for sees in (nothing, visibility(torch.tensor([[0, 9]]), torch.tensor([[4, 5, 6]]), "causal")):
        out, lse = partial_attention(q.expand(1, 1, sees.q_positions.shape[1], D), k, k, 1.0, sees)
        assert (out[0, 0, 0] == 0).all()
        assert lse[0, 0, 0] == -torch.inf
        out, lse = merge(out, lse, out, lse)
        grads = torch.autograd.grad(out.sum() + lse[lse > -torch.inf].sum(), [q, k])
        assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_kept_in_float32(dtype):
    q, k, v = torch.randn(3, 1, 2, 50, D, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    sees = visibility(torch.arange(50)[None], torch.arange(50)[None], "causal")
    out, lse = partial_attention(q, k, v, 1.0, sees, 16)
    assert out.dtype == lse.dtype == torch.float32
    expected = partial_attention_reference(q.double(), k.double(), v.double(), 1.0, sees)[0]
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("zone", ["causal", "dense", "middle"])
def test_attention_on_a_gpu_is_that_in_float64(dtype, error, zone):
    """Two documents, three branches each, four query heads on two KV heads; errors relative to float64."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, 9, 64, generator=generator).cuda().to(dtype)
    k, v = torch.randn(2, 2, 2, 700, 64, generator=generator).cuda().to(dtype)
    k_positions = torch.arange(700, device="cuda").expand(2, 700).clone()
    k_positions[1, 500:] = -1
    q_positions = torch.tensor([700] * 3 + [500] * 3, device="cuda")[:, None] - 5 + torch.arange(9, device="cuda")
    sees = visibility(q_positions, k_positions, zone, 16, 100)
    results = []
    for function, cast in ((partial_attention, dtype), (partial_attention_reference, torch.float64)):
        leaves = [x.to(cast).detach().requires_grad_() for x in (q, k, v)]
        out, lse = function(*leaves, 0.125, sees, 128)
        loss = (out * torch.arange(out.numel(), device="cuda").view(out.shape).cos()).sum() + lse.sin().sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    for fast, slow in zip(*results, strict=True):
        assert (fast.double() - slow).norm() <= error * slow.norm()


def eq1(q, k, v, alpha, empty_heads, sink, window):
    """Eq. 1 for one sequence by dense matrices; q [1, Hq, T, D], all rows scaled."""
    T, G = q.shape[2], q.shape[1] // k.shape[1]
    k, v, alpha = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), alpha.repeat_interleave(G, 0)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    near = (j < sink) | (i - j < window)
    far = (q * alpha[:, None]) @ k.mT
    if empty_heads == "drop":
        far = far.masked_fill((alpha == 0).all(-1)[:, None, None], -torch.inf)
    return torch.where(near, q @ k.mT, far).masked_fill(j > i, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("empty_heads", ["drop", "zero"])
@pytest.mark.parametrize(("sink", "window"), [(0, 1), (2, 3), (4, 40)])
def test_scaled_attention_is_eq1(empty_heads, sink, window):
    q = torch.randn(1, 4, 12, D, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 2, 12, D, dtype=torch.float64, requires_grad=True) for _ in "kv")
    alpha = torch.rand(2, D, dtype=torch.float64)
    alpha[1] = 0
    alpha.requires_grad_()
    positions = torch.arange(12)[None]
    zones = [visibility(positions, positions, zone, sink, window) for zone in ("dense", "middle")]
    halves = [
        Keys(
            k[:, :, a:b], v[:, :, a:b], *(visibility(positions, positions[:, a:b], z.zone, sink, window) for z in zones)
        )
        for a, b in ((0, 5), (5, 12))
    ]
    out = scaled_attention(q, halves, alpha, 1.0, empty_heads, block=3)
    expected = eq1(q, k, v, alpha, empty_heads, sink, window)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, dtype=torch.float64)
    grads = torch.autograd.grad((out * weights).sum(), [q, k, v])
    for grad, wanted in zip(grads, torch.autograd.grad((expected * weights).sum(), [q, k, v]), strict=True):
        torch.testing.assert_close(grad, wanted)
    if window < 12:  # whatever the forward does, alpha is taught by the gradient of Eq. 1 as written
        out = scaled_attention(q, halves, alpha, 1.0, empty_heads)
        literal = eq1(q, k, v, alpha, "zero", sink, window)
        grad, wanted = (torch.autograd.grad((x * weights).sum(), alpha)[0] for x in (out, literal))
        torch.testing.assert_close(grad, wanted)
        assert grad[1].abs().min() > 0


def test_a_bool_mask_per_branch_is_the_mask_of_each():
    q, k = torch.randn(2, 2, 3, D), torch.randn(1, 1, 9, D)
    alpha = torch.tensor([[[1, 0, 1, 1]], [[0, 0, 0, 0]]], dtype=torch.bool)  # [R, H, D]
    at, keys = torch.tensor([[9, 10, 11], [9, 10, 11]]), torch.arange(9)[None]
    both = [Keys(k, k, *(visibility(at, keys, zone, 1, 4) for zone in ("dense", "middle")))]
    one = [Keys(k, k, *(visibility(at[:1], keys, zone, 1, 4) for zone in ("dense", "middle")))]
    out = scaled_attention(q, both, alpha, 0.5, "drop")
    for r in range(2):
        torch.testing.assert_close(out[r : r + 1], scaled_attention(q[r : r + 1], one, alpha[r].float(), 0.5, "drop"))


def test_bad_settings_are_named():
    position = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="zone='far'"):
        visibility(position, position, "far")
    with pytest.raises(ValueError, match="window=0"):
        visibility(position, position, "dense", 1, 0)
    with pytest.raises(ValueError, match="empty_heads='keep'"):
        scaled_attention(torch.ones(1, 1, 1, D), [], torch.ones(1, D), 1.0, "keep")


@pytest.mark.parametrize("causal", [False, True])
def test_flash_is_partial_attention_and_its_gradient_takes_any_lse(causal):
    """The gradient through a part of the keys, with out and lse over all of them; a row with lse = inf has none."""
    q, k, v, d_out = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (7, 20, 20, 7))
    k, v = (x[:, :, 4 : 11 if causal else 18] for x in (k, v))  # strided, as slices of a cache are
    out, lse, rest = flash_forward(q, k, v, 0.4, causal)
    at = torch.arange(k.shape[2])[None].expand(2, -1)
    sees = visibility(at if causal else torch.full((2, 7), 99), at, "causal")
    wanted = partial_attention_reference(q, k, v, 0.4, sees)
    torch.testing.assert_close((out, lse), wanted, rtol=1e-9, atol=1e-12)
    if causal:
        return
    leaf = q.clone().requires_grad_()
    half = visibility(torch.full((2, 7), 6), at, "causal"), visibility(torch.full((2, 7), 99), at, "middle", 7, 1)
    parts = [partial_attention(leaf, k, v, 0.4, sees) for sees in half]
    (d_q,) = torch.autograd.grad((merge(*parts[0], *parts[1])[0] * d_out).sum(), leaf)
    whole, total = (x.detach() for x in merge(*parts[0], *parts[1]))
    found = sum(
        flash_backward(d_out, q, k[:, :, a:b], v[:, :, a:b], whole, total, 0.4, rest) for a, b in ((0, 7), (7, 14))
    )
    torch.testing.assert_close(found, d_q, rtol=1e-9, atol=1e-12)
    total[0, 1, 2] = torch.inf
    assert (flash_backward(d_out, q, k, v, whole, total, 0.4, rest)[0, 1, 2] == 0).all()


@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]))
def test_exp_is_exact_or_zero(seed, dtype):
    """What is left out is less than the rounding error of a softmax, and no result is below the normal range."""
    generator = torch.Generator().manual_seed(seed)
    logits = -130 * torch.rand(200, generator=generator, dtype=dtype)
    logits[:3] = torch.tensor([0.0, -torch.inf, torch.finfo(dtype).min])
    found, exact = exp_(logits.clone()), logits.exp()
    assert ((found == 0) | (found >= math.exp(LEAST_LOGIT) / 2)).all()
    kept = found > 0
    torch.testing.assert_close(found[kept], exact[kept], rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert (exact[~kept] < 1e-26).all()
    assert found.sum() == exact.sum()
    assert exp_(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("spread", [30.0, 3000.0])
def test_sharp_logits_equal_the_dense_softmax(spread):
    """Logits over thousands of units, nearly all of which underflow."""
    q, k, v = torch.randn(3, 1, 2, 40, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind(0)
    at = torch.arange(40)[None]
    sees = visibility(at, at, "causal")
    results = []
    for function in (partial_attention, partial_attention_reference):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = function(*leaves, spread, sees, 7)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-12)
