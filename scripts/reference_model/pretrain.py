"""Pretrain the reference model: a small LlamaForCausalLM that retrieves, made on one to four GPUs in minutes.

    python -m scripts.reference_model.pretrain tokenizer OUT
    python -m scripts.reference_model.pretrain train OUT --devices 4 --steps 20000

OUT receives the tokenizer, `log.jsonl`, `state.pt` (resume: run the same command again) and `model/` in bf16.
A batch is a function of (seed, step, rank), so a killed run goes on exactly where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from leank_train.common.tensor_files import read_checkpoint, write_checkpoint
from scripts.reference_model.batches import Batch, Batches, Row, collate, evaluation_rows

SPECIAL = ("<pad>", "<s>", "</s>")


def make_tokenizer(folder: Path, vocabulary: int = 4096) -> None:
    """Byte-level BPE over the shipped text and word lists; digits are split one by one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from data_gen import haystack
    from data_gen.request import Request
    from data_gen.tasks import TASKS
    from data_gen.tokens import TokenCounter

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    names = [w for kind in ("nouns", "adjectives", "verbs") for w in haystack.words(kind)]
    texts = [*haystack.sentences(None, "train"), *names, *(" " + w for w in names)]
    tokenizer.train_from_iterator(texts, trainer)
    # a second pass that has seen the tasks' own wording
    first = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    counter = TokenCounter(first)
    tasks = [(n, t) for n, t in TASKS.items() if not n.startswith("qa")]
    documents = [t.build(Request(n, 2048, counter, 1, i)) for n, t in tasks for i in range(4)]
    wording = [d.context[:400] + q.question + q.answer_prefix for d in documents for q in d.questions]
    tokenizer.train_from_iterator(texts + wording * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        padding_side="left", model_max_length=8192, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.save_pretrained(folder)
    print(f"tokenizer of {len(fast)} tokens in {folder}")


def make_model(tokenizer: PreTrainedTokenizerBase, layers: int, width: int) -> LlamaForCausalLM:
    """A Llama with two query heads per KV head, head_dim 64 and tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, head_dim=64,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


class Answers(nn.Module):
    """Logits at the supervised positions only: the vocabulary projection of a whole row would be waste."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.lm = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] of ids [rows, length] at the flattened positions [n]."""
        hidden = self.lm.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)  # [rows * length, width]
        return self.lm.lm_head(hidden[positions])  # [n, vocabulary]


@torch.no_grad()
def exact_match(model: nn.Module, rows: dict[str, list[Row]], length: int, fabric: Fabric) -> dict[str, list[float]]:
    """Per task, teacher-forced: the share of rows with every supervised token right, and of tokens that are right."""
    found = {}
    for name, all_rows in rows.items():
        mine = all_rows[fabric.global_rank :: fabric.world_size]
        counts = torch.zeros(4, device=fabric.device)  # rows right, rows, tokens right, tokens
        per = max(1, 65_536 // length)
        for i in range(0, len(mine), per):
            ids, positions, labels = (x.to(fabric.device) for x in collate(mine[i : i + per], length))
            with fabric.autocast():
                right = model(ids, positions).argmax(-1) == labels
            wrong = torch.zeros(len(ids), device=fabric.device).index_add_(0, positions // length, (~right).float())
            counts += torch.tensor([(wrong == 0).sum(), len(ids), right.sum(), len(right)], device=fabric.device)
        a, b, c, d = fabric.all_reduce(counts, reduce_op="sum").tolist()  # type: ignore[union-attr]
        found[name] = [round(a / b, 3), round(c / d, 3)]
    return found


def lr_factor(step: int, steps: int, warmup: int) -> float:
    """Warm-up, constant, linear decay to zero over the last quarter."""
    return min(1.0, (step + 1) / warmup, (steps - step) / (0.25 * steps))


def start_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A fresh model, or one of saved weights that warms up anew: the way on across machines."""
    if args.init is None:
        lm = make_model(tokenizer, args.layers, args.width)
    else:
        lm = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32, attn_implementation="sdpa")
    if args.compile:
        for layer in lm.model.layers:
            layer.compile(dynamic=args.dynamic)
    return lm


def make_optimizer(lm: LlamaForCausalLM, lr: float, fused: bool) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone."""
    matrices = [p for p in lm.parameters() if p.ndim >= 2]
    vectors = [p for p in lm.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=fused)


def update(model: nn.Module, optimizer: Optimizer, batch: Batch, lr: float, fabric: Fabric) -> torch.Tensor:
    """One optimiser step on a batch of `Batches`; returns the loss."""
    ids, positions, labels = batch
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = nn.functional.cross_entropy(model(ids, positions).float(), labels)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def train(args: argparse.Namespace) -> None:
    """The training loop; see the module's docstring."""
    torch.set_float32_matmul_precision("high")
    ddp = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    fabric = Fabric(devices=args.devices, precision=args.precision, strategy=ddp if args.devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(args.seed, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)  # as `make_tokenizer` wrote it
    lm = start_model(args, tokenizer)
    plain = Answers(lm)
    model, optimizer = fabric.setup(plain, make_optimizer(lm, args.lr, fabric.device.type == "cuda"))
    state_file, done, seconds = args.out / "state.pt", 0, 0.0
    if state_file.exists():
        state = read_checkpoint(state_file, "remove it to start anew")
        lm.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, seconds = state["step"], state["seconds"]
        fabric.print(f"resumed at step {done}")
    tokens = args.tokens // fabric.world_size
    batches = Batches(tokenizer, tokens, args.steps, args.seed, fabric.global_rank, done, args.longest)
    loader = torch.utils.data.DataLoader(
        batches, batch_size=None, num_workers=args.workers, pin_memory=fabric.device.type == "cuda",
        prefetch_factor=8 if args.workers else None,
    )  # fmt: skip
    probes = {n: evaluation_rows(tokenizer, n, args.eval_rows, args.seed + 1) for n in args.eval_lengths}
    start = last = time.time()
    last_step = done
    for step, batch in enumerate(loader, start=done + 1):
        batch = fabric.to_device(batch)
        loss = update(model, optimizer, batch, args.lr * lr_factor(step - 1, args.steps, args.warmup), fabric)
        ended = step in (args.steps, args.stop_at)
        if step % args.log_every == 0 or ended:
            total, now = loss.item(), time.time()
            speed = (step - last_step) * tokens * fabric.world_size / (now - last)
            length = batch[0].shape[1]
            record(args.out, fabric, step=step, loss=round(total, 4), length=length, tokens_per_s=int(speed))
            last, last_step = now, step
        if step % args.eval_every == 0 or ended:
            evaluate(plain, probes, step, args.out, fabric)
        if step % args.save_every == 0 or ended:
            save(args.out, fabric, lm, optimizer, step, seconds + time.time() - start, tokenizer)
        if ended:
            break
    fabric.print(f"{seconds + time.time() - start:.0f} s of training in all")


def evaluate(model: nn.Module, probes: dict[int, dict[str, list[Row]]], step: int, out: Path, fabric: Fabric) -> None:
    """Record the exact match of every length's probes."""
    with torch.compiler.set_stance("force_eager"):  # no new graph for each number of rows
        for length, rows in probes.items():
            record(out, fabric, step=step, eval_length=length, **exact_match(model, rows, length, fabric))


def record(out: Path, fabric: Fabric, **values: object) -> None:
    """Write one line to the screen and to log.jsonl."""
    if fabric.is_global_zero:
        print(json.dumps(values), flush=True)
        with (out / "log.jsonl").open("a") as log:
            log.write(json.dumps(values) + "\n")


def save(
    out: Path,
    fabric: Fabric,
    lm: LlamaForCausalLM,
    optimizer: Optimizer,
    step: int,
    seconds: float,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write state.pt for an exact resume and model/ in bf16 for use; state.pt is never half-written."""
    if fabric.is_global_zero:
        state = {"model": lm.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
        write_checkpoint(out / "state.pt", state)
        small = LlamaForCausalLM(lm.config).bfloat16()
        small.load_state_dict(lm.state_dict())
        small.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
    fabric.barrier()


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=["tokenizer", "train"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--stop-at", type=int, default=-1, help="end early at this step (the schedule stays)")
    parser.add_argument("--tokens", type=int, default=262_144, help="tokens per step over all devices")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", help="folder of weights to start from")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--workers", type=int, default=12, help="data workers per device")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--dynamic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--eval-rows", type=int, default=32)
    parser.add_argument("--eval-lengths", type=int, nargs="*", default=[1024, 4096, 8192])
    parser.add_argument("--save-every", type=int, default=1000)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    make_tokenizer(args.out) if args.action == "tokenizer" else train(args)


if __name__ == "__main__":
    main()
