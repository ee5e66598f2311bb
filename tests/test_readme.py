"""What the README shows runs as it stands."""

import re

from tests import ROOT

README = ROOT / "README.md"


def test_the_example_of_a_mask_in_use(monkeypatch, capsys):
    monkeypatch.chdir(README.parent)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("4821907.")
