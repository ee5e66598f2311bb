"""What makes the K and V of a model: weights, adapters, positions and settings, as a digest and as a cheap stamp."""

import hashlib
import json
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SAMPLED = 64  # numbers of each weight that tell models apart
# settings that change no key and no value; names that begin with _ are transformers' own
HARMLESS = ("architectures", "chunk_size_feed_forward", "dtype", "id2label", "label2id", "problem_type", "return_dict",
            "tie_word_embeddings", "transformers_version", "use_cache")  # fmt: skip


def adapters(model: nn.Module) -> list[tuple[Any, ...]]:
    """Name and `adapter_state` of each layer that peft has adapted."""
    return [(name, *adapter_state(layer)) for name, layer in tuners(model).items()]


def adapter_state(layer: Any) -> tuple[object, ...]:
    """Active adapters of a layer, whether they are off, those merged, the factor of each, and those of single rows."""
    hooks = (getattr(hook, "keywords", {}) for hook in layer._forward_pre_hooks.values())  # generate(adapter_names=...)
    of_rows = [list(hook["adapter_names"]) for hook in hooks if "adapter_names" in hook]
    factors = dict(getattr(layer, "scaling", {}))
    return list(layer.active_adapters), bool(layer.disable_adapters), list(layer.merged_adapters), factors, of_rows


def tuners(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that carry adapters of peft, by name."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "merged_adapters")}


class _Held:
    """A tensor, and how often it was written to; equal for the same tensor alone, which it does not keep alive.

    PyTorch counts the writes to a tensor, but not to its `.data`, nor to tensors made under inference_mode().
    """

    def __init__(self, tensor: Tensor) -> None:
        # accelerate makes a tensor anew at each pass where it has offloaded one
        self._tensor = None if tensor.is_meta else weakref.ref(tensor)
        self._writes = 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held) or self._writes != other._writes:
            return False
        mine, theirs = (None if held._tensor is None else held._tensor() for held in (self, other))
        return mine is theirs and (mine is None) == (self._tensor is None)

    __hash__ = None  # type: ignore[assignment]


def stamp(model: nn.Module) -> dict[str, object]:
    """What tells, without reading a weight, that a model in memory has changed."""
    weights = list(model.parameters())
    return {
        "its adapters": adapters(model),
        "the dtype of its weights": [weight.dtype for weight in weights],
        "its weights": [_Held(tensor) for tensor in (*weights, *_buffers(model))],
        "the kind of its weights": [type(weight.data).__name__ for weight in weights],
        "its rotary frequencies": {name: _inverse_wavelengths(part) for name, part in _rotary(model).items()},
    }


def _buffers(model: nn.Module) -> Iterator[Tensor]:
    """Buffers that belong to a checkpoint; quantised weights (GPTQ, AWQ) are among them."""
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield buffer


def model_digest(model: PreTrainedModel) -> str:
    """sha256 of the language model's settings, of its adapters, of its rotary frequencies and of every weight.

    A weight counts with its name, shape, dtype and 64 evenly spaced numbers, also where accelerate has offloaded it;
    so does what else a checkpoint holds, such as quantised weights in buffers.
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
    weights = dict(model.named_parameters())
    held = {name: one for name, one in model.state_dict(keep_vars=True).items() if name not in weights}
    shared = {id(weight) for weight in weights.values()}  # of a tied weight state_dict() has every name
    for name, one in (*sorted(weights.items()), *sorted(held.items())):
        if name in weights or id(one) not in shared:
            _take_in(found, model, name, one)
    return found.hexdigest()


def _take_in(found: Any, model: nn.Module, name: str, held: Any) -> None:
    """Let a hash read an entry of a checkpoint: a tensor, or what packs some (torch.ao)."""
    if isinstance(held, tuple | list):
        for one in held:
            _take_in(found, model, name, one)
        return
    if not isinstance(held, Tensor):
        if isinstance(held, str | int | float | torch.dtype):  # other objects may be written with an address
            found.update(f"{name} {held}".encode())
        return
    found.update(f"{name} {list(held.shape)} {held.dtype}".encode())
    for plain in _plain(_offloaded(model, name) if held.is_meta else held.detach()):
        if plain.numel():
            numbers = (plain.dequantize() if plain.is_quantized else plain).flatten()
            at = torch.linspace(0, plain.numel() - 1, min(SAMPLED, plain.numel()), dtype=torch.float64).long()
            found.update(numbers[at.to(plain.device)].cpu().double().numpy().tobytes())


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


def computing_device(model: PreTrainedModel) -> torch.device:
    """Where a model computes: that of its weights, or where accelerate brings those that it has offloaded."""
    if model.device.type != "meta":
        return model.device
    found = (getattr(hook, "execution_device", None) for part in model.modules() for hook in _hooks(part))
    return torch.device(next((device for device in found if device is not None), "cpu"))


def _hooks(part: nn.Module) -> tuple[Any, ...]:
    """Accelerate's hooks of a module."""
    hook: Any = getattr(part, "_hf_hook", None)
    return hook, *getattr(hook, "hooks", ())


def _offloaded(model: nn.Module, name: str) -> Tensor:
    """A weight that accelerate keeps on the host or on disk; its hooks have a map of them at the layer or above it."""
    path = name.split(".")
    for depth in reversed(range(len(path))):
        for one in _hooks(model.get_submodule(".".join(path[:depth]))):
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
