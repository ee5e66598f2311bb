"""Tokens that come several at a time after the prompt: a question, or a later turn of a conversation."""

from __future__ import annotations

from collections.abc import Iterator

from leank.eval.cache.storage.store import Store


def pieces(store: Store, new: int) -> Iterator[slice]:
    """Columns that can be appended and attended at once, so that each token finds what it would if all came singly.

    A piece ends where the window of a row is full, so that its oldest tokens move before the next one comes. Where
    what a layer evicts depends on single steps, every token is a piece. The caller appends a piece, attends and flushes
    before it takes the next one.

    new: columns that have come, padding included
    """
    single, first = store.eviction is not None and store.eviction.every_step, 0
    while first < new:
        free = store.sizes.window + store.sizes.flush - int((store.seen - store.start).max())
        last = first + (1 if single else max(1, free))
        yield slice(first, min(new, last))
        first = last
