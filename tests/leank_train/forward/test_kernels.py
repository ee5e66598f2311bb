"""Which of the library's kernels a call gets, and that all give the same output."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from leank import kernels
from leank.eval.cache.attention.dense import CALLS_PER_PLAN
from leank_train.forward import branching


def test_named_kernels_come_first_and_others_follow(monkeypatch):
    q = torch.randn(1, 2, 5, 8)
    assert kernels.kernel_order("auto", q, 2) == []  # no GPU: the library's own order
    for name in kernels.KERNELS[2:]:
        order = kernels.kernel_order(name, q, 2)
        assert order[0].name.lower().startswith(name)
        assert len(order) == len(set(order)) == len(kernels.KERNELS) - 2
        with torch.nn.attention.sdpa_kernel(order, set_priority=True):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)

    class OnHopper:
        is_cuda, device = True, "cuda:0"

        def __init__(self, length):
            self.shape = (1, 32, length, 128)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for length, layers, first in ((4096, 32, "FLASH"), (8192, 32, "FLASH"), (16384, 32, "CUDNN"), (16384, 4, "FLASH")):
        assert kernels.kernel_order("auto", OnHopper(length), layers)[0] == getattr(SDPBackend, f"{first}_ATTENTION")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernels.kernel_order("auto", OnHopper(16384), 32) == []


@pytest.mark.parametrize("kernel", ["auto", "cudnn", "flash", "efficient", "math"])
def test_kernels_agree(kernel):
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    out = branching.PrefillPass(9, 1, kernel).attend(0, q, k, v, 0.3)
    logits = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(out, logits.softmax(-1) @ v.repeat_interleave(2, 1))


@given(st.integers(1, 8), st.integers(1, 64), st.sampled_from([64, 80, 128, 256]), st.integers(1, 2**17), st.data())
def test_cudnn_pays_from_a_number_of_operations_per_plan(batch, heads, dim, keys, data):
    """Training knows its layers; in an evaluation the break-even is a number of operations per call."""
    new = data.draw(st.one_of(st.just(keys), st.integers(1, keys)))
    q = torch.empty(()).expand(batch, heads, new, dim)
    seen = new * (2 * keys - new)  # twice the number of pairs that causal attention computes
    assert kernels.cudnn_pays(q, keys, CALLS_PER_PLAN) == (2 * batch * heads * dim * seen >= 5e11)
    for layers in (1, 28, 32, 80):
        whole = torch.empty(()).expand(batch, heads, keys, dim)
        assert kernels.cudnn_pays(whole, keys, layers) == (2 * layers * batch * heads * keys**2 * dim >= 42e12)
        everything = 4 * layers * batch * heads * new * keys * dim  # operations where every query sees every key
        part = torch.empty(()).expand(batch, heads, new, dim)
        assert kernels.cudnn_pays(part, keys, layers, causal=False) == (everything >= 42e12)
