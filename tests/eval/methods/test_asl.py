"""ASL: where it selects, what its rule gives for a model, and its two passes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leank.eval.__main__ import run as run_eval
from leank.eval.inference.prefill import pad_left
from leank.eval.methods.prefill import asl
from leank.eval.methods.prefill.asl import ASL, DEEP, few_layers
from leank.eval.methods.prefill.fastkv import FastKV
from leank.eval.methods.registry import choice
from leank.eval.report.summary import summarise
from leank.eval.rows.results import read
from tests.conftest import tiny_model
from tests.helpers.composed import evaluation
from tests.helpers.passes_by_hand import (
    CASES,
    LAYERS,
    LENGTH,
    ByHand,
    highest,
    model_of,
    run,
    slow_asl,
    window_attention,
)
from tests.helpers.replay_tools import prompts


@torch.no_grad()
def test_asl_two_pass_reads_what_one_pass_selects():
    one, two = ASL(24, 0.95, 4, 3, 2, 2), ASL(24, 0.95, 4, 3, 2, 2, two_pass=True)
    model, (prompt,) = model_of(), prompts([LENGTH], seed=5)
    selected = run(one, model, torch.tensor([prompt])).layers[-1].kept[0]
    again = ByHand(model, [prompt[i] for i in selected])
    found = run(two, model, torch.tensor([prompt]))
    assert found.columns == len(selected) == 24
    torch.testing.assert_close(found.logits, again.logits)


@torch.no_grad()
def test_asl_in_two_passes_reads_the_last_layers_choice_if_the_ranks_never_settle():
    method, model, (prompt,) = ASL(20, 1e-9, 4, 3, two_pass=True), model_of(), prompts([LENGTH], seed=5)
    kept = {}

    def select(index, queries, keys, attention):
        scores = window_attention(attention, 4, 3)
        kept[index] = highest(scores, 16) + list(range(LENGTH - 4, LENGTH))

    ByHand(model, prompt, select)
    again = ByHand(model, [prompt[i] for i in kept[LAYERS - 1]])
    found = run(method, model, torch.tensor([prompt]))
    assert (found.columns, found.selected_at) == (20, [-1])
    torch.testing.assert_close(found.logits, again.logits)


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 2])
@torch.no_grad()
def test_asl_selects_at_the_layer_that_it_is_given(layer):
    """Which is then FastKV's choice at that layer."""
    model, (prompt,) = model_of(), prompts([LENGTH], seed=5)
    ids = torch.tensor([prompt])
    asl, fastkv = ASL(20, None, 4, 3, layer=layer), FastKV(20, layer, 4, 3)
    found, expected = run(asl, model, ids), run(fastkv, model, ids)
    assert found.selected_at == [layer]
    assert torch.equal(found.logits, expected.logits)
    assert asl.kept_counts(model.config, LENGTH) == fastkv.kept_counts(model.config, LENGTH)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(2, (1, 2, 0.95)), (3, (1, 2, 0.95)), (7, (3, 2, 0.95)), (24, (8, 8, 0.3)), (28, (9, 8, 0.3)), (32, (10, 8, 0.3)),
     (80, (26, 8, 0.3))],
)  # fmt: skip
def test_asl_has_the_papers_settings_for_models_that_are_deep_enough(layers, expected):
    config = tiny_model("llama", num_hidden_layers=2).config
    config.num_hidden_layers = layers
    assert ASL().rule(config) == expected
    own = ASL(first=1, observed=3, threshold=0.5)
    assert own.rule(config) == (1, 3, 0.5)


@pytest.mark.parametrize("preset", ["asl", "asl_two_pass", "papers/asl", "papers/asl_full", "papers/asl_two_pass"])
@pytest.mark.parametrize("layers", [28, 32])
def test_presets_have_the_papers_settings_for_its_models(preset, layers):
    config = tiny_model("llama", num_hidden_layers=2).config
    config.num_hidden_layers = layers
    ((label, found),) = evaluation(f"method={preset}")["method"].items()
    asl = choice("prefill", found["prefill"], label)
    assert asl.rule(config) == (layers // 3, 8, 0.3)
    assert asl.budget == 2048


@pytest.mark.parametrize(("layers", "first"), [(2, None), (3, None), (4, 2), (4, 3), (7, None)])
def test_the_least_that_layers_get_is_said_of_every_layer(layers, first):
    """Below the first layer that can select, and where none can, all layers get the whole prompt."""
    config = tiny_model("llama", num_hidden_layers=2).config
    config.num_hidden_layers = layers
    selects = (few_layers(layers).first if first is None else first) + 1  # the first layer that can
    least, most = ASL(budget=64, first=first).kept_counts(config, 100)
    assert least == [100 if layer <= selects else 64 for layer in range(layers)]
    assert most == [100] * layers


@given(st.integers(2, DEEP - 1))
def test_the_rule_for_few_layers(layers):
    first, observed, threshold = few_layers(layers)
    assert 1 <= first < layers
    assert 2 <= observed <= 8
    assert 0.3 < threshold < 1
    if layers > 3:
        assert first + 1 >= observed, "all ranks that are compared at L_min are there"
        assert first + 1 <= layers - 2, "a layer above L_min can select, and has a layer above it"
    if layers > 2:
        assert threshold <= few_layers(layers - 1).threshold


def test_rows_of_another_rule_have_another_identity(monkeypatch):
    unset, forced = ASL(), ASL(layer=3)
    complete = ASL(first=2, observed=3, threshold=0.5)
    before = [choice.identity() for choice in (unset, forced, complete)]
    monkeypatch.setattr(asl, "few_layers", lambda layers: few_layers(layers)._replace(first=1))
    after = [choice.identity() for choice in (unset, forced, complete)]
    assert before[0] != after[0]
    assert before[1:] == after[1:]  # nothing of theirs follows from the rule


def test_it_selects_on_the_reference_model_and_rows_say_where(tmp_path):
    """At layer 4 or 5 of 7, by the ranks; the paper's own settings find none."""
    paper = "{name: asl, budget: 256, first: 2, observed: 8, threshold: 0.3}"
    settled = evaluation(
        "+experiment=reference_ruler", "method=[dense,asl,asl_two_pass]",
        f"+method.asl_paper.prefill={paper}", "+method.asl_paper.window=32", "match=0.43", "max_new_tokens=2",
        "benchmark.lengths=[1024]", "benchmark.tasks=[vt]", "benchmark.samples=1",
    )  # fmt: skip
    run_eval(settled, tmp_path)
    rows, found = list(read(tmp_path)), {}
    for row in rows:
        found.setdefault(row["method"], []).append(row["selected_layer"])
    assert set(found["asl"]) <= {4, 5}
    assert found == {"dense": [None], "asl": found["asl"], "asl_two_pass": found["asl"], "asl_paper": [-1]}
    (report,) = summarise(rows)["runs"]
    marked = {cell["method"]: cell["not_selected"] for cell in report["overall"]}
    assert marked == {label: int(label == "asl_paper") for label in found}


@torch.no_grad()
def test_a_pass_says_for_each_row_where_it_selected():
    method, model, rows = CASES["asl"][0], model_of("qwen3"), prompts((60, 41, 12), seed=5)
    ids, real = pad_left(rows, 0, "cpu")
    slow = [slow_asl(method) for _ in rows]
    for prompt, select in zip(rows[:2], slow, strict=False):
        ByHand(model, prompt, select)
    wanted = [select.state.get("done", -1) for select in slow]
    assert run(method, model, ids, real).selected_at == wanted
    assert len(set(wanted)) > 1


@torch.no_grad()
def test_one_pass_does_not_say_that_the_last_layer_selected():
    """No layer is above it, so nothing is dropped: such a row is as if the ranks had never settled."""
    model, ids = model_of(), torch.tensor(prompts([LENGTH] * 8, seed=5))
    one, two = (ASL(24, 0.99, 4, 3, 2, LAYERS - 2, two_pass=passes == 2) for passes in (1, 2))
    assert LAYERS - 1 in run(two, model, ids).selected_at
    assert run(one, model, ids).selected_at == [-1] * 8
