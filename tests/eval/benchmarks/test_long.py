"""Benchmarks of long replies and long chats: prompts, and scores by the official rules on vectors made by hand."""

import csv
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leank.eval.benchmarks.aime import Aime
from leank.eval.benchmarks.base import score_row, stated
from leank.eval.benchmarks.gpqa import CHOICES, Gpqa
from leank.eval.benchmarks.longgenbench import EXAMPLES, LongGenBench
from leank.eval.benchmarks.mrcr import Mrcr
from leank.eval.inference.prompts import encode
from tests.helpers.benchmark_lines import AIME, CHAT, CONFIG, GPQA, GSM8K, MRCR


def made(benchmark, tokenizer):
    """All rows of a benchmark that is checked."""
    benchmark.check(CONFIG, tokenizer, 0, None)
    return [benchmark.row(cell, sample, tokenizer, 0) for cell in benchmark.cells() for sample in cell.samples]


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file.parent)


@pytest.mark.parametrize(
    ("reply", "right", "states"),
    [
        ("So it is \\boxed{73}.", 1, "73"),
        ("first \\boxed{12}, then \\boxed{ 073 }", 1, "73"),
        ("\\boxed{\\frac{146}{2}}", 1, "\\frac{146}{2}"),
        ("\\boxed{730}", 0, "730"),
        ("the answer is 73", 0, None),
        ("\\boxed{}", 0, ""),
    ],
)
def test_a_boxed_integer_of_aime_is_right_with_leading_zeros_or_without(reply, right, states, tmp_path, tokenizer):
    folder = write(tmp_path / "aime25.jsonl", [AIME])
    (row,) = made(Aime(folder, tasks=["aime25"]), tokenizer)
    assert row.answers == ["73"]
    assert row.prompt.startswith("How many?\nPlease reason step by step")
    assert score_row(row, reply) == right
    assert stated(row, reply) == states


def test_every_year_of_aime_is_a_task_of_its_own(tmp_path, tokenizer):
    for year in ("aime24", "aime25", "aime26"):
        write(tmp_path / f"{year}.jsonl", [{"question": year, "answer": 5}])
    assert [row.task for row in made(Aime(str(tmp_path)), tokenizer)] == ["aime24", "aime25", "aime26"]
    with pytest.raises(ValueError, match="no year of AIME"):
        made(Aime(str(tmp_path), tasks=["aime23"]), tokenizer)
    for benchmark in (Aime(), Gpqa(), Mrcr()):
        with pytest.raises(FileNotFoundError, match="no path= given"):
            made(benchmark, tokenizer)


ORDER = [[3, 1, 0, 2], [3, 1, 2, 0]]  # what random.Random(0).sample(range(4), 4) gives first


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_choices_of_gpqa_stand_in_the_official_order(kind, tmp_path, tokenizer):
    lines = [GPQA, {**GPQA, "Question": 'And, \n"which"?', "Correct Answer": "e, f"}]
    if kind == "csv":
        with (tmp_path / "gpqa_diamond.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, ["Pre-Revision Question", *GPQA])
            table.writeheader()
            table.writerows([{"Pre-Revision Question": "x", **line} for line in lines])
    else:
        write(tmp_path / "gpqa_diamond.jsonl", lines)
    one, two = made(Gpqa(str(tmp_path)), tokenizer)
    for row, line, order in ((one, lines[0], ORDER[0]), (two, lines[1], ORDER[1])):
        shown = "\n".join(f"{mark}) {line[CHOICES[place]]}" for mark, place in zip("ABCD", order, strict=True))
        assert row.prompt == (
            "Answer the following multiple choice question. The last line of your response should be of the following "
            "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before "
            f"answering.\n\n{line['Question']}\n\n{shown}"
        )
        assert row.answers == ["ABCD"[order.index(0)]]


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("Hence.\nAnswer: D", "D"),
        ("answer:$D$", "D"),
        ("Answer: B, no: Answer: D", "B"),  # the first counts
        ("Answer: d", "d"),  # wrong, as officially
        ("**Answer:** D", None),
        ("The answer is D", None),
        ("Answer\t: \tDeuterium", "D"),
        ("Answer:\nD", None),
    ],
)
def test_the_letter_of_gpqa_is_the_official_one(reply, letter, tmp_path, tokenizer):
    (row,) = made(Gpqa(write(tmp_path / "gpqa_diamond.jsonl", [GPQA])), tokenizer)
    row = replace(row, answers=["D"])
    assert stated(row, reply) == letter
    assert score_row(row, reply) == float(letter == "D")


def test_a_csv_without_the_columns_of_gpqa_is_named(tmp_path, tokenizer):
    (tmp_path / "gpqa_diamond.csv").write_text("Question,Correct Answer\nWhich?,a\n")
    with pytest.raises(ValueError, match="has no column Incorrect Answer 1, Incorrect Answer 2, Incorrect Answer 3"):
        made(Gpqa(str(tmp_path / "gpqa_diamond.csv")), tokenizer)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("x7QpA tapir sat.", 1.0),
        ("x7QpA tapir sat", 2 * 11 / 23),
        ("x7Qp", 0.0),
        (" x7QpA tapir sat.", 0.0),
        ("A tapir sat.", 0.0),
        ("x7Qpx7QpA tapir sat.", 2 * 12 / 28),  # the string is taken off once
    ],
)
def test_a_reply_of_mrcr_is_as_good_as_it_is_alike(reply, score, tmp_path, tokenizer):
    (row,) = made(Mrcr(write(tmp_path / "2needle.jsonl", [MRCR]), tasks=["2needle"]), tokenizer)
    assert score_row(row, reply) == pytest.approx(score)


def test_mrcr_reads_tables_and_keeps_the_chat(tmp_path, tokenizer):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    long = {**MRCR, "prompt": json.dumps([{"role": "system", "content": "y" * 999}, *CHAT])}
    pandas.DataFrame([MRCR, long]).to_parquet(tmp_path / "4needle_0.parquet")
    pandas.DataFrame([MRCR]).to_parquet(tmp_path / "4needle_1.parquet")
    rows = made(Mrcr(str(tmp_path), tasks=["4needle"], most_chars=500), tokenizer)
    assert [row.messages() for row in rows] == [CHAT, CHAT]
    assert len(made(Mrcr(str(tmp_path), tasks=["4needle"]), tokenizer)) == 3
    (tmp_path / "8needle.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(ValueError, match=r"8needle\.parquet cannot be read"):
        made(Mrcr(str(tmp_path), tasks=["8needle"]), tokenizer)


@pytest.mark.parametrize(
    ("chat", "said"),
    [("[]", "at least 1 item"), ("{", "is no chat"), ('[{"role": "me", "content": "x"}]', "Input should be 'system'"),
     (json.dumps(CHAT[:2]), "is the assistant's, not the user's"), ("[" * 99_999, "is no chat")],
)  # fmt: skip
def test_what_is_no_chat_is_named(chat, said, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=said):
        made(Mrcr(write(tmp_path / "2needle.jsonl", [{**MRCR, "prompt": chat}]), tasks=["2needle"]), tokenizer)


def questions(tmp_path, tokenizer, answers, **settings):
    lines = [{"question": f"Q{n}?", "answer": f"so\n#### {a}"} for n, a in enumerate(answers)]
    return made(LongGenBench(write(tmp_path / "test.jsonl", lines), **settings), tokenizer)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Answer_3:\n1 + 1. The answer is 2.\n\nAnswer_4:\nThe answer is 1,200.\n\nAnswer_5:\nIt is 0.5", 1.0),
        ("Answer_3:\nThe answer is 2.", 1 / 3),  # officially 1 of 1: unanswered ones are not counted
        ("Answer_4:\nThe answer is 1200.\n\nAnswer_3:\nThe answer is 2.", 0.0),  # their order counts, not the number
        ("Answer_3:\nSteps:\n\nThe answer is 2.\n\nAnswer_4:\n1200", 0.0),  # "Steps:" is an answer that is empty
        ("Answer_3: The answer is 2.", 0.0),  # an answer begins on a line of its own
        ("Answer_3:\nnone\n\nAnswer_4:\n$1,200 of 7", 0.0),
        ("Answer_3:\nnone\n\nAnswer_4:\n7 of $1,200", 1 / 3),
        ("", 0.0),
    ],
)
def test_a_reply_of_longgenbench_is_scored_answer_by_answer(reply, score, tmp_path, tokenizer):
    (row,) = questions(tmp_path, tokenizer, ["2", "1200", "0.5"], questions=3)
    assert row.answers == ["2", "1200", "0.5"]
    assert score_row(row, reply) == pytest.approx(score)


@given(st.text(alphabet="Answer_12:\n .,x", max_size=80))
def test_no_reply_of_longgenbench_breaks_its_scorer(reply):
    row = LongGenBench(questions=2).build("longgenbench", [GSM8K, GSM8K])
    assert 0 <= score_row(row, reply) <= 1


def test_prompts_of_longgenbench_have_so_many_questions(tmp_path, tokenizer):
    one, two = questions(tmp_path, tokenizer, "123", questions=2, samples=None)
    assert one.prompt.endswith("Questions:\nQuestion_3:\nQ0?\nQuestion_4:\nQ1?\n")
    assert two.prompt.endswith("Questions:\nQuestion_3:\nQ2?\n")
    assert EXAMPLES in one.prompt
    (tmp_path / "examples.txt").write_text("Question_1:\nWhat?\n\nAnswer_1:\nThe answer is 4.\n")
    settings = {"questions": 2, "samples": 1, "examples": str(tmp_path / "examples.txt")}
    (row,) = questions(tmp_path, tokenizer, "123", **settings)
    assert row.prompt.startswith("Examples:\nQuestion_1:\nWhat?")
    assert row.prompt.endswith("Question_2:\nQ0?\nQuestion_3:\nQ1?\n")
    with pytest.raises(FileNotFoundError, match=r"benchmark\.examples=nowhere"):
        questions(tmp_path, tokenizer, "123", examples="nowhere")
    with pytest.raises(ValueError, match="has no number"):
        questions(tmp_path, tokenizer, ["none"])


def test_generated_problems_are_answered_by_their_own_answers(tokenizer):
    rows = made(LongGenBench(questions=5, samples=2), tokenizer)
    assert len({row.prompt for row in rows}) == 2
    for row in rows:
        right = "\n\n".join(f"Answer_{n}:\nThe answer is {a}." for n, a in enumerate(row.answers, 3))
        assert (len(row.answers), score_row(row, right)) == (5, 1.0)
        assert len(encode(tokenizer, row).ids) > 200
    fewer = made(LongGenBench(questions=5, samples=1), tokenizer)
    assert fewer[0].prompt == rows[0].prompt
