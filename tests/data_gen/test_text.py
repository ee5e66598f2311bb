"""Natural text and many-shot labelling as training tasks."""

import re

import pytest

from leank.data_gen import haystack
from leank.data_gen.request import Request
from leank.data_gen.tasks import TASKS
from leank.data_gen.tasks.few_shot import KINDS
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import tokenizer


def built(name, index=0, split="train", exact=True, length=1500, essays=None):
    counter = TokenCounter(tokenizer("gpt4"))
    return TASKS[name].build(Request(name, length, counter, 3, index, 3, exact, split=split, essays=essays))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_reply_is_what_follows_in_the_text(split, exact):
    running = " ".join(haystack.sentences(None, split))
    document = built("text", split=split, exact=exact)
    first, *others = document.questions
    assert f"{document.context}{first.target}" in running + " " + running  # the text starts again at its end
    for question in others:
        start = re.fullmatch(r"\nGo on with this text: (.*)", question.question).group(1)
        assert f"{start}{question.target}" in running + " " + running
    assert {len(q.target.split()) for q in document.questions} == {48}


@pytest.mark.parametrize("exact", [True, False])
def test_a_quoted_passage_stands_in_the_document(exact):
    for index in range(5):
        document = built("quote", index, exact=exact)
        for question in document.questions:
            assert question.answers[0] in document.context
            assert question.answers[0].startswith(re.search('"(.*)"', question.question, re.DOTALL).group(1))


def test_own_text_is_read(tmp_path):
    (tmp_path / "mine.txt").write_text("\n".join(f"Line {i} speaks of whales and {i + 1} ships." for i in range(99)))
    for name in ("text", "quote"):
        assert "whales" in built(name, essays=str(tmp_path / "mine.txt")).context


def test_labels_follow_from_the_kind_of_word_and_answers_are_not_in_the_examples():
    document = built("few_shot")
    shown = dict(line.split(": ") for line in document.context.splitlines()[1:] if ": " in line)
    kind_of = {word: kind for kind in KINDS for word in haystack.words(kind)}
    label_of = {kind_of[word]: label for word, label in shown.items() if word in kind_of}
    assert len({*label_of.values()}) == 3
    for question in document.questions:
        for word, label in (line.split(": ") for line in question.answers):
            assert word not in shown
            assert label_of[kind_of[word]] == label
