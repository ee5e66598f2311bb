"""Will it work, what will it gain, and which cache to take: what can be said of a model before any run.

    python -m leank_train doctor MODEL [--tokens 4096 32768] [--batch 1 8 64] [--memory 80] [--server] [--probe]

MODEL is a folder, a name on the hub, or a shipped model. The first line says what to take for the longest of --tokens
and the largest --batch. The bytes are those of the prompt in 16 bits. Decoding reads the weights and the cache once a
token, so the ratio of these bytes is what a step can gain at most. Of the weights only K's biases and norms are read,
with --probe all of them, for the keys of one short text.
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
    parser.add_argument("--memory", type=_gib, help="GiB for weights and caches; this machine's by default")
    parser.add_argument("--server", action="store_true", help="vLLM is to serve the model")
    parser.add_argument("--probe", action="store_true", help="loads the model and reads the keys of one short text")
    given = parser.parse_args(arguments)
    with ending("leank_train doctor"):
        from leank_train.doctor import examine  # seconds

        name = given.model.removeprefix("model.name=").removeprefix("model=")
        print(examine(name, given.tokens, given.batch, given.memory, given.probe, given.server))


def _gib(text: str) -> int:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is no number of GiB above 0; give one, such as 80")
    return int(found * 2**30)


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= LARGEST):
        raise argparse.ArgumentTypeError(f"{text} is no number of 1 to {LARGEST}; give one, such as 8")
    return int(text)
