"""OSCAR, OScaR, one grid for each token and head, and NVFP4, against their rules written out number by number."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.codecs import OfHeads
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import PAGE
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import prefill
from leank.eval.methods.bits.nvfp4 import LEVELS, Blocks
from leank.eval.methods.bits.omni_scaled import OmniScaled, ScaledKeys, TurnedValues
from leank.eval.methods.bits.oscar import OSCAR, Turned
from leank.eval.methods.bits.per_token_head import ShortGrid
from leank.eval.methods.common.hadamard import hadamard
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, SEEDS, left_padded, tiny_model
from tests.helpers.segments import LAST, check_segment

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
DIMS = st.sampled_from([16, 24, 64, 128])


def vectors(dim, dtype, seed, magnitude=0.0, rows=2, tokens=PAGE):
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (magnitude + torch.randn(dim, generator=generator) / 2)
    return (torch.randn(rows, tokens, dim, generator=generator) * scale).to(dtype)


def stored(codec, x, keys=True):
    """What comes back of x [rows, 64, d] from the bytes of a page."""
    codes, numbers = codec.encode(x, keys)
    planes = codec.pack(codes, numbers, keys)
    sizes = codec.pages(x.shape[-1], x.shape[-1], x.dtype)[0 if keys else 1]
    assert (planes[0].shape[-1], planes[1].shape[-1] * x.dtype.itemsize) == sizes
    return codec.decode(*codec.unpack(*planes, x.shape[-1], keys), keys)


@pytest.mark.parametrize(
    ("dim", "block", "size"), [(128, None, 128), (128, 16, 16), (96, None, 32), (96, 5, 4), (5, None, 1)]
)
def test_a_hadamard_matrix_turns_blocks(dim, block, size):
    h = hadamard(dim, block)
    assert torch.allclose(h @ h.mT, torch.eye(dim, dtype=h.dtype))
    nonzero = h != 0
    assert (nonzero.sum(0) == size).all()
    assert torch.allclose(h[nonzero].abs(), torch.tensor(size**-0.5, dtype=h.dtype))


@settings(max_examples=30)
@given(DIMS, DTYPES, st.floats(-3, 2), SEEDS)
def test_fp4_takes_the_nearest_level(dim, dtype, magnitude, seed):
    x = vectors(dim, dtype, seed, magnitude)
    found = stored(Blocks(), x).float()
    for row, back in zip(x.flatten(0, 1)[:8].float(), found.flatten(0, 1), strict=False):
        for at in range(0, dim, 16):
            block = row[at : at + 16]
            scale = (block.abs().max() / 6).to(torch.float8_e4m3fn).float()
            for number, read in zip(block.tolist(), back[at : at + 16].tolist(), strict=True):
                distances = {
                    sign * level * float(scale): abs(sign * level * float(scale) - number)
                    for level in LEVELS
                    for sign in (1, -1)
                }
                assert abs(read - number) <= min(distances.values()) + abs(number) * torch.finfo(dtype).eps


def test_fp4_of_halves_takes_even_codes():
    """Levels and all numbers half way between two: the block's largest is 6, so its scale is 1."""
    between = [(a + b) / 2 for a, b in itertools.pairwise(LEVELS)]
    x = torch.tensor([*LEVELS, *between, 0.0])
    read = stored(Blocks(), torch.stack([x, -x])[:, None].expand(2, PAGE, -1).contiguous())[:, 0]
    want = torch.tensor([*LEVELS, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0])
    assert torch.equal(read, torch.stack([want, -want]))


def test_fp4_says_what_saturates():
    x = torch.zeros(1, PAGE, 16)
    x[0, 3, 2], x[0, 4, 1] = 448 * 6, -448 * 6.5
    assert Blocks().saturated(x).tolist() == [1]
    assert stored(Blocks(), x)[0, [3, 4], [2, 1]].tolist() == [448 * 6, -448 * 6]


@settings(max_examples=30)
@given(DIMS, DTYPES, st.booleans(), st.sampled_from([1, 16, 128]), SEEDS)
def test_a_grid_for_each_token_and_head(dim, dtype, signs, block, seed):
    codec = ShortGrid(block, signs)
    x = vectors(dim, dtype, seed)
    turn = codec.basis(dim)
    assert torch.allclose(turn @ turn.mT, torch.eye(dim, dtype=turn.dtype))
    found = stored(codec, x)
    y = x.double() @ turn
    for row, numbers in enumerate(y.flatten(0, 1)[:8]):
        low, high = float(numbers.min()), float(numbers.max())
        scale = max((high - low) / 15, 1e-6)
        zero = min(15, max(0, round(-low / scale)))
        want = [(min(15, max(0, round(number / scale + zero))) - zero) * scale for number in numbers.tolist()]
        back = found.flatten(0, 1)[row].double() @ turn
        # a number within float32's rounding of the middle of two levels may fall on either
        assert (back - torch.tensor(want)).abs().max() <= scale * 1.001 + y.abs().max() * torch.finfo(dtype).eps * 8
        assert (back - torch.tensor(want)).abs().median() <= scale * 1e-3 + y.abs().max() * torch.finfo(dtype).eps * 8


@settings(max_examples=30)
@given(DIMS, st.sampled_from([2, 3, 4]), st.sampled_from([1.0, 0.96, 0.5]), st.booleans(), SEEDS)
def test_oscar_clips_and_rounds_in_its_basis(dim, bits, clip, centred, seed):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    mean = 30 * torch.randn(dim, generator=generator, dtype=torch.float64) if centred else None
    x = vectors(dim, torch.float64, seed) + (mean if centred else 0)
    found = stored(Turned(bits, basis, clip, mean), x)
    shift = mean if centred else torch.zeros(dim, dtype=torch.float64)
    y, back = (x - shift) @ basis, (found - shift) @ basis
    for numbers, read in zip(y.flatten(0, 1)[:8].tolist(), back.flatten(0, 1).tolist(), strict=False):
        most = sorted(abs(n) for n in numbers)[int(clip * dim)] if clip < 1 else math.inf
        clipped = [min(max(n, -most), most) for n in numbers]
        low, step = min(clipped), (max(clipped) - min(clipped)) / (2**bits - 1)
        want = [low + math.floor((n - low) / step + 0.5) * step for n in clipped]
        assert np.allclose(read, want, atol=1e-6 * (1 + most if clip < 1 else 100))


@settings(max_examples=30)
@given(DIMS, st.sampled_from([2, 4, 8]), st.sampled_from([4, 8]), SEEDS)
def test_oscar_of_meituan_takes_lengths_off_before_it_rounds(dim, bits, group, seed):
    """Tokens of very different lengths, one of them 0, against the rule written out number by number."""
    x = vectors(dim, torch.float64, seed, rows=1)[0]
    x *= 10 ** torch.linspace(-2, 2, PAGE, dtype=torch.float64)[:, None]
    x[7] = 0
    turn, top = hadamard(dim).numpy(), 2**bits - 1
    y = x.numpy() @ turn

    def on_grid(numbers):
        low, step = min(numbers), (max(numbers) - min(numbers)) / top
        return [low + round((n - low) / step) * step if step else low for n in numbers]

    lengths = np.sqrt((y**2).sum(-1, keepdims=True))
    units, keys, values = y / np.where(lengths > 0, lengths, 1), np.empty_like(y), np.empty_like(y)
    for first in range(0, PAGE, group):
        for channel in range(dim):
            keys[first : first + group, channel] = on_grid(units[first : first + group, channel].tolist())
    for token, first in itertools.product(range(PAGE), range(0, dim, group)):
        values[token, first : first + group] = on_grid(y[token, first : first + group].tolist())
    plain = Packing(bits, group)
    for codec, want, of_keys in ((ScaledKeys(plain), keys * lengths, True), (TurnedValues(plain), values, False)):
        got = stored(codec, x[None], of_keys)[0].numpy() @ turn
        worst = np.abs(got - want).max(-1) / np.maximum(lengths[:, 0], 1e-30)
        assert np.quantile(worst, 0.9) < 1e-6  # a number half way between two levels may take either
    assert OmniScaled(bits, group).sized(0, None) == OfHeads(((ScaledKeys(plain), TurnedValues(plain)),))


def test_oscar_refuses_pruned_channels():
    with pytest.raises(ValueError, match="leave out the choice of channels"):
        Turned(2, torch.eye(16)).encode(torch.zeros(1, PAGE, 15), True)


@torch.no_grad()
def test_oscar_turns_to_what_queries_and_values_weigh():
    """Against sums over single tokens of two samples; every layer's heads share the bases."""
    model, (_, tokenizer) = tiny_model("llama"), load_config(ModelConfig())
    ids, _ = left_padded([30, 30], 3)
    passes = [prefill(model, ids[i : i + 1], None, 0, obs_queries=30) for i in range(2)]
    left = iter(passes)
    choice = OSCAR(samples=2, length=512, centred=True)
    choice.calibrate(lambda sample, queries: next(left), tokenizer, model.config)
    for index in range(LAYERS):
        of_keys, of_values = np.zeros((DIM, DIM)), np.zeros((DIM, DIM))
        means = np.zeros((HEADS, DIM))
        for one, head in itertools.product(passes, range(HEADS)):
            layer = one.layers[index]
            group = layer.queries.shape[1] // HEADS
            queries = layer.queries[0, head * group : (head + 1) * group].flatten(0, 1).numpy()
            moment = sum(np.outer(q, q) for q in queries)
            weights = [k @ moment @ k for k in layer.keys[0, head].numpy()]
            of_keys += moment / len(queries) / HEADS / 2
            for weight, v in zip(weights, layer.values[0, head].numpy(), strict=True):
                of_values += weight / sum(weights) * np.outer(v, v) / HEADS / 2
            means[head] += layer.keys[0, head].numpy().mean(0) / 2
        codec = choice.of_layer(index, passes[0])
        for head, (k, v) in enumerate(codec.heads):
            assert np.allclose(k.mean, means[head])
            for basis, covariance in ((k.basis, of_keys), (v.basis, of_values)):
                diagonal = (basis @ hadamard(DIM).mT).mT.numpy() @ covariance @ (basis @ hadamard(DIM).mT).numpy()
                assert np.allclose(
                    diagonal, np.diag(np.sort(np.diag(diagonal))[::-1]), atol=1e-9 * np.trace(covariance)
                )


BASES = [hadamard(16), torch.eye(16, dtype=torch.float64)]
OTHERS = Turned(3, hadamard(16)), OmniScaled(2, 8).sized(0, None)
OWN = OfHeads(
    tuple((Turned(2, basis, 0.9, mean), Turned(2, basis)) for mean in (None, torch.ones(16)) for basis in BASES)
)


@settings(max_examples=20)
@given(
    st.sampled_from(
        [ShortGrid(16), ShortGrid(4, False), Blocks(), Turned(2, hadamard(16), 0.9), *OTHERS, OWN]
    ),
    st.lists(st.integers(0, 70), min_size=1, max_size=3), LAST, SEEDS,
)  # fmt: skip
def test_a_segment_holds_what_a_vector_alone_is_stored_as(codec, appends, last, seed):
    def rounded(head, k, v):
        one = codec.heads[head % len(codec.heads)] if isinstance(codec, OfHeads) else (codec, codec)
        if not len(k):
            return k, v
        spare = -len(k) % codec.group  # a short group of K counts its last token again
        filled = torch.cat([k, k[-1:].expand(spare, -1)]), v
        return tuple(
            c.decode(*c.encode(x[None], keys), keys)[0][: len(v)]
            for c, x, keys in zip(one, filled, (True, False), strict=True)
        )

    channels = KeptChannels.of(None, torch.empty(2, 3, 0, 16))
    segment, tokens = check_segment(codec, channels, 16, appends, last, seed, rounded, rtol=1e-5, atol=1e-5)
    if codec is OWN and (tokens > 0).all():  # heads that are read together are those of equal codecs
        hidden = torch.arange(segment.capacity.max())[None] >= torch.tensor(segment.length.reshape(-1, 1))
        values, keys = segment.padded_values(hidden), segment.padded_keys(hidden)
        for at, (row, head) in enumerate(np.ndindex(2, 3)):
            k, v = segment.read(row, head)
            torch.testing.assert_close(keys[at][:, : len(k)].mT, k, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(values[at][: len(v)], v, rtol=1e-5, atol=1e-5)
