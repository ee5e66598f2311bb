"""Training batches: token ids of documents, questions and answers; a batch depends on its seed and step alone."""

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple, Self

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from leank.backbone import Backbone
from leank.data_gen.task import HELD_OUT as HELD_OUT
from leank.data_gen.task import Document
from leank.data_gen.tasks import Mixture

# Named, since a program around a run may have put its own in place of the default, as Hydra's joblib launcher does.
START = "fork" if sys.platform == "linux" else "spawn"


class Ragged(NamedTuple):
    """Rows of token ids that differ in length."""

    ids: Tensor  # [rows, longest], padded on the right with 0
    lengths: Tensor  # [rows] on the host, where passes are planned (`forward.plan`)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Pad rows of at least one token id."""
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return cls(ids, torch.tensor([len(row) for row in rows]))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """A copy with the ids on another device; `non_blocking` is that of `Tensor.to`."""
        return self._replace(ids=self.ids.to(device, non_blocking=non_blocking))


class Batch(NamedTuple):
    """B documents with M questions each, R = B * M branches; all int64, ids padded on the right with 0."""

    documents: Ragged  # [B, P], ids
    prompts: Ragged  # [R, T], ids of question, answer prefix and answer
    answers: Ragged  # [R, N], ids; the last tokens of the prompts

    @property
    def question_lengths(self) -> Tensor:
        """Tokens of each prompt before its answer, [R] on the host."""
        return self.prompts.lengths - self.answers.lengths

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return type(self)(*(rows.to(device, non_blocking) for rows in self))


def collate(backbone: Backbone, documents: Sequence[Document]) -> Batch:
    """Tokenise documents. Raises ValueError if their numbers of questions differ, or an answer has no tokens."""
    counts = {len(d.questions) for d in documents}
    if len(counts) != 1:
        raise ValueError(f"documents of one batch have {sorted(counts)} questions; mix tasks with the same number")
    contexts = [backbone.encode_context(d.context, d.framed) for d in documents]
    asked = [(q, d.framed) for d in documents for q in d.questions]
    questions = [backbone.encode_question(q.question, q.answer_prefix, framed) for q, framed in asked]
    answers = [backbone.encode(q.target) for q, _ in asked]
    for (q, _), a in zip(asked, answers, strict=True):
        if not a:
            raise ValueError(f"the answer {q.target!r} to {q.question!r} has no tokens: nothing to distil")
    prompts = [q + a for q, a in zip(questions, answers, strict=True)]
    return Batch(Ragged.of(contexts), Ragged.of(prompts), Ragged.of(answers))


class Steps(torch.utils.data.Dataset):
    """Batches of one rank, by the number of the step; documents are numbered by step, and by rank within a step."""

    def __init__(self, backbone: Backbone, mixture: Mixture, documents: int, rank: int, world: int) -> None:
        self.backbone, self.mixture, self.documents = backbone, mixture, documents
        self.rank, self.world = rank, world

    def __getitem__(self, step: int) -> Batch:
        first = (step * self.world + self.rank) * self.documents
        return collate(self.backbone, [self.mixture[first + i] for i in range(self.documents)])


class RetrievalData(L.LightningDataModule):
    """Batches of a task mixture, from the step of the checkpoint on.

    The ranks of a step take neighbouring documents, so W ranks with one document see what one rank with W sees.
    workers: processes that make batches; 0 makes them in this one.
    together: neighbouring ranks that share every context, and so see the same documents.
    """

    def __init__(
        self, backbone: Backbone, mixture: Mixture, documents: int = 1, workers: int = 0, together: int = 1
    ) -> None:
        super().__init__()
        self.backbone, self.mixture, self.documents, self.workers = backbone, mixture, documents, workers
        self.start, self.together = 0, together

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        """Return the batches in order, from the next step on."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return torch.utils.data.DataLoader(
            Steps(self.backbone, self.mixture, self.documents, rank // self.together, world // self.together),
            batch_size=None,
            sampler=itertools.count(self.start),  # Trainer(max_steps) ends the run
            num_workers=self.workers,
            multiprocessing_context=START if self.workers else None,
            prefetch_factor=4 if self.workers else None,
            pin_memory=torch.cuda.is_available(),
        )

    def state_dict(self) -> dict[str, int]:
        return {"start": self.trainer.global_step if self.trainer else self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]
