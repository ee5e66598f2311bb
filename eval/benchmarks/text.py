"""Natural text, read through the cache: how well a compressed cache predicts it, where no question is asked.

A sample is a window of a text. Its beginning is prefilled; the rest is read token by token through each method's cache,
so that the text is compressed as it leaves the window. Rows have the KL divergence from the dense model, top-1
agreement with it, and the loss (`eval.rows.Fidelity`). Their score is the share of the tokens that the
method ranks first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt, MinLen

from leank.data_gen.amount import amount
from leank.data_gen.haystack import SPLITS, known_by, paragraphs
from leank.data_gen.reading import digest, read_text
from leank.data_gen.source_code import modules
from leank.eval.benchmarks.base import Benchmark, Cell, Row, benchmark, check_lengths
from leank.typed import OneOf, Positive, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Window = tuple[str, str]  # what is prefilled, and the rest


@benchmark("text")
@dataclass
class Text(Benchmark):
    """Windows of a text that do not overlap (eval.benchmarks.base), in an order drawn from the seed."""

    # a .txt or .txt.gz file, or a folder of .txt files, no two of which share a window; None is the text shipped with
    # the package
    path: str | None = None
    # of the shipped text, or of code; any other `path` is used whole
    split: Annotated[str, OneOf(*SPLITS)] = "test"
    # code: all modules of a folder of .py files as one text; without a `path`, of the standard library
    kind: Annotated[str, OneOf("prose", "code")] = "prose"
    lengths: Annotated[Sequence[Positive], MinLen(1)] = (1024, 2048, 4096, 8192)  # tokens of a window
    samples: Samples = 6  # windows of each length
    prefilled: Annotated[float, Gt(0), Lt(1)] = 0.5  # share of a window's tokens that is prefilled
    name: str = "text"
    seed: Seed = 0  # of the windows' order
    _windows: dict[int, list[Window]] = field(default_factory=dict, repr=False)

    def prepare(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_new_tokens: int | None) -> None:
        check_lengths(self.lengths, limit)
        texts = list(self._texts())
        spans = [
            tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
            for text in texts
        ]
        for length in self.lengths:
            size = length - tokenizer.num_special_tokens_to_add(pair=False)
            if min(round(self.prefilled * size), size - round(self.prefilled * size)) < 2:
                raise ValueError(
                    f"benchmark.prefilled={self.prefilled} of benchmark.lengths={length} leaves fewer than 2 tokens "
                    "to prefill or to read; choose a middle value or a larger length"
                )
            places = [(n, at) for n, of in enumerate(spans) for at in range(0, len(of) - size + 1, size)]
            if len(places) < self.samples:
                found = amount(len(places), "window")
                raise ValueError(
                    f"benchmark.samples={self.samples}: the text has {found} of {length} tokens; lower "
                    "samples, drop that length, or give a longer text as benchmark.path"
                )
            random.Random(f"{self.seed} {length}").shuffle(places)
            self._windows[length] = [
                self._cut(texts[n], spans[n][at : at + size], length, tokenizer) for n, at in places[: self.samples]
            ]

    def _texts(self) -> Iterator[str]:
        """Yield the texts that windows are cut from. Raises FileNotFoundError or ValueError for a wrong path."""
        if self.kind == "code":
            yield "\n".join(modules(self.path, self.split))
            return
        if self.path is None:
            yield "\n".join(paragraphs(None, self.split))
            return
        source = Path(self.path)
        files = sorted(source.glob("*.txt")) if source.is_dir() else [source]
        if not source.exists() or not files or (source.is_file() and not source.name.endswith((".txt", ".txt.gz"))):
            raise FileNotFoundError(
                f"benchmark.path={self.path!r} is no text; give a .txt or .txt.gz file or a folder of .txt files, or "
                "leave it out for the shipped text"
            )
        yield from map(read_text, files)

    def _cut(
        self, text: str, spans: Sequence[tuple[int, int]], length: int, tokenizer: PreTrainedTokenizerBase
    ) -> Window:  # fmt: skip
        """Cut the tokens at `spans` of a text in two; a window that takes more tokens by itself loses its end."""
        size = len(spans)
        start, middle = spans[0][0], spans[round(self.prefilled * size)][0]
        while len(tokenizer(text[start : spans[size - 1][1]])["input_ids"]) > length:
            size -= 1
        return text[start:middle], text[middle : spans[size - 1][1]]

    def identity(self) -> dict[str, object]:
        if self.kind == "code":
            return {"text": digest(next(self._texts())), "split": self.split, "prefilled": self.prefilled}
        split = self.split if self.path is None else None
        return {"text": known_by(self.path), "split": split, "prefilled": self.prefilled}

    def cells(self) -> list[Cell]:
        ids = tuple(str(index) for index in range(self.samples))
        return [Cell("text", length, ids) for length in self.lengths]

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        """Build one sample; see `Benchmark.row`. To be asked after `check`."""
        assert cell.length is not None
        context, rest = self._windows[cell.length][int(sample)]
        return Row(
            task=cell.task, id=sample, context=context, question=rest, answers=(), max_new_tokens=0,
            metric="next_token", chat=False, length=cell.length, read=True,
        )  # fmt: skip
