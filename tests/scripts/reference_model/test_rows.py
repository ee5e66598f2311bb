"""Rows that reference models are trained on: those of the first recipe stay, and labels weigh what `Recipe` says."""

import hashlib
import random
import re

import numpy as np
import pytest

from leank.data_gen.task import Request
from leank.data_gen.tasks import TASKS
from leank.data_gen.tokens import TokenCounter
from scripts.reference_model.batches import RECIPES, Batches, RowMaker, TrainingRow, collate, in_order
from tests.helpers.text_tokenizers import tokenizer

MIXED = RECIPES["mixed"]


def test_rows_of_the_shipped_model_stay_the_same():
    """The digest was taken before there was a second recipe."""
    maker = RowMaker(tokenizer("reference"))
    digest = hashlib.sha256()
    for i, length in enumerate((256, 512, 1024, 2048) * 4):
        row = maker.make(length, (i // 4) / 3, random.Random(f"pin/{i}"))
        digest.update(repr((row.ids, row.supervised)).encode())
    assert digest.hexdigest() == "3cc8c73b6ba5065c847b29d7d2611b689a38335de68b54da6fffe30b72a4bca8"


def batch(recipe: str, text: np.ndarray | None):
    return Batches(tokenizer("reference"), 8192, 4, 0, 0, 0, 1024, RECIPES[recipe], text)[1]


def weights_by_row(batch) -> list[float]:
    ids, positions, _, weights = batch
    rows = positions // ids.shape[1]
    return [float(weights[rows == row].sum()) for row in range(len(ids))]


def test_answers_weigh_one_and_text_its_share():
    stream = np.arange(20_000, dtype=np.uint16) % 4096
    mixed = batch("mixed", stream)
    ids = mixed[0]
    texts = round(MIXED.text * len(ids))
    by_row = weights_by_row(mixed)
    assert sum(by_row[:texts]) == pytest.approx(MIXED.text_weight)
    assert sum(by_row[texts:]) == pytest.approx(1)
    assert by_row[:texts] == pytest.approx([MIXED.text_weight / texts] * texts)
    assert sum(weights_by_row(batch("mixed", None))) == pytest.approx(1)


def test_in_the_first_recipe_every_label_counts_the_same():
    *_, weights = batch("retrieval", None)
    assert weights.sum().item() == pytest.approx(1)
    assert weights.unique().numel() == 1


def test_a_row_counts_as_so_many_labels():
    """Rows of 10, 100 and 500 answer labels count as 64, 100 and 256."""
    rows = [TrainingRow([*range(3, 604)], [*range(labels)]) for labels in (10, 100, 500)]
    by_row = weights_by_row(collate(rows, 600, MIXED))
    assert by_row == pytest.approx([64 / 420, 100 / 420, 256 / 420])
    assert weights_by_row(collate(rows, 600)) == pytest.approx([10 / 610, 100 / 610, 500 / 610])


@pytest.mark.parametrize("index", range(3))
def test_common_words_can_be_asked_for_in_the_order_of_the_list(index):
    counter = TokenCounter(tokenizer("reference"))
    document = TASKS["cwe"].build(Request("cwe", 2048, counter, 5, index))
    ordered = in_order(document)
    (before,), (after,) = document.questions, ordered.questions
    assert sorted(after.answers) == sorted(before.answers)
    text = document.context[document.context.rindex("Below is") :]
    places = [re.search(rf"\d\. {re.escape(word)}(?= |$)", text).start() for word in after.answers]
    assert places == sorted(places)
    assert after.target == " " + " ".join(f"{i}. {word}" for i, word in enumerate(after.answers, 1))
    assert ordered.context == document.context
    assert RECIPES["busy"].in_order
