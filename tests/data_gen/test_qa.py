"""qa_1 and qa_2 on small samples of SQuAD and HotpotQA in their official form."""

import gzip
import json
import re
from dataclasses import replace

import pytest

from leank.data_gen.task import Request
from leank.data_gen.tasks import RULER
from leank.data_gen.tasks.qa import read
from leank.data_gen.tokens import TokenCounter
from tests import DATA
from tests.helpers.text_tokenizers import tokenizer

FOLDER = DATA / "qa"
FILES = {"qa_1": FOLDER / "squad_sample.json", "qa_2": FOLDER / "hotpotqa_sample.json"}
DATASETS = {"qa_1": "squad", "qa_2": "hotpotqa"}


@pytest.fixture(scope="module")
def counter() -> TokenCounter:
    return TokenCounter(tokenizer("gpt4"))


def request(name: str, counter: TokenCounter, length: int, index: int = 0, exact: bool = False) -> Request:
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
        document = RULER[name].build(request(name, counter, lengths[name], index, exact))
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
        draft = RULER["qa_1"].draw(request("qa_1", counter, 4096, index), 1 + len(asked.related))
        assert sorted(documents(draft.context)) == sorted(texts[i] for i in (*asked.gold, *asked.related))


def test_all_documents_where_the_length_has_room(counter):
    _, texts = read("hotpotqa", str(FILES["qa_2"]))
    document = RULER["qa_2"].build(request("qa_2", counter, 32_768))
    assert sorted(documents(document.context)) == sorted(texts)


def test_a_packed_file(counter, tmp_path):
    packed = tmp_path / "squad.json.gz"
    packed.write_bytes(gzip.compress(FILES["qa_1"].read_bytes()))
    plain = request("qa_1", counter, 1024)
    assert RULER["qa_1"].build(replace(plain, data=str(packed))) == RULER["qa_1"].build(plain)


def test_missing_and_wrong_files_are_named(counter, tmp_path):
    asked = request("qa_1", counter, 1024)
    with pytest.raises(FileNotFoundError, match=r"data=None.*SQuAD's dev-v2.0.json.*give its path as data="):
        RULER["qa_1"].build(replace(asked, data=None))
    with pytest.raises(FileNotFoundError, match=r"data='nowhere.json'.*HotpotQA"):
        RULER["qa_2"].build(replace(asked, data="nowhere.json"))
    with pytest.raises(ValueError, match=r"hotpotqa_sample.json' is not of the form of SQuAD's"):
        RULER["qa_1"].build(replace(asked, data=str(FILES["qa_2"])))
    (tmp_path / "half.json").write_text('{"data": [')
    with pytest.raises(ValueError, match=r"half.json' is not of the form"):
        RULER["qa_1"].build(replace(asked, data=str(tmp_path / "half.json")))
    with pytest.raises(ValueError, match=r"index=900.* questions; lower start or count"):
        RULER["qa_1"].build(replace(asked, index=900))
    with pytest.raises(ValueError, match=r"has 8 documents, too few for length=50000"):
        RULER["qa_1"].build(replace(asked, length=50_000, exact=True))
    with pytest.raises(ValueError, match=r"length=500 is too short for task 'qa_2'"):
        RULER["qa_2"].build(request("qa_2", counter, 500))
