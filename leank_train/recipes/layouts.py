"""Learn a layout of bits, `pruning.bytes`: how many bits each channel of K, and each head's V, deserves under a budget.

The closed form (`leank_train.closed_form`) says what each width costs by itself, to second order. Learning corrects it:
a block of K, the V of a head, and the drop of a head's middle cost the closed form's loss times a factor f, and

    minimise  d(H_full, H_stored(w(f, b))) / expected(b)        over factors f, from 1, at a budget b of each step

where w(f, b) are the widths that the losses times f are worth at the budget b (reverse water-filling: what gains more
per byte than a waterline is stored), H_stored is the student of `leank_train.forward.stored`, which reads the middle in
w bits, and expected(b) is the closed form's loss at this budget. `leank.allocation` gives out the bytes of every budget
by the losses times the mean of f over the last half of the steps.

With widths of 0 and 16 bits alone, and a budget of channels, this learns masks: `leank_train.recipes.factors`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor

from leank import stats
from leank.allocation import Grid, allocate, blocks, check_align, first_gains, gains
from leank.backbone import Backbone
from leank.mask import ChannelMask
from leank.precision import KEY_BITS, VALUE_BITS, WHOLE
from leank.shape import DecoderShape
from leank.typed import OneOf, Share
from leank_train.closed_form import Losses, closed_form
from leank_train.data import Batch
from leank_train.forward.branching import Branch, Prefix
from leank_train.forward.stored import stored_student
from leank_train.objective.steering import AUTO
from leank_train.recipes.recipe import Learned, Recipe, Training
from leank_train.settings import need
from leank_train.stages import PruningConfig, Stage, StageConfig
from leank_train.verdict import CLOSED_FORM, EQUAL, MASK, equal

SPAN = 1.5  # factors lie between e^-SPAN and e^SPAN
SOFT = 1.5  # nats of gain per bit over which a width comes; a bit makes squared errors four times, so 1.4 nats, smaller
HIGHEST = 0.35  # budget of a step: with more bytes nothing is lost that could be learned from
NOISE = 1e-4  # nats an answer token; differences below it are not worth learning
RATE = 0.1  # of all steps together, if single documents moved alpha at random: the noise of the factors
# settings of scores (`leank_train.recipes.paper`), which factors have no use for
OF_SCORES = {"stage1.lam": AUTO, "stage1.l1": ..., "stage2.steps": 0, "stage2": ...}


@dataclass(frozen=True, kw_only=True)
class LayoutPruning(PruningConfig):
    """The layouts to learn."""

    # a budget, the share of dense's bytes that the middle may take
    bytes: Annotated[float, Gt(0), Le(1), "it is a share of dense's bytes, e.g. 0.3"]
    nested: Sequence[Annotated[Share, "it is a share of dense's bytes, e.g. 0.3"]] = ()  # other budgets
    # scales and zero points: "whole", two numbers in the model's dtype, or "packed" into 16 bits
    scales: Annotated[str, OneOf("whole", "packed")] = "whole"

    @property
    def budgets(self) -> list[float]:
        """All budgets, rising; `bytes` is among them."""
        return sorted({self.bytes, *self.nested})

    @property
    def packed(self) -> bool:
        """Whether scales are packed."""
        return self.scales == "packed"


@dataclass(frozen=True, kw_only=True)
class Layouts(Recipe):
    """Layouts of bits for several budgets, from one order of what the widths are worth."""

    where: ClassVar = "on a layout of bits (pruning.bytes)"
    elsewhere: ClassVar = {
        **OF_SCORES, "extra_ratios": [], "pruning.learns": ..., "pruning.ratio": ..., "pruning.rounding": ...
    }  # fmt: skip

    pruning: LayoutPruning

    def __post_init__(self) -> None:
        super().__post_init__()
        nested = self.pruning.nested
        need(0 not in nested, f"pruning.nested={list(nested)} has the budget 0; leave it out")

    def check_shape(self, shape: DecoderShape) -> None:
        try:
            check_align(shape.head_dim, self.pruning.align)
        except ValueError as error:
            need(False, f"pruning.{error}")

    def learn(self, training: Training) -> Learned:
        """Correct the closed form by factors, and give out the bytes of every budget; without a step, by it alone.

        Beside the layouts are those of the closed form, and equal bits.
        """
        pruning, backbone = self.pruning, training.backbone
        closed = closed_form(training.current, backbone, training.means, training.signals)
        stage = LayoutStage(
            backbone, self.stage1, pruning, closed, pruning.budgets[0], parallel=self.trainer,
            mean_keys=training.means,
        )  # fmt: skip
        record = training.fit(stage, "stage1")
        metadata = {**training.current.origin(backbone), "alignment": pruning.align}
        losses_of = {"layout": stage.losses(), CLOSED_FORM: closed} if self.stage1.steps else {"layout": closed}
        masks = {}
        for kind, losses in losses_of.items():
            found = allocate(*losses, pruning.budgets, pruning.align, pruning.packed)
            for budget, layout in zip(pruning.budgets, found, strict=True):
                own = MASK if kind == "layout" else kind
                name = own if budget == pruning.bytes else f"{kind}_{100 * budget:.12g}pct"
                masks[name] = ChannelMask(layout.keep, {**metadata, "bytes": budget}, training.means, layout)
        for bits in VALUE_BITS[:3]:
            layout = equal(backbone.shape, bits, pruning.packed)
            masks[f"{EQUAL}_{bits}bits"] = ChannelMask(layout.keep, metadata, None, layout)
        path = stage.path.detach().cpu().contiguous()
        alpha = path[..., :-2].repeat_interleave(pruning.align, -1)
        return Learned(masks, {"path": path}, alpha, {"stage1": record}, {"bytes": masks[MASK].middle_bytes})


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
        self, backbone: Backbone, config: StageConfig, pruning: PruningConfig, closed: Losses, lowest: float,
        **more: Any,
    ) -> None:  # fmt: skip
        """Start at the losses of the closed form; see `Stage`.

        lowest: the lowest budget to learn.
        """
        (layers, heads, dim), align = backbone.shape, pruning.align
        if config.lr == AUTO:
            config = replace(config, lr=RATE / max(1, config.steps) ** 0.5)
        super().__init__(backbone, config, pruning, torch.full((layers, heads, dim // align + 2), 0.5), **more)
        self.lowest = lowest
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
        return Grid.of_layouts(dim, self.pruning.packed)

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

    def student(self, prefix: Prefix, question: Branch, batch: Batch) -> Tensor:
        """Return the student's rows of the answers, [R, N, hidden]."""
        return stored_student(
            self.backbone.model, prefix, question, batch.answers.ids, batch.answers.lengths,
            self.widths(self.fills(self.waterline(self.budget()))),
            sink=self.pruning.sink, window=self.pruning.window, empty_heads=self.config.empty_heads,
            rounds=self.rounds, packed=self.pruning.packed,
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
