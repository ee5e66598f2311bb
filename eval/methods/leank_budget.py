"""A LeanK mask's budget of each head, filled anew for each sample by ThinK's rule (LeanK, tables 9 and 23)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from eval.methods.leank import LeanK
from eval.methods.think import think_scores
from eval.prefill import Prefill
from leank_train.channel_scores import GROUPS, top
from leank_train.typed import OneOf, Positive


@dataclass(frozen=True)
class LeanKBudget(LeanK):
    """mask: how many channels each head keeps is its number there; which ones, ThinK says (see eval.methods.think for
    queries and group)."""

    queries: Positive = 32
    group: Annotated[str, OneOf(*GROUPS)] = "squares"

    @property
    def obs_queries(self) -> int:  # type: ignore[override]
        return self.queries

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "queries": self.queries, "group": self.group}

    def keep(self, prefill: Prefill, config: Any) -> Tensor:
        scores = think_scores(prefill, self.queries, self.group)
        return top(scores, self.loaded.channels_per_head[..., None].to(scores.device))
