"""Coded middles (KIVI, TurboQuant, FP8): what a cell and a segment hold, and generation over it, against an oracle that
shares no code with eval.cache."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Cache

from leank.eval.cache import Sizes, bytes_per_row, compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.codecs import OfHeads
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import Extent
from leank.eval.cache.storage.store import Store
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import prefill
from leank.eval.methods import build_method
from leank.eval.methods.bits.fp8 import FP8, Scaled
from leank.eval.methods.bits.kivi import KIVI
from leank.eval.methods.bits.turboquant import Even, Rotation, TurboQuant, centroids, rotation
from tests.helpers.cache_oracle import (
    DIM,
    HEADS,
    LAYERS,
    SEEDS,
    OracleLayer,
    compare,
    left_padded,
    random_keep,
    run,
    tiny_model,
)
from tests.helpers.segments import LAST, check_segment, random_channels
from tests.oracles.bits import fake_quantise

BITS = st.sampled_from([2, 4, 8])
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def fake_quantise_middle(k, v, bits, group):
    """k, v [n, D] tokens that enter the middle together: K per channel along tokens, V per token along channels."""
    v = torch.cat([fake_quantise(x, bits) for x in v.split(group, 1)], 1)
    return torch.cat([fake_quantise(x.T, bits).T for x in k.split(group)]) if len(k) else k, v


@settings(max_examples=15, derandomize=True)
@given(BITS, st.sampled_from([8, 16, 32, 64]), DTYPES, st.floats(-8, 8), st.floats(-6, 3), SEEDS)
def test_a_number_comes_back_within_half_a_step(bits, group, dtype, offset, magnitude, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(5, group, generator=generator, dtype=torch.float64) * 10**magnitude + offset).to(dtype)
    packing = Packing(bits, group)
    codes, scales = packing.quantise(x.mT)
    assert codes.shape == (group, 5)
    assert int(codes.max()) < 2**bits
    assert scales.shape == (1, 5, 2)
    back = packing.restore(codes, scales).mT.double()
    step = (x.double().amax(-1) - x.double().amin(-1)) / (2**bits - 1)
    info = torch.finfo(dtype)
    # the scale is rounded too: at the far end that adds up to half an ulp of it for every level
    rounded = step * 2**bits * info.eps + x.double().abs().amax(-1) * info.eps + 2**bits * info.smallest_normal
    assert ((back - x.double()).abs() <= (step / 2 + rounded)[:, None]).all()
    nearest = (fake_quantise(x, bits).double() - x.double()).abs()
    assert ((back - x.double()).abs() <= nearest + rounded[:, None]).all()


@given(BITS, DTYPES, st.floats(-1e4, 1e4))
def test_a_constant_group_comes_back_exactly(bits, dtype, value):
    x = torch.full((32, 3), value).to(dtype)
    assert torch.equal(Packing(bits, 32).restore(*Packing(bits, 32).quantise(x)), x)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_where_the_codes_of_a_page_lie(bits):
    """As the picture at the head of quantised.py says: the number of token t and channel c is t for K, c for V."""
    group, dim = 8, 32
    channels = KeptChannels.of((torch.arange(dim) < 11)[None], torch.empty(1, 1, 0, dim))
    segment = Packing(bits, group).segment(Extent(channels, np.full((1, 1), 64), dim, torch.float32))
    k, v = torch.randn(2, 1, 1, 64, dim, generator=torch.Generator().manual_seed(bits))
    segment.append(np.array([0]), k, v)
    (k_codes, k_scales), (v_codes, v_scales) = (Packing(bits, group).quantise(x) for x in (k[0, 0, :, :11], v[0, 0].mT))
    room, top = 16, 2**bits - 1
    plane = segment.k[: 64 * room * bits // 8]
    for t in range(64):
        row = t % 8 // 4 * 16 + t % 2 * 8 + t % 32 // 8 * 2 + t % 4 // 2  # the token's line in its half
        for c in range(11):
            if bits == 8:
                at, shift = (t // 32 * 32 + row) * room + c, 0
            elif bits == 4:
                at, shift = row * room + c, t // 32 * 4
            else:  # four channels of a line in two bytes
                at, shift = (2 * row + c % 4 // 2) * room // 4 + c // 4, t // 32 * 4 + c % 2 * 2
            assert int(plane[at]) >> shift & top == k_codes[t, c]
    if bits == 2:  # scales of the lines' channels 0, then 2, 1 and 3
        padded = torch.nn.functional.pad(k_scales, (0, 0, 0, room - 11))
        k_scales = padded[:, [4 * line + c for c in (0, 2, 1, 3) for line in range(room // 4)]]
    plane, step = segment.v[: 64 * dim * bits // 8], dim * bits // 8
    for t in range(64):
        for c in range(dim):
            assert int(plane[c % step * 64 + t]) >> c // step * bits & top == v_codes[c, t]
    for flat, scales, codes in (
        (segment.k, k_scales, 64 * room * bits // 8),
        (segment.v, v_scales, 64 * dim * bits // 8),
    ):
        cells = flat[codes:].view(torch.float32).view(len(scales), -1, 4)
        for n in range(scales.shape[1]):
            assert torch.equal(cells[:, n // 2, [n % 2, n % 2 + 2]], scales[:, n])


def rotated(x, bits, corrected=False):
    """Vectors x [n, d], coordinate by coordinate the nearest level in TurboQuant's basis; one coordinate is exact.

    corrected: whether they are then as long as x.
    """
    if x.shape[1] == 1:
        return x
    basis, levels, norm = rotation(x.shape[1], 0), centroids(bits), x.norm(dim=1, keepdim=True)
    found = levels[((x @ basis * x.shape[1] ** 0.5 / norm)[..., None] - levels).abs().argmin(-1)]
    back = norm / x.shape[1] ** 0.5 * found @ basis.T
    return back * norm / back.norm(dim=1, keepdim=True) if corrected else back


def of_e4m3():
    """Every number of e4m3 that is not negative, in the order of its code: three bits of mantissa, four of exponent."""
    return torch.tensor(
        [m / 512 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8) for e in range(16) for m in range(8)][:127]
    )


def in_fp8(x, scale):
    """Numbers x, the nearest that s times a number of e4m3 is; of two that are as near the one of the even code."""
    numbers = of_e4m3().double()
    distance = ((x / scale).abs()[..., None].double() - numbers).abs()
    codes = torch.where(distance == distance.amin(-1, keepdim=True), torch.arange(127) % 2, 2).argmin(-1)
    return (x.sign() * numbers[codes] * scale).to(x.dtype)


CODECS = st.one_of(
    st.builds(Packing, BITS, st.sampled_from([4, 8, 16])),
    st.builds(Rotation, st.sampled_from([2, 3, 4]), st.just(0), st.booleans()),
    st.builds(lambda k, v: OfHeads(((Rotation(k, 0, True), Even(v)),)), *[st.sampled_from([2, 3, 4])] * 2),
    st.builds(Scaled, st.sampled_from([1.0, 2.0**-9])),
    st.just(OfHeads(((Scaled(0.5), Scaled(0.25)), (Scaled(0.125), Scaled(1.0)), (Scaled(2.0), Scaled(0.0625))))),
)


def of_head(codec, head):
    """The codecs of K and V of a head."""
    return codec.heads[head % len(codec.heads)] if isinstance(codec, OfHeads) else (codec, codec)


@settings(max_examples=15, derandomize=True)
@given(CODECS, st.lists(st.integers(0, 6), min_size=1, max_size=4), LAST, SEEDS)
def test_a_segment_holds_the_coded_tokens_of_every_head(codec, appends, last, seed):
    keep, dim = random_channels(seed, 16), 16

    def rounded(head, k, v):
        of_keys, of_values = of_head(codec, head)
        if isinstance(codec, Packing):
            return fake_quantise_middle(k, v, codec.bits, codec.group)
        if isinstance(of_keys, Scaled):
            return in_fp8(k, of_keys.scale), in_fp8(v, of_values.scale)
        coded = rotated(k, of_keys.bits, of_keys.norm_correction) if k.shape[1] else k
        if isinstance(of_values, Even):
            return coded, fake_quantise(v, of_values.bits)
        return coded, rotated(v, of_values.bits, of_values.norm_correction)

    close = {"rtol": 1e-7, "atol": 1e-7} if isinstance(of_head(codec, 0)[0], Rotation) else {}
    channels = KeptChannels.of(keep, torch.empty(2, 3, 0, dim))
    segment, tokens = check_segment(codec, channels, dim, appends, last, seed, rounded, **close)
    held = [0, 0]
    for (row, head), n in np.ndenumerate(tokens * keep.any(-1).numpy()):
        count, group = int(keep[row, head].sum()), codec.group
        if isinstance(codec, Packing):
            cell = group * codec.bits // 8 + 2 * 8
            held[0] += -(-n // group) * -(-count // 16) * 16 * cell
            held[1] += n * (dim // group) * cell
        else:
            for i, (one, width) in enumerate(zip(of_head(codec, head), (count, dim), strict=True)):
                codes = sum(-(-width * part // 8) for part in {2: [2], 3: [2, 1], 4: [4], 8: [8]}[one.bits])
                held[i] += n * (codes + 8 * {Scaled: 0, Rotation: 1, Even: 2}[type(one)])
    assert segment.held() == tuple(held)


def test_tokens_follow_whole_groups():
    channels = KeptChannels.of(None, torch.empty(1, 2, 0, 16))
    segment = Packing(2, 8).segment(Extent(channels, np.full((1, 2), 64), 16, torch.float32))
    x = torch.randn(1, 2, 12, 16)
    segment.append(np.array([0]), x, x)
    with pytest.raises(ValueError, match="whole groups of 8; set flush to a multiple"):
        segment.append(np.array([0]), x, x)


def quantised(model, keep, sizes, bits, group):
    middles = [Middle(channels=k, bits=Packing(bits, group)) for k in keep]
    return compressed_cache(model, middles, *sizes, backend="torch")


def quantised_oracle(keep, sizes, bits, group):
    def rounded(head, k, v):
        return fake_quantise_middle(k, v, bits, group)

    return Cache(layers=[OracleLayer(k, *sizes, rounded=rounded) for k in keep])


@settings(max_examples=15, derandomize=True)
@given(
    st.sampled_from(["llama", "qwen3"]),
    st.lists(st.integers(1, 45), min_size=1, max_size=3),
    st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(1, 2)),
    BITS,
    st.sampled_from([4, 8]),
    st.integers(1, 25),
    SEEDS,
)
@example("llama", [40, 21], (4, 8, 1), 2, 4, 25, 0)
def test_generate_is_that_of_a_dense_cache_with_a_rounded_middle(family, lengths, sizes, bits, group, new_tokens, seed):
    model, keep = tiny_model(family), random_keep(seed)
    sizes = (*sizes[:2], sizes[2] * group)
    ids, mask = left_padded(lengths, seed)
    want = run(model, quantised_oracle(keep, sizes, bits, group), ids, mask, new_tokens, "oracle")
    compare(run(model, quantised(model, keep, sizes, bits, group), ids, mask, new_tokens, ATTENTION), want)


@pytest.mark.parametrize(("group", "at_32k", "limit"), [(32, 7.28, 9.45), (64, 8.32, 11.34)])
def test_bytes_held_with_a_mask_of_the_shape_that_was_published(group, at_32k, limit):
    """LeanK's Llama mask keeps 0, 32, 64 and 96 channels in 47, 120, 67 and 22 of 256 heads. With 2 bits, sink and
    window in 16, a dense bf16 cache of 32K tokens is 7.28 times as large; without them 9.45 times."""
    counts = torch.tensor([0] * 47 + [32] * 120 + [64] * 67 + [96] * 22)
    counts = counts[torch.randperm(256, generator=torch.Generator().manual_seed(0))].view(32, 8)
    keep, packing, sizes = torch.arange(128) < counts[..., None], Packing(2, group), Sizes(128, 1024, 64)
    numbers = int(keep.sum()) + 128 * int(keep.any(-1).sum())  # of K and V, a token
    dense = 2 * 2 * 32 * 8 * 128
    assert dense / (numbers * (2 + 32 / group) / 8) == pytest.approx(limit, abs=0.01)
    formula = 1152 * dense + (32768 - 1152) * numbers * (2 + 32 / group) / 8
    assert 32768 * dense / formula == pytest.approx(at_32k, abs=0.01)
    assert bytes_per_row(keep, 32768, sizes=sizes, bits=packing) == pytest.approx(formula, rel=0.02)

    k, v = torch.randn(2, 1, 8, 4096, 128, dtype=torch.bfloat16)  # the projection itself is what one layer holds
    store = Store(k, v, None, Middle(keep[0], bits=packing), sizes)
    memory = measure_store(store)
    assert memory.total - memory.tables == bytes_per_row(keep[:1], 4096, sizes=sizes, bits=packing)
    assert memory.tables < 0.02 * memory.total


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="bits=5 must be one of 2, 3, 4, 8"):
        Packing(5)
    with pytest.raises(ValueError, match="group=48 must divide 64"):
        Packing(2, 48)
    with pytest.raises(ValueError, match="group=2 must divide 64 and be at least 4"):
        Packing(2, 2)
    with pytest.raises(ValueError, match="group=32 does not divide head_dim=8"):
        KIVI().check(tiny_model("llama").config, None)
    with pytest.raises(ValueError, match=r"method.kivi: flush=32 must be a multiple of group=64.* set flush to 64"):
        build_method("kivi", {"bits": {"name": "kivi", "group": 64}})


# TurboQuant


def test_levels_and_distortion_are_those_of_lloyd_and_max():
    """Max, Quantizing for Minimum Distortion (1960), table I: the levels, and the mean squared error of a normal."""
    torch.testing.assert_close(centroids(2), torch.tensor([-1.510, -0.4528, 0.4528, 1.510]).double(), atol=5e-4, rtol=0)
    assert centroids(4)[[8, 15]].tolist() == pytest.approx([0.1284, 2.733], abs=5e-4)
    x = torch.randn(4000, 96, generator=torch.Generator().manual_seed(0))
    for bits, want in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        packing = Rotation(bits)
        back = packing.decode(*packing.encode(x, True), True)
        assert float((back - x).square().sum() / x.square().sum()) == pytest.approx(want, rel=0.03)


def test_a_rotation_keeps_lengths_and_depends_on_its_seed():
    one, other = rotation(77, 0), rotation(77, 1)
    torch.testing.assert_close(one @ one.T, torch.eye(77).double())
    assert (one - other).norm() > 5


@pytest.mark.parametrize(("layers", "skip", "whole"), [(7, 2, [0, 1, 5, 6]), (3, 2, [0, 2]), (1, 2, []), (5, 0, [])])
def test_layers_that_stay_whole_are_those_of_vllm(layers, skip, whole):
    """The first and last n of all layers, n at most half of them."""
    assert [i for i, stays in enumerate(TurboQuant(skip=skip).whole(layers)) if stays] == whole


# FP8


@given(st.integers(0, 126), st.floats(0, 1), st.sampled_from([1.0, 0.37, 2.0**-9]), st.sampled_from([-1, 1]))
def test_a_number_is_stored_as_the_nearest_of_e4m3(code, between, scale, sign):
    """Also halfway between two of them, and beyond the largest, 448."""
    numbers = torch.cat([of_e4m3(), torch.tensor([1000.0])]).double()
    x = sign * (numbers[code] + torch.tensor([0, between, 0.5]) * (numbers[code + 1] - numbers[code]))[:, None]
    x = (x * scale).float()
    codes, none = Scaled(scale).encode(x, True)
    assert (codes.shape, none.shape) == ((3, 1), (3, 0))
    want = in_fp8(x, scale)
    torch.testing.assert_close(Scaled(scale).decode(codes, none, True), want, rtol=1e-6, atol=0)
    assert want.abs().max() <= 448 * scale * (1 + 1e-6)


@pytest.mark.parametrize("scales", ["one", "tensor", "head"])
def test_fp8_generates_as_a_dense_cache_whose_middle_is_rounded(scales):
    """The scales are those of the largest numbers of the samples, here of the prompts themselves."""
    model, sizes = tiny_model("llama"), (2, 6, 8)
    ids, mask = left_padded([40, 40], 3)
    dense, chosen = prefill(model, ids, None, 8), FP8(scales=scales, samples=1)
    chosen.calibrate(lambda sample, queries: dense, load_config(ModelConfig())[1], model.config)
    middles = [Middle(bits=chosen.of_layer(index, dense)) for index in range(LAYERS)]
    layers = []
    for layer in dense.layers:
        found = [x.abs().amax((0, 2, 3)) / 448 for x in (layer.keys, layer.values)]  # [H]
        if scales != "head":
            found = [x.amax().expand(HEADS) if scales == "tensor" else torch.ones(HEADS) for x in found]
        layers.append(OracleLayer(torch.ones(HEADS, DIM, dtype=torch.bool), *sizes, rounded=in_fp8_by(*found)))
    want = run(model, Cache(layers=layers), ids, mask, 20, "oracle")
    compare(run(model, compressed_cache(model, middles, *sizes, backend="torch"), ids, mask, 20, ATTENTION), want)


def in_fp8_by(k_scales, v_scales):
    """How an OracleLayer rounds by scales [H]."""
    return lambda head, k, v: (in_fp8(k, k_scales[head]), in_fp8(v, v_scales[head]))
