"""What is left of a RULER prompt without its contents: the template's own text, down to the blanks."""

import hashlib
import re

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


def skeleton(task: str, text: str, answer_prefix: str) -> str:
    """The template of a prompt (context + question) and its answer prefix; keys, values, words, documents cut out."""
    if task.startswith("niah"):
        header, last = text.split("\n", 1)[0], text.rsplit("\n", 1)[1]
        return re.sub(r"for .+? mentioned", "for KEY mentioned", f"{header}\nCONTEXT\n{last}|{answer_prefix}")
    if task == "vt":
        text = (text + "|" + answer_prefix).replace(NOISE, "")
        text = re.sub(r"VAR [A-Z]+ = (VAR [A-Z]+ |\d+)\n", "", text)
        return re.sub(r"\d{5}", "VALUE", re.sub(r"(?<=they are:  )[A-Z ]+", "NAMES", text))
    if task == "cwe":
        return re.sub(r"(?<=[\n ])1\. [^\n]+", "LIST", text) + "|" + answer_prefix
    if task == "fwe":
        return re.sub(r"(?<=coded words\. )[^\n]+", "WORDS", text) + "|" + answer_prefix
    text = re.sub(r"Document 1:\n.*\n\n(?=Answer the)", "DOCUMENTS", text, flags=re.S)
    return re.sub(r"(?<=Question: ).*", "QUESTION", text) + "|" + answer_prefix


def fingerprint(task: str, text: str, answer_prefix: str) -> str:
    """A short hash of the skeleton."""
    return hashlib.sha256(skeleton(task, text, answer_prefix).encode()).hexdigest()[:16]
