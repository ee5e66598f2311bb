"""Prompts of a sample: through a chat model's own template, or as plain text for a base model.

The user's turn is context + question; the answer prefix stands after the assistant header, as in RULER.
"""

from __future__ import annotations

from typing import Any, Protocol

_MARK = "\x02user turn\x03"


class Asks(Protocol):
    """What a prompt is made of: a `Sample`, or any row with these three texts."""

    @property
    def context(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def answer_prefix(self) -> str: ...


def template(tokenizer: Any) -> tuple[str, str]:
    """What the tokenizer's chat template puts before a user's turn, and behind it up to the reply.

    Raises ValueError where the tokenizer has no chat template or the template does not show the turn as it is.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"tokenizer={name!r} has no chat template; set chat=False, or set its chat_template")
    turns = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    if text.count(_MARK) != 1:
        raise ValueError(f"tokenizer={name!r}: its chat template does not show the user's turn once; set chat=False")
    before, after = text.split(_MARK)
    return before, after


def prompt(sample: Asks, tokenizer: Any, chat: bool) -> str:
    """The whole text a model reads. chat: with the tokenizer's chat template.

    A template writes its own special tokens: tokenise with `add_special_tokens=not chat`.
    """
    before, after = template(tokenizer) if chat else ("", "")
    return before + sample.context + sample.question + after + sample.answer_prefix


def template_tokens(tokenizer: Any) -> int:
    """Tokens to reserve for the template (`Request.reserve`): those it adds to what a plain prompt has anyway."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in template(tokenizer)]
    return max(0, sum(map(len, ids)) - tokenizer.num_special_tokens_to_add(pair=False))
