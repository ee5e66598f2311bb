"""Sampling of replies, so that every row is repeatable and all methods start alike.

One number, uniform in [0, 1), decides each token. It is a function of the seed, the prompt's tokens, the reply's number
and the step alone: it depends neither on the method nor on the batch, on rows done before, or on the device. The token
is the one at which the cumulative probability, in the vocabulary's order, passes that number: equal distributions give
equal tokens, and near ones mostly do, so that differences between methods are paired.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from leank.typed import LARGEST, BadConfig, Checked, Count, Positive, Seed


@dataclass(frozen=True)
class Sampling(Checked):
    """How the tokens of a reply are chosen: the likeliest by default.

    The order is that of transformers and vLLM: temperature, then top-k, then top-p.
    """

    temperature: Annotated[float, Ge(0), Le(LARGEST)] = 0.0  # logits are divided by it; 0 takes the likeliest token
    # the likeliest tokens whose probabilities together reach it are drawn from, the one that reaches it included
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Count = 0  # the likeliest tokens that are drawn from; 0 is all, and those equal to the last of them stay
    replies: Positive = 1  # of each sample
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, off in (("replies", 1), ("top_p", 1), ("top_k", 0)):
            if not self.temperature and getattr(self, name) != off:
                raise BadConfig(
                    f"{name}={getattr(self, name)} has no effect while temperature=0 takes the likeliest token; set "
                    "temperature=0.6 or the like"
                )

    def identity(self) -> dict[str, object]:
        """What a reply depends on, as JSON; not on how many there are."""
        heat = {"temperature": float(self.temperature), "top_p": float(self.top_p), "top_k": self.top_k}
        return {**heat, "seed": self.seed}


GREEDY = Sampling()


def uniforms(seed: int, prompt: Sequence[int], reply: int, steps: int) -> np.ndarray:
    """The numbers of the first `steps` tokens of a reply, float64 [steps] in [0, 1).

    prompt: its token ids; reply: its number, from 0
    """
    text = f"{seed} {reply} {' '.join(map(str, prompt))}"
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest())).random(steps)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What tokens are drawn from, float64 [B, vocabulary], of logits [B, vocabulary]; rows need not sum to 1.

    NaN where the largest logit is NaN or infinite.
    """
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    found = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered, tokens = found.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1).roll(1, -1)  # of the likelier tokens together
        before[:, 0] = 0
        found = found.scatter(-1, tokens, ordered.masked_fill(before >= sampling.top_p, 0))
    return found


@dataclass(frozen=True)
class Draws:
    """The numbers that decide the tokens of a batch's replies."""

    sampling: Sampling
    numbers: Tensor  # float64 [B, steps]

    @classmethod
    def of(
        cls, sampling: Sampling, prompts: Sequence[Sequence[int]], reply: int, steps: int, device: torch.device
    ) -> Self:
        """The draws of the reply of that number to each prompt."""
        found = np.stack([uniforms(sampling.seed, prompt, reply, steps) for prompt in prompts])
        return cls(sampling, torch.from_numpy(found).to(device))

    def tokens(self, logits: Tensor, step: int) -> Tensor:
        """The tokens [B] of a step with logits [B, vocabulary]; of a row whose logits are not finite, any."""
        passed = probabilities(logits, self.sampling).cumsum(-1)
        wanted = self.numbers[:, step, None] * passed[:, -1:]
        return torch.searchsorted(passed, wanted, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
