"""The closed form: what each width of K and V costs by itself, from gradients of a few documents, without a step.

`closed_form` measures the losses that `leank.allocation` gives bytes by.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from leank.backbone import Backbone
from leank.data_gen.amount import amount
from leank.eval.cache.attention.softmax import Softmax
from leank.head import LOGITS_AT_ONCE, Head
from leank.precision import GROUP, KEY_BITS, WHOLE, value_group
from leank.tensor_files import read_checkpoint, write_checkpoint
from leank_train.data import HELD_OUT, Batch, collate
from leank_train.forward.branching import Branch, Prefix, answer_positions
from leank_train.forward.fused import fused_attention
from leank_train.forward.hook import run_decoder
from leank_train.forward.plan import Plan, to_device
from leank_train.forward.stored import StoredPass, rounded
from leank_train.objective.distill import counted
from leank_train.run_folder import Run
from leank_train.running.parallel import Division
from leank_train.running.preempt import Signals
from leank_train.running.progress import Meter
from leank_train.running.recorder import check_origin, restoring
from leank_train.settings import RunConfig
from leank_train.stages import read

DRAWS = 4  # of the closed form: labels drawn for each answer token
# Bytes that a process has for sums of squared gradients, 4 (float64: 8) for each number of K and V of a document. Where
# they need more, as beyond 16K tokens of Llama-3.1-8B, K and V are rounded anew in every draw, which takes longer.
SQUARES = 4 << 30
# Times a document's number, added to the run's seed, this seeds its draws, whichever rank has it. A CPU's generator
# takes the lower 32 bits of a seed alone.
DOCUMENT_SEEDS = 1_000_003


class Losses(NamedTuple):
    """What `leank.allocation.allocate` takes: of keys [L, H, D, 6], of values [L, H, 5], of empty heads [L, H]."""

    keys: Tensor
    values: Tensor
    empty: Tensor

    @property
    def of_masks(self) -> Losses:
        """Those of masks: of keys [L, H, D, 2], pruned and whole, of values [L, H, 1], which are 0."""
        return Losses(self.keys[..., [0, -1]], torch.zeros_like(self.values[..., :1]), self.empty)


class CalibrationPass(StoredPass):
    """A student that reads the middle as it is, and keeps its keys and values as leaves of the gradient.

    leaves: (layer, part) -> K and V, [B, H, T, D].
    outputs: of each layer its attention, [R, Hq, n, D], and what it would change by without the middle.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.leaves: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.outputs: list[tuple[Tensor, Tensor]] = []
        self.plain = Plan([p for p in self.plan.pieces if not p.scaled], self.plan.documents)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax) -> Tensor:
        """Attention of this layer's rows."""
        out = super().attend(layer, q, k, v, scale, softmax)
        if not out.requires_grad:  # nothing of the middle is read
            out.requires_grad_()
        with torch.no_grad():
            parts, ranks = self.parts(layer, k, v), self.prefix.ranks
            without = fused_attention(q, *parts, self.plain, scale, ranks=ranks, softmax=softmax)
            self.outputs.append((out, without - out))
        return out

    def middle(self, layer: int, part: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a part as they are."""
        self.leaves[layer, part] = k.detach().requires_grad_(), v.detach().requires_grad_()
        return self.leaves[layer, part]


def closed_form(current: Run, backbone: Backbone, means: Tensor | None, signals: Signals | None = None) -> Losses:
    """Return the expected KL to dense, in nats an answer token, that each width costs by itself.

    It is the KL's second order in an error e of keys, values or a head's attention: E[(g . e)^2] / 2, where g is the
    gradient of the log probability of a label that is drawn from the model's own distribution. Rounding errors of
    different tokens are taken as independent, so that the squares of g e are summed. What a pruned channel lacks, and
    what attention loses without the middle of a head, are not, so that the sum of g e is squared.

    Documents are those of the run's tasks, which no step trains on, and which the processes divide among themselves.
    After each one of every process the folder of the run has what was found so far, from which the same command goes
    on, with any number of processes. A signal to any process ends all.
    """
    config, (layers, heads, dim) = current.config, backbone.shape
    device = backbone.model.device
    shapes = (layers, heads, dim, len(KEY_BITS)), (layers, heads, len(KEY_BITS) - 1), (layers, heads)
    sums = Losses(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))
    division, passes = Division.of(config.trainer), DRAWS + 1  # of a document: forward, and backward for each draw
    documents = config.mixture(backbone, per_length=config.data.documents * division.width)
    file = current.out / "checkpoints" / "closed_form.ckpt"
    count, found = config.data.calibration, _go_on(current, file, sums)
    phase = f"closed form: what each width costs by itself, from {amount(count, 'document')}"
    with Meter(phase, count * passes, "pass", done=found * passes, silent=not division.first) as meter:
        for i, counts, done in division.rounds(count, found):
            batch = collate(backbone, [documents[3 * HELD_OUT + i]]).to(device)
            generator = torch.Generator(device).manual_seed(config.seed + DOCUMENT_SEEDS * i)
            prefix, question, _ = read(
                backbone.model, batch, config.trainer.prefill_kernel, means, config.pruning.sink, division.ranks
            )
            of_one = Losses(*(torch.zeros_like(total) for total in sums))
            for _ in _second_order(config, backbone, batch, prefix, question, generator, of_one, division):
                meter.update()
            if not counts:
                for one in of_one:
                    one.zero_()
            division.sum_(*of_one)
            for total, one in zip(sums, of_one, strict=True):
                total += one
            meter.update(done * passes - meter.n)
            if current.first:
                state = {"of": _origin(current), "documents": done}
                write_checkpoint(file, state | {k: v.cpu() for k, v in sums._asdict().items()})
            division.leave_together(signals, device)
    return Losses(*(total / count for total in sums))


def _origin(current: Run) -> list[str]:
    return ["closed form", current.fingerprint]


def _go_on(current: Run, file: Path, sums: Losses) -> int:
    """Put what an earlier process found into the sums, and return from how many documents it is."""
    if not file.exists():
        return 0
    cure = "remove it, and the closed form begins anew"
    state = read_checkpoint(file, cure)
    check_origin(state, _origin(current), file, cure)
    with restoring(file, cure):
        for name, total in sums._asdict().items():
            total.copy_(state[name].view_as(total))
        return int(state["documents"])


def _second_order(
    config: RunConfig, backbone: Backbone, batch: Batch, prefix: Prefix, question: Branch, generator: torch.Generator,
    losses: Losses, division: Division,
) -> Iterator[None]:  # fmt: skip
    """Add what the widths cost on one document to the losses, and yield after every pass.

    Where processes have a share of the document each, the losses of all together are the document's.
    """
    model, pruning, answers, (keys, values, empty) = backbone.model, config.pruning, batch.answers, losses
    whole = torch.full((*keys.shape[:2], keys.shape[2] + 2), float(WHOLE), device=keys.device)
    whole[..., -1] = 1  # the last one is no width, but the share of a head that is there
    positions, k_positions = answer_positions(question, answers.ids, answers.lengths)
    state = CalibrationPass(prefix, question, positions, k_positions, whole, pruning.sink, pruning.window, "zero")
    hidden = run_decoder(model, answers.ids, to_device(positions, answers.ids.device), state)
    rows = to_device(counted(answers.lengths, hidden.shape[1]).flatten().nonzero().squeeze(1), hidden.device)
    yield
    inputs = [x for pair in state.leaves.values() for x in pair] + [out for out, _ in state.outputs]
    factor = 1 / (2 * len(rows) * DRAWS)
    kind = torch.promote_types(hidden.dtype, torch.float32)
    # of the gradients of K and V, summed over the draws: an error is the same in each, and is computed once
    squares: dict[tuple[int, int], list[Tensor]] = {}
    fits = sum(x.numel() for pair in state.leaves.values() for x in pair) * kind.itemsize <= SQUARES
    for draw in range(DRAWS):
        pulled = _towards_labels(Head.of(model), hidden.detach().flatten(0, 1)[rows], generator).to(hidden.dtype)
        if division.ranks is not None:  # the same labels everywhere, should rounding differ
            dist.broadcast(pulled, dist.get_global_rank(division.ranks, 0), division.ranks)
        found = torch.autograd.grad(
            hidden.flatten(0, 1)[rows], inputs, pulled, retain_graph=True, materialize_grads=True
        )
        for layer, (d_out, (_, change)) in enumerate(zip(found[-len(state.outputs) :], state.outputs, strict=True)):
            of_branches = (d_out.double() * change).sum((2, 3)).unflatten(1, (empty.shape[1], -1)).sum(-1)  # [R, H]
            empty[layer] += of_branches.square().sum(0) * factor * division.leads
        for number, ((layer, part), (k, v)) in enumerate(state.leaves.items()):
            d_k, d_v = found[2 * number : 2 * number + 2]
            lacking = (d_k.double() * k.detach()).sum(2)
            if division.ranks is not None and part == 0:
                dist.all_reduce(lacking, group=division.ranks)
            keys[layer, :, :, 0] += lacking.square().sum(0) * factor * division.leads
            of_both = [d.to(kind).square() for d in (d_k, d_v)]
            for one, before in zip(of_both, squares.pop((layer, part), ()), strict=False):
                one += before
            if fits and draw + 1 < DRAWS:
                squares[layer, part] = of_both
                continue
            counts, first, v = factor * (part == 0 or division.leads), state.first(part), v.detach().mT
            k = state.branches(part, k.detach())  # the gradient of padding is 0
            k, of_k, of_v = k[..., first:, :], of_both[0].unflatten(2, k.shape[2:4])[..., first:, :], of_both[1].mT
            for i, bits in enumerate(KEY_BITS[1:-1]):
                width = torch.full((1, 1), float(bits), device=k.device)
                error = rounded(k, width, GROUP, pruning.packed).double() - k
                keys[layer, :, :, i + 1] += (of_k * error.square()).sum((0, 2, 3)) * counts
                error = rounded(v, width, value_group(v.shape[-2]), pruning.packed).double() - v
                values[layer, :, i] += (of_v * error.square()).sum((0, 2, 3)) * counts
        yield


def _towards_labels(head: Head, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Return the gradient of the log probability of labels drawn at each of the hidden states [rows, hidden]."""
    found = []
    for rows in hidden.split(max(1, LOGITS_AT_ONCE["cuda" if hidden.is_cuda else "cpu"] // head.weight.shape[0])):
        logits = head.logits(rows)
        away = -logits.softmax(-1)
        labels = torch.multinomial(-away, 1, generator=generator)
        found.append(head.pull_back(away.scatter_add_(1, labels, torch.ones_like(away[:, :1])), logits))
    return torch.cat(found)
