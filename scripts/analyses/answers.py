"""How well a model knows the right answer when some K channels of its prompt are gone, for many masks at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from leank.data_gen.sample import Sample
from leank_train.forward.branching import branch, prefill, student
from scripts.analyses.source import Source


class Known(NamedTuple):
    """What M masks leave of one sample's answer. The answer's first token does not count: the dense pass gives it.

    loss: float64 [M], mean over the answer's tokens, nats.
    wrong: float64 [M], share of the answer's tokens that are not the most probable one.
    """

    loss: Tensor
    wrong: Tensor

    @property
    def exact(self) -> Tensor:
        """Whether the model, decoding greedily after the dense pass's first token, writes the answer; bool [M]."""
        return self.wrong == 0


@torch.no_grad()
def known(
    source: Source, sample: Sample, keep: Tensor, sink: int, window: int, empty_heads: str, batch: int = 32
) -> Known:
    """Run the right answer under every mask, with the attention of training's Eq. 1; the prompt is prefilled once.

    keep: [M, L, H, D], bool or 0 and 1.
    sink, window: tokens that keep all channels; the window counts the reading token itself.
    empty_heads: "drop" or "zero", as in `leank_train.forward.attention.scaled_attention`.
    batch: masks that run side by side.

    Raises ValueError for an answer of one token, which no mask can change.
    """
    backbone, ids = source.backbone, source.ids(sample)
    answer = torch.tensor([backbone.encode(sample.target)], device=ids.device)
    tokens = answer.shape[1] - 1
    if tokens < 1:
        raise ValueError(f"the answer {sample.target!r} of task={sample.task!r} is one token; choose another task")
    prefix = prefill(backbone.model, ids[:, :-1], [ids.shape[1] - 1])
    asked = branch(backbone.model, prefix, ids[:, -1:], [1])
    found = []
    for some in keep.to(ids.device, prefix.keys[0].dtype).split(batch):
        given, right = (part.expand(len(some), -1) for part in (answer[:, :-1], answer[:, 1:]))
        hidden = student(
            backbone.model, prefix, asked.repeat(len(some)), given, [tokens] * len(some), some,
            sink=sink, window=window, empty_heads=empty_heads,
        )  # fmt: skip
        logits = backbone.model.get_output_embeddings()(hidden).float()  # [M, tokens, vocabulary]
        loss = cross_entropy(logits.mT, right, reduction="none").double().mean(1)
        found.append(torch.stack([loss, (logits.argmax(-1) != right).double().mean(1)]).cpu())
    return Known(*torch.cat(found, 1))
