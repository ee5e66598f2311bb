"""What can be said of a model before any weights are loaded: will a cache and training work, and what do they gain."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from leank.backbone import load_config, without_weights
from leank.errors import in_one_line
from leank.eval.cache import compressed_cache
from leank.eval.cache.attention.backend import why_not_shape
from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.attention.softmax import Softmax
from leank.eval.methods import build_method
from leank.eval.methods.memory import dense_bytes, method_bytes
from leank.eval.report.tables import size
from leank.shape import check_decoder, kv_shape, sliding_window
from leank.typed import LARGEST
from leank_train.forward.hook import run_decoder

ITEMSIZE = 2  # bytes of a number in 16 bits
RATIOS = (0.5, 0.7, 0.9)
SMALL, LARGE = (16, 256), (128, 1024)  # sink and window of models with few positions, and with many
MANY = 32768  # positions


def positions(config: PreTrainedConfig) -> int:
    """Return how many tokens a model reads at most; 32K where its config does not say."""
    return getattr(config, "max_position_embeddings", None) or MANY


def reach(config: PreTrainedConfig) -> int:
    """Return how many tokens a sample of training has at most: no sliding window may be shorter."""
    return min(positions(config), sliding_window(config) or LARGEST)


def sizes(config: PreTrainedConfig) -> tuple[int, int]:
    """Return a sink and a window, in tokens, that suit the samples of a model: the paper's from 32K on."""
    return LARGE if reach(config) >= MANY else SMALL


class _Reading:
    """A pass of training that attends to nothing: on the meta device it shows what a model asks of its attention."""

    longest = 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax) -> Tensor:
        return q


def trainable(model: PreTrainedModel) -> None:
    """Raise ValueError, naming the reason, for a model on the meta device that no mask can be learned for."""
    check_decoder(model)
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    with suppress(NotImplementedError, RuntimeError):  # experts are chosen by numbers, which the meta device has not
        run_decoder(model, token, token, _Reading())


def answers(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield what is possible with a model on the meta device: the question, and yes or the reason why not."""
    config = model.config.get_text_config(decoder=True)
    for question, ask in (("cache", lambda: compressed_cache(model, None)), ("training", lambda: trainable(model))):
        try:
            with warnings.catch_warnings(record=True) as said:
                ask()
            yield question, "; ".join(["yes", *(in_one_line(str(one.message)) for one in said)])
        except (ValueError, AttributeError) as error:  # AttributeError: a config that contradicts itself
            yield question, f"no: {in_one_line(str(error))}"
            if question == "cache":
                return
    shape = kv_shape(config)
    yield "GPU kernel", _kernel(shape.head_dim, config.num_attention_heads // shape.kv_heads)
    yield "vLLM", "; ".join(_unserved(config)) or "yes, on one GPU or a CPU (leank-serve --help)"


def _kernel(head_dim: int, group: int) -> str:
    """Return whether the decode kernel reads heads of a shape, in 16 bits and otherwise, and why not."""
    never, others = why_not_shape(head_dim, group, HEAD_DIMS["decode"]), why_not_shape(head_dim, group)
    if never is not None:
        return f"no, plain PyTorch gives the same replies: {never}"
    return "yes" if others is None else f"yes; over fewer bits or chosen tokens plain PyTorch alone: {others}"


def _unserved(config: PreTrainedConfig) -> Iterator[str]:
    """Yield why the plug-in does not serve a model, as far as its config tells."""
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None):
        yield f"no: it has layers of {', '.join(sorted(kinds)) or 'sliding_attention'}; the plug-in has full attention"
    if (dim := kv_shape(config).head_dim) not in HEAD_DIMS["paged"]:
        yield f"on a CPU alone: head_dim {dim} is none of {', '.join(map(str, HEAD_DIMS['paged']))}"


def gains(config: PreTrainedConfig, weights: int, lengths: Sequence[int], batches: Sequence[int]) -> pd.DataFrame:
    """Return a line per length and method: bytes of the cache, and what a step that reads `weights` bytes can gain."""
    ends = dict(zip(("sink", "window"), sizes(config), strict=True))
    methods = {f"LeanK {100 * r:.0f}%": {"channels": {"name": "random", "ratio": r}} for r in RATIOS}
    methods |= {"KIVI 4 bits": {"bits": {"name": "kivi", "bits": 4}}}
    methods |= {"KIVI 4 under LeanK 70%": {**methods["LeanK 70%"], **methods["KIVI 4 bits"]}}
    lines = []
    for tokens in lengths:
        dense = dense_bytes(config, tokens, ITEMSIZE)
        for name, choices in {"dense": {}, **methods}.items():
            held = method_bytes(build_method("doctor", choices, ends), config, tokens, ITEMSIZE)
            assert held is not None  # what these methods hold does not depend on the prompt
            faster = {f"x{batch}": f"{(weights + batch * dense) / (weights + batch * held):.2f}" for batch in batches}
            lines.append({"tokens": f"{tokens:,}", "method": name, "cache": size(held),
                          "of dense": f"{100 * held / dense:.0f}%", **faster})  # fmt: skip
    return pd.DataFrame(lines)


def fitting(config: PreTrainedConfig) -> dict[str, int | list[int]]:
    """Return settings of a training that fit a model: sink, window and alignment, and the lengths of documents."""
    (sink, window), longest = sizes(config), min(reach(config), 98304)
    return {
        "pruning.sink": sink,
        "pruning.window": window,
        "pruning.align": next(r for r in (32, 16, 8, 4, 2, 1) if kv_shape(config).head_dim % (4 * r) == 0 or r == 1),
        "data.min_length": max(2 * (sink + window), longest // 8),
        "data.max_length": longest // 2,
        "validation.lengths": [longest // 2],
    }


def commands(name: str, config: PreTrainedConfig) -> list[str]:
    """Return the command lines for a mask of the closed form, a learned one, and its check, with settings that fit."""
    fit = fitting(config)
    sink, window = sizes(config)
    middle = " ".join(f"{key}={fit[key]}" for key in fit if key.startswith("pruning."))
    lengths = " ".join(f"{key}={fit[key]}" for key in fit if not key.startswith("pruning."))
    short = 2 * (sink + window)
    train = f"python -m leank_train model.name={name} data=mixed {middle} logger=none"
    return [
        f"{train} pruning.ratio=0.5 data.min_length={short} data.max_length={2 * short} stage1.steps=0 stage2.steps=0"
        f" validation.lengths=[{2 * short}] validation.tasks=[niah_single_1] validation.samples=1 validation.heldout=2"
        " hydra.run.dir=outputs/try",
        f"{train} pruning.ratio=0.7 extra_ratios=[0.5,0.8] {lengths} hydra.run.dir=outputs/mine",
        f"python -m leank.eval model.name={name} mask=outputs/mine/mask.safetensors 'method=[dense,leank,kivi4]'"
        f" benchmark=text cache.sink={sink} cache.window={window} hydra.run.dir=outputs/mine/text",
    ]


def examine(name: str, lengths: Sequence[int], batches: Sequence[int]) -> str:
    """Return what the doctor says. Raises FileNotFoundError without a config, ValueError for one that is damaged."""
    config = load_config(name)
    model: Any = without_weights(name, config)  # transformers types its embeddings as modules of any kind
    numbers = sum(p.numel() for p in model.parameters())
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is None or model.get_output_embeddings().weight is table
    read = ITEMSIZE * (numbers if tied else numbers - table.numel())  # one row of an embedding is read, not all
    config, found = model.config.get_text_config(decoder=True), dict(answers(model))
    lines = [f"model       {name}: {config.model_type}, {numbers / 1e6:,.0f}M weights, {positions(config):,} positions"]
    lines += [f"{question:12}{answer}" for question, answer in found.items()]
    if not found["cache"].startswith("yes") or not dense_bytes(config, 1, ITEMSIZE):  # nothing to compress
        return "\n".join(lines)
    shape, (sink, window) = kv_shape(config), sizes(config)
    lines.insert(1, f"K cache     {shape.layers} layers x {shape.kv_heads} KV heads x {shape.head_dim} channels")
    lengths = lengths or [n for n in (2048, 8192, 32768, 131072) if n <= positions(config)] or [positions(config)]
    lines += [
        f"\nBytes of a prompt in 16 bits with a sink of {sink} and a window of {window} tokens, and how many times as"
        " fast\na step of so many texts can be. A head that a mask empties drops V, too, and holds less than this.\n",
        gains(config, read, lengths, batches).to_string(index=False),
    ]
    if found["training"].startswith("yes") and reach(config) < 4 * (sink + window):
        few = "positions" if reach(config) == positions(config) else "tokens of its sliding window"
        lines.append(f"\n{reach(config):,} {few} are too few to train with this sink and window.")
    elif found["training"].startswith("yes"):
        lines += ["\nWithout training, trained, and checked:", *(f"    {line}" for line in commands(name, config))]
    return "\n".join(lines)
