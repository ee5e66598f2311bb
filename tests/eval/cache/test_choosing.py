"""The tokens that stay, by the kernel against the slow form: in Triton's interpreter on a CPU, on the device with
`-m gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU

from leank.eval.cache.storage.kernels import choosing  # isort: skip  (Triton, which the line above asks for)
from leank.eval.cache.storage.eviction import largest


def check(ranked, lengths, count):
    length = torch.tensor(lengths, device=DEVICE)
    found = choosing.heaviest(ranked, length, count)
    own = torch.arange(ranked.shape[-1], device=DEVICE) < length[..., None]
    wanted = largest(ranked.masked_fill(~own, -torch.inf), count) & own
    assert torch.equal(found & own, wanted)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=8, derandomize=True)
@given(st.integers(1, 90), st.integers(0, 100), st.sampled_from([1, 3, 1000]), st.integers(0, 999))
def test_any_ranks_with_ties(tokens, count, different, seed):
    """Ranks of both signs, many of them equal; heads of unequal length; padding that must not be read as a rank."""
    generator = torch.Generator().manual_seed(seed)
    ranked = torch.randint(-different, different + 1, (2, 3, tokens), generator=generator) / 7
    lengths = torch.randint(0, tokens + 1, (2, 3), generator=generator).tolist()
    for row in range(2):
        for head in range(3):
            ranked[row, head, lengths[row][head] :] = torch.nan
    check(ranked, lengths, count)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
def test_blocks_and_strides(monkeypatch):
    monkeypatch.setattr(choosing, "BLOCK", 64)
    ranked = torch.randint(0, 9, (2, 1, 200), generator=torch.Generator().manual_seed(0)).float()
    check(ranked.expand(-1, 2, -1), [[150, 200], [64, 0]], 70)
    check(torch.tensor([[[0.0, -0.0, 0.0, 1e-45, -1e-45, torch.inf, -torch.inf]]]), [[7]], 4)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [70, 600, 5000, 33_000])
@pytest.mark.parametrize("different", [5, 10**9])
def test_on_the_device(tokens, different):
    ranked = (torch.randint(-different, different, (2, 4, tokens)) / 7).cuda()
    lengths = torch.randint(tokens // 2, tokens + 1, (2, 4)).tolist()
    for count in (0, 1, tokens // 3, tokens):
        check(ranked, lengths, count)
