"""tables.tex: the report's tables for a paper, with booktabs; compiles whatever labels and names contain."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from leank.eval.report.table import ReportTable

HEADER = "% \\usepackage{booktabs,graphicx} in the preamble, \\input{tables.tex} in the text\n"
SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{c: f"{{{c}}}" for c in "[]*"},  # after the end of a row they would be its options
    "–": "--", "—": "---", "×": r"$\times$", "±": r"$\pm$", "≤": r"$\leq$", "≥": r"$\geq$", "−": "$-$",
    "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}", "§": r"\textsection{}", "¶": r"\textparagraph{}",
    "α": r"$\alpha$", "β": r"$\beta$", "λ": r"$\lambda$", "τ": r"$\tau$",
}  # fmt: skip
WIDE = 8  # columns; a table of more is scaled to the width of the text


def escape(text: str) -> str:
    """Text as LaTeX; letters that no default font has lose their accents or become a question mark."""
    out = []
    for char in text:
        if char in SPECIAL:
            out.append(SPECIAL[char])
        elif char.isascii():
            out.append(char if char.isprintable() else " ")
        else:
            plain = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
            out.append("".join(SPECIAL.get(c, c) for c in plain) or "{?}")
    return "".join(out)


def latex(table: ReportTable, about: str = "") -> str:
    """A table environment; figures of the papers stand below a rule, in italics. about: what the caption adds."""
    columns = len(table.head)
    own = [line for line in table.lines if not line.published]
    printed = [line for line in table.lines if line.published]
    body = [" & ".join(map(escape, table.head)) + r" \\", r"\midrule"]
    body += [" & ".join(map(escape, line.cells)) + r" \\" for line in own]
    if printed:
        body.append(r"\midrule")
        body += [" & ".join(f"\\textit{{{escape(text)}}}" for text in line.cells) + r" \\" for line in printed]
    tabular = "\n".join(
        [f"\\begin{{tabular}}{{l{'r' * (columns - 1)}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}"]
    )
    if columns > WIDE:
        tabular = f"\\resizebox{{\\textwidth}}{{!}}{{%\n{tabular}}}"
    caption = escape(". ".join(part.rstrip(".") for part in (table.title, about, table.note) if part) + ".")
    return f"\\begin{{table}}\n\\centering\n\\caption{{{caption}}}\n{tabular}\n\\end{{table}}\n"


def document(tables: Iterable[tuple[str, ReportTable]]) -> str:
    """All tables with what their captions add, as one file."""
    return HEADER + "\n" + "\n".join(latex(table, about) for about, table in tables)
