"""Put a mask on the Hugging Face hub, with a card made of its training: python -m leank_train share RUN ORG/NAME.

RUN is the folder of a training run, or a mask's file. Log in with `hf auth login` before. A mask of several in one run
is shared by its own file, such as RUN/masks/mask_90pct.safetensors.
"""

import argparse
from collections.abc import Sequence

from leank.cli import ending


def main(arguments: Sequence[str]) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        "leank_train share", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mask", metavar="RUN")
    parser.add_argument("repo", metavar="ORG/NAME")
    parser.add_argument("--licence", help="of the mask, as the hub names it, such as apache-2.0")
    parser.add_argument("--private", action="store_true", help="makes a new repository private")
    parser.add_argument("--revision", help="a branch")
    parser.add_argument("--folder", help="writes the repository's files there, and puts nothing on the hub")
    given = parser.parse_args(arguments)
    if given.folder == "":  # a variable of the shell that is not set; it would write here
        parser.error("--folder is empty; name a folder")
    from leank.mask import ChannelMask  # seconds

    with ending("leank_train share"):
        mask = ChannelMask.load(given.mask)
        if given.folder is None:
            print(mask.push_to_hub(given.repo, given.private or None, given.revision, licence=given.licence))
        else:
            mask.save_pretrained(given.folder, given.repo, given.licence)
            print(f"written: {given.folder}; read README.md, then give the command again without --folder")
