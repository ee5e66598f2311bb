"""The product of training: which K channels of which KV head are kept (the paper's beta).

mask = ChannelMask.from_scores(alpha, ratio=0.7, align=32, rounding="exact", metadata={"model": "org/name"})
mask.save("mask.safetensors")
ChannelMask.load("mask.safetensors").check_model(model.config)
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from leank_train.files import write_bytes

ROUNDINGS = ("nearest", "floor", "exact", "official")
FORMAT = "leank-channel-mask-1"


class ChannelMask:
    """Kept K channels of every KV head.

    keep: bool [L, H, D] (layers, KV heads, head_dim); True = kept. It applies to keys and queries after RoPE.
    metadata: what JSON can hold: model, config hash, ratio, alignment, rounding, sink, window, lengths, seed, versions.
    """

    def __init__(self, keep: Tensor, metadata: dict[str, Any] | None = None):
        """Raise ValueError unless `keep` is a bool tensor of three dimensions, none of them empty."""
        if keep.dtype != torch.bool or keep.dim() != 3 or keep.numel() == 0:
            raise ValueError(
                f"keep is {keep.dtype} {list(keep.shape)}; give a bool tensor [layers, kv_heads, head_dim]"
            )
        self.keep = keep.detach().cpu().contiguous()
        self.metadata = dict(metadata or {})

    @property
    def pruning_ratio(self) -> float:
        """Share of all K channels that is pruned, 0 to 1."""
        return 1.0 - self.keep.double().mean().item()

    @property
    def channels_per_head(self) -> Tensor:
        """Kept channels, int64 [L, H]."""
        return self.keep.sum(-1)

    @classmethod
    def from_scores(
        cls, alpha: Tensor, ratio: float, align: int, rounding: str, metadata: dict[str, Any] | None = None
    ) -> "ChannelMask":
        """Top_{s%, r} of the scores (section 3.2): keep the best channels, a multiple of `align` in each head.

        alpha: scores [L, H, D], larger is more important. ratio: share to prune, in [0, 1). align: r, a divisor of D.
        rounding, from a head's n channels among the round(LHD(1 - ratio)) best of the model to its kept number:
          nearest   nearest multiple of r, halves up (the paper's text); the whole is near the ratio, not on it
          floor     floor(n / r) * r (the paper's formula); prunes more than asked
          exact     blocks of r channels of each head's descending order, best sums first, until the budget is full:
                    the ratio is met to within half a block
          official  n counts the channels >= the `ratio` quantile, halves up (the published code): tied scores all
                    pass, so with a quantile of 0 everything is kept
        Equal scores go to the lower index, except in `official`. Raises ValueError, naming the setting at fault.
        """
        _check_scores(alpha, ratio, align, rounding)
        scores = alpha.detach().double().cpu()
        heads, dim = scores.flatten(0, 1), scores.shape[-1]  # [L*H, D]
        if rounding == "exact":
            blocks = heads.sort(dim=-1, descending=True).values.unflatten(-1, (-1, align)).sum(-1)  # [L*H, D/r]
            counts = _count_best(blocks, _nearest_integer(scores.numel() * (1 - ratio) / align)) * align
        elif rounding == "official":
            counts = (heads >= heads.quantile(ratio)).sum(-1)
        else:
            counts = _count_best(heads, _nearest_integer(scores.numel() * (1 - ratio)))
        if rounding != "exact":
            counts = (counts + (0 if rounding == "floor" else align // 2)) // align * align
        rank = heads.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)  # place of each channel in its head
        keep = (rank < counts[:, None].clamp(max=dim)).view(alpha.shape)
        return cls(keep, {**(metadata or {}), "ratio": ratio, "alignment": align, "rounding": rounding})

    @classmethod
    def from_official(cls, path: str | os.PathLike) -> "ChannelMask":
        """Read a mask published with LeanK: a .pth tensor [L, H, D] of zeros and ones. Raises ValueError otherwise."""
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:  # torch raises many kinds for a file that is no tensor
            raise ValueError(f"mask={path} is not a tensor saved by torch.save: {error}") from error
        if not isinstance(values, Tensor) or values.dim() != 3 or not ((values == 0) | (values == 1)).all():
            raise ValueError(f"mask={path} must hold one tensor [layers, kv_heads, head_dim] of zeros and ones")
        return cls(values.bool(), {"source": Path(path).name})

    def save(self, path: str | os.PathLike) -> None:
        """Write safetensors, the metadata in the header: whole or not at all, the same bytes for the same mask."""
        header = {"format": FORMAT, "metadata": json.dumps(self.metadata, sort_keys=True)}
        content = serialise({"keep": self.keep}, metadata=header)
        end = 8 + int.from_bytes(content[:8], "little")  # safetensors writes the keys of its header in random order
        ordered = json.dumps(json.loads(content[8:end]), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        write_bytes(path, content[:8] + ordered.encode().ljust(end - 8) + content[end:])

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ChannelMask":
        """Read what `save` wrote; nothing is unpickled. Raises FileNotFoundError, or ValueError for any other file."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"mask={path} does not exist; give the mask.safetensors of a training run")
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header.get("format") != FORMAT:
                    raise ValueError(f"mask={path} is a safetensors file, but not one that ChannelMask.save wrote")
                return cls(file.get_tensor("keep"), json.loads(header["metadata"]))
        except SafetensorError as error:
            raise ValueError(
                f"mask={path} is damaged or no safetensors file ({error}); train again, copy it again, "
                "or read a published .pth mask with ChannelMask.from_official"
            ) from error

    def check_model(self, config: Any) -> None:
        """Raise ValueError if the mask does not fit a model's config; warn if the model has another name."""
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        wanted = [config.num_hidden_layers, heads, dim]
        mine, theirs = self.metadata.get("model"), getattr(config, "_name_or_path", "")
        if list(self.keep.shape) != wanted:
            raise ValueError(
                f"the mask (model {mine or 'unknown'}) has the shape {list(self.keep.shape)}, the model "
                f"{theirs or 'unnamed'} needs [layers, kv_heads, head_dim] = {wanted}; take a mask trained for it"
            )
        if mine and theirs and Path(mine).name.lower() != Path(theirs).name.lower():
            warnings.warn(f"the mask was trained on {mine} and is used on {theirs}", stacklevel=2)


def _nearest_integer(value: float) -> int:
    return int(value + 0.5)


def _count_best(scores: Tensor, budget: int) -> Tensor:
    """How many of each row's entries are among the `budget` largest of all; equal entries go to the lower index."""
    chosen = scores.flatten().argsort(descending=True, stable=True)[:budget]
    return torch.bincount(chosen // scores.shape[1], minlength=scores.shape[0])


def _check_scores(alpha: Tensor, ratio: float, align: int, rounding: str) -> None:
    if alpha.dim() != 3 or alpha.numel() == 0:
        raise ValueError(f"alpha has the shape {list(alpha.shape)}; give scores [layers, kv_heads, head_dim]")
    if not torch.isfinite(alpha).all():
        raise ValueError("alpha holds NaN or infinite scores; training diverged: lower the learning rate")
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio={ratio} is not in [0, 1); it is the share of K channels to prune, such as 0.7")
    if align < 1 or alpha.shape[-1] % align:
        raise ValueError(f"align={align} does not divide head_dim={alpha.shape[-1]}; use 1 or a divisor such as 16")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is unknown; use one of {', '.join(ROUNDINGS)}")
