"""RULER's thirteen tasks: the official text, numbers of needles, and sizes.

The table was derived from one sample a task of the official generator (NVIDIA/RULER c3f5e3b, 4,096 tokens, cl100k):
hash of the template text, answers, and tokens of the reply.
"""

import gzip
import hashlib
import json
import math
import re
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from leank.data_gen import haystack
from leank.data_gen.task import Document, Request
from leank.data_gen.tasks import RULER, TASKS
from leank.data_gen.tasks.niah import DEPTHS
from leank.data_gen.tasks.qa import read
from leank.data_gen.tokens import TokenCounter
from tests import DATA
from tests.helpers.text_tokenizers import KINDS, tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


def skeleton(task: str, text: str, answer_prefix: str) -> str:
    """The template of a prompt (context + question) and its answer prefix; keys, values, words, documents cut out."""
    if task.startswith("niah"):
        header, last = text.split("\n", 1)[0], text.rsplit("\n", 1)[1]
        return re.sub(r"for .+? mentioned", "for KEY mentioned", f"{header}\nCONTEXT\n{last}|{answer_prefix}")
    if task == "vt":
        text = (text + "|" + answer_prefix).replace(NOISE, "")
        text = re.sub(r"VAR [A-Z]+ = (VAR [A-Z]+ |\d+)\n", "", text)
        return re.sub(r"\d{5}", "VALUE", re.sub(r"(?<=they are:  )[A-Z ]+", "NAMES", text))
    if task == "cwe":
        return re.sub(r"(?<=[\n ])1\. [^\n]+", "LIST", text) + "|" + answer_prefix
    if task == "fwe":
        return re.sub(r"(?<=coded words\. )[^\n]+", "WORDS", text) + "|" + answer_prefix
    text = re.sub(r"Document 1:\n.*\n\n(?=Answer the)", "DOCUMENTS", text, flags=re.S)
    return re.sub(r"(?<=Question: ).*", "QUESTION", text) + "|" + answer_prefix


def fingerprint(task: str, text: str, answer_prefix: str) -> str:
    """A short hash of the skeleton."""
    return hashlib.sha256(skeleton(task, text, answer_prefix).encode()).hexdigest()[:16]


FILES = {"qa_1": DATA / "qa" / "squad_sample.json", "qa_2": DATA / "qa" / "hotpotqa_sample.json"}
OFFICIAL = {
    "niah_single_1": ("afb80c2c830655bc", 1, 128),
    "niah_single_2": ("afb80c2c830655bc", 1, 128),
    "niah_single_3": ("3381be59fe9d4ecc", 1, 128),
    "niah_multikey_1": ("afb80c2c830655bc", 1, 128),
    "niah_multikey_2": ("afb80c2c830655bc", 1, 128),
    "niah_multikey_3": ("3381be59fe9d4ecc", 1, 128),
    "niah_multivalue": ("de4367d2e33f010a", 4, 128),
    "niah_multiquery": ("de4367d2e33f010a", 4, 128),
    "vt": ("00b868b680f10749", 5, 30),
    "cwe": ("ceb7ed10c9cc3af0", 10, 120),
    "fwe": ("b62b8893ac63b186", 3, 50),
    "qa_1": ("d5a23e3f3210d2a6", 3, 32),
    "qa_2": ("d5a23e3f3210d2a6", 1, 32),
}
NEEDLES = {
    "niah_single_1": 1, "niah_single_2": 1, "niah_single_3": 1, "niah_multikey_1": 4, "niah_multivalue": 4,
    "niah_multiquery": 4,
}  # fmt: skip


@lru_cache
def shared(kind: str) -> TokenCounter:
    """One counter a tokenizer: it remembers the sizes that were found."""
    return TokenCounter(tokenizer(kind))


@pytest.fixture
def counter() -> TokenCounter:
    return shared("gpt4")


def ruler(name: str, counter: TokenCounter, length: int = 4096, index: int = 0, **settings) -> Document:
    request = Request(
        name, length, counter, 42, index, exact=False, data=FILES.get(name) and str(FILES[name]), **settings
    )
    return RULER[name].build(request)


def prompt_tokens(document: Document, counter: TokenCounter) -> int:
    q = document.questions[0]
    return len(counter.tokenizer(document.context + q.question + q.answer_prefix)["input_ids"])


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_text_is_the_official_one(name, counter):
    assert list(OFFICIAL) == list(RULER)
    hash_, answers, reply = OFFICIAL[name]
    for exact in (False, True) if name.startswith("niah") else (False,):
        document = TASKS[name].build(
            Request(name, 4096, counter, 42, 0, exact=exact, data=FILES.get(name) and str(FILES[name]))
        )
        q = document.questions[0]
        text = document.context + q.question
        assert fingerprint(name, text, q.answer_prefix) == hash_, skeleton(name, text, q.answer_prefix)
        assert (len(q.answers), document.max_new_tokens) == (answers, reply)


@pytest.mark.parametrize("name", NEEDLES)
def test_number_of_needles(name, counter):
    assert ruler(name, counter).context.count("One of the special magic") == NEEDLES[name]


@pytest.mark.parametrize(("name", "key"), [("niah_multikey_2", r"\S+-[^:]+"), ("niah_multikey_3", r"[0-9a-f-]{36}")])
def test_haystacks_that_are_all_needles(name, key, counter):
    _, *lines = ruler(name, counter).context.split("\n")
    assert len(lines) > 25
    assert all(re.fullmatch(rf"One of the special magic \w+ for {key} is: \S+\.", line) for line in lines)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("name", [n for n in RULER if n not in FILES])
def test_prompt_and_reply_stay_within_the_length(name, length, kind):
    counter = shared(kind)
    for index in range(3):
        document = ruler(name, counter, length, index)
        assert document.length == prompt_tokens(document, counter) + document.max_new_tokens <= length
        assert document.length > 0.4 * length


def test_units_are_the_most_that_fit_one_draw(counter):
    """Binary search against trying every number in turn."""
    task, draw = RULER["niah_single_1"], Request("niah_single_1", 4500, counter, 42, -1, exact=False)
    document = ruler("niah_single_1", counter, 4500)
    units = counter.fits[task, draw]
    sizes = []
    for n in range(units + 3):
        draft = task.draw(draw, n)
        q = draft.questions[0]
        sizes.append(counter.count(draft.context + q.question + q.answer_prefix, remember=False) + 128)
    assert sizes[units] <= 4500 < sizes[units + 1]
    assert document.context.count(haystack.NOISE_LINE) in (units, units - 25)


def test_a_long_sample_gives_up_a_whole_step(counter):
    lines = {ruler("niah_single_1", counter, 4096, i).context.count(haystack.NOISE_LINE) for i in range(25)}
    assert len(lines) == 2
    assert max(lines) - min(lines) == 25


@pytest.mark.parametrize("name", [name for name in RULER if name.startswith(("niah", "vt"))])
@pytest.mark.parametrize("length", [1024, 2048])
def test_a_sample_below_4096_tokens_falls_short_by_less_than_a_unit(name, length, counter):
    """With RULER's steps, 1,024 tokens of a chat model could be 192: no 500 words fitted beside its template."""
    unit = 12 if getattr(RULER[name], "haystack", "noise") == "essay" else 80  # tokens of a word, or of a line
    for i in range(6):
        request = Request(name, length, counter, 42, i, exact=False, reserve=60)
        document = RULER[name].build(request)
        assert length - unit <= document.length <= length


def test_an_essay_gives_up_500_words(counter):
    words = set()
    for i in range(25):
        text = ruler("niah_single_2", counter, 4096, i).context.split("afterwards.\n")[1]
        words.add(len(re.sub(r"(^| )One of the special magic \w+ for [^:]+ is: \S+\.", "", text).split()))
    assert len(words) == 2
    assert max(words) - min(words) == 500


def test_essays_start_at_their_beginning_and_repeat(counter, tmp_path):
    (tmp_path / "essay.json").write_text('{"text": "Once upon a time.\\n\\nThere was an old pond. A frog jumped in."}')
    request = Request("niah_multivalue", 1024, counter, 0, 0, exact=False, essays=str(tmp_path / "essay.json"))
    text = RULER["niah_multivalue"].build(request).context.split("afterwards.\n")[1]
    text = re.sub(r"(^| )One of the special magic \w+ for [^:]+ is: \S+\.", "", text).strip()
    assert text.startswith("Once upon a time. There was an old pond. A frog jumped in. Once upon")


def test_needles_stand_between_sentences(counter):
    for i in range(5):
        text = ruler("niah_multivalue", counter, 4096, i).context
        for before in re.findall(r"(.)\s(?=One of the special magic [^:]+: \S+\. )", text):
            assert before in ".!?\"')]", before


def test_variable_tracking(counter):
    document = ruler("vt", counter)
    example, text = document.context.split("they are: ")
    text = text.split("\n\n", 1)[1]
    assert len(set(re.findall(r"VAR ([A-Z]{3}) ", example))) == 5
    assert len(set(re.findall(r"VAR ([A-Z]{5}) ", text))) == 5
    size = counter.count(example + "they are: ", remember=False) + 30
    assert 500 - 40 < size <= 500 + 10, "the example is a sample of 500 tokens"


def test_frequent_words_follow_the_zeta_distribution(counter):
    document = ruler("fwe", counter)
    words = document.context.split("coded words. ")[1].split(" ")
    counts = sorted((words.count(w) for w in set(words)), reverse=True)
    zeta = math.pi**2 / 6
    total = next(n for n in range(len(words), 2 * len(words)) if int(n / zeta) == counts[0])
    for n in range(total, total + 3):
        expected = [int(n / k**2 / zeta) for k in range(1, 81)]
        if [c for c in expected if c] == counts:
            break
    else:
        pytest.fail(f"{counts} are not the counts of a zeta distribution")


def test_a_fit_does_not_depend_on_the_questions_asked_before(counter):
    used = [ruler("niah_multikey_2", counter, 2048, i) for i in range(3)]
    fresh = [ruler("niah_multikey_2", TokenCounter(tokenizer("gpt4")), 2048, i) for i in (2, 1, 0)]
    assert used == fresh[::-1]


def test_a_chat_template_takes_its_tokens_from_the_haystack(counter):
    plain, reserved = (ruler("niah_single_1", counter, 4096, 1, reserve=r) for r in (0, 200))
    assert prompt_tokens(reserved, counter) + 200 + 128 == reserved.length <= 4096
    assert len(reserved.context) < len(plain.context)


def test_needles_stand_at_rulers_depths():
    assert list(DEPTHS) == np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int).tolist()


DATASETS = {"qa_1": "squad", "qa_2": "hotpotqa"}


def asking(name: str, counter: TokenCounter, length: int, index: int = 0, exact: bool = False) -> Request:
    return Request(name, length, counter, 42, index, exact=exact, data=str(FILES[name]))


def documents(context: str) -> list[str]:
    """The numbered documents of a prompt; raises where the numbers do not count up from 1."""
    parts = re.split(r"(?:\n\n|^)Document (\d+):\n", context.split("The following are given documents.\n\n", 1)[1])
    assert parts[1::2] == [str(i) for i in range(1, len(parts) // 2 + 1)]
    return parts[2::2]


def test_squad_asks_what_has_an_answer_in_file_order():
    questions, texts = read("squad", str(FILES["qa_1"]))
    raw = json.loads(FILES["qa_1"].read_text("utf-8"))["data"]
    rows = [(p, qa) for a in raw for p in a["paragraphs"] for qa in p["qas"] if not qa["is_impossible"]]
    assert [q.question for q in questions] == [qa["question"] for _, qa in rows]
    assert [texts[q.gold[0]] for q in questions] == [p["context"] for p, _ in rows]
    assert [q.answers for q in questions] == [tuple(a["text"] for a in qa["answers"]) for _, qa in rows]
    assert list(texts) == sorted(set(texts))


def test_hotpotqa_documents_are_title_and_sentences():
    questions, texts = read("hotpotqa", str(FILES["qa_2"]))
    raw = json.loads(FILES["qa_2"].read_text("utf-8"))
    assert [q.answers for q in questions] == [(row["answer"],) for row in raw]
    title, lines = raw[0]["context"][0]
    assert texts[questions[0].gold[0]] == title + "\n" + "".join(lines)
    assert len(questions[0].gold) == 10


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ruler"])
@pytest.mark.parametrize("name", FILES)
def test_the_questions_own_documents_are_there(name, exact, counter):
    questions, texts = read(DATASETS[name], str(FILES[name]))
    lengths = {"qa_1": 700, "qa_2": 3000}
    for index in range(3):
        document = RULER[name].build(asking(name, counter, lengths[name], index, exact))
        shown = documents(document.context)
        assert all(texts[i] in shown for i in questions[index].gold)
        assert document.questions[0].answers == questions[index].answers
        assert document.questions[0].question.endswith(questions[index].question)
        q = document.questions[0]
        reply = q.target if exact else ""
        tokens = counter.count(document.context + q.question + q.answer_prefix + reply, remember=False)
        room = lengths[name] - (0 if exact else 32)
        assert tokens <= room + (3 if exact else 0)
        assert not exact or tokens >= 0.98 * room


def test_documents_of_the_same_article_come_first(counter):
    questions, texts = read("squad", str(FILES["qa_1"]))
    for index, asked in enumerate(questions):
        draft = RULER["qa_1"].draw(asking("qa_1", counter, 4096, index), 1 + len(asked.related))
        assert sorted(documents(draft.context)) == sorted(texts[i] for i in (*asked.gold, *asked.related))


def test_all_documents_where_the_length_has_room(counter):
    _, texts = read("hotpotqa", str(FILES["qa_2"]))
    document = RULER["qa_2"].build(asking("qa_2", counter, 32_768))
    assert sorted(documents(document.context)) == sorted(texts)


def test_a_packed_file(counter, tmp_path):
    packed = tmp_path / "squad.json.gz"
    packed.write_bytes(gzip.compress(FILES["qa_1"].read_bytes()))
    plain = asking("qa_1", counter, 1024)
    assert RULER["qa_1"].build(replace(plain, data=str(packed))) == RULER["qa_1"].build(plain)


def test_missing_and_wrong_files_are_named(counter, tmp_path):
    asked = asking("qa_1", counter, 1024)
    with pytest.raises(FileNotFoundError, match=r"data=None.*SQuAD's dev-v2.0.json.*give its path as data="):
        RULER["qa_1"].build(replace(asked, data=None))
    with pytest.raises(FileNotFoundError, match=r"data='nowhere.json'.*HotpotQA"):
        RULER["qa_2"].build(replace(asked, data="nowhere.json"))
    with pytest.raises(ValueError, match=r"hotpotqa_sample.json' is not of the form of SQuAD's"):
        RULER["qa_1"].build(replace(asked, data=str(FILES["qa_2"])))
    (tmp_path / "half.json").write_text('{"data": [')
    with pytest.raises(ValueError, match=r"half.json' is not of the form"):
        RULER["qa_1"].build(replace(asked, data=str(tmp_path / "half.json")))
    rows, odd = json.loads(FILES["qa_2"].read_text("utf-8")), tmp_path / "odd.json"
    for change in ({"question": None}, {"answer": ""}, {"answer": 3}, {"context": [["title", [None]]]}):
        odd.write_text(json.dumps([rows[0] | change, *rows[1:]]))
        with pytest.raises(ValueError, match=r"^[^\n]*odd.json' is not of the form of HotpotQA's[^\n]*$"):
            read("hotpotqa", str(odd))
    with pytest.raises(ValueError, match=r"index=900.* questions; lower start or count"):
        RULER["qa_1"].build(replace(asked, index=900))
    with pytest.raises(ValueError, match=r"has 8 documents, too few for length=50000"):
        RULER["qa_1"].build(replace(asked, length=50_000, exact=True))
    with pytest.raises(ValueError, match=r"length=500 is too short for task 'qa_2'"):
        RULER["qa_2"].build(asking("qa_2", counter, 500))
