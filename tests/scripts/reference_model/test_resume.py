"""Pretraining of the reference model, stopped and gone on with, gives the weights of a run that nothing stopped."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scripts.reference_model.pretrain import main
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


@pytest.mark.parametrize("extra", [(), ("--muon",)])
def test_stopped_and_resumed_is_uninterrupted(tmp_path, capsys, extra):
    pretrain(tmp_path / "whole", *extra)
    pretrain(tmp_path / "parts", "--stop-at", "3", *extra)
    assert torch.load(tmp_path / "parts/state.pt", weights_only=True)["step"] == 3
    pretrain(tmp_path / "parts", *extra)
    assert "resumed at step 3" in capsys.readouterr().out
    whole, parts = (torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["step"] == parts["step"] == 6
    assert all(torch.equal(value, parts["model"][name]) for name, value in whole["model"].items())
    assert len(whole["optimizers"]) == 1 + len(extra)
    for optimizer, other in zip(whole["optimizers"], parts["optimizers"], strict=True):
        for moments, others in zip(optimizer["state"].values(), other["state"].values(), strict=True):
            assert all(torch.equal(value, others[name]) for name, value in moments.items())
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert len(losses(tmp_path / "whole")) == 6
    saved = load_file(tmp_path / "parts/model/model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    norm = "model.norm.weight"
    assert torch.equal(saved[norm], whole["model"][norm].bfloat16())
    assert not list(tmp_path.rglob("*.partial"))


def test_a_finished_run_is_left_alone(tmp_path):
    pretrain(tmp_path, "--steps", "2")
    before = (tmp_path / "state.pt").read_bytes()
    pretrain(tmp_path, "--steps", "2")
    assert (tmp_path / "state.pt").read_bytes() == before
    assert len(losses(tmp_path)) == 2


def test_text_is_learned_beside_answers_until_the_time_is_over(tmp_path):
    for split, size in (("train", 4000), ("test", 1500)):
        np.save(tmp_path / f"{split}.npy", (np.arange(size) % 50 + 100).astype(np.uint16))
    options = ["--recipe=mixed", f"--text={tmp_path}", "--seconds=2", "--heads=2", "--kv-heads=1", "--eval-every=1000"]
    pretrain(tmp_path, *options)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    shares = [line["share"] for line in lines if "loss" in line]
    assert shares == sorted(shares)
    assert shares[-1] < 1
    (text,) = [line for line in lines if "text_loss" in line]
    assert text["step"] == len(shares) == torch.load(tmp_path / "state.pt", weights_only=True)["step"]
    assert all(0 < loss < 10 for loss in text["text_loss"])
    assert len(text["text_loss"]) == 3
    pretrain(tmp_path, *options)  # nothing is left to train
    assert len(losses(tmp_path)) == len(shares)
