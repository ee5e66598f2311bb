"""Cost of a LeanK training step: prefill once (this project) beside the plain full-sequence form, in one run.

    python -m scripts.bench_training OUT --shape llama8b --length 16384
    python -m scripts.bench_training OUT --shape reference --length 4096

Prints and writes OUT/bench_training_SHAPE_LENGTH.json: seconds and peak memory of
  prefill        one gradient-free prefill of the context, hidden states only, K and V kept
  ours, m        one step with m questions a document: prefill, teacher, student, backward
  full sequence  one step of the plain form: teacher over all tokens, student over all tokens with activation
                 recomputation, backward (what the published code does), with the same attention backend
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leank_train import backbone as backbones
from leank_train import distill
from leank_train.attention import Keys, scaled_attention, visibility
from leank_train.branching import branch, prefill, prefill_and_branch, student
from leank_train.files import write_json
from leank_train.hook import NAME, run_decoder
from scripts.shapes import llama8b

QUESTION, ANSWER = 48, 32  # tokens, about what the retrieval tasks have


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
    loss = distill.l2_loss(full, scaled, torch.tensor([ANSWER], device=ids.device), "official")
    distill.backward(loss)
    model.gradient_checkpointing_disable()
    model.set_attn_implementation(before)
    model.eval()
    return loss.detach()


def prefill_once(model: Any, ids: Tensor, alpha: Tensor, questions: int, sink: int, window: int) -> Tensor:
    """Loss of the branching form: the same tokens, `questions` branches (all alike here) off one document."""
    document, prompt = ids[:, : -QUESTION - ANSWER], ids[:, -QUESTION - ANSWER :].repeat(questions, 1)
    lengths = torch.full((questions,), QUESTION + ANSWER, device=ids.device)
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
    """transformers' own prefill: K and V in a DynamicCache, hidden states only."""
    model.base_model(ids, use_cache=True)


def measure(run: Callable[[], Any], repeats: int, cuda: bool) -> dict[str, float]:
    """Median seconds after one warm-up, and the allocator's peak in GB."""
    run()
    seconds = []
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    found = {"seconds": statistics.median(seconds)}
    return found | ({"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if cuda else {})


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
    parser.add_argument("--length", type=int, default=4096, help="tokens of document, question and answer")
    parser.add_argument("--questions", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-full", action="store_true", help="leave the full-sequence form out")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    model = build(args.shape, device, torch.bfloat16 if cuda else torch.float32)
    sink, window = (16, 144) if args.shape == "reference" else (128, 1024)
    ids = torch.randint(5, model.config.vocab_size, (1, args.length), device=device)
    alpha = torch.full(backbones.kv_shape(model.config), 0.9, device=device, requires_grad=True)

    def step(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            alpha.grad = None
            return loss()

        return run

    runs: dict[str, Callable[[], Any]] = {"prefill": lambda: bare_prefill(model, ids)}
    for m in args.questions:
        runs[f"ours, {m}"] = step(lambda m=m: prefill_once(model, ids, alpha, m, sink, window))  # type: ignore[misc]
    if not args.skip_full:
        runs["full sequence"] = step(lambda: full_sequence(model, ids, alpha, sink, window))
    result = {name: measure(run, args.repeats, cuda) for name, run in runs.items()}
    for name, values in result.items():
        line = f"{name:14s} {values['seconds']:8.4f} s"
        line += f"  peak {values['peak_gb']:6.2f} GB" if cuda else ""
        if not args.skip_full and name.startswith("ours"):
            m, whole = int(name.split()[1]), result["full sequence"]["seconds"]
            ratio = whole / values["seconds"]
            line += f"  {ratio:5.2f}x cheaper a step, {ratio * m:5.2f}x a (context, answer) pair"
        print(line, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if cuda else "CPU"
    write_json(
        args.out / f"bench_training_{args.shape}_{args.length}.json", {"device": where, "length": args.length} | result
    )


if __name__ == "__main__":
    main()
