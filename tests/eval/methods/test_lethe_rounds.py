"""Rounds of Lethe by the kernel against plain PyTorch: interpreted on a CPU, on the device with `-m gpu`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU

from leank.eval.methods.tokens.lethe import Lethe, Rounds  # isort: skip  (Triton, which the line above asks for)


def check(options, lengths, heads, different, sink, window, seed):
    """Rows of `lengths` tokens between sink and window, the last of which is not due; one head has no middle."""
    generator = torch.Generator().manual_seed(seed)
    middle = np.repeat(np.array(lengths)[:, None], heads, 1)
    middle[:, 1:2] = 0
    held = sink + np.array(lengths) + window
    scores = torch.randint(1, different + 1, (len(lengths), heads, int(held.max()) + 9), generator=generator) / 64
    scores[..., 0] *= 50  # so that there is something to break at
    for row, end in enumerate(held):
        scores[row, :, end:] = 0
    due = np.arange(max(1, len(lengths) - 1))
    slow, fast = (Rounds(options).begin(scores.to(DEVICE), held[:, None].repeat(heads, 1)) for _ in range(2))
    at = held[due], np.full(len(due), sink), np.full(len(due), window)
    stay, stays = slow._chosen(due, middle, *at)
    length = torch.tensor(middle, device=DEVICE)
    found = fast._launched(due, length, int(middle.max()), *at)
    own = torch.arange(stay.shape[-1], device=DEVICE) < length[..., None]
    assert torch.equal(found[0] & own, stay & own)
    assert found[1].tolist() == stays.tolist()
    assert fast.evict_at.tolist() == slow.evict_at.tolist()


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from([1.2, 3.0, 40.0]),
    st.sampled_from([0.0, 0.3, 0.8]),
    st.integers(2, 4),
    st.sampled_from(["text", "printed"]),
    st.sampled_from([0, 20, 45]),
    st.sampled_from([0.0, 0.3]),
    st.lists(st.integers(1, 60), min_size=1, max_size=2),
    st.integers(1, 3),
    st.sampled_from([1, 5, 10**6]),
    st.tuples(st.integers(0, 5), st.integers(1, 12)),
    st.integers(0, 99),
)
def test_rounds_of_any_settings_are_those_of_the_slow_form(
    tau, ratio, segments, reading, limit, least, lengths, heads, different, ends, seed
):
    options = Lethe(tau, ratio, segments, 0.9, evict_at=18, reading=reading, limit=limit, min_sparsity=least)
    check(options, lengths, heads, different, *ends, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [0, 1024])
@pytest.mark.parametrize("tau", [3.0, 400.0])
def test_on_the_device(limit, tau):
    check(Lethe(tau, 0.3, limit=limit), [1100, 1500, 40], 8, 1000, 4, 32, 0)
    check(Lethe(tau, 0.3, limit=limit), [20_000], 8, 1000, 4, 32, 0)
