"""Settings, lengths and files that cannot be used: one line that names the setting or the file, and says what to do."""

import gzip
import re
from dataclasses import replace

import pytest

from leank.data_gen import haystack, reading
from leank.data_gen.amount import amount
from leank.data_gen.task import Request
from leank.data_gen.tasks import TASKS, task
from leank.data_gen.tasks.chain import Chain
from leank.data_gen.tasks.niah import Niah
from leank.data_gen.tasks.passkey import Passkey
from leank.data_gen.tasks.word_counts import vocabulary
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import tokenizer

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


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", [n for n in TASKS if not n.startswith("qa")])
def test_a_length_too_short_for_its_task_is_named(name, exact):
    with pytest.raises(ValueError, match=f"length=60 is too short for task '{name}'.*raise length"):
        TASKS[name].build(replace(KV, name=name, length=60, exact=exact))


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
