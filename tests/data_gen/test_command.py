"""`python -m leank.data_gen` writes its output whole or not at all, and names what cannot be used and the cure."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import load_from_disk

from leank.data_gen import haystack, reading
from leank.data_gen.__main__ import main, write
from leank.data_gen.amount import amount
from leank.data_gen.task import Request, Sample
from leank.data_gen.tasks import TASKS, task
from leank.data_gen.tasks.chain import Chain
from leank.data_gen.tasks.niah import Niah
from leank.data_gen.tasks.passkey import Passkey
from leank.data_gen.tasks.word_counts import vocabulary
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import tokenizer


def run(out: Path, *more: str) -> None:
    main(["--task", "kv", "--length", "512", "--count", "3", "--questions", "2", "--out", str(out), *more])


def written(out: Path) -> list[dict]:
    if out.is_dir():
        return load_from_disk(str(out)).to_list()
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def expected() -> list[dict]:
    counter = TokenCounter(tokenizer("reference"))
    documents = [TASKS["kv"].build(Request("kv", 512, counter, 42, i, 2)) for i in range(3)]
    return [json.loads(json.dumps(vars(s))) for d in documents for s in d.samples()]


@pytest.mark.parametrize("name", ["kv.jsonl", "kv"])
def test_an_output_holds_the_samples_and_is_replaced_or_kept_whole(tmp_path, name):
    def broken():
        yield Sample("kv", 0, 0, "context", "question", "prefix", ("a",), "a", 1, 1)
        raise ValueError("no more")

    out = tmp_path / "new" / name
    for _ in range(2):  # an earlier one is replaced
        run(out)
        assert written(out) == expected()
    with pytest.raises(ValueError, match="no more"):
        write(broken(), out)
    assert written(out) == expected()
    assert [p.name for p in out.parent.iterdir()] == [name]


def test_start_goes_on_where_an_earlier_file_ended(tmp_path):
    run(tmp_path / "a.jsonl", "--start", "1")
    assert written(tmp_path / "a.jsonl")[:4] == expected()[2:]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--length", "20"), "length=20 is too short for task 'kv'"),
        (("--count", "0"), "count=0, start=0: give a count from 1"),
        (("--count", "9" * 25), "count=9{25}, start=0: give a count from 1 to 16777216"),
        (("--start", "-1"), "count=3, start=-1: give a count from 1 to 16777216 and a start from 0 on"),
        (("--task", "text", "--ruler-fit"), "task 'text' has no whole units to be sized by, as RULER's"),
        (("--tokenizer", "/no/such/folder"), "tokenizer='/no/such/folder'"),
        (("--chat",), "has no chat template"),
        (("--task", "qa_1"), "data=None: no such file; download SQuAD's"),
        (("--questions", "0"), "questions=0"),
        (("--out", "{folder}"), "is no datasets.Dataset folder; choose another name"),
        (("--out", "{folder}.jsonl"), "exists and is a folder; choose another name"),
    ],
)
def test_arguments_that_cannot_be_meant_leave_no_file(tmp_path, more, message, capsys):
    tokenizer("reference").save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("[1]")
    (tmp_path / "damaged.jsonl").mkdir()
    with pytest.raises(SystemExit) as found:
        run(tmp_path / "kv.jsonl", *(one.replace("{folder}", str(tmp_path / "damaged")) for one in more))
    assert re.search(f"data_gen: .*{message}", f"{found.value}{capsys.readouterr().err}")
    assert {p.name for p in tmp_path.iterdir()} == {"damaged", "damaged.jsonl"}
    assert (tmp_path / "damaged" / "tokenizer.json").read_text() == "[1]"


KV = Request("kv", 2048, TokenCounter(tokenizer("reference")), 0, 0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: task("nope"), "task='nope' .*choose one of .*kv"),
        (lambda: Niah("hay"), "haystack='hay' must be 'noise', 'essay' or 'needle'"),
        (lambda: Niah(num_values=0), "num_values=0"),
        (lambda: Passkey(num_passkeys=11), "num_passkeys=11"),
        (lambda: Chain(0), "steps=0"),
        (lambda: replace(KV, length=0), "length=0"),
        (lambda: replace(KV, length=10**12), "length=1000000000000"),
        (lambda: replace(KV, questions=10**9), "questions=1000000000"),
        (lambda: replace(KV, split="dev"), "split='dev' must be 'train', 'test' or 'all'"),
    ],
)
def test_settings_out_of_range(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        (name, exact)
        for name in TASKS
        for exact in (True, False)
        if not name.startswith(("qa", "prompts")) and (exact or name not in ("text", "quote", "code"))
    ],
)
def test_a_length_too_short_for_its_task_is_named(name, exact):
    with pytest.raises(ValueError, match=f"length=60 is too short for task '{name}'.*raise length"):
        TASKS[name].build(replace(KV, name=name, length=60, exact=exact))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("essays.txt.gz", gzip.compress(b"One sentence. " * 99, mtime=0)[:-20]),
        ("essays.txt.gz", b"no gzip"),
        ("essays.txt", b"One sentence. \xff"),
        ("essays.json", b'{"text":' * 100_000),
        ("essays.json", b'["text"]'),
        ("essays.json", b'{"text": null}'),
        ("essays.json", b'{"text": "\\ud800. A sentence."}'),
        ("folder/one.txt", b"One sentence. \xff"),
        ("empty.txt", b"\n\n"),
    ],
)
def test_damaged_essays_and_word_lists_are_named(file, content, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    given = tmp_path / "folder" if "/" in file else tmp_path / file
    with pytest.raises(ValueError, match=rf"^[^\n]*{given}[^\n]*; [^\n]*$"):
        haystack.sentences(str(given), "all")
    if file.startswith("essays.txt"):
        with pytest.raises(ValueError, match=rf"^{given}[^\n]*; [^\n]*$"):
            vocabulary(str(given))


def test_a_file_that_unpacks_to_too_much_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "UNPACKED", 1 << 20)
    (tmp_path / "bomb.txt.gz").write_bytes(gzip.compress(b"a" * (1 << 21), mtime=0))
    with pytest.raises(ValueError, match=r"bomb\.txt\.gz cannot be read: it unpacks to more than 1 MiB"):
        haystack.sentences(str(tmp_path / "bomb.txt.gz"), "all")


def test_missing_files_are_named(tmp_path):
    for name, setting, cure in (("niah_single_2", "essays", "give a .txt"), ("cwe", "data", "one word a line")):
        asked = replace(KV, name=name, **{setting: str(tmp_path / "none.txt")})
        with pytest.raises(FileNotFoundError, match=f"{setting}=.*none.txt.*{cure}"):
            TASKS[name].build(asked)


def test_words_run_out_unless_a_list_of_them_is_given(tmp_path):
    asked = replace(KV, name="cwe", length=250_000)
    for exact in (True, False):
        with pytest.raises(ValueError, match=re.escape("length=250000 needs more than the 8,169") + ".*give data="):
            TASKS["cwe"].build(replace(asked, exact=exact))
    (tmp_path / "words.txt").write_text("\n".join(f"word{'abcdefghij'[i % 10]}{i:x}" for i in range(20_000)))
    assert TASKS["cwe"].build(replace(asked, data=str(tmp_path / "words.txt"))).length > 0.98 * 250_000


@pytest.mark.parametrize(
    ("number", "thing", "said"),
    [
        (0, "row", "0 rows"), (1, "new row", "1 new row"), (2, "KV head", "2 KV heads"), (1, "batch", "1 batch"),
        (2, "batch", "2 batches"), (3, "query", "3 queries"), (2, "process", "2 processes"), (4, "day", "4 days"),
    ],
)  # fmt: skip
def test_number_and_noun_agree(number, thing, said):
    assert amount(number, thing) == said
