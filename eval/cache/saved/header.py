"""The header of a saved cache: digests of model, mask and its own parts, so that a refusal names what changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank.tensor_files import DIGEST, digest

FORMAT = "leank-cache-4"
EARLIER = ("leank-cache-1", "leank-cache-2", "leank-cache-3")  # without digests of headers; other rooms of packed pages
FIELDS = ("kind", "columns", "pages", "names")  # of a layer in the header
KEYS = ("format", "model", "mask", "sink", "window", "flush", "layers")
CURE = "copy it again, or make it anew with save()"
SAMPLED = 64  # numbers of each weight that tell models apart
COUNTS = ("seen", "start", "floor")  # of each row, on the host
ENDS = ("sink_k", "sink_v", "ring_k", "ring_v")
SEGMENTS = ("prompt", "tail")


def model_digest(model: PreTrainedModel) -> str:
    """sha256 of the language model's type and of every weight's name, shape, dtype and 64 evenly spaced numbers."""
    found = hashlib.sha256(model.config.get_text_config(decoder=True).model_type.encode())
    for name, weight in sorted(model.named_parameters()):
        found.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        if weight.numel() and not weight.is_meta:
            at = torch.linspace(0, weight.numel() - 1, min(SAMPLED, weight.numel()), dtype=torch.float64).long()
            found.update(weight.detach().flatten()[at.to(weight.device)].cpu().double().numpy().tobytes())
    return found.hexdigest()


def mask_digest(masks: Mapping[int, Tensor | None]) -> str:
    """sha256 of the masks [H, D] of compressed layers by index; None is a layer that keeps every channel."""
    there = {str(i): keep.bool().cpu().contiguous() for i, keep in masks.items() if keep is not None and not keep.all()}
    return digest(there, {})


def digests(about: Mapping[str, str]) -> dict[str, str]:
    """sha256 of each text of a header, and of each field of all layers, so that a refusal can name what changed."""
    layers = json.loads(about["layers"])
    parts: dict[str, Any] = {key: about[key] for key in KEYS if key != "layers"}
    parts |= {f"layers.{field}": [one.get(field) for one in layers] for field in {f for one in layers for f in one}}
    return {key: hashlib.sha256(json.dumps(part).encode()).hexdigest() for key, part in sorted(parts.items())}


def check_header(about: Mapping[str, str]) -> None:
    """Raise ValueError for a header that `save` did not write, naming the key that is not as it was written."""
    if about.get("format") != FORMAT:
        raise ValueError(f"it is no cache that save() wrote, whose format is {FORMAT}")
    if missing := [key for key in (*KEYS, "digests", DIGEST) if key not in about]:
        raise ValueError(f"its header lacks {missing[0]!r}")
    written, found = json.loads(about["digests"]), digests(about)
    if changed := [key for key in sorted({*written, *found}) if written.get(key) != found.get(key)]:
        raise ValueError(f"its {changed[0]!r} is not what was saved")
