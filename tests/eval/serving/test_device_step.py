"""A step on a GPU equals the step in plain PyTorch; in Triton's interpreter on a CPU, on the device with `-m gpu`."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leank.eval.serving.attention import attend
from leank.eval.serving.device_step import DeviceStep, decoding_first
from leank.eval.serving.layout import PageLayout
from leank.eval.serving.step import Step
from tests.helpers.served_pages import DEVICE, DTYPE, ON_GPU, a_mask, served

pytest.importorskip("triton")  # Linux only
from leank.eval.serving.paged import PagedAttention

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


def both(lengths, news, padding=0):
    """Outputs and pages of the plain step, and those of the step for a GPU."""
    layout, pages, tables, q, k, v = requests(lengths, news, padding)
    starts = [0, *torch.tensor(news).cumsum(0).tolist()]
    prompts = [length - new // 2 for length, new in zip(lengths, news, strict=True)]
    step = Step(layout, starts, lengths, prompts, *(table[: len(lengths)] for table in tables))
    plain, other = pages.clone(), pages.clone()
    for group, at in zip((layout.kept, layout.rest), step.slots, strict=True):
        group.write(plain, 0, at, k[: starts[-1]], v[: starts[-1]])
    want, got = torch.zeros_like(q), torch.zeros_like(q)
    attend(step, 0, plain, q, k, v, SCALE, want)

    starts += [starts[-1]] * padding
    decodes = decoding_first(starts, len(q))
    slots = [torch.cat([at, at.new_full((padding,), -1)]) for at in step.slots]
    others = None
    if decodes < len(lengths):
        behind = (table[decodes : len(lengths)] for table in tables)
        others = Step(layout, starts[decodes : len(lengths) + 1], lengths[decodes:], prompts[decodes:], *behind)
    count = torch.tensor([*lengths, *[0] * padding], dtype=torch.int32, device=DEVICE)
    device_step = DeviceStep(decodes, count, tuple(tables), tuple(slots), others)
    device_step.attend(PagedAttention(layout, DEVICE, 6, 8, 5), 0, other, q, k, v, SCALE, got)
    return (want, plain), (got, other)


@pytest.mark.parametrize(
    ("lengths", "news", "padding"),
    [([70, 33], [1, 1], 0), ([70, 3], [1, 1], 2), ([90, 40, 60, 41], [1, 1, 30, 1], 0), ([50], [20], 0)],
    ids=["decoding", "padded", "mixed", "a chunk alone"],
)
@pytest.mark.parametrize("where", ["here", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_step_for_a_gpu_is_the_plain_step(lengths, news, padding, where):
    (want, plain), (got, other) = both(lengths, news, padding)
    torch.testing.assert_close(other, plain, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=1e-2 if ON_GPU else 1e-5)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 2))
def test_requests_that_decode_are_counted_from_the_front(news, padding):
    starts = [0, *torch.tensor(news).cumsum(0).tolist()]
    tokens = starts[-1] + padding
    decodes = decoding_first(starts, tokens)
    assert all(b - a <= 1 for a, b in pairwise(starts[: decodes + 1]))
    assert decodes == min(len(news), tokens) or decodes == tokens or news[decodes] > 1
