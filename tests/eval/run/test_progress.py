"""The lines of a running evaluation say what is replayed, how far it is, and how long the rest takes."""

import logging

import pytest

from leank.eval.benchmarks.base import Cell
from leank.eval.run.progress import EVERY, Progress, duration


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (11_100, "3 h 05 min")]
)
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


def test_the_time_left_counts_what_long_prompts_cost(caplog):
    now = [0.0]
    progress = Progress([1, 1, 8], lambda: now[0])
    with caplog.at_level(logging.INFO, "eval"):
        for _ in range(2):
            now[0] += EVERY
            progress.advance("vt, 4096 tokens", ["dense", "leank"], 6, finished=False)
    assert caplog.messages[-1] == (
        "replayed batch 2 of 3 (vt, 4096 tokens: dense, leank), 6 new rows; 20 s gone, about 80 s left"
    )


def test_short_batches_share_a_line_and_the_last_one_has_its_own(caplog):
    now = [0.0]
    progress = Progress([1] * 100, lambda: now[0])
    with caplog.at_level(logging.INFO, "eval"):
        for number in range(1, 101):
            now[0] += 1
            progress.advance("trec", ["dense"], number, finished=number == 100)
    assert len(caplog.messages) == 10
    assert caplog.messages[-1] == "replayed batch 100 of 100 (trec: dense), 100 new rows; took 2 min"
    assert not any("\n" in line or "\r" in line for line in caplog.messages)


def test_a_benchmark_without_lengths_names_none():
    assert Cell("trec", None, ()).place == "trec"
    assert Cell("vt", 4096, ()).place == "vt, 4096 tokens"
