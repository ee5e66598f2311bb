"""Token counts of text pieces. Pieces are counted once and added up; a whole document is never counted to fill it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

# what stands around a piece while it is counted, so that it costs what it costs inside a document
_AROUND = {" ": (". ", ""), "\n": ("\n", "\n")}
_BARE = {" ": ".", "\n": "\n"}


class TokenCounter:
    """Counts tokens with any Hugging Face tokenizer (fast or slow) and remembers the pieces that recur.

    special_tokens: how many the tokenizer puts around a prompt (BOS and the like).
    fits: sizes that `data_gen.fit` has found with this tokenizer.
    """

    def __init__(self, tokenizer: Any, cache_size: int = 200_000) -> None:
        self.tokenizer = tokenizer
        self.special_tokens: int = tokenizer.num_special_tokens_to_add(pair=False)
        self.fits: dict[Hashable, int] = {}
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._cache: dict[str, int] = {}
        self._cache_size = cache_size

    def count(self, text: str, remember: bool = True) -> int:
        """Tokens of one text, special tokens not counted."""
        return self.counts([text], remember)[0]

    def counts(self, texts: Sequence[str], remember: bool = True) -> list[int]:
        """Tokens of each text, special tokens not counted. `remember=False` for texts that never recur."""
        new = list(dict.fromkeys(t for t in texts if t not in self._cache))
        if not new:
            return [self._cache[t] for t in texts]
        fresh = dict(zip(new, self._encode(new), strict=True))
        if remember and len(self._cache) + len(fresh) <= self._cache_size:
            self._cache.update(fresh)
        return [fresh[t] if t in fresh else self._cache[t] for t in texts]

    def pieces(self, texts: Sequence[str], separator: str, remember: bool = True) -> list[int]:
        """Tokens that each text adds to a document, its separator included.

        separator: " " (the piece follows it) or a newline (the piece stands on a line of its own). The pieces are
        counted next to it: tokenizers differ in whether it joins what is before it, what is behind it, or neither,
        and some put a blank before every text that they are given alone. Sums are right to within a few tokens.
        """
        before, after = _AROUND[separator]
        bare = self.count(_BARE[separator])
        return [n - bare for n in self.counts([before + t + after for t in texts], remember)]

    def _encode(self, texts: list[str]) -> list[int]:
        if self._backend is not None:
            # the fast backend alone: the wrapper builds attention masks and dictionaries that nobody reads here
            return [len(e) for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
