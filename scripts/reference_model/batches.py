"""Training rows of the reference models: a document, then questions and answers with the loss on the answers; or text.

Three things make retrieval emerge early (found by experiment, see the model card): a share of needles has the value
right behind the key, a share of prompts repeats the needle's own words, and some rows are plain induction (random
tokens with repeated spans). All of it fades as the rows grow longer.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from leank.data_gen.task import Document, Request, Task
from leank.data_gen.tasks import CHAINS, RULER_NIAH, TASKS
from leank.data_gen.tasks.chain import Chain
from leank.data_gen.tasks.niah import Niah
from leank.data_gen.tasks.passkey import Passkey
from leank.data_gen.tasks.vt import VariableTracking
from leank.data_gen.tasks.word_counts import CWE_HEADER, numbered
from leank.data_gen.tokens import TokenCounter

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
# the share of training after which rows of LENGTHS[i + 1] tokens come in
STAGES = (0.06, 0.12, 0.20, 0.32, 0.48)
# the shortest row that a task fits into, and the tokens that each further question takes
ROOM = {
    "niah_single_3": (256, 85), "niah_multikey_3": (512, 150), "niah_multivalue": (256, 75),
    "niah_multiquery": (256, 110), "vt": (512, 75), "cwe": (1024, 0), "fwe": (512, 0), "passkey": (1024, 80),
    "chain": (256, 0),
}  # fmt: skip
UNORDERED = ("cwe",)  # tasks whose answers may come in any order: a token is right if any answer that is left has it


@dataclass(frozen=True)
class Recipe:
    """The mixture of rows."""

    tasks: Mapping[str, float]  # name -> share among the rows with questions
    # a row with questions counts in the loss as at least and at most so many labels. Otherwise a reply of 1,500 tokens
    # would count as much as a hundred answers to aggregation tasks. None: every label counts the same.
    labels: tuple[int, int] | None = None
    text: float = 0.0  # share of the rows that are natural text
    # the mean loss over the labels of text counts so much beside the mean loss over those of answers. There are a
    # hundred times more labels of text than of answers: one mean over both would hear nothing of the answers.
    text_weight: float = 0.0
    # whether cwe's common words are named in the order in which the list has them first. In a random order, no label
    # says which of ten words comes next; a model learns to mix them, and its own replies mix syllables.
    in_order: bool = False


RECIPES = {
    "retrieval": Recipe({
        "niah_single_1": 5, "niah_single_2": 5, "niah_single_3": 7, "niah_multikey_1": 6, "niah_multikey_2": 9,
        "niah_multikey_3": 14, "niah_multivalue": 20, "niah_multiquery": 16, "vt": 12, "cwe": 4, "fwe": 4, "passkey": 3,
    }),
    "mixed": Recipe({
        "niah_single_1": 3, "niah_single_2": 4, "niah_single_3": 5, "niah_multikey_1": 5, "niah_multikey_2": 7,
        "niah_multikey_3": 12, "niah_multivalue": 18, "niah_multiquery": 14, "vt": 12, "cwe": 10, "fwe": 9,
        "passkey": 3, "chain": 12,
    }, labels=(64, 256), text=0.25, text_weight=0.3),
    "busy": Recipe({  # mostly of what one head alone cannot do: counts, several values, chains
        "niah_single_1": 2, "niah_single_2": 2, "niah_single_3": 3, "niah_multikey_1": 3, "niah_multikey_2": 5,
        "niah_multikey_3": 9, "niah_multivalue": 22, "niah_multiquery": 12, "vt": 12, "cwe": 15, "fwe": 13,
        "passkey": 2, "chain": 12,
    }, labels=(64, 256), text=0.25, text_weight=0.3, in_order=True),
}  # fmt: skip

_HAYSTACKS = ("noise", "essay", "needle")
_LONGEST_CHAIN = 160
_REPEATED = 0.2  # of the rows of text: their end repeats a passage that stands anywhere before
TrainingBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # see `Batches`


@dataclass(frozen=True)
class TrainingRow:
    """Token ids [n] and the positions whose next token is supervised; whether it is natural text."""

    ids: list[int]
    supervised: list[int]
    text: bool = False


class RowMaker:
    """Makes one row from a random generator; `early` (1 to 0) is how much of the easy material it mixes in."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe = RECIPES["retrieval"]) -> None:
        self.tokenizer, self.recipe = tokenizer, recipe
        self.counter = TokenCounter(tokenizer)
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.plain = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
        vocabulary = tokenizer.get_vocab()
        self.hexadecimal = [vocabulary[c] for c in "0123456789abcdef-"]

    def make(self, length: int, early: float, rng: random.Random) -> TrainingRow:
        """A row of at most `length` + 1 ids."""
        if rng.random() < 0.04 + 0.2 * early:
            return self._induction(length, rng)
        tasks = self.recipe.tasks
        names = [n for n in tasks if ROOM.get(n, (0, 0))[0] <= length]
        name = rng.choices(names, weights=[tasks[n] for n in names])[0]
        document = self._document(name, length, early, rng)
        return self.row(in_order(document) if self.recipe.in_order and document.task == "cwe" else document, length)

    def row(self, document: Document, length: int) -> TrainingRow:
        """The document and as many of its questions as fit, one after the other."""
        encode = self.tokenizer.backend_tokenizer.encode
        ids = [self.bos, *encode(document.context, add_special_tokens=False).ids]
        supervised: list[int] = []
        for q in document.questions:
            prompt = encode(q.question + q.answer_prefix, add_special_tokens=False).ids
            target = encode(q.target, add_special_tokens=False).ids
            if len(ids) + len(prompt) + len(target) > length:
                break
            ids += prompt
            supervised += range(len(ids) - 1, len(ids) + len(target))
            ids += [*target, self.eos]
        return TrainingRow(ids, supervised)

    def _document(self, name: str, length: int, early: float, rng: random.Random) -> Document:
        _, cost = ROOM.get(name, (0, 45))
        most = 1 if not cost else max(1, length // (2 * cost))
        questions = min(most, rng.choice((1, 2, 4, 8, 16, 32)))
        spec = self._vary(TASKS[name], early, rng)
        if isinstance(spec, VariableTracking):
            questions = 1 if rng.random() < 0.5 else min(questions, 4)
            if length < 1024 or rng.random() < early:
                spec = replace(spec, num_hops=rng.randint(1, 4), example_lines=rng.randint(1, 4))
        if isinstance(spec, Chain):  # a step takes a line of the table and one of the reply, 11 tokens each
            spec = replace(spec, steps=rng.randint(2, min(_LONGEST_CHAIN, length // 48)))
            questions = rng.randint(1, max(1, length // (44 * spec.steps)))
            cost = 22 * spec.steps
        if isinstance(spec, Passkey):
            questions = min(questions, spec.num_passkeys)
        room = length - (questions - 1) * cost - 1
        seed = rng.getrandbits(32)
        for count in dict.fromkeys((questions, 1)):  # many long keys may not fit a short row: then one question
            try:
                return spec.build(Request(name, room, self.counter, seed, 0, count, split="train"))
            except ValueError:
                room = length - 1
        return Niah("noise").build(Request("niah_single_1", length - 1, self.counter, seed, 0))

    @staticmethod
    def _vary(spec: Task, early: float, rng: random.Random) -> Task:
        """The official task, or an easier or broader relative of it."""
        if isinstance(spec, Passkey):
            return replace(spec, num_passkeys=rng.randint(3, 10), num_words=rng.choice((8, 16, 32)))
        if not isinstance(spec, Niah):
            return spec
        if rng.random() < 0.25:
            spec = replace(spec, haystack=rng.choice(_HAYSTACKS))
        few = (2, 2, 3, 4) if rng.random() < early else (2, 3, 4, 4)
        if spec.num_values > 1:
            spec = replace(spec, num_values=rng.choice(few))
        if spec.num_queries > 1:
            spec = replace(spec, num_queries=rng.choice(few))
        form = rng.random()
        if form < 0.04 + 0.3 * early:  # the value right behind the key: one-token induction already pays
            return replace(spec, needle="{key} {value}.", header="", question="\n{key}", prefix="")
        if form < 0.08 + 0.5 * early and spec.num_values * spec.num_queries == 1:  # the needle's own words again
            return replace(spec, prefix=f" One of the special magic {spec.value_type} for {{key}} is:")
        return spec

    def _induction(self, length: int, rng: random.Random) -> TrainingRow:
        alphabet, known = rng.choice(
            ((self.plain, 2), (rng.sample(self.plain, 200), 3), (self.hexadecimal, 6), (self.hexadecimal[:10], 6))
        )
        ids = [self.bos, *rng.choices(alphabet, k=min(64, length // 4))]
        supervised: list[int] = []
        while len(ids) < length - 100:
            span = rng.randint(known + 4, 48)
            start = rng.randint(1, max(1, len(ids) - span))
            copied = ids[start : start + span]
            supervised += range(len(ids) + known - 1, len(ids) + len(copied) - 1)
            ids += copied
            ids += rng.choices(alphabet, k=rng.randint(4, 48))
        return TrainingRow(ids, supervised)


def in_order(document: Document) -> Document:
    """The cwe sample with its ten words asked for in the order in which the list has them first."""
    entries = re.split(r"(?:^| )\d+\. ", document.context.rpartition(CWE_HEADER)[2])
    first = {word: i for i, word in reversed([*enumerate(entries)])}
    (question,) = document.questions
    words = sorted(question.answers, key=first.__getitem__)
    return replace(document, questions=(replace(question, answers=tuple(words), target=" " + numbered(words)),))


def text_row(stream: np.ndarray, bos: int, length: int, rng: random.Random) -> TrainingRow:
    """A slice of a token stream; the end of some slices repeats a passage of theirs, so that far context pays early."""
    start = rng.randrange(len(stream) - length)
    ids = [bos, *stream[start : start + length].tolist()]
    if rng.random() < _REPEATED:
        size = rng.randint(32, length // 4)
        at = rng.randint(1, length - 2 * size)
        ids[-size:] = ids[at : at + size]
    return TrainingRow(ids, list(range(length)), text=True)


class Batches(torch.utils.data.Dataset):
    """Batch number `step` of one rank, a function of (seed, step, rank, share) alone: exact resume is a slice.

    Yields (ids [rows, length] int64, positions [n] int64, labels [n] int64, weights [n] float32): `positions` index the
    flattened [rows * length] hidden states whose next token is the label. text: a token stream.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, tokens: int, steps: int, seed: int, rank: int, start: int,
        longest: int, recipe: Recipe, text: np.ndarray | None,
    ) -> None:  # fmt: skip
        self.maker = RowMaker(tokenizer, recipe)
        self.tokens, self.steps, self.seed, self.rank, self.start = tokens, steps, seed, rank, start
        self.lengths = [n for n in LENGTHS if n <= longest]
        self.text = text

    def __len__(self) -> int:
        return self.steps - self.start

    def length_of(self, step: int, share: float) -> int:
        """Row length of a step, the same on every rank: mostly the longest so far, else a shorter one."""
        reached = sum(share >= stage for stage in STAGES[: len(self.lengths) - 1])
        rng = random.Random(f"length/{self.seed}/{step}")
        return self.lengths[reached if rng.random() < 0.65 or not reached else rng.randrange(reached)]

    def __getitem__(self, item: int) -> TrainingBatch:
        step = self.start + item
        share = step / self.steps
        length = self.length_of(step, share)
        early = max(0.0, 1 - share / STAGES[2])
        rng = random.Random(f"rows/{self.seed}/{step}/{self.rank}")
        count = max(1, self.tokens // length)
        rows: list[TrainingRow] = []
        if self.text is not None and self.maker.recipe.text:
            texts = int(self.maker.recipe.text * count + rng.random())  # the share in the mean, of few long rows too
            rows += [text_row(self.text, self.maker.bos, length, rng) for _ in range(texts)]
        rows += [self.maker.make(length, early, rng) for _ in range(count - len(rows))]
        return collate(rows, length, self.maker.recipe)


def collate(rows: list[TrainingRow], length: int, recipe: Recipe = RECIPES["retrieval"]) -> TrainingBatch:
    """Right-padded ids [rows, length], flat supervised positions [n], labels [n], their weights in the loss [n]."""
    ids = np.zeros((len(rows), length), dtype=np.int64)
    positions, labels, weights = [], [], []
    for r, row in enumerate(rows):
        kept = row.ids[:length]
        ids[r, : len(kept)] = kept
        inside = [p for p in row.supervised if p < length and p + 1 < len(row.ids)]
        positions += [r * length + p for p in inside]
        labels += [row.ids[p + 1] for p in inside]
        low, high = recipe.labels or (0, length)
        each = 1.0 if row.text else min(max(len(inside), low), high) / max(1, len(inside))
        weights.append(np.full(len(inside), each, dtype=np.float32))
    for text, total in ((False, 1.0), (True, recipe.text_weight)):
        mine = [w for row, w in zip(rows, weights, strict=True) if row.text is text]
        summed = sum(float(w.sum()) for w in mine)
        for w in mine:
            w *= total / max(summed, 1.0)
    return (
        torch.from_numpy(ids),
        torch.tensor(positions),
        torch.tensor(labels),
        torch.from_numpy(np.concatenate(weights)),
    )


def evaluation_rows(
    tokenizer: PreTrainedTokenizerFast, length: int, count: int, seed: int
) -> dict[str, list[TrainingRow]]:
    """Unseen samples of the RULER tasks, one question per document, on text that training never shows."""
    maker = RowMaker(tokenizer)
    found: dict[str, list[TrainingRow]] = {}
    shortest = {"vt": 1024, "cwe": 2048, "chain": 2048, "chain_long": 8192}  # the examples of vt and cwe are long
    for name in [*RULER_NIAH, "vt", "cwe", "fwe", *CHAINS]:
        if length < shortest.get(name, ROOM.get(name, (0, 0))[0]):
            continue
        requests = (Request(name, length, maker.counter, seed, i, exact=False, split="test") for i in range(count))
        found[name] = [maker.row(TASKS[name].build(r), length) for r in requests]
    return found
