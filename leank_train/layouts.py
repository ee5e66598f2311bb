"""Learn a layout of bits: how many bits each channel of K, and each head's V, deserves under a budget of bytes.

`closed_form` says what each width costs by itself, to second order. Learning corrects it: a block of K, the V of a
head, and the drop of a head's middle cost the closed form's loss times a factor f, and

    minimise  d(H_full, H_stored(w(f, b))) / expected(b)        over factors f, from 1, at a budget b of each step

where w(f, b) are the widths that the losses times f are worth at the budget b (reverse water-filling: what gains more
per byte than a waterline is stored), H_stored is the student of `leank_train.forward.stored`, which reads the middle in
w bits, and expected(b) is the closed form's loss at this budget. `leank.allocation` gives out the bytes of every budget
by the losses times the mean of f over the last half of the steps.

With widths of 0 and 16 bits alone, and a budget of channels, this learns masks: `MaskStage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from leank import stats
from leank.allocation import Grid, allocate, blocks, channel_scores, first_gains, gains
from leank.backbone import Backbone
from leank.data_gen.amount import amount
from leank.eval.cache.attention.softmax import Softmax
from leank.head import LOGITS_AT_ONCE, Head
from leank.mask import ChannelMask
from leank.precision import GROUP, KEY_BITS, VALUE_BITS, WHOLE, value_group
from leank.tensor_files import read_checkpoint, write_checkpoint
from leank_train.data import HELD_OUT, Batch, collate
from leank_train.forward.branching import Branch, Prefix, answer_positions
from leank_train.forward.fused import fused_attention
from leank_train.forward.hook import run_decoder
from leank_train.forward.plan import Plan, to_device
from leank_train.forward.stored import LEAST, StoredPass, rounded, stored_student
from leank_train.objective.distill import counted
from leank_train.objective.steering import AUTO
from leank_train.run_folder import Run
from leank_train.running.parallel import Division
from leank_train.running.preempt import Signals
from leank_train.running.progress import Meter
from leank_train.running.recorder import check_origin, restoring
from leank_train.settings import RunConfig
from leank_train.stages import PruningConfig, Stage, StageConfig, read

SPAN = 1.5  # factors lie between e^-SPAN and e^SPAN
SOFT = (
    1.5  # nats of gain per bit over which a width comes; one bit makes squared errors four times, so 1.4 nats, smaller
)
HIGHEST = 0.35  # budget of a step: with more bytes nothing is lost that could be learned from
NOISE = 1e-4  # nats an answer token; differences below it are not worth learning
RATE = 0.1  # of all steps together, if single documents moved alpha at random: the noise of the factors
DRAWS = 4  # of the closed form: labels drawn for each answer token
SHRINK = 0.02  # share of their mean by which variances grow, so that no basis is nearly singular
# Times a document's number, added to the run's seed, this seeds its draws, whichever rank has it. A CPU's generator
# takes the lower 32 bits of a seed alone.
DOCUMENT_SEEDS = 1_000_003


class Losses(NamedTuple):
    """What `leank.allocation.allocate` takes: of keys [L, H, D, 6], of values [L, H, 5], of empty heads [L, H].

    `MaskStage` takes those of masks: of keys [L, H, D, 2], pruned and whole, of values [L, H, 1], which are 0.
    """

    keys: Tensor
    values: Tensor
    empty: Tensor


class LayoutStage(Stage):
    """Learn the factors f = e^(SPAN (2 alpha - 1)), [L, H, D / align + 2]: of every block of K, of V, and of the drop.

    A width is *filled* from 0 to 1 as its gain, in nats, rises from SOFT / 2 below the waterline to SOFT / 2 above.
    """

    path: Tensor
    gains: Tensor
    saved: Tensor
    costs: Tensor
    steps: Tensor
    order: Tensor
    smallest: Tensor
    empty: Tensor
    key_bits: tuple[int, ...] = KEY_BITS
    value_bits: tuple[int, ...] = (*VALUE_BITS, WHOLE)  # V has one width less than K, so that the last step is none
    learned = "by how much the closed form's losses are wrong"
    rounds = True  # whether the student reads rounded numbers

    def __init__(
        self, backbone: Backbone, config: StageConfig, pruning: PruningConfig, closed: Losses,
        key_basis: Tensor | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Start at the losses of the closed form in this basis, None = of channels; see `Stage`."""
        (layers, heads, dim), align = backbone.shape, pruning.align
        if config.lr == AUTO:
            config = replace(config, lr=RATE / max(1, config.steps) ** 0.5)
        super().__init__(backbone, config, pruning, torch.full((layers, heads, dim // align + 2), 0.5), **more)
        self.key_basis = key_basis
        self.closed = Losses(*(losses.detach().double().cpu() for losses in closed))
        keys, values, empty = self.closed
        order, self.blocks = blocks(keys, align)
        grid, ends = self.grid(dim), len(self.key_bits) - 2
        of_keys, of_heads = gains(self.blocks, align * grid.keys), first_gains(self.blocks, values, empty, align, grid)
        # V has one width less than K; a head has one step, which pays for V in the fewest bits, and for one block
        rest = F.pad(gains(values, grid.values), (0, 1)), F.pad(of_heads[..., None], (0, ends))
        found = torch.cat([of_keys, torch.stack(rest, 2)], 2)
        first = F.one_hot(of_keys[..., 0].argmax(-1), dim // align)[..., None].bool() & (of_keys == of_keys[..., :1])
        paid = torch.where(first, of_keys.maximum(of_heads[..., None, None]), of_keys)
        costs = torch.stack(
            [
                *(align * grid.keys.diff()).expand(dim // align, -1),
                F.pad(grid.values.diff(), (0, 1)),
                F.pad(grid.values[:1], (0, ends)),
            ]
        )
        self.dense = float(grid.keys[-1] * dim + grid.values[-1]) * layers * heads  # bits of a token
        widths = torch.tensor([self.key_bits, self.value_bits]).diff()
        widths = torch.stack([*widths[:1].expand(dim // align, -1), widths[1]])
        for name, buffer in {
            # of each next width, [L, H, D / align + 2, 5]: the logarithm of its gain, the loss that it saves; its bits
            "gains": torch.cat([paid, found[:, :, -2:]], 2).clamp(min=1e-30).log().float(),
            "saved": (found * costs).float(),
            "costs": costs.float(),  # [D / align + 2, 5]
            "steps": widths.float(),  # [D / align + 1, 5], bits of a number
            "order": order,
            "smallest": (self.blocks[..., 0].sum(-1) + values[..., 0]).float(),  # a head's loss at the smallest widths
            "empty": empty.float(),
            "path": torch.zeros_like(self.alpha.detach()),  # the sum of alpha over the last half of the steps
        }.items():
            self.register_buffer(name, buffer)

    def grid(self, dim: int) -> Grid:
        """Return what the widths cost."""
        return Grid.of_layouts(dim)

    @property
    def lowest(self) -> float:
        """The lowest budget to learn."""
        return self.pruning.budgets[0]

    @property
    def result(self) -> Tensor:
        """The mean of alpha over the last half of the steps."""
        return self.path

    def fills(self, waterline: Tensor) -> Tensor:
        """Return which share of each next width is there, [L, H, D / align + 2, 5].

        waterline: the logarithm of a loss per bit; what gains more is stored.
        """
        factors = SPAN * (2 * self.alpha[..., None] - 1)
        return ((self.gains + factors - waterline) / SOFT + 0.5).clamp(0, 1)

    def bytes(self, fills: Tensor) -> Tensor:
        """Return the share of dense's bytes that a budget counts, scales too; a head keeps both K and V, or neither."""
        bits = (fills * self.costs).sum(-1)
        whole = bits[..., -1] + fills[..., -1, 0] * bits[..., :-1].sum(-1)
        return whole.sum() / self.dense

    def waterline(self, budget: float) -> Tensor:
        """Return the waterline at which the middle has the bytes of a budget; its gradient keeps them."""
        with torch.no_grad():
            low, high = self.gains.new_tensor(-100.0), self.gains.new_tensor(100.0)
            for _ in range(50):
                line = (low + high) / 2
                above = self.bytes(self.fills(line)) > budget
                low, high = torch.where(above, line, low), torch.where(above, high, line)
            near = 0.05 * SOFT
            slope = (self.bytes(self.fills(high - near)) - self.bytes(self.fills(high + near))) / (2 * near)
        found = self.bytes(self.fills(high))
        return high + (found - found.detach()) / slope.clamp(min=1e-9)

    def widths(self, fills: Tensor) -> Tensor:
        """Return the widths of K and V in bits, and the shares of heads, [L, H, D + 2]."""
        widths = (fills[..., :-1, :] * self.steps).sum(-1)
        keys = widths[..., :-1].repeat_interleave(self.pruning.align, -1)
        keys = torch.zeros_like(keys).scatter(-1, self.order, keys)
        return torch.cat([keys, self.value_bits[0] + widths[..., -1:], fills[..., -1, :1]], -1)

    def expected(self, fills: Tensor) -> Tensor:
        """Return the closed form's loss, in nats an answer token."""
        saved = (fills * self.saved)[..., :-1, :].sum((-1, -2))
        share = fills[..., -1, 0]
        return (share * (self.smallest - saved) + (1 - share) * self.empty).sum()

    def budget(self) -> float:
        """Return the budget of this step, of which the logarithms lie evenly from the lowest budget to `HIGHEST`."""
        low = self.lowest
        return low * (max(low, HIGHEST) / low) ** stats.evenly(self.trainer.global_step)

    def student(self, prefix: Prefix, question: Branch, batch: Batch, beta: Tensor | None) -> Tensor:
        """Return the student's rows of the answers, [R, N, hidden]."""
        assert beta is None
        return stored_student(
            self.backbone.model, prefix, question, batch.answers.ids, batch.answers.lengths,
            self.widths(self.fills(self.waterline(self.budget()))),
            sink=self.pruning.sink, window=self.pruning.window, empty_heads=self.config.empty_heads,
            rounds=self.rounds, key_basis=self.key_basis,
        )  # fmt: skip

    def training_step(self, batch: Batch, index: int) -> dict[str, Tensor]:
        """Return the loss of one batch over what the closed form expects, and the share of dense's bytes."""
        found = super().training_step(batch, index)
        with torch.no_grad():
            fills = self.fills(self.waterline(self.budget()))
            expected = self.expected(fills).clamp(min=0) + NOISE
        return {**found, "loss": found["loss"] / expected, "bytes": self.bytes(fills).detach()}

    def optimizer_step(self, *given: Any, **more: Any) -> None:
        """Make a step, and take down where alpha is in the last half of them."""
        late = 2 * (self.trainer.global_step + 1) > self.config.steps
        super().optimizer_step(*given, **more)
        self.path += late * self.alpha.detach()

    def finish(self) -> None:
        """Make the path a mean."""
        self.path /= max(1, self.config.steps - self.config.steps // 2)

    def losses(self) -> Losses:
        """Return the closed form's losses times the factors; the channels of a block have equal ones."""
        factors = (SPAN * (2 * self.path - 1)).exp().double().cpu()
        _, values, empty = self.closed
        align, order = self.pruning.align, self.order.cpu()[..., None].expand_as(self.closed.keys)
        of_channels = (self.blocks / align * factors[..., :-2, None]).repeat_interleave(align, -2)
        keys = torch.zeros_like(self.closed.keys).scatter(-2, order, of_channels)
        return Losses(keys, values * factors[..., -2, None], empty * factors[..., -1])


class MaskStage(LayoutStage):
    """Learn the same factors for masks: a channel of K has 0 bits or all, and a budget is a share of K's channels.

    V costs nothing, since a pruning ratio does not count it. A channel that gains too little fades out by Eq. 1.
    """

    key_bits = (0, LEAST)  # the width from which nothing fades
    value_bits = (WHOLE, WHOLE)
    rounds = False

    def __init__(
        self, backbone: Backbone, config: StageConfig, pruning: PruningConfig, closed: Losses, **more: Any
    ) -> None:
        keys, values, empty = closed
        of_masks = Losses(keys[..., [0, -1]], torch.zeros_like(values[..., :1]), empty)
        super().__init__(backbone, config, pruning, of_masks, **more)

    def grid(self, dim: int) -> Grid:
        return Grid.of_masks()

    @property
    def lowest(self) -> float:
        return 1 - self.pruning.highest

    def channel_scores(self) -> Tensor:
        """Return the scores of channels, [L, H, D], of which the highest make the mask of any ratio."""
        losses = self.losses()
        return channel_scores(losses.keys[..., 0], losses.empty, self.pruning.align)


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


def closed_form(
    config: RunConfig, backbone: Backbone, means: Tensor | None, current: Run | None = None,
    signals: Signals | None = None, key_basis: Tensor | None = None,
) -> Losses:  # fmt: skip
    """Return the expected KL to dense, in nats an answer token, that each width costs by itself.

    It is the KL's second order in an error e of keys, values or a head's attention: E[(g . e)^2] / 2, where g is the
    gradient of the log probability of a label that is drawn from the model's own distribution. Rounding errors of
    different tokens are taken as independent, so that the squares of g e are summed. What a pruned channel lacks, and
    what attention loses without the middle of a head, are not, so that the sum of g e is squared.

    Documents are those of the run's tasks, which no step trains on, and which the processes divide among themselves.
    After each one of every process the folder of the run `current` has what was found so far, from which the same
    command goes on, with any number of processes; None keeps nothing. A signal to any process ends all.

    key_basis: [L, H, D, D], in whose coordinates keys are stored; None = in their channels.
    """
    layers, heads, dim = backbone.shape
    device = backbone.model.device
    shapes = (layers, heads, dim, len(KEY_BITS)), (layers, heads, len(KEY_BITS) - 1), (layers, heads)
    sums = Losses(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))
    division, passes = Division.of(config.trainer), DRAWS + 1  # of a document: forward, and backward for each draw
    documents = config.mixture(backbone, per_length=config.data.documents * division.width)
    count, found = config.data.calibration, 0
    if current is not None:
        found = _go_on(current, sums)
    phase = f"closed form: what each width costs by itself, from {amount(count, 'document')}"
    with Meter(phase, count * passes, "pass", done=found * passes, silent=not division.first) as meter:
        for i, counts, done in division.rounds(count, found):
            batch = collate(backbone, [documents[3 * HELD_OUT + i]]).to(device)
            generator = torch.Generator(device).manual_seed(config.seed + DOCUMENT_SEEDS * i)
            prefix, question, _ = read(
                backbone.model, batch, config.trainer.prefill_kernel, means, config.pruning.sink, division.ranks
            )
            of_one = Losses(*(torch.zeros_like(total) for total in sums))
            for _ in _second_order(config, backbone, batch, prefix, question, generator, of_one, division, key_basis):
                meter.update()
            if not counts:
                for one in of_one:
                    one.zero_()
            division.sum_(*of_one)
            for total, one in zip(sums, of_one, strict=True):
                total += one
            meter.update(done * passes - meter.n)
            if current is not None and current.first:
                state = {"of": _origin(current), "documents": done}
                write_checkpoint(_kept(current), state | {k: v.cpu() for k, v in sums._asdict().items()})
            division.leave_together(signals, device)
    return Losses(*(total / count for total in sums))


def key_bases(current: Run, backbone: Backbone, means: Tensor | None, signals: Signals | None = None) -> Tensor:
    """Return the basis of every KV head in whose coordinates errors of keys and keys are uncorrelated, [L, H, D, D].

    An error e of a key costs E[(g . e)^2] / 2 = tr(G E[e e^T]) / 2, g as in `closed_form`, G = E[g g^T]. Scales follow
    the keys of a page, whose covariance is S. In the basis B = G^1/2 U, U the eigenvectors of G^1/2 S G^1/2, G
    becomes 1 and S diagonal: no basis has a smaller product of the coordinates' variances, which is what high rates
    cost. Columns have length 1 then, which changes no code.

    Documents are others than those of `closed_form`, for coordinates that were chosen by some documents lose less there
    than anywhere else. The folder of the run keeps the bases, and the same command reads them.
    """
    config, (layers, heads, dim) = current.config, backbone.shape
    file, cure = current.out / "checkpoints" / "key_basis.ckpt", "remove it, and the bases are found anew"
    if file.exists():
        state = read_checkpoint(file, cure)
        check_origin(state, _origin(current), file, cure)
        with restoring(file, cure):
            return state["key_basis"].view(layers, heads, dim, dim)
    device, count, division = backbone.model.device, config.data.calibration, Division.of(config.trainer)
    total = torch.zeros(2, layers, heads, dim, dim, dtype=torch.float64, device=device)
    documents = config.mixture(backbone, per_length=config.data.documents * division.width)
    none = Losses(*(total.new_zeros(shape) for shape in ((layers, heads, dim), (layers, heads), (layers, heads))))
    phase = f"bases: in which errors of keys are uncorrelated, from {amount(count, 'document')}"
    with Meter(phase, count, "document", silent=not division.first) as meter:
        for i, counts, done in division.rounds(count):
            batch = collate(backbone, [documents[3 * HELD_OUT + count + i]]).to(device)
            generator = torch.Generator(device).manual_seed(config.seed + DOCUMENT_SEEDS * (count + i))
            prefix, question, _ = read(backbone.model, batch, config.trainer.prefill_kernel, means, config.pruning.sink)
            of_one = torch.zeros_like(total)
            for _ in _second_order(
                config, backbone, batch, prefix, question, generator, none, division, None, of_one[0]
            ):
                pass
            for layer, keys in enumerate(prefix.keys):
                middle = keys[:, :, config.pruning.sink :].double()
                pages = middle[:, :, : middle.shape[2] // GROUP * GROUP].unflatten(2, (-1, GROUP))
                apart = (pages - pages.mean(3, keepdim=True)).flatten(2, 3)
                of_one[1, layer] = (apart.mT @ apart).sum(0)
            total += of_one * counts
            meter.update(done - meter.n)
            division.leave_together(signals, device)
    division.sum_(total)
    found = uncorrelated(*total).cpu()
    if current.first:
        write_checkpoint(file, {"of": _origin(current), "key_basis": found})
    return found


def uncorrelated(weights: Tensor, keys: Tensor) -> Tensor:
    """Return B, float32, for which B^-1 weights B^-T and B^T keys B are diagonal; symmetric float64 [..., D, D] all.

    Both count as if their diagonals were larger by `SHRINK` of its mean.
    """
    of_errors, of_keys = (
        x + (SHRINK * x.diagonal(dim1=-2, dim2=-1).mean(-1) + 1e-30)[..., None, None] * torch.eye(x.shape[-1]).to(x)
        for x in (weights, keys)
    )
    values, vectors = torch.linalg.eigh(of_errors)
    half = (vectors * values.sqrt()[..., None, :]) @ vectors.mT
    basis = half @ torch.linalg.eigh(half @ of_keys @ half).eigenvectors.flip(-1)
    return F.normalize(basis, dim=-2, eps=0).float()


def _kept(current: Run) -> Path:
    return current.out / "checkpoints" / "closed_form.ckpt"


def _origin(current: Run) -> list[str]:
    return ["closed form", current.fingerprint]


def _go_on(current: Run, sums: Losses) -> int:
    """Put what an earlier process found into the sums, and return from how many documents it is."""
    if not (file := _kept(current)).exists():
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
    losses: Losses, division: Division, key_basis: Tensor | None = None, weights: Tensor | None = None,
) -> Iterator[None]:  # fmt: skip
    """Add what the widths cost on one document to the losses, and yield after every pass.

    Where processes have a share of the document each, the losses of all together are the document's.
    weights: [L, H, D, D], to which E[g g^T] of keys is added in place of losses; None = losses.
    """
    model, pruning, answers, (keys, values, empty) = backbone.model, config.pruning, batch.answers, losses
    whole = torch.full((*keys.shape[:2], keys.shape[2] + 2), float(WHOLE), device=keys.device)
    whole[..., -1] = 1  # the last one is no width, but the share of a head that is there
    positions, k_positions = answer_positions(question, answers.ids, answers.lengths)
    state = CalibrationPass(
        prefix, question, positions, k_positions, whole, pruning.sink, pruning.window, "zero", key_basis=key_basis
    )
    hidden = run_decoder(model, answers.ids, to_device(positions, answers.ids.device), state)
    rows = to_device(counted(answers.lengths, hidden.shape[1]).flatten().nonzero().squeeze(1), hidden.device)
    yield
    inputs = [x for pair in state.leaves.values() for x in pair] + [out for out, _ in state.outputs]
    factor = 1 / (2 * len(rows) * DRAWS)
    for _ in range(DRAWS):
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
            d_k, d_v = (x.double() for x in found[2 * number : 2 * number + 2])
            if weights is not None:
                weights[layer] += factor * (d_k.mT @ d_k).sum(0)
                continue
            lacking, counts = (d_k * k.detach()).sum(2), factor * (part == 0 or division.leads)
            if division.ranks is not None and part == 0:
                dist.all_reduce(lacking, group=division.ranks)
            keys[layer, :, :, 0] += lacking.square().sum(0) * factor * division.leads
            first, v = state.first(part), v.detach().mT
            k = state.branches(part, k.detach())  # the gradient of padding is 0
            k, d_k = k[..., first:, :], d_k.unflatten(2, k.shape[2:4])[..., first:, :]
            for i, bits in enumerate(KEY_BITS[1:-1]):
                width = torch.full((1, 1), float(bits), device=k.device)
                error = rounded(k, width, GROUP).double() - k
                keys[layer, :, :, i + 1] += (d_k * error).square().sum((0, 2, 3)) * counts
                error = rounded(v, width, value_group(v.shape[-2])).double() - v
                values[layer, :, i] += (d_v.mT * error).square().sum((0, 2, 3)) * counts
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


def layouts(
    current: Run, backbone: Backbone, losses: Losses, means: Tensor | None, basis: Tensor | None = None
) -> list[ChannelMask]:
    """Return the mask of each budget, with its layout and what a run's masks tell of their origin."""
    pruning = current.config.pruning
    metadata = {**current.origin(backbone), "alignment": pruning.align}
    found = allocate(*losses, pruning.budgets, pruning.align)
    return [
        ChannelMask(layout.keep, {**metadata, "bytes": budget}, means, layout, basis)
        for layout, budget in zip(found, pruning.budgets, strict=True)
    ]
