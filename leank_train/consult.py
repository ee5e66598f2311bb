"""Will it work, and what will it gain: what can be said of a model before any weights are loaded.

    python -m leank_train doctor MODEL [--tokens 4096 32768] [--batch 1 8 64]

MODEL is a folder, a name on the hub, or a shipped model. The bytes are those of the prompt in 16 bits. Decoding reads
the weights and the cache once a token, so the ratio of these bytes is what a step can gain at most.
"""

import argparse
from collections.abc import Sequence

from leank.cli import ending
from leank.typed import LARGEST


def main(arguments: Sequence[str]) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        "leank_train doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=_count, nargs="+", default=[], help="lengths of a prompt")
    parser.add_argument("--batch", type=_count, nargs="+", default=[1, 8, 64], help="prompts that are decoded together")
    given = parser.parse_args(arguments)
    with ending("leank_train doctor"):
        from leank_train.doctor import examine  # seconds

        print(examine(given.model.removeprefix("model.name=").removeprefix("model="), given.tokens, given.batch))


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= LARGEST):
        raise argparse.ArgumentTypeError(f"{text} is no number of 1 to {LARGEST}; give one, such as 8")
    return int(text)
