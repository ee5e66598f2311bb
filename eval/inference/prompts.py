"""From a benchmark row, or the turns of a conversation, to the token ids that the model reads."""

import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from leank.data_gen.chat import rendered
from leank.eval.benchmarks.base import Row

MARK = "the reply stands here"
THOUGHT = ("<think>", "</think>")  # what begins and ends a thought
SPECIALS = ("text", "as_is")
Span = tuple[int, int]
log = logging.getLogger("eval")


@dataclass(frozen=True)
class Prompt:
    """The tokens that the model reads."""

    ids: list[int]  # every token up to the reply
    question: int  # index of the first token that belongs to the question
    specials: str | None = None  # how names of special tokens in the sample's own text were read; None if it has none
    thinking: bool = False  # whether a thought has begun before the reply


def thinks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether replies may have thoughts: the vocabulary has their end as a token."""
    return THOUGHT[1] in tokenizer.get_vocab()


def without_thoughts(reply: str, thinking: bool) -> str | None:
    """Return what follows the last thought of a reply, None if it ends inside one.

    thinking: whether a thought has begun before the reply
    """
    begin, end = THOUGHT
    rest = reply.rpartition(end)[2]
    inside = begin in rest or (thinking and end not in reply)
    return None if inside else rest


def uses_chat(tokenizer: PreTrainedTokenizerBase, row: Row, chat: bool | None) -> bool:
    """Whether a row goes through the chat template. Raises ValueError if it must and the tokenizer has none."""
    there = getattr(tokenizer, "chat_template", None) is not None
    if chat is True and not there:
        raise ValueError("model.chat=true, but the tokenizer has no chat template; use model.chat=null or false")
    return row.chat and there and chat is not False


def encode(tokenizer: PreTrainedTokenizerBase, row: Row, chat: bool | None = None, specials: str = "text") -> Prompt:
    """Token ids of a row: chat template around `messages()`, or their bare text, then `answer_prefix`.

    The text is encoded as a whole. The question begins with the first token that starts at or after the context's end.
    An end-of-text token that the tokenizer puts behind every text is left out: the reply is still to come.

    chat: whether to use the chat template, None = if there is one
    specials: what the name of a special token (such as </s>) in the sample's own text becomes: its letters ("text"), or
      the special token ("as_is"). Those of the chat template are always special tokens.
    """
    chatting = uses_chat(tokenizer, row, chat)
    if chatting:
        text = rendered(tokenizer, row.messages())
        inside = text.rfind(row.prompt)
        if inside < 0:  # templates may strip the turn
            inside = max(0, text.rfind(row.prompt.strip())) - (len(row.prompt) - len(row.prompt.lstrip()))
    else:
        before = "".join(message["content"] + "\n\n" for message in row.preamble)
        text, inside = before + row.prompt, len(before)
    pairs, how = _pairs(tokenizer, text + row.answer_prefix, add_special_tokens=not chatting), None
    if _spells(tokenizer, row):
        read = _as_text(tokenizer, row, text + row.answer_prefix, pairs, chatting) if specials == "text" else pairs
        if read is None:
            _warn(str(getattr(tokenizer, "name_or_path", tokenizer)))
        how = "text" if specials == "text" and read is not None else "as_is"
        pairs = pairs if read is None else read
    eos = getattr(tokenizer, "eos_token_id", None)
    if not chatting and pairs[-1:] == [(eos, (0, 0))]:  # some tokenizers end every text with it
        pairs = pairs[:-1]
    end = inside + len(row.context)
    starts = [i for i, (_, (first, last)) in enumerate(pairs) if last > first and first >= end]
    header = text[inside + len(row.prompt.rstrip()) :] + row.answer_prefix
    thinking = without_thoughts(header, False) is None
    return Prompt([token for token, _ in pairs], starts[0] if starts else len(pairs) - 1, how, thinking)


def _pairs(tokenizer: PreTrainedTokenizerBase, text: str, **options: bool) -> list[tuple[int, Span]]:
    """(id, place in the text) of every token."""
    encoded = tokenizer(text, return_offsets_mapping=True, **options)
    return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))


def _names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(name) for name in getattr(tokenizer, "all_special_tokens", ())]


def _spells(tokenizer: PreTrainedTokenizerBase, row: Row) -> bool:
    """Whether the sample's text has the name of a special token anywhere."""
    texts = (*(message["content"] for message in row.preamble), row.prompt + row.answer_prefix)
    return any(name in text for name in _names(tokenizer) if name for text in texts)


def _as_text(
    tokenizer: PreTrainedTokenizerBase, row: Row, text: str, as_is: list[tuple[int, Span]], chatting: bool
) -> list[tuple[int, Span]] | None:
    """(id, place in `text`) of every token, where the sample's own text has no special tokens; None if impossible.

    The text between two special tokens of the template is encoded as a whole.
    """
    spans = _own(tokenizer, row, text) if chatting else [(0, len(text))]
    if spans is None:
        return None
    names = set(_names(tokenizer))
    kept = []
    for token, (first, last) in as_is:
        name = text[first:last].strip()
        start = text.find(name, first)
        if name in names and all(start + len(name) <= a or b <= start for a, b in spans):
            kept.append((token, (first, last)))
    return _joined(tokenizer, text, kept, names) if chatting else _piece(tokenizer, text, names, True)


def _joined(
    tokenizer: PreTrainedTokenizerBase, text: str, specials: list[tuple[int, Span]], names: set[str]
) -> list[tuple[int, Span]] | None:
    """Tokens of a text with these special tokens, and no others in the pieces between them; None if impossible."""
    found: list[tuple[int, Span]] = []
    for (_, (_, start)), (token, (end, last)) in pairwise([(0, (0, 0)), *specials, (0, (len(text), len(text)))]):
        piece = _piece(tokenizer, text[start:end], names, False) if end > start else []
        if piece is None:
            return None
        found += [(t, (a + start, b + start)) for t, (a, b) in piece]
        found += [(token, (end, last))] if last > end else []
    return found


def _piece(tokenizer: PreTrainedTokenizerBase, text: str, names: set[str], add: bool) -> list[tuple[int, Span]] | None:
    """Tokens of a text in which nothing is special, with the tokenizer's own around it if `add`; None if impossible."""
    try:
        pairs = _pairs(tokenizer, text, add_special_tokens=add, split_special_tokens=True)
    except (TypeError, ValueError, NotImplementedError):
        return None
    special = set(getattr(tokenizer, "all_special_ids", ()))
    wrong = any(token in special and text[first:last].strip() in names for token, (first, last) in pairs)
    return None if wrong else pairs


def _own(tokenizer: PreTrainedTokenizerBase, row: Row, text: str) -> list[Span] | None:
    """Where the sample's own text lies in the template's; None if it or the tokens of its pieces are changed there."""
    contents = [message["content"] for message in row.messages()]
    marks = [f"message {n} of {len(contents)} here" for n in range(len(contents))]
    marked = [{**message, "content": mark} for message, mark in zip(row.messages(), marks, strict=True)]
    drawn = rendered(tokenizer, marked)
    around = re.split("|".join(map(re.escape, marks)), drawn)
    if len(around) != len(contents) + 1:
        return None
    for shown in (contents, [content.strip() for content in contents]):
        spans, at = [], 0
        for before, content in zip(around, shown, strict=False):
            spans.append((at + len(before), at + len(before) + len(content)))
            at = spans[-1][1]
        whole = "".join(part for pair in zip(around, [*shown, row.answer_prefix], strict=True) for part in pair)
        if whole == text:
            neutral = replace(row, context="one", question=" two", answer_prefix="", preamble=())
            return [*spans, (at + len(around[-1]), len(text))] if _splits(tokenizer, neutral) else None
    return None


def _splits(tokenizer: PreTrainedTokenizerBase, row: Row) -> bool:
    """Whether a template's text is the tokens of its pieces between special tokens, one after the other."""
    text, names = rendered(tokenizer, row.messages()), set(_names(tokenizer))
    whole = _pairs(tokenizer, text, add_special_tokens=False)
    specials = [(token, (first, last)) for token, (first, last) in whole if text[first:last].strip() in names]
    pieces = _joined(tokenizer, text, specials, names)
    return pieces is not None and [token for token, _ in pieces] == [token for token, _ in whole]


@functools.cache  # once for each
def _warn(name: str) -> None:
    log.warning(
        "specials=text: the tokenizer of %s cannot read special tokens in a sample's text as text; they stay "
        "special tokens there, as with specials=as_is", name,
    )  # fmt: skip


def overhead(tokenizer: PreTrainedTokenizerBase, chat: bool | None = None) -> int:
    """Tokens that the chat template adds to a prompt."""
    empty = Row("", "", "", "x", (), 1, "")
    if not uses_chat(tokenizer, empty, chat):
        return 0
    return len(encode(tokenizer, empty, chat).ids) - len(tokenizer("x", add_special_tokens=False)["input_ids"])


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    one_cache: bool,
    chat: bool | None = None,
    specials: str = "text",
) -> list[Prompt]:
    """The prompt of each turn; its `question` is the first token that the cache does not hold yet.

    A later turn is encoded on its own, as in a conversation whose cache holds tokens and no text. Without a chat
    template an answer ends with the end-of-text token, as a reply of `generate()` does.
    rows: the turns, which share a context; chat, specials: see `encode`
    one_cache: whether a turn follows the turns before it and their true answers, or the context alone
    Raises ValueError if turns cannot share the context's cache, or if the chat template drops earlier replies.
    """
    first = encode(tokenizer, rows[0], chat, specials)
    if not one_cache:
        prompts = [first, *(encode(tokenizer, row, chat, specials) for row in rows[1:])]
        if any(prompt.ids[: prompt.question] != first.ids[: first.question] for prompt in prompts):
            raise ValueError(f"{rows[0].task}: the tokenizer joins a question to its context, so they share no cache")
        return prompts
    prompts, chatting = [first], uses_chat(tokenizer, rows[0], chat)
    for before, row in pairwise(rows):
        held = prompts[-1].ids
        text = _between(tokenizer, row) if chatting else row.question
        new = _ids(tokenizer, before.target)
        if not chatting and tokenizer.eos_token_id is not None:
            new.append(tokenizer.eos_token_id)
        new += _ids(tokenizer, text + row.answer_prefix)
        prompts.append(Prompt([*held, *new], len(held), first.specials, first.thinking))
    return prompts


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _between(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """What the chat template writes between a reply and the reply to the question that follows it."""
    asked = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": MARK},
        {"role": "user", "content": row.question.strip()},
    ]
    text = rendered(tokenizer, asked)
    _, mark, after = text.rpartition(MARK)
    if not mark:
        raise ValueError("the model's chat template drops earlier replies; use model.chat=false with this benchmark")
    return after
