"""The paged kernel against its slow form, and a GPU's step against the plain one: in Triton's interpreter on a CPU, on
the device with `-m gpu`."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.serving import attention
from leank.eval.serving.layout import PageLayout
from leank.eval.serving.paged import DeviceStep, PagedAttention, decoding_first
from leank.eval.serving.prefill import batches

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def a_mask(seed, layers=2, heads=3, dim=64):
    """[L, H, D] bool: random shares of the channels; a whole head, and some that keep none."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(layers, heads, dim, generator=generator) < torch.rand(layers, heads, 1, generator=generator)
    keep[torch.rand(layers, heads, generator=generator) < 0.3] = False
    keep[0, 0], keep[0, 1] = True, False  # a whole head and an empty one
    return keep


def served(layout, lengths, seed, spare=0, layers=2, heads=3):
    """(pages, kept table, rest table) of rows of random tokens, all other memory NaN.

    spare: tokens by which rows may be taken to be shorter.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = layout.kept, layout.rest
    longest = max(lengths)
    widths = [-(-longest // group.block) for group in groups]
    blocks = len(lengths) * sum(widths) + 1
    free = iter((torch.randperm(blocks - 1, generator=generator) + 1).tolist())
    pages = torch.full((blocks, layout.page_columns), torch.nan, dtype=DTYPE, device=DEVICE)
    k, v = torch.randn(2, layers, len(lengths), longest, heads, layout.head_dim, generator=generator).to(DEVICE, DTYPE)
    tables = [torch.zeros(len(lengths), width, dtype=torch.int32) for width in widths]
    for row, length in enumerate(lengths):
        position = torch.arange(length)
        whole = (position < layout.sink) | (position >= max(layout.sink, length - 1 - spare - layout.window))
        for group, table, stored in zip(groups, tables, (position, position[whole]), strict=True):
            for block in (stored // group.block).unique().tolist():
                table[row, block] = next(free)
            slots = table[row, stored // group.block].long() * group.block + stored % group.block
            for layer in range(layers):
                values = (x[layer, row, stored.to(DEVICE)] for x in (k, v))
                group.write(pages, layer, slots.to(DEVICE), *values)
    return pages, *(table.to(DEVICE) for table in tables)


pytest.importorskip("triton")  # Linux only


def plainly(layout, layer, pages, q, lengths, kept, rest, scaling):
    """What the kernel computes, by the plain step: every row of a length has one new position, its last."""
    starts = [0, *torch.tensor(lengths).clamp(max=1).cumsum(0).tolist()]
    step, out = attention.Step(layout, starts, lengths, lengths, kept, rest), torch.zeros_like(q)
    some = torch.tensor(lengths) > 0
    found = torch.empty_like(q[some])
    attention.attend(step, layer, pages, q[some], found, found, scaling, found)
    out[some] = found
    return out


def compare(seed, lengths, block, group, dim, programs, sizes=(4, 24), layout=None):
    layout = layout or PageLayout.of(a_mask(seed, dim=dim), block, *sizes)
    heads = len(layout.kept.layers[0])
    pages, kept, rest = served(layout, lengths, seed, heads=heads)
    paged = PagedAttention(layout, DEVICE, heads * group, len(lengths), programs)
    q = torch.randn(len(lengths), heads * group, dim, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)
    tokens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    for layer in range(2):
        want = plainly(layout, layer, pages, q, lengths, kept, rest, dim**-0.5)
        for _ in range(2):  # the counters are as before
            got = paged.attend(pages, layer, q, tokens, kept, rest, dim**-0.5)
            assert got.isfinite().all()
            torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=1e-2 if ON_GPU else 1e-5)


@settings(max_examples=3 if not ON_GPU else 10, derandomize=True)
@given(
    st.integers(0, 999),
    st.lists(st.integers(0, 120), min_size=1, max_size=2).filter(any),
    st.sampled_from([16, 32, 48]),
    st.integers(1, 16),
)
def test_the_kernel_is_the_reference(seed, lengths, block, programs):
    """Rows of any length, some shorter than the sink, some absent; memory that is not theirs is NaN."""
    compare(seed, lengths, block, 2, 64, programs)


@pytest.mark.parametrize("hits", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_heads_keep_all_or_nothing_is_read(rank, hits):
    """And pages of `rest` with as many tokens as fit."""
    keep = a_mask(5)
    keep[:, 0], keep[:, 1] = True, False
    compare(5, [100, 20], 16, 2, 64, 5, layout=PageLayout.of(keep, 16, 4, 24, hits, rank, 3))


@pytest.mark.gpu
@settings(max_examples=8, derandomize=True)
@given(
    st.integers(0, 999),
    st.lists(st.integers(0, 5000), min_size=1, max_size=6).filter(any),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([1, 4, 7, 16]),
    st.sampled_from([0, 7, 64]),
)
def test_the_kernel_is_the_reference_on_a_device(seed, lengths, block, group, programs):
    compare(seed, lengths, block, group, 128, programs, sizes=(100, 500))


@settings(max_examples=2 if not ON_GPU else 10, derandomize=True)
@given(st.integers(0, 999), st.sampled_from([16, 32]))
def test_new_tokens_are_written_as_the_layout_says(seed, block):
    layout = PageLayout.of(a_mask(seed), block, 4, 24)
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 5, 3, 64, generator=generator).to(DEVICE, DTYPE)
    slots = []
    for group, first in ((layout.kept, 1), (layout.rest, 4)):
        at = first * group.block + torch.randperm(3 * group.block, generator=generator)[:5]
        at[2] = 1  # of the null block
        slots.append(at.to(DEVICE))
    want, got = (torch.full((8, layout.page_columns), torch.nan, dtype=DTYPE, device=DEVICE) for _ in range(2))
    paged = PagedAttention(layout, DEVICE, 6, 1, 4)
    for layer in range(2):
        for group, at in zip((layout.kept, layout.rest), slots, strict=True):
            group.write(want, layer, at, k, v)
        paged.write(got, layer, k, v, *slots)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_what_the_kernel_cannot_read_is_refused():
    with pytest.raises(ValueError, match="channels, not 80"):
        PagedAttention(PageLayout.of(a_mask(0, dim=80), 16, 4, 24), DEVICE, 6, 1, 4)
    paged = PagedAttention(PageLayout.of(a_mask(0), 16, 4, 24), DEVICE, 6, 2, 4)
    q = torch.zeros(3, 6, 64, dtype=DTYPE, device=DEVICE)
    with pytest.raises(ValueError, match="3 rows at once are more than the 2"):
        paged.attend(q, 0, q, q, q, q, 1.0)


@pytest.mark.gpu
def test_a_captured_step_is_replayed_while_rows_grow():
    layout = PageLayout.of(a_mask(3, dim=128), 32, 64, 256)
    lengths = [700, 1500, 3000]
    pages, kept, rest = served(layout, lengths, 0, spare=250)
    paged = PagedAttention(layout, DEVICE, 12)
    q = torch.randn(3, 12, 128, device=DEVICE, dtype=DTYPE)
    tokens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    paged.attend(pages, 1, q, tokens, kept, rest, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged.attend(pages, 1, q, tokens, kept, rest, 0.1)
    for less in (250, 100, 1, 0):
        shorter = [length - less for length in lengths]
        tokens.copy_(torch.tensor(shorter))
        graph.replay()
        want = plainly(layout, 1, pages, q, shorter, kept, rest, 0.1)
        torch.testing.assert_close(out.float(), want.float(), rtol=0, atol=1e-2)


SCALE = 0.125


def requests(lengths, news, padding=0, seed=0):
    """(layout, pages, tables, q, k, v) of requests whose last `news` positions are new, and all others in pages."""
    layout = PageLayout.of(a_mask(seed), 32, 4, 24)
    pages, *tables = served(layout, lengths, seed, spare=max(news))
    tables = [torch.cat([table, table.new_zeros(padding, table.shape[1])]) for table in tables]
    generator = torch.Generator().manual_seed(seed)
    rows = sum(news) + padding
    k, v = torch.randn(2, rows, 3, 64, generator=generator).to(DEVICE, DTYPE)
    return layout, pages, tables, torch.randn(rows, 6, 64, generator=generator).to(DEVICE, DTYPE), k, v


def both(lengths, news, padding=0, generated=(), room=200):
    """Outputs and pages of the plain step, and those of the step for a GPU.

    generated: numbers of requests that compute a part of their reply again
    room: tokens of a batch of chunks
    """
    layout, pages, tables, q, k, v = requests(lengths, news, padding)
    starts = [0, *torch.tensor(news).cumsum(0).tolist()]
    prompts = [n - new // 2 if i in generated else n for i, (n, new) in enumerate(zip(lengths, news, strict=True))]
    step = attention.Step(layout, starts, lengths, prompts, *(table[: len(lengths)] for table in tables))
    plain, other = pages.clone(), pages.clone()
    for group, at in zip((layout.kept, layout.rest), step.slots, strict=True):
        group.write(plain, 0, at, k[: starts[-1]], v[: starts[-1]])
    want, got = torch.zeros_like(q), torch.zeros_like(q)
    attention.attend(step, 0, plain, q, k, v, SCALE, want)

    starts += [starts[-1]] * padding
    decodes = decoding_first(starts, len(q))
    slots = [torch.cat([at, at.new_full((padding,), -1)]) for at in step.slots]
    behind = range(decodes, len(lengths))
    again = [i for i in behind if lengths[i] > prompts[i]]
    others = [
        attention.Step(layout, starts[i : i + 2], [lengths[i]], [prompts[i]], *(table[i : i + 1] for table in tables))
        for i in again
    ]
    chunks = batches(layout, starts, lengths, [i for i in behind if i not in again], room, DEVICE)
    count = torch.tensor([*lengths, *[0] * padding], dtype=torch.int32, device=DEVICE)
    device_step = DeviceStep(decodes, count, tuple(tables), tuple(slots), chunks, others)
    device_step.attend(PagedAttention(layout, DEVICE, 6, 8, 5), 0, other, q, k, v, SCALE, got)
    return (want, plain), (got, other)


@pytest.mark.parametrize(
    ("lengths", "news", "padding", "generated"),
    [
        ([70, 33], [1, 1], 0, []),
        ([70, 3], [1, 1], 2, []),
        ([90, 40, 60, 41], [1, 1, 30, 1], 0, [2]),
        ([50], [20], 0, []),
        ([60, 9, 70, 45, 33], [1, 9, 30, 44, 3], 0, [3]),
        ([90, 3, 30, 28], [5, 2, 2, 28], 3, []),
    ],
    ids=["decoding", "padded", "mixed", "a chunk alone", "chunks of all kinds", "chunks behind short pasts"],
)
@pytest.mark.parametrize("where", ["here", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_step_for_a_gpu_is_the_plain_step(lengths, news, padding, generated, where):
    (want, plain), (got, other) = both(lengths, news, padding, generated)
    torch.testing.assert_close(other, plain, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=1e-2 if ON_GPU else 1e-5)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 2))
def test_requests_that_decode_are_counted_from_the_front(news, padding):
    starts = [0, *torch.tensor(news).cumsum(0).tolist()]
    tokens = starts[-1] + padding
    decodes = decoding_first(starts, tokens)
    assert all(b - a <= 1 for a, b in pairwise(starts[: decodes + 1]))
    assert decodes == min(len(news), tokens) or decodes == tokens or news[decodes] > 1
