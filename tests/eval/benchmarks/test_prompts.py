"""MMLU, NIAH and GSM-Infinite prompts, the row and its scoring."""

import hashlib

import pytest

from leank.eval.benchmarks import base, gsm_infinite, mmlu, niah
from leank.eval.benchmarks.base import Row
from tests.helpers import parity


@pytest.mark.parametrize("row", parity.rows("mmlu_prompts"), ids=parity.label)
def test_mmlu_prompts_are_those_of_the_official_code(row):
    examples = {row["subject"]: row["dev_rows"]}
    built = mmlu.Mmlu(reasoning=False, _dev=examples).build(row["subject"], {"answer": "A", **row["row"]})
    assert built.prompt == row["prompt"]
    assert base.score_row(built, f" {built.answers[0]}") == 1.0


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("A cat ... so the answer is (C). The end", "C"),
        ("**Answer: D**", "D"),
        (" B. because", "B"),
        ("I do not know", None),
    ],
)
def test_the_letter_of_a_reply(reply, letter):
    assert mmlu.extract_letter(reply) == letter


def encode(text):
    """A word with its blank is a token; "." stands alone."""
    tokens, word = [], ""
    for character in text:
        if character in " .":
            tokens += [word] * bool(word) + [character] * (character == ".")
            word = character if character == " " else ""
        else:
            word += character
    return tokens + [word] * bool(word)


def decode(tokens):
    return "".join(tokens)


HAYSTACK = "one two three. four five six. seven eight nine. "


@pytest.mark.parametrize(
    ("depth", "want"),
    [
        (0, " NEEDLE HEREone two three. four five six. seven"),
        (25, " NEEDLE HEREone two three. four five six. seven"),
        (50, "one two three. NEEDLE HERE four five six. seven"),
        (99, "one two three. four five six. NEEDLE HERE seven"),
        (100, "one two three. four five six. seven NEEDLE HERE"),
    ],
)
def test_needle_goes_back_to_a_sentence_end(depth, want):
    assert niah.insert_needle(HAYSTACK, " NEEDLE HERE", depth, 14, encode, decode, buffer=3) == want


def test_needle_lengths_and_errors():
    context = niah.fitted(HAYSTACK, 300, encode, decode)
    assert len(encode(context)) == 300
    assert context.startswith(HAYSTACK * 2)
    context = niah.insert_needle(context, " NEEDLE HERE", 50, 300, encode, decode)
    assert len(encode(context)) == 100
    with pytest.raises(ValueError, match="depth_percent=101"):
        niah.insert_needle(HAYSTACK, "x", 101, 300, encode, decode)
    with pytest.raises(ValueError, match="leaves no room for the needle"):
        niah.insert_needle(HAYSTACK, "x", 50, 200, encode, decode)
    with pytest.raises(ValueError, match="haystack is empty"):
        niah.fitted("", 300, encode, decode)


def test_needle_grid_and_recall():
    assert niah.grid(0, 100)[:4] == [0, 3, 6, 9]
    assert len(niah.grid(1000, 16000)) == 35
    assert niah.recall("Eat a sandwich") == pytest.approx(3 / 11)


@pytest.mark.parametrize(
    ("template", "sha256"),
    [
        ("crazy_zootopia", "7131d5c162628552e0b7da852047457cb48e56e702e6f92be47f92f873dbe438"),
        ("teachers_in_school", "02b23ab592ebfc71e96ef1dcc7937345bd9cb52b41d8d2049939fee56705ac1f"),
        ("movie_festival_awards", "b29ac1c98a53a5027157b23b29f94c976b2b3f19cccc92f293c530f92ae8aac7"),
    ],
)
def test_gsm_infinite_headers_are_the_official_ones(template, sha256):
    data = {"problem": "P.", "question": "Q?", "template": template, "mode": "normalforward", "op": 2, "answer": 31}
    _, header = gsm_infinite.realistic_row(data).preamble
    assert hashlib.sha256(header["content"].encode()).hexdigest() == sha256
    _, reverse = gsm_infinite.realistic_row({**data, "mode": "forwardreverse"}).preamble
    assert reverse["content"] == header["content"] + gsm_infinite.REVERSE_HINT


def test_gsm_infinite_rows():
    data = {"problem": "P.", "question": "Q?", "template": "crazy_zootopia", "mode": "normalforward", "op": 2}
    row = gsm_infinite.realistic_row({**data, "solution": "Answer: 31."})
    assert [(m["role"], m["content"][:4]) for m in row.messages()] == [
        ("system", "You "), ("user", "Answ"), ("user", "Prob"),
    ]  # fmt: skip
    assert row.messages()[2]["content"] == "Problem: P. Question: Q? Solution: "
    assert (row.question, row.answers, row.meta["op"]) == ("Question: Q? Solution: ", [31], 2)
    assert base.score_row(row, "Answer: 31.") == 1.0
    merged = gsm_infinite.realistic_row({**data, "answer": 31}, merge_turns=True)
    assert [m["role"] for m in merged.messages()] == ["system", "user"]
    assert merged.prompt.endswith("calculated. Problem: P. Question: Q? Solution: ")
    symbolic = gsm_infinite.symbolic_row({"problem": "assign V1 = 2.", "question": "Which?", "answer_list": ["V1"]})
    assert symbolic.prompt == "<context>\nassign V1 = 2.\n</context>\n\nWhich?"
    assert base.score_row(symbolic, "V1") == 1.0


@pytest.mark.parametrize(
    ("metric", "task", "answers", "reply", "want"),
    [
        ("ruler_all", "vt", ["A", "B"], "a\n", 0.5),
        ("ruler_part", "qa_1", ["A", "B"], "b", 1.0),
        ("infinitebench", "passkey", ["12"], "12", 1.0),
        ("math500", "math500", ["5"], "so \\boxed{5}", 1.0),
    ],
)
def test_scoring_by_metric_name(metric, task, answers, reply, want):
    assert base.score_row(Row(task, "0", "c", "q", answers, 8, metric), reply) == want


def test_unknown_metric_and_stop():
    with pytest.raises(ValueError, match="metric='bleu' of task 't' has no scorer"):
        base.score_row(Row("t", "0", "c", "q", ["x"], 8, "bleu"), "x")
    assert base.cut_at_stop("one\ntwo END", ("END", "\n", "")) == "one"
    assert base.cut_at_stop("one", ("\n",)) == "one"
