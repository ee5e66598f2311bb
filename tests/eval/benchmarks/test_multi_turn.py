"""Conversations about needles: their rows, a run that goes on where it was killed, and the table by turn."""

import json

import pytest

from leank.eval.benchmarks.multi_turn import MultiTurn
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.inference.prompts import encode_turns
from leank.eval.methods import Method
from leank.eval.methods.channels.random import Random
from leank.eval.report.summary import summarise
from leank.eval.report.tables import tables
from leank.eval.rows.results import Results, read
from leank.eval.run.build import build_job
from leank.eval.run.job import Job
from leank.eval.run.settings import Settings
from tests.helpers.composed import evaluation
from tests.helpers.report_rows import row
from tests.helpers.tiny_run import save_model


@pytest.fixture(scope="module")
def words():
    return load_config(ModelConfig())[1]


def test_turns_share_a_document_that_answers_each_of_them(words):
    benchmark = MultiTurn(tasks=["multikey", "niah_multiquery"], lengths=[1024], samples=2)
    cells = benchmark.cells()
    assert [cell.task for cell in cells] == [
        f"{task}_{mode}" for mode in ("conversation", "reuse") for task in ("multikey", "niah_multiquery")
    ]
    for cell in cells:
        first = benchmark.row(cell, "1", words, 0)
        turns = [first, *first.later]
        assert [one.id for one in turns] == cell.ids("1") == [f"1.{n}" for n in range(1, 6)]
        assert len({one.context for one in turns}) == 1
        assert len({one.answers for one in turns}) == len({one.question for one in turns}) == 5
        assert all(answer in first.context for one in turns for answer in one.answers)
        longest = max(len(words(one.prompt + one.answer_prefix + one.target)["input_ids"]) for one in turns)
        assert 1000 < longest <= 1024
    same, other = benchmark.row(cells[0], "1", words, 0), benchmark.row(cells[2], "1", words, 0)
    assert (same.context, same.question) == (other.context, other.question)  # both modes ask the same
    one_cache = encode_turns(words, [same, *same.later], one_cache=True)
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


def test_a_run_that_was_killed_goes_on(tmp_path, words):
    """Half a conversation is on disk: the run answers it anew and adds the rows that lack."""
    model = ModelConfig(name=str(save_model(tmp_path / "model")), device="cpu")
    benchmark = MultiTurn(tasks=["multikey"], lengths=[384], samples=3, turns=2)
    methods = [Method("dense"), Method("random", Random(0.5), sink=4, window=32, flush=8)]
    job = Job(model, methods, benchmark, Settings("before_question", batch_size=2, max_new_tokens=2))

    def run():
        with Results(tmp_path) as results:
            return job.run(results, load_model(model), words)

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
