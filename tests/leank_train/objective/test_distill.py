"""Losses, the learning-rate factor and straight-through masks against loops and hand-made values."""

import math

import pytest
import torch

from leank_train.objective.distill import answer_rows, backward, l1_penalty, lr_factor, straight_through
from leank_train.objective.l2 import l2_loss


def test_losses_against_loops():
    full, scaled = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    lengths = [1, 4, 2]
    scaled[0, 1:] = math.nan  # padding must not matter
    scaled.requires_grad_()
    squares = [(full[r, t] - scaled[r, t]).square() for r in range(3) for t in range(lengths[r])]
    expected = {"official": sum(s.mean() for s in squares) / 7, "paper": sum(s.sum() for s in squares) / 3}
    for reduction, value in expected.items():
        loss = l2_loss(full, scaled, torch.tensor(lengths), reduction)
        torch.testing.assert_close(loss, value)
        assert torch.autograd.grad(loss, scaled)[0].isfinite().all()


def test_half_precision_is_compared_in_float32():
    full, scaled = torch.full((1, 1, 4), 256.0).bfloat16(), torch.full((1, 1, 4), 2.0).bfloat16()
    loss = l2_loss(full, scaled, torch.tensor([1]), "official")
    assert loss.dtype == torch.float32
    assert loss.item() == 254.0**2


def test_answer_rows_past_the_last_one_repeat_it():
    hidden = torch.arange(12.0).view(2, 6, 1)
    assert answer_rows(hidden, torch.tensor([2, 5]), 3)[..., 0].tolist() == [[2, 3, 4], [11, 11, 11]]


def test_bad_losses_are_named():
    zeros = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="loss is nan"):
        backward(l2_loss(zeros, zeros.clone().requires_grad_() * math.nan, torch.tensor([2]), "paper"))
    with pytest.raises(ValueError, match="loss is nan"):  # on a rank whose own is finite, too
        backward(torch.ones((), requires_grad=True), of_all=torch.tensor(math.nan))


def test_l1_and_learning_rate():
    alpha = torch.tensor([[[1.0, -2.0], [0.0, 3.0]]])
    assert l1_penalty(alpha, "mean").item() == 1.5
    assert l1_penalty(alpha, "sum").item() == 6.0
    factors = [lr_factor(s, 100, "official") for s in range(100)]
    assert factors[:3] == [0.1, 0.1, 0.15]
    assert factors[19:81] == [1.0] * 62
    assert factors[90] == 0.5
    assert factors[99] == 0.1
    assert {lr_factor(s, 100, "constant") for s in range(100)} == {1.0}


@pytest.mark.parametrize("variant", ["binary", "alpha_beta"])
def test_straight_through(variant):
    alpha = torch.tensor([[[0.3, 0.9, 0.1]]], requires_grad=True)
    beta = torch.tensor([[[True, True, False]]])
    value = straight_through(alpha, beta, variant)
    expected = torch.tensor([[[1.0, 1.0, 0.0]]]) if variant == "binary" else torch.tensor([[[0.3, 0.9, 0.0]]])
    assert torch.equal(value, expected)
    weights = torch.tensor([[[1.0, 2.0, 3.0]]])
    assert torch.equal(torch.autograd.grad((value * weights).sum(), alpha)[0], weights)
