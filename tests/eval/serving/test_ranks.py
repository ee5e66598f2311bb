"""Tensor parallelism: every rank has the pages of its KV heads, and vLLM sees equal sizes on all ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.serving.coded import CodedLayout, page_layout
from leank.eval.serving.layout import PageLayout, heads_of
from leank.eval.serving.plan import Server as Planner
from leank.mask import ChannelMask
from tests.helpers.layouts import layout
from tests.helpers.serving import Server

HEADS, GROUP, DIM = 4, 2, 32


def layouts(seed, coded, ranks, hits=True):
    """The layout of all heads, and those of the ranks."""
    if coded:
        bits = layout((1, HEADS, DIM), seed)
        make = lambda *of: CodedLayout.of(bits, 64, 64, 64, torch.float64, hits, *of)  # noqa: E731
    else:
        keep = torch.rand(1, HEADS, DIM, generator=torch.Generator().manual_seed(seed)) < 0.4
        keep[0, 0], keep[0, 1] = True, False  # alone on a rank of four, they prune nothing, or everything
        make = lambda *of: PageLayout.of(keep, 16, 4, 24, hits, *of)  # noqa: E731
    return make(), [make(rank, ranks) for rank in range(ranks)]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), coded=st.booleans(), ranks=st.sampled_from([1, 2, 4, 8]), hits=st.booleans())
def test_pages_of_all_ranks_have_the_size_of_the_widest(seed, coded, ranks, hits):
    whole, own = layouts(seed, coded, ranks, hits)
    assert len({(one.page_columns, one.kept.block, one.rest.block, one.hit) for one in own}) == 1
    kept = [one.kept.bytes if coded else one.kept.columns for one in own]
    of_page = kept[0] if coded else 16 * max(kept)
    assert own[0].page_columns >= (max(kept) // 8 if coded else of_page)
    if ranks == 1:
        assert own[0].page_columns == whole.page_columns
    seen = [head.channels.tolist() for one in own for head in one.kept.layers[0]]
    heads = [head.channels.tolist() for head in whole.kept.layers[0]]
    assert seen == [head for head in heads for _ in range(max(1, ranks // HEADS))]


@pytest.mark.parametrize("coded", [False, True], ids=["mask", "layout"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ranks_together_attend_as_one(coded, ranks):
    """A chunk, decoding, and a resumed request; every rank computes the query heads of its KV heads."""
    whole, own = layouts(7, coded, ranks)
    servers = [Server(one, 7) for one in (whole, *own)]
    draw, lengths = torch.Generator().manual_seed(1), [(300, 300), (300, 301), (300, 340), (17, 17), (17, 18)]
    held = {}
    for prompt, end in lengths:
        first = held.get(prompt, 0)
        k, v = torch.randn(2, end - first, HEADS, DIM, dtype=torch.float64, generator=draw)
        q = torch.randn(end - first, HEADS * GROUP, DIM, dtype=torch.float64, generator=draw)
        results = []
        for number, server in enumerate(servers):
            heads = slice(None) if not number else heads_of(HEADS, number - 1, ranks)
            mine = q.unflatten(1, (HEADS, GROUP))[:, heads].flatten(1, 2)
            results += server.step([(prompt, prompt, k[:, heads], v[:, heads], mine, end)], DIM**-0.5)
        held[prompt] = end
        for rank, found in enumerate(results[1:]):
            expected = results[0].unflatten(1, (HEADS, GROUP))[:, heads_of(HEADS, rank, ranks)].flatten(1, 2)
            torch.testing.assert_close(found, expected)


def test_ranks_that_do_not_divide_the_heads_are_refused():
    for ranks in (3, 6):
        with pytest.raises(ValueError, match=f"tensor-parallel-size={ranks} does not divide the model's 4 KV heads"):
            layouts(1, False, ranks)


def test_the_plan_of_ranks_is_that_of_the_widest():
    """Two ranks hold nearly twice the tokens in as much memory each; what the widest rank has more of is lost."""
    keep = torch.rand(2, HEADS, DIM, generator=torch.Generator().manual_seed(3)) < 0.3
    mask, one = ChannelMask(keep), Planner(2**24, longest=2048, step=2048, block=32, ranks=1)
    two = Planner(2**24, longest=2048, step=2048, block=32, ranks=2)
    assert two.stock(keep) == 2 * one.stock(keep)
    assert 1.6 < two.pruned(mask, 16, 64) / one.pruned(mask, 16, 64) <= 2.05
    both = [page_layout(mask, 32, 16, 64, torch.bfloat16, rank=rank, ranks=2).page_columns for rank in (0, 1)]
    assert both[0] == both[1]
