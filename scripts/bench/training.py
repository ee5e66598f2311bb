"""Cost of training: of a step beside the plain form, on several GPUs, and how equal the masks of two runs are.

    python -m scripts.bench.training step OUT --shape llama8b --length 16384 65536 98304 --repeats 3
    python -m scripts.bench.training step OUT --shape llama8b --length 16384 65536 --questions 4 --objective l2 kl
    python -m scripts.bench.training scaling OUT --gpus 1 4                # Llama-3.1-8B shape, random weights (16 GB)
    python -m scripts.bench.training scaling OUT --gpus 1 2 --trainer ddp fsdp --experiment qwen15_factors
    python -m scripts.bench.training masks OUT ONE OTHER [OTHER ...]       # run directories

All take --shape reference on a CPU.

step     OUT/bench_training_SHAPE_LENGTH.json: seconds (the median; "first" is the first run at this length) and peak
         memory of
           prefill        one gradient-free prefill of the context by transformers, hidden states only, K and V kept
           ours, m        one step of this project with m questions per document: prefill, teacher, student, backward;
                          with the L2 objective, and "ours, m, kl" with the other. Given both, their runs alternate
           full sequence  one step of the plain form, which the published code has: teacher over all tokens, student
                          over all tokens with activation recomputation, backward; at the lengths --full-at
         All take the SDPA kernel that this project's prefill takes. Three lengths or more, from the shortest to the
         longest of --experiment, also give OUT/hours.json: seconds fitted as a quadratic of the length (products of
         matrices are linear in it, attention is quadratic) and averaged over the experiment's lengths, times its
         (context, answer) pairs; a step with m questions per document does m of them
scaling  OUT/scaling.json: `python -m leank_train`, stage 1 alone, one process as it is and several with each --trainer
         in turn; sequence_parallel shares each document among all of them. Documents are the same in every run.
         Seconds per step come from the run's own record, without the first --warm-up. The output is in OUT/NAME.log
masks    OUT/same_masks.csv, a line for each OTHER: equal, the share of channels that both masks keep or both prune,
         or to which both layouts give the same bits; largest and mean difference of two scores of one channel (of a
         layout: of one block) at the end; loss, the relative difference of the distillation loss in the last step of
         stage 1
"""

import argparse
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from scripts.bench import SHAPES

SEVERAL = ("ddp", "sequence_parallel", "fsdp")  # trainers for several GPUs


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=["step", "scaling", "masks"])
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="*", help="masks: run directories; the first is compared with")
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--length", type=int, nargs="+", default=[16384],
                        help="tokens; scaling: one, or the shortest and the longest")  # fmt: skip
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 4], help="step")
    parser.add_argument("--objective", choices=["l2", "kl"], nargs="+", default=["l2"], help="step")
    parser.add_argument("--repeats", type=int, default=5, help="step")
    parser.add_argument("--full-at", type=int, nargs="*", default=[], help="step: lengths of the full-sequence form")
    parser.add_argument("--experiment", help="of conf/train/experiment; default: that of the shape")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 4], help="scaling: processes of each run")
    parser.add_argument("--trainer", choices=SEVERAL, nargs="+", default=["ddp"], help="scaling: on several GPUs")
    parser.add_argument("--steps", type=int, default=20, help="scaling: timed steps of each run")
    parser.add_argument("--warm-up", type=int, default=4, help="scaling: steps before those")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="scaling: settings of the runs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from leank import backbone as backbones
from leank.eval.cache.attention.softmax import Softmax
from leank.files import write_json, write_text
from leank.kernels import kernel_order, tried_in
from leank.mask import ChannelMask
from leank.shape import kv_shape
from leank.tensor_files import read_checkpoint
from leank_train.data import Batch, Ragged
from leank_train.forward.branching import student
from leank_train.forward.fused import fused_attention
from leank_train.forward.hook import NAME, run_decoder
from leank_train.forward.plan import Plan, document_pieces, visibility
from leank_train.objective import distill
from leank_train.stages import OBJECTIVES, read
from scripts.bench.common import ROOT, Record, clear, device_name, llama8b, wait

QUESTION, ANSWER = 48, 32  # tokens, about what the retrieval tasks have
WARM = 2048  # tokens of the runs before all others, which load kernels
EXPERIMENT = {"llama8b": "llama_70pct", "reference": "reference_demo"}
Found = dict[str, dict[str, float]]  # run -> seconds, first, peak_gb


# step


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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax) -> Tensor:
        """Attention of one layer, [B, H, S, D]: causal for all rows, scaled by alpha for the answer's."""
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        rows = fused_attention(q[:, :, -self.answer :], [k], [v], self.plan, scale, self.alpha[layer])
        return torch.cat([out[:, :, : -self.answer], rows], 2)


def full_sequence(model: PreTrainedModel, ids: Tensor, answer: int, alpha: Tensor, sink: int, window: int) -> Tensor:
    """Loss of the plain form on ids [1, S], whose last `answer` tokens are the answer; alpha gets its gradient."""
    at = torch.arange(ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        state = FullSequencePass(ids.shape[1], answer, torch.ones_like(alpha), sink, window, ids.device)
        full = run_decoder(model, ids, at, state)[:, -answer:]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)  # also while the backward pass recomputes
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    state = FullSequencePass(ids.shape[1], answer, alpha, sink, window, ids.device)
    scaled = run_decoder(model, ids, at, state)[:, -answer:]
    loss = OBJECTIVES["l2"](model, "official").distance(full, scaled, torch.tensor([answer]))
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
    answers = Ragged(prompt[:, QUESTION:], torch.full((questions,), ANSWER))
    whole = Ragged(document, torch.tensor([document.shape[1]]))
    batch = Batch(whole, Ragged(prompt, answers.lengths + QUESTION), answers)
    prefix, question, full = read(model, batch, "auto", None)
    scaled = student(model, prefix, question, *answers, alpha, sink=sink, window=window, empty_heads="zero")
    loss = OBJECTIVES[objective](model, "official").distance(full, scaled, answers.lengths)
    distill.backward(loss)
    return loss.detach()


def measure(runs: Mapping[str, Callable[[], object]], repeats: int) -> Found:
    """Seconds of a first run and the median of `repeats` more, and the allocator's peak in GB; the runs take turns."""
    clear()
    wait()
    cuda, seconds = torch.cuda.is_available(), {name: list[float]() for name in runs}
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


def hours(results: Mapping[int, Found], experiment: str) -> Record | None:
    """Hours of the steps of an experiment, from seconds fitted over lengths and averaged over the lengths it draws.

    Returns None with fewer than three lengths, or without the shortest and longest: nothing is extrapolated.
    """
    with initialize_config_module("leank.conf.train", version_base="1.3"):
        config = compose("train", [f"+experiment={experiment}"])
    measured, low, high = sorted(results), config.data.min_length, config.data.max_length
    if len(measured) < 3 or measured[0] > low or measured[-1] < high:
        return None
    pairs = config.stage1.steps + config.stage2.steps  # the paper has one (context, answer) pair per step
    rows: dict[str, Record] = {}
    for name in set.intersection(*(set(found) for found in results.values())):
        questions = int(name.split(", ")[1]) if name.startswith("ours") else 1
        fit = np.polyfit(measured, [results[length][name]["seconds"] for length in measured], 2)
        mean, steps = float(np.polyval(fit, np.arange(low, high + 1)).mean()), math.ceil(pairs / questions)
        rows[name] = {
            "pairs_a_step": questions, "steps": steps, "mean_seconds": mean, "hours": mean * steps / 3600
        }  # fmt: skip
    return {"experiment": experiment, "lengths": [low, high], "pairs": pairs, "measured": measured, "runs": rows}


def runs_at(model: PreTrainedModel, length: int, args: argparse.Namespace) -> list[dict[str, Callable[[], object]]]:
    """What is measured at a length, those together that take turns."""
    sink, window = (16, 144) if args.shape == "reference" else (128, 1024)
    alpha = torch.full(kv_shape(model.config), 0.9, device=model.device, requires_grad=True)
    ids = torch.randint(5, model.config.vocab_size, (1, length), device=model.device)
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    order = kernel_order("auto", alpha.new_empty(1).expand(1, heads, length, alpha.shape[2]), layers)

    def bare() -> None:
        with torch.no_grad(), tried_in(order):
            model.base_model(ids, use_cache=True)

    def step(questions: int, objective: str) -> None:
        alpha.grad = None
        prefill_once(model, ids, alpha, questions, sink, window, objective)

    def whole() -> None:
        alpha.grad = None
        with tried_in(order):  # the backward pass, which recomputes, included
            full_sequence(model, ids, ANSWER, alpha, sink, window)

    steps: list[dict[str, Callable[[], object]]] = [
        {f"ours, {m}{', kl' * (o == 'kl')}": partial(step, m, o) for o in args.objective} for m in args.questions
    ]
    if length in args.full_at:
        steps.append({"full sequence": whole})
    return [{"prefill": bare}, *steps]


def steps(args: argparse.Namespace) -> None:
    """Measure every length, shortest first, and write what is known after each run."""
    cuda, lengths = torch.cuda.is_available(), sorted(set(args.length))
    dtype = torch.bfloat16 if cuda else torch.float32
    model = load(args.shape, torch.device("cuda" if cuda else "cpu"), dtype)
    for runs in runs_at(model, min(WARM, lengths[0]), args) if cuda else ():
        for run in runs.values():
            run()
    results: dict[int, Found] = {}
    for length in lengths:
        found = results[length] = {}
        for runs in runs_at(model, length, args):
            found |= measure(runs, args.repeats)
            for name in runs:
                ratio = found[name]["seconds"] / found["prefill"]["seconds"]
                shown = "  ".join(f"{key} {value:.4f}" for key, value in found[name].items())
                print(f"{length}  {name:16s} {shown}  {ratio:.3f}x the bare prefill", flush=True)
            write_json(args.out / f"bench_training_{args.shape}_{length}.json",
                       {"device": device_name(), "length": length, **found})  # fmt: skip
    if total := hours(results, args.experiment or EXPERIMENT[args.shape]):
        write_json(args.out / "hours.json", {"device": device_name(), "shape": args.shape, **total})
        print(total)


def load(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The reference model, or a decoder of Llama-3.1-8B's shape with random weights."""
    if shape == "reference":
        return backbones.load("reference", str(dtype).removeprefix("torch."), device).model
    return llama8b(device, dtype)


# scaling


def weights(shape: str, folder: Path) -> str:
    """What the runs take as model.name; weights of the 8B shape are saved to `folder`."""
    if shape == "reference":
        return shape
    model = llama8b("cuda")
    model.save_pretrained(folder, max_shard_size="4GB")  # one shard at a time is copied to the host
    backbones.load_tokenizer("reference").save_pretrained(folder)
    del model
    clear()
    return str(folder.resolve())


def speed(run: Path, trainer: str, gpus: int, warm_up: int) -> Record:
    """Contexts and (context, answer) pairs per second of the steps after the warm-up, from the run's record."""
    record = read_checkpoint(run / "checkpoints/stage1/done.ckpt", "run the training again")["record"]
    data, times = OmegaConf.load(run / "config.yaml").data, record["times"][warm_up:]
    step = sum(times) / len(times)
    contexts = data.documents * (1 if trainer == "sequence_parallel" else gpus) / step
    return {
        "trainer": trainer, "gpus": gpus, "steps": len(times), "step_seconds": step,
        "slowest_step_seconds": max(times), "contexts_per_s": contexts, "pairs_per_s": contexts * data.questions,
        "peak_gb": record["peak_bytes"] / 1e9,
    }  # fmt: skip


def ended(line: Sequence[str], log: Path) -> int:
    """Run a program and return its exit status; what ends this process ends the program, which would hold its GPUs."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with log.open("w") as file, subprocess.Popen(line, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT) as program:
        try:
            return program.wait()
        except BaseException:
            program.terminate()
            raise


def scaling(args: argparse.Namespace) -> None:
    """Train once for each number of processes and trainer. Raises SystemExit if a run fails."""
    args.out.mkdir(parents=True, exist_ok=True)
    lengths, experiment = args.length, args.experiment or EXPERIMENT[args.shape]
    with tempfile.TemporaryDirectory() as scratch:
        model = weights(args.shape, Path(scratch, "weights"))
        settings = [
            f"+experiment={experiment}", f"model.name='{model}'",
            "logger=none", "validation.samples=0", f"data.min_length={lengths[0]}", f"data.max_length={lengths[-1]}",
            f"stage1.steps={args.warm_up + args.steps}", "stage2.steps=0", *args.set,
        ]  # fmt: skip
        rows: list[Record] = []
        for gpus, trainer in [(n, one) for n in args.gpus for one in (args.trainer if n > 1 else ["auto"])]:
            run, log = Path(scratch, f"{trainer}_{gpus}"), args.out / f"{trainer}_{gpus}.log"
            line = [sys.executable, "-m", "leank_train", *settings, f"hydra.run.dir='{run}'", f"trainer={trainer}",
                    f"trainer.devices={gpus}"]  # fmt: skip
            line += [f"trainer.sequence_parallel={gpus}"] * (trainer == "sequence_parallel")
            if ended(line, log):
                raise SystemExit(f"{' '.join(line)} failed; see the end of {log}")
            rows.append(speed(run, trainer, gpus, args.warm_up))
            print(rows[-1], flush=True)
            content = {"device": device_name(), "shape": args.shape, "experiment": experiment, "length": lengths}
            write_json(args.out / "scaling.json", {**content, "runs": rows})


# masks


def last_loss(run: Path) -> float:
    """Distillation loss of the last step of stage 1. Raises ValueError for a run whose stage 1 had no step."""
    state = read_checkpoint(run / "checkpoints/stage1/done.ckpt", "run the training again")
    if not (done := state["record"]["steps"]):
        raise ValueError(f"{run} has no step of stage 1; compare runs with stage1.steps above 0")
    return float(done[-1]["distillation"])


def compare(one: Path, other: Path) -> Record:
    """How far the mask and scores of `other` are from those of `one`; see the module's docstring."""
    found = [ChannelMask.load(run / "mask.safetensors") for run in (one, other)]
    masks = [mask.keep if mask.precision is None else mask.precision.key_bits for mask in found]
    scores = [load_file(run / "alpha.safetensors") for run in (one, other)]
    apart = torch.sub(*(of_run["path" if "path" in of_run else "alpha"] for of_run in scores)).abs()
    loss, of = last_loss(other), last_loss(one)
    return {
        "one": one.name, "other": other.name, "channels": masks[0].numel(),
        "equal": (masks[0] == masks[1]).double().mean().item(), "largest": apart.max().item(),
        "mean": apart.mean().item(), "loss": abs(loss / of - 1) if of else 0.0 if loss == of else math.inf,
    }  # fmt: skip


def same_masks(args: argparse.Namespace) -> None:
    """Write OUT/same_masks.csv and print it."""
    lines = pd.DataFrame([compare(args.runs[0], other) for other in args.runs[1:]])
    print(lines.to_string(index=False))
    write_text(args.out / "same_masks.csv", lines.to_csv(index=False))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parsed(argv)
    if args.shape == "llama8b" and args.action != "masks" and not torch.cuda.is_available():
        raise SystemExit("--shape llama8b needs a GPU; --shape reference runs on a CPU")
    {"step": steps, "scaling": scaling, "masks": same_masks}[args.action](args)


if __name__ == "__main__":
    main()
