"""What can be said of a model before any weights are loaded: will a cache and training work, and what do they gain."""

import math
import os
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from leank import zoo
from leank.backbone import load_config, without_weights
from leank.data_gen.amount import amount
from leank.errors import in_one_line
from leank.eval.cache import compressed_cache
from leank.eval.cache.attention.backend import why_not_shape
from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.attention.softmax import Softmax
from leank.eval.inference.prefill import check_layers
from leank.eval.methods import build_method
from leank.eval.methods.memory import dense_bytes, method_bytes
from leank.eval.report.tables import size
from leank.eval.serving.settings import has_both, wrong_layers
from leank.mask import ChannelMask
from leank.precision import GROUP, ROOM
from leank.shape import architecture, check_decoder, kv_shape, scaled_positions, sliding_window
from leank.typed import LARGEST
from leank_train.forward.hook import run_decoder
from leank_train.keys import KeySizes, joined, of_files, of_text

ITEMSIZE = 2  # bytes of a number in 16 bits
RATIOS = (0.5, 0.7, 0.9)
BUDGETS = (0.25, 0.2, 0.15, 0.1)  # of layouts, shares of the middle's bytes
LITTLE = 1.1  # times as fast: less is no reason for another cache
SMALL, LARGE = (16, 256), (128, 1024)  # sink and window of models with few positions, and with many
KIVI_GROUP = 32  # of `kivi4`
MANY = 32768  # positions


def positions(config: PreTrainedConfig) -> int:
    """Return how many tokens a model reads at most, its RoPE scaled; 32K where its config does not say."""
    return scaled_positions(config) or MANY


def reach(config: PreTrainedConfig) -> int:
    """Return how many tokens a sample of training has at most: no sliding window may be shorter."""
    return min(positions(config), sliding_window(config) or LARGEST)


def sizes(config: PreTrainedConfig, gpu: bool = True) -> tuple[int, int]:
    """Return a sink and a window, in tokens: the paper's from 32K on, where a GPU can train on such lengths."""
    return LARGE if gpu and reach(config) >= MANY else SMALL


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
    yield "GPU kernel", _here(_kernel(shape.head_dim, config.num_attention_heads // shape.kv_heads))
    yield "vLLM", _server(config)


def _kernel(head_dim: int, group: int) -> str:
    """Return whether the decode kernel reads heads of a shape, in 16 bits and otherwise, and why not."""
    never, others = why_not_shape(head_dim, group, HEAD_DIMS["decode"]), why_not_shape(head_dim, group)
    if never is not None:
        return f"no, plain PyTorch gives the same replies: {never}"
    return "yes" if others is None else f"yes; over fewer bits or chosen tokens plain PyTorch alone: {others}"


def _here(kernel: str) -> str:
    """Return what is said of the kernel, on this machine."""
    if torch.cuda.is_available() or not kernel.startswith("yes"):
        return kernel
    return f"no GPU here, plain PyTorch gives the same replies; on one {kernel}"


def _server(config: PreTrainedConfig) -> str:
    """Return whether the plug-in serves a model, as far as its config tells, and why not."""
    wrong = [why for is_so, why in wrong_layers(config) if is_so]
    if wrong:
        return f"no: {wrong[0]}"
    if has_both(config):
        return "on a CPU alone: it has layers with a sliding window"
    if window := sliding_window(config):
        return f"no: it has a sliding window of {window}; take a model of full attention"
    if (dim := kv_shape(config).head_dim) not in HEAD_DIMS["paged"]:
        return f"on a CPU alone: head_dim {dim} is none of {', '.join(map(str, HEAD_DIMS['paged']))}"
    return "yes, on GPUs or a CPU (leank-serve --help)"


def kivi_group(config: PreTrainedConfig) -> int:
    """Return how many numbers share a scale of KIVI's: 32, or as many as divide the heads and 32."""
    return math.gcd(kv_shape(config).head_dim, KIVI_GROUP)


def held(config: PreTrainedConfig, tokens: int, ends: tuple[int, int]) -> dict[str, float]:
    """Return the bytes of a prompt's cache by method, in 16 bits; a mask's without empty heads. ends: sink, window."""
    spans = dict(zip(("sink", "window"), ends, strict=True))
    axes: dict[str, dict[str, object]] = {"FP8": {"bits": {"name": "fp8"}}}
    axes |= {f"LeanK {100 * r:.0f}%": {"channels": {"name": "random", "ratio": r}} for r in RATIOS}
    axes |= {"KIVI 4 bits": {"bits": {"name": "kivi", "bits": 4, "group": kivi_group(config)}}}
    axes |= {"KIVI 4 under LeanK 70%": {**axes["LeanK 70%"], **axes["KIVI 4 bits"]}}
    dense = dense_bytes(config, tokens, ITEMSIZE)
    # what layers with full attention hold of the tokens between: a longer prompt adds nothing else
    a_token = dense_bytes(config, MANY + 1, ITEMSIZE) - dense_bytes(config, MANY, ITEMSIZE)
    middle = max(0, tokens - sum(ends)) * a_token
    found: dict[str, float] = {"dense": dense}
    for name, of in axes.items():
        size_of = method_bytes(build_method("doctor", of, spans), config, tokens, ITEMSIZE)
        assert size_of is not None  # what these methods hold does not depend on the prompt
        found[name] = size_of
    if kv_shape(config).head_dim % ROOM:  # no layout has heads of this size
        return found
    return found | {f"layout {budget:g}": dense - (1 - budget) * middle for budget in BUDGETS}


def gains(
    config: PreTrainedConfig, weights: int, lengths: Sequence[int], batches: Sequence[int], room: int,
    ends: tuple[int, int],
) -> pd.DataFrame:  # fmt: skip
    """Return a line per length and method: bytes of the cache, how many prompts fit, and what a step can gain.

    weights: bytes that a step reads; room: bytes for caches
    """
    lines = []
    for tokens in lengths:
        found = held(config, tokens, ends)
        for name, size_of in found.items():
            dense = found["dense"]
            faster = {f"x{n}": f"{(weights + n * dense) / (weights + n * size_of):.2f}" for n in batches}
            lines.append({"tokens": f"{tokens:,}", "method": name, "cache": size(size_of),
                          "of dense": f"{100 * size_of / dense:.0f}%", "fit": f"{max(0, room) // size_of:,.0f}",
                          **faster})  # fmt: skip
    return pd.DataFrame(lines)


def advice(
    config: PreTrainedConfig, weights: tuple[int, int], tokens: int, batch: int, memory: int, keys: KeySizes,
    ends: tuple[int, int], trains: bool, served: bool, server: bool,
) -> str:  # fmt: skip
    """Return in one sentence, its reason first, what to take.

    weights: bytes, and those that a step reads; tokens, batch: of a prompt, and prompts at once; memory: bytes in all
    trains, served: whether a layout or a mask can be learned, and vLLM takes the model; server: whether vLLM is wanted
    """
    (all_weights, read), of = weights, held(config, tokens, ends)
    fits = {name: all_weights + batch * size_of <= memory for name, size_of in of.items()}
    dense = batch * of["dense"]
    many = f"{amount(batch, 'prompt')} of {_tokens(tokens)}"
    what = f"{many} take {size(dense)} of K and V beside {size(read)} of weights"
    if all_weights > memory:
        return f"The weights alone take {size(all_weights)} of {size(memory)}: take a larger machine, or fewer bits."
    if tokens < 2 * sum(ends):
        return f"{_tokens(tokens)} lie mostly in sink and window, {sum(ends):,} tokens that stay whole: take dense."
    if min(of.values()) > of["dense"] / LITTLE:
        return f"{what}, nearly all of it of layers that stay as they are (sliding windows): take dense."
    if fits["dense"] and (read + dense) / read < LITTLE:
        return f"{what}, so that a step gains less than a tenth from any other cache, and they fit: take dense."
    crowd = "" if fits["dense"] else f", which do not fit into {size(memory)}"
    bits = trains and kv_shape(config).head_dim % ROOM == 0
    if server:
        coded = bits and kv_shape(config).head_dim in HEAD_DIMS["codes"]
        other = "dense" if not (trains and served) else "a layout of bits" if coded else "a mask, LeanK 70%"
        beyond = f"keys reach {keys.peak:.0f}, beyond FP8's largest number: take {other}."
        coarse = f"FP8 rounds channels of K by more than the text moves them: take {other}."
        unknown = f"nothing bounds the model's keys for FP8: take {other}, or look with --probe."
        safe = "FP8 holds the model's keys: take FP8."
        found = {"safe": safe, "unknown": unknown, "coarse": coarse, "saturates": beyond}
        return f"{what}{crowd}, and {found[keys.fp8]}"
    shape = kv_shape(config)
    heads = shape.head_dim, config.num_attention_heads // shape.kv_heads
    of_bits, of_masks = (why_not_shape(*heads, HEAD_DIMS[kind]) is None for kind in ("codes", "decode"))
    if fits["dense"] and not of_bits:  # then only steps that are faster would be a reason
        other = "a mask, LeanK 70%" if trains and of_masks else "dense"
        return f"{what}, they fit, and no GPU kernel reads heads of this shape in fewer bits: take {other}."
    budget = next((b for b in BUDGETS if bits and fits[f"layout {b:g}"]), None)
    if bits and budget is None:
        most = max(0, memory - all_weights) // of[f"layout {BUDGETS[-1]:g}"]
        return f"{what}{crowd}, and a layout of bits at {BUDGETS[-1]:g} holds {most:,.0f}: take fewer or shorter ones."
    if bits:
        near = "as near to dense as KIVI's 4 bits in fewer bytes" if budget == BUDGETS[0] else "the most that fits"
        return f"{what}{crowd}, and at {budget:g} of the middle's bytes bits are {near}: take a layout of bits."
    why = "the model cannot be trained here" if not trains else "a layout needs heads of a multiple of 16 channels"
    if not fits["KIVI 4 bits"]:
        most = max(0, memory - all_weights) // of["KIVI 4 bits"]
        return f"{what}{crowd}, {why}, and KIVI's 4 bits hold {most:,.0f}: take fewer or shorter ones."
    return f"{what}{crowd}, and {why}: take KIVI 4 bits."


def _tokens(number: int) -> str:
    return f"{number:,} token" if number == 1 else f"{number:,} tokens"


def fitting(config: PreTrainedConfig, gpu: bool = True) -> dict[str, int | list[int]]:
    """Return settings of a training that fit a model: sink, window and alignment, and the lengths of documents."""
    (sink, window), longest = sizes(config, gpu), min(reach(config), 98304)
    return {
        "pruning.sink": sink,
        "pruning.window": window,
        "pruning.align": next(r for r in (32, 16, 8, 4, 2, 1) if kv_shape(config).head_dim % (4 * r) == 0 or r == 1),
        "data.min_length": max(2 * (sink + window), longest // 8),
        "data.max_length": longest // 2,
        "validation.lengths": [longest // 2],
    }


def commands(name: str, config: PreTrainedConfig, gpu: bool) -> list[str]:
    """Return command lines that make a layout of bits, or a mask for other heads, and check it, on this machine.

    On a CPU the closed form makes it, from a few short documents; on a GPU it is learned.
    """
    fit, (sink, window) = fitting(config, gpu), sizes(config, gpu)
    bits = kv_shape(config).head_dim % ROOM == 0
    align = ROOM if bits else fit["pruning.align"]
    what = "pruning.bytes=0.25 'pruning.nested=[0.1,0.15,0.2]'" if bits else "pruning.ratio=0.5"
    model = shlex.quote(f"model.name={name}")
    train = f"python -m leank_train {model} data=mixed pruning.sink={sink} pruning.window={window}"
    train += f" pruning.align={align} {what} logger=none"
    if gpu:
        lengths = " ".join(f"{key}={fit[key]}" for key in fit if key.startswith("data."))
        more = "data.questions=2 data.documents=2 pruning.compensation=mean stage1.steps=240 stage2.steps=0"
        train += f" {lengths} {more} validation.samples=0 validation.heldout=8"
    else:
        short = 2 * (sink + window)
        train += f" data.min_length={short} data.max_length={2 * short} data.questions=2 data.calibration=4"
        train += " stage1.steps=0 stage2.steps=0 validation.samples=0 validation.heldout=2"
    group = kivi_group(config)
    kivi = "" if group == KIVI_GROUP else f" method.kivi4.bits.group={group}"
    lengths = f" 'benchmark.lengths=[{4 * (sink + window)}]' benchmark.samples=2" if not gpu else ""
    flush = f" cache.flush={GROUP}" if bits else ""
    return [
        f"{train} hydra.run.dir=outputs/mine",
        f"python -m leank.eval {model} mask=outputs/mine/mask.safetensors 'method=[dense,leank,kivi4]'{kivi}"
        f" benchmark=text{lengths} cache.sink={sink} cache.window={window}{flush} hydra.run.dir=outputs/mine/text",
    ]


def ready(config: PreTrainedConfig) -> list[str]:
    """Return a line on the layouts by name (`leank.zoo`) for models of this architecture, if there are any."""
    kinds = {name: ChannelMask.load(path).metadata.get("architecture") for name, path in zoo.names().items()}
    found = [name for name, kind in kinds.items() if kind == architecture(config)]
    return (
        [f"\nLearned for this architecture, by name (mask=NAME, LEANK_MASK=NAME): {', '.join(found)}."] if found else []
    )


def room_here() -> int:
    """Return the bytes of the first GPU's memory, or of this machine's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def examine(
    name: str, lengths: Sequence[int], batches: Sequence[int], memory: int | None = None, probe: bool = False,
    server: bool = False,
) -> str:  # fmt: skip
    """Return what the doctor says, what to take first.

    lengths, batches: of prompts; the longest of these lengths and the largest batch are advised on
    memory: bytes for weights and caches, None = those of this machine; probe: whether the model reads a text
    server: whether vLLM is to serve it
    Raises FileNotFoundError without a config, ValueError for one that is damaged, and with `probe` what `load` raises.
    """
    config, gpu = load_config(name), torch.cuda.is_available()
    model: Any = without_weights(name, config)  # transformers types its embeddings as modules of any kind
    numbers = sum(p.numel() for p in model.parameters())
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is None or model.get_output_embeddings().weight is table
    read = ITEMSIZE * (numbers if tied else numbers - table.numel())  # one row of an embedding is read, not all
    config, found = model.config.get_text_config(decoder=True), dict(answers(model))
    lines = [f"model       {name}: {config.model_type}, {numbers / 1e6:,.0f}M weights, {positions(config):,} positions"]
    if not found["cache"].startswith("yes") or not dense_bytes(config, 1, ITEMSIZE):  # nothing to compress
        return "\n".join([*lines, *(f"{question:12}{answer}" for question, answer in found.items())])
    keys, unread = of_files(name, config), []
    if probe:
        try:
            check_layers(config)
        except ValueError as error:
            unread = [f"probe       no: {in_one_line(str(error))}"]
        else:
            keys = joined(keys, of_text(name))
    shape, (sink, window) = kv_shape(config), sizes(config, gpu)
    lines.append(f"K cache     {shape.layers} layers x {shape.kv_heads} KV heads x {shape.head_dim} channels")
    lines += [f"{question:12}{answer}" for question, answer in found.items()]
    lines += keys.said() + unread
    beyond, limit = [n for n in lengths if n > positions(config)], positions(config)
    fine = [n for n in lengths if n <= limit]
    fine = fine or ([] if beyond else [n for n in (2048, 8192, 32768, 131072) if n <= limit] or [limit])
    for n in beyond:
        lines.append(
            f"\n{n:,} tokens are beyond the model's {limit:,} positions; extend its RoPE with model.overrides."
        )
    if not fine:
        return "\n".join(lines)
    memory = room_here() if memory is None else memory
    trains = found["training"].startswith("yes") and reach(config) >= 4 * (sink + window)
    served = found["vLLM"].startswith(("yes",) if gpu else ("yes", "on a CPU"))
    weights = ITEMSIZE * numbers, read
    advised = advice(config, weights, max(fine), max(batches), memory, keys, (sink, window), trains, served, server)
    marked = {"FP8": "FP8, not safe here"} if keys.fp8 in ("saturates", "coarse") else {}
    lines = [advised, "", *lines]
    lines += [
        f"\nBytes of a prompt in 16 bits with a sink of {sink} and a window of {window} tokens, how many fit into"
        f" {size(memory)} beside\nthe weights, and how many times as fast a step of so many texts can be. A head that a"
        " mask empties drops V, too,\nand holds less than this; FP8 and the layouts count scales.\n",
        gains(config, read, fine, batches, memory - weights[0], (sink, window)).replace(marked).to_string(index=False),
    ]
    if found["training"].startswith("yes") and not trains:
        few = "positions" if reach(config) == positions(config) else "tokens of its sliding window"
        lines.append(f"\n{reach(config):,} {few} are too few to train with this sink and window.")
    elif trains:
        how = "learned on this GPU" if gpu else "from the closed form, which this CPU can compute"
        lines += ready(config)
        lines += [f"\nMade ({how}), and checked:", *(f"    {line}" for line in commands(name, config, gpu))]
    return "\n".join(lines)
