"""LongBench v2, BABILong: their prompts and scores against the official code, and their files."""

import json

import pytest

from leank.eval.benchmarks.babilong import BabiLong
from leank.eval.benchmarks.from_files import checked
from leank.eval.benchmarks.longbench_v2 import LongBenchV2
from leank.eval.benchmarks.scoring import score_row
from leank.eval.inference.models import ModelConfig, load_config
from tests.helpers import parity
from tests.helpers.benchmark_lines import BABI, CONFIG, V2


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
