"""The page layout: every column of a token lies in one place, and what is written can be read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.serving.layout import LINE, STRIPE, PageLayout
from leank.mask import ChannelMask
from tests import ROOT


def random_layout(seed, block=16, dim=32, layers=2, heads=3):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(layers, heads, dim, generator=generator) < torch.rand(layers, heads, 1, generator=generator)
    keep[torch.rand(layers, heads, generator=generator) < 0.3] = False
    keep[0, 0], keep[0, 1] = True, False  # a whole head and an empty one
    return keep, PageLayout.of(keep, block, sink=4, window=24)


def stripes(group):
    """(first element, elements) of every stripe in a page."""
    for layer in group.layers:
        for head in layer:
            yield from (
                (group.block * stripe.start, group.block * stripe.width) for stripe in (head.k, head.v) if stripe.width
            )


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), block=st.sampled_from([16, 32, 48, 64, 128]))
def test_every_channel_lies_in_one_group_and_no_runs_overlap(seed, block):
    keep, layout = random_layout(seed, block)
    for group, stored in ((layout.kept, keep), (layout.rest, ~keep)):
        ends = 0
        for first, size in sorted(stripes(group)):
            assert first >= ends
            ends = first + size
        assert ends <= group.block * group.columns <= layout.page_columns
        for layer, of_layer in zip(group.layers, stored, strict=True):
            assert layer[0].k.start % LINE == 0
            for head, channels in zip(layer, of_layer, strict=True):
                assert torch.equal(head.channels, channels.nonzero().flatten())
                assert head.k.width % STRIPE == 0 <= head.k.width - head.k.count < STRIPE
    both = [[h.v.count for layer in group.layers for h in layer] for group in (layout.kept, layout.rest)]
    assert [sorted(pair) for pair in zip(*both, strict=True)] == [[0, keep.shape[-1]]] * keep[..., 0].numel()
    assert block % layout.rest.block == 0


def read(group, pages, layer, slots, dim):
    """K, V [n, H, D] of the tokens at `slots`, with zeros for what the group does not hold."""
    heads, at = group.layers[layer], (slots // group.block, slots % group.block)
    k, v = (pages.new_zeros(len(slots), len(heads), dim) for _ in range(2))
    for head, stripes in enumerate(heads):
        k[:, head, stripes.channels] = group.stripe(pages, stripes.k)[at][:, : stripes.k.count]
        if stripes.v.width:
            v[:, head] = group.stripe(pages, stripes.v)[at]
    return k, v


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_both_groups_together_give_back_what_was_written(seed, dtype):
    keep, layout = random_layout(seed)
    heads, dim = keep.shape[1:]
    generator = torch.Generator().manual_seed(seed)
    pages = torch.full((9, layout.page_columns), torch.nan, dtype=dtype)
    k, v = torch.randn(2, 2, 40, heads, dim, generator=generator).to(dtype)  # [2 layers, 40 tokens, H, D]
    slots, blocks = {}, iter((torch.randperm(8, generator=generator) + 1).tolist())
    for name, group in (("kept", layout.kept), ("rest", layout.rest)):
        tokens = 40 if name == "kept" else 2 * group.block
        table = torch.tensor([next(blocks) for _ in range(-(-tokens // group.block))])
        position = torch.arange(tokens)
        slots[name] = table[position // group.block] * group.block + position % group.block
        for layer in range(2):
            group.write(pages, layer, slots[name], k[layer, :tokens], v[layer, :tokens])
    whole = len(slots["rest"])
    for layer in range(2):
        kept_k, kept_v = read(layout.kept, pages, layer, slots["kept"], dim)
        rest_k, rest_v = read(layout.rest, pages, layer, slots["rest"], dim)
        some = keep[layer].any(-1)[:, None]
        assert torch.equal(kept_k, k[layer] * keep[layer])
        assert torch.equal(kept_v, v[layer] * some)
        assert torch.equal(kept_k[:whole] + rest_k, k[layer, :whole])
        assert torch.equal(kept_v[:whole] + rest_v, v[layer, :whole])
    assert pages[0].isnan().all()


def test_nothing_is_written_to_the_null_block():
    keep, layout = random_layout(1)
    pages = torch.zeros(3, layout.page_columns)
    tokens = torch.ones(4, 3, keep.shape[-1])
    for group in (layout.kept, layout.rest):
        group.write(pages, 0, torch.tensor([-1, 0, group.block - 1, group.block]), tokens, tokens)
    assert not pages[0].any()
    assert pages[1].any()


@pytest.mark.parametrize(
    ("keep", "block", "words"),
    [
        (torch.ones(1, 2, 16), 16, "prunes nothing"),
        (torch.zeros(1, 2, 16), 16, "every channel"),
        (torch.eye(16)[None], 24, "block_size=24"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(keep, block, words):
    with pytest.raises(ValueError, match=words):
        PageLayout.of(keep.bool(), block, 4, 4)


def test_pages_of_the_reference_mask_waste_little():
    mask = ChannelMask.load(ROOT / "leank_train/assets/reference/mask_70pct.safetensors")
    layout = PageLayout.of(mask.keep, 32, 16, 144)
    assert layout.kept.columns == 1408  # 1,376 channels and values; two layers are rounded up to 32 columns
    assert layout.rest.block == 16
    assert layout.page_columns == 32 * 1408
