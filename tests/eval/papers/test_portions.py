"""Portions cover what is missing once, and processes that make them survive errors, kills and each other."""

import time
from dataclasses import replace
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.papers import make as make_module
from leank.eval.papers.item import Analysed, EvalRun, Item
from leank.eval.papers.make import Workshop
from leank.eval.papers.page import our_tables
from leank.eval.papers.portions import Part, Portion, Queue, portions
from leank.eval.papers.side_by_side import one_by_one, side_by_side
from leank.eval.papers.steps import Options, ResolvedStep, keys_of
from leank.eval.rows.results import Results, key_of, read
from tests.helpers.portion_making import Together, make
from tests.helpers.tiny_run import save_model

LITTLE = ("benchmark.samples=2", "benchmark.tasks=[niah_multikey_2]", "benchmark.lengths=[512]", "max_new_tokens=2",
          "batch_size=1", "+model.device=cpu")  # fmt: skip
FIRST = EvalRun(("+experiment=papers/here", "method=[dense,papers/think_alone]"))
SECOND = EvalRun(("+experiment=papers/here", "method=[dense,snapkv,papers/think_alone]"))
MATCHED = EvalRun(("+experiment=papers/here", "method=[dense,snapkv,h2o]", "match=0.7"))
WRONG = Analysed("kept_by_pair", {"samples": 0}, overrides=("mask=none.pth",), model=False)
ITEMS = [Item(f"think:table{number + 1}", "x", here=(step,))
         for number, step in enumerate((FIRST, SECOND, WRONG))]  # fmt: skip


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    model = save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    return Options(overrides=(f"model.name={model}", *LITTLE))


@pytest.fixture(scope="module")
def resolved(options):
    return {repr(step): ResolvedStep(step, options) for step in (FIRST, SECOND, MATCHED)}


@settings(max_examples=10, deadline=None)
@given(chosen=st.permutations([FIRST, SECOND, MATCHED]), processes=st.integers(1, 40), data=st.data())
def test_every_missing_row_is_in_one_portion(resolved, chosen, processes, data):
    plans = [(Item(f"think:table{number}", "x"), resolved[repr(step)]) for number, step in enumerate(chosen)]
    wanted = {key for _, step in plans for key in keys_of(step.job)}
    # a batch of a method is there or lacks rows; rows of a half of it are made again by the same portion
    done = data.draw(st.sets(st.sampled_from(sorted(wanted, key=repr))))
    made = []
    for portion in portions(plans, done, processes):
        job = portion.of([resolved[repr(part.step)].job for part in portion.parts])
        made += [(cell, samples, method.label, job.digest(method, cell.task))
                 for cell, samples, methods in job.missing(set()) for method in methods]  # fmt: skip
    assert len(made) == len({*map(repr, made)})  # nothing twice
    lacking = set()
    for _, step in plans:
        lacking |= {(cell, samples, method.label, step.job.digest(method, cell.task))
                    for cell, samples, methods in step.job.missing(done) for method in methods}  # fmt: skip
    assert {*made} == lacking


def test_side_by_side_makes_the_same_rows_and_names_what_fails(tmp_path, options, monkeypatch):
    failed = {}
    for jobs in (1, 2):
        workshop = Workshop(tmp_path / str(jobs), options)
        failed[jobs] = workshop.make(ITEMS, jobs)
        collected = workshop.collect(ITEMS)
        assert [made.whole for made in collected] == [True, True, False]
        assert ("shared the machine" in our_tables(collected[0])[0].note) == (jobs == 2)
    assert failed[1] == failed[2]
    assert list(failed[1]) == ["think:table3"]
    assert "none.pth" in failed[1]["think:table3"]
    alone, together = (
        {key_of(row): row["prediction"] for row in read(tmp_path / str(jobs) / "rows")} for jobs in (1, 2)
    )
    assert alone == together
    assert {file.name for file in (tmp_path / "2" / "logs").iterdir()} == {"00.log", "01.log"}
    lines = [line for file in (tmp_path / "2" / "rows").iterdir() for line in file.read_text().splitlines()]
    assert len(lines) == len(together)  # no row was made twice
    monkeypatch.setattr(make_module, "side_by_side", lambda make, waiting, jobs, directory: dict.fromkeys(waiting, ""))
    assert Workshop(tmp_path / "2", options).make(ITEMS[:2], 2) == {}  # nothing waits


def of(*names):
    return Portion(tuple(Part(name, FIRST, (name,)) for name in names), len(names))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_part_that_fails_is_found_and_stops_no_other(tmp_path, jobs):
    waiting = [of("a", "fail", "b"), of("c"), of("d", "e")]
    with Results(tmp_path / "rows") as results:
        failed = one_by_one(make, waiting, results) if jobs == 1 else side_by_side(make, waiting, jobs, tmp_path)
    assert failed == {"fail": "fail cannot be made"}
    assert {file.name for file in (tmp_path / "rows").iterdir()} >= {"a", "b", "c", "d", "e"}


def test_a_process_that_dies_is_replaced(tmp_path):
    failed = side_by_side(make, [of("die"), *(of(name) for name in "abcd")], 2, tmp_path)
    assert list(failed) == ["die"]
    assert "status -9" in failed["die"]
    assert {file.name for file in (tmp_path / "rows").iterdir()} >= {*"abcd"}


def test_no_process_waits_until_another_has_read_its_copy(tmp_path):
    assert side_by_side(Together(tmp_path / "met", 3), [of(name) for name in "abc"], 3, tmp_path) == {}
    assert {file.name for file in (tmp_path / "rows").iterdir()} >= {*"abc"}


def test_processes_end_with_the_one_that_deals_out(tmp_path):
    parent = get_context("spawn").Process(target=side_by_side, args=(make, [of("slow"), of("slow")], 2, tmp_path))
    parent.start()
    logs = [tmp_path / "logs" / f"0{number}.log" for number in range(2)]
    deadline = time.monotonic() + 120
    while not all(log.is_file() and "slow" in log.read_text() for log in logs) and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.kill()
    parent.join()
    for number in range(2):  # their files of rows are free again
        for _ in range(100):
            try:
                Results(tmp_path / "rows", f"-{number}-of-2").close()
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            pytest.fail("a process lives on")


def test_analyses_come_first_then_what_costs_most():
    cheap, dear = of("a"), replace(of("b"), cost=9)
    queue = Queue([cheap, Portion((Part("c", WRONG),), 0), dear])
    assert [queue.take().parts[0].item for _ in range(3)] == ["c", "b", "a"]
