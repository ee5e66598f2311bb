"""Two choices of channels by a prompt's length, such as Qwen2.5's two masks (LeanK, arXiv 2508.02215, section 4.1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.errors import naming
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Channels, Observe, method
from leank.eval.methods.registry import choice, name_of
from leank.shape import kv_shape
from leank.typed import Positive


@method("by_length")
@dataclass(frozen=True)
class ByLength(Channels):
    """Prompts of at most `at` tokens get one choice, longer prompts another, row by row as alone.

    Deviation: the paper switches between two LeanK masks; any two choices of channels are accepted here.
    """

    below: Mapping[str, Any] | None = None  # {name: ..., its settings}: the choice for prompts of at most `at` tokens
    above: Mapping[str, Any] | None = None  # the choice for longer prompts
    at: Positive = 32768  # tokens of the longest prompt that gets `below`

    @cached_property
    def choices(self) -> dict[str, Channels]:
        """The two choices. Raises ValueError naming the setting at fault."""
        for side in ("below", "above"):
            if getattr(self, side) is None:
                raise ValueError(f"by_length.{side} is not set; give {{name: leank, mask: PATH}} or another choice")
        made = {side: choice("channels", getattr(self, side), f"by_length.{side}") for side in ("below", "above")}
        return cast(dict[str, Channels], made)

    @property
    def obs_queries(self) -> int:
        return max(one.obs_queries for one in self.choices.values())

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        for side, one in self.choices.items():
            with naming(side):
                one.check(config, tokenizer)

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        for one in self.choices.values():
            one.calibrate(observe, tokenizer, config)

    def identity(self) -> dict[str, object]:
        return {"at": self.at, **{s: {"name": name_of(one), **one.identity()} for s, one in self.choices.items()}}

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        return self._by_row(prefill, {side: one.keep_mask(prefill, config) for side, one in self.choices.items()})

    def keep_value_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor | None:
        found = {side: one.keep_value_mask(prefill, config) for side, one in self.choices.items()}
        if all(keep is None for keep in found.values()):
            return None
        everything = torch.ones(kv_shape(config), dtype=torch.bool, device=prefill.logits.device)
        return self._by_row(prefill, {side: everything if keep is None else keep for side, keep in found.items()})

    def precision(self) -> None:
        for side, one in self.choices.items():
            if one.precision() is not None:
                raise ValueError(
                    f"by_length.{side}: its mask has bits per channel, and one cache has one layout of them"
                )

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[np.ndarray, np.ndarray] | None:
        return self.choices["below" if length <= self.at else "above"].kept_counts(config, length)

    def _by_row(self, prefill: Prefill, keep: dict[str, Tensor]) -> Tensor:
        """Bool [B, L, H, D]: the mask of each row's side, out of masks [L, H, D] or [B, L, H, D]."""
        short = (prefill.lengths <= self.at)[:, None, None, None]
        return torch.where(short, keep["below"].to(short.device), keep["above"].to(short.device))
