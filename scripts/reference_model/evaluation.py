"""Evaluation while a reference model is trained: exact match of answers, and the loss of held-out text."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn
from transformers import LlamaForCausalLM

from scripts.reference_model.batches import TrainingRow, collate
from scripts.reference_model.recipe import UNORDERED

_TEXT_ROWS = 32


class Answers(nn.Module):
    """Logits at the supervised positions only: the vocabulary projection of a whole row would be waste."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.lm = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] of ids [rows, length] at the flattened positions [n]."""
        hidden = self.lm.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)  # [rows * length, width]
        return self.lm.lm_head(hidden[positions])  # [n, vocabulary]


def right_tokens(predicted: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor, unordered: bool) -> torch.Tensor:
    """Which predictions are right, bool [n].

    predicted, labels: token ids [n], teacher-forced. rows: int [n], the row of each, in order.
    unordered: whether any label of the same row that has not come yet is right too.
    """
    right = predicted == labels
    if unordered:
        for row in rows.unique():
            at = (rows == row).nonzero()[:, 0]
            left = torch.ones(len(at), len(at), dtype=torch.bool, device=at.device).triu()  # [prediction, label]
            right[at] = ((predicted[at, None] == labels[None, at]) & left).any(-1)
    return right


@torch.no_grad()
def exact_match(
    model: nn.Module, rows: dict[str, list[TrainingRow]], length: int, fabric: Fabric
) -> dict[str, list[float]]:
    """Per task, teacher-forced: the share of rows with every supervised token right, and of tokens that are right."""
    found = {}
    for name, all_rows in rows.items():
        mine = all_rows[fabric.global_rank :: fabric.world_size]
        counts = torch.zeros(4, device=fabric.device)  # rows right, rows, tokens right, tokens
        per = max(1, 65_536 // length)
        for i in range(0, len(mine), per):
            ids, positions, labels, _ = (x.to(fabric.device) for x in collate(mine[i : i + per], length))
            with fabric.autocast():
                predicted = model(ids, positions).argmax(-1)
            right = right_tokens(predicted, labels, positions // length, name in UNORDERED)
            wrong = torch.zeros(len(ids), device=fabric.device).index_add_(0, positions // length, (~right).float())
            counts += torch.tensor([(wrong == 0).sum(), len(ids), right.sum(), len(right)], device=fabric.device)
        a, b, c, d = fabric.all_reduce(counts, reduce_op="sum").tolist()  # type: ignore[union-attr]
        found[name] = [round(a / b, 3), round(c / d, 3)]
    return found


@torch.no_grad()
def text_loss(model: nn.Module, stream: np.ndarray, bos: int, length: int, fabric: Fabric) -> list[float]:
    """Mean loss on held-out text at the positions below 512, from there to the middle, and in the second half."""
    bounds = [0, min(512, length // 4), length // 2, length]
    sums = torch.zeros(len(bounds) - 1, device=fabric.device)
    rows = min(_TEXT_ROWS, (len(stream) - 1) // length)
    for row in range(fabric.global_rank, rows, fabric.world_size):
        ids = torch.from_numpy(stream[row * length : (row + 1) * length].astype(np.int64)).to(fabric.device)
        shown = torch.cat([ids.new_tensor([bos]), ids[:-1]])[None]
        with fabric.autocast():
            logits = model(shown, torch.arange(length, device=fabric.device))
        losses = nn.functional.cross_entropy(logits.float(), ids, reduction="none")
        sums += torch.stack([losses[a:b].mean() for a, b in pairwise(bounds)])
    total = fabric.all_reduce(sums, reduce_op="sum")
    return [round(x / max(1, rows), 4) for x in total.tolist()]  # type: ignore[union-attr]


def evaluate(
    model: Answers,
    probes: dict[int, dict[str, list[TrainingRow]]],
    heldout: np.ndarray | None,
    step: int,
    out: Path,
    fabric: Fabric,
) -> None:
    """Record the exact match of every length's probes, and the loss on held-out text."""
    with torch.compiler.set_stance("force_eager"):  # no new graph for each number of rows
        for length, rows in probes.items():
            record(out, fabric, step=step, eval_length=length, **exact_match(model, rows, length, fabric))
        if heldout is not None:
            length, bos = max(probes), model.lm.config.bos_token_id
            assert bos is not None  # `make_model` gives it
            losses = text_loss(model, heldout, bos, length, fabric)
            record(out, fabric, step=step, text_length=length, text_loss=losses)


def record(out: Path, fabric: Fabric, **values: object) -> None:
    """Write one line to the screen and to log.jsonl."""
    if fabric.is_global_zero:
        print(json.dumps(values), flush=True)
        with (out / "log.jsonl").open("a") as log:
            log.write(json.dumps(values) + "\n")
