"""Attention received, block by block, against the model's own full softmax matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.inference import observe
from leank.eval.inference.observe import received
from leank.eval.inference.prefill import prefill
from tests.helpers.cache_oracle import left_padded, tiny_model


def matrix(queries, keys, real=None, scaling=None, softmax=PLAIN):
    """The whole softmax matrix [B, Hq, S, T] of the last S queries, a row at a time; padding is zero."""
    (batch, heads, count, dim), (length, group) = queries.shape, (keys.shape[2], queries.shape[1] // keys.shape[1])
    out = queries.new_zeros(batch, heads, count, length)
    for b in range(batch):
        for h in range(heads):
            for t in range(count):
                at = length - count + t
                sees = [j for j in range(at + 1) if real is None or real[b, j]]
                if real is None or real[b, at]:
                    logits = keys[b, h // group, sees] @ queries[b, h, t] * (dim**-0.5 if scaling is None else scaling)
                    if softmax.softcap is not None:
                        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
                    sink = 0 if softmax.sink_logits is None else torch.exp(softmax.sink_logits[h])
                    out[b, h, t, sees] = torch.exp(logits) / (torch.exp(logits).sum() + sink)
    return out


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
        of_group = matrix(layer.queries, layer.keys, mask.bool(), layer.scaling).sum(2).unflatten(1, (2, 2)).sum(2)
        close(layer.column_sums, of_group)
    model.set_attn_implementation("eager")
    for row, length in enumerate(lengths):
        attentions = model(ids[row : row + 1, -length:], output_attentions=True).attentions
        for layer, attention in zip(found.layers, attentions, strict=True):
            of_group = attention.detach().sum(2).unflatten(1, (2, 2)).sum(2)
            close(layer.column_sums[row, :, -length:], of_group[0], 2e-6)  # eager softmax is in float32 whatever dtype
            assert not layer.column_sums[row, :, :-length].any()


def test_weights_of_the_last_queries():
    model, weights = tiny_model("llama"), torch.tensor([1.0, 0.0, 3.0])
    ids, _ = left_padded((11,), seed=0)
    for layer in prefill(model, ids, None, 0, obs_queries=3, column_sums=weights).layers:
        each = matrix(layer.queries, layer.keys, scaling=layer.scaling) * weights[:, None]
        close(layer.column_sums, each.sum(2).unflatten(1, (2, 2)).sum(2))
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


def test_halves_that_come_out_in_float32(monkeypatch):
    """As on CUDA, with the product itself done otherwise: scaled after it, of numbers that have not been widened."""
    asked = []

    def product(a, b, scale):
        asked.append((a.dtype, b.dtype))
        return (a.float() @ b.float()) * scale

    queries, keys = torch.randn(2, 4, 9, 8).bfloat16(), torch.randn(2, 2, 12, 8).bfloat16()
    real = torch.arange(12) >= torch.tensor([0, 5])[:, None]
    wanted = received(queries, keys, real=real, scaling=0.4)
    assert not observe.multiplies_half(keys.device, keys.dtype)
    monkeypatch.setattr(observe, "multiplies_half", lambda *_: True)
    monkeypatch.setattr(observe, "scaled_product", product)
    found = received(queries, keys, real=real, scaling=0.4)
    close(found, wanted)
    assert found.dtype == torch.float32
    assert set(asked) == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 77])
def test_attention_received_on_a_gpu_is_that_in_float64(dtype, length):
    queries, keys = torch.randn(2, 4, length, 64).to(dtype), torch.randn(2, 2, length + 9, 64).to(dtype)[:, :, :length]
    real = torch.arange(length) >= torch.tensor([0, 13])[:, None]
    found = received(queries.cuda(), keys.cuda(), real=real.cuda())
    assert observe.multiplies_half(torch.device("cuda", 0), dtype)
    close(found.cpu(), received(queries.double(), keys.double(), real=real).float(), 1e-5)


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that an operation makes, views aside."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numbers = max(self.numbers, out.untyped_storage().nbytes() // out.element_size())
        return out


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
