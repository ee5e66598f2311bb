"""The names of tensors with NaN or infinity, by their ends and by a look at every number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leank.backbone import not_finite

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(TYPES),
            st.lists(st.floats(-6e4, 6e4) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=40),
        )
    )
)
def test_the_tensors_with_a_number_that_is_none(given_tensors):
    tensors = {}
    for number, (dtype, values) in enumerate(given_tensors):
        plain = torch.tensor(values, dtype=torch.float64)
        tensors[str(number)] = (plain if dtype.is_floating_point else torch.nan_to_num(plain, 0, 1, -1)).to(dtype)
    wanted = [name for name, tensor in tensors.items() if not all(map(math.isfinite, tensor.double().tolist()))]
    assert not_finite(tensors.items()) == wanted


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 70_000, -1])
def test_one_number_of_many(value, at):
    tensor = torch.randn(400, 251, generator=torch.Generator().manual_seed(0))
    tensor.view(-1)[at] = value
    assert not_finite([("a", torch.ones(3)), ("b", tensor.T), ("c", tensor.new_zeros(0))]) == ["b"]
