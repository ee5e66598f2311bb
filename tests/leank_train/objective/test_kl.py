"""Distances of the objective against their slow forms, in any dtype and over any chunks."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from leank.head import Head, check_head
from leank_train.objective.distill import answer_rows, backward, l1_penalty, lr_factor, straight_through
from leank_train.objective.kl import kl_loss
from leank_train.objective.l2 import l2_loss
from tests.oracles.kl_loss import kl_loss_reference

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {}, "qwen3": {"tie_word_embeddings": True}, "mistral": {}, "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.0625}, "cohere2": {"logit_scale": 0.25},
    "phi": {}, "olmo2": {},
}  # fmt: skip


def family(name, **more):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**{**SIZES, **FAMILIES.get(name, {}), **more})
    model = AutoModelForCausalLM.from_config(config).double().eval().requires_grad_(False)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    return model


def heads():
    """Any combination of bias, factor and cap."""
    return st.tuples(st.booleans(), st.sampled_from([1.0, 0.125]), st.sampled_from([None, 2.0]))


@given(
    seed=st.integers(0, 2**16), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), of=heads(),
    reduction=st.sampled_from(["official", "paper"]), chunk=st.sampled_from([None, 1, 3]),
)  # fmt: skip
def test_equals_all_logits_at_once(seed, lengths, of, reduction, chunk):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    bias, factor, cap = of
    head = Head(normal(17, 6), normal(17) if bias else None, factor, cap)
    full, scaled = normal(2, len(lengths), 5, 6)
    for r, n in enumerate(lengths):
        full[r, n:] = scaled[r, n:] = math.nan  # padding must not matter
    found = []
    for function in (kl_loss, kl_loss_reference):
        leaf = scaled.clone().requires_grad_()
        loss = function(head, full, leaf, torch.tensor(lengths), reduction, chunk)
        found.append((loss, *torch.autograd.grad(3 * loss, leaf)))
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-12)
    assert found[0][0] > 0


def test_value_and_gradient_by_hand():
    full, scaled = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[math.log(3.0), 0.0]]], requires_grad=True)
    loss = kl_loss(Head(torch.eye(2)), full, scaled, torch.tensor([1]))
    torch.testing.assert_close(loss.item(), 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    torch.testing.assert_close(torch.autograd.grad(loss, scaled)[0], torch.tensor([[[0.25, -0.25]]]))


def test_alike_is_zero_without_a_gradient():
    hidden = torch.randn(2, 3, 4)
    leaf = hidden.clone().requires_grad_()
    loss = kl_loss(Head(torch.randn(9, 4)), hidden, leaf, torch.tensor([3, 2]))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, leaf)[0].abs().max() == 0
    assert not kl_loss(Head(torch.randn(9, 4)), hidden, hidden, torch.tensor([3, 2])).requires_grad


@pytest.mark.parametrize("apart", [0.0, 1e-6, 1e-4, 1e-2, 1.0, 50.0])
def test_float32_has_no_floor(apart):
    """Held-out losses of good masks are 1e-7 nats: rounding of the logits must not hide them, nor turn their sign."""
    generator = torch.Generator().manual_seed(0)
    weight, full, noise = (torch.randn(*s, generator=generator) for s in ((5000, 8), (1, 20, 8), (1, 20, 8)))
    scaled, lengths = full + apart * noise, torch.tensor([20])
    loss = kl_loss(Head(weight), full, scaled, lengths)
    exact = kl_loss_reference(Head(weight.double()), full.double(), scaled.double(), lengths)
    assert loss.dtype == torch.float32
    assert loss >= 0
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3, abs=1e-12)


@pytest.mark.parametrize("words", [50, 20_000])
def test_half_precision_is_compared_in_float32(words):
    """The logits of a bfloat16 head are float32 products of its rounded weights, in the gradient, too."""
    generator = torch.Generator().manual_seed(0)
    weight, full, scaled = (torch.randn(*s, generator=generator) for s in ((words, 8), (1, 3, 8), (1, 3, 8)))
    weight, full, scaled = weight.bfloat16(), full.bfloat16(), scaled.bfloat16()
    leaf, exact = scaled.clone().requires_grad_(), scaled.double().requires_grad_()
    loss = kl_loss(Head(weight), full, leaf, torch.tensor([3]))
    wanted = kl_loss_reference(Head(weight.double()), full.double(), exact, torch.tensor([3]))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-7)
    (ours,), (theirs,) = torch.autograd.grad(loss, leaf), torch.autograd.grad(wanted, exact)
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_are_those_of_the_models(name):
    model = family(name)
    check_head(model)
    check_head(model.bfloat16())
    model = model.double()
    ids = torch.arange(3, 11)[None]
    hidden = model.base_model(ids).last_hidden_state[0] * 4  # the cap of Gemma 2 is felt
    wanted = Head.of(model).logits(hidden)
    if name == "gemma2":
        assert wanted.abs().max() <= 3
    model.base_model.forward = lambda *args, **kwargs: type("Found", (dict,), {"__getattr__": lambda s, k: s.get(k)})(
        last_hidden_state=hidden[None]
    )
    torch.testing.assert_close(model(ids).logits[0], wanted)


def test_a_head_that_does_more_is_refused(monkeypatch):
    model = family("llama")
    forward = type(model).forward

    def doubled(self, **kwargs):
        found = forward(self, **kwargs)
        found.logits = found.logits + F.relu(found.logits)
        return found

    monkeypatch.setattr(type(model), "forward", doubled)
    with pytest.raises(ValueError, match=r"model=llama does more to its logits .* use objective=l2"):
        check_head(model)
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    with pytest.raises(ValueError, match=r"model=llama has no output head .* use objective=l2"):
        check_head(model)


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


def test_half_precision_is_distilled_in_float32():
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
