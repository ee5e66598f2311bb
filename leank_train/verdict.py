"""The verdict on a trained mask: whether documents that nobody trained on confirm it.

KL(dense || pruned) at answer tokens, with the mask as it is deployed, is measured on the run's own tasks and on natural
text, for the mask and for those that it has to beat: the cut of stage 1's scores, the run's masks at higher ratios, the
closed form's that learning has corrected, the lowest frequencies, and no middle at all. A layout of bits has to beat
the run's layouts of fewer bytes, the closed form at equal bytes, equal bits everywhere, and no middle. A mask that one
of them beats is `doubted`: the run says so, and the mask's file says so whenever it is loaded.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from leank import stats
from leank.backbone import Backbone
from leank.channel_scores import lowest_frequencies
from leank.data_gen.tasks import Mixture
from leank.head import Head, check_head
from leank.mask import ChannelMask
from leank.precision import Precision
from leank_train.data import HELD_OUT, Batch, collate
from leank_train.forward.branching import student
from leank_train.forward.stored import stored_student, widths_of
from leank_train.objective.kl import kl_loss
from leank_train.running.progress import Meter
from leank_train.settings import RunConfig
from leank_train.stages import read

TASKS, TEXT = "tasks", "text"  # the kinds of documents
MASK, STAGE1, FREQUENCIES, NO_MIDDLE = "leank", "stage1", "lowest_frequencies", "no_middle"
CLOSED_FORM = "closed_form"
NEGLIGIBLE = 1e-4  # nats per token; smaller differences are nobody's concern
LEAST_GAIN = 0.5  # a mask that keeps more than this share of the harm of dropping the middle has collapsed

Losses = Mapping[str, Mapping[str, list[float]]]
"""Name of a mask -> kind of documents -> KL to dense of each document, nats per answer token."""


@dataclass(frozen=True)
class Verdict:
    """KL to dense under each mask."""

    losses: Losses  # of each document; the same documents under every mask
    ratios: Mapping[str, float]  # name -> pruning ratio, of the masks of this run
    bytes: Mapping[str, float] = field(default_factory=dict)  # name -> share of dense's bytes, of layouts

    @property
    def metrics(self) -> dict[str, object]:
        """Means by mask and kind of documents, and the doubts."""
        means = {name: {kind: stats.mean([v]) for kind, v in found.items()} for name, found in self.losses.items()}
        return {"kl": means, "doubts": self.doubts()}

    def figures(self, name: str) -> dict[str, list[float]]:
        """Return the KL of one mask by kind of documents, with the ends of its 95% interval."""
        return {kind: [stats.mean([v]), *stats.interval([v])] for kind, v in self.losses[name].items()}

    def doubts(self) -> list[str]:
        """Return why the mask should not be used, a line each; none for a mask that held-out documents confirm."""
        return [doubt for kind in (TASKS, TEXT) for doubt in self._of_kind(kind)]

    def _of_kind(self, kind: str) -> Iterator[str]:
        mine = self._mean(MASK, kind)
        where = f"on held-out {kind} its KL to dense is {mine:.2g} nats a token"
        without = self._mean(NO_MIDDLE, kind)
        if self.beats(NO_MIDDLE, MASK, kind):
            yield f"{where}, worse than with no middle at all ({without:.2g}); train longer or at a lower ratio"
        elif kind == TASKS and mine > max(NEGLIGIBLE, LEAST_GAIN * without):
            yield f"{where}, and {without:.2g} with no middle at all: it has collapsed; train a lower ratio"
        rivals = {
            FREQUENCIES: "with the lowest frequencies, which cost no training; raise stage1.steps",
            STAGE1: "without stage 2: use the mask in stage1/, or lower stage2.lr",
            CLOSED_FORM: f"with the closed form, which costs no training: use masks/{CLOSED_FORM}.safetensors",
        }
        for name, ratio in sorted(self.ratios.items(), key=lambda item: item[1]):
            if ratio > self.ratios[MASK]:
                rivals[name] = f"at ratio={ratio:g}, which prunes more: use masks/{name}.safetensors"
        for name, share in sorted(self.bytes.items(), key=lambda item: -item[1]):
            if share < self.bytes[MASK] or name == CLOSED_FORM:
                rivals[name] = f"at bytes={share:.3g} with {name}: use masks/{name}.safetensors"
        for name, how in rivals.items():
            if name in self.losses and self.beats(name, MASK, kind):
                yield f"{where}, and {self._mean(name, kind):.2g} {how}"

    def beats(self, one: str, other: str, kind: str) -> bool:
        """Whether a mask is better than another on every resample of the documents, all but 2.5% of them."""
        differences = [a - b for a, b in zip(self.losses[other][kind], self.losses[one][kind], strict=True)]
        return stats.interval([differences])[0] > NEGLIGIBLE

    def _mean(self, name: str, kind: str) -> float:
        return stats.mean([self.losses[name][kind]])


def judge(config: RunConfig, backbone: Backbone, masks: Mapping[str, ChannelMask]) -> Verdict | None:
    """Measure the masks of a run, by name, and those that they have to beat.

    masks: `MASK`, `STAGE1`, and others of higher or lower ratios; with layouts of bits no `STAGE1`, and other bytes.
    Returns None where it cannot be measured by one process (shared weights or contexts), or the model has no head.
    """
    documents = config.validation.heldout
    if not documents or config.trainer.shard_weights or config.trainer.sequence_parallel > 1:
        return None
    try:
        check_head(backbone.model)
    except ValueError:
        return None
    layouts = masks[MASK].precision is not None
    ratios = {name: mask.pruning_ratio for name, mask in masks.items() if name != STAGE1 and not layouts}
    shares = {name: mask.middle_bytes for name, mask in masks.items() if layouts}
    compared: dict[str, Tensor | Precision] = {name: mask.precision or mask.keep for name, mask in masks.items()}
    compared[NO_MIDDLE] = torch.zeros(tuple(backbone.shape), dtype=torch.bool)
    if config.pruning.ratio and not layouts:
        with suppress(ValueError):  # a model that rotates only part of a head has no such mask
            compared[FREQUENCIES] = lowest_frequencies(backbone.model.config, config.pruning.ratio).keep
    losses: dict[str, dict[str, list[float]]] = {name: {TASKS: [], TEXT: []} for name in compared}
    with Meter("verdict: measures the mask on documents that no step has seen", 2 * documents, "document") as meter:
        for kind, batch in _documents(config, backbone, documents):
            for name, loss in _divergences(config, backbone, batch, compared, masks[MASK].mean_keys).items():
                losses[name][kind].append(loss)
            meter.update()
    return Verdict(losses, ratios, shares)


def _documents(config: RunConfig, backbone: Backbone, count: int) -> Iterator[tuple[str, Batch]]:
    """Yield documents of the run's tasks, and as many of natural text of the test split."""
    for kind, mixture in mixtures(config, backbone).items():
        for i in range(count):
            yield kind, collate(backbone, [mixture[2 * HELD_OUT + i]]).to(backbone.model.device)


def mixtures(config: RunConfig, backbone: Backbone) -> dict[str, Mixture]:
    """Return the documents of the verdict by kind, of which those from `2 * HELD_OUT` on are for it alone."""
    tasks = config.mixture(backbone)
    return {TASKS: tasks, TEXT: replace(tasks, weights={"text": 1.0}, essays=None, text=None, split="test")}


@torch.no_grad()
def _divergences(
    config: RunConfig, backbone: Backbone, batch: Batch, masks: Mapping[str, Tensor | Precision],
    mean_keys: Tensor | None,
) -> dict[str, float]:  # fmt: skip
    """Return KL to dense under each mask, `keep` or a layout; the document and its questions are read once."""
    model, pruning = backbone.model, config.pruning
    prefix, question, full = read(model, batch, config.trainer.prefill_kernel, mean_keys)
    head, found = Head.of(model), {}
    for name, keep in masks.items():
        form, scores = (student, keep) if isinstance(keep, Tensor) else (stored_student, widths_of(keep))
        pruned = form(
            model, prefix, question, batch.answers.ids, batch.answers.lengths, scores.to(model.device, torch.float32),
            sink=pruning.sink, window=pruning.window, empty_heads="drop",
        )  # fmt: skip
        found[name] = float(kl_loss(head, full, pruned, batch.answers.lengths))
    return found
