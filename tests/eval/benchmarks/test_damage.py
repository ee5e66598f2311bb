"""Damaged benchmark files: one line that names file and line, before weights; nothing wrong is let through."""

import csv
import gzip
import json
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.benchmarks import from_files
from leank.eval.benchmarks.aime import Aime
from leank.eval.benchmarks.babilong import BabiLong
from leank.eval.benchmarks.base import score_row
from leank.eval.benchmarks.gpqa import CHOICES, Gpqa
from leank.eval.benchmarks.gsm_infinite import GsmInfinite
from leank.eval.benchmarks.infinitebench import InfiniteBench
from leank.eval.benchmarks.longbench import LongBench
from leank.eval.benchmarks.longbench_v2 import LongBenchV2
from leank.eval.benchmarks.longgenbench import LongGenBench
from leank.eval.benchmarks.math500 import Math500
from leank.eval.benchmarks.mmlu import Mmlu
from leank.eval.benchmarks.mrcr import Mrcr
from tests.helpers.benchmark_lines import (
    AIME,
    BABI,
    CHOICE,
    CONFIG,
    FIND,
    GPQA,
    GSM8K,
    MATH,
    MMLU,
    MRCR,
    NAMES,
    PASSKEY,
    QASPER,
    SUM,
    TREC,
    V2,
)

ALL_OPS = {"ops": None, "samples": None}

# benchmark -> how it is built, its file, a valid line, and the fields that it needs
CASES = {
    "qasper": (lambda p: LongBench(p, tasks=["qasper"]), "qasper.jsonl", QASPER, ("context", "input", "answers")),
    "trec": (lambda p: LongBench(p, tasks=["trec"]), "trec.jsonl", TREC,
             ("context", "input", "answers", "all_classes")),
    "passkey": (lambda p: InfiniteBench(p, tasks=["passkey"]), "passkey.jsonl", PASSKEY,
                ("context", "input", "answer")),
    "choice": (lambda p: InfiniteBench(p, tasks=["longbook_choice_eng"]), "longbook_choice_eng.jsonl", CHOICE,
               ("context", "input", "answer", "options")),
    "math_find": (lambda p: InfiniteBench(p, tasks=["math_find"]), "math_find.jsonl", FIND,
                  ("context", "input", "answer")),
    "math500": (Math500, "test.jsonl", MATH, ("problem", "answer")),
    "gsm": (lambda p: GsmInfinite(f"{p}/gsm.jsonl", **ALL_OPS), "gsm.jsonl", SUM,
            ("problem", "question", "template", "mode", "op", "answer")),
    "symbolic": (lambda p: GsmInfinite(f"{p}/gsm.jsonl", **ALL_OPS), "gsm.jsonl", NAMES,
                 ("problem", "question", "op", "answer_list")),
    "mmlu": (lambda p: Mmlu(p, tasks=["anatomy"], shots=0), "mmlu.jsonl", MMLU,
             ("split", "subject", "question", "choices", "answer")),
    "longbench_v2": (LongBenchV2, "longbench_v2.jsonl", V2, (*V2.keys() - {"domain", "_id"},)),
    "babilong": (lambda p: BabiLong(p, tasks=["qa2"], lengths=["4k"]), "qa2_4k.jsonl", BABI,
                 ("input", "question", "target")),
    "aime": (lambda p: Aime(p, tasks=["aime25"]), "aime25.jsonl", AIME, ("problem", "answer")),
    "gpqa": (Gpqa, "gpqa_diamond.jsonl", GPQA, ("Question", *CHOICES)),
    "mrcr": (lambda p: Mrcr(p, tasks=["2needle"]), "2needle.jsonl", MRCR,
             ("prompt", "answer", "random_string_to_prepend")),
    "longgenbench": (lambda p: LongGenBench(p, questions=1), "test.jsonl", GSM8K, ("question", "answer")),
}  # fmt: skip
WRONG = ["", "  \n", [], {}, [None], [""], [[]], ["a", 5], {"a": 1}, True, 1.5, -1, None, "mat", 10**40, [["Ada"]]]
# what is right although it stands here: one answer of math_find or MATH is any number or text, a text may be "mat"
RIGHT = {
    ("math500", "answer"): ["mat"],
    ("math_find", "answer"): [1.5, 10**40],
    ("gsm", "answer"): [-1, 10**40],
    ("gsm", "op"): [10**40],
    ("symbolic", "op"): [10**40],
    ("mmlu", "subject"): ["mat"],  # another subject's line
    **{("longbench_v2", f"choice_{letter}"): ["mat"] for letter in "ABCD"},
    **{("gpqa", name): ["mat"] for name in ("Question", *CHOICES)},
}
PROSE = {"context", "problem", "question"}


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def said_of(file, number, action):
    """Run what must be refused; the one line that names file and line, and says what to do."""
    with pytest.raises(ValueError, match="line") as caught:
        action()
    message = str(caught.value)
    assert message.startswith(f"{file}, line {number}: ")
    assert message.endswith(from_files.OWN)
    assert "\n" not in message
    return message


def check(name, folder, tokenizer):
    benchmark = CASES[name][0](str(folder))
    benchmark.check(CONFIG, tokenizer, 0, 8)
    return benchmark


def second(row):
    """A second sample beside it."""
    text = next(name for name in ("context", "problem", "question", "Question", "prompt") if name in row)
    names = {name: f"{row[name]}2" for name in ("_id", "id", "unique_id") if name in row}
    return {**row, **names, text: f"{row[text]} "}


@pytest.mark.parametrize("name", CASES)
def test_a_valid_file_passes(name, tmp_path, tokenizer):
    _, file, row, _ = CASES[name]
    write(tmp_path / file, [row, second(row)])
    (cell,) = check(name, tmp_path, tokenizer).cells()
    assert len(cell.samples) == 2


@settings(max_examples=150)
@given(data=st.data())
def test_one_damaged_field_is_named(data, tmp_path_factory, tokenizer):
    """A needed field that is missing or holds something else, in a line between two good ones."""
    name = data.draw(st.sampled_from(sorted(CASES)))
    _, file, row, needed = CASES[name]
    spoilt = data.draw(st.sampled_from(needed))
    right = [*RIGHT.get((name, spoilt), []), *(["mat"] if spoilt in PROSE or spoilt == "input" else [])]
    damage = data.draw(st.sampled_from(["gone", *(w for w in WRONG if w not in right)]))
    if name == "math_find" and damage == [] and spoilt == "answer":
        damage = ["17"]
    damaged = {k: v for k, v in row.items() if k != spoilt} if damage == "gone" else {**row, spoilt: damage}
    if spoilt == "answer":
        damaged.pop("solution", None)
    folder = tmp_path_factory.mktemp("damage")
    write(folder / file, [row, damaged, second(row)])
    said_of(folder / file, 2, lambda: check(name, folder, tokenizer))


@settings(max_examples=60)
@given(cut=st.data())
def test_a_file_cut_or_spoilt_anywhere_loses_no_line_in_silence(cut, tmp_path_factory, tokenizer):
    """Either all lines are read as they were, or the file is refused in one line that names it."""
    folder = tmp_path_factory.mktemp("cut")
    file = folder / "qasper.jsonl.gz"
    whole = gzip.compress("".join(json.dumps({**QASPER, "_id": str(i)}) + "\n" for i in range(20)).encode(), mtime=0)
    at = cut.draw(st.integers(1, len(whole) - 1))
    spoilt = whole[:at] if cut.draw(st.booleans()) else whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :]
    file.write_bytes(spoilt)
    try:
        (cell,) = check("qasper", folder, tokenizer).cells()
        outcome = f"{len(cell.samples)} lines"
    except ValueError as error:
        outcome = str(error)
    assert outcome == "20 lines" or outcome.startswith(str(file))
    assert "\n" not in outcome


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[" * 100_000, "it is no JSON (recursion limit"),
        (b'{"context": "\xff"}', "it is no JSON (invalid unicode"),
        (b'["context"]', "valid dictionary"),
        (b"null", "valid dictionary"),
        (b'{"context": NaN}', "it is no JSON"),
        (b'{"context": "\\ud800"}', "it is no JSON"),
        (b'{"context": ', "it is no JSON (EOF"),
    ],
)
def test_what_is_no_line_is_named(line, said, tmp_path, tokenizer):
    for name in ("qasper", "gsm"):
        file, row = tmp_path / CASES[name][1], CASES[name][2]
        file.write_bytes(json.dumps(row).encode() + b"\n\n" + line + b"\n")
        assert said in said_of(file, 3, lambda name=name: check(name, tmp_path, tokenizer))


@pytest.mark.parametrize("name", ["qasper", "passkey", "math500", "gsm"])
def test_a_sample_that_stands_twice_is_named(name, tmp_path, tokenizer):
    _, file, row, _ = CASES[name]
    write(tmp_path / file, [row, second(row), row])
    assert "as in line 1" in said_of(tmp_path / file, 3, lambda: check(name, tmp_path, tokenizer))


@pytest.mark.parametrize("name", ["qasper", "gsm", "math500"])
def test_lines_end_at_newlines_alone(name, tmp_path, tokenizer):
    """JSON may hold U+2028 and its kin; a line may end in CR LF, a file begin with a byte order mark."""
    _, file, row, _ = CASES[name]
    text = "context" if "context" in row else "problem"
    row = {**row, text: "one\u2028two\u2029three\x85four"}
    (tmp_path / file).write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n")
    benchmark = check(name, tmp_path, tokenizer)
    (cell,) = benchmark.cells()
    assert row[text] in benchmark.row(cell, cell.samples[0], tokenizer, 0).prompt


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qasper", {"dataset": "trec"}, "which is not the task 'qasper'"),
        ("qasper", {"answers": ["The.", "a"]}, "its own answer"),  # articles and punctuation are no words
        ("trec", {"all_classes": None}, 'trec needs "all_classes"'),
        ("trec", {"answers": ["Animal"]}, "its own answer"),
        ("passkey", {"answer": [71432]}, "its own answer [71432] scores 0"),
        ("passkey", {"answer": "no digits"}, "its own answer"),
        ("choice", {"options": ["Ada", "Ada", "Cy", "Di"]}, "not one of the four options"),
        ("choice", {"answer": ["Ada", "C"]}, "not one of the four options"),
        ("choice", {"answer": ["Ada", ""]}, "none blank"),
        ("choice", {"answer": [5]}, "a text or a list of texts"),
        ("choice", {"options": ["Ada"]}, "not one of the four options"),
        ("choice", {"answer": ["Eve"]}, "not one of the four options"),
        ("math_find", {"answer": -1}, "its own answer"),  # no sign is read
        ("math500", {"answer": "}"}, "its own answer"),
        ("mmlu", {"choices": ["a"]}, "at least 4 items"),
        ("mmlu", {"choices": ["a", "b", "c", "d", "e"]}, "at most 4 items"),
        ("mmlu", {"answer": 4}, "answer.literal"),
        ("mmlu", {"answer": True}, "answer"),
        ("mmlu", {"split": "tset"}, "split='tset': Input should be 'dev', 'test'"),
        ("gsm", {"answer": SUM["answer"] + 1, "solution": f"Answer: {SUM['answer']}."}, "must state one answer"),
        ("gsm", {"answer": None}, "must state one answer"),
        ("symbolic", {"answer_list": []}, "at least 1 item"),
    ],
)
def test_fields_that_do_not_agree_are_named(name, change, said, tmp_path, tokenizer):
    """Among them an answer that scores 0 itself: every reply would score 0, whatever the method."""
    _, file, row, _ = CASES[name]
    write(tmp_path / file, [{**{k: v for k, v in row.items() if k != "solution"}, **change}])
    assert said in said_of(tmp_path / file, 1, lambda: check(name, tmp_path, tokenizer))


def test_where_the_official_scorer_gives_a_true_answer_nothing_it_is_let_through(tmp_path, tokenizer):
    """A line of code that ends in a comment is skipped; of several answers one is enough."""
    line = {**QASPER, "dataset": "lcc", "answers": ["x = 1  # why"]}
    write(tmp_path / "lcc.jsonl", [line])
    write(tmp_path / "qasper.jsonl", [{**QASPER, "answers": ["The.", "Ada"]}])
    benchmark = LongBench(str(tmp_path), tasks=["lcc", "qasper"])
    benchmark.check(CONFIG, tokenizer, 0, 8)
    assert score_row(benchmark.build("lcc", line), line["answers"][0]) == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (["Which?", "a", "B"], "at least 4 items"),
        (["Which?", "a", "b", "c", "d", "e", "B"], "at most 4 items"),
        (["question", "A", "B", "C", "D", "answer"], "='answer': Input should be 'A', 'B', 'C' or 'D'"),
        (["Which?", "a", "", "c", "d", "B"], "choices.1=''"),
    ],
)
def test_csv_lines_of_mmlu(fields, said, tmp_path, tokenizer):
    for split in ("dev", "test"):
        (tmp_path / split).mkdir()
        with (tmp_path / split / f"anatomy_{split}.csv").open("w", newline="") as table:
            csv.writer(table).writerows([["Is it\nso?", "a", "b", "c", "d", "A"], fields if split == "test" else []])
    file = tmp_path / "test" / "anatomy_test.csv"
    assert said in said_of(file, 3, lambda: check("mmlu", tmp_path, tokenizer))


@pytest.mark.parametrize("damage", ["member", "whole"])
def test_a_damaged_zip_is_named(damage, tmp_path):
    file = tmp_path / "data.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/qasper.jsonl", (json.dumps(QASPER) + "\n") * 50)
    whole = bytearray(file.read_bytes())
    whole[60:70] = bytes(10)
    file.write_bytes(whole if damage == "member" else b"PK")
    with pytest.raises(ValueError, match=f"^{file} cannot be read: .*; copy it again"):
        list(LongBench(str(file)).lines("qasper"))


def test_one_file_is_no_file_of_several_tasks(tmp_path, tokenizer):
    write(tmp_path / "qasper.jsonl", [QASPER])
    with pytest.raises(ValueError, match=r"is the file of one task, and 2 are to be run; name its task"):
        LongBench(str(tmp_path / "qasper.jsonl"), tasks=["qasper", "hotpotqa"]).check(CONFIG, tokenizer, 0, None)
