"""A layer that holds keys in bases of its heads: what naive heads give, and dense where nothing is rounded."""

import functools

import pytest
import torch
from transformers import DynamicCache

from leank.eval.cache import CompressedCache, compressed_cache
from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.naive import Head, Rules
from leank.eval.cache.storage import banded
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.methods.base import Method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.reads.double_sparsity import DoubleSparsity
from leank.mask import ChannelMask
from leank.precision import Precision
from leank.versions import CACHE
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, tiny_model
from tests.helpers.layouts import layout, layout_mask, random_bases
from tests.oracles.bits import in_bits

SHAPE = (LAYERS, HEADS, DIM)  # of `tiny_model`


@pytest.mark.parametrize("centred", [False, True])
def test_a_layer_gives_what_its_naive_heads_give(centred):
    generator = torch.Generator().manual_seed(int(centred))
    heads, dim, group, sizes, prompt, reply = 2, 16, 2, (3, 8, 64), 90, 70
    k, v = torch.randn(2, 1, heads, prompt + reply, dim, generator=generator, dtype=torch.float64)
    q = 2 * torch.randn(1, heads * group, prompt + reply, dim, generator=generator, dtype=torch.float64)
    center = 5 * torch.randn(heads, dim, generator=generator) if centred else None
    k = k if center is None else k + center[:, None]
    of_layers, basis = layout((2, heads, dim), 5), random_bases((1, heads, dim), 6)[0]
    keys, values = of_layers.key_bits[1], of_layers.value_bits[1]  # no head of the second layer is empty
    middle = Middle(keys > 0, bits=banded.codecs(of_layers)[1], center=center, key_basis=basis)
    layer, naive = CompressedLayer(middle, Sizes(*sizes), choose_backend("torch")), []
    layer.compress(k[:, :, :prompt], v[:, :, :prompt])
    for h in range(heads):
        bits = functools.partial(in_bits, key_bits=keys[h], value_bits=int(values[h]))
        own = {"center": None if center is None else center[h], "bits": bits, "key_basis": basis[h]}
        naive.append(Head(Rules(*sizes, keys[h] > 0, **own)))
        for at in range(prompt):
            naive[h].append(k[0, h, at], v[0, h, at])
        naive[h].compress()
    for at in range(prompt, prompt + reply):
        layer.update(k[:, :, at : at + 1], v[:, :, at : at + 1])
        got, want = layer.attend(q[:, :, at : at + 1], scaling=0.5)[0, 0], []
        for h, head in enumerate(naive):
            head.append(k[0, h, at], v[0, h, at])
            want.append(head.attend(q[0, h * group : (h + 1) * group, at], 0.5))
            head.flush()
        torch.testing.assert_close(got, torch.cat(want), rtol=1e-5, atol=1e-5)
    assert layer.store.tail.length.max() == 64


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_in_bases_of_full_widths_the_answers_are_those_of_dense(kind, means):
    model = tiny_model(kind)
    ids, seen = left_padded([180, 150], 7)
    means = torch.randn(SHAPE, generator=torch.Generator().manual_seed(8)) if means else None
    whole = Precision(*(torch.full(shape, 16, dtype=torch.uint8) for shape in (SHAPE, SHAPE[:2])))
    mask = ChannelMask(whole.keep, {}, means, whole, random_bases(SHAPE, 9))
    cache, dense, at = compressed_cache(model, mask, 4, 8, 64), DynamicCache(config=model.config), 0
    for columns in (100, 1, 60, 1, 1, 17):  # a prompt, a step, another turn
        piece = slice(at, at + columns)
        at += columns
        with torch.no_grad():
            want, got = (
                model(ids[:, piece], attention_mask=seen[:, :at], **{CACHE: one}).logits for one in (dense, cache)
            )
        real = seen[:, piece].bool()
        torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)
    assert cache.layers[0].store.tail.length.max() > 0


def test_bases_change_no_weight_and_no_dense_prompt():
    model = tiny_model("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = left_padded([150], 4)[0]
    caches = [compressed_cache(model, layout_mask(SHAPE, 3, basis), 4, 8) for basis in (None, random_bases(SHAPE, 1))]
    with torch.no_grad():
        first, second = (model(ids, **{CACHE: cache}).logits for cache in caches)
    assert torch.equal(first, second)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    held = [cache.layers[0].store for cache in caches]
    assert not torch.equal(held[0].prompt.k, held[1].prompt.k)
    memory = [cache.memory() for cache in caches]
    more = memory[1].tables - memory[0].tables  # bases of keys and queries are tables
    assert more == memory[1].total - memory[0].total >= 2 * random_bases(SHAPE, 1).nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_saved_cache_goes_on_in_its_bases_and_knows_them(dtype, tmp_path):
    model, path = tiny_model("llama", dtype), tmp_path / "c"
    ids, basis = left_padded([170], 4)[0], random_bases(SHAPE, 1)
    mask = layout_mask(SHAPE, 3, basis)
    cache = compressed_cache(model, mask, 4, 8, backend="torch")
    with torch.no_grad():
        model(ids[:, :150], **{CACHE: cache})
        cache.save(path)
        loaded = CompressedCache.load(path, model, mask, backend="torch")
        want, got = (model(ids[:, 150:], **{CACHE: one}).logits for one in (cache, loaded))
    assert torch.equal(got, want)
    for other in (None, random_bases(SHAPE, 2)):
        with pytest.raises(ValueError, match="made with other bases of K"):
            CompressedCache.load(path, model, layout_mask(SHAPE, 3, other))
    object.__setattr__(cache.layers[1].middle, "key_basis", 0 * basis[1])
    cache.save(path)
    with pytest.raises(ValueError, match=r"key_basis has a condition number of .* in layer 1, head 0"):
        CompressedCache.load(path, model)


def test_a_new_prompt_at_old_addresses_has_the_bases_there():
    """What a captured step reads stays where it is."""
    model, ids = tiny_model("llama"), left_padded([150], 4)[0]
    cache = compressed_cache(model, layout_mask(SHAPE, 3, random_bases(SHAPE, 1)), 4, 8)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        model(ids[:, :1], **{CACHE: cache})
        layer = cache.layers[0]
        held = layer.store.key_basis, layer.store.query_basis
        layer.reset_in_place()
        layer.compress(*torch.randn(2, 1, HEADS, 150, DIM, dtype=model.dtype))
        layer.update(*torch.randn(2, 1, HEADS, 1, DIM, dtype=model.dtype))
        layer.attend(torch.randn(1, model.config.num_attention_heads, 1, DIM, dtype=model.dtype))
    assert held[0] is layer.store.key_basis
    assert held[1] is layer.store.query_basis


def test_reads_by_labels_of_channels_are_refused_beside_bases():
    choice, reads = LeanK(layout_mask(SHAPE, 3, random_bases(SHAPE, 1))), DoubleSparsity(budget=600)
    with pytest.raises(ValueError, match=r"reads=double_sparsity labels channels of K, and its mask holds K in bases"):
        Method("both", channels=choice, reads=reads, sink=4, window=8, flush=64).layout()
    Method("both", channels=LeanK(layout_mask(SHAPE, 3)), reads=reads, sink=4, window=8, flush=64).layout()


def test_bytes_of_bases_count_once():
    model, ids = tiny_model("llama"), left_padded([150], 4)[0]
    found = []
    for basis in (None, random_bases(SHAPE, 1)):
        cache = compressed_cache(model, layout_mask(SHAPE, 3, basis), 4, 8)
        with torch.no_grad():
            model(ids, **{CACHE: cache})
        found.append(cache.memory().tables)
    assert found[1] - found[0] == 2 * LAYERS * HEADS * DIM * DIM * 4  # bases and inverses, in float32


def test_rows_of_masks_that_differ_in_their_bases_are_told_apart():
    one, other, none = (
        LeanK(layout_mask(SHAPE, 3, basis)).identity()
        for basis in (random_bases(SHAPE, 1), random_bases(SHAPE, 2), None)
    )
    assert one["basis"] != other["basis"]
    assert {name: value for name, value in one.items() if name != "basis"} == none
