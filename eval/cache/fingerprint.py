"""What makes the K and V of a model: weights, adapters, positions and settings, as a digest and as a cheap stamp."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SAMPLED = 64  # numbers of each weight that tell models apart
# settings that change no key and no value; names that begin with _ are transformers' own
HARMLESS = ("architectures", "chunk_size_feed_forward", "dtype", "id2label", "label2id", "problem_type", "return_dict",
            "tie_word_embeddings", "transformers_version", "use_cache")  # fmt: skip


def adapters(model: nn.Module) -> list[tuple[str, list[str], bool, list[str]]]:
    """Name, active adapters, whether they are switched off, and merged adapters of each layer that peft has adapted."""
    return [
        (name, list(layer.active_adapters), bool(layer.disable_adapters), list(layer.merged_adapters))
        for name, layer in tuners(model).items()
    ]


def tuners(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that carry adapters of peft, by name."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "merged_adapters")}


def stamp(model: nn.Module) -> dict[str, object]:
    """What tells, without reading a weight, that a model in memory has changed: adapters, dtypes, writes, quantisation.

    PyTorch counts the writes to a tensor, but not to its `.data`, nor to tensors made under inference_mode().
    """
    weights = list(model.parameters())
    return {
        "its adapters": adapters(model),
        "the dtype of its weights": [weight.dtype for weight in weights],
        "its weights": [0 if weight.is_inference() else weight._version for weight in weights],
        "the kind of its weights": [type(weight.data).__name__ for weight in weights],
        "its rotary frequencies": {name: _inverse_wavelengths(part) for name, part in _rotary(model).items()},
    }


def model_digest(model: PreTrainedModel) -> str:
    """sha256 of the language model's settings, of its adapters, of its rotary frequencies and of every weight.

    A weight counts with its name, shape, dtype and 64 evenly spaced numbers, also where accelerate has offloaded it.
    Raises ValueError for weights on the meta device that nothing brings back, since models could not be told apart.
    """
    config = model.config.get_text_config(decoder=True)
    found = hashlib.sha256(config.model_type.encode())
    settings = {
        name: value
        for name, value in config.to_dict().items()
        if name not in HARMLESS and not name.startswith(("_", "output_")) and not name.endswith("_token_id")
    }
    found.update(json.dumps([settings, adapters(model)], sort_keys=True, default=str).encode())
    for name, part in sorted(_rotary(model).items()):
        found.update(f"{name} {_inverse_wavelengths(part)}".encode())
    for name, weight in sorted(model.named_parameters()):
        found.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        for plain in _plain(_offloaded(model, name) if weight.is_meta else weight.detach()):
            if plain.numel():
                at = torch.linspace(0, plain.numel() - 1, min(SAMPLED, plain.numel()), dtype=torch.float64).long()
                found.update(plain.flatten()[at.to(plain.device)].cpu().double().numpy().tobytes())
    return found.hexdigest()


def _rotary(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: part
        for name, part in model.named_modules()
        if any("inv_freq" in n for n, _ in part.named_buffers(recurse=False))
    }


def _inverse_wavelengths(rotary: nn.Module) -> list[object]:
    """Frequencies and scale of a rotary embedding; the original ones where it changes them as it runs."""
    buffers = {name: buffer for name, buffer in rotary.named_buffers(recurse=False) if "inv_freq" in name}
    changing = getattr(rotary, "rope_type", None) in ("dynamic", "longrope")
    own = {name: b for name, b in buffers.items() if changing and "original_inv_freq" in name} or buffers
    numbers = [(name, [] if b.is_meta else b.double().tolist()) for name, b in sorted(own.items())]
    return [*numbers, getattr(rotary, "attention_scaling", None)]


def _plain(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors of a weight; a quantised one (torchao) holds several."""
    if type(weight) is not Tensor and hasattr(weight, "__tensor_flatten__"):
        for name in weight.__tensor_flatten__()[0]:
            yield from _plain(getattr(weight, name))
    else:
        yield weight


def _offloaded(model: nn.Module, name: str) -> Tensor:
    """A weight that accelerate keeps on the host or on disk; its hooks have a map of them at the layer or above it."""
    path = name.split(".")
    for depth in reversed(range(len(path))):
        hook: Any = getattr(model.get_submodule(".".join(path[:depth])), "_hf_hook", None)
        for one in (hook, *getattr(hook, "hooks", ())):
            weights = getattr(one, "weights_map", None)
            if weights is not None:
                try:
                    return weights[".".join(path[depth:])]
                except KeyError:
                    continue
    raise ValueError(
        f"the weight {name} lies on the meta device, and so models cannot be told apart: load the weights, or let "
        "accelerate offload them"
    )
