"""Learn a layout of bits: how many bits each channel of K, and each head's V, deserves under a budget of bytes.

    minimise  d(H_full, H_stored(w)) + lambda * bytes(w)        over widths w [L, H, D + 1] in [0, 8], from 8 bits

H_stored is the student of `leank_train.forward.stored`, which reads the middle in w bits, and bytes(w) what the middle
takes of dense's bytes. Lambda is steered so that bytes fall in a line to the lowest budget. A channel's bits are given
up one width after the other. The share of the steps that a width has survived is its gain per byte, by which
`leank.allocation` gives out the bytes of every budget. So the layouts of one run are nested.

`closed_form` has the same losses without learning: what each width costs by itself, to second order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from leank.allocation import allocate, key_costs, value_costs
from leank.backbone import Backbone
from leank.head import LOGITS_AT_ONCE, Head
from leank.mask import ChannelMask
from leank.precision import GROUP, KEY_BITS, WHOLE, value_group
from leank.shape import architecture
from leank_train.data import HELD_OUT, Batch, collate
from leank_train.forward.branching import Branch, Prefix, answer_positions
from leank_train.forward.fused import fused_attention
from leank_train.forward.hook import run_decoder
from leank_train.forward.plan import Plan, to_device
from leank_train.forward.stored import StoredPass, rounded, stored_student
from leank_train.objective.distill import counted
from leank_train.run_folder import Run
from leank_train.running.progress import Meter
from leank_train.settings import RunConfig
from leank_train.stages import Stage1, read

LEARNED = 4  # widths above 0 that are learned: the first of KEY_BITS; 16 bits are no better than 8 by any measure
FINEST = KEY_BITS[LEARNED]
DOCUMENTS, DRAWS = 16, 4  # of the closed form: documents, and labels drawn for each answer token


class Losses(NamedTuple):
    """What `leank.allocation.allocate` takes: of keys [L, H, D, 6], of values [L, H, 5], of empty heads [L, H]."""

    keys: Tensor
    values: Tensor
    empty: Tensor


class LayoutStage(Stage1):
    """Learn widths: alpha [L, H, D + 1] in [0, 1] goes through the widths 0, 2, 3, 4 and 8 at equal distances."""

    path: Tensor
    costs: Tensor

    def __init__(self, backbone: Backbone, *given: Any, **more: Any) -> None:
        """Start at 8 bits everywhere; see `Stage`."""
        layers, heads, dim = backbone.shape
        super().__init__(backbone, *given, alpha=torch.ones(layers, heads, dim + 1), **more)
        self.register_buffer("path", torch.zeros(*self.alpha.shape, LEARNED))  # the sum over the steps of `stays`
        keys, values = key_costs()[: LEARNED + 1], torch.cat([torch.zeros(1), value_costs(dim)[:LEARNED]])
        costs = torch.cat([keys.diff().expand(dim, -1), values.diff()[None]])
        self.register_buffer("costs", costs.float(), persistent=False)  # [D + 1, LEARNED], bits of each next width

    @property
    def result(self) -> Tensor:
        """The path, [L, H, (D + 1) * LEARNED]."""
        return self.path.flatten(-2)

    def fills(self) -> Tensor:
        """Return which share of each next width is there, [L, H, D + 1, LEARNED], from the first to the last."""
        return (self.alpha[..., None] * LEARNED - torch.arange(LEARNED, device=self.device)).clamp(0, 1)

    def stays(self) -> Tensor:
        """Return the `fills`; those of K count only as far as their head has V, since a head keeps both or neither."""
        fills = self.fills()
        return torch.cat([fills[..., :-1, :] * fills[..., -1:, :1], fills[..., -1:, :]], -2)

    def stored(self) -> Tensor:
        """Return the middle's share of dense's bytes, scales counted."""
        heads, dim = self.alpha[..., 0].numel(), self.alpha.shape[-1] - 1
        return (self.stays() * self.costs).sum() / (heads * 2 * dim * WHOLE)

    def penalty(self) -> Tensor:
        """Return lambda times the bytes over those of 8 bits everywhere."""
        return self.lam * self.stored() / self.most

    @property
    def most(self) -> float:
        """Bytes of 8 bits everywhere, as a share of dense's."""
        dim = self.alpha.shape[-1] - 1
        return float(self.costs.sum() / (2 * dim * WHOLE))

    def kept(self) -> Tensor:
        """Return the bytes over those of 8 bits everywhere."""
        return self.stored().detach() / self.most

    @property
    def to_give_up(self) -> float:
        """The share of the bytes of 8 bits that the lowest budget leaves out."""
        return max(0.0, 1 - self.pruning.budgets[0] / self.most)

    def trace(self) -> None:
        """Take down which widths are there, after a step."""
        self.path += self.stays().detach()

    def finish(self) -> None:
        """Make the path the share of steps in which each width was there."""
        self.path /= max(1, self.config.steps)

    def widths(self) -> Tensor:
        """Return the widths, [L, H, D + 1] in bits."""
        return self.fills() @ torch.tensor(KEY_BITS[: LEARNED + 1], device=self.device).diff().to(self.alpha)

    def student(self, prefix: Prefix, question: Branch, batch: Batch, beta: Tensor | None) -> Tensor:
        """Return the student's rows of the answers, [R, N, hidden]."""
        assert beta is None
        return stored_student(
            self.backbone.model, prefix, question, batch.answers.ids, batch.answers.lengths, self.widths(),
            sink=self.pruning.sink, window=self.pruning.window, empty_heads=self.config.empty_heads,
        )  # fmt: skip

    def training_step(self, batch: Batch, index: int) -> dict[str, Tensor]:
        """Return the loss of one batch, and the share of dense's bytes that it stores."""
        return {**super().training_step(batch, index), "bytes": self.stored().detach()}

    def losses(self) -> Losses:
        """Return losses whose gain per byte, from one width to the next, is the share of steps that width was there."""
        lost = (self.path * self.costs).double().cpu()
        left = lost.flip(-1).cumsum(-1).flip(-1)  # [L, H, D + 1, LEARNED], at all but the last width
        zeros = torch.zeros(*left.shape[:-2], 1)
        keys = torch.cat([left[..., :-1, :], zeros[..., None].expand(*left.shape[:-2], left.shape[-2] - 1, 2)], -1)
        values = torch.cat([left[..., -1, 1:], zeros, zeros], -1)
        return Losses(keys, values, left[..., 0].sum(-1))


class CalibrationPass(StoredPass):
    """A student that reads the middle as it is, and keeps its keys and values as leaves of the gradient.

    leaves: (layer, part) -> K and V, [B, H, T, D].
    outputs: of each layer its attention, [R, Hq, n, D], and what it would change by without the middle.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.leaves: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.outputs: list[tuple[Tensor, Tensor]] = []
        self.plain = Plan([p for p in self.plan.pieces if not p.scaled])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of this layer's rows."""
        out = super().attend(layer, q, k, v, scale)
        with torch.no_grad():
            self.outputs.append((out, fused_attention(q, *self.parts(layer, k, v), self.plain, scale) - out))
        return out

    def middle(self, layer: int, part: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a part as they are."""
        self.leaves[layer, part] = k.detach().requires_grad_(), v.detach().requires_grad_()
        return self.leaves[layer, part]


def closed_form(config: RunConfig, backbone: Backbone, means: Tensor | None) -> Losses:
    """Return the expected KL to dense, in nats an answer token, that each width costs by itself.

    It is the KL's second order in an error e of keys, values or a head's attention: E[(g . e)^2] / 2, where g is the
    gradient of the log probability of a label that is drawn from the model's own distribution. Rounding errors of
    different tokens are taken as independent, so that the squares of g e are summed. What a pruned channel lacks, and
    what attention loses without the middle of a head, are not, so that the sum of g e is squared.

    Documents are those of the run's tasks, which no step trains on.
    """
    layers, heads, dim = backbone.shape
    device = backbone.model.device
    keys = torch.zeros(layers, heads, dim, len(KEY_BITS), dtype=torch.float64, device=device)
    values = torch.zeros(layers, heads, len(KEY_BITS) - 1, dtype=torch.float64, device=device)
    empty = torch.zeros(layers, heads, dtype=torch.float64, device=device)
    generator = torch.Generator(device).manual_seed(config.seed)
    documents = config.mixture(backbone, per_length=config.data.documents)
    with Meter("closed form: what each width costs by itself", DOCUMENTS, "document") as meter:
        for i in range(DOCUMENTS):
            batch = collate(backbone, [documents[3 * HELD_OUT + i]]).to(device)
            prefix, question, _ = read(backbone.model, batch, config.trainer.prefill_kernel, means)
            _second_order(config, backbone, batch, prefix, question, generator, Losses(keys, values, empty))
            meter.update()
    return Losses(keys / DOCUMENTS, values / DOCUMENTS, empty / DOCUMENTS)


def _second_order(
    config: RunConfig, backbone: Backbone, batch: Batch, prefix: Prefix, question: Branch, generator: torch.Generator,
    losses: Losses,
) -> None:  # fmt: skip
    """Add what the widths cost on one document to the losses."""
    model, pruning, answers, (keys, values, empty) = backbone.model, config.pruning, batch.answers, losses
    whole = torch.full((*keys.shape[:2], keys.shape[2] + 1), float(WHOLE), device=keys.device)
    positions, k_positions = answer_positions(question, answers.ids, answers.lengths)
    state = CalibrationPass(
        prefix, question, positions, k_positions, whole, pruning.sink, pruning.window, "zero"
    )  # fmt: skip
    hidden = run_decoder(model, answers.ids, to_device(positions, answers.ids.device), state)
    rows = to_device(counted(answers.lengths, hidden.shape[1]).flatten().nonzero().squeeze(1), hidden.device)
    if not state.leaves:
        return
    inputs = [x for pair in state.leaves.values() for x in pair] + [out for out, _ in state.outputs]
    factor = 1 / (2 * len(rows) * DRAWS)
    for _ in range(DRAWS):
        pulled = _towards_labels(Head.of(model), hidden.detach().flatten(0, 1)[rows], generator)
        found = torch.autograd.grad(hidden.flatten(0, 1)[rows], inputs, pulled.to(hidden.dtype), retain_graph=True)
        for layer, (d_out, (_, change)) in enumerate(zip(found[-len(state.outputs) :], state.outputs, strict=True)):
            of_branches = (d_out.double() * change).sum((2, 3)).unflatten(1, (empty.shape[1], -1)).sum(-1)  # [R, H]
            empty[layer] += of_branches.square().sum(0) * factor
        for number, ((layer, part), (k, v)) in enumerate(state.leaves.items()):
            d_k, d_v = (x.double() for x in found[2 * number : 2 * number + 2])
            keys[layer, :, :, 0] += (d_k * k.detach()).sum(2).square().sum(0) * factor
            first, v = state.first(part), v.detach().mT
            k = state.branches(part, k.detach())  # the gradient of padding is 0
            k, d_k = k[..., first:, :], d_k.unflatten(2, k.shape[2:4])[..., first:, :]
            for i, bits in enumerate(KEY_BITS[1:-1]):
                width = torch.full((1, 1), float(bits), device=k.device)
                error = rounded(k, width, GROUP).double() - k
                keys[layer, :, :, i + 1] += (d_k * error).square().sum((0, 2, 3)) * factor
                error = rounded(v, width, value_group(v.shape[-2])).double() - v
                values[layer, :, i] += (d_v.mT * error).square().sum((0, 2, 3)) * factor


def _towards_labels(head: Head, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Return the gradient of the log probability of labels drawn at each of the hidden states [rows, hidden]."""
    found = []
    for rows in hidden.split(max(1, LOGITS_AT_ONCE["cuda" if hidden.is_cuda else "cpu"] // head.weight.shape[0])):
        logits = head.logits(rows)
        away = -logits.softmax(-1)
        labels = torch.multinomial(-away, 1, generator=generator)
        found.append(head.pull_back(away.scatter_add_(1, labels, torch.ones_like(away[:, :1])), logits))
    return torch.cat(found)


def layouts(current: Run, backbone: Backbone, losses: Losses, means: Tensor | None) -> list[ChannelMask]:
    """Return the mask of each budget, with its layout and what a run's masks tell of their origin."""
    config, pruning = current.config, current.config.pruning
    metadata = {
        "model": config.model.name, "architecture": architecture(backbone.model.config),
        "config": current.fingerprint, "sink": pruning.sink, "window": pruning.window, "seed": config.seed,
        "lengths": [config.data.min_length, config.data.max_length], "alignment": pruning.align,
        "versions": {"torch": torch.__version__, "lightning": L.__version__},
    }  # fmt: skip
    found = allocate(*losses, pruning.budgets, pruning.align)
    return [
        ChannelMask(layout.keep, {**metadata, "bytes": budget}, means, layout)
        for layout, budget in zip(found, pruning.budgets, strict=True)
    ]
