"""Methods beside the dense model along one reference continuation: what is measured in addition to replies.

Every method of a batch reads the same tokens through its cache, as it would decode them, and its next-token
distributions are compared with those of the dense model after the same tokens. Recall near 100 hides differences
between methods; these figures do not saturate. At a token after which the dense model predicts p and the method q,
both over all words w of the vocabulary:

    KL(p || q) = sum over w of p_w (log p_w - log q_w), in nats, and zero only where the two are equal
    top-1 agreement: whether argmax p = argmax q
    loss: -log q of the token that the text goes on with; its exponential is the perplexity

The reference continuation is the dense model's own greedy reply. Every benchmark has one, and it needs no reference
answer in the model's words. If a method agrees with dense at every token of it, the method writes that reply, too. A
row with `read` gives a text in place of a reply.

**By position.** Long replies show whether a method drifts from dense as its cache grows. Every method reads dense's
reply in place of writing one, as it would decode it: by captured steps, one token of each row at a time, or, where none
can be captured, in pieces within which nothing leaves the window. So its eviction and packing are those of decoding.
Dense is read twice: many tokens at a time, for the distributions that methods are compared with, and as decoded through
this project's storage. The distance between the two is that of rounding alone, and the floor below which no method's
means anything.

The first token of a reply comes from the prefill, so the first distribution compared is the one after it. With
compress=before_question the question is read through the cache, and the distribution after the question counts, too.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from leank.errors import naming
from leank.eval.inference.decode import read, read_as_decoded, states
from leank.eval.inference.prefill import Prefill, joined, pad_left
from leank.eval.rows import Fidelity
from leank.head import LOGITS_AT_ONCE, Head, check_head, divergence

Compared = tuple[Fidelity | None, float | None]  # of a sample; and the share of a text's tokens that are ranked first


@dataclass(frozen=True)
class Questions:
    """The questions of a batch, which follow its prompts or the questions before."""

    ids: Tensor  # int [B, q], left-padded; [B, 0] where nothing follows
    # bool [B, columns] or None: False marks padding, of all up to the question's end; None is no padding
    real: Tensor | None
    lengths: Tensor  # int [B], real tokens up to the question's end
    columns: int  # up to the question's end

    @classmethod
    def of(cls, before: Prefill | Self, questions: Sequence[list[int]], pad: int) -> Self:
        """Put questions, which may all be empty, behind what stands before. pad: id that fills shorter ones."""
        device = before.lengths.device
        lengths = torch.tensor([len(question) for question in questions], device=device)
        ids, there = pad_left(list(questions), pad, device)
        real = joined(before.real, there, before.columns, ids)
        return cls(ids.long(), real, before.lengths + lengths, before.columns + ids.shape[1])


@dataclass(frozen=True)
class Continuation:
    """The reference continuation of a batch, and the dense model's hidden states after its tokens."""

    questions: Sequence[list[int]]  # the tokens of each row's question before them; empty where the prompt has it
    ids: Tensor  # int [B, n]: tokens to read, with padding behind shorter rows
    counts: list[int]  # how many distributions of each row count
    targets: Tensor | None  # int [B, n], the text's next token after each of ids; None where ids are a reply
    dense: Tensor  # [B, n or n + 1, hidden]; after the question first where one is read


class Comparison:
    """Compares the methods of a batch with dense; pad: id of the token that fills shorter rows.

    Raises ValueError if the model's output head does more than `leank.head.Head` knows of.
    """

    def __init__(self, model: PreTrainedModel, pad: int) -> None:
        with naming("methods cannot be compared with dense by KL"):
            check_head(model)
        self.model, self.pad, self.head = model, pad, Head.of(model)

    def continuation(
        self, prompt: Prefill, questions: Sequence[list[int]], tokens: Sequence[list[int]], text: bool
    ) -> Continuation:
        """Read each row's question, if the prompt lacks it, and tokens, a text or a reply, with the dense model."""
        first = any(questions)
        width = max(map(len, tokens))
        padded = torch.tensor([t + [self.pad] * (width - len(t)) for t in tokens], device=self.model.device).long()
        ids, targets = (padded[:, :-1], padded[:, 1:]) if text else (padded, None)
        counts = [max(0, len(t) - 1) if text else len(t) + first for t in tokens]
        return Continuation(questions, ids, counts, targets, self._states(prompt.fork(), prompt, questions, ids))

    def fidelity(
        self, cache: Cache, prompt: Prefill, continuation: Continuation, block: int = 0,
        each: Callable[[int], None] = lambda done: None,
    ) -> list[Compared]:  # fmt: skip
        """Read a reference continuation through a method's cache, which holds the prompts of its pass `prompt`.

        block, each: tokens of a block of `Fidelity.along`, see `read_as_decoded`; 0 measures no blocks
        Returns for each row its fidelity, None if nothing is to be compared, and the share of a text's tokens that the
        method ranks first, None for a reply and where logits are not finite.
        """
        if block and continuation.ids.shape[1]:
            given = continuation.ids, prompt.real, prompt.lengths
            mine, stepped = read_as_decoded(self.model, cache, *given, block, each)
        else:
            mine, stepped = self._states(cache, prompt, continuation.questions, continuation.ids), False
        found = []
        for row, count in enumerate(continuation.counts):
            targets = None if continuation.targets is None else continuation.targets[row, :count]
            compared = (
                compare(self.head, continuation.dense[row, :count], mine[row, :count], targets) if count else None
            )
            found.append((None, None) if compared is None else _figures(compared, block, stepped))
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


def _figures(compared: dict[str, Tensor], block: int, stepped: bool) -> Compared:
    """The means of a row's tokens: its fidelity, with those of each block, and the share of right tokens."""
    bad = (~compared["kl"].isfinite()).nonzero()
    mean = {} if len(bad) else {name: float(values.mean()) for name, values in compared.items()}
    found: Fidelity = {
        "tokens": len(compared["kl"]), "kl": mean.get("kl"), "top1": mean.get("top1"), "loss": mean.get("loss"),
        "dense_loss": mean.get("dense_loss"), "non_finite": int(bad[0]) if len(bad) else None,
    }  # fmt: skip
    if block and mean:
        found["along"] = {
            "block": block, "stepped": stepped, "kl": _by_block(compared["kl"], block),
            "top1": _by_block(compared["top1"], block),
        }  # fmt: skip
    return found, mean.get("right")


def _by_block(values: Tensor, block: int) -> list[float]:
    """The mean of every `block` of values [n]; the last one may be shorter."""
    return [float(part.mean()) for part in values.split(block)]


@torch.no_grad()
def compare(
    head: Head, dense: Tensor, method: Tensor, targets: Tensor | None = None, chunk: int | None = None
) -> dict[str, Tensor]:
    """Compare the distributions that two runs predict after the same n tokens, in float32 (float64 stays).

    dense, method: [n, hidden], hidden states of the decoder after each token
    targets: int [n], the token that the text goes on with; None without a text
    chunk: tokens whose logits are held at a time; `LOGITS_AT_ONCE` decides by default
    Returns float64 tensors [n] on the host: kl in nats, NaN where logits are not finite; top1, 1 where both have the
    same likeliest token, else 0; and of a text loss and dense_loss in nats, and right, 1 where the method's likeliest
    token is the text's.
    """
    if chunk is None:
        chunk = max(1, LOGITS_AT_ONCE["cuda" if dense.is_cuda else "cpu"] // head.weight.shape[0])
    texts = [None] * -(-len(dense) // chunk) if targets is None else targets.split(chunk)
    found: dict[str, list[Tensor]] = defaultdict(list)
    for p_states, q_states, text in zip(dense.split(chunk), method.split(chunk), texts, strict=True):
        p, q = (head.logits(states).log_softmax(-1) for states in (p_states, q_states))
        kl = divergence(p, q)  # NaN where the largest logit of either is NaN or infinite
        found["kl"].append(kl)
        found["top1"].append((p.argmax(-1) == q.argmax(-1)).to(kl))
        if text is not None:
            for name, x in (("loss", q), ("dense_loss", p)):
                found[name].append(-x.gather(-1, text[:, None]).squeeze(-1))
            found["right"].append((q.argmax(-1) == text).to(kl))
    return {name: torch.cat(parts).double().cpu() for name, parts in found.items()}
