"""The means that stand for pruned channels (`leank.mask.Means`), over documents that no step trains on."""

from __future__ import annotations

import torch

from leank.backbone import Backbone
from leank.mask import Means
from leank_train.data import HELD_OUT, collate
from leank_train.fitting import mixture
from leank_train.forward.branching import prefill
from leank_train.settings import RunConfig

DOCUMENTS = 16


@torch.no_grad()
def calibrate(config: RunConfig, backbone: Backbone) -> Means:
    """Return mean keys (after RoPE) and values of the middle tokens of `DOCUMENTS` documents of the run's own tasks.

    The middle is what a reply's first token finds between sink and window. Every token counts alike.
    """
    documents, pruning = mixture(config, backbone, "stage1", 1), config.pruning
    sums, tokens = None, 0
    for i in range(DOCUMENTS):
        batch = collate(backbone, [documents[3 * HELD_OUT + i]]).to(backbone.model.device)
        prefix = prefill(
            backbone.model, batch.documents.ids, batch.documents.lengths, kernel=config.trainer.prefill_kernel
        )
        middle = slice(pruning.sink, int(batch.documents.lengths[0]) - pruning.window)
        if middle.stop <= middle.start:
            continue
        found = [torch.stack([x[0, :, middle].double().sum(1) for x in kv]) for kv in (prefix.keys, prefix.values)]
        sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
        tokens += middle.stop - middle.start
    if sums is None:
        raise ValueError(
            f"pruning.compensation=mean: none of {DOCUMENTS} documents has a middle behind sink={pruning.sink} and "
            f"before window={pruning.window}; raise data.min_length"
        )
    keys, values = ((x / tokens).float().cpu() for x in sums)
    return Means(keys, values)
