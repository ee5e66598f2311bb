"""What a report says of its rows: tables, differences, pairs, pictures, and how near methods are to dense."""

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import warnings
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from leank import stats
from leank.eval import published
from leank.eval.__main__ import command_line
from leank.eval.report import summarise, write_diff, write_report
from leank.eval.report.groups import changed, frame, labels, paired
from leank.eval.report.plots import FIGURES, axes_of, draw, front, order
from leank.eval.report.style import colours, png, svg
from leank.eval.report.summary import COLUMNS, summarise_groups
from leank.eval.report.tables import (
    Table,
    best_of_sizes,
    by_length,
    by_task,
    differences,
    from_dense,
    from_dense_by_length,
    gsm,
    overall,
    tables,
)
from tests.helpers.pictures import drawn
from tests.helpers.report_rows import checked, grid, row, stored


def adakv(length, budget, kernel=7):
    inner = {"name": "snapkv", "budget": budget, "kernel": kernel}
    tokens = {"name": "adakv", "budget": budget, "scores_of": inner}
    config = {"tokens": tokens, "window": 32, "matched": {"settings": ["tokens.budget"], "to": "leank"}}
    return row("adakv", 0, 1.0, length=length, config=config)


THINK = [row("think", 0, 0.5, config={"channels": {"name": "think", "ratio": ratio}}) for ratio in (0.6, 0.7)]
MOVED = {"tokens": {"name": "duo", "ratio": 0.7}, "matched": {"settings": ["tokens.ratio"], "to": "leank"}}
DUO = [row("duo", 0, 1.0, length=n, config=config)
       for n, config in ((4096, {"tokens": {"name": "duo", "ratio": 0.5}}), (8192, MOVED))]  # fmt: skip
EQUAL = [{**row(method, 0, 1.0), "config": "equal"} for method in "ab"]  # trainings whose masks came out equal


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (THINK, ["think (ratio=0.6)", "think (ratio=0.7)"]),
        ([adakv(4096, 1554), adakv(8192, 1404)], ["adakv"]),  # `match` moved the budget, and what follows it
        ([adakv(4096, 1554), adakv(8192, 1404, kernel=5)], ["adakv (kernel=7)", "adakv (kernel=5)"]),
        (DUO, ["duo"]),  # nothing was matched in the first cell
        (EQUAL, ["a", "b"]),
    ],
)
def test_a_method_of_several_settings_has_several_names(rows, names):
    assert list(dict.fromkeys(labels(rows).values())) == names
    assert frame(rows)["method"].value_counts(sort=False).to_dict() == dict.fromkeys(names, len(rows) // len(names))


@pytest.mark.parametrize("few", [None, "leank", "dense"])
def test_means_over_other_samples_are_said_to_be_so(few):
    """A run that was stopped: a method without the hard task has the best mean, and dense loses nothing to it."""
    scores = [
        (method, task) for method in ("dense", "leank") for task in ("vt", "cwe") if (method, task) != (few, "cwe")
    ]
    rows = [row(method, sample, float(task == "vt"), task) for method, task in scores for sample in range(3)]
    note = overall(summarise(rows)["runs"][0]).note
    assert (f"lack samples that others have ({few} 3 of 6)" in note) == (few is not None)
    assert ("lack samples" in note) == (few is not None)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of `grid`; who changes its files puts them back."""
    folder = stored(tmp_path_factory.mktemp("written"), grid())
    with drawn():
        write_report(folder)
    return folder


def test_means_differences_and_bytes():
    rows = grid()
    (run,) = summarise(rows)["runs"]

    def scores(method, task, length):
        mine = [r for r in rows if (r["method"], r["task"], r["length"]) == (method, task, length)]
        return np.array([100 * r["score"] for r in sorted(mine, key=lambda r: int(r["sample"]))])

    for cell in run["cells"]:
        mine = scores(cell["method"], cell["task"], cell["length"])
        assert cell["score"] == pytest.approx(mine.mean())
        assert cell["n"] == 12
        if cell["method"] == "dense":
            assert cell["difference"] is None
        else:
            base = scores("dense", cell["task"], cell["length"])
            assert cell["difference"] == pytest.approx((mine - base).mean())
            assert cell["share_of_dense"] == 25
    for cell in run["overall"]:
        every = [scores(cell["method"], t, n).mean() for t in ("vt", "niah_single_1") for n in (4096, 8192)]
        assert cell["score"] == pytest.approx(np.mean(every))
        assert cell["score_low"] < cell["score"] < cell["score_high"]


def test_the_best_of_every_size():
    """Sink and window take 30 of 100 bytes of dense; of the others the middle counts, with its scales and bounds."""
    rows = []
    for method, held, kl, score in (("small", 14, 0.2, 0.5), ("large", 28, 0.1, 0.4), ("dense", None, 0.0, 1.0)):
        for sample in range(3):
            one = row(method, sample, score, "vt")
            parts = {"sink": 10, "window": 20, "middle_k": 0, "middle_v": (held or 0) - 2, "extra": 2, "tables": 5}
            sizes = {"dense": 100} if held is None else parts
            one["cache_bytes"] = {**sizes, "total": sum(sizes.values())}
            near = {"tokens": 5, "kl": kl, "top1": 0.5, "loss": None, "dense_loss": None, "non_finite": None}
            rows.append(one | {"fidelity": None if held is None else near})
    (run,) = summarise(rows)["runs"]
    shares = {cell["method"]: cell["share_of_middle"] for cell in run["overall"]}
    assert shares == {"dense": None, "small": pytest.approx(20), "large": pytest.approx(40)}
    lines = {line[0]: list(line[1:]) for line in best_of_sizes(run).cells.to_numpy()}
    assert lines["15%"] == ["-", "", "", "-", "", ""]
    assert lines["20%"] == lines["31%"] == ["small", "0.2", "20%", "small", "50.0", "20%"]
    assert lines["40%"] == ["large", "0.1", "40%", "small", "50.0", "20%"]
    assert best_of_sizes(summarise([one for one in rows if one["method"] != "large"])["runs"][0]) is None


def test_learned_masks_are_compared_with_every_other_method():
    mask = {"channels": {"name": "leank", "mask": "x"}, "sink": 1}
    rows = [{**r, "settings": {**r["settings"], "method": mask}} if r["method"] == "leank" else r for r in grid()]
    rows = [r for r in rows if not (r["method"] == "think" and r["sample"] == "3")]
    (run,) = summarise(rows)["runs"]
    assert [(d["method"], d["minus"], d["n"]) for d in run["differences"]] == [
        ("leank", "dense", 48), ("leank", "think", 44),
    ]  # fmt: skip
    found = run["differences"][1]
    overall_leank = next(c for c in run["overall"] if c["method"] == "leank")
    for name in ("difference", "difference_low", "difference_high"):  # the same, wherever it stands
        assert run["differences"][0][name] == overall_leank[name]
    table = differences(run)
    assert list(table.cells) == ["minus", "leank"]
    assert list(table.cells["minus"]) == ["dense", "think"]
    assert table.cells["leank"][1].startswith(f"{found['difference']:+.1f} [")


def test_differences_are_paired_only_where_both_have_the_sample():
    rows = [row("dense", 0, 1.0), row("dense", 1, 0.0), row("leank", 1, 0.5), row("leank", 2, 1.0)]
    (run,) = summarise(rows)["runs"]
    found = run["overall"][1]
    assert (found["n"], found["pairs"], found["difference"]) == (2, 1, 50)
    assert run["differences"] == []  # as no method has a learned mask
    assert differences(run) is None


def test_two_seeds_are_other_samples():
    rows = [
        row(m, 0, score, seed=seed) for seed in (1, 2) for m, score in (("dense", seed - 1.0), ("leank", seed - 1.0))
    ]
    (run,) = summarise(rows)["runs"]
    assert run["overall"][1]["n"] == 2
    assert (run["overall"][1]["difference_low"], run["overall"][1]["difference_high"]) == (0, 0)


def test_what_a_method_keeps_stands_beside_its_name():
    """static_norm at its default of 70% beside a mask of 50%: the table says so."""
    rows = [row("leank", 0, 1.0, config={"channels": {"name": "leank", "pruning_ratio": 0.5}, "sink": 4}),
            row("other", 0, 1.0, config={"tokens": {"name": "snapkv", "budget": 256, "kernel": 7},
                                         "prefill": {"name": "asl", "budget": 512}})]  # fmt: skip
    cells = overall(summarise(rows)["runs"][0]).cells
    assert list(cells["settings"]) == ["pruning_ratio=0.5", "budget=256, prefill budget=512"]
    assert list(cells["prompt tokens"]) == ["4,066", "4,066"]


def test_other_settings_make_a_run_of_their_own():
    other = row("dense", 0, 1.0)
    other["settings"]["model"] = {"name": "m", "dtype": "bfloat16"}
    assert len(summarise([row("dense", 0, 1.0), other])["runs"]) == 2


def test_published_figures_stand_beside_ours():
    (run,) = summarise(grid())["runs"]
    table = by_length(run)
    lines = {line[0]: line for line in table.cells.to_numpy().tolist()}
    assert lines["LeanK 70% (LeanK, table 3)"] == ["LeanK 70% (LeanK, table 3)", "95.3", "93.4", "86.8"]
    assert "not the printed 62.8" in table.note
    lines = {line[0]: line for line in by_task(run, 4096).cells.to_numpy().tolist()}
    assert lines["ThinK 70% (LeanK, table 13)"][1:3] == ["23.6", "31.0"]
    assert overall(run).cells["of dense"][1] == "25%"


def test_gsm_infinite_by_op_and_area():
    accuracy = {2: 0.1429, 4: 0.1389, 6: 0.1508, 8: 0.1349, 10: 0.0516, 12: 0.0278}
    rows = [
        row("dense", f"{op}", value, "gsm_infinite", None, benchmark="gsm_infinite", metric="gsm_infinite",
            meta={"op": op, "d": 2, "length": "8k"}, prompt_tokens=9)
        for op, value in accuracy.items()
    ]  # fmt: skip
    (run,) = summarise(rows)["runs"]
    area, by_op = gsm(run)
    assert by_op.title == "GSM-Infinite medium 8K"
    lines = by_op.cells.to_numpy().tolist()
    assert lines[0] == ["dense", "0.1429", "0.1389", "0.1508", "0.1349", "0.0516", "0.0278", "0.5615"]
    assert lines[1][1:] == ["0.1429", "0.1389", "0.1508", "0.1349", "0.0516", "0.0278", "0.5615"]
    assert area.cells.to_numpy().tolist()[:2] == [["dense", "0.56"], ["dense (LeanK, table 4)", "0.56"]]


def test_published_averages_are_the_means_of_their_rows_but_for_the_errata():
    off = []
    for paper in published.PAPERS:
        for name, table in published.tables(paper).items():
            for entry in table["rows"]:
                assert entry["model"]
                assert len(entry["scores"]) == len(table["columns"])
                if None in (*entry["scores"], entry["average"]) or table["by"] == "op":
                    continue
                # as many decimals as are printed; IAP's table 1 is cut off after the first
                tolerance = {"4": 0.0061, "think": 0.0061, "iap1": 0.11, "iap2": 0.0061}
                within = tolerance.get(paper, tolerance.get(f"{paper}{name}", tolerance.get(name, 0.061)))
                if abs(np.mean(entry["scores"]) - entry["average"]) > within:
                    off.append((paper, name, entry["model"][:4], entry["method"]))
                    assert table["errata"]
    assert off == [
        ("leank", "2", "Qwen", "LeanK 70%"),
        ("leank", "3", "Qwen", "ThinK 70%"),
        ("leank", "13", "Llam", "ThinK 70%"),
        ("leank", "13", "Qwen", "LeanK 70%"),
        ("leank", "13", "Qwen", "dense"),
        ("leank", "17", "Llam", "ThinK 70%"),
        ("leank", "19", "Llam", "Double Sparsity 60%"),
        ("leank", "19", "Llam", "Double Sparsity 70%"),
        ("leank", "23", "Llam", "ThinK 70%, LeanK's budgets"),
        ("think", "2", "LLaM", "SnapKV, KV size 512"),
        ("think", "2", "LLaM", "SnapKV, KV size 2048"),
        ("think", "8", "Mist", "SnapKV, KV size 512"),
    ]
    for entry in published.tables()["14"]["rows"]:
        assert np.trapezoid(entry["scores"]) == pytest.approx(entry["average"], abs=6e-4)


def test_tables_of_a_paper_that_repeat_a_row_agree():
    found = {}
    for table in published.tables("think").values():
        for entry in table["rows"]:
            if len(entry["scores"]) == 16:
                found.setdefault((entry["model"], entry["method"]), []).append((entry["scores"], entry["average"]))
    twice = [rows for rows in found.values() if len(rows) > 1]
    assert len(twice) > 12
    for rows in twice:
        assert len({average for _, average in rows}) == 1
        for scores, _ in rows[1:]:  # one digit differs in some, as the errata say
            assert sum(a != b for a, b in zip(scores, rows[0][0], strict=True)) <= 2


def test_papers_are_found_by_model_and_benchmark():
    found = {f.label: f for f in published.find("longbench", "task", "meta-llama/Meta-Llama-3-8B-Instruct")}
    assert found["dense (ThinK, table 9)"].scores["repobench-p"] == 54.05
    assert found["SnapKV + IAP 50%, KV size 512 (IAP, table 1)"].scores["passage_count"] == 5.79
    assert len(found) == len({*found})
    (dense,) = (f for f in published.find("mmlu", "task", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B")
                if f.label.startswith("dense"))  # fmt: skip
    assert dense.scores["college_computer_science"] == 68
    labels = [f.label for f in published.find("ruler", "task", "Llama-3.1-8B-Instruct", length=65536)]
    assert len(labels) == len({*labels})
    assert labels.count("dense (LeanK, table 11)") + labels.count("dense (LeanK, table 13)") == 1
    lengths = [f.label for f in published.find("ruler", "length", "nvidia/Llama-3.1-Nemotron-8B-UltraLong-1M-Instruct")]
    assert "GemFilter, 2048 tokens (ASL, table 3)" in lengths


def test_the_page_is_whole_and_needs_nothing_else(written):
    page = (written / "report.html").read_text()
    ids = checked(page).ids
    assert len(ids) == len(set(ids))
    assert "<b>leank" not in page  # replies are text, never markup
    assert "&lt;b&gt;leank" in page
    assert "prefers-color-scheme: dark" in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) == 4
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "currentColor" in drawing
        assert "#010203" not in drawing
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', drawing)) <= set(re.findall(r'id="([^"]+)"', drawing))


def test_files_and_that_a_report_can_be_made_again(written, drawn):
    names = {"summary.json", "summary.md", "cells.csv", "tables.tex", "report.html", "results.jsonl",
             "accuracy_by_axes.png", "accuracy_by_length.png",
             "difference_from_dense.png", "accuracy_against_bytes.png"}  # fmt: skip
    assert {p.name for p in written.iterdir()} == names
    before = {p.name: p.read_bytes() for p in written.iterdir()}
    for name in names - {"results.jsonl"}:
        (written / name).unlink()
    write_report(written)
    assert {p.name: p.read_bytes() for p in written.iterdir()} == before


HOSTILE = ["a|b `c`\n# d <b>x</b> [y](javascript:z)", "a_b & c 50% #1 $\\bad{$ ~^"]


@pytest.fixture(params=HOSTILE)
def hostile(request, tmp_path):
    """The report of rows in which a benchmark, a task and a method have such a name."""
    name = request.param
    other = {"vt": name, "leank": name}
    rows = [{**r, **{key: other.get(r[key], r[key]) for key in ("task", "method")}, "benchmark": name} for r in grid()]
    with drawn():
        write_report(stored(tmp_path, rows))
    write_diff(tmp_path, "dense", name)
    return tmp_path


def test_names_from_data_are_text_in_every_file(hostile):
    with (hostile / "cells.csv").open(newline="") as file:
        head, *lines = csv.reader(file)
    assert {len(line) for line in lines} == {len(head)}
    page = MarkdownIt("gfm-like", {"linkify": False}).render((hostile / "summary.md").read_text())
    for table in re.findall("<table>.*?</table>", page, re.S):
        assert len({len(re.findall("<t[hd]", line)) for line in re.findall("<tr>.*?</tr>", table, re.S)}) == 1
    for file in hostile.glob("*.html"):
        checked(file.read_text())
        assert "<b>x" not in file.read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="apt install texlive-latex-recommended compiles tables")
def test_tables_of_any_names_compile(hostile):
    (hostile / "all.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs,graphicx}\\begin{document}\\input{tables}\\end{document}"
    )
    line = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all"]
    done = subprocess.run(line, cwd=hostile, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_papers_figures_stand_apart():
    text = Table.of("T", ["method", "a"], [["ours", "1.0"]], "Note.", published=[["theirs_", "2.0"]]).latex("about it")
    assert text.index(r"ours & 1.0 \\") < text.index(r"\textit{theirs\_} & \textit{2.0} \\")
    assert r"\caption{T. about it. Note.}" in text
    assert "resizebox" not in text
    assert "resizebox" in Table.of("T", [str(i) for i in range(9)], []).latex()


def test_no_rows_no_report(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        write_report(tmp_path)
    (tmp_path / "results.jsonl").touch()
    with pytest.raises(ValueError, match="holds no rows yet"):
        write_report(tmp_path)


@pytest.fixture
def folder(tmp_path):
    rows = [*grid(), row("dense", 99, 1.0), row("think", 98, 0.0)]  # two samples that only one method has
    rows[1] = {**rows[1], "prediction": "a ```fence``` & <script>", "score": 0.0}
    return stored(tmp_path, rows), rows


def test_pairs_are_the_samples_that_both_have(folder):
    _, rows = folder
    table = frame(rows)
    found = paired(table, "dense", "think")
    assert len(found) == 2 * 2 * 12
    score = {(r["method"], r["task"], r["length"], r["sample"]): 100 * r["score"] for r in rows}
    for line in found.itertuples():
        place = line.task, line.length, line.sample
        assert (line.score_first, line.score_second) == (score["dense", *place], score["think", *place])
    other = changed(table, "dense", "think")
    assert (other["score_second"] - other["score_first"]).is_monotonic_increasing
    assert len(other) == (found["prediction_first"] != found["prediction_second"]).sum()


def test_files_show_every_changed_reply_once(folder):
    path, rows = folder
    page, text = write_diff(path, "dense", "think")
    assert page.name == "diff_dense_think.html"
    of = changed(frame(rows), "dense", "think")
    shown = page.read_text()
    checked(shown)
    assert shown.count("<details>") == len(of)
    assert "<script>" not in shown
    markdown = page.with_suffix(".md").read_text()
    assert len(re.findall("^### ", markdown, re.M)) == len(of)
    assert "````text\na ```fence``` & <script>\n````" in markdown  # a longer fence than the reply's
    assert "| all samples | 48 |" in " ".join(text.split())


def test_difference_of_a_task_and_length_is_that_of_the_report(folder):
    path, rows = folder
    (run,) = summarise(rows)["runs"]
    _, text = write_diff(path, "dense", "leank")
    for cell in run["cells"]:
        if cell["method"] == "leank":
            line = next(x for x in text.splitlines() if x.startswith(f"| {cell['task']}, {cell['length']} tokens "))
            assert f"{cell['difference']:+.1f} [{cell['difference_low']:+.1f}, " in line


def test_command_line(folder, monkeypatch, capsys):
    path, _ = folder

    def typed(*words):
        monkeypatch.setattr(sys, "argv", ["eval", *words])
        command_line()

    typed("diff", str(path), "dense", "think")
    assert capsys.readouterr().out.rstrip().endswith("diff_dense_think.html")
    with pytest.raises(SystemExit, match="its methods are dense, leank, think"):
        typed("diff", str(path), "dense", "snapkv")
    with pytest.raises(SystemExit, match="dense and dense are the same method"):
        typed("diff", str(path), "dense", "dense")
    typed("report", str(path), "think")
    summary = json.loads((path / "summary.json").read_text())
    assert {d["method"] for d in summary["runs"][0]["differences"]} == {"think"}
    assert "## Methods minus other methods" in (path / "summary.md").read_text()
    with pytest.raises(SystemExit, match=r"no row in .* is of a method 'thin'; its methods are dense, leank"):
        typed("report", str(path), "thin")
    for words in (["report"], ["diff", "somewhere"]):
        with pytest.raises(SystemExit):
            typed(*words)
        assert "the following arguments are required" in capsys.readouterr().err


def test_a_run_without_dense_has_a_report(tmp_path):
    write_report(stored(tmp_path, [r for r in grid() if r["method"] != "dense"]))
    assert "Replies" not in (tmp_path / "report.html").read_text()


def rows_of(masks, others=2, samples=3, lengths=(1024,)):
    """Rows of dense, of so many learned masks and of so many other methods."""
    configs = {"dense": None}
    configs |= {f"leank_{i}": {"channels": {"name": "leank", "mask": str(i)}} for i in range(masks)}
    configs |= {f"think_{i}": {"channels": {"name": "think", "ratio": i / 100}} for i in range(others)}
    draw = np.random.default_rng(0)
    return [
        row(method, sample, float(draw.integers(0, 5)) / 4, task, length, config=config)
        for length in lengths for task in ("vt", "cwe")
        for method, config in configs.items() for sample in range(samples)
    ]  # fmt: skip


def test_a_few_masks_are_compared_unasked_and_many_where_they_are_named():
    (few,) = summarise(rows_of(COLUMNS))["runs"]
    assert differences(few).cells.shape[1] == COLUMNS + 1
    assert "not compared" not in overall(few).note
    rows = rows_of(COLUMNS + 1)
    (many,) = summarise(rows)["runs"]
    assert many["differences"] == []
    assert f"The {COLUMNS + 1} learned masks are compared with dense alone" in overall(many).note
    (named,) = summarise_groups([rows], columns=["think_1", "leank_3"])["runs"]
    table = differences(named)
    assert table.title == "Methods minus other methods"
    assert list(table.cells) == ["minus", "think_1", "leank_3"]
    assert len(table.cells) == COLUMNS + 4
    assert "not compared" not in overall(named).note
    (all_of,) = summarise_groups([rows], columns=["leank_0"])["runs"]
    assert differences(all_of).title == "Learned masks minus other methods"


def test_every_difference_is_that_of_the_plain_bootstrap():
    rows = rows_of(2, samples=7, lengths=(1024, 2048))
    (run,) = summarise(rows)["runs"]
    for found in run["differences"]:
        strata = []
        for length in (1024, 2048):
            for task in ("vt", "cwe"):
                mine, other = (
                    [r["score"] for r in rows if (r["method"], r["task"], r["length"]) == (m, task, length)]
                    for m in (found["method"], found["minus"])
                )
                strata.append([100 * (a - b) for a, b in zip(mine, other, strict=True)])
        assert (found["difference_low"], found["difference_high"]) == pytest.approx(stats.interval(strata), abs=1e-9)


def test_pictures_of_many_methods_of_equal_bytes_are_drawn(drawn):
    """More names than a legend has room for."""
    (run,) = summarise(rows_of(14, 14, samples=1, lengths=(1024, 2048)))["runs"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a layout that has no room for the names
        drawings = [png(figure) for name in FIGURES if (figure := draw(name, run)) is not None]
    assert [len(drawing) > 10_000 for drawing in drawings] == [True] * 4


COORDINATE = st.integers(0, 8).map(float)


def needle(method, length, depth, score, sample=0):
    return row(method, f"{length}-{depth}-{sample}", score, "niah", length, benchmark="niah", metric="niah_recall",
               meta={"depth_percent": depth})  # fmt: skip


def test_needle_grid_holds_the_mean_of_every_place():
    draw_ = np.random.default_rng(0)
    rows = [
        needle(method, length, depth, float(draw_.random()), sample)
        for method in ("dense", "leank") for length in (2048, 1024) for depth in (100, 0, 50) for sample in range(3)
        if (length, depth) != (2048, 50)
    ]  # fmt: skip
    (run,) = summarise(rows)["runs"]
    places = [(m["method"], m["length"], m["depth"]) for m in run["by_depth"]]
    assert places == [
        (method, length, depth)
        for method in ("dense", "leank") for length in (1024, 2048) for depth in (0, 50, 100)
        if (length, depth) != (2048, 50)
    ]  # fmt: skip
    for found, place in zip(run["by_depth"], places, strict=True):
        mine = [100 * r["score"] for r in rows if (r["method"], r["length"], r["meta"]["depth_percent"]) == place]
        assert found["score"] == pytest.approx(np.mean(mine))
    figure = draw("needle_by_depth", run)
    maps = [axes for axes in figure.axes if axes.get_title() in ("dense", "leank")]
    assert len(maps) == 2
    values = maps[0].collections[0].get_array()
    assert values.mask.tolist() == [[False, False], [False, True], [False, False]]
    assert maps[0].get_ylim() == (3, 0)  # the start of the text is above


@given(st.lists(st.tuples(COORDINATE, COORDINATE), min_size=1))
def test_front_is_what_no_other_beats(points):
    found = front(points)

    def beaten(point):
        return any(o != point and o[0] <= point[0] and o[1] >= point[1] for o in points)

    assert set(found) == {p for p in points if not beaten(p)}
    assert found == sorted(found)


def test_axes_in_words():
    assert axes_of({}) == "dense"
    combined = {"channels": {"name": "leank"}, "bits": {"name": "kivi", "bits": 2}, "sink": 4, "window": 32}
    assert axes_of(combined) == "channels + bits"
    assert axes_of({**combined, "matched": {"settings": ["channels.ratio"], "to": "leank"}}) == "channels + bits"


def test_names_do_not_cover_each_other():
    draw_ = np.random.default_rng(3)
    rows = [
        row(f"method_{m}" if m else "dense", s, float(draw_.random()), cache_bytes={"total": int(1000 * share)},
            config={"tokens": {"name": str(m)}} if m else None)
        for m, share in enumerate([1.0, *draw_.uniform(0.1, 0.4, 14)]) for s in range(4)
    ]  # fmt: skip
    (run,) = summarise(rows)["runs"]
    figure = draw("accuracy_by_axes", run)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for text in figure.axes[0].texts:
        text.update_positions(canvas.get_renderer())
    texts = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # without the line to its point
    assert len(texts) == 15
    for a, b in combinations(texts, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        up = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 0 or up <= 0.15 * min(a.height, b.height)


@pytest.mark.parametrize("name", list(FIGURES))
def test_the_same_rows_give_the_same_files(name, drawn):
    (run,) = summarise(grid())["runs"]
    twice = [draw(name, run) for _ in range(2)]
    drawn = not name.startswith(("needle", "kl_"))  # such rows have none of these
    assert [figure is not None for figure in twice] == [drawn, drawn]
    if drawn:  # PNG: a whole report is made twice above
        assert svg(twice[0], "a") == svg(twice[1], "a")


LEVEL = {"dense": 0.0, "leank": 1e-4, "think": 0.3}


def near(method, draw_, text=False):
    kl = LEVEL[method] * float(draw_.random())
    loss = 2 + float(draw_.random())
    return {
        "tokens": 30, "kl": kl, "top1": 1 - LEVEL[method] * float(draw_.random()),
        "loss": loss + LEVEL[method] if text else None, "dense_loss": loss if text else None, "non_finite": None,
    }  # fmt: skip


def rows(text=False):
    draw_ = np.random.default_rng(1)
    return [{**r, "fidelity": near(r["method"], draw_, text)} for r in grid()]


def lines(table):
    return table.cells.set_index("method", drop=False).to_dict("index")


def test_means_and_intervals_are_those_of_the_rows():
    made = rows()
    (run,) = summarise(made)["runs"]
    for cell in run["overall"]:
        strata = [
            [r["fidelity"]["kl"] for r in made if (r["method"], r["task"], r["length"]) == (cell["method"], task, n)]
            for task in ("vt", "niah_single_1") for n in (4096, 8192)
        ]  # fmt: skip
        assert cell["kl"] == pytest.approx(np.mean(strata))
        assert (cell["kl_low"], cell["kl_high"]) == pytest.approx(stats.interval(strata), rel=0.05)
        assert (cell["compared"], cell["tokens_compared"], cell["compared_non_finite"]) == (48, 48 * 30, 0)
        assert cell["loss"] is None
    table = lines(from_dense(run))
    assert table["dense"]["KL, nats a token"] == "0 [0, 0]"
    assert table["dense"]["top-1 agreement"] == "100.00% [100.00, 100.00]"
    assert "perplexity" not in table["dense"]
    assert set(lines(from_dense_by_length(run))["leank"]) == {"method", "4096", "8192"}


def test_texts_have_a_loss_paired_with_dense_and_a_perplexity():
    made = rows(text=True)
    (run,) = summarise(made)["runs"]
    think = next(c for c in run["overall"] if c["method"] == "think")
    ends = think["loss_minus_dense_low"], think["loss_minus_dense_high"]
    assert (think["loss_minus_dense"], *ends) == pytest.approx((0.3, 0.3, 0.3))  # paired: the texts' spread cancels
    line = lines(from_dense(run))["think"]
    assert line["loss minus dense"] == "+0.3 [+0.3, +0.3]"
    assert float(line["perplexity"]) == pytest.approx(math.exp(think["loss"]), rel=1e-3)


def test_samples_with_broken_logits_are_counted_and_left_out():
    made = rows()
    broken = {"tokens": 30, "kl": None, "top1": None, "loss": None, "dense_loss": None, "non_finite": 3}
    first = next(r for r in made if r["method"] == "think")
    first["fidelity"] = broken
    (run,) = summarise(made)["runs"]
    think = next(c for c in run["overall"] if c["method"] == "think")
    assert (think["compared"], think["compared_non_finite"]) == (48, 1)
    assert 0 < think["kl"] < 0.3
    table = from_dense(run)
    assert lines(table)["think"]["KL, nats a token"].endswith("]§")
    assert "§ Logits of the method or of dense were NaN or infinite" in table.note
    assert "think 1 of 48" in table.note
    for r in made:
        r["fidelity"] = broken if r["method"] == "think" else r["fidelity"]
    (run,) = summarise(made)["runs"]
    assert lines(from_dense(run))["think"]["KL, nats a token"] == "-§"
    assert draw("kl_by_length", run) is not None


def test_every_file_of_a_report_has_them(tmp_path):
    write_report(stored(tmp_path, rows(text=True)))
    for file in ("summary.md", "report.html", "tables.tex"):
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert "Distance from dense" in text
        assert "KL, nats a token" in text
    assert {"kl_by_length.png", "kl_against_bytes.png"} <= {file.name for file in tmp_path.iterdir()}
    with (tmp_path / "cells.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    summary = json.loads((tmp_path / "summary.json").read_text())
    for cell, line in zip(summary["runs"][0]["cells"], cells, strict=True):
        assert {name: line[name] for name in ("method", "task")} == {name: cell[name] for name in ("method", "task")}
        for name in ("kl", "loss_minus_dense"):
            assert float(line[name]) == pytest.approx(cell[name])
    text = " ".join(write_diff(tmp_path, "leank", "think")[1].split())
    assert "KL leank | KL think | KL difference | top-1 leank | top-1 think" in text
    top1 = {cell["method"]: cell["top1"] for cell in summary["runs"][0]["overall"]}
    assert f"| {top1['leank']:.2f}% | {top1['think']:.2f}% |" in text[text.index("all samples") :]


def test_rows_that_measured_none_have_a_report_without_them(written, tmp_path):
    old = grid()
    assert "Distance from dense" not in (written / "report.html").read_text(encoding="utf-8")
    assert "KL" not in write_diff(stored(tmp_path, old), "dense", "leank")[1]
    (run,) = summarise([*old, *({**r, "sample": f"{r['sample']}b"} for r in rows())])["runs"]
    assert next(c["compared"] for c in run["overall"] if c["method"] == "leank") == 48


def test_a_sample_done_with_and_without_counts_once_and_with():
    without = row("leank", 0, 1.0)
    settings = {**without["settings"], "fidelity": 64}
    measured = {**without, "config": "other", "settings": settings, "fidelity": near("leank", np.random.default_rng(0))}
    for rows in ([without, measured], [measured, without]):
        (run,) = summarise(rows)["runs"]
        assert [(c["method"], c["n"], c["compared"]) for c in run["overall"]] == [("leank", 1, 1)]


@pytest.mark.parametrize("count", [0, 1, 8, 9, 40])
def test_no_two_methods_have_one_colour(count):
    assert len({*colours(count)}) == count


def test_bytes_are_a_share_of_dense_too():
    (run,) = summarise(grid())["runs"]
    figure = draw("accuracy_against_bytes", run)
    (axes,) = figure.axes
    (above,) = axes.child_axes
    assert above.get_xlabel() == "of dense's bytes at 8,192 tokens"
    figure.draw_without_rendering()
    dense = next(c["cache_bytes"] for c in run["by_length"] if (c["method"], c["length"]) == ("dense", 8192))
    assert above._functions[0](dense / 2**20) == pytest.approx(100)


def test_a_report_of_texts_leads_with_the_distance_from_dense():
    far = {"tokens": 10, "kl": 0.1, "top1": 0.9, "loss": 2.0, "dense_loss": 1.9, "non_finite": None}
    rows = [
        row(method, sample, 0.5, "text", benchmark="text", fidelity=far if measured else None)
        for method in ("dense", "leank") for sample in range(3) for measured in [method != "dense"]
    ]  # fmt: skip
    (run,) = summarise(rows)["runs"]
    assert [table.title for table in tables(run)][:2] == ["Distance from dense", "Overall"]
    assert order(run)[0].startswith("kl_")
    (run,) = summarise(grid())["runs"]
    assert tables(run)[0].title == "Overall"
    assert order(run)[0] == "accuracy_by_length"
