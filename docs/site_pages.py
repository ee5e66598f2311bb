"""Hook of mkdocs: pages that are files of the repository's root keep their links inside the site."""

from __future__ import annotations

import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def of_site(text: str, up: str) -> str:
    """A page of the repository's root as a page of docs/: links into docs/ stay, those to other files become text."""
    text = re.sub(r'(src|srcset|href)="docs/', rf'\1="{up}', text)
    text = text.replace("](docs/", "](site:").replace("](CONTRIBUTING.md", "](site:extend/contributing.md")
    text = text.replace("](CHANGELOG.md", "](site:reference/changelog.md")
    text = LINK.sub(lambda link: link.group(0) if link.group(2).startswith("site:") else link.group(1), text)
    return text.replace("](site:", f"]({up}")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page before its Markdown is rendered."""
    found = re.fullmatch(r"<!-- the page is (\S+) -->", markdown.strip())
    if not found:
        return markdown
    with open(found.group(1), encoding="utf-8") as file:
        return of_site(file.read(), "../" * page.file.src_uri.count("/"))
