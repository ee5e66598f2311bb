"""Pretraining of the reference model, stopped and gone on with, gives the weights of a run that nothing stopped."""

import json

import numpy as np
import torch
from safetensors.torch import load_file

from scripts.reference_model.pretrain import main, right_tokens
from tests.helpers.text_tokenizers import tokenizer

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
