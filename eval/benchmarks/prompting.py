"""Prompt templates with a {context}: filled, cut in the middle where they are too long, and split at the question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def truncate_middle(text: str, max_length: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """`text` if it has at most `max_length` tokens, else its first and last max_length // 2 tokens, decoded.

    Both halves are decoded on their own without special tokens, so re-encoding may differ by a token at the seam.
    """
    if max_length < 2:
        raise ValueError(f"max_length={max_length} leaves no prompt; use the model's context less the reply")
    ids = tokenizer.encode(text)
    if len(ids) <= max_length:
        return text
    half = max_length // 2
    return "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in (ids[:half], ids[-half:]))


def fill(
    template: str, context: str, fields: Mapping[str, object], tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
) -> tuple[str, str]:  # fmt: skip
    """(context with what stands before it, question: all that follows the context) of a filled template.

    tokenizer, max_length: cut both to so many tokens; None leaves them whole. Where that cuts into the question, all is
    context.
    """
    start, end = template.split("{context}")
    before, question = start.format(**fields), end.format(**fields)
    prompt = before + context + question
    if max_length is not None and tokenizer is not None:
        prompt = truncate_middle(prompt, max_length, tokenizer)
    if not prompt.endswith(question) or len(prompt) < len(question) + len(before):
        question = ""
    return prompt[: len(prompt) - len(question)], question
