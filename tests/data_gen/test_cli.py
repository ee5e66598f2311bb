"""`python -m data_gen` writes JSONL and datasets.Dataset, whole or not at all."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_from_disk

from leank.data_gen.__main__ import READERS, main, write
from leank.data_gen.request import Request
from leank.data_gen.sample import Sample
from leank.data_gen.tasks import TASKS
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import tokenizer


def run(out: Path, *more: str) -> None:
    main(["--task", "kv", "--length", "512", "--count", "3", "--questions", "2", "--out", str(out), *more])


def expected() -> list[dict]:
    counter = TokenCounter(tokenizer("reference"))
    documents = [TASKS["kv"].build(Request("kv", 512, counter, 42, i, 2)) for i in range(3)]
    return [json.loads(json.dumps(vars(s))) for d in documents for s in d.samples()]


def test_a_jsonl_file_holds_the_samples_and_nothing_else_is_left(tmp_path):
    run(tmp_path / "new" / "kv.jsonl")
    lines = (tmp_path / "new" / "kv.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == expected()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["kv.jsonl"]


def test_dataset_twice(tmp_path):
    run(tmp_path / "kv")
    run(tmp_path / "kv")  # an earlier one is replaced
    assert load_from_disk(str(tmp_path / "kv")).to_list() == expected()
    assert [p.name for p in tmp_path.iterdir()] == ["kv"]


def test_start_goes_on_where_an_earlier_file_ended(tmp_path):
    run(tmp_path / "a.jsonl", "--start", "1")
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text("utf-8").splitlines()]
    assert rows[:4] == expected()[2:]


@pytest.mark.parametrize("name", ["kv.jsonl", "kv"])
def test_a_failure_leaves_what_was_there(tmp_path, name):
    def broken():
        yield Sample("kv", 0, 0, "context", "question", "prefix", ("a",), "a", 1, 1)
        raise ValueError("no more")

    run(tmp_path / name)
    with pytest.raises(ValueError, match="no more"):
        write(broken(), tmp_path / name)
    if name == "kv":
        assert load_from_disk(str(tmp_path / name)).to_list() == expected()
    else:
        assert len((tmp_path / name).read_text("utf-8").splitlines()) == 6


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", "[1]"), ("tokenizer_config.json", "[]")])
def test_a_damaged_tokenizer(tmp_path, name, content):
    tokenizer("reference").save_pretrained(tmp_path / "words")
    (tmp_path / "words" / name).write_text(content)
    with pytest.raises(SystemExit, match=r"data_gen: tokenizer='.*words' cannot be loaded \(\w+Error: .*\); give "):
        run(tmp_path / "kv.jsonl", "--tokenizer", str(tmp_path / "words"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--length", "20"), "length=20 is too short for task 'kv'"),
        (("--tokenizer", "/no/such/folder"), "tokenizer='/no/such/folder'"),
        (("--count", "0"), "count=0"),
        (("--chat",), "has no chat template"),
        (("--task", "qa_1"), "data=None: no such file; download SQuAD's"),
    ],
)
def test_arguments_that_cannot_be_meant_leave_no_file(tmp_path, more, message, capsys):
    with pytest.raises(SystemExit) as found:
        run(tmp_path / "kv.jsonl", *more)
    assert re.search(f"data_gen: .*{message}", f"{found.value}{capsys.readouterr().err}")
    assert not (tmp_path / "kv.jsonl").exists()


def test_other_folders_are_left_alone(tmp_path, capsys):
    (tmp_path / "kv.jsonl").mkdir()
    with pytest.raises(SystemExit):
        run(tmp_path / "kv.jsonl")
    assert "kv.jsonl' exists and is a folder; choose another name" in capsys.readouterr().err
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "keep.txt").write_text("mine")
    with pytest.raises(SystemExit):
        run(tmp_path / "notes")
    assert "is no datasets.Dataset folder; choose another name" in capsys.readouterr().err
    assert (tmp_path / "notes" / "keep.txt").read_text() == "mine"


def test_processes_that_write_one_file_do_not_mix(tmp_path):
    """Whoever ends last wins; a file of the user's with a similar name stays."""
    (tmp_path / "kv.jsonl.partial").write_text("mine")
    out, counter = tmp_path / "kv.jsonl", TokenCounter(tokenizer("reference"))

    def samples(seed, within=lambda: None):
        for index in range(3):
            yield from TASKS["kv"].build(Request("kv", 512, counter, seed, index)).samples()
            within()

    assert write(samples(1, lambda: write(samples(2), out)), out) == 3
    assert [json.loads(line)["seed"] for line in out.read_text("utf-8").splitlines()] == [1, 1, 1]
    assert {p.name for p in tmp_path.iterdir()} == {"kv.jsonl", "kv.jsonl.partial"}
    assert (tmp_path / "kv.jsonl.partial").read_text() == "mine"


@pytest.mark.parametrize("name", TASKS)
def test_a_file_that_the_task_does_not_read_is_refused(name, tmp_path):
    """READERS is what the tasks do: another text changes the samples of those that read it."""
    (tmp_path / "other.txt").write_text("A sentence of another text. And one more.\n" * 99)

    def made(**changed):
        request = Request(name, 8192, TokenCounter(tokenizer("reference")), 0, 0, **changed)
        return TASKS[name].build(request)

    if name in READERS["essays"]:
        assert made() != made(essays=str(tmp_path / "other.txt"))
    for setting in READERS:
        if name not in READERS[setting]:
            assert name.startswith("qa") or made() == made(**{setting: str(tmp_path / "other.txt")})
            with pytest.raises(SystemExit, match=f"{setting}='/nowhere': {name} reads no such file; leave it out"):
                main(["--task", name, "--out", str(tmp_path / "x.jsonl"), f"--{setting}", "/nowhere"])


def test_no_torch_is_imported():
    code = "import sys, data_gen.tasks, data_gen.chat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--seed", "-1"], "seed=-1"),
        (["--seed", str(2**40)], f"seed={2**40}"),
        (["--start", str(10**30)], "start=1000"),
        (["--count", "0"], "count=0"),
        (["--out", ""], "out='.'"),
        (["--out", "/"], "out='/'"),
        (["--out", "a\0b"], r"out='a\x00b'"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(more, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=re.escape(named)):
        run(tmp_path / "kv.jsonl", *more)
    assert not list(tmp_path.iterdir())


def test_a_file_without_a_stem_is_jsonl_too(tmp_path):
    run(tmp_path / ".jsonl")
    assert len((tmp_path / ".jsonl").read_text("utf-8").splitlines()) == 6
