"""MMLU: the letter of a reply that reasons. The official code has no such step; it is this project's."""

import re


def extract_letter(reply: str) -> str | None:
    """The letter of a generated answer: the last "answer is (X)" or "Answer: X", else a leading letter."""
    # possessive quantifiers give nothing back, so that a long run of blanks is read once
    stated = re.findall(r"(?i:answer)\s*+(?i:is)?+\s*+:?+\s*+\**+\(?+([A-D])\b", reply)
    if stated:
        return str(stated[-1])
    leading = re.match(r"\s*\(?([A-D])\b", reply)
    return leading[1] if leading else None
