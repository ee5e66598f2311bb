"""Cost of a LeanK training step: prefill once (this project) beside the plain full-sequence form, in one run.

    python -m scripts.bench.training OUT --shape llama8b --length 16384 65536 98304 --repeats 3
    python -m scripts.bench.training OUT --shape reference --length 4096

Prints and writes OUT/bench_training_SHAPE_LENGTH.json: seconds (median; first: of the first run at this length) and
peak memory of
  prefill        one gradient-free prefill of the context by transformers, hidden states only, K and V kept
  ours, m        one step with m questions a document: prefill, teacher, student, backward
  full sequence  one step of the plain form: teacher over all tokens, student over all tokens with activation
                 recomputation, backward (what the published code does); at --full-at, with one warm-up
Prefill and full sequence take SDPA's kernel of PyTorch's choice; where our prefill takes another ("kernels" in JSON),
they are measured with that one, too ("same kernel"). Ratios are to the faster of the two.

With three lengths or more, from the shortest to the longest of --experiment, also OUT/hours.json: a step's seconds as a
quadratic of the length (products of matrices are linear in it, attention is quadratic), through three points or by
least squares, its mean over the experiment's lengths, and the hours of its steps at one (context, answer) pair each; m
questions a document need 1 / m of them.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch.nn.attention import SDPBackend

from leank_train import backbone as backbones
from leank_train.common.files import write_json
from leank_train.forward.attention import Keys, scaled_attention, visibility
from leank_train.forward.branching import branch, prefill, prefill_and_branch, student
from leank_train.forward.hook import NAME, run_decoder
from leank_train.forward.passes import kernel_order, tried_in
from leank_train.objective import distill
from scripts.bench.shapes import llama8b

QUESTION, ANSWER = 48, 32  # tokens, about what the retrieval tasks have
SAME = ", same kernel"  # as our prefill
WARM = 2048  # tokens of the runs before all others, which load kernels

Results = dict[int, dict[str, dict[str, float]]]  # length -> run -> seconds, first, peak_gb


class FullSequencePass:
    """Eq. 1 over the whole sequence: causal attention for every row, then the answer rows anew with alpha.

    The context rows do not depend on alpha, but they share the layer's output tensor with rows that do, so autograd
    goes through all of them. This is what prefilling once avoids.
    """

    def __init__(self, length: int, answer: int, alpha: Tensor, sink: int, window: int, device: torch.device) -> None:
        self.longest, self.answer, self.alpha = length, answer, alpha
        at = torch.arange(length, device=device)[None]
        self.zones = [visibility(at[:, -answer:], at, zone, sink, window) for zone in ("dense", "middle")]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        rows = scaled_attention(q[:, :, -self.answer :], [Keys(k, v, *self.zones)], self.alpha[layer], scale, "zero")
        return torch.cat([out[:, :, : -self.answer], rows], 2)


def full_sequence(model: Any, ids: Tensor, alpha: Tensor, sink: int, window: int) -> Tensor:
    """Loss of the plain form on ids [1, S] whose last ANSWER tokens are the answer."""
    at = torch.arange(ids.shape[1], device=ids.device)[None]
    ones = torch.ones_like(alpha)
    with torch.no_grad():
        state = FullSequencePass(ids.shape[1], ANSWER, ones, sink, window, ids.device)
        full = run_decoder(model, ids, at, state)[:, -ANSWER:]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)  # also while the backward pass recomputes
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    state = FullSequencePass(ids.shape[1], ANSWER, alpha, sink, window, ids.device)
    scaled = run_decoder(model, ids, at, state)[:, -ANSWER:]
    loss = distill.l2_loss(full, scaled, torch.tensor([ANSWER]), "official")
    distill.backward(loss)
    model.gradient_checkpointing_disable()
    model.set_attn_implementation(before)
    model.eval()
    return loss.detach()


def prefill_once(model: Any, ids: Tensor, alpha: Tensor, questions: int, sink: int, window: int) -> Tensor:
    """Loss of the branching form: the same tokens, `questions` branches (all alike here) off one document."""
    document, prompt = ids[:, : -QUESTION - ANSWER], ids[:, -QUESTION - ANSWER :].repeat(questions, 1)
    lengths = torch.full((questions,), QUESTION + ANSWER)  # on the host, as the batches of training have them
    if questions == 1:
        prefix, teacher = prefill_and_branch(model, document, [document.shape[1]], prompt, lengths)
    else:
        prefix = prefill(model, document, [document.shape[1]])
        teacher = branch(model, prefix, prompt, lengths)
    question = torch.full_like(lengths, QUESTION)
    answer = torch.full_like(lengths, ANSWER)
    scaled = student(
        model, prefix, teacher.cut(question), prompt[:, QUESTION:], answer, alpha,
        sink=sink, window=window, empty_heads="zero",
    )  # fmt: skip
    loss = distill.l2_loss(distill.answer_rows(teacher.hidden, question, ANSWER), scaled, answer, "official")
    distill.backward(loss)
    return loss.detach()


@torch.no_grad()
def bare_prefill(model: Any, ids: Tensor) -> None:
    """Transformers' own prefill: K and V in a DynamicCache, hidden states only."""
    model.base_model(ids, use_cache=True)


def chosen_kernel(model: Any, length: int, order: Sequence[SDPBackend]) -> str:
    """The kernel that SDPA takes for a layer's causal prefill of `length` tokens."""
    _, heads, dim = backbones.kv_shape(model.config)
    q = torch.empty(1, model.config.num_attention_heads, length, dim, device=model.device, dtype=model.dtype)
    k = q.new_empty(1, heads, length, dim)
    with tried_in(order):
        return SDPBackend(torch._fused_sdp_choice(q, k, k, None, 0.0, True, scale=None, enable_gqa=True)).name


def measure(run: Callable[[], Any], repeats: int, cuda: bool) -> dict[str, float]:
    """Seconds of a first run and the median of `repeats` more, and the allocator's peak in GB over those."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    seconds = []
    for repeat in range(repeats + 1):
        if cuda and repeat == 1:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    found = {"seconds": statistics.median(seconds[1:]), "first": seconds[0]}
    return found | ({"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if cuda else {})


def fastest(found: dict[str, dict[str, float]], name: str) -> float | None:
    """Seconds of a run with whichever kernel is faster; None where it was not measured."""
    return min((found[n]["seconds"] for n in (name, name + SAME) if n in found), default=None)


def describe(name: str, found: dict[str, dict[str, float]]) -> str:
    """A line about one run, and how it compares with those before."""
    values = found[name]
    line = f"{name:26s} {values['seconds']:8.4f} s  first {values['first']:8.4f} s"
    line += f"  peak {values['peak_gb']:6.2f} GB" if "peak_gb" in values else ""
    bare = fastest(found, "prefill")
    if name.startswith("ours") and bare:
        line += f"  {values['seconds'] / bare:5.3f}x the bare prefill"
    return line


def cheaper(found: dict[str, dict[str, float]]) -> list[str]:
    """What prefilling once saves, a line a number of questions."""
    whole = fastest(found, "full sequence")
    steps = {int(n.split()[1]): v["seconds"] for n, v in found.items() if n.startswith("ours")}
    return [
        f"ours, {m}: {whole / s:5.2f}x cheaper a step, {whole * m / s:5.2f}x a (context, answer) pair"
        for m, s in steps.items()
        if whole
    ]


def hours(results: Results, experiment: str) -> dict[str, Any] | None:
    """What the steps of an experiment take: seconds fitted over lengths, averaged over the lengths it draws.

    None where fewer than three lengths are measured, or not the shortest and longest: nothing is extrapolated.
    """
    with initialize_config_dir(str(files("conf.train")), version_base="1.3"):
        config = compose("train", [f"+experiment={experiment}"])
    measured, low, high = sorted(results), config.data.min_length, config.data.max_length
    if len(measured) < 3 or measured[0] > low or measured[-1] < high:
        return None
    pairs = config.stage1.steps + config.stage2.steps  # the paper has one (context, answer) pair a step
    drawn = np.arange(low, high + 1)  # uniform
    rows: dict[str, dict[str, float]] = {}
    for name in set.intersection(*(set(found) for found in results.values())):
        questions = int(name.split()[1]) if name.startswith("ours") else 1
        steps = math.ceil(pairs / questions)
        rows[name] = {"pairs_a_step": questions, "steps": steps}
        for key, of in (("", "seconds"), ("first_", "first")):
            fit = np.polyfit(measured, [results[length][name][of] for length in measured], 2)
            mean = float(np.polyval(fit, drawn).mean())
            rows[name] |= {f"{key}mean_seconds": mean, f"{key}hours": mean * steps / 3600}
    return {
        "experiment": experiment, "lengths": [low, high], "pairs": pairs, "measured": measured,
        "fit": "quadratic through the points" if len(measured) == 3 else "quadratic, least squares",
        "runs": dict(sorted(rows.items(), reverse=True)),
    }  # fmt: skip


def build(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The reference model, or a decoder of Llama-3.1-8B's shape with random weights."""
    if shape == "reference":
        return backbones.load("reference", str(dtype).removeprefix("torch."), device).model
    return llama8b(device, dtype)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["reference", "llama8b"], default="reference")
    parser.add_argument("--length", type=int, nargs="+", default=[4096], help="tokens of document, question and answer")
    parser.add_argument("--questions", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--full-at", type=int, nargs="+", help="lengths of the full-sequence form; default the smallest"
    )
    parser.add_argument("--skip-full", action="store_true", help="leave the full-sequence form out")
    parser.add_argument("--experiment", default="llama_70pct", help="whose lengths and steps OUT/hours.json is for")
    args = parser.parse_args(argv)
    lengths = sorted(set(args.length))
    full_at = [] if args.skip_full else sorted(set(args.full_at or lengths[:1]))
    if not set(full_at) <= set(lengths):
        parser.error(f"--full-at {full_at}: choose among --length {lengths}")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    model = build(args.shape, device, torch.bfloat16 if cuda else torch.float32)
    sink, window = (16, 144) if args.shape == "reference" else (128, 1024)
    alpha = torch.full(backbones.kv_shape(model.config), 0.9, device=device, requires_grad=True)
    where = torch.cuda.get_device_name() if cuda else "CPU"
    kernels: dict[int, dict[str, str]] = {}
    results: Results = {length: {} for length in lengths}

    def tokens(length: int) -> Tensor:
        return torch.randint(5, model.config.vocab_size, (1, length), device=device)

    def order(length: int) -> list[SDPBackend]:
        """In which our prefill tries the kernels."""
        heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
        return kernel_order("auto", alpha.new_empty(1).expand(1, heads, length, alpha.shape[2]), layers)

    def cheap(ids: Tensor, other: bool) -> dict[str, Callable[[], Any]]:
        """All runs but the full-sequence form; other: whether our prefill's kernel is not PyTorch's choice."""

        def plain(order: Sequence[SDPBackend]) -> None:
            with tried_in(order):
                bare_prefill(model, ids)

        def ours(questions: int) -> None:
            alpha.grad = None
            prefill_once(model, ids, alpha, questions, sink, window)

        runs: dict[str, Callable[[], Any]] = {"prefill": partial(plain, [])}
        if other:
            runs["prefill" + SAME] = partial(plain, order(ids.shape[1]))
        return runs | {f"ours, {m}": partial(ours, m) for m in args.questions}

    def whole(ids: Tensor, order: Sequence[SDPBackend]) -> None:
        alpha.grad = None
        with tried_in(order):  # the backward pass, which recomputes, included
            full_sequence(model, ids, alpha, sink, window)

    def note(length: int, name: str, run: Callable[[], Any]) -> None:
        results[length][name] = measure(run, args.repeats, cuda)
        print(describe(name, results[length]), flush=True)
        content = {"device": where, "length": length, "kernels": kernels[length], **results[length]}
        write_json(args.out / f"bench_training_{args.shape}_{length}.json", content)

    for run in cheap(tokens(min(WARM, lengths[0])), cuda).values():
        run()
    for length in lengths:
        kernels[length] = {n: chosen_kernel(model, length, o) for n, o in (("prefill", []), ("ours", order(length)))}
        names = ", ".join(f"{n} {kernel}" for n, kernel in kernels[length].items())
        print(f"{length} tokens, attention kernels of the prefill: {names}", flush=True)
        ids = tokens(length)
        for name, run in cheap(ids, kernels[length]["prefill"] != kernels[length]["ours"]).items():
            note(length, name, run)
    if found := hours(results, args.experiment):
        write_json(args.out / "hours.json", {"device": where, "shape": args.shape, **found})
        shortest, longest = found["lengths"]
        print(f"{found['pairs']} pairs at {shortest} to {longest} tokens ({found['fit']}, {found['measured']}):")
        for name, row in found["runs"].items():
            print(f"{name:26s} {row['mean_seconds']:7.3f} s x {row['steps']} steps = {row['hours']:6.3f} h; "
                  f"every step the first at its length: {row['first_hours']:6.3f} h", flush=True)  # fmt: skip
    for length in full_at:
        ids = tokens(length)
        print(f"{length} tokens", flush=True)
        note(length, "full sequence", partial(whole, ids, []))
        if kernels[length]["prefill"] != kernels[length]["ours"]:
            note(length, "full sequence" + SAME, partial(whole, ids, order(length)))
        print(*cheaper(results[length]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
