"""Hooks of mkdocs: README.md is the first page, and links to files that are no page are plain text.

Such a file (an example, a test, the code) is in the repository, which has no public address to
link to.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[2]
_KIND = re.compile(r"([|]|[-*] |\d+\. )")  # of a table, or of a list
_LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add README.md as the first page."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Make the links of a page fit the site."""
    index = page.file.src_uri == "index.md"
    here = "" if index else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def fitted(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if not target or ":" in target:
            return link[0]
        at = posixpath.normpath(posixpath.join(here, target))
        uri = "index.md" if at == "README.md" else at.removeprefix("docs/")
        if uri == at or not posixpath.splitext(uri)[1]:  # not a page, or a folder of them
            return text
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"[{text}]({posixpath.relpath(uri, start)}{anchor})"

    return "\n".join(_spaced(_LINK.sub(fitted, markdown).split("\n")))


def _spaced(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines with an empty one before each table and list, as Python-Markdown needs it."""
    before, in_code = "", False
    for line in lines:
        if line.lstrip().startswith("```"):
            in_code = not in_code
        kind, above = _KIND.match(line), _KIND.match(before)
        begins = kind is not None and (above is None or above[1] != kind[1])
        if begins and not in_code and before.strip() and not before.startswith(" "):
            yield ""
        yield line
        before = line
