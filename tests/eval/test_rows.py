"""Rows: their file, written line by line and gone on with, and the rows of today's form alone."""

import json
import os
import random
import re
import signal
import sys
import time

import pytest
import torch

from leank.eval.__main__ import command_line
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.inference.models import ModelConfig
from leank.eval.methods import Method, build_method
from leank.eval.rows import NAME, Key, Results, check_rows, key_of, read
from leank.eval.run.job import Job
from leank.eval.run.replay import Settings
from tests.conftest import tiny_model
from tests.helpers.report_rows import row

ROW = {**Key("m", "dense", "c0", "ruler", "vt", 64, "0", 42, "after_question")._asdict(), "score": 1.0}


def job(samples=4, ratio=0.5, batch_size=3, lengths=(320,), **settings):
    shared = {"sink": 4, "window": 16, "flush": 4}
    methods = [
        Method("dense"),
        build_method("think", {"channels": {"name": "think", "ratio": ratio}}, shared),
        build_method(
            "static_norm", {"channels": {"name": "static_norm", "ratio": 0.5, "length": 360, "samples": 2}}, shared
        ),
    ]
    benchmark = Ruler(tasks=["niah_multikey_2", "niah_single_1"], lengths=list(lengths), samples=samples)
    return Job(ModelConfig("tiny"), methods, benchmark, Settings(max_new_tokens=5, batch_size=batch_size, **settings))


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": 4096, "intermediate_size": 40, "max_position_embeddings": 1024}
    return tiny_model("llama", eos_token_id=None, **sizes).float()


def run(directory, work, model, tokenizer):
    with Results(directory) as results:
        return work.run(results, model, tokenizer)


def without_times(directory):
    """Rows by key, less what a clock says."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read(directory)]
    found = {key_of(row): row for row in rows}
    assert len(found) == len(rows)  # none double
    return found


def rows_in(folder):
    return (folder / NAME).read_bytes().count(b"\n") if (folder / NAME).exists() else 0


def test_killed_at_random_and_finished_gives_the_rows_of_an_uninterrupted_run(tmp_path, model, tokenizer):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    work = job(samples=8)
    assert run(whole, work, model, tokenizer) == 48
    draw, there, partial = random.Random(0), 0, 0
    for _ in range(8):
        child, goal = os.fork(), there + draw.randint(0, 9)
        if child == 0:
            try:
                run(killed, work, model, tokenizer)
            finally:
                os._exit(0)
        while rows_in(killed) < goal and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(draw.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        there = sum(1 for _ in read(killed)) if (killed / NAME).exists() else 0
        partial += 0 < there < 48
    assert partial  # some kill fell in the middle
    run(killed, work, model, tokenizer)
    assert without_times(killed) == without_times(whole)
    assert run(killed, work, model, tokenizer) == 0


def test_a_run_that_is_refused_leaves_no_empty_file(tmp_path):
    for there in (False, True):
        if there:
            (tmp_path / NAME).touch()
        with pytest.raises(ValueError, match="NaN"), Results(tmp_path):
            raise ValueError("the model holds NaN")
        assert (tmp_path / NAME).exists() == there


def test_only_what_is_new_is_run(tmp_path, model, tokenizer):
    assert run(tmp_path, job(samples=3), model, tokenizer) == 3 * 3 * 2
    assert run(tmp_path, job(samples=3, ratio=0.25), model, tokenizer) == 3 * 2  # one method changed
    assert run(tmp_path, job(samples=3, lengths=(320, 400)), model, tokenizer) == 3 * 3 * 2  # a length added
    assert run(tmp_path, job(samples=5), model, tokenizer) == 2 * 3 * 2  # samples added
    assert run(tmp_path, job(samples=3), model, tokenizer) == 0


def cells(path):
    return list(dict.fromkeys((row["task"], row["length"]) for row in read(path)))


def test_shards_of_many_tasks_are_read_in_the_plans_order_and_no_row_twice(tmp_path):
    """27 batches of 9 tasks, dealt to 12 shards, whose names do not sort by number; one row is done by two of them."""
    batches = [{**ROW, "task": f"t{8 - n // 3}", "length": 1024, "sample": str(n)} for n in range(27)]
    for batch, content in [*enumerate(batches), (1, batches[0])]:
        with (tmp_path / f"results-{batch % 12}-of-12.jsonl").open("a") as file:
            file.write(json.dumps(content) + "\n")
    assert cells(tmp_path) == [(f"t{8 - n}", 1024) for n in range(9)]
    assert sorted(int(row["sample"]) for row in read(tmp_path)) == list(range(27))


def test_shards_together_are_the_whole(tmp_path, model, tokenizer):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, job(), model, tokenizer)
    for number in (2, 0, 1):
        with Results(parts, f"-{number}-of-3") as results:
            assert job(shard=f"{number}/3").run(results, model, tokenizer)
    assert len(list(parts.iterdir())) == 3
    assert without_times(parts) == without_times(whole)
    assert cells(parts) == cells(whole)  # in the plan's order
    assert run(parts, job(), model, tokenizer) == 0
    with pytest.raises(ValueError, match="shard='3/3' is no shard"):
        job(shard="3/3")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_goes_on_with_a_smaller_batch(tmp_path, model, tokenizer, monkeypatch, caplog, error):
    from leank.eval.run.replay import Replay

    answers = Replay.answers

    def limited(self, prompts, *rest):
        if len(prompts) > 1:
            raise error
        return answers(self, prompts, *rest)

    plain, fallen = tmp_path / "plain", tmp_path / "fallen"
    run(plain, job(), model, tokenizer)
    with monkeypatch.context() as patch, caplog.at_level("WARNING", "eval"):
        patch.setattr(Replay, "answers", limited)
        run(fallen, job(), model, tokenizer)
    assert "going on with batch_size=1" in caplog.text
    scores = [{k: (r["prediction"], r["score"]) for k, r in without_times(d).items()} for d in (plain, fallen)]
    assert scores[0] == scores[1]

    def always(self, *rest):
        raise error

    monkeypatch.setattr(Replay, "answers", always)
    with pytest.raises(MemoryError, match="prefill_chunk"):
        run(tmp_path / "none", job(), model, tokenizer)


def test_a_shorter_cell_has_the_whole_batch_again(tmp_path, model, tokenizer, monkeypatch):
    """What is too large for a long cell, which several devices do first, may fit a short one."""
    from leank.eval.run.replay import Replay

    answers = Replay.answers

    def limited(self, prompts, *rest):
        if len(prompts) * max(len(prompt.ids) for prompt in prompts) > 800:
            raise MemoryError
        return answers(self, prompts, *rest)

    monkeypatch.setattr(Replay, "answers", limited)
    work = job(samples=2, batch_size=2, lengths=(320, 640))
    with Results(tmp_path) as results:
        work.run(results, model, tokenizer, turns=reversed)
    assert {row["length"]: row["batch"] for row in read(tmp_path)} == {640: 1, 320: 2}


def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(tmp_path):
    with Results(tmp_path) as results:
        results.append(ROW)
    whole = (tmp_path / NAME).read_bytes()
    second = json.dumps({**ROW, "sample": "1", "prediction": "ß\u2028"}, ensure_ascii=False).encode()
    for torn in range(1, len(second) + 1):
        (tmp_path / NAME).write_bytes(whole + second[:torn])
        assert len(list(read(tmp_path))) == 1
        with Results(tmp_path) as results:
            assert len(results.keys) == 1
        assert (tmp_path / NAME).read_bytes() == whole
    (tmp_path / NAME).write_bytes(second[:9])  # the first line was torn
    with Results(tmp_path) as results:
        results.append(ROW)
    assert (tmp_path / NAME).read_bytes() == whole


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / NAME).write_text(json.dumps(ROW) + "\nnot json\n" + json.dumps({**ROW, "sample": "1"}) + "\n")
    with pytest.raises(ValueError, match="line 2 is no result row"):
        Results(tmp_path)
    for damaged in ('{"score": 1}', "[" * 100_000, json.dumps({**ROW, "sample": ["0"]}), '"row"', "null", "3"):
        (tmp_path / NAME).write_text(damaged + "\n")
        with pytest.raises(ValueError, match="line 1 is no result row"):
            list(read(tmp_path))


def test_one_writer_and_no_row_twice(tmp_path):
    with Results(tmp_path) as results:
        results.append(ROW)
        with pytest.raises(ValueError, match="already"):
            results.append(ROW)
        with pytest.raises(BlockingIOError, match=r"another run.*hydra\.run\.dir"):
            Results(tmp_path)
        with pytest.raises(BlockingIOError, match=r"another run.*choose another --out"):
            Results(tmp_path, folder="--out")


KEY = {**Key("m", "dense", "c0", "ruler", "vt", 64, "0", 42, "after_question")._asdict(), "score": 1.0}


def test_a_row_that_lacks_fields_is_refused_in_one_line(tmp_path, monkeypatch):
    with Results(tmp_path) as results:
        results.append(KEY)
    monkeypatch.setattr(sys, "argv", ["eval", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        command_line()
    said = str(ended.value)
    assert said.startswith(f"eval: {tmp_path}: results row")
    assert "\n" not in said
    assert "'sample': '0'" in said
    assert "is missing; it was edited, or another version wrote it: move" in said


@pytest.mark.parametrize("field", row("dense", 0, 1.0))
def test_no_field_may_be_missing(field):
    damaged = row("leank", 0, 0.5)
    check_rows([damaged])
    del damaged[field]
    with pytest.raises(ValueError, match=f"'{field}' is missing"):
        check_rows([damaged])


NEAR = {"tokens": 4, "kl": 0.1, "top1": 0.9, "loss": None, "dense_loss": None, "non_finite": None}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("score", {"score": float("nan")}),
        ("score", {"score": 50}),
        ("score", {"score": "1"}),
        ("length", {"length": 1.5}),
        ("seconds.prefill", {"seconds": {"prefill": float("inf")}}),
        ("cache_bytes", {"cache_bytes": {"sink": 3}}),
        ("cache_bytes.sink", {"cache_bytes": {"total": 9, "sink": {}}}),
        ("meta.turn", {"meta": {"turn": {}}}),
        ("meta.op", {"meta": {"op": "x"}}),
        ("fidelity.tokens", {"fidelity": {}}),
        ("fidelity", {"fidelity": {**NEAR, "top1": None}}),
        ("fidelity.kl", {"fidelity": {**NEAR, "kl": -1.0}}),
        ("seconds.prefill", {"seconds": {"prefill": 1e40}}),
        ("cache_bytes.total", {"cache_bytes": {"total": 1e40}}),
        ("settings.method", {"settings": {}}),
        ("settings.method.channels", {"settings": {"method": {"channels": 3}}}),
        ("settings.method.matched.settings", {"settings": {"method": {"matched": {"settings": 3}}}}),
        ("settings.specials", {"settings": {"method": {}, "specials": "no"}}),
    ],
)
def test_a_damaged_field_is_named_and_enters_no_mean(field, change):
    said = rf"results row .*'sample': '0'.*: '{re.escape(field)}' is (wrong|missing)"
    with pytest.raises(ValueError, match=said) as error:
        check_rows([row("dense", 0, 0.5), {**row("leank", 0, 0.5), **change}])
    assert "\n" not in str(error.value)
