"""One of a thing is no several, in every message."""

import pytest

from leank.data_gen.amount import amount


@pytest.mark.parametrize(
    ("number", "thing", "said"),
    [
        (0, "row", "0 rows"), (1, "new row", "1 new row"), (2, "KV head", "2 KV heads"), (1, "batch", "1 batch"),
        (2, "batch", "2 batches"), (3, "query", "3 queries"), (3, "reply", "3 replies"), (2, "process", "2 processes"),
        (4, "day", "4 days"), (2, "index", "2 indexes"),
    ],
)  # fmt: skip
def test_number_and_noun_agree(number, thing, said):
    assert amount(number, thing) == said
