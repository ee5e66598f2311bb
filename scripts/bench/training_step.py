"""Cost of a LeanK training step: prefill once (this project) beside the plain full-sequence form, in one run.

    python -m scripts.bench.training_step OUT --shape llama8b --length 16384 65536 98304 --repeats 3
    python -m scripts.bench.training_step OUT --shape reference --length 4096
    python -m scripts.bench.training_step OUT --shape llama8b --length 16384 65536 --objective l2 kl --steps-alone

Prints and writes OUT/bench_training_SHAPE_LENGTH.json: seconds (the median; "first" is the first run at this length)
and peak memory of
  prefill        one gradient-free prefill of the context by transformers, hidden states only, K and V kept
  ours, m        one step of this project with m questions per document: prefill, teacher, student, backward; with
                 objective=l2, and "ours, m, kl" with the other. Given both, their runs alternate
  full sequence  one step of the plain form, which the published code has: teacher over all tokens, student over all
                 tokens with activation recomputation, backward; at --full-at, after one warm-up
Prefill and full sequence take the SDPA kernel of PyTorch's choice. Where this project's prefill takes another
("kernels" in the JSON), they are measured with that one, too ("same kernel"). Ratios are to the faster of the two.

Three lengths or more, from the shortest to the longest of --experiment, also give OUT/hours.json. The seconds of a step
are fitted as a quadratic of the length (products of matrices are linear in it, attention is quadratic), through three
points or by least squares, and averaged over the experiment's lengths. The hours are those of the experiment's
(context, answer) pairs; a step with m questions per document does m of them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
from transformers import PreTrainedModel

from leank import backbone as backbones
from leank.files import write_json
from leank.head import Head
from leank.kernels import kernel_order, tried_in
from leank.shape import kv_shape
from leank_train.forward.branching import branch, prefill, student
from leank_train.forward.fused import fused_attention
from leank_train.forward.hook import NAME, run_decoder
from leank_train.forward.plan import Plan, document_pieces, visibility
from leank_train.objective import distill
from leank_train.objective.kl import kl_loss
from leank_train.objective.l2 import l2_loss
from scripts.bench.common import clear, device_name, llama8b, wait

Results = dict[int, dict[str, dict[str, float]]]  # length -> run -> seconds, first, peak_gb
QUESTION, ANSWER = 48, 32  # tokens, about what the retrieval tasks have
SAME = ", same kernel"  # as the prefill of this project
KL = ", kl"  # ending of the runs with that objective
WARM = 2048  # tokens of the runs before all others, which load kernels


class FullSequencePass:
    """Equation 1 over the whole sequence: causal attention for every row, then the answer rows again with alpha.

    The context rows do not depend on alpha, but they share the layer's output tensor with rows that do, so autograd
    goes through all of them. Prefilling once avoids this.
    """

    def __init__(self, length: int, answer: int, alpha: Tensor, sink: int, window: int, device: torch.device) -> None:
        self.longest, self.answer, self.alpha = length, answer, alpha
        at = torch.arange(length, device=device)[None]
        rows = at[:, -answer:]
        zones = [visibility(rows, at, zone, sink, window) for zone in ("dense", "middle")]
        self.plan = Plan(document_pieces(rows, at, zones))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer, [B, H, S, D]: causal for all rows, scaled by alpha for the answer's."""
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        rows = fused_attention(q[:, :, -self.answer :], [k], [v], self.plan, scale, self.alpha[layer])
        return torch.cat([out[:, :, : -self.answer], rows], 2)


def full_sequence(model: PreTrainedModel, ids: Tensor, answer: int, alpha: Tensor, sink: int, window: int) -> Tensor:
    """Loss of the plain form on ids [1, S], whose last `answer` tokens are the answer; alpha gets its gradient."""
    at = torch.arange(ids.shape[1], device=ids.device)[None]
    ones = torch.ones_like(alpha)
    with torch.no_grad():
        state = FullSequencePass(ids.shape[1], answer, ones, sink, window, ids.device)
        full = run_decoder(model, ids, at, state)[:, -answer:]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)  # also while the backward pass recomputes
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    state = FullSequencePass(ids.shape[1], answer, alpha, sink, window, ids.device)
    scaled = run_decoder(model, ids, at, state)[:, -answer:]
    loss = l2_loss(full, scaled, torch.tensor([answer]), "official")
    distill.backward(loss)
    model.gradient_checkpointing_disable()
    model.set_attn_implementation(before)
    model.eval()
    return loss.detach()


def prefill_once(
    model: PreTrainedModel, ids: Tensor, alpha: Tensor, questions: int, sink: int, window: int, objective: str = "l2"
) -> Tensor:
    """Loss of the branching form on ids [1, S]: `questions` equal branches off one document."""
    document, prompt = ids[:, : -QUESTION - ANSWER], ids[:, -QUESTION - ANSWER :].repeat(questions, 1)
    lengths = torch.full((questions,), QUESTION + ANSWER)  # on the host, as the batches of training have them
    prefix = prefill(model, document, [document.shape[1]])
    teacher = branch(model, prefix, prompt, lengths)
    question = torch.full_like(lengths, QUESTION)
    answer = torch.full_like(lengths, ANSWER)
    scaled = student(
        model, prefix, teacher.cut(question), prompt[:, QUESTION:], answer, alpha,
        sink=sink, window=window, empty_heads="zero",
    )  # fmt: skip
    full = distill.answer_rows(teacher.hidden, question, ANSWER)
    if objective == "kl":
        loss = kl_loss(Head.of(model), full, scaled, answer)
    else:
        loss = l2_loss(full, scaled, answer, "official")
    distill.backward(loss)
    return loss.detach()


@torch.no_grad()
def bare_prefill(model: PreTrainedModel, ids: Tensor) -> None:
    """Transformers' own prefill: K and V in a DynamicCache, hidden states only."""
    model.base_model(ids, use_cache=True)


def chosen_kernel(model: PreTrainedModel, length: int, order: Sequence[SDPBackend]) -> str:
    """The kernel that SDPA takes for a layer's causal prefill of `length` tokens, tried in this order."""
    _, heads, dim = kv_shape(model.config)
    q = torch.empty(1, model.config.num_attention_heads, length, dim, device=model.device, dtype=model.dtype)
    k = q.new_empty(1, heads, length, dim)
    with tried_in(order):
        return SDPBackend(torch._fused_sdp_choice(q, k, k, None, 0.0, True, scale=None, enable_gqa=True)).name


def measure(runs: Mapping[str, Callable[[], object]], repeats: int, cuda: bool) -> dict[str, dict[str, float]]:
    """Seconds of a first run and the median of `repeats` more, and on a GPU the allocator's peak in GB over those.

    runs: by name; they take turns, so that a clock that changes meanwhile changes for all of them.
    """
    clear()
    wait()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks = dict.fromkeys(runs, 0)
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            run()
            wait()
            seconds[name].append(time.perf_counter() - start)
            if cuda and repeat:
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
    found = {name: {"seconds": statistics.median(of[1:]), "first": of[0]} for name, of in seconds.items()}
    return {name: values | ({"peak_gb": peaks[name] / 1e9} if cuda else {}) for name, values in found.items()}


def fastest(found: dict[str, dict[str, float]], name: str) -> float | None:
    """Seconds of a run with whichever kernel is faster; None where it was not measured."""
    return min((found[n]["seconds"] for n in (name, name + SAME) if n in found), default=None)


def describe(name: str, found: dict[str, dict[str, float]]) -> str:
    """A line about one run, with its ratio to the bare prefill where it is a training step."""
    values = found[name]
    line = f"{name:26s} {values['seconds']:8.4f} s  first {values['first']:8.4f} s"
    line += f"  peak {values['peak_gb']:6.2f} GB" if "peak_gb" in values else ""
    bare = fastest(found, "prefill")
    if name.startswith("ours") and bare:
        line += f"  {values['seconds'] / bare:5.3f}x the bare prefill"
    if (l2 := found.get(name.removesuffix(KL))) and name.endswith(KL):
        of = [key for key in ("seconds", "peak_gb") if key in values]
        line += "  kl / l2: " + ", ".join(f"{key} {values[key] / l2[key]:.4f}x" for key in of)
    return line


def cheaper(found: dict[str, dict[str, float]]) -> list[str]:
    """What prefilling once saves, one line per number of questions."""
    whole = fastest(found, "full sequence")
    steps = {name: v["seconds"] for name, v in found.items() if name.startswith("ours")}
    return [
        f"{name}: {whole / s:5.2f}x cheaper a step, {whole * asked(name) / s:5.2f}x a (context, answer) pair"
        for name, s in steps.items()
        if whole
    ]


def build(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The reference model, or a decoder of Llama-3.1-8B's shape with random weights."""
    if shape == "reference":
        return backbones.load("reference", str(dtype).removeprefix("torch."), device).model
    return llama8b(device, dtype)


def hours(results: Results, experiment: str) -> dict[str, object] | None:
    """Hours of the steps of an experiment, from seconds fitted over lengths and averaged over the lengths it draws.

    Returns None where fewer than three lengths are measured, or not the shortest and longest: nothing is extrapolated.
    """
    with initialize_config_dir(str(files("leank.conf.train")), version_base="1.3"):
        config = compose("train", [f"+experiment={experiment}"])
    measured, low, high = sorted(results), config.data.min_length, config.data.max_length
    if len(measured) < 3 or measured[0] > low or measured[-1] < high:
        return None
    pairs = config.stage1.steps + config.stage2.steps  # the paper has one (context, answer) pair per step
    drawn = np.arange(low, high + 1)  # uniform
    rows: dict[str, dict[str, float]] = {}
    for name in set.intersection(*(set(found) for found in results.values())):
        questions = asked(name)
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


def asked(name: str) -> int:
    """Questions per document of a run: 4 of "ours, 4, kl", and 1 of every run that is not of this project."""
    return int(name.split(", ")[1]) if name.startswith("ours") else 1


def write_hours(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Write OUT/hours.json and print it."""
    write_json(args.out / "hours.json", {"device": device_name(), "shape": args.shape, **found})
    print(f"{found['pairs']} pairs at {found['lengths']} tokens ({found['fit']}, {found['measured']}):")
    for name, row in found["runs"].items():
        print(f"{name:26s} {row['mean_seconds']:7.3f} s x {row['steps']:.0f} steps = {row['hours']:6.3f} h; "
              f"every step the first at its length: {row['first_hours']:6.3f} h", flush=True)  # fmt: skip


class StepBench:
    """Measures the runs of one model and writes a JSON file per length."""

    def __init__(self, model: PreTrainedModel, args: argparse.Namespace) -> None:
        self.model, self.args, self.cuda = model, args, model.device.type == "cuda"
        self.sink, self.window = (16, 144) if args.shape == "reference" else (128, 1024)
        shape = kv_shape(model.config)
        self.alpha = torch.full(shape, 0.9, device=model.device, requires_grad=True)
        self.kernels: dict[int, dict[str, str]] = {}
        self.results: Results = {length: {} for length in args.length}

    def tokens(self, length: int) -> Tensor:
        """Random ids [1, length]."""
        return torch.randint(5, self.model.config.vocab_size, (1, length), device=self.model.device)

    def order(self, length: int) -> list[SDPBackend]:
        """In which order this project's prefill tries the kernels."""
        heads, layers = self.model.config.num_attention_heads, self.model.config.num_hidden_layers
        return kernel_order("auto", self.alpha.new_empty(1).expand(1, heads, length, self.alpha.shape[2]), layers)

    def plain(self, ids: Tensor, order: Sequence[SDPBackend]) -> None:
        """Run transformers' prefill."""
        with tried_in(order):
            bare_prefill(self.model, ids)

    def step(self, ids: Tensor, questions: int, objective: str) -> None:
        """Run one training step of this project."""
        self.alpha.grad = None
        prefill_once(self.model, ids, self.alpha, questions, self.sink, self.window, objective)

    def whole(self, ids: Tensor, order: Sequence[SDPBackend]) -> None:
        """Run one training step of the plain form."""
        self.alpha.grad = None
        with tried_in(order):  # the backward pass, which recomputes, included
            full_sequence(self.model, ids, ANSWER, self.alpha, self.sink, self.window)

    def cheap(self, ids: Tensor, other: bool) -> list[dict[str, Callable[[], None]]]:
        """All runs but the full-sequence form, those together that take turns.

        other: whether this project's kernel is not PyTorch's choice.
        """
        runs: list[dict[str, Callable[[], None]]] = []
        if not self.args.steps_alone:
            runs.append({"prefill": partial(self.plain, ids, [])})
        if other and not self.args.steps_alone:
            runs.append({"prefill" + SAME: partial(self.plain, ids, self.order(ids.shape[1]))})
        endings = {"l2": "", "kl": KL}
        return runs + [
            {f"ours, {m}{endings[o]}": partial(self.step, ids, m, o) for o in self.args.objective}
            for m in self.args.questions
        ]

    def note(self, length: int, runs: Mapping[str, Callable[[], None]]) -> None:
        """Measure runs that take turns, print them, and write what is known of their length."""
        self.results[length] |= measure(runs, self.args.repeats, self.cuda)
        for name in runs:
            print(describe(name, self.results[length]), flush=True)
        content = {"device": device_name(), "length": length, "kernels": self.kernels[length], **self.results[length]}
        write_json(self.args.out / f"bench_training_{self.args.shape}_{length}.json", content)

    def other(self, length: int) -> bool:
        """Whether this project's prefill takes another kernel than PyTorch would choose."""
        return self.kernels[length]["prefill"] != self.kernels[length]["ours"]

    def short_runs(self) -> None:
        """Measure everything but the full-sequence form at every length, shortest first."""
        for runs in self.cheap(self.tokens(min(WARM, self.args.length[0])), self.cuda):
            for run in runs.values():
                run()
        for length in self.args.length:
            orders = {"prefill": [], "ours": self.order(length)}
            self.kernels[length] = {name: chosen_kernel(self.model, length, order) for name, order in orders.items()}
            names = ", ".join(f"{n} {kernel}" for n, kernel in self.kernels[length].items())
            print(f"{length} tokens, attention kernels of the prefill: {names}", flush=True)
            for runs in self.cheap(self.tokens(length), self.other(length)):
                self.note(length, runs)

    def full_runs(self, lengths: Sequence[int]) -> None:
        """Measure the full-sequence form at these lengths, and print what prefilling once saves."""
        for length in lengths:
            ids = self.tokens(length)
            print(f"{length} tokens", flush=True)
            self.note(length, {"full sequence": partial(self.whole, ids, [])})
            if self.other(length):
                self.note(length, {"full sequence" + SAME: partial(self.whole, ids, self.order(length))})
            print(*cheaper(self.results[length]), sep="\n", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The settings of the command line, lengths sorted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["reference", "llama8b"], default="reference")
    parser.add_argument("--length", type=int, nargs="+", default=[4096], help="tokens of document, question and answer")
    parser.add_argument("--questions", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--objective", choices=["l2", "kl"], nargs="+", default=["l2"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--full-at", type=int, nargs="+", help="lengths of the full-sequence form; default the smallest"
    )
    parser.add_argument("--skip-full", action="store_true", help="leave the full-sequence form out")
    parser.add_argument("--steps-alone", action="store_true", help="measure nothing but the steps of this project")
    parser.add_argument("--experiment", default="llama_70pct", help="whose lengths and steps OUT/hours.json is for")
    args = parser.parse_args(argv)
    args.length = sorted(set(args.length))
    args.full_at = [] if args.skip_full or args.steps_alone else sorted(set(args.full_at or args.length[:1]))
    if not set(args.full_at) <= set(args.length):
        parser.error(f"--full-at {args.full_at}: choose among --length {args.length}")
    return args


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parse(argv)
    cuda = torch.cuda.is_available()
    model = build(args.shape, torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32)
    bench = StepBench(model, args)
    bench.short_runs()
    if found := hours(bench.results, args.experiment):
        write_hours(found, args)
    bench.full_runs(args.full_at)


if __name__ == "__main__":
    main()
