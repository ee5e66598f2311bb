"""Reports come from rows alone, and their numbers are those of the rows."""

import csv
import re
import shutil
import subprocess
from xml.etree import ElementTree

import numpy as np
import pytest
from markdown_it import MarkdownIt

from leank import stats
from leank.eval import published
from leank.eval.report import summarise, write_diff, write_report
from leank.eval.report.groups import frame, labels
from leank.eval.report.tables import Table, by_length, by_task, differences, gsm, overall
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


@pytest.fixture
def written(tmp_path):
    write_report(stored(tmp_path, grid()))
    return tmp_path


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


def test_learned_masks_are_compared_with_every_other_method():
    mask = {"channels": {"name": "leank", "mask": "x"}, "sink": 1}
    rows = [{**r, "settings": {**r["settings"], "method": mask}} if r["method"] == "leank" else r for r in grid()]
    rows = [r for r in rows if not (r["method"] == "think" and r["sample"] == "3")]
    (run,) = summarise(rows)["runs"]
    assert [(d["method"], d["minus"], d["n"]) for d in run["differences"]] == [
        ("leank", "dense", 48), ("leank", "think", 44),
    ]  # fmt: skip
    strata = []
    for task in ("vt", "niah_single_1"):
        for length in (4096, 8192):
            leank, think = (
                {r["sample"]: r["score"] for r in rows if (r["method"], r["task"], r["length"]) == (m, task, length)}
                for m in ("leank", "think")
            )
            strata.append([100 * (leank[s] - think[s]) for s in think])
    found = run["differences"][1]
    assert found["difference"] == pytest.approx(np.mean([np.mean(s) for s in strata]))
    assert (found["difference_low"], found["difference_high"]) == pytest.approx(stats.interval(strata), abs=0.5)
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


def test_files_and_that_a_report_can_be_made_again(written):
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
    write_report(stored(tmp_path, [
        {**r, **{key: other.get(r[key], r[key]) for key in ("task", "method")}, "benchmark": name} for r in grid()
    ]))  # fmt: skip
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
