"""Bad input gets a message that names the setting and its value and says what to do."""

import re
from dataclasses import replace

import pytest

from leank.data_gen import haystack
from leank.data_gen.amount import amount
from leank.data_gen.request import Request
from leank.data_gen.tasks import TASKS, Mixture, task
from leank.data_gen.tasks.niah import Niah
from leank.data_gen.tasks.passkey import Passkey
from leank.data_gen.tasks.qa import QuestionAnswering
from leank.data_gen.tasks.vt import VariableTracking
from leank.data_gen.tasks.word_counts import FrequentWords
from tests.helpers.text_tokenizers import tokenizer


@pytest.fixture(scope="module")
def request_kv():
    from leank.data_gen.tokens import TokenCounter

    return Request("kv", 2048, TokenCounter(tokenizer("reference")), 0, 0)


def says(call, error, *parts):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert re.search(part, message), f"{part!r} is not in {message!r}"


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: task("nope"), ("task='nope'", "choose one of .*kv")),
        (lambda: Niah("hay"), ("haystack='hay'", "choose noise, essay or needle")),
        (lambda: Niah(key_type="letters"), ("key_type='letters'", "choose one of words")),
        (lambda: Niah(value_type="letters"), ("value_type='letters'", "choose")),
        (lambda: Niah(num_values=0), ("num_values=0", "at least 1")),
        (lambda: Passkey(num_passkeys=11), ("num_passkeys=11", "choose 1 to 10")),
        (lambda: Passkey(num_words=0), ("num_words=0", "at least 1")),
        (lambda: VariableTracking(0), ("num_chains=0", "give at least 1")),
        (lambda: FrequentWords(1.0), ("alpha=1.0", "above 1")),
        (lambda: QuestionAnswering("trivia"), ("dataset='trivia'", "squad, hotpotqa")),
    ],
)
def test_settings_of_tasks(make, parts):
    says(make, ValueError, *parts)


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"length": 0}, ("length=0", "give")),
        ({"questions": 0}, ("questions=0", "give")),
        ({"split": "dev"}, ("split='dev'", "train, test, all")),
    ],
)
def test_settings_of_requests(request_kv, changed, parts):
    says(lambda: replace(request_kv, **changed), ValueError, *parts)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", [n for n in TASKS if not n.startswith("qa")])
def test_a_length_too_short_for_its_task_is_named(request_kv, name, exact):
    request = replace(request_kv, name=name, length=60, exact=exact)
    says(lambda: TASKS[name].build(request), ValueError, "length=60 is too short", name, "raise length")


@pytest.mark.parametrize(
    ("weights", "settings", "parts"),
    [
        ({}, {}, ("tasks=", "give at least one")),
        ({"kv": -1}, {}, ("tasks=", "positive weight")),
        ({"kv": 0}, {}, ("tasks=", "positive weight")),
        ({"lv": 1}, {}, ("task='lv'", "choose")),
        ({"kv": 1}, {"min_length": 5000}, ("min_length=5000", "max_length=4096", "give 0 <")),
        ({"kv": 1}, {"questions": 0}, ("questions=0", "at least 1")),
        ({"kv": 1}, {"per_length": 0}, ("per_length=0", "at least 1")),
    ],
)
def test_mixtures_that_cannot_be_meant_are_named(weights, settings, parts):
    ranges = {"min_length": 1024, "max_length": 4096} | settings
    says(lambda: Mixture(weights, tokenizer("reference"), **ranges), ValueError, *parts)


def test_numbers_below_0():
    says(lambda: Mixture({"kv": 1}, tokenizer("reference"), 1024, 1024)[-1], IndexError, "index=-1")


def test_essays_that_cannot_be_read_are_named(tmp_path, request_kv):
    request = replace(request_kv, name="niah_single_2", essays=str(tmp_path / "none.txt"))
    says(lambda: TASKS["niah_single_2"].build(request), FileNotFoundError, "essays=.*none.txt", "give a .txt")
    (tmp_path / "empty.txt").write_text("\n\n")
    says(lambda: haystack.sentences(str(tmp_path / "empty.txt"), "all"), ValueError, "holds no sentences", "give")
    (tmp_path / "other.json").write_text('{"essays": []}')
    says(lambda: haystack.sentences(str(tmp_path / "other.json"), "all"), ValueError, "other.json", "give JSON")


def test_words_run_out(request_kv, tmp_path):
    for exact in (True, False):
        request = replace(request_kv, name="cwe", length=250_000, exact=exact)
        says(lambda r=request: TASKS["cwe"].build(r), ValueError, "length=250000", "8,169", "give data=")
    says(
        lambda: TASKS["cwe"].build(replace(request_kv, name="cwe", data=str(tmp_path / "w.txt"))),
        FileNotFoundError, "data=.*w.txt", "one word a line",
    )  # fmt: skip


def test_a_word_list_helps(request_kv, tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(f"word{'abcdefghij'[i % 10]}{i:x}" for i in range(20_000)))
    request = replace(request_kv, name="cwe", length=250_000, data=str(tmp_path / "words.txt"))
    assert TASKS["cwe"].build(request).length > 0.98 * 250_000


def test_a_length_is_checked_before_anything_is_built():
    for given, message in (
        ({"length": 10**12}, r"length=1000000000000 must lie in \[1, 16777216\]"),
        ({"questions": 10**9}, r"questions=1000000000 must lie in \[1, length=4096\]"),
    ):
        with pytest.raises(ValueError, match=message):
            Request(**{"name": "vt", "length": 4096, "counter": None, "seed": 0, "index": 0, **given})


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
