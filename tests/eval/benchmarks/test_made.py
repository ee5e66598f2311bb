"""Benchmarks that are made here: chains of RULER, conversations of several turns, and texts."""

import json
from itertools import pairwise

import pytest
import torch

from leank.data_gen.haystack import paragraphs
from leank.data_gen.source_code import modules
from leank.eval.__main__ import run
from leank.eval.benchmarks.base import Cell, score_row
from leank.eval.benchmarks.multi_turn import MultiTurn
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.benchmarks.text import Text
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.inference.prompts import encode, encode_turns
from leank.eval.methods import Method
from leank.eval.methods.channels.random import Random
from leank.eval.report.summary import summarise
from leank.eval.report.tables import tables
from leank.eval.rows import Results, read
from leank.eval.run.build import build_job
from leank.eval.run.job import Job
from leank.eval.run.replay import Settings
from tests.helpers.composed import evaluation
from tests.helpers.report_rows import row
from tests.helpers.text_tokenizers import tokenizer
from tests.helpers.tiny_run import save_model

CONFIG, TOKENIZER = load_config(ModelConfig())


@pytest.mark.parametrize(("name", "length", "steps"), [("chain", 2048, 64), ("chain_long", 4096, 160)])
def test_a_reply_is_right_if_it_arrives(name, length, steps):
    made = Ruler(tasks=[name], lengths=[length], samples=1)
    made.check(CONFIG, tokenizer("reference"), 0, None)
    row = made.row(Cell(name, length, ("0",)), "0", tokenizer("reference"), 0)
    prompt = tokenizer("reference")(row.context + row.question + row.answer_prefix)["input_ids"]
    assert len(prompt) + row.max_new_tokens <= length
    table = row.context.splitlines()[1:]
    after = {line.split(" leads to ")[0]: line for line in table if " leads to " in line}
    entry, reply = row.question.split("take you from ")[1].split(" to the end")[0], []
    while entry in after:
        reply.append(after[entry])
        entry = after[entry].split(" leads to ")[1].rstrip(".")
    assert len(reply) == steps - 1
    assert score_row(row, "\n".join([*reply, f"{entry} is the end."])) == 1
    assert score_row(row, "\n".join(reply)) == 0
    assert score_row(row, "\n".join([*reply, f"{reply[0].split()[0]} is the end."])) == 0


def test_turns_share_a_document_that_answers_each_of_them():
    benchmark = MultiTurn(tasks=["multikey", "niah_multiquery"], lengths=[1024], samples=2)
    cells = benchmark.cells()
    assert [cell.task for cell in cells] == [
        f"{task}_{mode}" for mode in ("conversation", "reuse") for task in ("multikey", "niah_multiquery")
    ]
    for cell in cells:
        first = benchmark.row(cell, "1", TOKENIZER, 0)
        turns = [first, *first.later]
        assert [one.id for one in turns] == cell.ids("1") == [f"1.{n}" for n in range(1, 6)]
        assert len({one.context for one in turns}) == 1
        assert len({one.answers for one in turns}) == len({one.question for one in turns}) == 5
        assert all(answer in first.context for one in turns for answer in one.answers)
        longest = max(len(TOKENIZER(one.prompt + one.answer_prefix + one.target)["input_ids"]) for one in turns)
        assert 1000 < longest <= 1024
    same, other = benchmark.row(cells[0], "1", TOKENIZER, 0), benchmark.row(cells[2], "1", TOKENIZER, 0)
    assert (same.context, same.question) == (other.context, other.question)  # both modes ask the same
    one_cache = encode_turns(TOKENIZER, [same, *same.later], one_cache=True)
    assert [len(prompt.ids) for prompt in one_cache] == sorted(len(prompt.ids) for prompt in one_cache)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("benchmark.turns=60", "length=1024 is too short for task"),
        ("compress=after_question", "compress=after_question: benchmark=multi_turn needs compress=before_question"),
        ("benchmark.tasks=[vt]", "'vt' has no documents with several questions; choose from niah_single_1"),
        ("benchmark.lengths=[9000]", "9000 is more than the model's max_position_embeddings=8192"),
        ("benchmark.lengths=[100]", "length=100 is too short for task 'multikey'"),
        ("benchmark.turns=1", "benchmark.turns=1"),
        ("benchmark.modes=[chat]", "benchmark.modes"),
        ("benchmark.samples=679743951676", "samples=679743951676"),  # a plan of so many would never end
    ],
)
def test_settings_that_cannot_be_are_named(change, said):
    config = evaluation("+experiment=reference_multi_turn", "method=[dense]", "match=null", change)
    with pytest.raises(ValueError, match=r".") as error:
        build_job(config)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_that_was_killed_goes_on(tmp_path):
    """Half a conversation is on disk: the run answers it anew and adds the rows that lack."""
    model = ModelConfig(name=str(save_model(tmp_path / "model")), device="cpu")
    benchmark = MultiTurn(tasks=["multikey"], lengths=[384], samples=3, turns=2)
    methods = [Method("dense"), Method("random", Random(0.5), sink=4, window=32, flush=8)]
    job = Job(model, methods, benchmark, Settings("before_question", batch_size=2, max_new_tokens=2))

    def run():
        with Results(tmp_path) as results:
            return job.run(results, load_model(model), TOKENIZER)

    assert run() == 2 * 2 * 3 * 2  # modes, methods, conversations, turns
    assert run() == 0
    whole = [json.dumps({**one, "seconds": None}) for one in read(tmp_path)]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:7]))
    assert run() == 17
    assert [json.dumps({**one, "seconds": None}) for one in read(tmp_path)] == whole
    found = list(read(tmp_path))
    assert {one["meta"]["turn"] for one in found} == {1, 2}
    assert {(one["method"], one["compressed"]) for one in found} == {("dense", None), ("random", True)}
    grown = {one["sample"]: one["prompt_tokens"] for one in found if one["task"] == "multikey_conversation"}
    assert grown["0.2"] > grown["0.1"] > 300


def test_the_table_by_turn():
    rows = [
        row(method, f"{sample}.{turn}", score / turn, f"{task}_{mode}", 4096, meta={"turn": turn, "mode": mode})
        for method, score in (("dense", 1.0), ("leank", 0.5))
        for mode in ("conversation", "reuse")
        for task in ("kv", "multikey")
        for sample in range(3)
        for turn in (1, 2)
    ]
    found = {table.title: table for table in tables(summarise(rows)["runs"][0])}
    table = found["By turn, 4096 tokens: all turns on one cache"]
    assert list(table.cells) == ["method", "turn 1", "turn 2"]
    assert table.cells.to_numpy().tolist() == [
        ["dense", "100.0 [100.0, 100.0]", "50.0 [50.0, 50.0]"], ["leank", "50.0 [50.0, 50.0]", "25.0 [25.0, 25.0]"],
    ]  # fmt: skip
    assert "By turn, 4096 tokens: each question on a copy of the context's cache" in found


def checked(**settings):
    made = Text(**settings)
    made.check(CONFIG, TOKENIZER, 0, None)
    return made


def windows(made):
    """(cell, what is prefilled, the rest, the prompt) of every sample."""
    for cell in made.cells():
        for sample in cell.samples:
            row = made.row(cell, sample, TOKENIZER, 0)
            yield cell, row.context, row.question, encode(TOKENIZER, row)


def test_windows_of_code_are_pieces_of_the_folders_held_out_modules(tmp_path):
    for name in range(40):
        (tmp_path / f"m{name}.py").write_text(f"def f{name}(x):\n    return x + {name}\n" * 40)
    text = "\n".join(modules(str(tmp_path), "test"))
    made = list(windows(checked(kind="code", path=str(tmp_path), lengths=[128], samples=3)))
    assert len(made) == 3
    for _, context, rest, _ in made:
        assert context + rest in text
        assert "\n    return" in context


def test_windows_are_pieces_of_the_text_that_do_not_overlap():
    text, places = "\n".join(paragraphs(None, "test")), {}
    for cell, context, rest, prompt in windows(checked(lengths=[512, 1000], samples=30)):
        assert len(prompt.ids) <= cell.length
        assert cell.length - len(prompt.ids) <= 3
        assert abs(prompt.question - cell.length / 2) <= 3
        at = text.find(context + rest)
        assert at >= 0
        places.setdefault(cell.length, []).append((at, at + len(context + rest)))
    for found in places.values():
        assert found != sorted(found)
        found.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(found))


def test_more_samples_begin_with_fewer_and_the_seed_draws_others():
    few, many, other = (
        [context for _, context, _, _ in windows(checked(lengths=[512], samples=n, seed=seed))]
        for n, seed in ((4, 0), (9, 0), (4, 1))
    )
    assert few == many[:4] != other


def test_files_of_a_folder_share_no_window(tmp_path):
    for name, letter in (("b", "stone "), ("a", "river ")):
        (tmp_path / f"{name}.txt").write_text(letter * 700)
    made = checked(path=str(tmp_path), lengths=[256], samples=4, prefilled=0.25)
    for _, context, rest, prompt in windows(made):
        assert ("stone" in context + rest) != ("river" in context + rest)
        assert abs(prompt.question - 64) <= 3
    (tmp_path / "copy").mkdir()
    for file in tmp_path.glob("*.txt"):
        (tmp_path / "copy" / file.name).write_text(file.read_text())
    assert checked(path=str(tmp_path / "copy"), lengths=[256], samples=4, prefilled=0.25).identity() == made.identity()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": [16384]}, "16384 is more than the model's max_position_embeddings=8192"),
        ({"lengths": [8192], "samples": 50}, r"benchmark.samples=50: the text has \d windows of 8192 tokens"),
        ({"lengths": [8], "prefilled": 0.1}, "benchmark.prefilled=0.1 of benchmark.lengths=8"),
        ({"path": "/nowhere"}, "benchmark.path='/nowhere' is no text"),
        ({"path": __file__}, "is no text; give a .txt"),
    ],
)
def test_bad_input_is_named(settings, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        checked(**settings)


SMALL = (
    "benchmark=text", "benchmark.lengths=[128]", "benchmark.samples=2", "batch_size=2", "method=[dense,think]",
    "cache={sink:4,window:36,flush:8}", "+model.device=cpu", "model.dtype=float32",
)  # fmt: skip


def test_a_run_has_the_loss_of_one_pass_over_each_window(tmp_path):
    assert run(evaluation(*SMALL), tmp_path) == 4
    assert run(evaluation(*SMALL), tmp_path) == 0  # nothing is missing
    benchmark, model = checked(lengths=[128], samples=2), load_model(ModelConfig(dtype="float32", device="cpu"))
    rows = list(read(tmp_path))
    for one in rows:
        prompt = encode(TOKENIZER, benchmark.row(Cell("text", one["length"], ()), one["sample"], TOKENIZER, 0))
        ids = torch.tensor([prompt.ids])
        with torch.no_grad():
            logits = model(ids).logits[0, prompt.question : -1].log_softmax(-1)
        wanted = -logits.gather(-1, ids[0, prompt.question + 1 :, None]).mean()
        found = one["fidelity"]
        assert found["dense_loss"] == pytest.approx(float(wanted), rel=1e-4)
        assert found["tokens"] == len(logits)
        assert (one["prompt_tokens"], one["new_tokens"]) == (prompt.question, len(logits) + 1)
        if one["method"] == "dense":
            assert (found["kl"], found["top1"], found["loss"]) == (0, 1, found["dense_loss"])
        else:
            assert found["kl"] > 0
            assert one["compressed"]
    (summary,) = summarise(rows)["runs"]
    assert [cell["compared"] for cell in summary["overall"]] == [2, 2]
    page = (tmp_path / "summary.md").read_text()
    assert page.startswith("# text on reference, read through the cache")
    assert "perplexity" in page
    assert "100%" not in page.split("##")[1]  # there are no replies that could be the same


def test_bytes_can_be_matched_before_the_text_is_read():
    job, _ = build_job(evaluation(*SMALL, "match=0.8", "benchmark.lengths=[512]"))
    think = next(m for methods in job.by_cell.values() for m in methods if m.label == "think")
    assert think.matched is not None
    assert think.channels.ratio != 0.6


def test_the_setting_counts_in_the_key_only_where_it_is_on():
    jobs = [Job(ModelConfig(), [Method("dense")], Ruler(), Settings(fidelity=n)) for n in (0, 16, 32)]
    assert len({job.digest(job.methods[0], "vt") for job in jobs}) == 3
    assert [job.config(job.methods[0], "vt").get("fidelity") for job in jobs] == [None, 16, 32]
