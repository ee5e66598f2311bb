"""Prompts, scores and files of published benchmarks against their official code."""

import gzip
import hashlib
import json
import re
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from leank.eval.benchmarks import base, gsm_infinite, longbench, mmlu, niah
from leank.eval.benchmarks.babilong import BabiLong
from leank.eval.benchmarks.base import Row, score_row
from leank.eval.benchmarks.from_files import checked, cut_in_the_middle
from leank.eval.benchmarks.helmet import Helmet
from leank.eval.benchmarks.longbench import LongBench
from leank.eval.benchmarks.longbench_v2 import LongBenchV2
from leank.eval.benchmarks.nolima import RULES, NoLiMa
from tests.helpers import parity
from tests.helpers.benchmark_lines import BABI, CONFIG, NEEDLE, V2, helmet_files


@pytest.mark.parametrize("row", parity.rows("mmlu_prompts"), ids=parity.label)
def test_mmlu_prompts_are_those_of_the_official_code(row):
    examples = {row["subject"]: row["dev_rows"]}
    built = mmlu.Mmlu(reasoning=False, _dev=examples).build(row["subject"], {"answer": "A", **row["row"]})
    assert built.prompt == row["prompt"]
    assert base.score_row(built, f" {built.answers[0]}") == 1.0


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("A cat ... so the answer is (C). The end", "C"),
        ("**Answer: D**", "D"),
        (" B. because", "B"),
        ("I do not know", None),
    ],
)
def test_the_letter_of_a_reply(reply, letter):
    assert mmlu.extract_letter(reply) == letter


def encode(text):
    """A word with its blank is a token; "." stands alone."""
    tokens, word = [], ""
    for character in text:
        if character in " .":
            tokens += [word] * bool(word) + [character] * (character == ".")
            word = character if character == " " else ""
        else:
            word += character
    return tokens + [word] * bool(word)


def decode(tokens):
    return "".join(tokens)


HAYSTACK = "one two three. four five six. seven eight nine. "


@pytest.mark.parametrize(
    ("depth", "want"),
    [
        (0, " NEEDLE HEREone two three. four five six. seven"),
        (25, " NEEDLE HEREone two three. four five six. seven"),
        (50, "one two three. NEEDLE HERE four five six. seven"),
        (99, "one two three. four five six. NEEDLE HERE seven"),
        (100, "one two three. four five six. seven NEEDLE HERE"),
    ],
)
def test_needle_goes_back_to_a_sentence_end(depth, want):
    assert niah.insert_needle(HAYSTACK, " NEEDLE HERE", depth, 14, encode, decode, buffer=3) == want


def test_needle_lengths_and_errors():
    context = niah.fitted(HAYSTACK, 300, encode, decode)
    assert len(encode(context)) == 300
    assert context.startswith(HAYSTACK * 2)
    context = niah.insert_needle(context, " NEEDLE HERE", 50, 300, encode, decode)
    assert len(encode(context)) == 100
    with pytest.raises(ValueError, match="depth_percent=101"):
        niah.insert_needle(HAYSTACK, "x", 101, 300, encode, decode)
    with pytest.raises(ValueError, match="leaves no room for the needle"):
        niah.insert_needle(HAYSTACK, "x", 50, 200, encode, decode)
    with pytest.raises(ValueError, match="haystack is empty"):
        niah.fitted("", 300, encode, decode)


def test_needle_grid_and_recall():
    assert niah.grid(0, 100)[:4] == [0, 3, 6, 9]
    assert len(niah.grid(1000, 16000)) == 35
    assert niah.recall("Eat a sandwich") == pytest.approx(3 / 11)


@pytest.mark.parametrize(
    ("template", "sha256"),
    [
        ("crazy_zootopia", "7131d5c162628552e0b7da852047457cb48e56e702e6f92be47f92f873dbe438"),
        ("teachers_in_school", "02b23ab592ebfc71e96ef1dcc7937345bd9cb52b41d8d2049939fee56705ac1f"),
        ("movie_festival_awards", "b29ac1c98a53a5027157b23b29f94c976b2b3f19cccc92f293c530f92ae8aac7"),
    ],
)
def test_gsm_infinite_headers_are_the_official_ones(template, sha256):
    data = {"problem": "P.", "question": "Q?", "template": template, "mode": "normalforward", "op": 2, "answer": 31}
    _, header = gsm_infinite.realistic_row(data).preamble
    assert hashlib.sha256(header["content"].encode()).hexdigest() == sha256
    _, reverse = gsm_infinite.realistic_row({**data, "mode": "forwardreverse"}).preamble
    assert reverse["content"] == header["content"] + gsm_infinite.REVERSE_HINT


def test_gsm_infinite_rows():
    data = {"problem": "P.", "question": "Q?", "template": "crazy_zootopia", "mode": "normalforward", "op": 2}
    row = gsm_infinite.realistic_row({**data, "solution": "Answer: 31."})
    assert [(m["role"], m["content"][:4]) for m in row.messages()] == [
        ("system", "You "), ("user", "Answ"), ("user", "Prob"),
    ]  # fmt: skip
    assert row.messages()[2]["content"] == "Problem: P. Question: Q? Solution: "
    assert (row.question, row.answers, row.meta["op"]) == ("Question: Q? Solution: ", [31], 2)
    assert base.score_row(row, "Answer: 31.") == 1.0
    merged = gsm_infinite.realistic_row({**data, "answer": 31}, merge_turns=True)
    assert [m["role"] for m in merged.messages()] == ["system", "user"]
    assert merged.prompt.endswith("calculated. Problem: P. Question: Q? Solution: ")
    symbolic = gsm_infinite.symbolic_row({"problem": "assign V1 = 2.", "question": "Which?", "answer_list": ["V1"]})
    assert symbolic.prompt == "<context>\nassign V1 = 2.\n</context>\n\nWhich?"
    assert base.score_row(symbolic, "V1") == 1.0


def test_unknown_metric_and_stop():
    with pytest.raises(ValueError, match="metric='bleu' of task 't' has no scorer"):
        base.score_row(Row("t", "0", "c", "q", ["x"], 8, "bleu"), "x")
    assert base.cut_at_stop("one\ntwo END", ("END", "\n", "")) == "one"
    assert base.cut_at_stop("one", ("\n",)) == "one"


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


@pytest.mark.parametrize("given", parity.rows("longbench_v2"), ids=lambda given: given.get("reply", "prompt"))
def test_longbench_v2_is_the_official_one(given):
    if "prompt" in given:
        assert LongBenchV2().build("all", {**V2, **given}).prompt == given["prompt"]
        return
    for letter in "ABCD":
        row = LongBenchV2().build("all", {**V2, "answer": letter})
        assert score_row(row, given["reply"]) == (given["letter"] == letter)


@pytest.mark.parametrize("given", parity.rows("babilong"), ids=parity.label)
def test_babilong_is_the_official_one(given):
    row = BabiLong().build(f"{given['task']}_4k", {"input": "", **given})
    if "prompt" in given:
        assert row.prompt == given["prompt"]
    else:
        assert score_row(row, given["reply"]) == given["score"]


def test_babilong_strips_its_context_as_officially():
    row = BabiLong().build("qa1_4k", {**BABI, "input": " Mary went to the office.\n"})
    assert "<context>\nMary went to the office.\n</context>" in row.prompt


@pytest.mark.parametrize("array", [True, False])
def test_longbench_v2_is_divided_as_its_table(array, tmp_path):
    data = [{**V2, "_id": str(i), "length": n} for i, n in enumerate(("short", "long", "short", "medium"))]
    text = json.dumps(data, indent=1) if array else "\n".join(map(json.dumps, data))
    (tmp_path / ("data.json" if array else "longbench_v2.jsonl")).write_text(text)
    benchmark = LongBenchV2(str(tmp_path), tasks=["all", "short", "long", "hard"])
    found = {task: [line.data["_id"] for line in benchmark.lines(task)] for task in benchmark.wanted()}
    assert found == {"all": ["0", "1", "2", "3"], "short": ["0", "2"], "long": ["1"], "hard": []}
    with pytest.raises(ValueError, match="'e' is no part of LongBench v2"):
        LongBenchV2(tasks=["e"]).wanted()


def test_a_damaged_array_is_refused_by_name(tmp_path):
    file = tmp_path / "data.json"
    file.write_text(json.dumps([V2, {**V2, "answer": "E"}]))
    with pytest.raises(ValueError, match=r"data\.json, line 2: answer='E'"):
        list(checked(LongBenchV2(str(file)).lines("all"), LongBenchV2.schema))
    file.write_text(json.dumps([V2])[:-5])
    with pytest.raises(ValueError, match=r"data\.json cannot be read: it is no JSON"):
        LongBenchV2(str(file)).lines("all")


@pytest.mark.parametrize("file", ["qa2/4k.json", "qa2_4k.jsonl"])
def test_babilong_s_files(file, tmp_path, tokenizer):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("".join(json.dumps(BABI) + "\n" for _ in range(2)))
    benchmark = BabiLong(str(tmp_path), tasks=["qa2"], lengths=["4k"])
    benchmark.check(CONFIG, tokenizer, 0, None)
    (cell,) = benchmark.cells()
    assert (cell.task, cell.samples) == ("qa2_4k", ("0", "1"))
    with pytest.raises(ValueError, match=r"benchmark.lengths: BABILong has no '4K'"):
        BabiLong(lengths=["4K"]).wanted()
    with pytest.raises(ValueError, match="target='attic' is none of bathroom"):
        benchmark.build("qa2_4k", {**BABI, "target": "attic"})


def test_babilong_without_files_says_what_to_do(monkeypatch):
    import datasets

    def offline(*given, **named):
        assert (given, named) == (("RMT-team/babilong", "8k"), {"split": "qa3"})
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(FileNotFoundError, match=r"no network.*Pass path=<a folder with qa3/8k.json>"):
        list(BabiLong().lines("qa3_8k"))


BOOK = "".join(f"Line {i} of the book is here.\n" for i in range(200))


def nolima(folder, *needles, **settings):
    (folder / "book_1.txt").write_text(BOOK)
    (folder / "needle_set.json").write_text(json.dumps(needles or [NEEDLE]))
    return NoLiMa(str(folder), str(folder / "needle_set.json"), **{"lengths": [300], "depths": 5, **settings})


def test_nolima_s_needle_is_a_line_at_its_depth(tmp_path, tokenizer):
    """The characters are those that numpy's old generator draws from the official seed, one per depth."""
    benchmark = nolima(tmp_path)
    benchmark.check(CONFIG, tokenizer, 0, None)
    (cell,) = benchmark.cells()
    assert (cell.task, cell.samples) == ("onehop", tuple(f"0001_T1_onehop.0.{depth}" for depth in range(5)))
    draws = np.random.RandomState(43)
    for depth, sample in zip((0, 0.25, 0.5, 0.75, 1), cell.samples, strict=True):
        row = benchmark.row(cell, sample, tokenizer, 0)
        name = str(draws.choice(["Ada", "Bo", "Cy"]))
        assert (row.answers, row.preamble) == ([name], ({"role": "system", "content": "Be brief."},))
        assert row.question == "\nQuestion: Who has a fish?"
        haystack = row.context.removeprefix("Read:\n")
        before, after = haystack.split(f" {name} keeps a trout.\n")
        assert (before + "\n" if before else "") + after in BOOK or depth == 0  # of the first token no line is left
        tokens = len(tokenizer(before)["input_ids"])
        assert abs(tokens - depth * 300) <= 2
        assert abs(tokens + len(tokenizer(after)["input_ids"]) - 300) <= 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"distractors": {"onehop": "x"}}, "line 1: it has distractors"),
        ({"id": "abcd"}, "line 1: id='abcd' does not begin with four digits"),
        ({"task_template": "{question}"}, "line 1: its prompt '{question}' lacks {haystack}"),
        ({"needle": "Ada keeps a {1}."}, "line 1: test T1 has neither characters to draw nor gold_answers"),
        ({"tests": {}}, "line 1: tests={}: "),
    ],
)
def test_what_nolima_cannot_use_is_named(change, said, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=re.escape(said)):
        nolima(tmp_path, {**NEEDLE, **change}).check(CONFIG, tokenizer, 0, None)


def test_nolima_s_books_are_long_enough(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"book 1 has \d+ tokens, too few around 5000"):
        nolima(tmp_path, lengths=[5000]).check(CONFIG, tokenizer, 0, None)
    with pytest.raises(FileNotFoundError, match=r"benchmark\.books=None holds no \.txt; give the folder"):
        NoLiMa().check(CONFIG, tokenizer, 0, None)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        (" Ada\n", RULES),
        ("It is Ada.", ("contains", "lastline_contains")),
        ("Ada\nis it", ("contains",)),
        ("I think\nAda", ("contains", "lastline_contains", "lastline_EM")),
        ("ada", ()),
        ("", ()),
    ],
)
def test_nolima_s_rules(reply, right):
    for rule in RULES:
        assert score_row(Row("onehop", "0", "c", "q", ["Ada"], 8, f"nolima_{rule}"), reply) == (rule in right)


HELMET = parity.rows("helmet")


@pytest.mark.parametrize("given", HELMET[1:], ids=parity.label)
def test_helmet_is_the_official_one(given):
    """Prompts with the examples that the official seeds draw, and scores."""
    if "line" not in given:
        row = Row(given["task"], "", "c", "q", given["answers"], 8, "helmet_answer")
        score = score_row(
            replace(row, metric="helmet_label") if given["task"].startswith("trec") else row, given["reply"]
        )
        assert score == given["score"]
        return
    kind = "train" if given["task"].startswith("trec") else "demos"
    examples = {given["task"]: HELMET[0][kind]}
    row = Helmet(_examples=examples).build(given["task"], given["line"])
    if kind == "train":
        assert hashlib.sha256(row.prompt.encode()).hexdigest() == given["sha256"], row.prompt[-120:]
    else:
        assert row.prompt == given["prompt"]
        assert Helmet(_examples=examples, style="chat").build(given["task"], given["line"]).prompt == given["chat"]
    assert row.answers in (given["answer"], [given["answer"]])


def test_helmet_s_files(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match=r"benchmark\.path=null: give the folder of HELMET's unpacked"):
        Helmet().check(CONFIG, tokenizer, 0, None)
    helmet_files(tmp_path)
    Helmet(str(tmp_path), lengths=["8k"], tasks=["json_kv", "nq", "popqa", "trec_coarse"]).check(
        CONFIG, tokenizer, 0, None
    )
    few = tmp_path / "kilt" / "nq-train-multikilt_1000_k3_dep6.jsonl"
    few.write_text(few.read_text().split("\n")[0])
    with pytest.raises(ValueError, match="line 1: it is no sample of nq_8k: there are 1 examples for nq_8k, and 2"):
        Helmet(str(tmp_path), lengths=["8k"], tasks=["nq"]).check(CONFIG, tokenizer, 0, None)
    test = tmp_path / "icl" / "trec_coarse_test.jsonl"
    test.write_text(json.dumps({"text": "Who?", "label": 6}))
    with pytest.raises(ValueError, match="label=6 is none of the 6 of trec_coarse"):
        Helmet(str(tmp_path), lengths=["8k"], tasks=["trec_coarse"]).check(CONFIG, tokenizer, 0, None)
