"""Passes over a prompt that drop tokens on their way up: hooks on the decoder layers, no class is patched.

Each row may drop other tokens at another layer, so rows run one by one without padding; `stack` makes them one batch.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from leank.data_gen.amount import amount
from leank.eval.inference.observe import received
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import PromptPass
from leank.eval.methods.common.scored import Budget
from leank.versions import CACHE

Choose = Callable[[int, PromptLayer], Tensor | None]
POOLING = {"avg": torch.avg_pool1d, "max": torch.max_pool1d}


@contextmanager
def slicing(model: PreTrainedModel, choose: Choose) -> Iterator[None]:
    """While this is open, a prefill of one prompt drops the tokens that `choose` does not name.

    The prompt has no padding and comes in one piece. Tokens leave after a layer's MLP, and the others keep their RoPE
    positions.
    choose: called after each layer with its index and its PromptLayer (K, V, queries). It returns which of the columns
    that the layer holds go on up, ascending [T'], or None for all of them. The last one must stay, because the next
    token comes from it.
    """
    going: Tensor | None = None  # columns of the prompt that have come as far as this layer

    def before(
        index: int, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        if going is None:
            return None
        cos, sin = kwargs["position_embeddings"]
        kwargs[CACHE].layers[index].hold(going[None], cos.shape[1])
        sliced = {"position_embeddings": (cos[:, going], sin[:, going])}
        return args, {**kwargs, **sliced, "position_ids": kwargs["position_ids"][:, going]}

    def after(
        index: int, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any], hidden: Tensor
    ) -> Tensor | None:
        nonlocal going
        chosen = choose(index, kwargs[CACHE].layers[index])
        if chosen is None:
            return None
        going = chosen if going is None else going[chosen]
        return hidden[:, chosen]

    with ExitStack() as hooks:
        for index, layer in enumerate(model.get_decoder().layers):
            hooks.enter_context(layer.register_forward_pre_hook(partial(before, index), with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(partial(after, index), with_kwargs=True))
        yield


class RowPass(PromptPass):
    """A pass that runs row by row, on the whole prompt, as a layer drops tokens after all: `chunk` is not used."""

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        for index, layer in enumerate(DynamicCache(config=config).layers):
            if type(layer) is not DynamicLayer:
                raise ValueError(
                    f"layer {index} of {config.model_type} uses {type(layer).__name__}; a prefill that drops tokens"
                    " needs full attention in every layer: leave out `prefill` for this model"
                )

    @abstractmethod
    def row(self, model: PreTrainedModel, ids: Tensor, room: int, obs_queries: int) -> Prefill:
        """Run the pass over one prompt ids [1, T]; the other parameters are those of `run`."""

    @torch.no_grad()
    def run(
        self, model: PreTrainedModel, ids: Tensor, real: Tensor | None, room: int, obs_queries: int, chunk: int | None
    ) -> Prefill:
        prompts = [ids[b : b + 1] if real is None else ids[b : b + 1, real[b]] for b in range(len(ids))]
        if len(prompts) == 1:
            found = self.row(model, prompts[0], room, obs_queries)
        else:
            found = stack([self.row(model, prompt, 0, obs_queries) for prompt in prompts], room)
        return replace(found, given=[prompt.shape[1] for prompt in prompts])


def stack(rows: Sequence[Prefill], room: int) -> Prefill:
    """Passes of one prompt each as the rows of one, left-padded, with `room` more columns for what follows."""
    lengths = [row.columns for row in rows]
    columns, device = max(lengths), rows[0].logits.device
    real = torch.arange(columns, device=device) >= columns - torch.tensor(lengths, device=device)[:, None]
    layers = [
        _stack_layer(layers, columns, lengths, room) for layers in zip(*(row.layers for row in rows), strict=True)
    ]
    logits = torch.cat([row.logits for row in rows])
    at = [place for row in rows for place in row.selected_at or ()]
    return Prefill(layers, None if min(lengths) == columns else real, logits, columns, selected_at=at or None)


def _stack_layer(layers: Sequence[PromptLayer], columns: int, lengths: Sequence[int], room: int) -> PromptLayer:
    held = max(layer.keys.shape[2] for layer in layers)
    together = PromptLayer(columns + room)
    if any(layer.kept is not None for layer in layers):
        kept = torch.full((len(layers), held), -1, device=layers[0].keys.device)
        for row, layer, length in zip(kept, layers, lengths, strict=True):
            mine = torch.arange(length, device=row.device) if layer.kept is None else layer.kept[0]
            row[held - len(mine) :] = mine + columns - length
        together.hold(kept, columns)
    keys, values = (
        torch.cat([pad(part, (0, 0, held - part.shape[2], 0)) for part in parts])
        for parts in ([layer.keys for layer in layers], [layer.values for layer in layers])
    )
    together.update(keys, values)
    together.scaling, together.softmax = layers[0].scaling, layers[0].softmax
    queries = [layer.queries for layer in layers if layer.queries is not None]
    if queries:
        seen = max(q.shape[2] for q in queries)  # a shorter prompt's first ones are padding, as its keys are
        together.queries = torch.cat([pad(q, (0, 0, seen - q.shape[2], 0)) for q in queries])
    repeated = [layer.repeated for layer in layers if layer.repeated is not None]
    if repeated:
        together.repeated = torch.cat([pad(scores, (held - scores.shape[2], 0)) for scores in repeated])
    return together


def window_scores(layer: PromptLayer, window: int, kernel: int, pooling: str = "avg") -> Tensor:
    """Attention [T' - window] of the last `window` queries to what precedes them, pooled by head, summed over all."""
    assert layer.queries is not None
    attention = received(layer.queries[:, :, -window:], layer.keys, scaling=layer.scaling, softmax=layer.softmax)
    return POOLING[pooling](attention[..., :-window], kernel, 1, kernel // 2)[0].sum(0)


def window_and_best(scores: Tensor, count: int, window: int) -> Tensor:
    """The `count` highest of scores [T - window] and the window that follows them, as ascending columns."""
    following = torch.arange(len(scores), len(scores) + window, device=scores.device)
    return torch.cat([scores.topk(count).indices.sort().values, following])


def check_window(budget: Budget, window: int) -> None:
    """Raise ValueError if the budget leaves nothing outside the window."""
    if isinstance(budget, int) and budget <= window:
        raise ValueError(f"budget={budget} must be more than window={window}")


def layer_at(layer: int | None, of_32: int, config: PreTrainedConfig) -> int:
    """`layer`, None = as deep as layer `of_32` of 32. Raises ValueError if no layer is above it."""
    count = config.num_hidden_layers
    found = of_32 * count // 32 if layer is None else layer
    if not 0 <= found < count - 1:
        raise ValueError(
            f"layer={found} must be from 0 to {count - 2}: the model has {amount(count, 'layer')}, and tokens are "
            "dropped above it"
        )
    return found
