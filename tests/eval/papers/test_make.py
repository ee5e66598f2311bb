"""python -m eval.papers from the command line to the page, on a tiny random model."""

import json
import re
import sys

import pytest

from leank.eval.papers.__main__ import listing, main, parser, run
from leank.eval.papers.analyses.selection_layers import SelectionLayers
from leank.eval.papers.item import Analysed, Contrast, EvalRun, Item
from leank.eval.papers.make import Made, Measured, Workshop
from leank.eval.papers.page import as_html, as_markdown
from leank.eval.papers.registry import ITEMS, find
from leank.eval.papers.steps import Options
from leank.eval.papers.verdicts import as_markdown as as_verdicts
from tests.helpers.tiny_run import save_model

LITTLE = ("benchmark.samples=1", "benchmark.tasks=[niah_multikey_2]", "benchmark.lengths=[512]", "max_new_tokens=2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


def little(model, *more):
    return (f"model.name={model}", "+model.device=cpu", *LITTLE, *more)


ONE = Item(
    "think:table9", "ThinK alone.", "It costs nothing.",
    here=(EvalRun(("+experiment=papers/here", "method=[dense,papers/think_alone]")),),
    claims=(Contrast("think_alone_0.4", "dense", "bytes", 1),),
)  # fmt: skip


def test_what_is_there_is_not_made_again(tmp_path, model):
    workshop = Workshop(tmp_path, Options(overrides=little(model)))
    assert workshop.make([ONE]) == {}
    rows = tmp_path / "rows" / "results.jsonl"
    whole = rows.read_bytes()
    assert len(whole.splitlines()) == 4
    rows.write_bytes(whole[:-40])  # killed while the last row was being written
    again = Workshop(tmp_path, Options(overrides=little(model)))
    (torn,) = again.collect([ONE])
    assert (torn.whole, len(torn.rows)) == (False, 3)
    assert again.make([ONE]) == {}
    assert rows.read_bytes()[: len(whole) - 400] == whole[: len(whole) - 400]
    (made,) = again.collect([ONE])
    assert (made.whole, len(made.rows)) == (True, 4)
    text = as_markdown(made)
    assert "| think_alone_0.6 | ratio=0.6 | 1 |" in " ".join(text.split())
    assert "n = 1. Not decided: it takes 10 samples." in text
    page = as_html([made], quick=False)
    assert "table 9" in page
    assert "ThinK, table 9" in page  # published


def test_an_item_that_fails_stops_no_other(tmp_path, model):
    wrong = Item("leank:fig1", "x", here=(EvalRun(("+experiment=papers/here", "method=[dense,no_such]")),))
    late = Item("leank:fig8", "x", here=(Analysed("kept_by_pair", {"samples": 0}, overrides=("mask=none.pth",)),))
    workshop = Workshop(tmp_path, Options(overrides=little(model)))
    failed = workshop.make([wrong, late, ONE])
    assert set(failed) == {"leank:fig1", "leank:fig8"}
    assert "no_such" in failed["leank:fig1"]
    assert "none.pth" in failed["leank:fig8"]
    assert [made.whole for made in workshop.collect([wrong, late, ONE])] == [False, False, True]


def test_a_figure_from_a_mask_alone(tmp_path, capsys):
    assert run(parser().parse_intermixed_args(["leank:fig7", "--html", f"--out={tmp_path}"])) == 0
    said = capsys.readouterr().out
    assert "kept share of the low-frequency half, difference, above 0: 0.441" in said  # the published mask: .53 and .09
    assert "The claim shows here." in said
    page = (tmp_path / "papers.html").read_text()
    assert page.count("<svg") == 2
    assert "LeanK, figure 7" in page
    assert not run(parser().parse_intermixed_args(["leank:fig7", f"--out={tmp_path}"]))
    assert len(list((tmp_path / "analyses").iterdir())) == 2
    verdicts = (tmp_path / "verdicts.md").read_text()
    assert "| leank:fig7 | kept share of the low-frequency half, difference, above 0 | 0.441 [" in verdicts


def test_showing_makes_nothing(tmp_path):
    assert not run(parser().parse_intermixed_args(["leank:fig7", "--show", f"--out={tmp_path}"]))
    assert not (tmp_path / "analyses").exists()
    assert "leank:fig7" not in (tmp_path / "verdicts.md").read_text()


def test_verdicts_answer_the_first_questions_first_and_name_a_comparison_once():
    rows = [{"measure": "whole_layers", "value": 5.0 if task == "niah_multikey_3" else 3.0, "task": task,
             "sample": sample, "threshold": 0.9, "layer": None}
            for task in ("niah_multikey_3", "niah_single_2") for sample in range(20)]  # fmt: skip
    measured = [Measured(SelectionLayers(), rows)]
    text = as_verdicts([Made(find(f"asl:fig{number}"), [], measured, whole=True) for number in (9, 10)])
    line = ("| asl:fig9 | layers of 7 that read all tokens at tau = 0.9, many similar keys over a single one, "
            "difference, above 0 | 2 [2, 2], n = 40 | shows |")  # fmt: skip
    first, _, every = text.partition("## Every comparison")
    assert "## ASL selects later on harder tasks (ASL)" in first
    assert line in " ".join(first.split())
    assert " ".join(every.split()).count("| shows |") == 1


def test_the_list_has_every_item_and_its_command():
    said = listing()
    assert all(f"\n{name} " in f"\n{said}" for name in ITEMS)
    assert "python -m scripts.bench.attention layers OUT" in said
    assert "+experiment=sweep_reference +sweep=lam" in said
    assert "98 items" in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["leank:fig7", "--jobs", "0"], "--jobs 0 makes nothing"),
     (["leank:fig99"], "leank:fig99 is no item; did you mean leank:fig9"), ([], "no item is named"),
     (["--paper", "duo"], "--paper duo is unknown")],
)  # fmt: skip
def test_mistakes_are_told_in_a_line(arguments, told, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["eval.papers", *arguments, f"--out={tmp_path}"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert told in str(stopped.value)


@pytest.mark.slow
def test_quick_items_from_end_to_end(tmp_path, model, capsys):
    names = ["think:table9", "iap:table4", "iap:fig1"]
    overrides = [f"model.name={model}", "+model.device=cpu", "max_new_tokens=4", "benchmark.samples=3"]
    arguments = [*names, "--quick", "--html", f"--out={tmp_path}", *overrides]
    assert run(parser().parse_intermixed_args(arguments)) == 0
    assert "3 of 3 items made" in capsys.readouterr().out
    page = (tmp_path / "papers.html").read_text()
    assert "IAP, table 4" in page
    assert 'class="verdict' in page
    stored = [json.loads(line) for line in (tmp_path / "rows" / "results.jsonl").read_text().splitlines()]
    assert {row["method"] for row in stored} >= {"dense", "think_alone_0.4", "snapkv_iap_recent_32_256"}
    assert (tmp_path / "items" / "iap_fig1.md").is_file()
    assert find("iap:fig1").here


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hydra.run.dir=x"], "hydra.run.dir=x is a setting of Hydra"),
        (["--out", "a\0b"], r"--out 'a\x00b' is no name of a folder"),
    ],
)
def test_arguments_that_mean_nothing_here_are_refused(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(said)):
        run(parser().parse_intermixed_args(["leank:fig9", *arguments]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "named"),
    [("+x=1", "x"), ("+model.x=1", "model.x"), ("+benchmark.x=1", "benchmark.x"), ("+cache.x=1", "x"),
     ("+method.dense.x=1", "x"), ("batch_size=-1", "batch_size"), ("x=1", "x=1")],
)  # fmt: skip
def test_an_analysis_refuses_overrides_that_no_run_knows(override, named, tmp_path):
    failed = Workshop(tmp_path, Options(overrides=(override,))).make([find("leank:fig9")])
    assert named in failed["leank:fig9"]
    assert "\n" not in failed["leank:fig9"]
    assert not list(tmp_path.glob("analyses/*"))


def test_an_override_that_hydra_cannot_read_is_shown(tmp_path):
    failed = Workshop(tmp_path, Options(overrides=("model=3",))).make([ONE])
    assert "model=3: Config group override" in failed[ONE.id]
