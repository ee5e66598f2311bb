"""generate() whose decoding steps replay one captured CUDA graph.

    model.generate(**inputs, past_key_values=cache, custom_generate=graph_decoding, max_new_tokens=256)
    cache.generate(model, **inputs, max_new_tokens=256)     # the same, and a streamer works

A decoding step in Python launches over a thousand kernels and waits for each launch. The first step of a call runs as
usual, which compiles the kernels; the second is captured, and those after it are replays. The cache keeps what was
captured, so that a later call, also one after reset(), replays it from its second step on. All else stays
transformers': its loop, logits processors, sampling, stopping criteria and outputs. Where a step cannot be captured (on
a CPU, for a method that the kernel cannot read, for beams and assisted decoding), it runs as usual, with the same
result.

After every token, transformers waits until the GPU has said whether all rows have ended, and the GPU would then wait
for the next step to be launched. So the next step begins before the question, on a stream of its own. If all rows have
ended, it is taken back.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateOutput
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from leank.eval.cache.conversation import ASSISTED, drafts
from leank.eval.cache.graph import CAPTURE_FOR, DecodeLoop, KeptSteps, capturable, retractable, step_key
from leank.versions import CACHE

PLAIN = {"inputs_embeds", "output_attentions", "output_hidden_states"}  # inputs that a captured step does not have


class _Stepped:
    """A model whose forward passes over one token a row go through a `DecodeLoop`; all else is the model's.

    cache: with the prompt; longest: columns at which generation ends at the latest, the prompt's included.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, longest: int) -> None:
        self._model, self._cache, self._longest = model, cache, longest
        self._loop: DecodeLoop | None = None
        self._ahead = False  # whether steps begin before it is known that they are needed

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> ModelOutput:
        tokens: Tensor | None = inputs.get("input_ids")
        positions: Tensor | None = inputs.get("position_ids")
        if tokens is None or positions is None or tokens.shape[1] != 1 or any(inputs.get(name) for name in PLAIN):
            self.end()  # whatever was captured does not know of these tokens
            return self._model(**inputs)
        if self._loop is None:
            self._loop = DecodeLoop(self._model, self._cache, positions)
        elif not self._loop.captured:
            self._loop = self._captured(self._loop)
        logits = self._loop.step(tokens, inputs.get("attention_mask"))
        held: Any = {CACHE: self._cache}
        return CausalLMOutputWithPast(logits=logits[:, None], **held)

    def begin(self, columns: int, tokens: Tensor) -> None:
        """Begin the step after `tokens` [B, 1], the last of `columns`, unless generation ends there in any case."""
        if self._loop is not None and self._loop.captured and self._ahead and columns < self._longest:
            self._loop.begin(tokens)

    def end(self) -> None:
        """Take back a step that was begun and is not needed."""
        if self._loop is not None:
            self._loop.take_back()
            self._loop = None

    def _captured(self, loop: DecodeLoop) -> DecodeLoop:
        """The loop of an earlier call, if its step reads what is held now; else this one, captured if that pays."""
        if not capturable(self._cache):
            return loop
        cache: Any = self._cache
        self._ahead = retractable(cache)
        kept: KeptSteps = cache.steps
        if kept.loop is not None and kept.key == step_key(self._model, cache.addresses()):
            kept.loop.resume(loop.positions)
            return kept.loop
        if self._longest - cache.get_seq_length() > CAPTURE_FOR:  # else it costs more than it saves
            loop.capture()
            kept.loop, kept.key = loop, step_key(self._model, cache.addresses())
        return loop


class _NextStep(StoppingCriteria):
    """Among the stopping criteria the one that stops nothing, and lets the next step begin."""

    def __init__(self, stepped: _Stepped) -> None:
        self._stepped = stepped

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None, **kwargs: object) -> Tensor:
        """False for every row."""
        self._stepped.begin(input_ids.shape[1], input_ids[:, -1:])
        return input_ids.new_zeros(len(input_ids), dtype=torch.bool)

    def among(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """The criteria with this one: first beside transformers' own, else last, as a user's may read the cache."""
        own = all(type(criterion).__module__.startswith("transformers.") for criterion in criteria)
        return StoppingCriteriaList([self, *criteria] if own else [*criteria, self])


def graph_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    stopping_criteria: StoppingCriteriaList,
    **kwargs: Any,
) -> GenerateOutput | Tensor:
    """Greedy decoding and sampling for `model.generate(custom_generate=graph_decoding)`; beams run as usual.

    Only `CompressedCache.generate` takes streamers, assistants and tokenizers. Raises ValueError for assisted decoding.
    """
    mode: Any = type(model)  # the modes of generate() are methods of its class, without a public name
    if generation_config.num_beams > 1:
        given = {"generation_config": generation_config, "stopping_criteria": stopping_criteria}
        return mode._beam_search(model, input_ids, **given, **kwargs)
    if generation_config.is_assistant or any(getattr(generation_config, name, None) for name in ASSISTED):
        raise ValueError("custom_generate=graph_decoding cannot assist decoding; leave custom_generate out")
    stepped = _Stepped(model, kwargs[CACHE], generation_config.max_length)
    criteria = _NextStep(stepped).among(stopping_criteria)
    try:
        return mode._sample(
            stepped, input_ids, generation_config=generation_config, stopping_criteria=criteria, **kwargs
        )
    finally:
        stepped.end()


def generate(cache: Cache, model: PreTrainedModel, **kwargs: object) -> GenerateOutput | Tensor:
    """See `CompressedCache.generate`. Raises ValueError for ids that do not go on from what the cache holds."""
    own: Any = cache
    assisted = drafts(model, kwargs)
    own.conversation.check(own.held, kwargs, assisted)
    run: Any = model.generate
    streamer = kwargs.get("streamer")
    config: Any = kwargs.get("generation_config") or model.generation_config
    if assisted or kwargs.get("token_healing", config.token_healing) or config.stop_strings:
        return run(**{CACHE: cache}, **kwargs)
    words: Any = kwargs.pop("tokenizer", None)  # transformers hands it to no custom_generate
    if words is not None and kwargs.get("stop_strings"):
        stop: Any = kwargs.pop("stop_strings")
        given: Any = kwargs.get("stopping_criteria") or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([*given, StopStringCriteria(words, stop)])

    def decode(
        model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, **more: Any
    ) -> GenerateOutput | Tensor:
        return graph_decoding(model, input_ids, generation_config, streamer=streamer, **more)

    return run(**{CACHE: cache}, custom_generate=decode, **kwargs)
