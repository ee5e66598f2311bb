"""LeanK's budget per head with channels that ThinK's rule selects for each sample (arXiv 2508.02215, tables 9, 23)."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from transformers import PreTrainedConfig

from leank.channel_scores import GROUPS, top
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.channels.think import think_scores
from leank.typed import OneOf, Positive


@method("leank_budget")
@dataclass(frozen=True)
class LeanKBudget(LeanK):
    """Each head keeps as many channels as the mask gives it: those of the largest ThinK score (see its deviations).

    Score[j] = ||q_j|| ||k_j||        (ThinK, arXiv 2407.21018, section 3.2)
    """

    queries: Positive = 32  # last queries of the prompt that are observed
    group: Annotated[str, OneOf(*GROUPS)] = "squares"  # what is averaged over the query heads of a KV head

    def identity(self) -> dict[str, object]:
        return {**super().identity(), "queries": self.queries, "group": self.group}

    def precision(self) -> None:
        self.loaded.refuse_precision("leank_budget")

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        scores = think_scores(prefill, self.queries, self.group)
        return top(scores, self.loaded.channels_per_head[..., None].to(scores.device))
