"""Objectives: distances against slow forms, in any dtype and over any chunks, and steered lambda."""

import json
import math
import re
from dataclasses import asdict
from itertools import pairwise, product
from unittest import TestCase

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from leank.head import Head, check_head
from leank.mask import ChannelMask
from leank_train.objective import steering
from leank_train.objective.distill import answer_rows, backward, l1_penalty, lr_factor, straight_through
from leank_train.objective.kl import kl_loss
from leank_train.objective.l2 import L2
from leank_train.objective.steering import Separation, learning_rate, steer, wanted_mean
from leank_train.settings import fingerprint
from leank_train.train import run
from tests.helpers.tiny_run import save_model, settings
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
        loss = L2(None, reduction).distance(full, scaled, torch.tensor(lengths))
        torch.testing.assert_close(loss, value)
        assert torch.autograd.grad(loss, scaled)[0].isfinite().all()


def test_half_precision_is_distilled_in_float32():
    full, scaled = torch.full((1, 1, 4), 256.0).bfloat16(), torch.full((1, 1, 4), 2.0).bfloat16()
    loss = L2(None, "official").distance(full, scaled, torch.tensor([1]))
    assert loss.dtype == torch.float32
    assert loss.item() == 254.0**2


def test_answer_rows_past_the_last_one_repeat_it():
    hidden = torch.arange(12.0).view(2, 6, 1)
    assert answer_rows(hidden, torch.tensor([2, 5]), 3)[..., 0].tolist() == [[2, 3, 4], [11, 11, 11]]


def test_bad_losses_are_named():
    zeros = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="loss is nan"):
        backward(L2(None, "paper").distance(zeros, zeros.clone().requires_grad_() * math.nan, torch.tensor([2])))
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


RECIPE = ["stage1=steered", "stage2=kl", "stage1.steps=6", "stage2.steps=3"]


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
    """A run of the new recipe that nothing has stopped, with masks at other ratios."""
    out = tmp_path_factory.mktemp("run")
    with TestCase().assertLogs("leank_train", "WARNING") as logged:
        run(settings(model_folder, *RECIPE, "extra_ratios=[0.5,0.9,0.9000001]"), out)
    told = "\n".join(logged.output)
    assert re.search(f"{re.escape(str(out))}: the cut at ratio=0.7 was arbitrary: .* raise stage1.steps", told)
    return out


@given(st.integers(1, 3000), st.floats(0, 0.99))
def test_the_wanted_mean_falls_in_a_line(steps, ratio):
    course = [wanted_mean(t, steps, ratio) for t in range(steps + 1)]
    assert course[0] == 1
    assert course[-1] == pytest.approx(1 - ratio)
    falls = [a - b for a, b in pairwise(course)]
    assert all(-1e-12 <= fall <= ratio / (0.6 * steps) + 1e-12 for fall in falls)


@given(st.integers(10, 3000))
def test_scores_can_travel_the_whole_way(steps):
    """At the learning rate of this number of steps, within the time in which the wanted mean falls."""
    assert learning_rate(steps) * 0.6 * steps > 1
    assert learning_rate(steps) >= learning_rate(steps + 1)
    assert 0 < steering.gain(steps + 1) <= steering.gain(steps)


def steered(steps, ratio, spread):
    """Stage 1 on a loss whose answer is known: mean(w * (1 - alpha)^2), noisy weights w from step to step.

    spread: standard deviation of log w over channels.

    Returns the means of alpha and lambda by step, and the scores and weights at the end.
    """
    generator = torch.Generator().manual_seed(int(10 * spread))
    weights = torch.exp(spread * torch.randn(1000, generator=generator) - 4)
    scores = torch.nn.Parameter(torch.ones(1000))
    adam = torch.optim.Adam([scores], betas=(steering.momentum(steps), 0.999))
    lam, means, lams = torch.tensor(steering.START), [1.0], [steering.START]
    for step in range(1, steps + 1):
        adam.param_groups[0]["lr"] = learning_rate(steps) * lr_factor(step - 1, steps, "official")
        noisy = weights * torch.exp(0.5 * torch.randn(1000, generator=generator))
        before = scores.detach().mean()
        scores.grad = lam / 1000 - 2 * noisy * (1 - scores.detach()) / 1000
        adam.step()
        scores.data.clamp_(0, 1)
        after = scores.detach().mean()
        steer(lam, before, after, step, steps, ratio)
        means.append(float(after))
        lams.append(float(lam))
    return means, lams, scores.detach(), weights


@pytest.mark.parametrize(
    ("steps", "ratio", "spread"),
    [*product([20, 25, 40, 100, 500], [0.5, 0.9, 0.97], [2.0, 3.0]), (2000, 0.9, 2.0), (2000, 0.97, 3.0)],
)
def test_the_mean_follows_its_line_for_any_number_of_steps(steps, ratio, spread):
    """It ends at 1 - ratio, does not swing about it, and the channels that matter most are on top."""
    means, lams, scores, weights = steered(steps, ratio, spread)
    offs = [mean - wanted_mean(t, steps, ratio) for t, mean in enumerate(means)]
    settled = round(0.8 * steps)
    assert max(map(abs, offs)) < 0.25
    assert max(map(abs, offs[settled:])) < 0.04
    assert abs(offs[-1]) < 0.01
    assert steering.LEAST < min(lams[settled:]) <= max(lams[settled:]) < steering.MOST
    assert Separation.of(scores, ratio).margin > 2 * steering.LEAST_MARGIN  # far from arbitrary
    kept = round(1000 * (1 - ratio))
    found = set(scores.topk(kept).indices.tolist()) & set(weights.topk(kept).indices.tolist())
    assert len(found) > 0.8 * kept


@given(st.integers(1, 3000))
def test_momentum_forgets_within_the_stage(steps):
    assert 0.5 <= steering.momentum(steps) <= steering.momentum(steps + 1) <= 0.9
    assert 1 / (1 - steering.momentum(steps)) <= max(2, steps / 10) + 1e-9
    assert steering.momentum(100) == 0.9


@given(st.floats(1e-4, 10), st.floats(0, 1), st.floats(0, 1), st.integers(1, 50), st.floats(0, 0.95))
def test_lambda_answers_the_mean_and_stays_in_its_limits(start, before, after, step, ratio):
    lam = torch.tensor(start)
    steer(lam, torch.tensor(before), torch.tensor(after), step, 50, ratio)
    offs = [mean - wanted_mean(t, 50, ratio) for mean, t in ((before, step - 1), (after, step))]
    assert steering.LEAST * 0.999 <= lam <= steering.MOST
    if offs[1] > max(offs[0], 1e-6):  # above its line, and further than before
        assert lam >= start * (1 - 1e-6)
    if offs[1] < min(offs[0], -1e-6):
        assert lam <= start * (1 + 1e-6)


def test_separation_of_scores_that_lie_apart_and_of_scores_that_do_not():
    apart = torch.cat([torch.ones(30), torch.zeros(70)]).view(1, 1, 100)
    assert Separation.of(apart, 0.7) == Separation(0.0, 1.0)
    assert Separation.of(apart, 0.7).warning(0.7) is None
    assert Separation.of(apart, 0.0).margin == 1.0
    alike = torch.full((1, 1, 100), 0.4)
    assert Separation.of(alike, 0.7) == Separation(1.0, 0.0)
    assert "100% of the scores ended between 0.1 and 0.9" in Separation.of(alike, 0.7).warning(0.7)
    assert "margin at the cut is 0.00" in Separation.of(torch.ones(1, 1, 100), 0.7).warning(0.7)
    assert "stage1.lam=auto" in Separation.of(alike, 0.7).warning(0.7)
    assert Separation.of(alike, 0.7).warning(0.7, steered=0.5).endswith("0.00; raise stage1.steps")
    stuck = Separation.of(torch.ones(1, 1, 100), 0.7).warning(0.7, steered=steering.MOST)
    assert "lambda stands at its limit of 10, too little against this loss: take stage1.objective=kl" in stuck
    few = torch.linspace(0, 1, 101).view(1, 1, 101)
    assert Separation.of(few, 0.9).margin == pytest.approx(0.1, abs=0.011)


def test_a_run_leaves_other_ratios_and_says_how_the_scores_separated(finished, model_folder):
    scores = load_file(finished / "alpha.safetensors")["stage1"]
    for ratio, name in ((0.5, "50"), (0.9, "90"), (0.9000001, "90.00001")):
        mask = ChannelMask.load(finished / f"masks/mask_{name}pct.safetensors")
        assert torch.equal(mask.keep, ChannelMask.from_scores(scores, ratio, 4, "exact").keep)
        assert mask.metadata["ratio"] == ratio
        assert abs(mask.pruning_ratio - ratio) <= 2 / 64
    found = json.loads((finished / "metrics.json").read_text())["separation"]
    assert found == asdict(Separation.of(scores, 0.7))
    assert fingerprint(settings(model_folder)) == fingerprint(settings(model_folder, "extra_ratios=[0.5]"))


def test_a_loss_that_outweighs_lambda_is_named(tmp_path, caplog):
    """Hidden states of some models are large, and so is their squared distance; then scores stay at 1."""
    folder = save_model(tmp_path / "model")
    large = LlamaForCausalLM.from_pretrained(folder)
    large.model.norm.weight.data.mul_(1e3)
    large.save_pretrained(folder)
    more = ["stage1.steps=20", "stage2.steps=0", "stage1.objective=l2"]
    run(settings(folder, *RECIPE, *more), tmp_path / "run")
    assert "the steered lambda stands at its limit of 10" in caplog.text


def test_lambda_is_recorded_and_moves(finished):
    steps = torch.load(finished / "checkpoints/stage1/done.ckpt", weights_only=True)["record"]["steps"]
    lams = [s["lam"] for s in steps]
    assert lams[0] == pytest.approx(steering.START)
    assert all(steering.LEAST <= lam <= steering.MOST for lam in lams)
    again = torch.tensor(steering.START)
    for t, (one, next_one) in enumerate(pairwise(steps), 1):  # each with the mean that it began with
        steer(again, torch.tensor(one["alpha_mean"]), torch.tensor(next_one["alpha_mean"]), t, 6, 0.7)
        assert float(again) == pytest.approx(next_one["lam"], rel=1e-5)
    assert lams[1] != lams[0]
    state = torch.load(finished / "checkpoints/stage1/last.ckpt", weights_only=True)["state_dict"]
    assert list(state) == ["alpha", "lam"]
