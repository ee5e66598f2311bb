"""A score that cannot show a method's effect is marked: nothing compressed, the dense token alone, broken logits."""

import copy
import logging
import math

import pytest
import torch

from leank.eval.inference.decode import decode
from leank.eval.inference.models import ModelConfig
from leank.eval.inference.prefill import prefill
from leank.eval.inference.prompts import Prompt
from leank.eval.methods import Method
from leank.eval.methods.bits.fp8 import FP8
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.channels.random import Random
from leank.eval.methods.prefill.asl import ASL
from leank.eval.methods.prefill.gemfilter import GemFilter
from leank.eval.methods.reads.quest import Quest
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.methods.tokens.streaming_llm import StreamingLLM
from leank.eval.report import write_report
from leank.eval.rows import Results, read
from leank.eval.run.job import Job
from leank.eval.run.replay import Replay, Settings, Warnings
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, tiny_model
from tests.helpers.replay_tools import NEW, SIZES, Letters, Two, methods, prompts, rows
from tests.helpers.report_rows import row, stored

CHOICES = [
    Random(0.5, 0), SnapKV(budget=12, queries=4), SnapKV(budget=400, queries=4), StreamingLLM(),
    Quest(budget=12, page=4, dense_layers=0),
    Quest(budget=400, page=4, dense_layers=0),
]  # fmt: skip


def method_of(choice, **sizes):
    axis = {Random: "channels", SnapKV: "tokens", StreamingLLM: "tokens", Quest: "reads"}[type(choice)]
    return Method("m", **{axis: choice}, **{**SIZES, **sizes})


def damaged(place, value):
    """A tiny model in which one row of a weight, by its dotted name, has that value."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.get_parameter(place)[3] = value
    return model


def answers(model, method, lengths, new=NEW, **settings):
    engine = Replay(model, Letters(), Settings(**settings))
    made = [Prompt(ids, len(ids) - 3) for ids in prompts(lengths)]
    ((_, found),) = engine.answers(made, rows(len(lengths), new), [method])
    return found


@pytest.mark.parametrize("lengths", [[40], [40, 12]], ids=str)
@pytest.mark.parametrize("choice", [GemFilter(budget=16), ASL(budget=16, window=4, two_pass=True)], ids=str)
def test_a_prefill_that_hands_fewer_tokens_to_every_layer_compresses(choice, lengths):
    found = answers(tiny_model("llama"), Method("m", prefill=choice, sink=0, window=60), lengths)
    assert [answer.compressed for answer in found] == [length > choice.budget for length in lengths]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("window", [6, 60])
@pytest.mark.parametrize("compress", ["after_question", "before_question"])
def test_a_method_that_compresses_nothing_says_so_and_gives_dense_logits(choice, window, compress):
    """What is called not compressed has the dense reply; what is called compressed holds or reads less."""
    if not hasattr(choice, "budget") or choice.budget > window:
        model, method = tiny_model("llama"), method_of(choice, window=window)
        dense = answers(model, Method("dense"), [40, 25], compress=compress)
        found = answers(model, method, [40, 25], compress=compress)
        assert [a.compressed for a in dense] == [None, None]
        for one, other in zip(found, dense, strict=True):
            assert one.compressed == (one.middle_tokens > 0 and getattr(choice, "budget", 0) != 400)
            if not one.compressed:
                assert one.tokens == other.tokens
        assert any(a.compressed for a in found) == (window == 6 and getattr(choice, "budget", 0) != 400)


@pytest.mark.parametrize(("budget", "compressed"), [(39, True), (40, False)])
def test_a_budget_of_reads_holds_sink_and_window_too(budget, compressed):
    method = method_of(Quest(budget=budget, page=1, dense_layers=0), sink=2, window=6)
    (found,) = answers(tiny_model("llama"), method, [40], new=2)
    assert (found.middle_tokens, found.compressed) == (32, compressed)


def test_tokens_that_leave_the_window_while_decoding_are_compressed():
    model, method = tiny_model("llama"), method_of(Random(0.5, 0), window=20)
    ((short,), (long,)) = (answers(model, method, [20], new=n) for n in (5, 30))
    assert (short.middle_tokens, short.compressed) == (0, False)
    assert (long.middle_tokens, long.compressed) == ((20 + 29 - 2 - 20) // 4 * 4, True)


def test_one_token_is_the_dense_one_unless_the_question_comes_later():
    model, method = tiny_model("llama"), method_of(Random(0.5, 0))
    assert [a.dense_only for a in answers(model, method, [40], new=1)] == [True]
    assert [a.dense_only for a in answers(model, method, [40], new=2)] == [False]
    assert [a.dense_only for a in answers(model, method, [40], new=1, compress="before_question")] == [False]


def test_rows_with_broken_logits_end_there_and_leave_the_others_alone():
    model, lengths = tiny_model("llama"), [40, 40, 25]
    healthy = answers(model, Method("dense"), lengths)
    token = next(
        t for t in healthy[1].tokens[3:] if t not in sum(prompts(lengths), healthy[0].tokens + healthy[2].tokens)
    )
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[token] = math.nan
    found, at = answers(broken, Method("dense"), lengths), healthy[1].tokens.index(token)
    assert [a.non_finite for a in found] == [None, at + 1, None]
    assert found[1].tokens == healthy[1].tokens[: at + 1]
    assert [a.tokens for a in found[::2]] == [a.tokens for a in healthy[::2]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_without_a_best_token_are_broken(value):
    model, (ids,) = tiny_model("llama"), prompts([40])
    dense = prefill(model, torch.tensor([ids]), None, NEW)
    logits = torch.full_like(dense.logits, value)
    assert decode(model, dense.fork(), logits, None, dense.lengths, [], [NEW], [0]) == ([[]], 0, [0])
    forbidden = dense.logits.clone()
    forbidden[:, :5] = -math.inf  # a model may forbid tokens
    assert decode(model, dense.fork(), forbidden, None, dense.lengths, [], [4], [0])[2] == [None]


@pytest.mark.parametrize("method", methods(), ids=lambda m: m.label)
def test_weights_that_are_infinite_break_every_sample_of_every_method(method):
    model = damaged("model.layers.0.self_attn.k_proj.weight", math.inf)
    assert [(a.non_finite, a.tokens) for a in answers(model, method, [40, 33])] == [(0, []), (0, [])]


class Words(Letters):
    def __call__(self, text, **options):
        return {"input_ids": prompts([40])[0], "offset_mapping": [(i, i + 1) for i in range(40)]}


def run(tmp_path, model, some):
    job = Job(ModelConfig(dtype="float32"), some, Two(), Settings(max_new_tokens=3))
    with Results(tmp_path) as results:
        job.run(results, model, Words())
    return list(read(tmp_path))


def test_a_run_stops_when_all_that_is_dense_is_broken(tmp_path):
    model = damaged("lm_head.weight", math.nan)
    wanted = r"^of 2 samples of the dense method so far, .* model\.dtype=float32: use model\.dtype=.* check the weights"
    with pytest.raises(ValueError, match=wanted):
        run(tmp_path, model, methods()[:2])
    found = list(read(tmp_path))
    assert [(r["non_finite"], r["score"], r["prediction"]) for r in found] == [(0, 0.0, "")] * 4


def test_a_run_says_once_per_method_and_cell_that_nothing_is_compressed(tmp_path, caplog):
    some = [Method("dense"), Method("short", LeanK(methods()[1].channels.mask), sink=2, window=60)]
    with caplog.at_level(logging.WARNING, "eval"):
        found = run(tmp_path, tiny_model("llama"), some)
    said = [r.getMessage() for r in caplog.records]
    assert [s.split(":")[0] for s in said] == ["short, a, 40 tokens", "short, b, 40 tokens"]
    assert "nothing is compressed in a prompt of 40 tokens, which sink=2 and window=60" in said[0]
    assert {(r["method"], r["middle_tokens"], r["compressed"]) for r in found} == {
        ("dense", None, None), ("short", 0, False)
    }  # fmt: skip


@pytest.mark.parametrize("lengths", [[40], [40, 23, 9]], ids=str)
@pytest.mark.parametrize("choice", [None, Random(0.5, 0)], ids=["whole", "pruned"])
def test_a_row_counts_the_numbers_that_saturate(lengths, choice):
    """Beside a count over the dense pass: of the middle, channels that are kept, each row's own."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(3000)
    ids, mask = left_padded(lengths, 0)
    dense = prefill(model, ids, mask, 8)
    keep = torch.ones(LAYERS, HEADS, DIM, dtype=torch.bool) if choice is None else choice.keep_mask(dense, model.config)
    want = [0] * len(lengths)
    for index, layer in enumerate(dense.layers):
        for i, length in enumerate(lengths):
            first = ids.shape[1] - length
            middle = slice(first + SIZES["sink"], max(first, ids.shape[1] - SIZES["window"]))
            k, v = (x[i, :, middle] for x in (layer.keys, layer.values))
            want[i] += int(((k.abs() > 448) & keep[index][:, None]).sum()) + int((v.abs() > 448).sum())
    made = [Prompt(one[real].tolist(), 5) for one, real in zip(ids, mask.bool(), strict=True)]
    method = Method("m", channels=choice, bits=FP8(), **SIZES)
    ((_, found),) = Replay(model, Letters(), Settings()).answers(made, rows(len(lengths)), [method])
    assert [answer.saturated for answer in found] == want
    assert want[0] > 0


def test_a_run_says_that_numbers_saturate_and_its_rows_how_many(tmp_path, caplog):
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e5)
    some = [Method("dense"), Method("eight", bits=FP8(), **SIZES), methods()[1]]
    with caplog.at_level(logging.WARNING, "eval"):
        found = run(tmp_path, model, some)
    said = [r.getMessage() for r in caplog.records if "numbers saturate" in r.getMessage()]
    assert [s.split(":")[0] for s in said] == ["eight, a, 40 tokens", "eight, b, 40 tokens"]
    assert all((r["saturated"] or 0) > 0 if r["method"] == "eight" else r["saturated"] is None for r in found)


def test_the_report_marks_such_cells(tmp_path):
    marked = {"middle_tokens": 0, "compressed": False, "dense_only": True, "non_finite": None}
    rows_ = [row("dense", i, 1.0, dense_only=True) for i in range(3)]
    rows_ += [row("leank", i, 1.0, **marked) for i in range(3)]
    rows_ += [row("think", i, 0.0, non_finite=2 if i else None) for i in range(3)]
    rows_ += [row("asl", i, 0.5, selected_layer=(-1, 4, -1)[i]) for i in range(3)]
    rows_ += [row("old", i, 1.0) for i in range(3)]
    write_report(stored(tmp_path, rows_))
    for name in ("summary.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "100.0†‡" in text
        assert "0.0§" in text
        assert "† Nothing was compressed" in text
        assert "(leank 3 of 3 samples of the marked cells)" in text
        assert "‡ The first token alone" in text
        assert "§ Logits were NaN or infinite; such a sample scores 0 (think 2 of 3 samples" in text
        assert "50.0¶" in text
        assert "¶ No layer was selected" in text
        assert "(asl 2 of 3 samples of the marked cells)" in text
        for plain in ("dense", "old"):
            assert not any(
                mark in line for line in text.split("\n") for mark in "†‡§¶" if line.startswith(f"| {plain} ")
            )
    assert "†‡" in (tmp_path / "tables.tex").read_text()
    assert ",dense_only,non_finite,not_selected," in (tmp_path / "cells.csv").read_text().split("\n")[0]


def test_a_run_goes_on_while_one_dense_sample_is_sound():
    said = Warnings()
    for broken in (0, None, 3):
        said.note(Method("dense"), "t", 9, None, False, broken, None)
    said.stop_if_broken("m", "auto")
    Warnings().stop_if_broken("m", "auto")
