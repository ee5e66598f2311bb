"""The chain tasks as rows of benchmark=ruler: sized as RULER's tasks, right if the reply arrives at the end."""

import pytest

from leank.backbone import load_config
from leank.eval.benchmarks.base import Cell, score_row
from leank.eval.benchmarks.ruler import Ruler
from tests.helpers.text_tokenizers import tokenizer


@pytest.mark.parametrize(("name", "length", "steps"), [("chain", 2048, 64), ("chain_long", 4096, 160)])
def test_a_reply_is_right_if_it_arrives(name, length, steps):
    made = Ruler(tasks=[name], lengths=[length], samples=1)
    made.check(load_config("reference"), tokenizer("reference"), 0, None)
    row = made.row(Cell(name, length, ("0",)), "0", tokenizer("reference"), 0)
    prompt = tokenizer("reference")(row.context + row.question + row.answer_prefix)["input_ids"]
    assert len(prompt) + row.max_new_tokens <= length
    table = row.context.splitlines()[1:]
    after = {line.split(" leads to ")[0]: line for line in table if " leads to " in line}
    entry, reply = row.question.split("take you from ")[1].split(" to the end")[0], []
    while entry in after:
        reply.append(after[entry])
        entry = after[entry].split(" leads to ")[1].rstrip(".")
    assert len(reply) == steps - 1
    assert score_row(row, "\n".join([*reply, f"{entry} is the end."])) == 1
    assert score_row(row, "\n".join(reply)) == 0
    assert score_row(row, "\n".join([*reply, f"{reply[0].split()[0]} is the end."])) == 0
