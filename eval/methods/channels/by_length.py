"""Two choices of channels, by a prompt's length: Qwen2.5's two masks, up to and above 32K (LeanK, section 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.inference.models import shape_of
from eval.inference.prefill import Prefill
from eval.methods.axes import Channels, Observe
from leank_train.common.typed import Positive


@dataclass(frozen=True)
class ByLength(Channels):
    """below, above: choices of channels, {name: ..., its settings}. at: tokens of the longest prompt that `below` gets.

    Rows of a batch are told apart: each gets what it gets alone.
    """

    below: Mapping[str, Any] | None = None
    above: Mapping[str, Any] | None = None
    at: Positive = 32768

    @cached_property
    def choices(self) -> dict[str, Channels]:
        """The two choices. Raises ValueError, naming the setting."""
        from eval.methods import choice

        for side in ("below", "above"):
            if getattr(self, side) is None:
                raise ValueError(f"by_length.{side} is not set; give {{name: leank, mask: PATH}} or another choice")
        return {side: choice("channels", getattr(self, side), f"by_length.{side}") for side in ("below", "above")}

    @property
    def obs_queries(self) -> int:  # type: ignore[override]
        return max(one.obs_queries for one in self.choices.values())

    def check(self, config: Any, tokenizer: Any) -> None:
        for side, one in self.choices.items():
            try:
                one.check(config, tokenizer)
            except ValueError as error:
                raise ValueError(f"{side}: {error}") from error

    def calibrate(self, observe: Observe, tokenizer: Any, config: Any) -> None:
        for one in self.choices.values():
            one.calibrate(observe, tokenizer, config)

    def identity(self) -> dict[str, Any]:
        from eval.methods import name_of

        return {"at": self.at, **{s: {"name": name_of(one), **one.identity()} for s, one in self.choices.items()}}

    def keep_mask(self, prefill: Prefill, config: Any) -> Tensor:
        return self._by_row(prefill, {side: one.keep_mask(prefill, config) for side, one in self.choices.items()})

    def keep_value_mask(self, prefill: Prefill, config: Any) -> Tensor | None:
        found = {side: one.keep_value_mask(prefill, config) for side, one in self.choices.items()}
        if all(keep is None for keep in found.values()):
            return None
        everything = torch.ones(shape_of(config), dtype=torch.bool, device=prefill.logits.device)
        return self._by_row(prefill, {side: everything if keep is None else keep for side, keep in found.items()})

    def kept_counts(self, config: Any, length: int) -> tuple[np.ndarray, np.ndarray] | None:
        return self.choices["below" if length <= self.at else "above"].kept_counts(config, length)

    def _by_row(self, prefill: Prefill, keep: dict[str, Tensor]) -> Tensor:
        """Bool [B, L, H, D] of two of [L, H, D] or [B, L, H, D]."""
        short = (prefill.lengths <= self.at)[:, None, None, None]
        return torch.where(short, keep["below"].to(short.device), keep["above"].to(short.device))
