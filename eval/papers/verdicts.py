"""What the rows made here say of the papers' claims, as a Markdown table: OUT/verdicts.md."""

from __future__ import annotations

from collections.abc import Sequence

from leank.eval.papers.make import Made
from leank.eval.report.tables import Table

# what is asked first of the papers, and the items whose comparisons answer it
CLAIMS: dict[str, tuple[str, ...]] = {
    "A static norm does as well as one chosen for every prompt (LeanK)": ("leank:table1",),
    "The second stage of training makes better masks (LeanK)": ("leank:table12",),
    "The budget per head and the learned choice both help (LeanK)": ("leank:table9",),
    "Heads of low w_hf carry retrieval (LeanK)": ("leank:table11",),
    "ThinK is better than the norms of K (ThinK)": ("think:table1",),
    "IAP's error is below ThinK's, most of all in shallow layers (IAP)": ("iap:fig3",),
    "ASL selects later on harder tasks (ASL)": ("asl:fig9", "asl:fig6"),
    "Lethe's memory is below dense's, and stops growing on long replies (Lethe)": ("lethe:fig4",),
}
COLUMNS = ["item", "what is compared, and the claim", "here, with its 95% interval", "verdict"]
WORDS = {"shows": "shows", "contradicts": "contradicted", "undecided": "not decided"}


def headlines(everything: Sequence[Made]) -> list[Table]:
    """Return a table of verdicts for each of CLAIMS on which there is something."""
    by_id = {made.item.id: made for made in everything}
    found = [(title, [by_id[name] for name in names if name in by_id]) for title, names in CLAIMS.items()]
    return [table(title, some) for title, some in found if any(made.judgements for made in some)]


def table(title: str, some: Sequence[Made]) -> Table:
    """Return the verdicts of some items; items that share a comparison name it once."""
    seen: set[str] = set()
    lines = []
    for made in some:
        for one in made.judgements:
            if one.sentence not in seen:
                seen.add(one.sentence)
                why = f" ({one.remarks})" if one.remarks else ""
                lines.append([made.item.id, one.compared, one.figures, f"{WORDS[one.verdict]}{why}"])
    return Table.of(title, COLUMNS, lines)


def as_markdown(everything: Sequence[Made]) -> str:
    """Write the claims that are asked first, then every comparison."""
    tables = [*headlines(everything), table("Every comparison", everything)]
    text = "\n\n".join(["# Claims of the papers", *(table.markdown() for table in tables)]) + "\n"
    return text.replace("--:|", "---|")  # columns of words
