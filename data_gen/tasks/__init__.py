"""The tasks by name, and mixtures of them addressed by index.

A sample depends on (task, seed, index) alone, so that any number of workers, ranks or restarts gives the same samples.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leank.data_gen.task import Document, Request, Task
from leank.data_gen.tasks.chain import Chain
from leank.data_gen.tasks.code import Code
from leank.data_gen.tasks.few_shot import FewShot
from leank.data_gen.tasks.niah import Niah
from leank.data_gen.tasks.passkey import Passkey
from leank.data_gen.tasks.prompts import Prompts
from leank.data_gen.tasks.qa import QuestionAnswering
from leank.data_gen.tasks.text import Text
from leank.data_gen.tasks.turns import Turns
from leank.data_gen.tasks.vt import VariableTracking
from leank.data_gen.tasks.word_counts import CommonWords, FrequentWords
from leank.data_gen.tokens import TokenCounter

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

RULER_NIAH: dict[str, Task] = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value_type="uuids"),
    "niah_multikey_1": Niah("essay", num_keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", "uuids", "uuids"),
    "niah_multivalue": Niah("essay", num_values=4),
    "niah_multiquery": Niah("essay", num_keys=4, num_queries=4),
}
RULER: dict[str, Task] = {
    **RULER_NIAH,
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": QuestionAnswering("squad"),
    "qa_2": QuestionAnswering("hotpotqa"),
}
# replies of hundreds of tokens whose end can be checked
CHAINS: dict[str, Task] = {
    "chain": Chain(),
    "chain_long": Chain(steps=160, max_new_tokens=2048),
}
TASKS: dict[str, Task] = {
    **RULER,
    **CHAINS,
    # training tasks: LeanK section 3.1 (kv, multivalue), its multi-key and multi-query kin, Appendix K (passkey)
    "kv": Niah("needle", "uuids", "uuids"),
    "multivalue": Niah("essay", num_keys=4, num_values=4),
    "multikey": Niah("needle"),
    "multiquery": Niah("essay", num_keys=8, num_queries=4),
    "passkey": Passkey(),
    # beyond the paper: what a mask that is trained on needles alone forgets
    "text": Text(),
    "quote": Text("quote"),
    "code": Code(),
    "few_shot": FewShot(),
    "turns": Turns(),
    # the user's own
    "prompts": Prompts(),
}


def task(name: str) -> Task:
    """Return the task of this name; raise ValueError with the known names if there is none."""
    if name not in TASKS:
        raise ValueError(f"task={name!r} is unknown; choose one of {', '.join(TASKS)}")
    return TASKS[name]


@dataclass(frozen=True)
class Mixture:
    """An endless list of documents: `mixture[i]` draws task, length and contents from (seed, i) alone.

    weights: task name -> share.
    tokenizer: counts the tokens.
    min_length, max_length: bounds of a document's tokens, both included; lengths are drawn uniformly.
    seed: of all documents.
    questions: questions per document; some tasks have fewer.
    per_length: this many neighbouring indices share one length, so that no rank of a step waits for a longer document.
    essays, split: the natural text; see `haystack.sentences`.
    text: what `text` and `quote` read in place of the essays.
    prompts: the file of prompts with replies that `prompts` reads.
    reserve: tokens of every length to leave for a chat template; see `data_gen.chat`.
    """

    weights: Mapping[str, float]
    tokenizer: PreTrainedTokenizerBase
    min_length: int
    max_length: int
    seed: int = 0
    questions: int = 1
    per_length: int = 1
    essays: str | None = None
    split: str = "all"
    reserve: int = 0
    text: str | None = None
    prompts: str | None = None
    _counter: TokenCounter = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_counter", TokenCounter(self.tokenizer))

    def length_of(self, index: int) -> int:
        """Return the length of document `index` in tokens."""
        rng = random.Random(f"length/{self.seed}/{index // self.per_length}")
        return rng.randint(self.min_length, self.max_length)

    def __getitem__(self, index: int) -> Document:
        """Make document number `index`. Raises ValueError for a length too short, IndexError for one below 0."""
        if index < 0:
            raise IndexError(f"index={index}: documents are numbered from 0")
        rng = random.Random(f"mixture/{self.seed}/{index}")
        name = rng.choices(list(self.weights), weights=list(self.weights.values()))[0]
        return self.build(name, self.length_of(index), index)

    def build(self, name: str, length: int, index: int) -> Document:
        """Make document number `index` of one task at one length."""
        one = task(name)
        request = Request(
            name, length, self._counter, self.seed, index, self.questions,
            essays=(self.text or self.essays) if isinstance(one, Text) else self.essays, split=self.split,
            data=self.prompts if isinstance(one, Prompts) else None, reserve=self.reserve,
        )  # fmt: skip
        return one.build(request)
