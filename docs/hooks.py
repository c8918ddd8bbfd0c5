"""What the site takes from outside of docs/: the README as its first page, the changelog, and the examples.

Links are written for the repository, and rewritten here for the site.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, *, config: Any) -> Files:
    """Add what lies outside of docs/."""
    for name, uri in _PAGES.items():
        files.append(File.generated(config, uri, content=_outside((ROOT / name).read_text())))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links of pages in docs/ to what lies outside of it lead to what was added."""
    for name, uri in _PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({uri}")
    return markdown.replace("](../examples/", "](examples/")


def _outside(text: str) -> str:
    """The text of a file in the root, as if it were in docs/."""
    for name, uri in _PAGES.items():
        text = text.replace(f"]({name}", f"]({uri}")
    return re.sub(r"\]\(docs/", "](", text)
