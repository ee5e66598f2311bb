"""The pages over which the paged kernel is timed are those that a request holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")  # Linux only

from leank.eval.serving.layout import PageLayout
from scripts.bench.kernels.paged import rest_pages


@settings(max_examples=50, deadline=None)
@given(
    block=st.sampled_from([16, 48, 64]), sink=st.integers(0, 40), window=st.integers(1, 90), context=st.integers(1, 300)
)
def test_pages_of_the_rest_hold_sink_and_window(block, sink, window, context):
    layout = PageLayout.of(torch.eye(32, dtype=torch.bool)[None], block, sink, window)
    whole = [p for p in range(context) if p < sink or p >= context - 1 - window]  # the newest position is read, too
    assert rest_pages(layout, context) == sorted({p // layout.rest.block for p in whole})
