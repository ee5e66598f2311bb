"""The mean keys that stand for pruned channels (`ChannelMask.mean_keys`), over documents that no step trains on."""

from __future__ import annotations

import torch
from torch import Tensor

from leank.backbone import Backbone
from leank_train.data import HELD_OUT, collate
from leank_train.fitting import mixture
from leank_train.forward.branching import prefill
from leank_train.settings import RunConfig

DOCUMENTS = 16


@torch.no_grad()
def calibrate(config: RunConfig, backbone: Backbone) -> Tensor:
    """Return the mean key (after RoPE) of middle tokens, [L, H, D] float32, over documents of the run's own tasks.

    The middle is what a reply's first token finds between sink and window. Every token counts alike.
    """
    documents, pruning = mixture(config, backbone, "stage1", 1), config.pruning
    total, tokens = torch.zeros(tuple(backbone.shape), dtype=torch.float64), 0
    for i in range(DOCUMENTS):
        batch = collate(backbone, [documents[3 * HELD_OUT + i]]).to(backbone.model.device)
        prefix = prefill(
            backbone.model, batch.documents.ids, batch.documents.lengths, kernel=config.trainer.prefill_kernel
        )
        middle = slice(pruning.sink, int(batch.documents.lengths[0]) - pruning.window)
        if middle.stop <= middle.start:
            continue
        total += torch.stack([keys[0, :, middle].double().sum(1) for keys in prefix.keys]).cpu()
        tokens += middle.stop - middle.start
    if not tokens:
        raise ValueError(
            f"pruning.compensation=mean: none of {DOCUMENTS} documents has a middle behind sink={pruning.sink} and "
            f"before window={pruning.window}; raise data.min_length"
        )
    return (total / tokens).float()
