"""Dense attention of padded prompts against the whole matrix, a row at a time; which of SDPA's kernels may take it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank import kernels
from leank.eval.cache.attention import dense
from leank.eval.cache.attention.softmax import PLAIN, Softmax, written_out


def by_rows(q, k, v, scaling, real, softmax=PLAIN):
    """[B, Q, Hq, D] by one softmax for each query and head; zero where the query is padding."""
    (batch, heads, new, _), (length, group) = q.shape, (k.shape[2], q.shape[1] // k.shape[1])
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            for t in range(new):
                at = length - new + t
                sees = [j for j in range(at + 1) if real[b, j]]
                if real[b, at]:
                    logits = k[b, h // group, sees] @ q[b, h, t] * scaling
                    if softmax.softcap is not None:
                        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
                    total = torch.exp(logits).sum()
                    if softmax.sink_logits is not None:
                        total = total + torch.exp(softmax.sink_logits[h])
                    out[b, h, t] = torch.exp(logits) / total @ v[b, h // group, sees]
    return out.transpose(1, 2)


@settings(max_examples=30, derandomize=True)
@given(
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    holes=st.booleans(),
    group=st.integers(1, 3),
    softcap=st.sampled_from([None, 0.5, 3.0]),
    sinks=st.booleans(),
    block=st.integers(1, 200),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_padded_rows_are_those_of_the_whole_matrix(starts, holes, group, softcap, sinks, block, seed, data):
    length = 12
    new = data.draw(st.integers(1, length))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(starts), 2 * group, new, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, len(starts), 2, length, 8, generator=generator, dtype=torch.float64)
    real = torch.arange(length) >= torch.tensor(starts)[:, None]
    if holes:
        real &= torch.rand(real.shape, generator=generator) < 0.7
    k[~real[:, None].expand(-1, 2, -1)] = torch.nan  # never read
    softmax = Softmax(softcap, torch.randn(2 * group, generator=generator, dtype=torch.float64) if sinks else None)
    want = by_rows(q, k, v, 0.4, real, softmax)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leank.eval.cache.attention.softmax.SCORES_AT_ONCE", {"cpu": block})
        torch.testing.assert_close(dense.attend(q, k, v, 0.4, real, softmax), want)


@pytest.mark.parametrize("softmax", [PLAIN, Softmax(2.0), Softmax(None, torch.randn(4).double())])
@pytest.mark.parametrize("added", [False, True])
def test_a_mask_of_any_shape(softmax, added):
    """bool, or numbers that are added; a query that sees nothing gives zero, and a gradient that is finite."""
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    seen = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    seen[1, 0, 2] = False
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf) if added else seen
    out = written_out(q, k, v, 0.4, softmax, mask)
    for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(5)).tolist():
        j = seen[b, 0, t]
        one = None if softmax.sink_logits is None else softmax.sink_logits[h : h + 1]
        key, value = (x[b, h // 2, j][None, None] for x in (k, v))
        last = q[b, h, t][None, None, None]
        want = by_rows(last, key, value, 0.4, torch.ones(1, j.sum()), Softmax(softmax.softcap, one)) if j.any() else 0
        torch.testing.assert_close(out[b, h, t], want[0, 0, 0] if j.any() else torch.zeros_like(out[b, h, t]))
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize(("new", "length"), [(300, 300), (40, 300), (1, 300)])
@pytest.mark.parametrize("padded", [False, True])
def test_sinks_beside_the_flash_kernel(new, length, padded, monkeypatch):
    monkeypatch.setattr(dense, "written_out", None)  # the flash kernel's log-sum-exp is enough
    q, k, v = (
        torch.randn(2, h, n, 64, dtype=torch.bfloat16, device="cuda") for h, n in ((8, new), (2, length), (2, length))
    )
    real = torch.arange(length, device="cuda") >= torch.tensor([0, 90 if padded else 0], device="cuda")[:, None]
    softmax = Softmax(None, torch.randn(8, device="cuda"))
    out = dense.attend(q, k, v, None, real, softmax)
    mask = torch.ones(new, length, dtype=torch.bool, device="cuda").tril(length - new) & real[:, None, None]
    want = written_out(*(x.double() for x in (q, k, v)), None, softmax, mask).transpose(1, 2)
    want[~real[:, length - new :]] = 0
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("length", [1, 5, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_the_latest_query(length, dtype, padded):
    q = torch.randn(3, 6, 1, 16, dtype=dtype)
    k, v = torch.randn(2, 3, 2, length, 16, dtype=dtype)
    real = torch.arange(length) >= torch.tensor([0, length // 2, length])[:, None]  # the last row: only padding
    out = dense.latest(q, k, v, 0.3, real if padded else None)
    real[:, -1] = True
    want = by_rows(*(x.double() for x in (q, k, v)), 0.3, real if padded else torch.ones_like(real))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.transpose(1, 2).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", range(1, 18))
def test_a_mask_needs_no_copy(length):
    """SDPA's memory-efficient kernel copies a mask whose strides are not multiples of 8."""
    bias = dense._bias(torch.ones(3, length, dtype=torch.bool), torch.bfloat16)
    assert bias.shape == (3, 1, 1, length)
    assert all(stride % dense.ALIGNED == 0 for stride in bias.stride()[:-1])
    assert bias.stride(-1) == 1


@pytest.mark.parametrize(("new", "length"), [(9, 9), (4, 9), (1, 9)])
def test_only_long_calls_may_plan(monkeypatch, new, length):
    asked = []

    def record(*args, **kwargs):
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return inner(*args, **kwargs)

    inner = dense.scaled_dot_product_attention
    monkeypatch.setattr(dense, "scaled_dot_product_attention", record)
    q, (k, v) = torch.randn(2, 4, new, 8), torch.randn(2, 2, 2, length, 8)
    before, work = torch.backends.cuda.cudnn_sdp_enabled(), 2 * 2 * 4 * 8 * new * (2 * length - new)
    for limit in (work + 1, work):
        monkeypatch.setattr(kernels, "CUDNN_FROM", limit * dense.CALLS_PER_PLAN)
        dense.attend(q, k, v)
    assert asked == [False, before and new > 1]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_left_padded_rows_are_not_gathered(monkeypatch):
    """Neighbours of equal padding share a call, on views of K and V."""
    seen = []
    inner = dense._causal
    monkeypatch.setattr(dense, "_causal", lambda q, k, v, *rest: seen.append((q, k, v)) or inner(q, k, v, *rest))
    q, (k, v) = torch.randn(4, 4, 6, 8), torch.randn(2, 4, 2, 6, 8)
    real = torch.arange(6) >= torch.tensor([0, 2, 2, 6])[:, None]
    out = dense.attend(q, k, v, None, real)
    assert [len(call[0]) for call in seen] == [1, 2]
    whole = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    assert {x.untyped_storage().data_ptr() for call in seen for x in call} == whole
    assert not out[3].any()
