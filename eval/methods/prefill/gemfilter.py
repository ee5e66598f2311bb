"""GemFilter (arXiv 2409.17422, Algorithm 1): an early layer picks the tokens; all layers then read those alone."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import avg_pool1d
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from leank.eval.inference.prefill import Prefill, PromptLayer, prefill
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Kernel
from leank.eval.methods.common.slicing import RowPass, layer_at, slicing
from leank.typed import Count, Positive


@method("gemfilter")
@dataclass(frozen=True)
class GemFilter(RowPass):
    """The k tokens with the largest products at the filter layer become a new prompt.

      score_j = avgpool_j(sum over query heads of q_T k_j)        (no scale, no softmax)

    The picked tokens keep their order and start at position 0; new tokens go on from position k. As in the authors'
    code, nothing forces the last token to be among them. Prompts of no more than k tokens are read whole.

    Deviation: the filter layer for another number of layers than 32 is proportional; the authors name one per model.
    """

    free = "budget"
    budget: Positive = 1024  # k, tokens picked
    layer: Count | None = None  # filter layer; None is as deep as layer 13 of 32
    kernel: Kernel = 5  # neighbours over which a score is averaged

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().check(config, tokenizer)
        layer_at(self.layer, 13, config)

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[list[int], list[int]]:
        picked = [min(length, self.budget)] * config.num_hidden_layers
        return picked, picked

    def row(self, model: PreTrainedModel, ids: Tensor, room: int, obs_queries: int) -> Prefill:
        if ids.shape[1] > self.budget:
            ids = ids[:, self.picked(model, ids)]
        return prefill(model, ids, None, room, obs_queries)

    def picked(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """The first pass: columns [k] of the prompt ids [1, T], ascending."""
        last = layer_at(self.layer, 13, model.config.get_text_config(decoder=True))
        found: list[Tensor] = []

        def choose(index: int, layer: PromptLayer) -> Tensor | None:
            if index != last:
                return None
            assert layer.queries is not None
            query = layer.queries[:, :, -1].unflatten(1, (layer.keys.shape[1], -1))  # [1, H, G, D]
            scores = (layer.keys @ query.mT).float().sum((1, 3))  # [1, T]
            found.append(avg_pool1d(scores, self.kernel, 1, self.kernel // 2)[0].topk(self.budget).indices)
            # the layers above are of no use here: the last token alone costs next to nothing
            return found[0].new_tensor([layer.keys.shape[2] - 1])

        with slicing(model, choose):
            prefill(model, ids, None, 0, 1)
        return found[0].sort().values
