"""A LeanK mask's budget of each head, filled anew for each sample by ThinK's rule (LeanK, tables 9 and 23)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from eval.inference.prefill import Prefill
from eval.methods.channels.leank import LeanK
from eval.methods.channels.think import think_scores
from leank_train.channel_scores import GROUPS, top
from leank_train.common.typed import OneOf, Positive


@dataclass(frozen=True)
class LeanKBudget(LeanK):
    """mask: how many channels each head keeps is its number there; which ones, ThinK says.

    queries, group: see eval.methods.channels.think.
    """

    queries: Positive = 32
    group: Annotated[str, OneOf(*GROUPS)] = "squares"

    @property
    def obs_queries(self) -> int:  # type: ignore[override]
        return self.queries

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "queries": self.queries, "group": self.group}

    def keep_mask(self, prefill: Prefill, config: Any) -> Tensor:
        scores = think_scores(prefill, self.queries, self.group)
        return top(scores, self.loaded.channels_per_head[..., None].to(scores.device))
