"""Every question can be answered from the text of its document, and from nothing else there."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.data_gen import haystack, source_code
from leank.data_gen.task import Document, Request
from leank.data_gen.tasks import CHAINS, RULER_NIAH, TASKS
from leank.data_gen.tasks.chain import Chain
from leank.data_gen.tasks.few_shot import KINDS
from leank.data_gen.tasks.niah import Niah, join
from leank.data_gen.tasks.passkey import HEADER as PASSKEY_HEADER
from leank.data_gen.tasks.passkey import Passkey
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import tokenizer

NEEDLE = re.compile(r"One of the special magic (\w+) for (.+?) is: (\S+)\.")
ASKED = re.compile(r"What (?:is the|are all the) special magic (\w+) for (.+) mentioned")


@pytest.fixture(scope="module")
def counter() -> TokenCounter:
    return TokenCounter(tokenizer("reference"))


def read_needles(document: Document) -> dict[str, list[str]]:
    """Key -> its values in reading order, from the text alone."""
    found: dict[str, list[str]] = {}
    for _, key, value in NEEDLE.findall(document.context):
        found.setdefault(key, []).append(value)
    return found


def asked_keys(question: str) -> list[str]:
    match = ASKED.search(question)
    assert match, question
    return re.split(r", (?:and )?", match[2])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ruler"])
@pytest.mark.parametrize("questions", [1, 4])
@pytest.mark.parametrize("name", [*RULER_NIAH, "kv", "multivalue", "multikey", "multiquery"])
def test_answers_are_all_values_of_the_asked_keys(name, questions, exact, counter):
    for index in range(3):
        document = TASKS[name].build(Request(name, 4096, counter, 9, index, questions, exact=exact))
        needles = read_needles(document)
        assert len(document.questions) == questions
        assert len({q.question for q in document.questions}) == questions
        for q in document.questions:
            keys = asked_keys(q.question)
            assert list(q.answers) == [value for key in keys for value in needles[key]]
            assert q.target == f" {join(list(q.answers))}."
            assert all(document.context.count(value) == 1 for value in q.answers)


@given(
    st.sampled_from(["noise", "essay", "needle"]), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3),
    st.integers(1, 3), st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_niah_can_be_answered(kind, keys, values, queries, questions, seed):
    task = Niah(kind, num_keys=keys, num_values=values, num_queries=queries)
    document = task.build(Request("any", 3000, TokenCounter(tokenizer("gpt4")), seed, 0, questions))
    needles = read_needles(document)
    for q in document.questions:
        assert list(q.answers) == [v for key in asked_keys(q.question) for v in needles[key]]
        assert len(q.answers) == queries * values


def test_lines_nobody_asks_for_never_use_an_asked_key(counter, monkeypatch):
    monkeypatch.setattr(haystack, "words", lambda kind: ("big", "old") if kind == "adjectives" else ("cat", "dog"))
    document = TASKS["multikey"].build(Request("multikey", 1024, counter, 0, 0, 3))
    needles = read_needles(document)
    assert sum(map(len, needles.values())) > 10
    for q in document.questions:
        assert list(q.answers) == needles[asked_keys(q.question)[0]]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "whole units"])
def test_every_passkey_is_in_the_text_and_is_asked_for_once(counter, exact):
    document = TASKS["passkey"].build(Request("passkey", 4096, counter, 9, 0, 20, exact=exact))
    assert len(document.questions) == 10, "ten passkeys, ten questions at most"
    assert len({q.question for q in document.questions}) == 10
    found = dict(re.findall(r"the (\w+) passkey to the vault: (.+?)\.", document.context))
    assert len(found) == 10
    for q in document.questions:
        ordinal = re.search(r"what is the (\w+) passkey", q.question)
        assert ordinal
        assert q.answers == (found[ordinal[1]],)
        assert len(q.answers[0].split(" ")) >= 32  # some nouns are two words
        assert q.target == f" {found[ordinal[1]]}."
    body = document.context.removeprefix(PASSKEY_HEADER)
    first = min(document.context.index(words) for words in found.values())
    last = max(document.context.index(words) for words in found.values())
    assert first > 0.02 * len(body)
    assert last < 0.98 * len(document.context)


def test_passkeys_stand_between_5_and_95_per_cent(counter):
    places = []
    for index in range(40):
        request = Request("passkey", 4096, counter, 9, index)
        text = Passkey().layout(request, request.rng()).text([f"unit{n}" for n in range(1000)])
        places += [len(re.findall(r"\bunit\d", text[: found.start()])) for found in re.finditer("Keep in mind", text)]
    assert len(places) == 400
    assert 50 <= min(places) < 100
    assert 900 < max(places) <= 950


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ruler"])
@pytest.mark.parametrize("questions", [1, 3])
def test_the_answers_are_the_variables_of_the_chain_in_question(counter, questions, exact):
    document = TASKS["vt"].build(Request("vt", 4096, counter, 9, 0, questions, exact=exact))
    assert len({q.question for q in document.questions}) == questions
    text = document.context.rsplit("Memorize and track", 1)[1]
    values: dict[str, str] = {}
    for name, value in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", text):
        values[name] = values.get(value, value)  # in reading order: a variable stands before those that take it over
    for q in document.questions:
        value = re.search(r"assigned the value (\d+) in", q.question)
        assert value
        assert sorted(q.answers) == sorted(name for name, v in values.items() if v == value[1])
        assert f"{len(q.answers)} variables" in q.answer_prefix
        assert q.target == " ".join(q.answers)
    assert document.context.count(document.questions[0].answers[0]) == 2, "the example shares no name"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ruler"])
@pytest.mark.parametrize("length", [1024, 4096])
def test_the_answers_are_the_words_that_appear_most_often(counter, length, exact):
    document = TASKS["cwe"].build(Request("cwe", length, counter, 9, 0, exact=exact))
    example, text = re.split(r"the list are: .*\nBelow is", document.context)
    counts = Counter(re.findall(r"\d+\. (\D+?)(?= \d|$)", text.split("\n")[-1]))
    common, uncommon = (30, 3) if length >= 4096 else (6, 1)
    assert {word for word, n in counts.items() if n == common} == set(document.questions[0].answers)
    assert set(counts.values()) == {common, uncommon}
    shown = Counter(Counter(re.findall(r"\d+\. (\D+?)(?= \d|$)", example.split("\n")[1])).values())
    assert shown == ({10: 10, 3: 30} if length >= 4096 else {3: 10, 1: 10})


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ruler"])
def test_frequent_words(counter, exact):
    document = TASKS["fwe"].build(Request("fwe", 4096, counter, 9, 0, exact=exact))
    counts = Counter(document.context.split("coded words. ")[1].split(" ")).most_common(6)
    assert counts[0][0] == "..."
    assert [word for word, _ in counts[1:4]] == list(document.questions[0].answers)
    assert len({n for _, n in counts[:5]}) == 5, "no ties"


def test_unseen_text_is_not_in_the_training_text():
    train, test = haystack.sentences(None, "train"), haystack.sentences(None, "test")
    assert len(test) > 1000
    assert not set(test) & set(train)
    assert 0.99 * len(haystack.sentences(None, "all")) < len(train) + len(test)


def test_essays_come_from_the_asked_split(counter):
    request = Request("niah_single_2", 2048, counter, 1, 4)
    for split in ("train", "test"):
        for exact in (True, False):
            document = TASKS["niah_single_2"].build(replace(request, split=split, exact=exact))
            text = NEEDLE.sub("", document.context).split("\n", 1)[1]
            body = " ".join(text.split())
            assert len(body) > 1000
            assert body in " ".join(haystack.sentences(None, split) * 2)


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
def test_the_table_of_a_chain_leads_to_the_answer(counter, steps, exact):
    document = Chain(steps, 16 * steps).build(Request("chain", 4096, counter, 7, 3, exact=exact))
    question = document.questions[0]
    path = walk(document)
    assert path == question.target.splitlines()
    assert len(path) == steps
    assert question.answers == (path[-1],)
    assert document.context.count(path[-1]) == 1


def test_a_chain_has_room_for_its_reply(counter):
    for name, task in CHAINS.items():
        for exact in (True, False):
            document = task.build(Request(name, 8192, counter, 1, 0, exact=exact))
            q = document.questions[0]
            prompt = counter.count(document.context + q.question + q.answer_prefix) + counter.special_tokens
            reply = counter.count(q.target)
            assert 500 < reply < task.max_new_tokens
            total = prompt + (reply if exact else task.max_new_tokens)
            assert abs(document.length - total) <= (8 if exact else 0)
            assert 8192 - 150 < total <= 8192 + 4 * exact


def test_names_of_a_chain_never_end(counter):
    document = Chain(4).build(Request("chain", 120_000, counter, 1, 0))
    sources = [re.split(" leads to | is the end", line)[0] for line in document.context.splitlines()[1:-1]]
    assert len(sources) > 7000
    assert len(set(sources)) == len(sources)


def built(name, index=0, split="train", length=1500, essays=None):
    counter = TokenCounter(tokenizer("gpt4"))
    return TASKS[name].build(Request(name, length, counter, 3, index, 3, split=split, essays=essays))


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_reply_is_what_follows_in_the_text(split):
    running = " ".join(haystack.sentences(None, split))
    document = built("text", split=split)
    first, *others = document.questions
    assert f"{document.context}{first.target}" in running + " " + running  # the text starts again at its end
    for question in others:
        start = re.fullmatch(r"\nGo on with this text: (.*)", question.question).group(1)
        assert f"{start}{question.target}" in running + " " + running
    assert {len(q.target.split()) for q in document.questions} == {48}


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_reply_is_the_code_that_follows(split):
    running = "\n".join(source_code.lines(None, split))
    document = built("code", split=split)
    first, *others = document.questions
    assert f"{document.context}{first.target}" in running + "\n" + running
    for question in others:
        start = re.fullmatch(r"\nGo on with this code:\n(.*)", question.question, re.DOTALL).group(1)
        assert f"{start}{question.target}" in running + "\n" + running


def test_no_module_is_in_both_splits(tmp_path):
    for name in map(str, range(60)):
        (tmp_path / f"m{name}.py").write_text(name)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/m.py").write_text("a test")
    train, test = (set(source_code.modules(str(tmp_path), split)) for split in ("train", "test"))
    assert len(train) > len(test) > 0
    assert not train & test
    assert train | test == set(map(str, range(60))) == set(source_code.modules(str(tmp_path), "all"))
    with pytest.raises(FileNotFoundError, match=r"has no .py files \(split='all'\)"):
        source_code.modules(str(tmp_path / "nowhere"), "all")


def test_a_quoted_passage_stands_in_the_document():
    for index in range(5):
        document = built("quote", index)
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
