"""Column sums by the kernel against `received`: in Triton's interpreter on a CPU, on the device with `-m gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import ON_GPU, poisoned_memory  # noqa: F401

from leank.eval.cache.attention import dense  # isort: skip  (Triton, which the line above asks for)
from leank.eval.cache.attention.softmax import Softmax
from leank.eval.inference import observe
from leank.eval.inference.observe import Tiles, attend_and_sum, received
from leank.eval.inference.prefill import prefill
from tests.helpers.cache_oracle import left_padded, tiny_model

SMALL = Tiles(keys=32, queries=16)


def log_sum_exp(q, k, scaling, real):
    """Of each query over what it sees, one by one; inf where it is padding."""
    (batch, heads, queries, _), length = q.shape, k.shape[2]
    found = torch.full((batch, heads, queries), torch.inf)
    for b in range(batch):
        for t in range(queries):
            at = length - queries + t
            if real is None or real[b, at]:
                sees = [j for j in range(at + 1) if real is None or real[b, j]]
                keys = k[b, :, sees].repeat_interleave(heads // k.shape[1], 0).double()
                found[b, :, t] = (torch.einsum("hkd,hd->hk", keys, q[b, :, t].double()) * scaling).logsumexp(-1)
    return found


def wanted(q, k, scaling, real, weights=None):
    each = received(q.double(), k.double(), weights, real, scaling)
    return each.unflatten(1, (k.shape[1], -1)).sum(2).float()


def drawn(rows, heads, group, queries, length, dim, dtype, seed=0):
    """Queries and keys as a model hands them over: token-major, and a view of a longer buffer."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, queries, heads * group, dim, generator=generator).to(dtype).transpose(1, 2)
    k = torch.randn(rows, heads, length + 5, dim, generator=generator).to(dtype)
    k[:, :, length:] = torch.nan
    return q, k[:, :, :length]


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 90), st.integers(1, 2), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_sums_of_any_shape(data, length, heads, group, padded, seed):
    queries, tiles = data.draw(st.integers(1, length)), data.draw(st.sampled_from([SMALL, Tiles(16, 32)]))
    q, k = drawn(2, heads, group, queries, length, 16, torch.float16, seed)
    real = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) < 0.7 if padded else None
    found = observe.column_sums(q, k, log_sum_exp(q, k, 0.3, real), 0.3, real, tiles)
    torch.testing.assert_close(found, wanted(q, k, 0.3, real), rtol=2e-3, atol=2e-3)
    assert real is None or not found[~real[:, None].expand_as(found)].any()


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.parametrize("padding", [None, [0, 11], [7, 7], "holes"])
@pytest.mark.parametrize(("queries", "weighted"), [(1, None), (1, 1), (20, None), (20, 20), (40, None), (40, 13)])
def test_attention_hands_over_what_the_sums_need(monkeypatch, padding, queries, weighted):
    """The same attention as without sums, whatever the padding; the log-sum-exp comes from it."""
    asked, kernel = [], observe.column_sums
    monkeypatch.setattr(observe, "column_sums", lambda *args: (asked.append(1), kernel(*args, tiles=SMALL))[1])
    monkeypatch.setattr(observe, "why_not", lambda *_, **__: None)
    q, k = drawn(2, 2, 2, queries, 40, 64, torch.float32)
    v, real = torch.randn(k.shape), None
    if padding == "holes":
        real = torch.rand(2, 40, generator=torch.Generator().manual_seed(3)) < 0.6
    elif padding:
        real = torch.arange(40) >= torch.tensor(padding)[:, None]
    weights = None if weighted is None else torch.linspace(0, 3, weighted)  # the first query counts nothing
    out, sums = attend_and_sum(q, k, v, None, real, weights=weights)
    torch.testing.assert_close(out, dense.attend(q, k, v, None, real))
    expected = wanted(q, k, 64**-0.5, real, weights)
    torch.testing.assert_close(sums.float(), expected, rtol=1e-4, atol=1e-5)
    assert len(asked) == (queries > 1)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.parametrize("chunk", [None, 7])
def test_a_padded_prompt_in_chunks(monkeypatch, chunk):
    model = tiny_model("llama", torch.float32, hidden_size=256, head_dim=64)
    ids, mask = left_padded((29, 17), seed=3)
    slow = prefill(model, ids, mask.bool(), 0, chunk=chunk, column_sums=True)
    kernel = observe.column_sums
    monkeypatch.setattr(observe, "column_sums", lambda *args: kernel(*args, tiles=SMALL))
    monkeypatch.setattr(observe, "why_not", lambda *_, **__: None)
    fast = prefill(model, ids, mask.bool(), 0, chunk=chunk, column_sums=True)
    torch.testing.assert_close(fast.logits, slow.logits)
    for one, other in zip(fast.layers, slow.layers, strict=True):
        torch.testing.assert_close(one.column_sums, other.column_sums, rtol=1e-4, atol=1e-5)


def test_a_softmax_that_is_not_plain_takes_the_slow_form(monkeypatch):
    monkeypatch.setattr(observe, "why_not", lambda *_, **__: None)
    q, k = drawn(1, 2, 2, 9, 9, 16, torch.float32)
    out, sums = attend_and_sum(q, k, k, softmax=Softmax(1.5))
    each = received(q, k, softmax=Softmax(1.5))
    torch.testing.assert_close(sums, each.unflatten(1, (2, 2)).sum(2))
    torch.testing.assert_close(out, dense.attend(q, k, k, softmax=Softmax(1.5)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tiles", [Tiles(), Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 2)])
@pytest.mark.parametrize(
    ("queries", "length", "padding"), [(999, 999, None), (999, 999, [0, 300]), (130, 700, [690, 0])]
)
def test_on_the_device(dtype, tiles, queries, length, padding):
    q, k = (x.cuda() for x in drawn(2, 2, 4, queries, length, 128, dtype))
    real = None if padding is None else (torch.arange(length) >= torch.tensor(padding)[:, None]).cuda()
    lse = torch.full(q.shape[:3], torch.inf, device="cuda")
    out = dense.attend(q, k, k, None, real, lse=lse)
    torch.testing.assert_close(out, dense.attend(q, k, k, None, real), rtol=2e-2, atol=2e-2)
    found = observe.column_sums(q, k, lse, None, real, tiles)
    torch.testing.assert_close(found, wanted(q, k, 128**-0.5, real), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4096, 20000])
@pytest.mark.parametrize("weighted", [None, 801])
def test_long_sums_on_the_device_from_either_attention_kernel(length, weighted):
    """cuDNN's log-sum-exp at the lengths at which it pays, flash's elsewhere."""
    q, k = (x.cuda() for x in drawn(1, 2, 4, length, length, 128, torch.bfloat16))
    weights = None if weighted is None else torch.linspace(1, 9, weighted, device="cuda")
    out, found = attend_and_sum(q, k, k, weights=weights)
    each = received(q, k, weights).unflatten(1, (2, 4)).sum(2)
    torch.testing.assert_close(found, each, rtol=2e-3, atol=2e-3)
    mass = float(length) if weights is None else weights.sum().item()  # each query gives its weight, or one
    torch.testing.assert_close(found.sum(-1), torch.full((1, 2), 4 * mass, device="cuda"), rtol=1e-3, atol=0)
    torch.testing.assert_close(out, dense.attend(q, k, k), rtol=2e-2, atol=2e-2)
