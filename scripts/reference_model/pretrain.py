"""Pretrain a reference model: a small LlamaForCausalLM that retrieves, made on one to four GPUs in minutes.

    python -m scripts.reference_model.pretrain tokenizer OUT
    python -m scripts.reference_model.pretrain train OUT --devices 4 --steps 20000

and one with fewer and busier heads that knows text too. TEXT is a folder of .txt files, one document each, which
the shipped paragraphs join; `text` writes its tokens to TEXT/train.npy, those of every twentieth document to
TEXT/test.npy (uint16, an EOS behind each), and leaves every other document out of train.npy with `--every 2`:

    python -m scripts.reference_model.pretrain tokenizer OUT --vocabulary 8192 --text TEXT
    python -m scripts.reference_model.pretrain text OUT --text TEXT
    python -m scripts.reference_model.pretrain train OUT --recipe mixed --text TEXT --layers 6 --heads 4 --kv-heads 1 \
        --head-dim 128 --mlp 1536 --tokens 131072 --devices 2 --steps 9000

OUT receives the tokenizer, `log.jsonl`, `state.pt` (resume: run the same command again) and `model/` in bf16.
A batch is a function of (seed, step, rank), so a killed run goes on exactly where it stopped.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

RECIPE_NAMES = ("retrieval", "mixed", "busy")  # of scripts.reference_model.batches


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=["tokenizer", "text", "train"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--stop-at", type=int, default=-1, help="end early at this step (the schedule stays)")
    parser.add_argument("--tokens", type=int, default=262_144, help="tokens per step over all devices")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--recipe", choices=RECIPE_NAMES, default="retrieval")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--mlp", type=int, help="width of the MLP (default: twice the width)")
    parser.add_argument("--heads", type=int, help="query heads (default: width / head_dim)")
    parser.add_argument("--kv-heads", type=int, help="KV heads (default: half the query heads)")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of a new tokenizer")
    parser.add_argument("--text", type=Path, help="folder of natural text")
    parser.add_argument("--every", type=int, default=1, help="text: take each n-th document of training")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--workers", type=int, default=12, help="data workers per device")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--eval-rows", type=int, default=32)
    parser.add_argument("--eval-lengths", type=int, nargs="*", default=[1024, 4096, 8192])
    parser.add_argument("--save-every", type=int, default=1000)
    return parser.parse_args(argv)


if __name__ == "__main__":
    parsed()  # --help and refusals come before what takes seconds to import

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.optim import AdamW
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from leank.data_gen import haystack
from leank.tensor_files import read_checkpoint, write_checkpoint
from scripts.reference_model.batches import (
    RECIPES,
    UNORDERED,
    Batches,
    TrainingBatch,
    TrainingRow,
    collate,
    evaluation_rows,
)

SPECIAL = ("<pad>", "<s>", "</s>")
STATE = "state.pt"  # what an exact resume needs, in the folder of the run
_TEST_SHARE = 20
_SENTENCES = 500  # of the shipped paragraphs in a document
_TEXT_ROWS = 32  # of held-out text, in an evaluation


def make_tokenizer(folder: Path, vocabulary: int = 4096, text: Path | None = None) -> None:
    """Byte-level BPE over the shipped text and word lists, and a quarter of `text`; digits are split one by one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from leank.data_gen.task import Request
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
    texts += [] if text is None else documents(text, "train")[::4]
    tokenizer.train_from_iterator(texts, trainer)
    # a second pass that has seen the tasks' own wording
    first = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    counter = TokenCounter(first)
    tasks = [(n, t) for n, t in TASKS.items() if not n.startswith("qa") and n != "chain_long"]  # too long
    samples = [t.build(Request(n, 2048, counter, 1, i)) for n, t in tasks for i in range(4)]
    wording = [d.context[:400] + q.question + q.answer_prefix for d in samples for q in d.questions]
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


def documents(folder: Path, split: str) -> list[str]:
    """The documents of a split, "train" or "test", in a fixed order."""
    files = sorted(folder.rglob("*.txt"))
    mine = [file for i, file in enumerate(files, 1) if (i % _TEST_SHARE == 0) == (split == "test")]
    shipped = haystack.sentences(None, split)
    return [file.read_text(encoding="utf-8", errors="ignore") for file in mine] + [
        " ".join(shipped[i : i + _SENTENCES]) for i in range(0, len(shipped), _SENTENCES)
    ]


def tokenize(folder: Path, text: Path, every: int) -> None:
    """Write both splits of `text` in tokens of the folder's tokenizer; of training each n-th document."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for split in ("train", "test"):
        texts, pieces = documents(text, split)[:: every if split == "train" else 1], []
        for i in range(0, len(texts), 32):  # the encodings of all texts at once would take gigabytes
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts[i : i + 32], add_special_tokens=False)
            pieces += [np.array([*e.ids, tokenizer.eos_token_id], dtype=np.uint16) for e in encoded]
        ids = np.concatenate(pieces)
        np.save(text / f"{split}.npy", ids)
        size = sum(len(one.encode()) for one in texts)
        print(f"{split}: {len(ids) / 1e6:.2f} M tokens, {size / len(ids):.2f} bytes per token")


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


def make_optimizer(lm: LlamaForCausalLM, lr: float, fused: bool) -> AdamW:
    """AdamW with weight decay on matrices alone."""
    matrices, vectors = ([p for p in lm.parameters() if (p.ndim >= 2) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=fused)


def update(model: nn.Module, optimizer: AdamW, batch: TrainingBatch, lr: float, fabric: Fabric) -> torch.Tensor:
    """One optimiser step on a batch of `Batches`; returns the loss."""
    ids, positions, labels, weights = batch
    for group in optimizer.param_groups:
        group["lr"] = lr
    losses = nn.functional.cross_entropy(model(ids, positions).float(), labels, reduction="none")
    loss = losses @ weights
    fabric.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def make_loader(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, done: int, fabric: Fabric
) -> torch.utils.data.DataLoader:
    """The batches of this rank from step number `done` on."""
    text = None if args.text is None else np.load(args.text / "train.npy", mmap_mode="r")
    batches = Batches(
        tokenizer, args.tokens // fabric.world_size, args.steps, args.seed, fabric.global_rank, done, args.longest,
        RECIPES[args.recipe], text,
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
    lm = make_model(tokenizer, args)
    for layer in lm.model.layers if (torch.cuda.is_available() if args.compile is None else args.compile) else ():
        layer.compile(dynamic=True)
    plain = Answers(lm)
    model, optimizer = fabric.setup(plain, make_optimizer(lm, args.lr, fabric.device.type == "cuda"))
    done, before = resume(args.out / STATE, lm, optimizer)
    if done:
        fabric.print(f"resumed at step {done}")
    if done >= args.steps:
        fabric.print("nothing is left to train")
        return
    probes = {n: evaluation_rows(tokenizer, n, args.eval_rows, args.seed + 1) for n in args.eval_lengths}
    heldout = None if args.text is None else np.load(args.text / "test.npy")
    begin = last = time.time()
    last_step = done
    for step, batch in enumerate(make_loader(args, tokenizer, done, fabric), start=done + 1):
        batch = fabric.to_device(batch)
        share = (step - 1) / args.steps
        loss = update(model, optimizer, batch, args.lr * lr_factor(step - 1, share, args.warmup), fabric)
        ended = step in (args.steps, args.stop_at)
        if step % args.log_every == 0 or ended:
            total, now = loss.item(), time.time()
            speed, length = (step - last_step) * args.tokens / (now - last), batch[0].shape[1]
            record(args.out, fabric, step=step, loss=round(total, 4), length=length, share=round(share, 4),
                   tokens_per_s=int(speed))  # fmt: skip
            last, last_step = now, step
        if step % args.eval_every == 0 or ended:
            evaluate(plain, probes, heldout, step, args.out, fabric)
        if step % args.save_every == 0 or ended:
            save(args.out, fabric, lm, optimizer, step, before + time.time() - begin, tokenizer)
        if ended:
            break
    fabric.print(f"{before + time.time() - begin:.0f} s of training in all")


def resume(path: Path, lm: LlamaForCausalLM, optimizer: AdamW) -> tuple[int, float]:
    """Put what `save` wrote into the model and its optimiser; returns the steps done and their seconds, 0 without."""
    if not path.exists():
        return 0, 0.0
    state = read_checkpoint(path, "remove it to start anew")
    lm.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["seconds"]


def save(
    out: Path, fabric: Fabric, lm: LlamaForCausalLM, optimizer: AdamW, step: int, seconds: float,
    tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    """Write state.pt for an exact resume and model/ in bf16 for use; state.pt is never half-written."""
    if fabric.is_global_zero:
        state = {"model": lm.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
        write_checkpoint(out / STATE, state)
        small = LlamaForCausalLM(lm.config).bfloat16()
        small.load_state_dict(lm.state_dict())
        small.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
    fabric.barrier()


# evaluation: exact match of answers, and the loss of held-out text


class Answers(nn.Module):
    """Logits at the supervised positions only: the vocabulary projection of a whole row would be waste."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.lm = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] of ids [rows, length] at the flattened positions [n]."""
        hidden = self.lm.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)  # [rows * length, width]
        return self.lm.lm_head(hidden[positions])  # [n, vocabulary]


def right_tokens(predicted: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor, unordered: bool) -> torch.Tensor:
    """Which teacher-forced predictions [n] are right; unordered: also by any label of the row that has yet to come."""
    right = predicted == labels
    if unordered:
        for row in rows.unique():
            at = (rows == row).nonzero()[:, 0]
            left = torch.ones(len(at), len(at), dtype=torch.bool, device=at.device).triu()  # [prediction, label]
            right[at] = ((predicted[at, None] == labels[None, at]) & left).any(-1)
    return right


@torch.no_grad()
def exact_match(
    model: nn.Module, rows: dict[str, list[TrainingRow]], length: int, fabric: Fabric
) -> dict[str, list[float]]:
    """Per task, teacher-forced: the share of rows with every supervised token right, and of tokens that are right."""
    found = {}
    for name, all_rows in rows.items():
        mine = all_rows[fabric.global_rank :: fabric.world_size]
        counts = torch.zeros(4, device=fabric.device)  # rows right, rows, tokens right, tokens
        per = max(1, 65_536 // length)
        for i in range(0, len(mine), per):
            ids, positions, labels, _ = (x.to(fabric.device) for x in collate(mine[i : i + per], length))
            with fabric.autocast():
                predicted = model(ids, positions).argmax(-1)
            right = right_tokens(predicted, labels, positions // length, name in UNORDERED)
            wrong = torch.zeros(len(ids), device=fabric.device).index_add_(0, positions // length, (~right).float())
            counts += torch.tensor([(wrong == 0).sum(), len(ids), right.sum(), len(right)], device=fabric.device)
        a, b, c, d = fabric.all_reduce(counts, reduce_op="sum").tolist()  # type: ignore[union-attr]
        found[name] = [round(a / b, 3), round(c / d, 3)]
    return found


@torch.no_grad()
def text_loss(model: nn.Module, stream: np.ndarray, bos: int, length: int, fabric: Fabric) -> list[float]:
    """Mean loss on held-out text at the positions below 512, from there to the middle, and in the second half."""
    bounds = [0, min(512, length // 4), length // 2, length]
    sums = torch.zeros(len(bounds) - 1, device=fabric.device)
    rows = min(_TEXT_ROWS, (len(stream) - 1) // length)
    for row in range(fabric.global_rank, rows, fabric.world_size):
        ids = torch.from_numpy(stream[row * length : (row + 1) * length].astype(np.int64)).to(fabric.device)
        shown = torch.cat([ids.new_tensor([bos]), ids[:-1]])[None]
        with fabric.autocast():
            logits = model(shown, torch.arange(length, device=fabric.device))
        losses = nn.functional.cross_entropy(logits.float(), ids, reduction="none")
        sums += torch.stack([losses[a:b].mean() for a, b in pairwise(bounds)])
    total = fabric.all_reduce(sums, reduce_op="sum")
    return [round(x / max(1, rows), 4) for x in total.tolist()]  # type: ignore[union-attr]


def evaluate(
    model: Answers,
    probes: dict[int, dict[str, list[TrainingRow]]],
    heldout: np.ndarray | None,
    step: int,
    out: Path,
    fabric: Fabric,
) -> None:
    """Record the exact match of every length's probes, and the loss on held-out text."""
    with torch.compiler.set_stance("force_eager"):  # no new graph for each number of rows
        for length, rows in probes.items():
            record(out, fabric, step=step, eval_length=length, **exact_match(model, rows, length, fabric))
        if heldout is not None:
            length, bos = max(probes), model.lm.config.bos_token_id
            assert bos is not None  # `make_model` gives it
            losses = text_loss(model, heldout, bos, length, fabric)
            record(out, fabric, step=step, text_length=length, text_loss=losses)


def record(out: Path, fabric: Fabric, **values: object) -> None:
    """Write one line to the screen and to log.jsonl."""
    if fabric.is_global_zero:
        print(json.dumps(values), flush=True)
        with (out / "log.jsonl").open("a") as log:
            log.write(json.dumps(values) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parsed(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.action == "tokenizer":
        make_tokenizer(args.out, args.vocabulary, args.text)
    elif args.action == "text":
        tokenize(args.out, args.text, args.every)
    else:
        train(args)


if __name__ == "__main__":
    main()
