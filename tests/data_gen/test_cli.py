"""`python -m leank.data_gen` writes JSONL and datasets.Dataset, whole or not at all."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_from_disk

from leank.data_gen.__main__ import main, write
from leank.data_gen.task import Request, Sample
from leank.data_gen.tasks import TASKS
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
        (("--essays", "my.txt"), "essays='my.txt': kv reads no such file; leave it out"),
        (("--data", "words.txt"), "data='words.txt': kv reads no such file"),
        (("--tokenizer", "/no/such/folder"), "tokenizer='/no/such/folder'"),
        (("--tokenizer", "{folder}"), r"tokenizer='.*damaged' cannot be loaded \(\w+Error: .*\); give "),
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


def test_no_torch_is_imported():
    code = "import sys, data_gen.tasks, data_gen.chat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
