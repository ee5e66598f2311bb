"""A mixture is a list addressed by index: workers, ranks and restarts change nothing."""

import pickle
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from torch.utils.data import DataLoader, Dataset

from leank.data_gen.task import Request
from leank.data_gen.tasks import TASKS, Mixture
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import tokenizer

WEIGHTS = {"kv": 1.0, "multivalue": 2.0, "multikey": 1.0, "multiquery": 1.0, "vt": 1.0, "fwe": 1.0}


@pytest.fixture(scope="module")
def mixture() -> Mixture:
    return Mixture(WEIGHTS, tokenizer("reference"), 1024, 2048, seed=3, questions=2)


class Rank(Dataset):
    """Every world-th document, as one of `world` ranks reads it, from document `start` on."""

    def __init__(self, mixture: Mixture, rank: int, world: int, start: int, count: int) -> None:
        self.mixture, self.rank, self.world, self.start, self.count = mixture, rank, world, start, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int):
        if item >= self.count:
            raise IndexError
        return self.mixture[self.start + item * self.world + self.rank]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_the_same_documents_whatever_the_workers_and_ranks(mixture, workers, world, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    expected = [mixture[i] for i in range(8)]
    ranks = [
        list(DataLoader(Rank(mixture, rank, world, 0, 8 // world), batch_size=None, num_workers=workers))
        for rank in range(world)
    ]
    assert [document for step in zip(*ranks, strict=True) for document in step] == expected


@pytest.mark.parametrize("start", [1, 5])
def test_a_stream_goes_on_where_it_stopped(mixture, start):
    fresh = Mixture(WEIGHTS, tokenizer("reference"), 1024, 2048, seed=3, questions=2)
    assert [fresh[i] for i in range(start, 8)] == [mixture[i] for i in range(start, 8)]


def test_documents_do_not_depend_on_those_made_before(mixture):
    backwards = [mixture[i] for i in reversed(range(6))]
    assert backwards[::-1] == [mixture[i] for i in range(6)]
    counter = TokenCounter(tokenizer("reference"))
    request = Request("cwe", 2048, counter, 0, 7, exact=False)
    used = TASKS["cwe"].build(request)
    assert used == TASKS["cwe"].build(replace(request, counter=TokenCounter(tokenizer("reference"))))


def test_seeds_and_indices_give_other_documents(mixture):
    other = replace(mixture, seed=4)
    contexts = [m[i].context for m in (mixture, other) for i in range(10)]
    assert len(set(contexts)) == 20


def test_a_copy_in_another_process_makes_the_same(mixture):
    assert pickle.loads(pickle.dumps(mixture))[3] == mixture[3]


def test_lengths_are_uniform_and_shared_by_a_group(mixture):
    lengths = [mixture.length_of(i) for i in range(3000)]
    assert min(lengths) < 1034
    assert max(lengths) > 2038
    quarters = Counter((n - 1024) * 4 // 1025 for n in lengths)
    assert all(650 < n < 850 for n in quarters.values()), quarters
    grouped = replace(mixture, per_length=4)
    assert all(len({grouped.length_of(4 * i + k) for k in range(4)}) == 1 for i in range(50))
    assert len({grouped.length_of(4 * i) for i in range(50)}) > 40


def test_tasks_are_drawn_by_their_weights(mixture):
    light = Mixture({"niah_single_1": 1, "vt": 3, "fwe": 0}, tokenizer("reference"), 1000, 1000, seed=1)
    drawn = Counter(light[i].task for i in range(200))
    assert set(drawn) == {"niah_single_1", "vt"}
    assert 120 < drawn["vt"] < 180


def test_questions_a_document(mixture):
    for document in islice((mixture[i] for i in range(20)), 20):
        assert len(document.questions) == (1 if document.task == "fwe" else 2)
        assert len(document.samples()) == len(document.questions)
