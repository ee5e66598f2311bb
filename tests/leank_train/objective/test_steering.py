"""Steered lambda: the rule, what a run keeps of it over stops and ranks, and how it says that a cut was arbitrary."""

import json
import re
from itertools import pairwise
from unittest import TestCase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from leank.mask import ChannelMask
from leank_train.objective import steering
from leank_train.objective.distill import lr_factor
from leank_train.objective.steering import Separation, learning_rate, steer, wanted_mean
from leank_train.settings import fingerprint
from leank_train.train import run
from tests.helpers.tiny_run import save_model, settings

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


@pytest.mark.parametrize("spread", [2.0, 3.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.97])
@pytest.mark.parametrize("steps", [20, 25, 40, 70, 100, 500, 2000])
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
    assert found == Separation.of(scores, 0.7).metrics
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
