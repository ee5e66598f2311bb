"""A mask's layout of bits in a cache: pages of bands, generation over them, and every other use of a cache, against the
naive form."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Cache

from leank import ChannelMask, compressed_cache
from leank.eval.cache import CompressedCache, Sizes, bytes_per_row
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.storage.banded import codecs
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.quantised import (
    Packing,
    quantise_packed,
    restore_packed,
    tokens_from_lines,
    tokens_in_lines,
)
from leank.eval.cache.storage.segment import Extent
from leank.eval.methods.base import Method
from leank.eval.methods.bits.kivi import KIVI
from leank.eval.methods.channels.by_length import ByLength
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.channels.leank_budget import LeanKBudget
from leank.eval.methods.memory import method_bytes
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.precision import GROUP, Precision
from tests import ROOT
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, SEEDS, OracleLayer, compare, left_padded, run, tiny_model
from tests.helpers.layouts import layout, layout_mask
from tests.helpers.segments import LAST, check_segment
from tests.oracles.bits import fake_packed, in_bits

SHAPE, SIZES = (LAYERS, HEADS, DIM), (2, 70, 64)
FULL = torch.full(SHAPE, 16, dtype=torch.uint8)


def test_lines_of_keys_are_in_the_order_of_products():
    """Line 16 w + 8 e + 2 i + b of a half holds token 8 i + 4 w + 2 b + e, and back."""
    token = torch.arange(64)
    half, w, e, i, b = token // 32, token // 16 % 2, token // 8 % 2, token // 2 % 4, token % 2
    lines = tokens_in_lines(token[:, None])
    assert (lines[:, 0] == 32 * half + 8 * i + 4 * w + 2 * b + e).all()
    assert (tokens_from_lines(lines)[:, 0] == token).all()


@settings(max_examples=15, derandomize=True)
@given(st.sampled_from([16, 64, 96]), st.lists(st.integers(0, 3), max_size=3), LAST, SEEDS, st.booleans())
def test_a_segment_holds_every_band_in_its_bits(dim, appends, last, seed, packed):
    precision = layout((1, 3, dim), seed, packed=packed)
    (codec,), key_bits, value_bits = codecs(precision), precision.key_bits[0], precision.value_bits[0]
    channels = KeptChannels.of(key_bits > 0, torch.empty(2, 3, 0, dim), codec.order)

    def of_head(head, k, v):
        widths = key_bits[head][channels.index[0, head, : k.shape[1]].long()]
        assert widths.tolist() == sorted(widths.tolist(), reverse=True)
        return in_bits(k, v, widths, value_bits[head], packed)

    segment, tokens = check_segment(codec, channels, dim, appends, last, seed, of_head)
    kept, (token_k, token_v) = (key_bits > 0).any(-1), (x[0] for x in precision.token_bytes(8))
    cells, whole = torch.from_numpy(-(-tokens // GROUP) * GROUP), torch.from_numpy(tokens)
    held = [float((n * size * kept).sum()) for n, size in ((cells, token_k), (whole, token_v))]
    assert segment.held() == pytest.approx(tuple(held), abs=1)


@settings(max_examples=60, derandomize=True)
@given(st.sampled_from([2, 3, 4, 8]), st.floats(-3, 4), st.floats(-3, 4), SEEDS)
def test_packed_levels_reach_every_number(bits, place, spread, seed):
    """Numbers far from 0, close together, or all the same; each misses its level by half a scale at most."""
    generator, top = torch.Generator().manual_seed(seed), 2**bits - 1
    x = torch.randn(2, 2 * GROUP, 5, generator=generator, dtype=torch.float64) * 10**spread
    x += 10**place * torch.tensor([0, 1, -1, 1, -1])
    x[..., 3:] = x[:, :1, 3:]
    codes, words = quantise_packed(x, GROUP, top)
    found = restore_packed(codes, words, GROUP, top)
    assert torch.equal(found, fake_packed(x.mT.unflatten(-1, (-1, GROUP)), bits).flatten(-2).mT.float())
    scale = (words & 0x7FC0).view(torch.float16).double().squeeze(-1).repeat_interleave(GROUP, 1)
    assert ((found - x).abs() <= scale * 0.5001).all()


def test_a_group_that_is_not_finite_is_packed_as_no_number():
    x = torch.randn(1, GROUP, 4)
    x[0, 3, 1], x[0, 5, 2] = torch.nan, torch.inf
    found = restore_packed(*quantise_packed(x, GROUP, 3), GROUP, 3)
    assert found.isnan().all(1).tolist() == [[False, True, True, False]]


def oracle(precision, sizes, absolute=False):
    def layer(*bits):
        def rounded(head, k, v):
            return in_bits(k, v, *(one[head] for one in bits), precision.packed)

        return OracleLayer(bits[0] > 0, *sizes, rounded=rounded, absolute=absolute)

    return Cache([layer(*bits) for bits in zip(precision.key_bits, precision.value_bits, strict=True)])


@settings(max_examples=3, derandomize=True)
@given(
    st.sampled_from(["llama", "qwen3"]),
    st.lists(st.integers(1, 200), min_size=1, max_size=2),
    st.tuples(st.integers(0, 5), st.integers(1, 12)),
    SEEDS,
    st.booleans(),
)
def test_generate_is_that_of_a_dense_cache_with_a_rounded_middle(family, lengths, ends, seed, packed):
    model, mask = tiny_model(family), layout_mask(SHAPE, seed, packed=packed)
    sizes, (ids, real) = (*ends, GROUP), left_padded(lengths, seed)
    want = run(model, oracle(mask.precision, sizes), ids, real, 70, "oracle")
    compare(run(model, compressed_cache(model, mask, *ends), ids, real, 70, ATTENTION), want)


@settings(max_examples=4, derandomize=True)
@given(st.lists(st.integers(1, 260), min_size=1, max_size=2), st.integers(1, 100), st.sampled_from([0, 64]), SEEDS)
def test_on_the_absolute_grid_a_middle_ends_at_multiples_of_64(lengths, window, sink, seed):
    model, mask = tiny_model("llama"), layout_mask(SHAPE, seed)
    ids, real = left_padded(lengths, seed)
    cache = compressed_cache(model, mask, sink, window, grid="absolute")
    want = run(model, oracle(mask.precision, (sink, window, GROUP), True), ids, real, 70, "oracle")
    compare(run(model, cache, ids, real, 70, ATTENTION), want)
    for layer in cache.compressed:
        assert (layer.store.start % GROUP == 0).all()


def test_a_sink_that_ends_off_the_absolute_grid_is_refused():
    with pytest.raises(ValueError, match=r"sink=16 must be a multiple of flush=64 .* take 64"):
        compressed_cache(tiny_model("llama"), layout_mask(SHAPE, 1), 16, 70, grid="absolute")


def test_a_second_turn_reads_what_the_first_has_left():
    model, mask = tiny_model("llama"), layout_mask(SHAPE, 4, keys=(0, 2, 4))
    ids, real = left_padded([140, 121], 4)
    more, more_real = left_padded([80, 93], 5)
    results = []
    for attention in ("oracle", ATTENTION):
        cache = oracle(mask.precision, SIZES) if attention == "oracle" else compressed_cache(model, mask, *SIZES)
        turn = run(model, cache, ids, real, 3, attention)[0]
        full = torch.cat([turn, more], 1)
        full_real = torch.cat([real, torch.ones(2, 3, dtype=real.dtype), more_real], 1)
        results.append(run(model, cache, full, full_real, 5, attention))
    compare(results[1], results[0])


def test_sixteen_bits_everywhere_are_the_mask_alone():
    """Bit for bit, with means in place of pruned channels."""
    precision = Precision(layout(SHAPE, 6, keys=(0, 16)).key_bits, torch.full(SHAPE[:2], 16, dtype=torch.uint8))
    means = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    model, (ids, real) = tiny_model("llama"), left_padded([200, 90], 6)
    plain = ChannelMask(precision.keep, mean_keys=means)
    results = [
        run(model, compressed_cache(model, mask, *SIZES), ids, real, 70, ATTENTION)
        for mask in (plain, ChannelMask(precision.keep, mean_keys=means, precision=precision))
    ]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("sizes", "grid", "packed"), [(SIZES, "prompt", False), (SIZES, "prompt", True), ((64, 70, 64), "absolute", False)]
)
def test_a_cache_is_saved_copied_and_reordered(tmp_path, sizes, grid, packed):
    model, mask = tiny_model("llama", torch.float32), layout_mask(SHAPE, 8, packed=packed)
    ids, _ = left_padded([160, 160], 8)
    cache = compressed_cache(model, mask, *sizes, grid=grid)
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        cache.save(tmp_path / "c")
        loaded = CompressedCache.load(tmp_path / "c", model, mask)
        swapped = copy.deepcopy(cache)
        swapped.batch_select_indices(torch.tensor([1, 0]))
        want, got = (model(ids[:, 150:], past_key_values=one).logits for one in (cache, loaded))
        assert torch.equal(got, want)
        assert torch.equal(model(ids.flip(0)[:, 150:], past_key_values=swapped).logits, want.flip(0))
    others = mask.precision.key_bits.clone()
    others[others == 4] = 8
    bits = mask.precision.key_bits, mask.precision.value_bits
    for other, words in (
        (None, "other scales" if packed else "other bits of K"),
        (Precision(*bits, packed=not packed), "other scales"),
        (Precision(others, bits[1], packed=packed), "other bits of K"),
        (Precision(bits[0], FULL[..., 0], packed=packed), "other bits of V"),
    ):
        with pytest.raises(ValueError, match=words):
            CompressedCache.load(tmp_path / "c", model, ChannelMask(mask.keep, precision=other))


def test_bytes_of_a_layout_at_32k_are_those_of_the_page_that_explains_them():
    bits = torch.full((32, 8, 128), 4, dtype=torch.uint8)
    mask = ChannelMask(bits > 0, precision=Precision(bits, bits[..., 0]))
    page = (ROOT / "docs/understand/cache.md").read_text(encoding="utf-8")
    assert f"{bytes_per_row(mask, 32768, sizes=Sizes(128, 1024, 64)) / 1e6:,.1f} MB, 31%" in page


@pytest.mark.parametrize(("tokens", "packed"), [(None, False), (None, True), (SnapKV(budget=150, queries=8), False)])
def test_as_a_method_and_its_bytes(tokens, packed):
    """Built from a shared dense pass; what it holds is its formula, and what a planner counts on."""
    model, mask = tiny_model("llama", torch.float32), layout_mask(SHAPE, 9, packed=packed)
    one = Method("bits", LeanK(mask), tokens, sink=2, window=70, flush=64)
    ids, _ = left_padded([400, 400], 9)
    cache = one.cache(model, one.run_prefill(model, ids, None, 8))
    memory = cache.memory()
    held = memory.total - memory.tables - memory.slack
    assert held == pytest.approx(2 * method_bytes(one, model.config, 400, 4), rel=0.001)
    if tokens is None:
        assert memory.total - memory.tables == 2 * bytes_per_row(mask, 400, torch.float32, Sizes(2, 70, 64))
        other = compressed_cache(model, mask, *SIZES)
        with torch.no_grad():
            model(ids, past_key_values=other)
            new = torch.tensor([[3], [4]])
            torch.testing.assert_close(*(model(new, past_key_values=c).logits for c in (cache, other)))


def test_what_cannot_be_is_refused_by_name(tmp_path):
    model, mask = tiny_model("llama"), layout_mask(SHAPE, 10)
    mask.save(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"flush=32 must be a multiple of 64.*set flush to 64"):
        compressed_cache(model, mask, flush=32)
    assert compressed_cache(model, tmp_path / "m.safetensors").compressed[0].sizes.flush == 64
    with pytest.raises(ValueError, match=r"method.one: flush=32 must be"):
        Method("one", LeanK(mask)).layout()
    with pytest.raises(ValueError, match=r"mask has bits per channel, and method.one.bits=kivi"):
        Method("one", LeanK(mask), bits=KIVI(4, 64), flush=64).layout()
    with pytest.raises(ValueError, match="leank_budget stores kept channels in the model's dtype"):
        Method("one", LeanKBudget(mask)).layout()
    side = {"name": "leank", "mask": mask}
    with pytest.raises(ValueError, match=r"by_length.below: its mask has bits per channel"):
        Method("one", ByLength(side, side)).layout()
    with pytest.raises(ValueError, match="leave out bits"):
        bytes_per_row(mask, 400, bits=Packing(2, 32))
    (codec, _), other = codecs(mask.precision), KeptChannels.of(None, torch.empty(1, HEADS, 0, DIM))
    with pytest.raises(ValueError, match="says itself which channels are kept"):
        codec.segment(Extent(other, np.full((1, HEADS), 64), DIM, torch.float32))


def test_a_method_tells_layouts_of_the_same_channels_apart():
    keep = layout(SHAPE, 11).keep
    masks = [ChannelMask(keep), *(
        ChannelMask(keep, precision=Precision(keep.to(torch.uint8) * bits, FULL[..., 0])) for bits in (2, 4)
    )]  # fmt: skip
    masks += [ChannelMask(keep, precision=Precision(keep.to(torch.uint8) * 2, FULL[..., 0], packed=True))]
    assert len({str(LeanK(mask).identity()) for mask in masks}) == 4
