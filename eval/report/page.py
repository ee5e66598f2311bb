"""report.html: one file that needs no other, light or dark as the reader's system is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd

from leank.data_gen.amount import amount
from leank.eval.report.groups import changed
from leank.eval.report.tables import Table, read_by_all

HERE = Path(__file__).parent
SHOWN = 40  # replies listed per method, of those that differ from dense


class Reply(NamedTuple):
    """A sample with the replies of two methods. texts: by heading."""

    name: str
    scores: str
    texts: Mapping[str, str]


@dataclass
class Section:
    """What a page shows of one run."""

    title: str
    about: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[tuple[str, str]] = ()  # (caption, SVG)
    # under the summary that folds them; under "" they stand open
    replies: Mapping[str, Sequence[Reply]] = field(default_factory=dict)
    heading: str = "Replies"  # above the replies
    settings: str = ""


def title(run: Mapping[str, Any]) -> str:
    """Name a run in words. run: of a summary, or one of its rows."""
    how = f"compressed {run['compress'].replace('_', ' the ')}"
    if read := read_by_all(run):
        how = "read through the cache" if run["benchmark"] == "text" else f"{read} is read through the cache"
    return f"{run['benchmark']} on {run['model']}, {how}"


def page(name: str, sections: Sequence[Section]) -> str:
    """Make a whole page that needs no other file. name: its title."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True)
    template = environment.get_template("report.html.jinja")
    return template.render(title=name, sections=sections, style=(HERE / "report.css").read_text()) + "\n"


def replies(pairs: pd.DataFrame, first: str, second: str) -> list[Reply]:
    """Return the samples of `groups.paired` with both replies, in order."""
    return [
        Reply(
            f"{line.task}{'' if pd.isna(line.length) else f', {line.length:.0f} tokens'}, sample {line.sample}"
            f"{f', reply {line.reply}' if pairs['reply'].any() else ''}",
            f"{line.score_first:.0f} → {line.score_second:.0f}",
            {"answers": ", ".join(map(str, line.answers_first)), first: line.prediction_first,
             second: line.prediction_second},
        )
        for line in pairs.itertuples()
    ]  # fmt: skip


def replies_unlike_dense(table: pd.DataFrame, dense: str | None) -> dict[str, list[Reply]]:
    """Return the replies of each method in `groups.frame` that differ from dense's, under a line that counts them."""
    found = {}
    for method in table["method"].cat.categories if dense is not None else ():
        pairs = changed(table, str(dense), method)
        if len(pairs):
            more = f" ({SHOWN} shown, largest loss first)" if len(pairs) > SHOWN else ""
            name = f"{method}: {amount(len(pairs), 'reply')} other than {dense}'s{more}"
            found[name] = replies(pairs[:SHOWN], str(dense), method)
    return found
