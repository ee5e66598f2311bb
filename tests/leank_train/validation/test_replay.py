"""Validation in a training run is a fast form of the replay: the same masks, tokens and scores, sample by sample."""

import pytest
import torch

from leank import backbone as backbones
from leank.eval.benchmarks.base import Cell
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.benchmarks.scoring import score_row
from leank.eval.cache import Sizes
from leank.eval.inference.decode import greedy
from leank.eval.inference.prefill import pad_left
from leank.eval.inference.prefill import prefill as prompt_pass
from leank.eval.inference.prompts import encode
from leank.eval.methods import Method, build_method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from leank.mask import ChannelMask
from leank.shipped import resolve
from leank_train.forward.branching import branch, decode, prefill
from leank_train.validation import compare
from leank_train.validation import evaluate as validation
from tests.conftest import tiny_model
from tests.helpers.branches import DOCUMENTS, QUESTIONS, batch, pad, scores

NEW = 14
ZONES = {  # sink, window, flush
    "usual": (3, 6, 4),
    "slides with every token": (3, 6, 1),
    "nothing moves while decoding": (2, 5, 32),
    "no sink, self only": (0, 1, 3),
    "window fills while decoding": (4, 22, 3),  # the flushes count from the sink, not from the prompt
    "sink past the prompt": (30, 2, 2),
}


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_are_those_of_the_compressed_cache(family, zone):
    """Two documents of other lengths with two questions each, against every prompt alone in a compressed cache."""
    sink, window, flush = ZONES[zone]
    model, mask = tiny_model(family), scores() > 0.4
    documents, questions, _ = batch()
    prefix = prefill(model, pad(documents), DOCUMENTS)
    asked = branch(model, prefix, pad(questions), QUESTIONS)
    found = decode(model, prefix, asked, mask, max_new_tokens=NEW, eos_id=3, sink=sink, window=window, flush=flush)
    deployed = Method("leank", LeanK(ChannelMask(mask)), sink=sink, window=window, flush=flush)
    for r, question in enumerate(questions):
        ids, real = pad_left([torch.cat([documents[r // 2], question]).tolist()], 0, "cpu")
        prompt = prompt_pass(model, ids, real, NEW)
        cache = deployed.cache(model, prompt)
        tokens, *_ = greedy(model, cache, prompt.logits, prompt.real, prompt.lengths, [3], [NEW], [0])
        assert found[r] == tokens[0]


TASKS, LENGTH, SAMPLES, SEED, TOKENS = ["niah_multivalue", "niah_multikey_3"], 1024, 2, 7001, 36
SIZES = {"sink": 16, "window": 144, "flush": validation.FLUSH}
ASSETS = f"{resolve('reference')}/mask_80pct.safetensors"


@pytest.fixture(scope="module")
def backbone():
    return backbones.load("reference", "float32")


@pytest.fixture(scope="module")
def replayed(backbone):
    """(task, sample, method) -> (reply, score) of the engine of `python -m eval`, and its static norm."""
    channels = {
        "leank": {"name": "leank", "mask": ASSETS},
        "think": {"name": "think", "ratio": 0.8},  # at 0.8 replies go wrong, each in its own way
        "static_norm": {"name": "static_norm", "ratio": 0.8, "samples": 2, "length": 512, "seed": 5},
    }
    methods = [
        build_method("dense"),
        *(build_method(label, {"channels": given}, SIZES) for label, given in channels.items()),
    ]
    benchmark = Ruler(tasks=TASKS, lengths=[LENGTH], samples=SAMPLES, seed=SEED, split="test")
    engine = Replay(backbone.model, backbone.tokenizer, Settings(max_new_tokens=TOKENS))
    engine.calibrate(methods)
    found = {}
    for cell in benchmark.cells():
        rows = [benchmark.row(cell, sample, backbone.tokenizer, 0) for sample in cell.samples]
        prompts = [encode(backbone.tokenizer, row) for row in rows]
        for one, answers in engine.answers(prompts, rows, methods):
            for row, answer in zip(rows, answers, strict=True):
                found[row.task, int(row.id), one.label] = answer.text, score_row(row, answer.text)
    return found, methods[-1].channels.keep_mask(None, backbone.model.config)


def test_samples_are_those_of_the_benchmark(backbone):
    benchmark = Ruler(tasks=TASKS, lengths=[LENGTH], samples=SAMPLES, seed=SEED, split="test")
    for name in TASKS:
        document = compare.unseen(backbone, name, LENGTH, SEED, 1)
        (question,) = document.questions
        row = benchmark.row(Cell(name, LENGTH, ("1",)), "1", backbone.tokenizer, 0)
        assert (document.context, question.question, question.answers) == (row.context, row.question, row.answers)
        ids = backbone.encode_context(document.context) + backbone.encode_question(
            question.question, question.answer_prefix
        )
        assert ids == encode(backbone.tokenizer, row).ids


def test_validation_gives_the_replays_replies_and_scores(backbone, replayed):
    methods = {
        "dense": None,
        "leank": ChannelMask.load(ASSETS),
        "think": validation.think(0.8),
        "static_norm": compare.static_norm_mask(backbone, 512, 2, 5, 0.8),
    }
    answers, static_norm = replayed
    assert torch.equal(methods["static_norm"].keep, static_norm)
    documents = [[compare.unseen(backbone, t, LENGTH, SEED, i) for i in range(SAMPLES)] for t in TASKS]
    results = validation.evaluate(backbone, methods, documents, 16, 144, max_new_tokens=TOKENS)
    assert {(r.task, r.index, r.method): (r.reply, r.recall) for r in results} == answers
    assert len({answers["niah_multivalue", 0, label][0] for label in ("dense", "think", "static_norm")}) == 3


def test_both_move_as_many_tokens_at_a_time():
    assert Sizes().flush == validation.FLUSH
