"""What an analysis reads: a model with its tokenizer, samples by task and length, and a mask.

A prompt's Q and K come from the replay's own dense pass (`eval.inference.prefill`): every layer keeps K and V, and as
many of its last queries as the analysis wants. So memory grows with the tokens, never with their square.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from pydantic import InstanceOf
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from leank.backbone import Backbone
from leank.data_gen.amount import amount
from leank.data_gen.chat import template as chat_template
from leank.data_gen.task import Sample
from leank.eval.benchmarks.base import Row
from leank.eval.benchmarks.ruler import draw
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.inference.prefill import Prefill, PromptLayer, prefill
from leank.eval.inference.prompts import encode, overhead
from leank.eval.methods.channels.leank import LeanK
from leank.mask import ChannelMask


@dataclass(frozen=True)
class Source:
    """A model and a mask to analyse; either may be missing where an analysis does not need it."""

    model: PreTrainedModel | None = None  # a decoder with RoPE, on its device
    tokenizer: PreTrainedTokenizerBase | None = None  # the model's tokenizer
    mask: ChannelMask | None = None  # the mask
    name: str = ""  # what rows and figures call the model or the mask
    chat: bool | None = None  # whether prompts go through the chat template; None does if there is one
    seed: int = 7  # seed of the samples

    @classmethod
    def load(cls, settings: ModelConfig | None = None, mask: str | None = None, seed: int = 7) -> Self:
        """Load a model (None: none), a mask of a file (None: none), or both.

        Raises FileNotFoundError or ValueError for a model or a mask that cannot be used.
        """
        choice = None if mask is None else LeanK(mask)
        if settings is None:
            return cls(mask=None if choice is None else choice.loaded, name=mask or "", seed=seed)
        config, tokenizer = load_config(settings)
        if choice is not None:
            choice.check(config, tokenizer)
        found = None if choice is None else choice.loaded
        return cls(load_model(settings), tokenizer, found, settings.label, settings.chat, seed)

    def need_mask(self) -> ChannelMask:
        """Return the mask. Raises ValueError if there is none."""
        if self.mask is None:
            raise ValueError("mask is not set, and this analysis reads a mask; give mask=PATH")
        return self.mask

    def need_model(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return model and tokenizer. Raises ValueError if either is missing."""
        if self.model is None or self.tokenizer is None:
            raise ValueError("model is not set, and this analysis runs a model; give model.name=NAME")
        return self.model, self.tokenizer

    @property
    def config(self) -> PreTrainedConfig:
        """The decoder's config."""
        return self.need_model()[0].config.get_text_config(decoder=True)

    def sample(self, task: str, length: int, index: int) -> Sample:
        """Sample number `index` of a task at `length` tokens of prompt and reply; ValueError for a wrong length."""
        tokenizer, limit = self.need_model()[1], getattr(self.config, "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise ValueError(f"length={length} is more than the model's max_position_embeddings={limit}; lower it")
        room = length - overhead(tokenizer, self.chat)
        return draw(task, room, tokenizer, self.seed, index, None, "test")

    @property
    def backbone(self) -> Backbone:
        """Model and tokenizer as training knows them."""
        model, tokenizer = self.need_model()
        wrap = tokenizer.chat_template is not None if self.chat is None else self.chat
        before, after = chat_template(tokenizer) if wrap else ("", "")
        return Backbone(model, tokenizer, self.name, before, after)

    def ids(self, sample: Sample) -> Tensor:
        """The prompt's tokens up to the reply, [1, T], on the model's device."""
        model, tokenizer = self.need_model()
        row = Row(sample.task, str(sample.index), sample.context, sample.question, sample.answers,
                  sample.max_new_tokens, "ruler_all", answer_prefix=sample.answer_prefix)  # fmt: skip
        return torch.tensor([encode(tokenizer, row, self.chat).ids], device=model.device)

    def observe(self, ids: Tensor, queries: int = 0, room: int = 0, column_sums: bool = False) -> Prefill:
        """The dense pass over a prompt [1, T], which keeps the last queries of every layer, and leaves room behind it.

        column_sums: whether layers add up the attention that each key receives.
        Raises ValueError for a prompt of fewer tokens than `queries`.
        """
        if ids.shape[1] < queries:
            raise ValueError(f"a prompt of {amount(ids.shape[1], 'token')} has no {queries} queries; lower queries")
        return prefill(self.need_model()[0], ids, None, room, queries, None, column_sums)

    def layers(self, task: str, length: int, index: int, queries: int) -> list[tuple[int, PromptLayer]]:
        """Number and K, V and last `queries` queries of every layer with full attention, for one sample."""
        found = self.observe(self.ids(self.sample(task, length, index)), queries)
        return full_attention(found)


def full_attention(prompt: Prefill) -> list[tuple[int, PromptLayer]]:
    """The layers that have full attention, with their numbers; the others have no middle to prune."""
    return [(index, layer) for index, layer in enumerate(prompt.layers) if isinstance(layer, PromptLayer)]


def chosen_layers(wanted: Sequence[int] | None, count: int) -> list[int]:
    """The layers to show, by default the first, the middle and the last. Raises ValueError for unknown ones."""
    layers = sorted({0, count // 2, count - 1}) if wanted is None else list(wanted)
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        raise ValueError(f"layers={layers}: the model has the layers 0 to {count - 1}, not {wrong[0]}")
    return layers


def chosen_head(head: int, count: int, kind: str = "KV") -> int:
    """The head to show. Raises ValueError for one that the model does not have."""
    if head >= count:
        raise ValueError(f"head={head}: the model has the {kind} heads 0 to {count - 1}")
    return head


Given = InstanceOf[Source]  # the source as an argument of an analysis, whose settings alone are checked
