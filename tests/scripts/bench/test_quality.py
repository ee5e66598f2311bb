"""Tables of quality and the README's picture: what a line says, what it leaves out, and what is drawn of it."""

import csv
from xml.etree import ElementTree

import numpy as np
import pytest

from leank.eval.rows import Results
from scripts.bench.quality import by_ratio, by_ratio_and_task, by_turn, main, named, ratios_page, spread, widened
from tests import ROOT
from tests.helpers.report_rows import row


def rows(method, scores, task="a", kl=0.0, top1=1.0, size=4.0):
    """Rows of one method, a sample for each score."""
    near = {"tokens": 9, "kl": kl, "top1": top1, "loss": None, "dense_loss": None, "non_finite": None}
    return [
        {"task": task, "length": 1024, "sample": str(i), "seed": 1, "method": method, "score": score, "fidelity": near,
         "cache_bytes": {"total": size}} for i, score in enumerate(scores)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("kl_90_seed1", ("LeanK", "90", "1")),
        ("paper240_95_seed3", ("paper's objective", "95", "3")),
        ("think_0.85", ("ThinK", "85", "")),
        ("think_0.7", ("ThinK", "70", "")),
        ("iap_97pct", ("IAP", "97", "")),
        ("leank_70pct_seed2", ("LeanK", "70", "2")),
        ("nested_80pct_seed31", ("LeanK", "80", "31")),
        ("kl_90_seed1_cut_50pct", None),
        ("kl_80_r16_seed1", None),
        ("dense", None),
    ],
)
def test_names_say_what_a_method_is(method, wanted):
    assert named(method) == wanted


def test_seeds_are_averaged_per_sample_and_cells_count_alike():
    found = rows("dense", [1.0, 0.5]) + rows("dense", [1.0], "b")
    found += rows("kl_70_seed1", [1.0, 1.0], size=1.0) + rows("kl_70_seed1", [0.0], "b", size=1.0)
    found += rows("kl_70_seed2", [0.5, 0.5], size=2.0) + rows("kl_70_seed2", [1.0], "b", size=2.0)
    of, lacking = widened(found)
    dense, leank = by_ratio(of)
    assert (dense["label"], dense["recall"], dense["bytes"], lacking) == ("dense", 87.5, 1.0, [])
    assert "difference" not in dense
    assert (leank["ratio"], leank["seeds"], leank["samples"]) == ("70", 2, 3)
    assert (leank["recall"], leank["difference"]) == (62.5, -25.0)  # means of the cells 75 and 50
    assert (leank["difference_seed1"], leank["difference_seed2"]) == (-37.5, -12.5)
    assert leank["bytes"] == 1.5 / 4


def test_differences_are_paired():
    scores = np.random.default_rng(0).integers(0, 2, 200).astype(float)
    found = rows("dense", scores) + rows("think_0.7", scores) + rows("iap_0.7", [1 - scores[0], *scores[1:]])
    _, same, less = by_ratio(widened(found)[0])
    assert (same["difference"], same["difference_low"], same["difference_high"]) == (0, 0, 0)
    assert less["difference_high"] - less["difference_low"] < 3 < less["high"] - less["low"]


def test_kl_and_agreement_are_means_where_every_row_has_them():
    found = rows("dense", [1.0] * 2) + rows("think_0.9", [1.0] * 2, kl=None, top1=None)
    for seed in (1, 2):
        found += rows(f"kl_90_seed{seed}", [1.0] * 2, kl=0.5 * seed, top1=1 - 0.25 * seed)
    dense, leank, think = by_ratio(widened(found)[0])
    assert (dense["kl"], dense["top1"]) == (0, 100)
    assert [leank[name] for name in ("kl", "kl_low", "kl_high", "top1")] == [0.75, 0.75, 0.75, 62.5]
    assert "kl" not in think
    assert "0.75; 62.50%" in ratios_page([dense, leank, think])


def test_methods_that_lack_samples_are_left_out_and_named():
    found = rows("dense", [1.0] * 3) + rows("think_0.9", [0.5] * 2) + rows("kl_90_seed1", [1.0] * 3)
    of, lacking = widened([*found, *rows("kl_90_seed2", [0.0])])
    assert [(line["label"], line["seeds"]) for line in by_ratio(of)] == [("dense", 1), ("LeanK", 1)]
    assert lacking == ["think_0.9", "kl_90_seed2"]
    with pytest.raises(ValueError, match="dense"):
        widened(rows("think_0.9", [1.0]))


def test_methods_are_compared_with_leank_at_their_ratio():
    found = rows("dense", [1.0] * 4) + rows("l2steered_90_seed1", [1.0, 0.0, 0.0, 0.0])
    found += rows("kl_90_seed1", [1.0] * 4) + rows("kl_90_seed2", [0.0] * 4) + rows("think_0.8", [0.0] * 4)
    _, leank, steered, think = by_ratio(widened(found)[0])
    assert steered["minus_leank"] == -25.0
    assert "minus_leank" not in leank.keys() | think.keys()


def test_every_label_has_a_line_for_each_task():
    found = rows("dense", [1.0, 1.0]) + rows("dense", [0.0], "b")
    found += rows("kl_80_r16_seed1", [1.0, 0.0], size=1.0) + rows("kl_80_r16_seed1", [1.0], "b", size=3.0)
    lines = {(line["method"], line["task"]): line for line in by_ratio_and_task(widened(found)[0])}
    assert len(lines) == 6
    assert lines["kl_80_r16_seed1", "all"]["difference"] == 25.0  # means of the cells -50 and 100
    assert lines["kl_80_r16_seed1", "a"]["difference"] == -50.0
    assert (lines["kl_80_r16_seed1", "all"]["bytes"], lines["kl_80_r16_seed1", "b"]["bytes"]) == (0.5, 0.75)


@pytest.mark.parametrize("model", ["reference", "reference_mixed"])
def test_the_published_tables_say_of_how_many_samples_they_are(model):
    with (ROOT / "docs/results" / model / "recall.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["label"] for line in lines} >= {"dense", "LeanK", "ThinK", "IAP", "DuoAttention", "static norm"}
    assert len({line["samples"] for line in lines}) == 1
    for line in lines:
        if line["ratio"]:
            seeds = [float(v) for name, v in line.items() if name.startswith("difference_seed") and v]
            assert not seeds or float(line["difference"]) == pytest.approx(np.mean(seeds), abs=1e-4)


def turn(method, conversation, number, score, size, task="kv"):
    made = {**row(method, 0, score), "task": f"{task}_reuse", "sample": f"{conversation}.{number}"}
    return {**made, "meta": {"turn": number, "mode": "reuse"}, "cache_bytes": {"total": size}}


def test_a_conversation_is_one_sample():
    found = [turn("dense", c, n, 1.0, 100.0) for c in range(4) for n in (1, 2)]
    found += [turn("leank", c, n, float(c < 2), 40.0) for c in range(4) for n in (1, 2)]
    dense, _, leank, of_kv = by_turn(found)
    assert [dense[name] for name in ("task", "all", "low", "share of dense")] == ["all", 100, 100, 1]
    assert [leank[name] for name in ("turn 1", "turn 2", "all", "conversations")] == [50, 50, 50, 4]
    assert leank["share of dense"] == 0.4
    assert (leank["low"], leank["high"]) == (0, 100)  # of 4 conversations; 8 turns would give a narrower one
    assert of_kv == {**leank, "task": "kv"}


def test_tasks_count_alike_and_a_cache_without_dense_has_no_share():
    found = [turn("leank", 0, 1, 1.0, 40.0), *(turn("leank", c, 1, 0.0, 40.0, "passkey") for c in range(3))]
    whole = by_turn(found)[0]
    assert (whole["all"], whole["conversations"], whole["share of dense"]) == (50, 4, None)


def test_the_command_writes_a_table(tmp_path):
    with Results(tmp_path / "run") as results:
        results.append(turn("dense", 0, 1, 1.0, 100.0))
    main(["turns", str(tmp_path / "run"), "--out", str(tmp_path / "turns.csv")])
    with (tmp_path / "turns.csv").open() as file:
        assert [line["all"] for line in csv.DictReader(file)] == ["100.0", "100.0"]
    with pytest.raises(ValueError, match="no row is of benchmark=multi_turn"):
        by_turn([row("dense", 0, 1.0)])


@pytest.mark.parametrize("field", ["model", "benchmark"])
def test_rows_of_two_runs_are_refused(tmp_path, field):
    with Results(tmp_path / "run") as results:
        for one in (row("dense", 0, 1.0), {**row("dense", 1, 1.0), field: "another"}):
            results.append(one)
    with pytest.raises(ValueError, match=f"several values of '{field}'"):
        main(["ratios", str(tmp_path / "run"), "--out", str(tmp_path / "none.csv")])


def texts(file):
    return [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]


def test_labels_move_apart_and_keep_their_order():
    moved = spread([7.1, 99.0, 7.9, 11.9], 6)
    assert moved[0] < moved[2] < moved[3] < moved[1]
    assert moved[2] - moved[0] >= 5.999
    assert moved[3] - moved[2] >= 5.999
    assert moved[1] == pytest.approx(99)


def test_recall_over_ratios(tmp_path, drawn):
    lines = ["label,ratio,recall,low,high", "dense,,98.8,98.6,99.0"]
    lines += [f"{label},{ratio},{recall},{recall - 1},{recall + 1}" for label, recall in (("LeanK", 98), ("new", 40))
              for ratio in (50, 70, 95, 97)]  # fmt: skip
    (tmp_path / "recall.csv").write_text("\n".join(lines))
    main(["picture", str(tmp_path / "recall.csv"), "--out", str(tmp_path / "recall.svg")])
    found = texts(tmp_path / "recall.svg")
    assert {"dense 98.8%", "LeanK 98.0%", "new 40.0%", "50", "97"} <= set(found)
    assert "95" not in found  # no room beside 97


def test_tables_of_two_models_have_a_panel_each(tmp_path, drawn):
    files = [tmp_path / name / "recall.csv" for name in ("one", "two")]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(f"label,ratio,recall,low,high\ndense,,{90 + number},80,95\nLeanK,70,{60 + number},50,70\n")
    main(["picture", *map(str, files), "--out", str(tmp_path / "recall.svg")])
    wanted = {"model=one", "model=two", "dense 90.0%", "dense 91.0%", "LeanK 60.0%", "LeanK 61.0%"}
    assert wanted <= set(texts(tmp_path / "recall.svg"))


def test_kl_over_bytes(tmp_path, drawn):
    lines = ["method,budget,seed,bytes,kl", "dense,,,1.0,0", "kivi,,,0.38,0.03"]
    lines += [f"closed_form,{budget},{seed},{budget},{0.001 * seed}" for budget in (0.1, 0.2) for seed in (1, 2)]
    (tmp_path / "layouts.csv").write_text("\n".join(lines))
    main(["picture", str(tmp_path / "layouts.csv"), "--out", str(tmp_path / "kl.svg")])
    found = texts(tmp_path / "kl.svg")
    assert {"kivi", "closed form"} <= set(found)
    assert "dense" not in found
