import gzip
import json
import zipfile
from dataclasses import replace

import pytest

from leank.eval.benchmarks import base, longbench
from leank.eval.benchmarks.from_files import checked, cut_in_the_middle
from leank.eval.benchmarks.longbench import LongBench

DATA = {
    "input": "Who?",
    "context": "A {brace} text.",
    "answers": ["Ada", "Ada L."],
    "length": 3,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "x1",
}


def build(task, data=None):
    return LongBench().build(task, {**(data or DATA), "dataset": task})


class Words:
    """Tokens are words; 0 is a special token in front."""

    def encode(self, text):
        self.words = ["<s>", *text.split(" ")]
        return list(range(len(self.words)))

    def decode(self, token_ids, *, skip_special_tokens):
        return " ".join(self.words[i] for i in token_ids if i or not skip_special_tokens)


@pytest.mark.parametrize("task", longbench.PROMPTS)
def test_row_is_the_official_prompt(task):
    row = build(task)
    assert row.prompt == longbench.PROMPTS[task].format(**DATA)
    assert row.context.endswith(DATA["context"])
    assert row.max_new_tokens == longbench.MAX_NEW_TOKENS[task]
    assert (row.answers, row.id, row.metric) == (["Ada", "Ada L."], "x1", "longbench")


def test_facts_of_the_tasks():
    assert len(longbench.PRESETS["think"]) == len(longbench.PRESETS["iap"]) == 16
    assert len(longbench.PRESETS["leank"]) == 14
    assert set(longbench.PRESETS["think"]) - set(longbench.PRESETS["leank"]) == {"narrativeqa", "musique"}
    assert len(longbench.PRESETS["longbench_e"]) == 13
    assert "asconcisely" in longbench.PROMPTS["narrativeqa"]
    wanted = {"narrativeqa": 128, "triviaqa": 32, "samsum": 128, "trec": 64, "lcc": 64, "qmsum": 512}
    assert {task: longbench.MAX_NEW_TOKENS[task] for task in wanted} == wanted
    no_chat = {task for task in longbench.PROMPTS if not build(task).chat}
    assert no_chat == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    stops = {task: build(task) for task in longbench.PROMPTS}
    ends = {task: (row.ends, row.min_new_tokens) for task, row in stops.items() if row.ends or row.min_new_tokens}
    assert ends == {"samsum": (("\n",), 1)}


def test_a_cut_prompt_keeps_both_ends_and_its_question_where_it_can():
    row = replace(build("lcc"), context="a b c d e ", question="f g")  # 8 tokens with the special one
    assert cut_in_the_middle(row, 8, Words()) == row
    cut = cut_in_the_middle(row, 7, Words())
    assert (cut.context, cut.question) == ("a be ", "f g")  # 3 + 3; the special token counts, then goes
    cut = cut_in_the_middle(row, 3, Words())
    assert (cut.context, cut.question) == ("g", "")
    with pytest.raises(ValueError, match="max_length=1 leaves no prompt"):
        cut_in_the_middle(row, 1, Words())


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "zip", "folder"])
def test_lines_are_read_from_every_form_of_the_files(tmp_path, kind):
    lines = "".join(json.dumps({**DATA, "_id": str(i)}) + "\n" for i in range(3))
    path = tmp_path / "hotpotqa.jsonl"
    path.write_text(lines, encoding="utf-8")
    if kind == "jsonl.gz":
        path = tmp_path / "hotpotqa.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "zip":
        path = tmp_path / "data.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/hotpotqa.jsonl", lines)
    elif kind == "folder":
        path = tmp_path
    lines = checked(LongBench(str(path)).lines("hotpotqa"), LongBench.schema)
    assert [line.data["_id"] for line in lines] == ["0", "1", "2"]


def test_reading_from_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/qasper_e.jsonl", json.dumps(DATA))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "data.zip"))
    (line,) = checked(LongBench().lines("qasper_e"), LongBench.schema)
    row = build("qasper_e", line.data)
    assert row.task == "qasper_e"
    assert base.score_row(row, "Ada") == 1.0


def test_missing_data_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"none of qasper\.jsonl, qasper\.jsonl\.gz, data\.zip in"):
        list(LongBench(str(tmp_path)).lines("qasper"))
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl does not exist"):
        list(LongBench(str(tmp_path / "no.jsonl")).lines("qasper"))
    import huggingface_hub

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(FileNotFoundError, match=r"no network.*Download https://huggingface.co.*pass path="):
        list(LongBench().lines("qasper"))
    zipfile.ZipFile(tmp_path / "data.zip", "w").close()
    with pytest.raises(FileNotFoundError, match=r"no qasper\.jsonl in"):
        list(LongBench(str(tmp_path)).lines("qasper"))


@pytest.mark.parametrize("reply", ["Ada bakes.\nDialogue: x", "\nAda bakes.\nDialogue: x"])
def test_the_first_line_of_a_samsum_reply_is_judged(reply):
    """The official scorer skips leading newlines."""
    row = build("samsum", {**DATA, "answers": ["Ada bakes."]})
    assert base.score_row(row, reply) == 0.999999995
