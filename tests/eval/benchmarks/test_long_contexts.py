"""LongBench v2, BABILong, NoLiMa, HELMET: their prompts and scores against the official code, and their files."""

import hashlib
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from leank.eval.benchmarks.babilong import BabiLong
from leank.eval.benchmarks.base import Row, score_row
from leank.eval.benchmarks.from_files import checked
from leank.eval.benchmarks.helmet import Helmet
from leank.eval.benchmarks.longbench_v2 import LongBenchV2
from leank.eval.benchmarks.nolima import RULES, NoLiMa
from leank.eval.inference.models import ModelConfig, load_config
from tests.helpers import parity
from tests.helpers.benchmark_lines import BABI, CONFIG, NEEDLE, V2, helmet_files


@pytest.fixture(scope="module")
def tokenizer():
    return load_config(ModelConfig())[1]


@pytest.mark.parametrize("given", parity.rows("longbench_v2"), ids=lambda given: given.get("reply", "prompt"))
def test_longbench_v2_is_the_official_one(given):
    if "prompt" in given:
        assert LongBenchV2().build("all", {**V2, **given}).prompt == given["prompt"]
        return
    for letter in "ABCD":
        row = LongBenchV2().build("all", {**V2, "answer": letter})
        assert score_row(row, given["reply"]) == (given["letter"] == letter)


@pytest.mark.parametrize("given", parity.rows("babilong"), ids=parity.label)
def test_babilong_is_the_official_one(given):
    row = BabiLong().build(f"{given['task']}_4k", {"input": "", **given})
    if "prompt" in given:
        assert row.prompt == given["prompt"]
    else:
        assert score_row(row, given["reply"]) == given["score"]


def test_babilong_strips_its_context_as_officially():
    row = BabiLong().build("qa1_4k", {**BABI, "input": " Mary went to the office.\n"})
    assert "<context>\nMary went to the office.\n</context>" in row.prompt


@pytest.mark.parametrize("array", [True, False])
def test_longbench_v2_is_divided_as_its_table(array, tmp_path):
    data = [{**V2, "_id": str(i), "length": n} for i, n in enumerate(("short", "long", "short", "medium"))]
    text = json.dumps(data, indent=1) if array else "\n".join(map(json.dumps, data))
    (tmp_path / ("data.json" if array else "longbench_v2.jsonl")).write_text(text)
    benchmark = LongBenchV2(str(tmp_path), tasks=["all", "short", "long", "hard"])
    found = {task: [line.data["_id"] for line in benchmark.lines(task)] for task in benchmark.wanted()}
    assert found == {"all": ["0", "1", "2", "3"], "short": ["0", "2"], "long": ["1"], "hard": []}
    with pytest.raises(ValueError, match="'e' is no part of LongBench v2"):
        LongBenchV2(tasks=["e"]).wanted()


def test_a_damaged_array_is_refused_by_name(tmp_path):
    file = tmp_path / "data.json"
    file.write_text(json.dumps([V2, {**V2, "answer": "E"}]))
    with pytest.raises(ValueError, match=r"data\.json, line 2: answer='E'"):
        list(checked(LongBenchV2(str(file)).lines("all"), LongBenchV2.schema))
    file.write_text(json.dumps([V2])[:-5])
    with pytest.raises(ValueError, match=r"data\.json cannot be read: it is no JSON"):
        LongBenchV2(str(file)).lines("all")


@pytest.mark.parametrize("file", ["qa2/4k.json", "qa2_4k.jsonl"])
def test_babilong_s_files(file, tmp_path, tokenizer):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("".join(json.dumps(BABI) + "\n" for _ in range(2)))
    benchmark = BabiLong(str(tmp_path), tasks=["qa2"], lengths=["4k"])
    benchmark.check(CONFIG, tokenizer, 0, None)
    (cell,) = benchmark.cells()
    assert (cell.task, cell.samples) == ("qa2_4k", ("0", "1"))
    with pytest.raises(ValueError, match=r"benchmark.lengths: BABILong has no '4K'"):
        BabiLong(lengths=["4K"]).wanted()
    with pytest.raises(ValueError, match="target='attic' is none of bathroom"):
        benchmark.build("qa2_4k", {**BABI, "target": "attic"})


def test_babilong_without_files_says_what_to_do(monkeypatch):
    import datasets

    def offline(*given, **named):
        assert (given, named) == (("RMT-team/babilong", "8k"), {"split": "qa3"})
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(FileNotFoundError, match=r"no network.*Pass path=<a folder with qa3/8k.json>"):
        list(BabiLong().lines("qa3_8k"))


BOOK = "".join(f"Line {i} of the book is here.\n" for i in range(200))


def nolima(folder, *needles, **settings):
    (folder / "book_1.txt").write_text(BOOK)
    (folder / "needle_set.json").write_text(json.dumps(needles or [NEEDLE]))
    return NoLiMa(str(folder), str(folder / "needle_set.json"), **{"lengths": [300], "depths": 5, **settings})


def test_nolima_s_needle_is_a_line_at_its_depth(tmp_path, tokenizer):
    """The characters are those that numpy's old generator draws from the official seed, one per depth."""
    benchmark = nolima(tmp_path)
    benchmark.check(CONFIG, tokenizer, 0, None)
    (cell,) = benchmark.cells()
    assert (cell.task, cell.samples) == ("onehop", tuple(f"0001_T1_onehop.0.{depth}" for depth in range(5)))
    draws = np.random.RandomState(43)
    for depth, sample in zip((0, 0.25, 0.5, 0.75, 1), cell.samples, strict=True):
        row = benchmark.row(cell, sample, tokenizer, 0)
        name = str(draws.choice(["Ada", "Bo", "Cy"]))
        assert (row.answers, row.preamble) == ([name], ({"role": "system", "content": "Be brief."},))
        assert row.question == "\nQuestion: Who has a fish?"
        haystack = row.context.removeprefix("Read:\n")
        before, after = haystack.split(f" {name} keeps a trout.\n")
        assert (before + "\n" if before else "") + after in BOOK or depth == 0  # of the first token no line is left
        tokens = len(tokenizer(before)["input_ids"])
        assert abs(tokens - depth * 300) <= 2
        assert abs(tokens + len(tokenizer(after)["input_ids"]) - 300) <= 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"distractors": {"onehop": "x"}}, "line 1: it has distractors"),
        ({"id": "abcd"}, "line 1: id='abcd' does not begin with four digits"),
        ({"task_template": "{question}"}, "line 1: its prompt '{question}' lacks {haystack}"),
        ({"needle": "Ada keeps a {1}."}, "line 1: test T1 has neither characters to draw nor gold_answers"),
        ({"tests": {}}, "line 1: tests={}: "),
    ],
)
def test_what_nolima_cannot_use_is_named(change, said, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=re.escape(said)):
        nolima(tmp_path, {**NEEDLE, **change}).check(CONFIG, tokenizer, 0, None)


def test_nolima_s_books_are_long_enough(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"book 1 has \d+ tokens, too few around 5000"):
        nolima(tmp_path, lengths=[5000]).check(CONFIG, tokenizer, 0, None)
    with pytest.raises(FileNotFoundError, match=r"benchmark\.books=None holds no \.txt; give the folder"):
        NoLiMa().check(CONFIG, tokenizer, 0, None)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        (" Ada\n", RULES),
        ("It is Ada.", ("contains", "lastline_contains")),
        ("Ada\nis it", ("contains",)),
        ("I think\nAda", ("contains", "lastline_contains", "lastline_EM")),
        ("ada", ()),
        ("", ()),
    ],
)
def test_nolima_s_rules(reply, right):
    for rule in RULES:
        assert score_row(Row("onehop", "0", "c", "q", ["Ada"], 8, f"nolima_{rule}"), reply) == (rule in right)


HELMET = parity.rows("helmet")


@pytest.mark.parametrize("given", HELMET[1:], ids=parity.label)
def test_helmet_is_the_official_one(given):
    """Prompts with the examples that the official seeds draw, and scores."""
    if "line" not in given:
        row = Row(given["task"], "", "c", "q", given["answers"], 8, "helmet_answer")
        score = score_row(
            replace(row, metric="helmet_label") if given["task"].startswith("trec") else row, given["reply"]
        )
        assert score == given["score"]
        return
    kind = "train" if given["task"].startswith("trec") else "demos"
    examples = {given["task"]: HELMET[0][kind]}
    row = Helmet(_examples=examples).build(given["task"], given["line"])
    if kind == "train":
        assert hashlib.sha256(row.prompt.encode()).hexdigest() == given["sha256"], row.prompt[-120:]
    else:
        assert row.prompt == given["prompt"]
        assert Helmet(_examples=examples, style="chat").build(given["task"], given["line"]).prompt == given["chat"]
    assert row.answers in (given["answer"], [given["answer"]])


def test_helmet_s_files(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match=r"benchmark\.path=null: give the folder of HELMET's unpacked"):
        Helmet().check(CONFIG, tokenizer, 0, None)
    helmet_files(tmp_path)
    Helmet(str(tmp_path), lengths=["8k"], tasks=["json_kv", "nq", "popqa", "trec_coarse"]).check(
        CONFIG, tokenizer, 0, None
    )
    few = tmp_path / "kilt" / "nq-train-multikilt_1000_k3_dep6.jsonl"
    few.write_text(few.read_text().split("\n")[0])
    with pytest.raises(ValueError, match="line 1: it is no sample of nq_8k: there are 1 examples for nq_8k, and 2"):
        Helmet(str(tmp_path), lengths=["8k"], tasks=["nq"]).check(CONFIG, tokenizer, 0, None)
    test = tmp_path / "icl" / "trec_coarse_test.jsonl"
    test.write_text(json.dumps({"text": "Who?", "label": 6}))
    with pytest.raises(ValueError, match="label=6 is none of the 6 of trec_coarse"):
        Helmet(str(tmp_path), lengths=["8k"], tasks=["trec_coarse"]).check(CONFIG, tokenizer, 0, None)
