"""The verdict on the masks that a run leaves: whether documents that nobody trained on confirm them.

KL(dense || pruned) at answer tokens, with a mask as it is deployed, is measured on the run's own tasks and on natural
text, for every mask and for those that it has to beat, which prune as much or more: the cut of stage 1's scores, the
run's masks at higher ratios, the closed form's that learning has corrected, the lowest frequencies, and no middle at
all. A layout of bits has to beat what takes as many bytes or fewer: the run's other layouts, the closed form, equal
bits everywhere, KIVI's bits, and no middle. A mask that one of them beats is `doubted`: the run says so, and the mask's
file says so whenever it is loaded. One document of each kind gives figures, and no doubt and no interval.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from leank import stats
from leank.backbone import Backbone
from leank.channel_scores import lowest_frequencies
from leank.data_gen.amount import amount
from leank.data_gen.tasks import Mixture
from leank.head import Head, check_head
from leank.mask import ChannelMask
from leank.precision import Precision
from leank.shape import DecoderShape
from leank_train.data import HELD_OUT, Batch, collate
from leank_train.forward.branching import student
from leank_train.forward.stored import stored_student, widths_of
from leank_train.objective.kl import kl_loss
from leank_train.running.parallel import Division
from leank_train.running.preempt import Signals
from leank_train.running.progress import Meter
from leank_train.settings import RunConfig
from leank_train.stages import read

TASKS, TEXT = "tasks", "text"  # the kinds of documents
MASK, STAGE1, FREQUENCIES, NO_MIDDLE = "leank", "stage1", "lowest_frequencies", "no_middle"
CLOSED_FORM, EQUAL = "closed_form", "equal"
KIVI = {"kivi": 2, "kivi4": 4}  # methods of conf/method that are rivals -> their bits
KIVI_GROUP = 32  # numbers that share a scale there
SAME = 0.01  # by which ratios, and bytes in their own unit, may differ and still count as equal
NEGLIGIBLE = 1e-4  # nats per token; smaller differences are nobody's concern
LEAST_GAIN = 0.5  # a mask that keeps more than this share of the harm of dropping the middle has collapsed

Losses = Mapping[str, Mapping[str, list[float]]]
"""Name of a mask -> kind of documents -> KL to dense of each document, nats per answer token."""


@dataclass(frozen=True)
class Kivi:
    """KIVI's form of the middle: equal bits everywhere, in groups of KIVI's own size."""

    precision: Precision
    group: int  # numbers that share a scale and a zero point

    @classmethod
    def of(cls, shape: DecoderShape, bits: int) -> Self:
        """Return that of a model."""
        return cls(equal(shape, bits), math.gcd(KIVI_GROUP, shape.head_dim))

    @property
    def middle_bytes(self) -> float:
        """Bytes of a middle token over those of a dense one, scales counted."""
        return self.precision.share(self.group)


def equal(shape: DecoderShape, bits: int, packed: bool = False) -> Precision:
    """Return the layout with as many bits everywhere."""
    return Precision(*(torch.full(tuple(of), bits, dtype=torch.uint8) for of in (shape, shape[:2])), packed=packed)


@dataclass(frozen=True)
class Verdict:
    """KL to dense under each mask."""

    losses: Losses  # of each document; the same documents under every mask
    ratios: Mapping[str, float]  # name -> pruning ratio, of masks
    bytes: Mapping[str, float] = field(default_factory=dict)  # name -> share of dense's bytes, of layouts

    @property
    def metrics(self) -> dict[str, object]:
        """Means by mask and kind of documents, the number of documents of each kind, and the doubts by mask."""
        means = {name: {kind: stats.mean([v]) for kind, v in found.items()} for name, found in self.losses.items()}
        doubts = {name: found for name in [*self.ratios, *self.bytes] if (found := self.doubts(name))}
        return {"kl": means, "documents": self.documents, "bytes": dict(self.bytes), "doubts": doubts}

    @property
    def documents(self) -> int:
        """Documents of each kind."""
        return len(next(iter(self.losses.values()))[TASKS])

    def figures(self, name: str) -> dict[str, list[float]]:
        """Return the KL of one mask by kind of documents; from two on with the ends of its 95% interval."""
        more = self.documents > 1
        return {
            kind: [stats.mean([v]), *(stats.interval([v]) if more else ())] for kind, v in self.losses[name].items()
        }

    def doubts(self, name: str = MASK) -> list[str]:
        """Return why a mask should not be used, a line each; none for one that held-out documents confirm."""
        if self.documents < 2 or name.startswith(EQUAL) or name in (*KIVI, FREQUENCIES, NO_MIDDLE):
            return []
        return [doubt for kind in (TASKS, TEXT) for doubt in self._of_kind(name, kind)]

    def _of_kind(self, name: str, kind: str) -> Iterator[str]:
        mine = self._mean(name, kind)
        where = f"on {self.documents} held-out documents of {kind} its KL to dense is {mine:.2g} nats a token"
        without = self._mean(NO_MIDDLE, kind)
        if self.beats(NO_MIDDLE, name, kind):
            yield f"{where}, worse than with no middle at all ({without:.2g}); train longer or at a lower ratio"
        elif kind == TASKS and mine > max(NEGLIGIBLE, LEAST_GAIN * without):
            yield f"{where}, and {without:.2g} with no middle at all: it has collapsed; train a lower ratio"
        for rival, how in self._rivals(name).items():
            if rival in self.losses and self.beats(rival, name, kind):
                yield f"{where}, and {self._mean(rival, kind):.2g} {how}"

    def _rivals(self, name: str) -> dict[str, str]:
        """Return what a mask has to beat, and how to have it: what prunes as much or more, or takes no more bytes."""
        file = {other: "mask.safetensors" if other == MASK else f"masks/{other}.safetensors" for other in self.losses}
        found = {}
        for other, ratio in sorted(self.ratios.items(), key=lambda item: item[1]):
            if other == name or ratio < self.ratios.get(name, 2) - SAME:
                continue
            if other == FREQUENCIES:
                found[other] = "with the lowest frequencies, which cost no training; raise stage1.steps"
            elif other == STAGE1 and name == MASK:
                found[other] = "without stage 2: use the mask in stage1/, or lower stage2.lr"
            elif other == CLOSED_FORM:
                found[other] = f"with the closed form, which costs no training: use {file[other]}"
            elif ratio > self.ratios[name] and other != STAGE1:
                found[other] = f"at ratio={ratio:g}, which prunes more: use {file[other]}"
        for other, share in sorted(self.bytes.items(), key=lambda item: -item[1]):
            if other != name and share <= self.bytes.get(name, -1) * (1 + SAME):
                use = f"take the method {other}" if other in KIVI else f"use {file[other]}"
                found[other] = f"at bytes={share:.3g} with {other}: {use}"
        return found

    def beats(self, one: str, other: str, kind: str) -> bool:
        """Whether a mask is better than another on every resample of the documents, all but 2.5% of them."""
        differences = [a - b for a, b in zip(self.losses[other][kind], self.losses[one][kind], strict=True)]
        return stats.interval([differences])[0] > NEGLIGIBLE

    def _mean(self, name: str, kind: str) -> float:
        return stats.mean([self.losses[name][kind]])


def judge(
    config: RunConfig, backbone: Backbone, masks: Mapping[str, ChannelMask], signals: Signals | None = None
) -> Verdict | None:
    """Measure the masks of a run, by name, and those that they have to beat, on documents that the processes divide.

    masks: `MASK`, `STAGE1`, and others of higher or lower ratios; with layouts of bits no `STAGE1`, other bytes, and
        `EQUAL` bits, which are rivals alone.
    signals: one to any process ends all, with SystemExit.
    Returns None without documents, or if the model has no head.
    """
    documents = config.validation.heldout
    if not documents:
        return None
    try:
        check_head(backbone.model)
    except ValueError:
        return None
    layouts = masks[MASK].precision is not None
    ratios = {name: mask.pruning_ratio for name, mask in masks.items() if not layouts}
    shares = {name: mask.middle_bytes for name, mask in masks.items() if layouts}
    compared: dict[str, Tensor | Precision | Kivi] = {name: m.precision or m.keep for name, m in masks.items()}
    compared[NO_MIDDLE] = torch.zeros(tuple(backbone.shape), dtype=torch.bool)
    if layouts:
        rivals = {name: Kivi.of(backbone.shape, bits) for name, bits in KIVI.items()}
        compared |= rivals
        shares |= {name: one.middle_bytes for name, one in rivals.items()}
    elif isinstance(ratio := masks[MASK].metadata["ratio"], float) and ratio:
        with suppress(ValueError):  # a model that rotates only part of a head has no such mask
            compared[FREQUENCIES] = lowest_frequencies(backbone.model.config, ratio).keep
            ratios[FREQUENCIES] = ratios[MASK]
    found = _measure(config, backbone, documents, compared, masks[MASK].mean_keys, signals)
    losses = {
        name: {TASKS: of_mask[:documents], TEXT: of_mask[documents:]}
        for name, of_mask in zip(compared, found, strict=True)
    }
    return Verdict(losses, ratios, shares)


def _measure(
    config: RunConfig, backbone: Backbone, documents: int, compared: Mapping[str, Tensor | Precision | Kivi],
    mean_keys: Tensor | None, signals: Signals | None,
) -> list[list[float]]:  # fmt: skip
    """Return KL to dense under each of `compared`, on documents of the run's tasks, and then on as many of text."""
    division, device, count = Division.of(config.trainer), backbone.model.device, 2 * documents
    made = mixtures(config, backbone)
    losses = torch.zeros(len(compared), count, dtype=torch.float64, device=device)
    phase = f"verdict: measures {amount(len(compared), 'mask')} on {amount(count, 'document')} of no step"
    with Meter(phase, count * len(compared), "pass", silent=not division.first) as meter:
        for i, counts, done in division.rounds(count):
            kind, index = (TASKS, i) if i < documents else (TEXT, i - documents)
            batch = collate(backbone, [made[kind][2 * HELD_OUT + index]]).to(device)
            divergences = _divergences(config, backbone, batch, compared, mean_keys, division.ranks)
            for number, (_, loss) in enumerate(divergences):
                losses[number, i] += loss * (counts and division.leads)
                meter.update()
            meter.update(done * len(compared) - meter.n)
            division.leave_together(signals, device)
    division.sum_(losses)
    return losses.tolist()


def mixtures(config: RunConfig, backbone: Backbone) -> dict[str, Mixture]:
    """Return the documents of the verdict by kind, of which those from `2 * HELD_OUT` on are for it alone."""
    tasks = config.mixture(backbone)
    return {TASKS: tasks, TEXT: replace(tasks, weights={"text": 1.0}, essays=None, text=None, split="test")}


@torch.no_grad()
def _divergences(
    config: RunConfig, backbone: Backbone, batch: Batch, masks: Mapping[str, Tensor | Precision | Kivi],
    mean_keys: Tensor | None, ranks: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, float]]:  # fmt: skip
    """Yield KL to dense under each `keep`, layout and KIVI; the document and its questions are read once."""
    model, pruning = backbone.model, config.pruning
    prefix, question, full = read(model, batch, config.trainer.prefill_kernel, mean_keys, pruning.sink, ranks)
    head = Head.of(model)
    given = model, prefix, question, batch.answers.ids, batch.answers.lengths
    how: dict[str, Any] = {"sink": pruning.sink, "window": pruning.window, "empty_heads": "drop"}
    for name, keep in masks.items():
        if isinstance(keep, Tensor):
            pruned = student(*given, keep.to(model.device, torch.float32), **how)
        else:
            layout, group = (keep.precision, keep.group) if isinstance(keep, Kivi) else (keep, None)
            widths = widths_of(layout).to(model.device, torch.float32)
            pruned = stored_student(*given, widths, **how, group=group, packed=layout.packed)
        yield name, float(kl_loss(head, full, pruned, batch.answers.lengths))
