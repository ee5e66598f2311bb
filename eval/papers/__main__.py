"""Make the figures and tables of LeanK, ThinK, IAP, Lethe and ASL, each with a command of its own.

python -m eval.papers --list                          every item, and whether it runs here
python -m eval.papers leank:fig7 think:table2         these, on the shipped reference model
python -m eval.papers --paper asl --quick             all of a paper, few samples
python -m eval.papers --all --html                    everything, and one page of it
python -m eval.papers --all --jobs 16                 sixteen processes side by side, spread over the visible GPUs
python -m eval.papers --all --show --html             nothing is made: tables, verdicts and page of what is there
python -m eval.papers think:table2 --real model.name=/path/to/Llama-3-8B      with the paper's model and data

What was made before is not made again: rows are written one by one, so a run that was stopped goes on where it was.
OUT/verdicts.md says which of the papers' claims show. Arguments like key=value are passed on to the configuration of
python -m eval.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leank.cli import again, ending
from leank.data_gen.amount import amount

if TYPE_CHECKING:
    from leank.eval.papers.item import Item


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m eval.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "items", nargs="*", metavar="ITEM", help="ids such as leank:fig7; key=value goes to python -m eval"
    )
    made.add_argument("--list", action="store_true", help="print the items and make none")
    made.add_argument("--paper", action="append", default=[], help="all items of leank, think, iap, lethe or asl")
    made.add_argument("--all", action="store_true", help="all items")
    made.add_argument("--quick", action="store_true", help="five samples of two tasks at 1K: a look, not a result")
    made.add_argument("--real", action="store_true", help="with the paper's models, settings and data")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="processes side by side; logs in OUT/logs")
    made.add_argument("--show", action="store_true", help="make nothing; write again what is there")
    made.add_argument("--html", action="store_true", help="also write OUT/papers.html")
    made.add_argument("--out", type=Path, default=Path("outputs/papers"), help="folder, %(default)s by default")
    return made


def listing(paper: Sequence[str] = ()) -> str:
    """Return the lines of --list: id, status, what it shows, and the command with real weights where it needs them."""
    from leank.eval.papers.page import commands
    from leank.eval.papers.registry import ITEMS, PAPERS, of_papers, runs, status

    lines = []
    for item in of_papers(paper or PAPERS):
        state = status(item)
        lines.append(f"{item.id:<14} {state}\n    {item.shows}")
        if not runs(item):
            lines += [f"    {line}" for _, line in commands(item)]
        elif item.real:
            lines.append(f"    with {item.needs}: python -m eval.papers {item.id} --real")
    there = sum(map(runs, ITEMS.values()))
    return "\n".join([*lines, f"{len(ITEMS)} items, {there} run here: python -m eval.papers ID"])


def wanted(arguments: argparse.Namespace) -> tuple[list[Item], list[Item], tuple[str, ...]]:
    """Return the items that are named one by one, all that are to be made, and the overrides of python -m eval.

    Raises ValueError for arguments that cannot be meant.
    """
    from leank.eval.papers.registry import ITEMS, find, of_papers

    overrides = tuple(one for one in arguments.items if "=" in one)
    if of_hydra := [one for one in overrides if one.lstrip("+~").startswith("hydra")]:
        raise ValueError(f"{of_hydra[0]} is a setting of Hydra, which does not run here; the folder is --out")
    if "\0" in str(arguments.out):
        raise ValueError(f"--out {str(arguments.out)!r} is no name of a folder: it holds a zero byte")
    named = [find(one) for one in arguments.items if "=" not in one]
    chosen = {item.id: item for item in (*of_papers(arguments.paper), *named)}
    items = list((ITEMS if arguments.all else chosen).values())
    if arguments.jobs < 1:
        raise ValueError(f"--jobs {arguments.jobs} makes nothing; give 1 or more")
    if not items:
        raise ValueError("no item is named; give ids such as leank:fig7, --paper NAME, --all or --list")
    return named, items, overrides


def run(arguments: argparse.Namespace) -> int:
    """Make the items of the command line, and print or write them. Returns the exit status."""
    from leank.eval.papers.make import Workshop
    from leank.eval.papers.page import as_html, as_markdown
    from leank.eval.papers.registry import status
    from leank.eval.papers.steps import Options
    from leank.eval.papers.verdicts import as_markdown as as_verdicts
    from leank.files import write_text

    named, items, overrides = wanted(arguments)
    options = Options(arguments.quick, arguments.real, overrides)
    workshop = Workshop(arguments.out, options)
    failed = {} if arguments.show else workshop.make(items, arguments.jobs)
    everything = workshop.collect(items)
    for made in everything:
        text = as_markdown(made)
        write_text(arguments.out / "items" / f"{made.item.id.replace(':', '_')}.md", text)
        if made.item in named:
            print(text)
    write_text(arguments.out / "verdicts.md", as_verdicts(everything))
    if arguments.html:
        write_text(arguments.out / "papers.html", as_html(everything, options.quick))
        print(f"page: {arguments.out / 'papers.html'}")
    whole = sum(bool(made.rows or made.measured) and made.whole for made in everything)
    print(f"{whole} of {amount(len(items), 'item')} made, in {arguments.out}")
    for made in everything:
        if made.item in named and not options.steps(made.item):
            print(f"{made.item.id}: {status(made.item)}")
    for name, error in failed.items():
        print(f"eval.papers: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0


def main() -> None:
    """Run what the command line says."""
    arguments = parser().parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with ending("leank.eval.papers", lambda: f"what is in {arguments.out} is kept; to go on: {again('eval.papers')}"):
        if arguments.list:
            print(listing(arguments.paper))
            return
        status = run(arguments)
    sys.exit(status)


if __name__ == "__main__":
    main()
