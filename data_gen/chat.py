"""Prompts of a sample: through a chat model's own template, or as plain text for a base model.

The user's turn is context + question. The answer prefix follows the assistant header, as in RULER.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_MARK = "\x02user turn\x03"


class Asks(Protocol):
    """What a prompt is made of: a `Sample`, or any row with these three texts."""

    @property
    def context(self) -> str:
        """The document."""

    @property
    def question(self) -> str:
        """The text that follows the document."""

    @property
    def answer_prefix(self) -> str:
        """The start of the reply, which the model is given."""


def template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the text of the chat template before a user's turn, and the text from there to the reply.

    Raises ValueError if the tokenizer has no chat template, or if the template changes the turn.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"tokenizer={name!r} has no chat template; set chat=False, or set its chat_template")
    turns = [{"role": "user", "content": _MARK}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    if text.count(_MARK) != 1:
        raise ValueError(f"tokenizer={name!r}: its chat template does not show the user's turn once; set chat=False")
    before, after = text.split(_MARK)
    return before, after


def prompt(sample: Asks, tokenizer: PreTrainedTokenizerBase, chat: bool) -> str:
    """Return the whole text that a model reads.

    chat: whether the tokenizer's chat template wraps it. A template writes its own special tokens, so tokenise with
        `add_special_tokens=not chat`.
    """
    before, after = template(tokenizer) if chat else ("", "")
    return before + sample.context + sample.question + after + sample.answer_prefix


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the tokens that the template adds to those of a plain prompt (`Request.reserve`)."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in template(tokenizer)]
    return max(0, sum(map(len, ids)) - tokenizer.num_special_tokens_to_add(pair=False))
