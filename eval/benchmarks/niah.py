"""Needle in a haystack: one sentence hidden at a depth of a long text.

Behaviour of gkamradt/LLMTest_NeedleInAHaystack 7b90d28 (MIT). Officially GPT judges the reply from 1 to 10; here
`recall` does (as in the line of work that ThinK belongs to), or eval.metrics.rouge.rouge_1. Bring your own haystack:
the official essays may not be redistributed.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from eval.benchmarks.row import Row

NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
QUESTION = "What is the best thing to do in San Francisco?"
EXPECTED = "eat a sandwich and sit in Dolores Park on a sunny day."
_SYSTEM = "You are a helpful AI bot that answers questions for a user. Keep your response short and direct"
_ONLY_DOCUMENT = " Don't give information outside the document or repeat your findings"

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


def insert_needle(
    context: str,
    needle: str,
    depth_percent: float,
    context_length: int,
    encode: Encode,
    decode: Decode,
    buffer: int = 200,
) -> str:
    """Put `needle` into `context` at `depth_percent` of its tokens, moved back to just after a ".".

    context_length, buffer: tokens; context and needle together keep to context_length - buffer, by cutting the end of
    the context. depth_percent: 0 (start) to 100 (very end, wherever that falls). Only the token of a lone "." ends a
    sentence, so a "." that the tokenizer joins to its neighbours does not; without one the needle comes first.
    encode, decode: without special tokens. Raises ValueError for a depth outside 0-100 or a needle that does not fit.
    """
    if not 0 <= depth_percent <= 100:
        raise ValueError(f"depth_percent={depth_percent} is outside 0-100")
    tokens, needle_tokens, periods = encode(context), encode(needle), set(encode("."))
    room = context_length - buffer - len(needle_tokens)
    if room < 0:
        raise ValueError(
            f"context_length={context_length} leaves no room for the needle ({len(needle_tokens)} tokens) "
            f"and the buffer ({buffer}); raise context_length or lower buffer"
        )
    tokens = tokens[:room]
    if depth_percent == 100:
        return decode(tokens + needle_tokens)
    at = int(len(tokens) * (depth_percent / 100))
    while at and tokens[at - 1] not in periods:
        at -= 1
    return decode(tokens[:at] + needle_tokens + tokens[at:])


def build_context(
    haystack: str,
    needle: str,
    depth_percent: float,
    context_length: int,
    encode: Encode,
    decode: Decode,
    buffer: int = 200,
) -> str:
    """Repeat `haystack` until it has `context_length` tokens, cut it there, then `insert_needle`."""
    if not haystack:
        raise ValueError("the haystack is empty; give a text file")
    text = haystack
    while len(tokens := encode(text)) < context_length:
        text += haystack
    if len(tokens) > context_length:
        text = decode(tokens[:context_length])
    return insert_needle(text, needle, depth_percent, context_length, encode, decode, buffer)


def grid(shortest: int, longest: int, count: int = 35) -> list[int]:
    """`count` evenly spaced whole numbers, ends included: the official lengths and (0, 100) depths."""
    return [int(value) for value in np.round(np.linspace(shortest, longest, count))]


def rows(
    haystack: str, lengths: Sequence[int], depths: Sequence[float], encode: Encode, decode: Decode
) -> Iterator[Row]:
    """One row per length and depth. Officially context and question are two user turns; here they are one."""
    for length in lengths:
        for depth in depths:
            yield Row(
                task="niah",
                id=f"{length}-{depth}",
                context=build_context(haystack, NEEDLE, depth, length, encode, decode),
                question=f"\n{QUESTION}{_ONLY_DOCUMENT}",
                answers=[EXPECTED],
                max_new_tokens=300,
                metric="niah_recall",
                preamble=({"role": "system", "content": _SYSTEM},),
                length=length,
                meta={"depth_percent": depth},
            )


def recall(reply: str, expected: str = EXPECTED) -> float:
    """Share of the distinct lower-case words of `expected` that occur in the reply, 0-1."""
    words = set(expected.lower().split())
    return len(words & set(reply.lower().split())) / len(words)
