"""Natural text, read through the cache: how well a compressed cache predicts it, where no question is asked.

A sample is a window of a text. Its beginning is prefilled; the rest is read token by token through each method's cache,
so that the text is compressed as it leaves the window. Rows have the KL divergence from the dense model, top-1
agreement with it, and the loss (`eval.rows.result_row.Fidelity`). Their score is the share of the tokens that the
method ranks first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt, MinLen

from data_gen.haystack import SPLITS, known_by, paragraphs
from data_gen.reading import read_text
from eval.benchmarks.base import Cell
from eval.benchmarks.row import Row
from leank_train.common.typed import Checked, OneOf, Positive, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TASK = "text"


@dataclass
class Text(Checked):
    """Windows of a text that do not overlap (eval.benchmarks.base), in an order drawn from the seed.

    path: a .txt or .txt.gz file, a RULER .json file, or a folder of .txt files; None is the text shipped with the
    package. No window crosses from one file of a folder into the next.
    split: of the shipped text; a `path` is used whole.
    lengths: tokens of a window.
    samples: windows of each length.
    prefilled: share of a window that is prefilled.
    """

    path: str | None = None
    split: Annotated[str, OneOf(*SPLITS)] = "test"
    lengths: Annotated[Sequence[Positive], MinLen(1)] = (1024, 2048, 4096, 8192)
    samples: Positive = 6
    prefilled: Annotated[float, Gt(0), Lt(1)] = 0.5
    name: str = "text"
    seed: Seed = 0
    _windows: dict[int, list[list[int]]] = field(default_factory=dict, repr=False)

    def check(
        self,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        overhead: int,
        max_new_tokens: int | None = None,
    ) -> None:
        """Cut the text into windows before any weights are loaded; see `Benchmark.check`."""
        limit = getattr(config, "max_position_embeddings", None)
        for length in self.lengths:
            if limit is not None and length > limit:
                raise ValueError(
                    f"benchmark.lengths: {length} is more than the model's max_position_embeddings={limit}; "
                    "drop that length or extend the model's RoPE"
                )
        special = tokenizer.num_special_tokens_to_add(pair=False)
        texts = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in self._texts()]
        for length in self.lengths:
            size = length - special
            if min(round(self.prefilled * size), size - round(self.prefilled * size)) < 2:
                raise ValueError(
                    f"benchmark.prefilled={self.prefilled} of {length} tokens leaves fewer than 2 tokens to prefill or "
                    "to read; choose a middle value or a larger length"
                )
            found = [ids[at : at + size] for ids in texts for at in range(0, len(ids) - size + 1, size)]
            if len(found) < self.samples:
                raise ValueError(
                    f"benchmark.samples={self.samples}: the text has {len(found)} windows of {length} tokens; lower "
                    "samples, drop that length, or give a longer text as benchmark.path"
                )
            random.Random(f"{self.seed} {length}").shuffle(found)
            self._windows[length] = found[: self.samples]

    def _texts(self) -> list[str]:
        """The texts that windows are cut from."""
        if self.path is not None and Path(self.path).is_dir():
            return [read_text(file) for file in sorted(Path(self.path).glob("*.txt"))]
        return ["\n".join(paragraphs(self.path, "all" if self.path else self.split))]

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        split = self.split if self.path is None else None
        return {"text": known_by(self.path), "split": split, "prefilled": self.prefilled}

    def data(self, task: str) -> None:
        """The text is the same for all cells, and counts in `identity`."""

    def cells(self) -> list[Cell]:
        """Return all cells in the order of the run."""
        ids = tuple(str(index) for index in range(self.samples))
        return [Cell(TASK, length, ids) for length in self.lengths]

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        """Build one sample; see `Benchmark.row`. To be asked after `check`."""
        assert cell.length is not None
        window = self._windows[cell.length][int(sample)]
        cut = round(self.prefilled * len(window))
        head, rest = str(tokenizer.decode(window[:cut])), str(tokenizer.decode(window[cut:]))
        whole = str(tokenizer.decode(window))
        # a tokenizer may decode pieces otherwise than the whole: the whole is what counts
        context = head if whole.startswith(head) else whole[: len(whole) - len(rest)]
        return Row(
            task=cell.task, id=sample, context=context, question=whole[len(context) :], answers=(), max_new_tokens=0,
            metric="next_token", chat=False, length=cell.length, read=True,
        )  # fmt: skip
