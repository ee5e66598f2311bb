"""Chains through a table: the path in question stands in the table, and its end is what the answer says."""

import re

import pytest

from leank.data_gen.request import Request
from leank.data_gen.tasks import CHAINS
from leank.data_gen.tasks.chain import Chain
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import tokenizer

COUNTER = TokenCounter(tokenizer("reference"))


def walk(document) -> list[str]:
    """Follow the table from the start that the question names; the lines on the way."""
    table = dict.fromkeys(document.context.splitlines()[1:])
    after = {line.split(" leads to ")[0]: line for line in table if " leads to " in line}
    ends = {line.removesuffix(" is the end."): line for line in table if line.endswith(" is the end.")}
    entry = document.questions[0].question.split("take you from ")[1].split(" to the end")[0]
    found = []
    while entry not in ends:
        found.append(after[entry])
        entry = after[entry].split(" leads to ")[1].rstrip(".")
    return [*found, ends[entry]]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("steps", [1, 5, 64])
def test_the_table_leads_to_the_answer(steps, exact):
    document = Chain(steps, 16 * steps).build(Request("chain", 4096, COUNTER, 7, 3, exact=exact))
    question = document.questions[0]
    path = walk(document)
    assert path == question.target.splitlines()
    assert len(path) == steps
    assert question.answers == (path[-1],)
    assert document.context.count(path[-1]) == 1


def test_lengths_are_met():
    for name, task in CHAINS.items():
        for exact in (True, False):
            document = task.build(Request(name, 8192, COUNTER, 1, 0, exact=exact))
            q = document.questions[0]
            prompt = COUNTER.count(document.context + q.question + q.answer_prefix) + COUNTER.special_tokens
            reply = COUNTER.count(q.target)
            assert 500 < reply < task.max_new_tokens
            total = prompt + (reply if exact else task.max_new_tokens)
            assert abs(document.length - total) <= (8 if exact else 0)
            assert 8192 - 150 < total <= 8192 + 4 * exact


def test_names_never_end():
    document = Chain(4).build(Request("chain", 120_000, COUNTER, 1, 0))
    sources = [re.split(" leads to | is the end", line)[0] for line in document.context.splitlines()[1:-1]]
    assert len(sources) > 7000
    assert len(set(sources)) == len(sources)


def test_steps_out_of_range():
    with pytest.raises(ValueError, match="steps=0"):
        Chain(0)
