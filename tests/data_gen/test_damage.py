"""Damaged files of SQuAD, HotpotQA, essays and words: one line that names the file, never another sample in silence."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.data_gen import reading
from leank.data_gen.haystack import sentences
from leank.data_gen.tasks.qa import read as read_qa
from leank.data_gen.tasks.word_counts import vocabulary
from tests import DATA

QA = DATA / "qa"


def places(value, path=()):
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from places(inner, (*path, name))


READ = {"title", "question", "answer", "answers", "context", "paragraphs", "qas", "data", "is_impossible", "text"}


@settings(max_examples=80)
@given(data=st.data())
def test_one_damaged_place_of_a_question_file_is_named(data, tmp_path_factory):
    """Of SQuAD and HotpotQA: no other type anywhere is taken for what should be there."""
    name = data.draw(st.sampled_from(["squad", "hotpotqa"]))
    whole = json.loads((QA / f"{name}_sample.json").read_text("utf-8"))
    if name == "squad":  # what is read: not titles, ids or offsets; of questions without an answer, only that
        read = [p for p in places(whole) if p[-1] in READ - {"title"} and "plausible_answers" not in p]
    else:
        read = [p for p in places(whole) if (len(p) == 2 and p[-1] in READ) or (len(p) > 2 and p[1] == "context")]
    path = data.draw(st.sampled_from(read))
    holder = whole
    for step in path[:-1]:
        holder = holder[step]
    if isinstance(holder, dict) and holder.get("is_impossible") and path[-1] != "is_impossible":
        return
    holder[path[-1]] = data.draw(st.sampled_from([None, 5, True if path[-1] != "is_impossible" else 1, {"a": 1}]))
    file = tmp_path_factory.mktemp("qa") / "questions.json"
    file.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=r"questions\.json' is not of the form of .*; give that file") as caught:
        read_qa(name, str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bomb.txt.gz", "long.txt"])
def test_a_small_file_of_a_text_without_end_is_refused_before_memory_is(name, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST", 1 << 20)
    content = b"One sentence. " * (1 << 20)
    (tmp_path / name).write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"^{tmp_path / name} holds more than 1 MiB of text; give a part of it$"):
            sentences(str(tmp_path / name), "all")
        assert tracemalloc.get_traced_memory()[1] < 6 << 20  # the text has 14 MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("essays.txt.gz", gzip.compress(b"One sentence. " * 99, mtime=0)[:-20]),
        ("essays.txt.gz", b"no gzip"),
        ("essays.txt", b"One sentence. \xff"),
        ("essays.json", b'{"text": 5}'),
        ("essays.json", b'{"text":' * 100_000),
        ("essays.json", b'["text"]'),
        ("folder/one.txt", b"One sentence. \xff"),
    ],
)
def test_damaged_essays_and_word_lists_are_named(file, content, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    given = tmp_path / "folder" if "/" in file else tmp_path / file
    with pytest.raises(ValueError, match=rf"^[^\n]*{given}[^\n]*; [^\n]*$"):
        sentences(str(given), "all")
    if file.endswith((".gz", ".txt")) and "/" not in file:
        with pytest.raises(ValueError, match=rf"^{given}[^\n]*; [^\n]*$"):
            vocabulary(str(given))
