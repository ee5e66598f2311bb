"""How large a model's keys are, before any run: from K's biases and norms in its files, or from one short text.

A bias stands in every key. RoPE turns a pair of its channels on a circle, so at some positions a channel is as large as
the pair's norm, and what the text adds comes on top. A norm of K bounds its keys instead: RMSNorm leaves n channels a
norm of sqrt(n), so that none is beyond sqrt(n) max |w|.

FP8 (E4M3) has numbers up to 448, and three bits after the leading one, so that it rounds a number by up to a sixteenth
of it. In a channel that is a constant plus what a text says, the constant sets the error, at any scale: where the error
is larger than the channel's deviation over a text's tokens, rounding tells more than the text.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from leank import backbone
from leank.data_gen import haystack
from leank.eval.methods.bits.fp8 import FORMAT, LARGEST
from leank.rotary import rotary_pairs
from leank.shape import DecoderShape, kv_shape
from leank.shipped import resolve

OUTLIER = 10.0  # times the median channel of its layer, of those whose size is known
PROBED = 512  # tokens of the text
FIRST = 4  # of them, whose keys are unlike all others
BIAS = re.compile(r"(?:^|\.)layers\.(\d+)\.\w+\.(k_proj|qkv_proj)\.bias$")
NORM = re.compile(r"(?:^|\.)layers\.(\d+)\.\w+\.k_(?:layer)?norm\.(weight|bias)$")
TOWER = re.compile("vision|visual|audio")  # beside the decoder
ONE_MORE = re.compile("gemma|qwen3_next|qwen3_5")  # model types whose norms multiply by 1 + w


@dataclass(frozen=True)
class KeySizes:
    """What is known of the sizes of keys, after RoPE.

    largest: of each layer's channels a size that keys reach, [L, H D], 0 = nothing is known
    bound: what no key of any layer is beyond, None = not known
    source: where this is from, as a message says it
    read: whether keys of a text were looked at
    lost: layers with a channel that FP8 rounds by more than it varies over the text, root mean squares
    """

    largest: Tensor
    bound: float | None
    source: str
    read: bool = False
    lost: tuple[int, ...] = ()

    @property
    def peak(self) -> float:
        """The largest size that is known to be reached."""
        return float(self.largest.max()) if self.largest.numel() else 0.0

    @property
    def outliers(self) -> list[int]:
        """Layers with a channel that is many times as large as their median channel."""
        medians = self.largest.where(self.largest > 0, torch.nan).nanmedian(1).values
        return (self.largest.amax(1) > OUTLIER * medians).nonzero()[:, 0].tolist()

    @property
    def fp8(self) -> str:
        """Whether FP8 at scale 1 holds the keys: "saturates", "coarse", "safe" or "unknown"."""
        if self.peak > LARGEST:
            return "saturates"
        if self.lost:
            return "coarse"
        return "safe" if self.read or self.bounded else "unknown"

    @property
    def bounded(self) -> bool:
        """Whether no key can be beyond FP8's largest number."""
        return self.bound is not None and self.bound <= LARGEST

    def said(self) -> list[str]:
        """Return a line for the keys, and one for FP8."""
        layers = self.outliers
        peaks = ", ".join(f"{float(self.largest[i].max()):.0f} in layer {i}" for i in layers[:4])
        more = f" and {len(layers) - 4} more layers" if len(layers) > 4 else ""
        bound = "" if self.bound is None else f"; none is beyond {self.bound:.0f}"
        found = (
            f"outliers of {peaks}{more}" if layers else f"channels reach {self.peak:.3g}" if self.peak else "no size"
        )
        lost = ", ".join(map(str, self.lost[:4])) + (" and others" if len(self.lost) > 4 else "")
        cure = "take bits with a scale for each channel (KIVI, a layout) or a mask; calibrated scales do not help"
        fp8 = {
            "saturates": f"no: keys beyond its largest number, 448, saturate at scale 1; {cure}",
            "coarse": f"no: in layers {lost} it rounds channels by more than the text moves them; {cure}",
            "safe": "holds these keys at scale 1" + ("" if self.bounded else "; longer texts may have larger ones"),
            "unknown": "not known: weights alone do not bound these keys; --probe reads those of one short text",
        }
        return [f"keys        {found}{bound} ({self.source})", f"FP8         {fp8[self.fp8]}"]


def of_files(name: str, config: PreTrainedConfig) -> KeySizes:
    """Return what K's biases and norms say; of a name on the hub only where its files are here already.

    name: as in `leank.backbone.ModelConfig`; config: of its decoder
    """
    shape = kv_shape(config)
    largest, bounds = torch.zeros(shape.layers, shape.kv_heads * shape.head_dim), dict[int, float]()
    files, scaling = _files(name), _attention_scaling(config)
    if not files:
        return KeySizes(largest, None, "its weights are not here")
    biases, norms = dict[int, Tensor](), dict[tuple[int, str], Tensor]()
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    if TOWER.search(key):
                        continue
                    if (found := BIAS.search(key)) and (bias := _of_keys(tensors.get_tensor(key), config)) is not None:
                        biases[int(found[1])] = bias
                    elif found := NORM.search(key):
                        norms[int(found[1]), found[2]] = tensors.get_tensor(key).float()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model.name={name!r}: {file} cannot be read ({error}); copy it again") from error
    for (layer, part), weight in norms.items():
        if part == "weight" and layer < shape.layers:
            weight = weight + 1 if ONE_MORE.match(config.model_type) else weight
            shift = norms.get((layer, "bias"), torch.zeros(1))
            # RoPE turns pairs, whose shifts add up
            most = math.sqrt(weight.numel()) * float(weight.abs().max()) + math.sqrt(2) * float(shift.abs().max())
            bounds[layer] = scaling * most
    for layer, bias in biases.items():
        if layer < shape.layers and layer not in bounds:  # a norm takes the bias's size away
            largest[layer] = scaling * _turned(bias, config, layer, shape)
    parts = [what for what, there in (("biases", biases), ("norms", bounds)) if there]
    source = f"from K's {' and '.join(parts)}" if parts else "K has no biases and no norms"
    return KeySizes(largest, max(bounds.values()) if len(bounds) == shape.layers else None, source)


def _attention_scaling(config: PreTrainedConfig) -> float:
    """Return by what RoPE multiplies keys, the largest over layer types; YaRN does so."""
    ropes = getattr(config, "rope_parameters", None) or {}
    yarn = any(one.get("rope_type") == "yarn" for one in (ropes, *ropes.values()) if isinstance(one, dict))
    return float(ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1]) if yarn else 1.0


def of_text(name: str) -> KeySizes:
    """Return what the keys of one short text reach, read by the real model on a GPU, or on a CPU.

    Raises what `leank.backbone.load` raises.
    """
    from leank.eval.inference.prefill import prefill

    lm = backbone.load(name, "auto", "cuda" if torch.cuda.is_available() else "cpu")
    text = "\n".join(haystack.paragraphs(None, "test"))
    limit = getattr(lm.model.config, "max_position_embeddings", None) or PROBED
    ids = torch.tensor([lm.encode_context(text[: 8 * PROBED])[: min(PROBED, limit)]], device=lm.model.device)
    print(f"reads the keys of a text of {ids.shape[1]} tokens", file=sys.stderr, flush=True)
    with torch.no_grad():
        found = prefill(lm.model, ids, None, 0)
    keys = [layer.keys[0].float().cpu() for layer in found.layers]
    largest = torch.stack([k.abs().amax(1).flatten() for k in keys])
    lost = tuple(i for i, k in enumerate(keys) if bool((_fp8_error(k) > k[:, FIRST:].std(1)).any()))
    return KeySizes(largest, None, f"from a text of {ids.shape[1]} tokens", True, lost)


def _fp8_error(k: Tensor) -> Tensor:
    """Return by how much FP8 at scale 1 changes each channel, root mean square over tokens: [H, T, D] -> [H, D]."""
    k = k[:, FIRST:].clamp(-LARGEST, LARGEST)
    return (k.to(FORMAT).float() - k).square().mean(1).sqrt()


def joined(files: KeySizes, text: KeySizes) -> KeySizes:
    """Return what both say: of each channel the larger size."""
    largest = torch.maximum(files.largest, text.largest)
    return KeySizes(largest, files.bound, f"{files.source}, and {text.source}", True, text.lost)


def _files(name: str) -> list[Path]:
    folder = Path(resolve(name)).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (ValueError, OSError):  # not in the hub's cache
            return []
    return sorted(folder.glob("*.safetensors"))


def _of_keys(bias: Tensor, config: PreTrainedConfig) -> Tensor | None:
    """Return the bias of K, [H D], of a projection that may hold Q and V, too; None for another form."""
    shape = kv_shape(config)
    size, queries = shape.kv_heads * shape.head_dim, config.num_attention_heads * shape.head_dim
    if bias.shape == (queries + 2 * size,):
        bias = bias[queries : queries + size]
    return bias.float() if bias.shape == (size,) else None


def _turned(bias: Tensor, config: PreTrainedConfig, layer: int, shape: DecoderShape) -> Tensor:
    """Return how large each channel of a bias [H D] becomes under RoPE: the norm of its pair."""
    pair, each = rotary_pairs(config)[layer], bias.view(shape.kv_heads, shape.head_dim)
    alone = pair < 0
    squares = torch.zeros(shape.kv_heads, int(pair.max()) + 2).index_add_(1, pair + 1, each.square())
    return torch.where(alone, each.abs(), squares[:, pair + 1].sqrt()).flatten()
