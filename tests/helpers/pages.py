"""The pages of the repository: docs/, and the Markdown files beside the code."""

from tests import ROOT

DOCS = ROOT / "docs"
PAGES = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += [page for package in ("scripts", "leank_train") for page in (ROOT / package).rglob("*.md")]
