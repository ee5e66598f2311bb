"""Fused attention of Eq. 1 and its kernels against dense matrices."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from leank import kernels
from leank.eval.cache.attention.dense import CALLS_PER_PLAN
from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.kernels import flash_backward, flash_forward
from leank_train.forward import branching
from leank_train.forward.fused import LEAST_LOGIT, exp_, fused_attention, side_by_side
from leank_train.forward.plan import Plan, document_pieces, own_pieces, visibility
from tests.oracles.eq1 import eq1


def seen_by_zone(rows, keys, sink, window):
    """Which keys [R, T] rows [R, n] read in full and which by scaled queries, each bool [R, 1, n, T]."""
    i, j = rows[:, None, :, None], keys[:, None, None]
    causal, near = (j >= 0) & (j <= i), (j < sink) | (i - j < window)
    return causal & near, causal & ~near


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
    scale=st.sampled_from([0.5, 300.0]),  # with the second nearly all weights underflow
    height=st.sampled_from([None, 0.0, 4.0, -300.0, 300.0]),  # of sinks; the last one takes all the weight
    softcap=st.sampled_from([None, 2.0]),
)
def test_equals_the_dense_form(
    seed, documents, branches, group, sink, window, empty_heads, limit, flash_from, scale, height, softcap
):
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
    sinks = None if height is None else height + torch.randn(H * group, dtype=torch.float64)
    out = fused_attention(
        q, keys, values, Plan(pieces), scale, alpha, empty_heads, limit, None, flash_from, Softmax(softcap, sinks)
    )
    rows = [torch.cat([x.repeat_interleave(branches, 0), y], 2) for x, y in ((k, own_k), (v, own_v))]
    at = torch.cat([document_positions.repeat_interleave(branches, 0), own_positions], 1)
    seen = seen_by_zone(q_positions, at, sink, window)
    wanted = eq1(q, *rows, alpha, scale, *seen, empty_heads, None, sinks, softcap)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-12)
    weights = torch.randn_like(out)
    got = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    want = torch.autograd.grad((wanted * weights).sum(), leaves, allow_unused=True)
    for g, w in zip(got, want, strict=True):
        g, w = (torch.zeros(()) if x is None else x for x in (g, w))
        torch.testing.assert_close(g.expand_as(w) if g.dim() == 0 else g, w.expand_as(g), rtol=1e-8, atol=1e-10)


def test_the_example_of_the_plan():
    """The ranges and blocks that the module's docstring shows."""
    rows, pieces = torch.arange(1020, 1023)[None], ()
    for part, (start, stop) in enumerate(((0, 1000), (1000, 1020), (1020, 1023))):
        keys = torch.arange(start, stop)[None]
        zones = [visibility(rows, keys, zone, 4, 64) for zone in ("dense", "middle")]
        pieces += own_pieces(rows, keys, 1, zones, part=part) if part else document_pieces(rows, keys, zones)
    found = [(p.part, p.start, p.stop, p.scaled, p.hidden is not None) for p in pieces]
    assert found == [
        (0, 0, 4, False, False), (0, 957, 1000, False, True), (0, 4, 957, True, False), (0, 957, 959, True, True),
        (1, 0, 20, False, True), (2, 0, 3, False, True),
    ]  # fmt: skip
    for flash_from, by_flash in ((None, []), (512, [(4, 957)])):
        (block,) = Plan(pieces).layout(4096, flash_from, False).blocks
        assert [joined.scaled for joined in block.joined] == [False, True]
        assert [(p.start, p.stop) for p in block.flash] == by_flash
        assert len(block.spreads) == 1


@pytest.mark.parametrize("empty_heads", ["zero", "drop"])
@pytest.mark.parametrize(
    ("device", "dtype", "flash_from"),
    [
        ("cpu", torch.bfloat16, 512),
        ("cpu", torch.float32, 512),
        pytest.param("cuda", torch.bfloat16, None, marks=pytest.mark.gpu),  # by the flash kernel
        pytest.param("cuda", torch.float32, None, marks=pytest.mark.gpu),
    ],
)
def test_in_lower_precision(device, dtype, flash_from, empty_heads):
    """Four branches of a document of 3,000 tokens, groups of two heads, against float64."""
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((4, 8, 16, 64), (1, 4, 3000, 64), (1, 4, 3000, 64))]  # fmt: skip
    positions = torch.arange(3000, device=device)[None]
    rows = torch.arange(3000, 3016, device=device).expand(4, 16)
    scores = torch.rand(4, 64, generator=generator, dtype=torch.float64)
    scores[0] = 0
    zones = [visibility(rows, positions, z, 16, 144) for z in ("dense", "middle")]
    plan = Plan(document_pieces(rows, positions, zones))
    results = []
    for kind, alpha_kind in ((dtype, torch.float32), (torch.float64, torch.float64)):
        q, k, v = (x.to(device, dtype).to(kind) for x in wide)
        alpha = scores.to(device, alpha_kind).requires_grad_()
        q.requires_grad_()
        if kind == dtype:
            out = fused_attention(q, [k], [v], plan, 0.125, alpha, empty_heads, flash_from=flash_from)
            assert out.dtype == dtype
        else:
            out = eq1(q, k, v, alpha, 0.125, *seen_by_zone(rows, positions, 16, 144), empty_heads)
        weights = torch.arange(out.numel(), device=device).view(out.shape).cos()
        results.append((out, *torch.autograd.grad((out.double() * weights).sum(), [q, alpha])))
    for found, wanted in zip(*results, strict=True):
        assert (found.double() - wanted).norm() / wanted.norm() < (2e-2 if dtype == torch.bfloat16 else 1e-4)


def test_spans_leave_the_common_middle_unmasked():
    sees = visibility(torch.arange(40, 44)[None], torch.arange(44)[None], "middle", sink=4, window=10)
    assert sees.spans == ((4, 31, False), (31, 34, True))
    sees = visibility(torch.arange(40, 44)[None], torch.arange(44)[None], "dense", sink=4, window=10)
    assert sees.spans == ((0, 4, False), (31, 34, True), (34, 41, False), (41, 44, True))


@pytest.mark.parametrize("causal", [False, True])
def test_flash_is_softmax_attention_and_its_gradient_takes_any_lse(causal):
    """The gradient through a part of the keys, with out and lse over all of them; a row with lse = inf has none."""
    q, k, v, d_out = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (7, 20, 20, 7))
    k, v = (x[:, :, 4 : 11 if causal else 18] for x in (k, v))  # strided, as slices of a cache are
    leaf = q.clone().requires_grad_()
    logits = leaf @ k.mT * 0.4
    if causal:
        logits = logits.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    whole, total = logits.softmax(-1) @ v, logits.logsumexp(-1)
    out, lse, rest = flash_forward(q, k, v, 0.4, causal)
    torch.testing.assert_close((out, lse), (whole, total), rtol=1e-9, atol=1e-12)
    if causal:
        return
    (d_q,) = torch.autograd.grad((whole * d_out).sum(), leaf)
    found = sum(flash_backward(d_out, q, k[:, :, a:b], v[:, :, a:b], out, lse, 0.4, rest) for a, b in ((0, 7), (7, 14)))
    torch.testing.assert_close(found, d_q, rtol=1e-9, atol=1e-12)
    lse[0, 1, 2] = torch.inf
    assert (flash_backward(d_out, q, k, v, out, lse, 0.4, rest)[0, 1, 2] == 0).all()


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


def test_named_kernels_come_first_and_others_follow(monkeypatch):
    q = torch.randn(1, 2, 5, 8)
    assert kernels.kernel_order("auto", q, 2) == []  # no GPU: the library's own order
    for name in kernels.KERNELS[2:]:
        order = kernels.kernel_order(name, q, 2)
        assert order[0].name.lower().startswith(name)
        assert len(order) == len(set(order)) == len(kernels.KERNELS) - 2
        with torch.nn.attention.sdpa_kernel(order, set_priority=True):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)

    class OnHopper:
        is_cuda, device = True, "cuda:0"

        def __init__(self, length):
            self.shape = (1, 32, length, 128)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for length, layers, first in ((4096, 32, "FLASH"), (8192, 32, "FLASH"), (16384, 32, "CUDNN"), (16384, 4, "FLASH")):
        assert kernels.kernel_order("auto", OnHopper(length), layers)[0] == getattr(SDPBackend, f"{first}_ATTENTION")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernels.kernel_order("auto", OnHopper(16384), 32) == []


@pytest.mark.parametrize("kernel", ["auto", "cudnn", "flash", "efficient", "math"])
def test_kernels_agree(kernel):
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    out = branching.PrefillPass(9, 1, kernel).attend(0, q, k, v, 0.3, PLAIN)
    logits = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(out, logits.softmax(-1) @ v.repeat_interleave(2, 1))


@given(st.integers(1, 8), st.integers(1, 64), st.sampled_from([64, 80, 128, 256]), st.integers(1, 2**17), st.data())
def test_cudnn_pays_from_a_number_of_operations_per_plan(batch, heads, dim, keys, data):
    """Training knows its layers; in an evaluation the break-even is a number of operations per call."""
    new = data.draw(st.one_of(st.just(keys), st.integers(1, keys)))
    q = torch.empty(()).expand(batch, heads, new, dim)
    seen = new * (2 * keys - new)  # twice the number of pairs that causal attention computes
    assert kernels.cudnn_pays(q, keys, CALLS_PER_PLAN) == (2 * batch * heads * dim * seen >= 5e11)
    for layers in (1, 28, 32, 80):
        whole = torch.empty(()).expand(batch, heads, keys, dim)
        assert kernels.cudnn_pays(whole, keys, layers) == (2 * layers * batch * heads * keys**2 * dim >= 42e12)
        everything = 4 * layers * batch * heads * new * keys * dim  # operations where every query sees every key
        part = torch.empty(()).expand(batch, heads, new, dim)
        assert kernels.cudnn_pays(part, keys, layers, causal=False) == (everything >= 42e12)
