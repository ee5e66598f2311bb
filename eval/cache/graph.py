"""Decoding steps over a cache: launched one by one, or as replays of one captured CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.store import Store
from leank.versions import CACHE

CAPTURE_FOR = 16  # steps still to come at which capturing, which costs two or three, has paid


def capturable(cache: Cache) -> bool:
    """Whether a step over this cache can be captured now; see `CompressedCache.capturable`."""
    return getattr(cache, "capturable", False)


def stores(cache: Cache) -> list[Store]:
    """What the compressed layers of a cache hold; nothing before the prompt."""
    found = (layer.store for layer in cache.layers if isinstance(layer, CompressedLayer))
    return [store for store in found if store is not None]


def retractable(cache: Cache) -> bool:
    """Whether a replayed step can be taken back: it adds no attention to scores by which layers evict."""
    return all(store.eviction is None for store in stores(cache))


def retract(cache: Cache) -> None:
    """Forget the token of a replayed step that `CompressedCache.advance` has not counted; its slot is free again."""
    for store in stores(cache):
        store.seen_dev -= 1


class DecodeLoop:
    """Feeds a cache, which holds the prompt, one token per row and step.

    positions: int [B, 1] of each next token
    head: whether a step gives logits [B, vocabulary], else the decoder's hidden states [B, hidden]
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, positions: Tensor, head: bool = True) -> None:
        self.model, self.cache, self.positions, self.head = model, cache, positions.clone(), head
        self._graph: torch.cuda.CUDAGraph | None = None
        self._aside: torch.cuda.Stream | None = None  # where steps run that are begun ahead of time
        self._begun = False

    @property
    def captured(self) -> bool:
        """Whether steps are replays."""
        return self._graph is not None

    @torch.no_grad()
    def step(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits, or states, after tokens [B, 1]; mask: bool [B, columns, these tokens' included], False = padding.

        Once captured, they lie in memory that the next step overwrites. A step that was begun takes the tokens
        that it was begun with.
        """
        if self._graph is None:
            return self._forward(tokens, mask)
        if self._begun:
            self._join()
        else:
            self._tokens.copy_(tokens)
            self._graph.replay()
        self._advance(1)
        return self._out

    def begin(self, tokens: Tensor) -> None:
        """Start the captured step after tokens [B, 1] beside what follows here; `step` ends it, or `take_back`.

        The step runs after all that was launched so far, on a stream of its own. What is launched next, and waited for,
        runs at the same time; it must not touch the cache.
        """
        assert self._graph is not None
        self._tokens.copy_(tokens)
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream(self._aside.device))
        with torch.cuda.stream(self._aside):
            self._graph.replay()
        self._begun = True

    def take_back(self) -> None:
        """Undo a step that was begun, if there is one: the cache is as if it had not been."""
        if self._begun:
            self._join()
            retract(self.cache)
            self.positions.sub_(1)

    def _join(self) -> None:
        """Let what is launched from now on wait for the step that was begun."""
        self._begun = False
        if self._aside is not None:
            torch.cuda.current_stream(self._aside.device).wait_stream(self._aside)

    def _advance(self, tokens: int) -> None:
        if capturable(self.cache):  # a static cache counts on the device
            self.cache.advance(tokens)  # type: ignore[attr-defined]

    def _forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        run = self.model if self.head else self.model.base_model
        out = run(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=self.positions,
            use_cache=True,
            **{CACHE: self.cache},
        )
        self.positions.add_(1)
        return (out.logits if self.head else out.last_hidden_state)[:, -1]

    def resume(self, positions: Tensor) -> None:
        """Go on from another prompt, which lies where the captured step reads; positions: as for a new loop."""
        self._advance(0)
        self.positions.copy_(positions)

    def capture(self) -> None:
        """Make the steps that follow replays of a captured one; a first step must have compiled the kernels.

        Captured steps take no mask: a compressed cache remembers its padding. Nothing is appended to the cache here.
        A process that has run torch.profiler launches the step ten times as slowly, unless TEARDOWN_CUPTI=1 was set
        before: docs/lab/generation.md#profiled-processes.
        Raises torch.OutOfMemoryError if the graph does not fit.
        """
        self._advance(0)  # a flush may have outdated a schedule, which cannot be made while capturing
        self._tokens = torch.zeros_like(self.positions)
        graph = torch.cuda.CUDAGraph()
        try:
            # the outer context: a capture that fails leaves its own stream the current one
            with torch.no_grad(), torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                self._out = self._forward(self._tokens)
        except RuntimeError as error:  # ending a failed capture raises an error of its own, with that one's words
            if "out of memory" in f"{error} {error.__context__}".lower():
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        self._graph, self._aside = graph, torch.cuda.Stream(self.positions.device)


@dataclass
class KeptSteps:
    """Captured steps that a cache keeps from one call of generate() to the next, through reset()."""

    loop: DecodeLoop | None = None  # the loop whose step was captured, None = none yet
    key: tuple[object, ...] = ()  # of `step_key` when it was captured

    def __reduce__(self) -> tuple[type[KeptSteps], tuple[()]]:  # a copy of a cache lies at other addresses
        return KeptSteps, ()


def step_key(model: PreTrainedModel, addresses: tuple[object, ...]) -> tuple[object, ...]:
    """Equal at two moments if a step captured at one can be replayed at the other; addresses: those of the cache."""
    weights = (tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
    return id(model), model.training, model.config._attn_implementation, *weights, *addresses
