"""Layouts of bits: what may be in them, their file, and what a token costs under them."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.mask import FORMAT, LAYOUT_FORMAT, ChannelMask
from leank.precision import GROUP, ROOM, Precision
from leank.tensor_files import write_tensors
from tests.helpers.layouts import layout, layout_mask

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 24, 64, 128]))
SEEDS = st.integers(0, 10**6)


@pytest.mark.filterwarnings("ignore:mask=.*all heads are empty")
@settings(deadline=None, max_examples=30)
@given(SHAPES, SEEDS, st.booleans(), st.booleans())
def test_a_layout_comes_back_from_its_file(tmp_path_factory, shape, seed, with_means, packed):
    precision, path = layout(shape, seed, packed=packed), tmp_path_factory.mktemp("masks") / "m.safetensors"
    means = torch.randn(shape) if with_means else None
    mask = ChannelMask(precision.keep, {"seed": seed}, means, precision)
    mask.save(path)
    read = ChannelMask.load(path).with_metadata({"note": "x"}).for_any_model()
    assert torch.equal(read.precision.key_bits, precision.key_bits)
    assert torch.equal(read.precision.value_bits, precision.value_bits)
    assert torch.equal(read.keep, precision.key_bits > 0)
    assert (read.mean_keys is None) == (means is None)
    assert read.precision.packed == packed
    assert read.middle_bytes == mask.middle_bytes
    assert read.with_means(None).precision is not None


@settings(deadline=None, max_examples=60)
@given(SHAPES, SEEDS, st.sampled_from([2, 4]), st.booleans())
def test_bytes_of_a_token_against_the_obvious_loop(shape, seed, itemsize, packed):
    precision = layout(shape, seed, packed=packed)
    each = 2 if packed else 2 * itemsize  # bytes of a scale and a zero point
    layers, heads, dim = shape
    for layer in range(layers):
        for head in range(heads):
            bits = precision.key_bits[layer, head].tolist()
            k, scales = 0, each / GROUP  # the scale and zero point of every GROUP tokens
            for widths, of_channel in (
                ((16,), itemsize), ((8,), 1 + scales), ((4,), 4 / 8 + scales), ((2, 3), 2 / 8 + scales), ((3,), 1 / 8),
            ):  # fmt: skip
                k += (sum(map(bits.count, widths)) + ROOM - 1) // ROOM * ROOM * of_channel
            width, group = (
                int(precision.value_bits[layer, head]),
                max(g for g in (1, 2, 4, 8, 16, 32, 64) if dim % g == 0),
            )
            v = dim * itemsize if width == 16 else dim * width / 8 + dim / group * each
            found = [float(x[layer, head]) for x in precision.token_bytes(itemsize)]
            assert found == pytest.approx([k, v] if any(bits) else [0, 0])
    assert precision.middle_bytes == pytest.approx(
        float(sum(x.sum() for x in precision.token_bytes(2))) / (layers * heads * dim * 4)
    )


def test_a_mask_is_the_case_of_0_and_16_bits():
    keep = torch.rand(2, 3, 64) > 0.5
    keep[0, 1] = False
    mask = ChannelMask(keep)
    assert mask.middle_bytes == pytest.approx((keep.sum() + 5 * 64).item() / (2 * 3 * 64 * 2))
    assert ChannelMask(torch.ones(1, 1, 64, dtype=torch.bool)).middle_bytes == 1


def test_four_bits_everywhere_cost_what_the_docs_say():
    bits = torch.full((2, 2, 128), 4, dtype=torch.uint8)
    assert Precision(bits, bits[..., 0]).middle_bytes == 4.5 / 16
    assert Precision(bits, bits[..., 0], packed=True).middle_bytes == 4.25 / 16


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        (torch.full((1, 2, 8), 5, dtype=torch.uint8), torch.full((1, 2), 4, dtype=torch.uint8), "key_bits holds 5"),
        (torch.full((1, 2, 8), 4, dtype=torch.uint8), torch.full((1, 2), 0, dtype=torch.uint8), "value_bits holds 0"),
        (torch.full((1, 2, 8), 4), torch.full((1, 2), 4, dtype=torch.uint8), "key_bits is torch.int64"),
        (torch.full((1, 2, 8), 4, dtype=torch.uint8), torch.full((2, 1), 4, dtype=torch.uint8), "not of the heads"),
        (torch.full((2, 8), 4, dtype=torch.uint8), torch.full((1, 2), 4, dtype=torch.uint8), "key_bits is torch.uint8"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be_are_refused(keys, values, words):
    with pytest.raises(ValueError, match=words):
        Precision(keys, values)


def test_kept_channels_are_those_with_bits():
    precision = layout((1, 2, 8), 0)
    with pytest.raises(ValueError, match="keep is not where key_bits"):
        ChannelMask(~precision.keep, precision=precision)


@pytest.mark.parametrize("form", [FORMAT, LAYOUT_FORMAT])
def test_a_file_whose_bits_and_format_differ_is_refused(tmp_path, form):
    precision, path = layout((1, 2, 8), 0), tmp_path / "m.safetensors"
    bits = {"key_bits": precision.key_bits, "value_bits": precision.value_bits}
    wrong = {} if form == LAYOUT_FORMAT else bits
    write_tensors(path, {"keep": precision.keep, **wrong}, {"format": form, "metadata": json.dumps({})})
    with pytest.raises(ValueError, match="do not belong together"):
        ChannelMask.load(path)
    write_tensors(path, {"keep": precision.keep, "key_bits": precision.key_bits}, {"format": form, "metadata": "{}"})
    with pytest.raises(ValueError, match="do not belong together"):
        ChannelMask.load(path)


def test_a_card_tells_of_a_layout(tmp_path):
    mask = layout_mask((1, 2, 8), 0)
    mask.save_pretrained(tmp_path / "card")
    assert f"takes {100 * mask.middle_bytes:.0f}% of its dense bytes" in (tmp_path / "card/README.md").read_text()
