"""Prompts of the user's, their replies in parts, several turns, and a text of the user's for some tasks alone."""

import gzip
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.data_gen.task import HELD_OUT, Document, Request
from leank.data_gen.tasks import TASKS, Mixture
from leank.data_gen.tasks import prompts as made
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import tokenizer

TURNS = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
GOOD = [json.dumps({"prompt": f"Tell me of number {i}."}) for i in range(9)]


def written(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_both_forms_are_read_and_other_keys_passed_over(tmp_path):
    lines = [*GOOD, "", json.dumps({"messages": TURNS, "id": 7, "date": None})]
    found = made.read(written(tmp_path / "p.jsonl", lines))
    assert found == [*(f"Tell me of number {i}." for i in range(9)), TURNS]
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress("\r\n".join(lines).encode(), mtime=0))
    assert made.read(str(tmp_path / "p.jsonl.gz")) == found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 10 is no prompt"),
        ('"text"', "line 10 is no prompt"),
        ('{"prompt": 5}', "line 10 is no prompt .prompt: "),
        ('{"prompt": " "}', "line 10 is no prompt .prompt: "),
        ('{"text": "a"}', "line 10 needs either a prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "line 10 needs either"),
        ('{"messages": []}', "line 10 is no prompt .messages: "),
        ('{"messages": [{"role": "tool", "content": "b"}]}', r"line 10 is no prompt .messages\.0\.role: "),
        ('{"messages": [{"role": "assistant", "content": "b"}]}', "line 10 ends with a message of the assistant"),
        ('{"prompt": "\\ud800"}', "line 10 is no prompt"),
        ("[" * 100_000, "line 10 is no prompt"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line, said, tmp_path):
    with pytest.raises(ValueError, match=rf"^data\.prompts='[^\n]*', {said}[^\n]*; [^\n]*$"):
        made.read(written(tmp_path / "p.jsonl", [*GOOD, line]))


@pytest.mark.parametrize("content", [b"", b"\n\n", GOOD[0].encode(), b"\xff\xfe{}", gzip.compress(b"{}", mtime=0)])
def test_empty_short_and_damaged_files_are_named(content, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]*p\.jsonl[^\n]*; [^\n]*$"):
        made.read(str(tmp_path / "p.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"^data\.prompts='[^\n]*' does not exist; give a file of lines"):
        made.read(str(tmp_path / "none.jsonl"))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)
TURN = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": VALUES})
LINES = st.one_of(
    st.text(max_size=30),
    st.fixed_dictionaries({}, optional={"prompt": VALUES, "messages": VALUES}).map(json.dumps),
    st.lists(TURN, max_size=3).map(lambda messages: json.dumps({"messages": messages})),
)


@given(lines=st.lists(LINES, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_whatever_a_file_holds_it_is_read_or_refused_in_one_line(lines, tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "p.jsonl"
    path.write_text("\n".join([*GOOD, GOOD[0], *lines]), encoding="utf-8", errors="replace")
    said, found = "", []
    try:
        found = made.read(str(path))
    except ValueError as error:
        said = str(error)
    assert len(said.splitlines()) == (not found)
    assert all(isinstance(one, str) or one[-1]["role"] == "user" for one in found)


def replies(path, texts, framed=False):
    lines = [json.dumps({"context": f"Document {i}.", "question": " Why?", "reply": text, "framed": framed})
             for i, text in enumerate(texts)]  # fmt: skip
    return written(path, lines)


def built(data, index=0, questions=2, seed=3) -> Document:
    counter = TokenCounter(tokenizer("reference"))
    return TASKS["prompts"].build(Request("prompts", 400, counter, seed, index, questions, data=data))


@given(reply=st.text(min_size=1, max_size=60), questions=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_parts_of_a_reply_are_the_reply(reply, questions, tmp_path_factory):
    count = len(made.words(reply))
    if not count:
        return
    path = replies(tmp_path_factory.mktemp("parts") / "r.jsonl", [reply] * made.LEAST)
    if count < questions:
        with pytest.raises(ValueError, match=f"has no {questions} parts"):
            built(path, questions=questions)
        return
    document = built(path, questions=questions)
    whole = "".join(made.words(reply))
    assert reply.startswith(whole)
    assert not reply[len(whole) :].strip()
    assert "".join(q.target for q in document.questions) == whole
    read = ""
    for question in document.questions:
        assert question.answer_prefix == read
        assert question.target.strip()
        read += question.target


def test_every_tenth_prompt_is_held_out(tmp_path):
    path = replies(tmp_path / "r.jsonl", ["yes it is"] * 23, framed=True)
    trained = {built(path, i).context for i in range(300)}
    held_out = {built(path, HELD_OUT + i).context for i in range(300)}
    assert held_out == {"Document 9.", "Document 19."}
    assert trained == {f"Document {i}." for i in range(23)} - held_out
    assert built(path).framed
    assert not built(replies(tmp_path / "s.jsonl", ["yes it is"] * 10)).framed


@pytest.mark.parametrize("lines", [["{}"], ['{"context": "a"}'], [], ["[1]"]])
def test_a_damaged_file_of_replies_is_named(lines, tmp_path):
    path = written(tmp_path / "r.jsonl", lines)
    with pytest.raises(ValueError, match=rf"^{path}[^\n]*; remove it, and training writes it again$"):
        built(path)
    with pytest.raises(FileNotFoundError, match=r"train with data\.prompts=PATH"):
        built(None)


@pytest.mark.parametrize("questions", [1, 3])
def test_a_turn_follows_the_earlier_ones_with_their_answers(questions):
    document = TASKS["turns"].build(Request("turns", 1500, TokenCounter(tokenizer("gpt4")), 3, 0, questions))
    before = ""
    for question in document.questions:
        assert question.question.startswith(before)
        own = question.question.removeprefix(before)
        assert own.count("?") == 1
        value = question.answers[0]
        key = re.search(r"for (\S+) mentioned", own).group(1)
        assert re.search(rf"for {re.escape(key)} is: {value}", document.context)
        before = question.question + question.answer_prefix + question.target


def test_a_text_of_the_users_is_read_by_text_and_quote_alone(tmp_path):
    written(tmp_path / "mine.txt", [f"Line {i} speaks of whales and {i + 1} ships." for i in range(200)])
    own = Mixture({"text": 1}, tokenizer("reference"), 900, 900, text=str(tmp_path / "mine.txt"), split="train")
    for name in ("text", "quote"):
        assert "whales" in own.build(name, 900, 0).context
    assert "whales" not in own.build("multivalue", 900, 0).context
