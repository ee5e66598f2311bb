"""What the rows of the reference models are made of, and when the long ones come in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """The mixture of rows.

    tasks: name -> share among the rows with questions.
    labels: a row with questions counts in the loss as at least and at most so many labels. Otherwise a reply of 1,500
        tokens would count as much as a hundred answers to aggregation tasks. None: every label counts the same.
    text: share of the rows that are natural text.
    text_weight: the mean loss over the labels of text counts so much beside the mean loss over those of answers. There
        are a hundred times more labels of text than of answers: one mean over both would hear nothing of the answers.
    in_order: whether cwe's common words are named in the order in which the list has them first. In a random order, no
        label says which of ten words comes next; a model learns to mix them, and its own replies mix syllables.
    """

    tasks: Mapping[str, float]
    labels: tuple[int, int] | None = None
    text: float = 0.0
    text_weight: float = 0.0
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
