"""Methods beside the dense model along one course of tokens: what the replay measures in addition to replies.

Every method of a batch reads the same tokens through its cache, as it would decode them, and its next-token
distributions are compared with those of the dense model after the same tokens. The course is the dense model's own
greedy reply, which every benchmark has, and which needs no reference answer in the model's words. Where all of it is
read, top-1 agreement is 1 exactly if the method writes that reply, too. A row with `read` gives a text instead.

The first token of a reply comes from the prefill, so the first distribution compared is the one after it. With
compress=before_question the question is read through the cache, and the distribution after the question counts, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from leank.eval.inference.divergence import Divergence, compare
from leank.eval.inference.prefill import Prefill, joined, pad_left
from leank.eval.inference.reading import read, states
from leank.eval.rows.result_row import Fidelity
from leank.head import Head, check_head

Compared = tuple[Fidelity | None, float | None]  # of a sample; and the share of a text's tokens that are ranked first


@dataclass(frozen=True)
class Questions:
    """The questions of a batch, which follow its prompts.

    ids: int [B, q], left-padded; [B, 0] where nothing follows.
    real: bool [B, columns of prompt and question] or None: False marks padding; None is no padding.
    lengths: int [B], real tokens of prompt and question.
    """

    ids: Tensor
    real: Tensor | None
    lengths: Tensor

    @classmethod
    def of(cls, prompt: Prefill, questions: Sequence[list[int]], pad: int) -> Questions:
        """Put the questions, which may all be empty, behind the prompts. pad: id that fills shorter ones."""
        lengths = torch.tensor([len(q) for q in questions], device=prompt.logits.device)
        ids, there = pad_left(list(questions), pad, prompt.logits.device)
        return cls(ids.long(), joined(prompt.real, there, prompt.columns, ids), prompt.lengths + lengths)


@dataclass(frozen=True)
class Course:
    """The tokens that every method of a batch reads, and the dense model's hidden states after them.

    questions: the tokens of each row's question before them; empty where the prompt has it.
    ids: int [B, n]: tokens to read, with padding behind shorter rows.
    counts: how many distributions of each row count.
    targets: int [B, n], the text's next token after each of ids; None where ids are a reply.
    dense: [B, n or n + 1, hidden]; after the question first where one is read.
    """

    questions: Sequence[list[int]]
    ids: Tensor
    counts: list[int]
    targets: Tensor | None
    dense: Tensor


class Comparison:
    """Compares the methods of a batch with dense.

    model: of the replay.
    pad: id of the token that fills shorter rows.

    Raises ValueError if the model's output head does more than `leank_train.objective.kl.Head` knows of.
    """

    def __init__(self, model: PreTrainedModel, pad: int) -> None:
        try:
            check_head(model)
        except ValueError as error:
            raise ValueError(f"methods cannot be compared with dense by KL: {error}") from None
        self.model, self.pad, self.head = model, pad, Head.of(model)

    def course(
        self, prompt: Prefill, questions: Sequence[list[int]], tokens: Sequence[list[int]], text: bool
    ) -> Course:  # fmt: skip
        """Read the tokens with the dense model.

        prompt: a dense pass.
        questions: of each row; empty where the prompt has them.
        tokens: of each row, what is to be read.
        text: whether the tokens are a text, whose next tokens are known, or a reply.
        """
        first = any(questions)
        width = max(map(len, tokens))
        padded = torch.tensor([t + [self.pad] * (width - len(t)) for t in tokens], device=self.model.device).long()
        ids, targets = (padded[:, :-1], padded[:, 1:]) if text else (padded, None)
        counts = [max(0, len(t) - 1) if text else len(t) + first for t in tokens]
        return Course(questions, ids, counts, targets, self._states(prompt.fork(), prompt, questions, ids))

    def fidelity(self, cache: Cache, prompt: Prefill, course: Course) -> list[Compared]:
        """Read a course through a method's cache, which holds the prompts of `prompt`, the method's own pass.

        Returns for each row its fidelity, None if nothing is to be compared, and the share of a text's tokens that the
        method ranks first, None for a reply and where logits are not finite.
        """
        mine, found = self._states(cache, prompt, course.questions, course.ids), []
        for row, count in enumerate(course.counts):
            targets = None if course.targets is None else course.targets[row, :count]
            compared = compare(self.head, course.dense[row, :count], mine[row, :count], targets) if count else None
            found.append((None, None) if compared is None else _figures(compared))
        return found

    def _states(self, cache: Cache, prompt: Prefill, questions: Sequence[list[int]], ids: Tensor) -> Tensor:
        """Hidden states after the question, if one is read, and after each of ids."""
        asked, found = Questions.of(prompt, questions, self.pad), []
        if asked.ids.shape[1]:
            found.append(states(self.model, cache, asked.ids, asked.real)[:, -1:])
        if ids.shape[1]:
            real = asked.real
            real = None if real is None else torch.cat([real, torch.ones_like(ids, dtype=torch.bool)], 1)
            found.append(read(self.model, cache, ids, real))
        empty = torch.empty(len(ids), 0, self.head.weight.shape[1], device=ids.device)
        return torch.cat(found, 1) if found else empty


def _figures(compared: Divergence) -> Compared:
    """The means of a row's tokens: its fidelity, and the share of right tokens."""
    bad = (~compared.kl.isfinite()).nonzero()
    if len(bad):
        nothing: Fidelity = {
            "tokens": len(compared.kl), "kl": None, "top1": None, "loss": None, "dense_loss": None,
            "non_finite": int(bad[0]),
        }  # fmt: skip
        return nothing, None
    loss, dense_loss, right = (
        None if x is None else float(x.mean()) for x in (compared.loss, compared.dense_loss, compared.right)
    )
    found: Fidelity = {
        "tokens": len(compared.kl), "kl": float(compared.kl.mean()), "top1": float(compared.same.mean()),
        "loss": loss, "dense_loss": dense_loss, "non_finite": None,
    }  # fmt: skip
    return found, right
