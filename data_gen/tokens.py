"""Token counts of text pieces: pieces are counted once and added up, and no whole document is counted to fill it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

# the text around a piece while it is counted, so that it has as many tokens as inside a document
_AROUND = {" ": (". ", ""), "\n": ("\n", "\n")}
_BARE = {" ": ".", "\n": "\n"}


class TokenCounter:
    """Counts tokens with any tokenizer of transformers and remembers the pieces that recur, at most `cache_size`.

    special_tokens: tokens such as BOS that the tokenizer puts around a prompt.
    fits: sizes that `data_gen.task` has found with this tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cache_size: int = 200_000) -> None:
        self.tokenizer = tokenizer
        self.special_tokens: int = tokenizer.num_special_tokens_to_add(pair=False)
        self.fits: dict[Hashable, int] = {}
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._cache: dict[str, int] = {}
        self._cache_size = cache_size

    def count(self, text: str, remember: bool = True) -> int:
        """Count the tokens of one text, without special tokens; `remember`: see `counts`."""
        return self.counts([text], remember)[0]

    def counts(self, texts: Sequence[str], remember: bool = True) -> list[int]:
        """Count the tokens of each text, without special ones; remember: whether to keep counts, as texts may recur."""
        new = list(dict.fromkeys(t for t in texts if t not in self._cache))
        if not new:
            return [self._cache[t] for t in texts]
        fresh = dict(zip(new, self._encode(new), strict=True))
        if remember and len(self._cache) + len(fresh) <= self._cache_size:
            self._cache.update(fresh)
        return [fresh[t] if t in fresh else self._cache[t] for t in texts]

    def pieces(self, texts: Sequence[str], separator: str, remember: bool = True) -> list[int]:
        """Count the tokens that each text adds to a document, with its separator: a blank before it, or its line's end.

        Pieces are counted next to the separator. Tokenizers differ in whether they join it with the text before it,
        with the text after it, or with neither, and some put a blank before every text that they are given alone.
        Sums are right to within a few tokens.
        """
        before, after = _AROUND[separator]
        bare = self.count(_BARE[separator])
        return [n - bare for n in self.counts([before + t + after for t in texts], remember)]

    def _encode(self, texts: list[str]) -> list[int]:
        if self._backend is not None:
            # the fast backend without its wrapper, which builds attention masks that nothing here needs, but would also
            # undo the padding and truncation that tokenizer.json or an earlier call may have left
            self._backend.no_padding()
            self._backend.no_truncation()
            return [len(e) for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]


@lru_cache(maxsize=4)
def counter_of(tokenizer: PreTrainedTokenizerBase) -> TokenCounter:
    """Return the one counter of a tokenizer, whoever asks: what it has counted and fitted is not done again."""
    return TokenCounter(tokenizer)
