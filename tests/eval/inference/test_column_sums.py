"""Attention received, block by block, against the model's own full softmax matrix, and the kernel against that form.

The kernel runs in Triton's interpreter on a CPU, on the device with `-m gpu`.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import ON_GPU, poisoned_memory  # noqa: F401

from leank.eval.cache.attention import dense  # isort: skip  (Triton, which the line above asks for)
from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.inference import observe
from leank.eval.inference.observe import Tiles, attend_and_sum, received
from leank.eval.inference.prefill import prefill
from tests.helpers.cache_oracle import left_padded, tiny_model
from tests.helpers.largest import Largest
from tests.oracles.attention import causal, weights

SMALL = Tiles(keys=32, queries=16)


def of_groups(each, keys):
    """Sums [B, H, T] over the query heads of each KV head, of [B, Hq, T]."""
    return each.unflatten(1, (keys.shape[1], -1)).sum(2)


def matrix(queries, keys, real=None, scaling=None, softmax=PLAIN):
    """The whole softmax matrix [B, Hq, S, T] of the last S queries; padding is zero."""
    return weights(queries, keys, scaling, causal(queries.shape[2], keys.shape[2], real), *softmax)


def close(found, expected, tolerance=None):
    tolerance = tolerance or (1e-12 if expected.dtype == torch.float64 else 2e-6)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.shape[-1])


@settings(deadline=None, max_examples=30)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    length=st.integers(1, 24),
    group=st.integers(1, 3),
    block=st.integers(1, 200),
)
def test_received_is_the_column_sum_of_the_matrix(data, dtype, length, group, block):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
    count = data.draw(st.integers(1, length))
    queries = torch.randn(2, 2 * group, count, 4, generator=generator, dtype=dtype) * 3
    keys = torch.randn(2, 2, length, 4, generator=generator, dtype=dtype)
    padding = data.draw(st.tuples(st.integers(0, length - 1), st.integers(0, length - 1)))
    real = torch.arange(length) >= torch.tensor(padding)[:, None]
    weights = data.draw(st.sampled_from([None, torch.rand(count, generator=generator, dtype=dtype)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(observe.SCORES_AT_ONCE, "cpu", block)
        found = received(queries, keys, weights, real, 0.7)
        unpadded = received(queries, keys, weights)
    by_row = torch.ones(count, dtype=dtype) if weights is None else weights
    close(found, (matrix(queries, keys, real, 0.7) * by_row[:, None]).sum(2))
    close(unpadded, (matrix(queries, keys) * by_row[:, None]).sum(2))


def test_only_the_last_queries_count_if_weights_are_fewer():
    queries, keys = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 9, 4)
    assert torch.equal(received(queries, keys, torch.ones(2)), received(queries[:, :, -2:], keys))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [None, 5, 1])
def test_a_padded_prompt_in_pieces(family, dtype, chunk):
    """Rows get what the whole matrix, and transformers' own eager attention over each of them alone, give them."""
    model = tiny_model(family, dtype)
    lengths = (17, 9, 12)
    ids, mask = left_padded(lengths, seed=3)
    found = prefill(model, ids, mask.bool(), 0, obs_queries=17, chunk=chunk, column_sums=True)
    for layer in found.layers:
        each = matrix(layer.queries, layer.keys, mask.bool(), layer.scaling).sum(2)
        close(layer.column_sums, of_groups(each, layer.keys))
    model.set_attn_implementation("eager")
    for row, length in enumerate(lengths):
        attentions = model(ids[row : row + 1, -length:], output_attentions=True).attentions
        for layer, attention in zip(found.layers, attentions, strict=True):
            of_group = of_groups(attention.detach().sum(2), layer.keys)
            close(layer.column_sums[row, :, -length:], of_group[0], 2e-6)  # eager softmax is in float32 whatever dtype
            assert not layer.column_sums[row, :, :-length].any()


def test_weights_of_the_last_queries():
    model, weights = tiny_model("llama"), torch.tensor([1.0, 0.0, 3.0])
    ids, _ = left_padded((11,), seed=0)
    for layer in prefill(model, ids, None, 0, obs_queries=3, column_sums=weights).layers:
        each = matrix(layer.queries, layer.keys, scaling=layer.scaling) * weights[:, None]
        close(layer.column_sums, of_groups(each.sum(2), layer.keys))
    with pytest.raises(ValueError, match="need the prompt in one piece; leave out `chunk`"):
        prefill(model, ids, None, 0, chunk=6, column_sums=weights)


def test_only_when_asked():
    model = tiny_model("llama")
    ids, _ = left_padded((8,), seed=0)
    assert prefill(model, ids, None, 0).layers[0].column_sums is None
    layer = prefill(model, ids, None, 4, column_sums=True).layers[0]
    fork = layer.fork()
    assert fork.column_sums is None
    fork.update(layer.keys[:, :, :1], layer.values[:, :, :1])
    fork.attend(torch.randn(1, 4, 1, 8, dtype=torch.float64))
    assert fork.column_sums is None
    assert layer.column_sums.shape == (1, 2, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 77])
def test_attention_received_on_a_gpu_is_that_in_float64(dtype, length):
    queries, keys = torch.randn(2, 4, length, 64).to(dtype), torch.randn(2, 2, length + 9, 64).to(dtype)[:, :, :length]
    real = torch.arange(length) >= torch.tensor([0, 13])[:, None]
    found = received(queries.cuda(), keys.cuda(), real=real.cuda())
    assert observe.multiplies_half(torch.device("cuda", 0), dtype)
    close(found.cpu(), received(queries.double(), keys.double(), real=real).float(), 1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_no_tensor_is_larger_than_the_keys_and_a_block_of_scores(monkeypatch, padded):
    """Keys in particular are not repeated for the query heads of a group."""
    monkeypatch.setitem(observe.SCORES_AT_ONCE, "cpu", 2**14)
    queries, keys = torch.randn(1, 16, 40, 64), torch.randn(1, 2, 500, 64)
    real = torch.arange(500)[None] >= 30 if padded else None
    with Largest() as seen:
        received(queries, keys, real=real)
    assert seen.numbers <= max(queries.numel(), keys.numel())


@pytest.mark.parametrize("softmax", [Softmax(1.5), Softmax(None, torch.randn(6).double())])
def test_soft_capped_logits_and_attention_sinks(softmax):
    queries, keys = (torch.randn(2, heads, 9, 4, dtype=torch.float64) * 2 for heads in (6, 2))
    real = torch.arange(9) >= torch.tensor([0, 3])[:, None]
    found = received(queries, keys, None, real, 0.7, softmax)
    close(found, matrix(queries, keys, real, 0.7, softmax).sum(2))


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
    return of_groups(received(q.double(), k.double(), weights, real, scaling), k).float()


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
def test_a_padded_prompt_in_pieces_by_the_kernel(monkeypatch, chunk):
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
    torch.testing.assert_close(sums, of_groups(received(q, k, softmax=Softmax(1.5)), k))
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
    torch.testing.assert_close(found, of_groups(received(q, k, weights), k), rtol=2e-3, atol=2e-3)
    mass = float(length) if weights is None else weights.sum().item()  # each query gives its weight, or one
    torch.testing.assert_close(found.sum(-1), torch.full((1, 2), 4 * mass, device="cuda"), rtol=1e-3, atol=0)
    torch.testing.assert_close(out, dense.attend(q, k, k), rtol=2e-2, atol=2e-2)
