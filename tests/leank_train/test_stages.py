"""A stage by itself: what its backward pass gives alpha in each precision of the model."""

import pytest
import torch

from leank import backbone as backbones
from leank.data_gen.tasks import Mixture
from leank_train.data import collate
from leank_train.recipes.paper import Stage1, Stage1Config
from leank_train.recipes.recipe import MaskPruning


@pytest.mark.parametrize(("reduction", "size"), [("official", 1e-4), ("paper", 100)])
@pytest.mark.parametrize("objective", ["l2", "kl"])
def test_gradients_survive_float16(model_folder, objective, reduction, size):
    """A mean over the units and tokens of a large model has gradients below 6e-8; a sum over them has large ones."""
    found = {}
    for dtype in ("float32", "float16"):
        backbone = backbones.load(str(model_folder), dtype)
        mixed = Mixture({"multikey": 1}, backbone.tokenizer, 300, 400, questions=2)
        config = Stage1Config(5, 0.1, objective=objective, reduction=reduction)
        stage = Stage1(backbone, config, MaskPruning(ratio=0.7, sink=4, window=32), torch.full(backbone.shape, 0.9))
        stage.backward(stage.distillation(collate(backbone, [mixed[0]])) * size)
        found[dtype] = stage.alpha.grad
    exact, half = found.values()
    assert (half - exact).norm() < 0.02 * exact.norm()  # 0.16 and 0.33 without `FLOAT16_FACTOR`
