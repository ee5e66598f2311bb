"""The product of training: which K channels of which KV head are kept (the paper's beta).

mask = ChannelMask.from_scores(alpha, ratio=0.7, align=32, rounding="exact", metadata={"model": "org/name"})
mask.save("mask.safetensors")
ChannelMask.load("mask.safetensors").check_model(model.config)
"""

from __future__ import annotations

import difflib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Len
from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError, with_config
from torch import Tensor
from typing_extensions import TypedDict

from leank import hub, zoo
from leank.data_gen.amount import amount
from leank.errors import naming
from leank.precision import Precision
from leank.shape import architecture, kv_shape
from leank.tensor_files import DamagedFile, read_checkpoint, read_tensors, write_tensors
from leank.typed import Count, Positive, Share, shown

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

ROUNDINGS = ("nearest", "floor", "exact", "official")
FORMAT = "leank-channel-mask-1"
LAYOUT_FORMAT = "leank-channel-mask-2"  # with bits per channel: a version that cannot read them refuses the file
PACKED_FORMAT = "leank-channel-mask-3"  # with packed scales, too
BITS = ("key_bits", "value_bits")
OFF = 0.02  # share of all channels by which a mask may miss its ratio without a warning
Line = Annotated[str, StringConstraints(pattern=r"^[^\p{Cc}\p{Zl}\p{Zp}]*$")]


@with_config(ConfigDict(strict=True, extra="allow", allow_inf_nan=False))
class _Metadata(TypedDict, total=False):
    """What caches, servers and cards read of a mask's metadata; the rest may hold anything."""

    model: Line | None
    architecture: Line | None
    ratio: Share
    sink: Count
    window: Positive
    lengths: Annotated[Sequence[Count], Len(2, 2)]
    seed: int
    heldout: dict[Line, Annotated[Sequence[float], Len(1, 3)]]  # mean, and from two documents on its interval
    heldout_documents: Positive  # of each kind
    steps: Count  # of training
    doubts: Sequence[Line]


_METADATA = TypeAdapter(_Metadata)


class ChannelMask:
    """Kept K channels of every KV head.

    The mask owns its tensor: a later change of the caller's tensor, or of the file, does not change the mask.

    keep: bool [L, H, D] (layers, KV heads, head_dim), True = kept; it applies to keys and queries after RoPE.
    metadata: values that JSON can hold: model, config hash, ratio, alignment, rounding, sink, window, lengths, seed,
        versions; empty by default.
    mean_keys: float32 [L, H, D], means of middle keys (after RoPE) over calibration documents, which stand for pruned
        channels; None is the paper's choice, 0. They do not depend on the prompt, so that shared prefixes, chunks and
        further turns change nothing. A head without kept channels drops its middle with means as without.
    precision: in how many bits the middle's kept channels of K, and V, are stored; `keep` is where K has any. None is
        the paper's choice, the model's dtype.
    """

    def __init__(
        self,
        keep: Tensor,
        metadata: Mapping[str, object] | None = None,
        mean_keys: Tensor | None = None,
        precision: Precision | None = None,
    ) -> None:
        """Raise ValueError for a `keep` of another type or shape, an empty one, or what else cannot be."""
        if keep.dtype != torch.bool or keep.dim() != 3 or keep.numel() == 0:
            raise ValueError(
                f"keep is {keep.dtype} {list(keep.shape)}; give a bool tensor [layers, kv_heads, head_dim]: of scores, "
                "ChannelMask.from_scores(scores, ratio, align, rounding) makes one"
            )
        self.keep = keep.detach().cpu().clone(memory_format=torch.contiguous_format)
        self.metadata = dict(metadata or {})
        try:
            _METADATA.validate_python(self.metadata)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            raise ValueError(
                f"metadata: {name}={shown(self.metadata[name])} is not what training writes ({first['msg']}); take "
                f"{name} out, or train again"
            ) from None
        if mean_keys is not None:
            if mean_keys.dtype != torch.float32 or mean_keys.shape != keep.shape:
                found = f"{mean_keys.dtype} {list(mean_keys.shape)}"
                raise ValueError(f"mean_keys is {found}; the mask needs float32 {list(keep.shape)}")
            if not torch.isfinite(mean_keys).all():
                raise ValueError("mean_keys holds NaN or infinite numbers; calibrate again")
            mean_keys = mean_keys.detach().cpu().clone(memory_format=torch.contiguous_format)
        self.mean_keys = mean_keys
        if precision is not None and not torch.equal(precision.keep, self.keep):
            raise ValueError("keep is not where key_bits are above 0; give ChannelMask(precision.keep, ...)")
        self.precision = precision

    def with_means(self, mean_keys: Tensor | None) -> ChannelMask:
        """Return the same kept channels with other means, or with none."""
        return ChannelMask(self.keep, self.metadata, mean_keys, self.precision)

    def with_metadata(self, metadata: Mapping[str, object]) -> ChannelMask:
        """Return the same mask with other metadata."""
        return ChannelMask(self.keep, metadata, self.mean_keys, self.precision)

    def for_any_model(self) -> ChannelMask:
        """Return the same mask without its model's architecture, so that any model of its shape takes it."""
        return self.with_metadata({key: value for key, value in self.metadata.items() if key != "architecture"})

    @property
    def middle_bytes(self) -> float:
        """Bytes of a middle token over those of a dense one, K and V of 16 bits; scales are counted."""
        if self.precision is not None:
            return self.precision.middle_bytes
        numbers = self.channels_per_head.sum() + self.keep.shape[-1] * self.keep.any(-1).sum()
        return float(numbers) / (2 * self.keep.numel())

    def refuse_precision(self, what: str) -> None:
        """Raise ValueError if the mask has bits per channel, which `what`, a reader of `keep` alone, cannot store."""
        if self.precision is not None:
            raise ValueError(
                f"{what} stores kept channels in the model's dtype, and this mask has bits per channel; use it in "
                "leank.compressed_cache or the method leank, or take a mask without them"
            )

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
        cls, alpha: Tensor, ratio: float, align: int, rounding: str, metadata: Mapping[str, object] | None = None
    ) -> ChannelMask:
        """Return beta = Top_{s%, r}(alpha) (section 3.2): the best channels, a multiple of r in each head.

        alpha: scores [L, H, D]; a larger score is more important.
        ratio: share of channels to prune, in [0, 1).
        align: r, a divisor of D.
        rounding: how a head's n channels among the round(LHD(1 - ratio)) best of the model become its kept count:
          nearest   the nearest multiple of r, halves up (the paper's text); the ratio is met nearly
          floor     floor(n / r) * r (the paper's formula); more than the ratio is pruned
          exact     blocks of r channels of each head's descending order, best sums first, until the budget is full;
                    the ratio is met to within half a block
          official  n counts the channels >= the `ratio` quantile, halves up (the published code); all tied scores
                    pass, so with a quantile of 0 everything is kept
        metadata: see the class; ratio, alignment and rounding are added.

        Of equal scores the lower index comes first, except in `official`.

        Raises ValueError that names the setting at fault, such as a ratio that no scores can meet (`check_ratio`).
        """
        if alpha.dim() != 3 or alpha.numel() == 0:
            raise ValueError(f"alpha has the shape {list(alpha.shape)}; give scores [layers, kv_heads, head_dim]")
        refuse_not_finite(alpha, "training diverged: lower the learning rate")
        check_ratio(alpha.shape, ratio, align, rounding)
        ratio, align = float(ratio), int(align)  # JSON has none of numpy's types
        scores = alpha.detach().double().cpu()
        heads = scores.flatten(0, 1)  # [L*H, D]
        if rounding == "exact":
            blocks = heads.sort(dim=-1, descending=True).values.unflatten(-1, (-1, align)).sum(-1)  # [L*H, D/r]
            counts = _count_best(blocks, _nearest_integer(scores.numel() * (1 - ratio) / align)) * align
        elif rounding == "official":
            counts = (heads >= heads.quantile(ratio)).sum(-1)
        else:
            counts = _count_best(heads, _nearest_integer(scores.numel() * (1 - ratio)))
        if rounding != "exact":
            counts = (counts + (0 if rounding == "floor" else align // 2)) // align * align
        rank = heads.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)  # of each channel in its head
        keep = (rank < counts[:, None]).view(alpha.shape)
        return cls(keep, {**(metadata or {}), "ratio": ratio, "alignment": align, "rounding": rounding})

    @classmethod
    def from_official(cls, path: str | os.PathLike) -> ChannelMask:
        """Read a published mask, a .pth tensor [L, H, D] of zeros and ones. Raises ValueError for any other file."""
        try:
            values = read_checkpoint(path, "copy it again")
            keep = values.bool()
            fine = keep.dim() == 3 and keep.numel() > 0 and bool((values == keep).all())
        except DamagedFile as error:
            raise ValueError(f"mask={error}") from error
        except (AttributeError, RuntimeError):  # no tensor, or one that is sparse, quantised or without numbers
            fine = False
        if not fine:
            raise ValueError(f"mask={path} must hold one tensor [layers, kv_heads, head_dim] of zeros and ones")
        return cls(keep, {"source": Path(path).name})._doubted(path)

    def save(self, path: str | os.PathLike) -> None:
        """Write safetensors with metadata and a sha256 in the header; the same mask gives the same bytes."""
        form = FORMAT if self.precision is None else LAYOUT_FORMAT
        if self.precision is not None and self.precision.packed:
            form = PACKED_FORMAT
        header = {"format": form, "metadata": json.dumps(self.metadata, sort_keys=True)}
        means = {} if self.mean_keys is None else {"mean_keys": self.mean_keys}
        bits = {} if self.precision is None else {name: getattr(self.precision, name) for name in BITS}
        write_tensors(path, {"keep": self.keep, **means, **bits}, header)

    @classmethod
    def load(cls, path: str | os.PathLike) -> ChannelMask:
        """Read what `save` wrote, or a published .pth (`from_official`); no code in them is run. Warns of `doubts`.

        path: the file, or the folder of the training run that left it there as mask.safetensors, a name of `leank.zoo`,
            or hf://org/name of a mask on the hub.
        Raises FileNotFoundError if there is no file, ValueError if it is damaged or of another form.
        """
        path = mask_file(path)
        if path.suffix == ".pth":
            return cls.from_official(path)
        try:
            tensors, metadata, form = _read(path)
        except DamagedFile as error:
            raise ValueError(f"mask={error}") from error
        with naming(f"mask={path}"):
            bits = [tensors[name] for name in BITS if name in tensors]
            precision = Precision(*bits, packed=form == PACKED_FORMAT) if bits else None
            return cls(tensors["keep"], metadata, tensors.get("mean_keys"), precision)._doubted(path)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike, revision: str | None = None) -> ChannelMask:
        """Read a mask from the hub, or from a folder that `save_pretrained` wrote; raises what `load` raises.

        name: a folder, or "org/name" on the hub; "hf://org/name@revision" is taken as well.
        revision: branch, tag or commit on the hub; its default branch by default.
        """
        return cls.load(name if Path(name).is_dir() else hub.download(str(name), revision))

    def save_pretrained(self, folder: str | os.PathLike, repo: str | None = None, licence: str | None = None) -> None:
        """Write the folder of a repository: the mask, a card, and custom_generate/ for `model.generate()`.

        repo: "org/name" of the repository, which the card and the code name.
        licence: of the mask, as the hub names it, such as "apache-2.0".
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder / hub.FILE)
        (layers, kv_heads, dim), counts = self.keep.shape, self.channels_per_head
        facts = {
            **hub.named(self.metadata.get("model")), "ratio": self.pruning_ratio,
            "layers": layers, "kv_heads": kv_heads, "head_dim": dim,
            "kept": int(counts.sum()), "channels": self.keep.numel(),
            "empty": int((counts == 0).sum()), "means": self.mean_keys is not None, "doubts": self.doubts(),
            "licence": licence, "bytes": None if self.precision is None else self.middle_bytes,
        }  # fmt: skip
        hub.write_folder(folder, self.metadata, facts, None if repo is None else f"{hub.PREFIX}{repo}")

    def push_to_hub(
        self,
        repo: str,
        private: bool | None = None,
        revision: str | None = None,
        message: str = "Upload a LeanK mask",
        licence: str | None = None,
    ) -> str:
        """Put what `save_pretrained` writes into a repository of the hub. Returns the address of the commit.

        repo: "org/name"; it is made if it is not there.
        private: of a new repository; the organisation's default by default.
        revision: a branch; the default branch by default.
        message: of the commit; licence: see `save_pretrained`.
        Raises ValueError that says why the hub takes it not.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, repo, licence)
            return hub.upload(Path(folder), repo, private, message, revision)

    def doubts(self) -> list[str]:
        """Return why the mask is hardly what somebody wants, one line per reason; its training may have left some.

        Such a mask is not refused, because it does what it says. With all heads empty it keeps the sink and the window
        (StreamingLLM). If it misses its ratio, `pruning_ratio` is still the share that it prunes.
        """
        ratio, told = self.metadata.get("ratio"), self.metadata.get("doubts")
        said = list(map(str, told)) if isinstance(told, Sequence) else []
        if not self.keep.any():
            said.append("all heads are empty, so that every middle token is dropped; train with a lower ratio or align")
        if isinstance(ratio, int | float) and 0 <= ratio <= 1 and abs(self.pruning_ratio - ratio) > OFF:
            said.append(
                f"it prunes {100 * self.pruning_ratio:.1f}% of the channels, not ratio={ratio}; train with a lower "
                "align, or with rounding=exact"
            )
        return said

    def _doubted(self, path: str | os.PathLike) -> ChannelMask:
        for doubt in self.doubts():
            warnings.warn(f"mask={path}: {doubt}", stacklevel=3)
        return self

    def check_model(self, config: PreTrainedConfig) -> None:
        """Raise ValueError if the mask does not fit a model's config; warn if the model has another name.

        A mask whose metadata names an architecture (`leank.shape.architecture`) is refused by models of another one;
        `for_any_model` takes the name out.
        """
        wanted = list(kv_shape(config))
        mine, theirs = self.metadata.get("model"), getattr(config, "_name_or_path", "")
        if list(self.keep.shape) != wanted:
            raise ValueError(
                f"the mask (model {mine or 'unknown'}) has the shape {list(self.keep.shape)}, the model "
                f"{theirs or 'unnamed'} needs [layers, kv_heads, head_dim] = {wanted}; take a mask trained for it"
            )
        if self.metadata.get("architecture") not in (None, architecture(config)):
            raise ValueError(
                f"the mask was trained for {mine or 'a model'}, and {theirs or 'this model'} has another architecture "
                "of its shape; take a mask trained for it, or mask.for_any_model() if you know that it fits"
            )
        if mine and theirs and Path(str(mine)).name.lower() != Path(theirs).name.lower():
            warnings.warn(f"the mask was trained on {mine} and is used on {theirs}", stacklevel=2)


def mask_file(path: str | os.PathLike) -> Path:
    """Return the file that a path of a mask means, a run's mask.safetensors in its folder, or a name of `leank.zoo`.

    A file or folder stands before a name. Raises FileNotFoundError.
    """
    if str(path).startswith(hub.PREFIX):
        return hub.download(str(path))
    path = Path(path)
    if not path.is_dir():
        if not path.is_file():
            if (named := zoo.names().get(str(path))) is not None:
                return named
            near = difflib.get_close_matches(str(path), zoo.names(), 1)
            meant = f"; did you mean {near[0]}" if near else ""
            raise FileNotFoundError(
                f"mask={path} does not exist{meant}; give a training run's folder, mask.safetensors, or a name that "
                "`python -m leank.zoo` lists"
            )
        return path
    if (path / "mask.safetensors").is_file():
        return path / "mask.safetensors"
    if (path / "checkpoints").is_dir():
        raise FileNotFoundError(f"mask={path} is a training run without a mask yet; give its command again to go on")
    raise FileNotFoundError(f"mask={path} is a folder without mask.safetensors; give that of a training run, or a file")


def _nearest_integer(value: float) -> int:
    return int(value + 0.5)


def _count_best(scores: Tensor, budget: int) -> Tensor:
    """Count the entries of each row among the `budget` largest of all; of equal ones the lower index comes first."""
    chosen = scores.flatten().argsort(descending=True, stable=True)[:budget]
    return torch.bincount(chosen // scores.shape[1], minlength=scores.shape[0])


def check_ratio(shape: Sequence[int], ratio: float, align: int, rounding: str, name: str = "ratio") -> None:
    """Raise ValueError that names the setting for a ratio that no scores [L, H, D] can meet; name: of the setting.

    Such a ratio leaves every head empty, or prunes nothing although it is above 0: a result would carry a ratio that
    its mask does not have. Other ratios are met as well as blocks of `align` channels allow (`ChannelMask.doubts`).
    With rounding=official it depends on the scores. ratio, align, rounding: see `ChannelMask.from_scores`.
    """
    total, dim = math.prod(shape), shape[-1]
    if not 0 <= ratio < 1:
        raise ValueError(f"{name}={ratio!r} is not in [0, 1); it is the share of K channels to prune, such as 0.7")
    if align != int(align) or align < 1 or dim % align:
        raise ValueError(f"align={align!r} does not divide head_dim={dim}; use 1 or a divisor such as 16")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is unknown; use one of {', '.join(ROUNDINGS)}")
    if rounding == "official" or ratio == 0:
        return
    if rounding == "exact":
        kept = _nearest_integer(total * (1 - ratio) / align) * align
        empty, whole = kept == 0, kept == total
    else:
        kept, up = _nearest_integer(total * (1 - ratio)), 0 if rounding == "floor" else align // 2
        empty, whole = kept + up < align, total - kept <= up
    if empty or whole:
        raise ValueError(
            f"{name}={ratio} with align={align} would {'empty every head' if empty else 'prune nothing'}: "
            f"{list(shape)} channels are {amount(total // align, 'block')} of {align}; "
            f"{'lower' if empty else 'raise'} {name}, or lower align"
        )


def _read(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, object], str]:
    cure = "copy it again, or train again"
    tensors, header = read_tensors(path, {"keep"}, cure, {"format", "metadata"}, {"mean_keys", *BITS})
    if (form := header.get("format")) not in (FORMAT, LAYOUT_FORMAT, PACKED_FORMAT):
        raise ValueError(f"mask={path} is a safetensors file, but not one that ChannelMask.save wrote")
    try:
        metadata = json.loads(header["metadata"])
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise DamagedFile(path, "its header is not what was written", cure)
    if {*BITS} & {*tensors} != (set() if form == FORMAT else {*BITS}):
        raise DamagedFile(path, "its header and its bits per channel do not belong together", cure)
    return tensors, metadata, form


def refuse_not_finite(alpha: Tensor, cure: str, where: str = "alpha") -> None:
    """Raise ValueError that names the heads for scores [L, H, D] that are not finite; cure: what the user can do."""
    fine = torch.isfinite(alpha)
    if not fine.all():
        heads = (~fine).any(-1).nonzero().tolist()
        layer, head = heads[0]
        some = f"{len(heads)} of {amount(alpha[..., 0].numel(), 'KV head')}, such as layer {layer}, head {head}"
        raise ValueError(f"{where} holds NaN or infinite scores in {some}; {cure}")
