"""Make the figures and tables of LeanK, ThinK, IAP, Lethe and ASL, each with a command of its own.

python -m leank.eval.papers --list                          every item, and whether it runs here
python -m leank.eval.papers leank:fig7 think:table2         these, on the shipped reference model
python -m leank.eval.papers --paper asl --quick             all of a paper, few samples
python -m leank.eval.papers --all                          everything
python -m leank.eval.papers --all shard=0/2                half of the samples; shard=1/2 elsewhere makes the others
python -m leank.eval.papers think:table2 --real model.name=/path/to/Llama-3-8B      with the paper's model and data

What was made before is not made again: rows are written one by one, so a run that was stopped goes on where it was.
OUT/papers.md has all of it beside the figures that
the papers print, verdicts on their claims first. Arguments like key=value are passed on to the configuration of
python -m leank.eval.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from leank.cli import again, ending
from leank.data_gen.amount import amount
from leank.eval.papers.item import ITEMS, PAPERS, Item, find, of_papers


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m leank.eval.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "items", nargs="*", metavar="ITEM", help="ids such as leank:fig7; key=value goes to python -m leank.eval"
    )
    made.add_argument("--list", action="store_true", help="print the items and make none")
    made.add_argument("--paper", action="append", default=[], choices=PAPERS, type=str.lower, help="all items of it")
    made.add_argument("--all", action="store_true", help="all items")
    made.add_argument("--quick", action="store_true", help="five samples of two tasks at 1K: a look, not a result")
    made.add_argument("--real", action="store_true", help="with the paper's models, settings and data")
    made.add_argument("--out", type=Path, default=Path("outputs/papers"), help="folder, %(default)s by default")
    return made


def listing(paper: Sequence[str] = ()) -> str:
    """Return the lines of --list: id, status, what it shows, and the commands of what does not run here."""
    lines = []
    for item in of_papers(paper or PAPERS):
        lines.append(f"{item.id:<14} {item.status}\n    {item.shows}")
        if not item.runs:
            lines += [f"    python -m {step.run}" for step in (*item.here, *item.real)]
        elif item.real:
            lines.append(f"    with {item.needs}: python -m leank.eval.papers {item.id} --real")
    there = sum(item.runs for item in ITEMS.values())
    return "\n".join([*lines, f"{len(ITEMS)} items, {there} run here: python -m leank.eval.papers ID"])


def wanted(arguments: argparse.Namespace) -> tuple[list[Item], list[Item], tuple[str, ...]]:
    """Return the items named one by one, all to be made, and overrides of leank.eval. Raises ValueError for others."""
    overrides = tuple(one for one in arguments.items if "=" in one)
    if of_hydra := [one for one in overrides if one.lstrip("+~").startswith("hydra")]:
        raise ValueError(f"{of_hydra[0]} is a setting of Hydra, which does not run here; the folder is --out")
    named = [find(one) for one in arguments.items if "=" not in one]
    chosen = {item.id: item for item in (*of_papers(arguments.paper), *named)}
    items = list((ITEMS if arguments.all else chosen).values())
    if not items:
        raise ValueError("no item is named; give ids such as leank:fig7, --paper NAME, --all or --list")
    return named, items, overrides


def run(arguments: argparse.Namespace) -> int:
    """Make the items of the command line, and print or write them. Returns the exit status."""
    from leank.eval.papers.make import Runner, of_item, page
    from leank.files import write_text

    named, items, overrides = wanted(arguments)
    everything = Runner(arguments.out, arguments.quick, arguments.real, overrides).make(items)
    for made in everything:
        if made.item in named:
            print(of_item(made, Path.cwd()))
    write_text(arguments.out / "papers.md", page(everything, arguments.out, arguments.quick))
    whole = sum(bool(made.runs or made.pictures) and not made.failed for made in everything)
    print(f"{whole} of {amount(len(items), 'item')} made: {arguments.out / 'papers.md'}")
    failed = [(made.item.id, error) for made in everything for error in made.failed]
    for name, error in failed:
        print(f"eval.papers: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0


def main() -> None:
    """Run what the command line says."""
    arguments = parser().parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    command = "leank.eval.papers"
    with ending(command, lambda: f"what is in {arguments.out} is kept; to go on: {again(command)}"):
        if arguments.list:
            print(listing(arguments.paper))
            return
        status = run(arguments)
    sys.exit(status)


if __name__ == "__main__":
    main()
