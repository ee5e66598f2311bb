"""What the README shows runs as it stands."""

import re

from tests import ROOT

README = ROOT / "README.md"


def test_the_example_of_a_mask_in_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # it needs no checkout
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == shown


def test_the_families_are_those_of_their_table():
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in (ROOT / "docs/families.md").read_text("utf-8").splitlines()[17:]
    ]
    run, trained = (sum(row[column] == "yes" for row in rows) for column in (2, 4))
    said = f"Of {len(rows)} model families that are tested, {run} run, {trained} of them can be trained too"
    assert said in " ".join(README.read_text(encoding="utf-8").split())
