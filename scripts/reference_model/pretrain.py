"""Pretrain a reference model: a small LlamaForCausalLM that retrieves, made on one to four GPUs in minutes.

    python -m scripts.reference_model.pretrain tokenizer OUT
    python -m scripts.reference_model.pretrain train OUT --devices 4 --steps 20000

and one with fewer and busier heads that knows natural text too (TEXT: see `scripts.reference_model.text`):

    python -m scripts.reference_model.pretrain tokenizer OUT --vocabulary 8192 --text TEXT
    python -m scripts.reference_model.text tokens TEXT OUT
    python -m scripts.reference_model.pretrain train OUT --recipe mixed --text TEXT --layers 6 --heads 4 --kv-heads 1 \
        --head-dim 128 --mlp 1536 --tokens 131072 --devices 2 --seconds 800

OUT receives the tokenizer, `log.jsonl`, `state.pt` (resume: run the same command again) and `model/` in bf16.
A batch is a function of (seed, step, rank), so a killed run goes on exactly where it stopped. `--seconds` in place of
`--steps` makes the schedule a function of the time that training has taken; such a run cannot be repeated bit for bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from leank.tensor_files import read_checkpoint, write_checkpoint
from scripts.reference_model.batches import Batches, TrainingBatch, evaluation_rows
from scripts.reference_model.evaluation import Answers, evaluate, record
from scripts.reference_model.recipe import RECIPES
from scripts.reference_model.text import read

SPECIAL = ("<pad>", "<s>", "</s>")
STATE = "state.pt"  # what an exact resume needs, in the folder of the run
_NO_STEPS = 10**7  # more than any run takes
_TICK = 10  # steps after which the ranks agree on the time


class Clock:
    """Tells how much of the training is over: by steps, or by the seconds it has taken where a limit is given.

    Data workers read it too, which make their batches a little ahead.
    """

    def __init__(self, steps: int, limit: float | None, seconds: float) -> None:
        self.steps, self.limit, self.before, self.start = steps, limit, seconds, time.time()
        self.over = multiprocessing.Value("d", seconds / limit if limit else 0.0)

    def share(self, step: int) -> float:
        """The share that is over before step number `step`, counted from 0."""
        return self.over.value if self.limit else step / self.steps

    @property
    def here(self) -> float:
        """Seconds since this process began to train."""
        return time.time() - self.start

    @property
    def seconds(self) -> float:
        """Seconds of training in all."""
        return self.before + self.here

    def tick(self, step: int, fabric: Fabric) -> None:
        """Let the time go on, alike on every rank."""
        if self.limit and step % _TICK == 0:
            seconds = fabric.all_reduce(torch.tensor(self.seconds, device=fabric.device), reduce_op="mean")
            self.over.value = min(1.0, float(seconds) / self.limit)  # type: ignore[arg-type]


def make_tokenizer(folder: Path, vocabulary: int = 4096, text: Path | None = None) -> None:
    """Byte-level BPE over the shipped text and word lists, and a quarter of `text`; digits are split one by one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from leank.data_gen import haystack
    from leank.data_gen.request import Request
    from leank.data_gen.tasks import TASKS
    from leank.data_gen.tokens import TokenCounter

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
    texts += [] if text is None else read(text, "train")[::4]
    tokenizer.train_from_iterator(texts, trainer)
    # a second pass that has seen the tasks' own wording
    first = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    counter = TokenCounter(first)
    tasks = [(n, t) for n, t in TASKS.items() if not n.startswith("qa") and n != "chain_long"]  # too long
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


def make_model(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with tied embeddings; unless said otherwise with two query heads per KV head and head_dim 64."""
    heads = args.heads or args.width // args.head_dim
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.width, intermediate_size=args.mlp or 2 * args.width,
        num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=args.kv_heads or heads // 2,
        head_dim=args.head_dim,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def lr_factor(step: int, share: float, warmup: int) -> float:
    """Warm-up, constant, linear decay to zero over the last quarter."""
    return min(1.0, (step + 1) / warmup, (1 - share) / 0.25)


def start_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A fresh model, or one of saved weights that warms up anew: the way on across machines."""
    if args.init is None:
        lm = make_model(tokenizer, args)
    else:
        lm = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32, attn_implementation="sdpa")
    if args.compile:
        for layer in lm.model.layers:
            layer.compile(dynamic=args.dynamic)
    return lm


def make_optimizers(lm: LlamaForCausalLM, lr: float, fused: bool, muon: bool) -> list[Optimizer]:
    """AdamW with weight decay on matrices alone; with `muon`, Muon has the matrices of the layers."""
    inner = [p for p in lm.model.layers.parameters() if p.ndim >= 2] if muon else []
    taken = {id(p) for p in inner}
    matrices = [p for p in lm.parameters() if p.ndim >= 2 and id(p) not in taken]
    vectors = [p for p in lm.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    found: list[Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=fused)]
    if muon:  # scaled so that the rate and the decay of AdamW fit it too
        found.append(torch.optim.Muon(inner, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"))
    return found


def update(
    model: nn.Module, optimizers: Sequence[Optimizer], batch: TrainingBatch, lr: float, fabric: Fabric
) -> torch.Tensor:
    """One optimiser step on a batch of `Batches`; returns the loss."""
    ids, positions, labels, weights = batch
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr
    losses = nn.functional.cross_entropy(model(ids, positions).float(), labels, reduction="none")
    loss = losses @ weights
    fabric.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss


def make_loader(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, clock: Clock, done: int, fabric: Fabric
) -> torch.utils.data.DataLoader:
    """The batches of this rank from step number `done` on."""
    text = None if args.text is None else np.load(args.text / "train.npy", mmap_mode="r")
    batches = Batches(
        tokenizer, args.tokens // fabric.world_size, args.steps, args.seed, fabric.global_rank, done, args.longest,
        clock.share, RECIPES[args.recipe], text,
    )  # fmt: skip
    return torch.utils.data.DataLoader(
        batches, batch_size=None, num_workers=args.workers, pin_memory=fabric.device.type == "cuda",
        prefetch_factor=8 if args.workers else None,
    )  # fmt: skip


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
    cuda = fabric.device.type == "cuda"
    model, *optimizers = fabric.setup(plain, *make_optimizers(lm, args.lr, cuda, args.muon))
    done, seconds = resume(args.out / STATE, lm, optimizers)
    if done:
        fabric.print(f"resumed at step {done}")
    probes = {n: evaluation_rows(tokenizer, n, args.eval_rows, args.seed + 1) for n in args.eval_lengths}
    clock = Clock(args.steps, args.seconds, seconds)
    begun = clock.share(done)
    if begun >= 1:
        fabric.print("nothing is left to train")
        return
    loader = make_loader(args, tokenizer, clock, done, fabric)
    heldout = None if args.text is None else np.load(args.text / "test.npy")
    last, last_step = clock.here, done
    for step, batch in enumerate(loader, start=done + 1):
        batch = fabric.to_device(batch)
        share = clock.share(step - 1)
        loss = update(model, optimizers, batch, args.lr * lr_factor(step - 1, share, args.warmup), fabric)
        clock.tick(step, fabric)
        ended = step in (args.steps, args.stop_at) or clock.share(step) >= 1
        paused = args.pause is not None and (clock.share(step) - begun) * args.seconds >= args.pause
        if step % args.log_every == 0 or ended:
            total, now = loss.item(), clock.here
            speed = (step - last_step) * args.tokens / (now - last)
            length, over = batch[0].shape[1], round(share, 4)
            record(
                args.out, fabric, step=step, loss=round(total, 4), length=length, share=over, tokens_per_s=int(speed)
            )
            last, last_step = now, step
        if step % args.eval_every == 0 or ended:
            evaluate(plain, probes, heldout, step, args.out, fabric)
        if step % args.save_every == 0 or ended or paused:
            save(args.out, fabric, lm, optimizers, step, clock.seconds, tokenizer)
        if ended or paused:
            break
    fabric.print(f"{clock.seconds:.0f} s of training in all")


def resume(path: Path, lm: LlamaForCausalLM, optimizers: Sequence[Optimizer]) -> tuple[int, float]:
    """Put what `save` wrote into the model and its optimisers; returns the steps done and their seconds, 0 without."""
    if not path.exists():
        return 0, 0.0
    state = read_checkpoint(path, "remove it to start anew")
    lm.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["seconds"]


def save(
    out: Path,
    fabric: Fabric,
    lm: LlamaForCausalLM,
    optimizers: Sequence[Optimizer],
    step: int,
    seconds: float,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write state.pt for an exact resume and model/ in bf16 for use; state.pt is never half-written."""
    if fabric.is_global_zero:
        moments = [optimizer.state_dict() for optimizer in optimizers]
        state = {"model": lm.state_dict(), "optimizers": moments, "step": step, "seconds": seconds}
        write_checkpoint(out / STATE, state)
        small = LlamaForCausalLM(lm.config).bfloat16()
        small.load_state_dict(lm.state_dict())
        small.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
    fabric.barrier()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=["tokenizer", "train"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--stop-at", type=int, default=-1, help="end early at this step (the schedule stays)")
    parser.add_argument("--tokens", type=int, default=262_144, help="tokens per step over all devices")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--seconds", type=float, help="let the schedule end after this time in place of --steps")
    parser.add_argument(
        "--pause", type=float, help="with --seconds: save and stop after so many seconds of this process"
    )
    parser.add_argument("--recipe", choices=list(RECIPES), default="retrieval")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--mlp", type=int, help="width of the MLP (default: twice the width)")
    parser.add_argument("--heads", type=int, help="query heads (default: width / head_dim)")
    parser.add_argument("--kv-heads", type=int, help="KV heads (default: half the query heads)")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of a new tokenizer")
    parser.add_argument("--text", type=Path, help="folder of natural text that `text` wrote")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--muon", action="store_true", help="train the matrices of the layers with Muon")
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
    if args.pause is not None and args.seconds is None:
        parser.error("--pause goes with --seconds; --stop-at ends a run of --steps early")
    if args.seconds is not None:
        args.steps = _NO_STEPS
    return args


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    make_tokenizer(args.out, args.vocabulary, args.text) if args.action == "tokenizer" else train(args)


if __name__ == "__main__":
    main()
