"""Token counts of text pieces. Pieces are counted once and added up; a whole document is never counted to size it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenCounter:
    """Counts tokens with any Hugging Face tokenizer (fast or slow) and remembers the pieces that recur.

    Counts of pieces add up to the count of their concatenation to within a token a boundary, since every
    piece carries its separator (see `haystack`).
    """

    def __init__(self, tokenizer: Any, cache_size: int = 200_000) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._cache: dict[str, int] = {}
        self._cache_size = cache_size

    def count(self, text: str) -> int:
        """Tokens of one text, special tokens not counted."""
        return self.counts([text])[0]

    def counts(self, texts: Sequence[str], remember: bool = True) -> list[int]:
        """Tokens of each text, special tokens not counted. `remember=False` for pieces that never recur."""
        new = [t for t in texts if t not in self._cache]
        if not new:
            return [self._cache[t] for t in texts]
        fresh = dict(zip(new, self._encode(new), strict=True))
        if remember and len(self._cache) + len(fresh) <= self._cache_size:
            self._cache.update(fresh)
        return [fresh[t] if t in fresh else self._cache[t] for t in texts]

    def _encode(self, texts: list[str]) -> list[int]:
        if self._backend is not None:
            # the fast backend alone: the wrapper builds attention masks and dictionaries that nobody reads here
            return [len(e) for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
