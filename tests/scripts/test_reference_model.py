"""The reference models: their text, the rows that they are trained on, and pretraining that stops and goes on."""

import hashlib
import json
import random
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from leank.data_gen import haystack
from leank.data_gen.task import Request
from leank.data_gen.tasks import TASKS
from leank.data_gen.tokens import TokenCounter
from scripts.reference_model.batches import RECIPES, Batches, RowMaker, TrainingRow, collate, in_order
from scripts.reference_model.pretrain import documents, main, right_tokens
from tests.helpers.text_tokenizers import tokenizer


def test_documents_become_a_stream_of_tokens(tmp_path, capsys, monkeypatch):
    sentences, words = haystack.sentences, tokenizer("reference")
    monkeypatch.setattr(haystack, "sentences", lambda essays, split: sentences(essays, split)[:600])
    words.save_pretrained(tmp_path / "tokenizer")
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:03d}.txt").write_text(f"Chapter {i}\n" + f"Sentence number {i} of the page. " * 20)
    train, test = (documents(folder, split) for split in ("train", "test"))
    assert [len(train), len(test)] == [40, 4]  # the shipped paragraphs, 500 sentences a document
    assert [one.split("\n")[0] for one in test[:2]] == ["Chapter 19", "Chapter 39"]
    assert not set(train) & set(test)
    main(["text", str(tmp_path / "tokenizer"), "--text", str(folder)])
    assert "test:" in capsys.readouterr().out
    whole, stream = (np.load(folder / f"{split}.npy") for split in ("train", "test"))
    assert stream.dtype == np.uint16
    assert (stream == words.eos_token_id).sum() == len(test)
    assert words.decode(stream[:30]).startswith("Chapter 19\nSentence")
    main(["text", str(tmp_path / "tokenizer"), "--text", str(folder), "--every", "2"])
    parts = [np.split(ids, np.flatnonzero(ids == words.eos_token_id) + 1)[:-1] for ids in
             (whole, np.load(folder / "train.npy"))]  # fmt: skip
    assert [d.tolist() for d in parts[1]] == [d.tolist() for d in parts[0][::2]]
    assert np.array_equal(stream, np.load(folder / "test.npy"))


MIXED = RECIPES["mixed"]


def test_rows_of_the_shipped_model_stay_the_same():
    """The digest was taken before there was a second recipe."""
    maker = RowMaker(tokenizer("reference"))
    digest = hashlib.sha256()
    for i, length in enumerate((256, 512, 1024, 2048) * 4):
        row = maker.make(length, (i // 4) / 3, random.Random(f"pin/{i}"))
        digest.update(repr((row.ids, row.supervised)).encode())
    assert digest.hexdigest() == "3cc8c73b6ba5065c847b29d7d2611b689a38335de68b54da6fffe30b72a4bca8"


def batch(recipe: str, text: np.ndarray | None):
    return Batches(tokenizer("reference"), 8192, 4, 0, 0, 0, 1024, RECIPES[recipe], text)[1]


def weights_by_row(batch) -> list[float]:
    ids, positions, _, weights = batch
    rows = positions // ids.shape[1]
    return [float(weights[rows == row].sum()) for row in range(len(ids))]


def test_answers_weigh_one_and_text_its_share():
    stream = np.arange(20_000, dtype=np.uint16) % 4096
    mixed = batch("mixed", stream)
    ids = mixed[0]
    texts = round(MIXED.text * len(ids))
    by_row = weights_by_row(mixed)
    assert sum(by_row[:texts]) == pytest.approx(MIXED.text_weight)
    assert sum(by_row[texts:]) == pytest.approx(1)
    assert by_row[:texts] == pytest.approx([MIXED.text_weight / texts] * texts)
    assert sum(weights_by_row(batch("mixed", None))) == pytest.approx(1)


def test_in_the_first_recipe_every_label_counts_the_same():
    *_, weights = batch("retrieval", None)
    assert weights.sum().item() == pytest.approx(1)
    assert weights.unique().numel() == 1


def test_a_row_counts_as_so_many_labels():
    """Rows of 10, 100 and 500 answer labels count as 64, 100 and 256."""
    rows = [TrainingRow([*range(3, 604)], [*range(labels)]) for labels in (10, 100, 500)]
    by_row = weights_by_row(collate(rows, 600, MIXED))
    assert by_row == pytest.approx([64 / 420, 100 / 420, 256 / 420])
    assert weights_by_row(collate(rows, 600)) == pytest.approx([10 / 610, 100 / 610, 500 / 610])


@pytest.mark.parametrize("index", range(3))
def test_common_words_can_be_asked_for_in_the_order_of_the_list(index):
    counter = TokenCounter(tokenizer("reference"))
    document = TASKS["cwe"].build(Request("cwe", 2048, counter, 5, index))
    ordered = in_order(document)
    (before,), (after,) = document.questions, ordered.questions
    assert sorted(after.answers) == sorted(before.answers)
    text = document.context[document.context.rindex("Below is") :]
    places = [re.search(rf"\d\. {re.escape(word)}(?= |$)", text).start() for word in after.answers]
    assert places == sorted(places)
    assert after.target == " " + " ".join(f"{i}. {word}" for i, word in enumerate(after.answers, 1))
    assert ordered.context == document.context
    assert RECIPES["busy"].in_order


TINY = [
    "--layers=1", "--width=128", "--tokens=1024", "--longest=512", "--steps=6", "--warmup=2", "--workers=0",
    "--no-compile", "--precision=32-true", "--log-every=1", "--save-every=2",
    "--eval-rows=1", "--eval-every=6", "--eval-lengths", "512",
]  # fmt: skip


def pretrain(folder, *extra):
    folder.mkdir(exist_ok=True)
    tokenizer("reference").save_pretrained(folder)
    main(["train", str(folder), *TINY, *extra])


def losses(folder):
    """step -> loss, of the lines that are steps."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["length"]) for line in lines if "loss" in line]


def test_stopped_and_resumed_is_uninterrupted(tmp_path, capsys):
    pretrain(tmp_path / "whole")
    pretrain(tmp_path / "parts", "--stop-at", "3")
    assert torch.load(tmp_path / "parts/state.pt", weights_only=True)["step"] == 3
    pretrain(tmp_path / "parts")
    assert "resumed at step 3" in capsys.readouterr().out
    whole, parts = (torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["step"] == parts["step"] == 6
    assert all(torch.equal(value, parts["model"][name]) for name, value in whole["model"].items())
    for moments, others in zip(*(run["optimizer"]["state"].values() for run in (whole, parts)), strict=True):
        assert all(torch.equal(value, others[name]) for name, value in moments.items())
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert len(losses(tmp_path / "whole")) == 6
    saved = load_file(tmp_path / "parts/model/model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    norm = "model.norm.weight"
    assert torch.equal(saved[norm], whole["model"][norm].bfloat16())
    assert not list(tmp_path.rglob("*.partial"))


def test_text_is_learned_beside_answers_and_a_finished_run_is_left_alone(tmp_path):
    for split, size in (("train", 4000), ("test", 1500)):
        np.save(tmp_path / f"{split}.npy", (np.arange(size) % 50 + 100).astype(np.uint16))
    options = ["--recipe=mixed", f"--text={tmp_path}", "--steps=3", "--heads=2", "--kv-heads=1", "--eval-every=1000"]
    pretrain(tmp_path, *options)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (text,) = [line for line in lines if "text_loss" in line]
    assert text["step"] == len(losses(tmp_path)) == torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 3
    assert all(0 < loss < 10 for loss in text["text_loss"])
    assert len(text["text_loss"]) == 3
    before = (tmp_path / "state.pt").read_bytes()
    pretrain(tmp_path, *options)
    assert (tmp_path / "state.pt").read_bytes() == before
    assert len(losses(tmp_path)) == 3


def test_answers_without_an_order_are_right_in_any():
    """Rows of labels 5 6 7 and 8 9: any label that is left is right, one of another row or one that is over is not."""
    labels, rows = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 0, 0, 2, 2])
    predicted = torch.tensor([7, 5, 7, 9, 8])
    assert right_tokens(predicted, labels, rows, unordered=True).tolist() == [True, False, True, True, False]
    assert right_tokens(predicted, labels, rows, unordered=False).tolist() == [False, False, True, False, False]
