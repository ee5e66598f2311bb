"""KVzip's pass (arXiv 2505.23416, section 3): the model is asked to repeat the prompt, which scores its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from leank.channel_scores import wide
from leank.data_gen.chat import template
from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.inference.prefill import Prefill, PromptLayer, extend, prefill
from leank.eval.methods.axes import Observe, method
from leank.eval.methods.common.slicing import RowPass
from leank.kernels import SCORES_AT_ONCE
from leank.typed import Count, Positive

WHOLE = "\n\nRepeat the previous context exactly."
PART = "\n\nRepeat the part of the previous context exactly, starting with"
LED_BY = 8  # tokens before a later piece that are quoted in the request for it


class Words(NamedTuple):
    """Token ids of what asks for the first piece, of what asks for a later one, and of what comes before a reply."""

    whole: list[int]
    part: list[int]
    reply: list[int]


@method("repeat")
@dataclass(frozen=True)
class Repeat(RowPass):
    """Nothing is dropped; every layer gets the most attention that each token receives while the model repeats it.

      score_j = max over query heads of the group and queries t of softmax(q_t [K_sink, K_piece, K_said]^T / sqrt(D))_j

    The prompt is repeated in pieces of `piece` tokens. For each, the model reads a request, the header of a reply and
    the piece itself after the whole prompt. Its queries t score the piece's keys, beside the first `first` keys of the
    prompt and the keys of what it reads now. The choice of tokens `kvzip` takes these scores, which the layers
    hold as `repeated`.

    Deviations
    - The authors and kvpress leave a chat template's text before the context out of what is repeated. Here the whole
      prompt is repeated; `compress=before_question` leaves out the question.
    - The prompt comes in one piece, as in every pass that runs row by row.
    """

    piece: Positive = 2048  # m, how much is repeated at a time
    first: Count = 4  # first keys that take part in the softmax of every later piece
    _words: dict[str, Words] = field(default_factory=dict, repr=False, compare=False)

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        reply = template(tokenizer)[1] if getattr(tokenizer, "chat_template", None) else "\n"
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (WHOLE, PART, reply)]
        self._words["words"] = Words(*ids)

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[list[int], list[int]]:
        all_of_it = [length] * config.num_hidden_layers
        return all_of_it, all_of_it

    def pieces(self, prompt: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """First column, end, and what the model reads [1, n] to repeat each piece of a prompt [1, T].

        Raises RuntimeError before the tokenizer is known.
        """
        if not self._words:
            raise RuntimeError("the pass `repeat` asks in words: calibrate it with a tokenizer before it is used")
        words = self._words["words"]
        for start in range(0, prompt.shape[1], self.piece):
            end = min(prompt.shape[1], start + self.piece)
            quoted = prompt[0, max(0, start - LED_BY) : start].tolist()
            asked = [*words.part, *quoted] if start else words.whole
            yield start, end, torch.cat([prompt.new_tensor([[*asked, *words.reply]]), prompt[:, start:end]], 1)

    def row(self, model: PreTrainedModel, ids: Tensor, room: int, obs_queries: int) -> Prefill:
        pieces = list(self.pieces(ids))
        found = prefill(model, ids, None, max(room, *(said.shape[1] for _, _, said in pieces)), obs_queries)
        scores: list[list[Tensor]] = [[] for _ in found.layers]
        for start, end, said in pieces:
            layers = [layer.fork() for layer in found.layers]
            for layer in layers:
                layer.obs_queries = said.shape[1]
            extend(model, Cache(layers=layers), said, None)
            for of_layer, layer in zip(scores, layers, strict=True):
                of_layer.append(self.scores(layer, start, end))
        for layer, of_layer in zip(found.layers, scores, strict=True):
            layer.repeated = torch.cat(of_layer, -1)
        return found

    def scores(self, layer: PromptLayer, start: int, end: int) -> Tensor:
        """What columns of a layer that has read them again receive at most, [1, H, end - start]."""
        assert layer.queries is not None
        said, before = layer.queries.shape[2], min(self.first, start)
        keys = torch.cat([layer.keys[:, :, :before], layer.keys[:, :, start:end], layer.keys[:, :, -said:]], 2)
        return largest(layer.queries, keys, layer.scaling, layer.softmax)[..., before : before + end - start]


def largest(queries: Tensor, keys: Tensor, scaling: float | None = None, softmax: Softmax = PLAIN) -> Tensor:
    """The largest attention that each key receives from any query of its group, [B, H, T], float32 or wider.

    queries: [B, Hq, n, D]: the last one is at the last key, and none sees past itself; keys: [B, H, T, D].
    """
    (batch, heads, length, dim), new = keys.shape, queries.shape[2]
    grouped = queries.unflatten(1, (heads, -1)).to(wide(queries)) * (dim**-0.5 if scaling is None else scaling)
    seen, column = keys[:, :, None].to(grouped.dtype).mT, torch.arange(length, device=keys.device)
    found = grouped.new_zeros(batch, heads, length)
    block = max(1, SCORES_AT_ONCE["cuda" if keys.is_cuda else "cpu"] // (batch * queries.shape[1] * length))
    for start in range(0, new, block):
        rows = grouped[:, :, :, start : start + block]
        at = column[length - new + start :][: rows.shape[3]]
        logits = softmax.cap((rows @ seen).flatten(1, 2)).masked_fill(column > at[:, None], -torch.inf)
        found = found.maximum(softmax.weights(logits).unflatten(1, (heads, -1)).amax((2, 3)))
    return found
