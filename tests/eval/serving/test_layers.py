"""Layers of full attention beside layers with a sliding window: rows of a mask, sizes of pages, tokens admitted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, LlamaConfig

from leank.eval.serving.coded import page_layout
from leank.eval.serving.layers import Layers
from leank.eval.serving.plan import Server
from leank.mask import ChannelMask
from tests.helpers.layouts import layout_mask

GEMMA_4B = Layers(tuple(range(5, 34, 6)), 29, 1024)  # of 4 KV heads with 256 channels


def test_the_layers_of_a_model_are_read_from_its_configuration():
    assert Layers.of(Gemma3TextConfig(num_hidden_layers=34, sliding_window=1024)) == GEMMA_4B
    assert Layers.of(LlamaConfig(num_hidden_layers=3)) == Layers((0, 1, 2))


def test_a_mask_has_the_rows_of_full_attention():
    mask, layers = layout_mask((6, 2, 64), 1), Layers((2, 5), 4, 48)
    mask = mask.with_means(torch.randn(6, 2, 64))
    rows = layers.mask(mask)
    for of_rows, of_all in (
        (rows.keep, mask.keep), (rows.mean_keys, mask.mean_keys), (rows.precision.key_bits, mask.precision.key_bits),
        (rows.precision.value_bits, mask.precision.value_bits),
    ):  # fmt: skip
        assert torch.equal(of_rows, of_all[[2, 5]])


@given(
    full=st.integers(1, 5), sliding=st.integers(1, 5), coded=st.booleans(), hits=st.booleans(),
    ranks=st.sampled_from([1, 2]), seed=st.integers(0, 9),
)  # fmt: skip
def test_pages_are_multiples_of_those_of_a_sliding_layer(full, sliding, coded, hits, ranks, seed):
    """The smallest that hold the mask's, so that vLLM changes the tokens of a sliding layer's pages, and not ours."""
    layers, shape = Layers(tuple(range(full)), sliding, 48), (full + sliding, 2, 64)
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    mask = layout_mask(shape, seed) if coded else ChannelMask.from_scores(scores, 0.5, 16, "exact")
    layout = page_layout(mask, 64, 64, 64, torch.float32, hits, 0, ranks, layers)
    alone = page_layout(layers.mask(mask), 64, 64, 64, torch.float32, hits, 0, ranks)
    other = layers.columns(mask.keep, 64, 0, ranks)
    assert other == 2 * 2 // ranks * 64 * 64
    times, remainder = divmod(layout.page_columns, other)
    assert remainder == 0
    assert alone.page_columns <= layout.page_columns
    assert layout.rest.block * layout.rest.columns <= layout.page_columns
    assert layout.hit == (64 * times if hits else 1)
    assert layout.kept.block == alone.kept.block == 64


@pytest.mark.parametrize(
    ("step", "stock", "pruned"), [(512, 651_730, 725_991), (2048, 534_857, 587_707), (8192, 311_450, 333_563)]
)
def test_the_tokens_of_sliding_layers_are_counted(step, stock, pruned):
    """As in vLLM's planner, which tests in vLLM hold this to: each holds its window and a step."""
    scores = torch.rand(34, 4, 256, generator=torch.Generator().manual_seed(0))
    mask, server = ChannelMask.from_scores(scores, 0.5, 16, "exact"), Server(2**34, longest=32768, step=step)
    assert server.stock(mask.keep, GEMMA_4B) == stock
    assert server.pruned(mask, 128, 1024, GEMMA_4B) == pruned
    assert pruned / stock < server.by_bytes(mask, 128, 1024, GEMMA_4B) < server.by_bytes(mask, 128, 1024)
