"""A hook of mkdocs: files of the repository that a page links to (`../examples/x.py`) become text files of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)\)")


def on_files(files: Any, config: Any) -> None:
    """Adds every such file under `repository/`; one that does not exist is left to mkdocs, as a broken link."""
    for page in list(files.documentation_pages()):
        for name in _OUTSIDE.findall(page.content_string):
            path = f"repository/{name}.txt"
            if (ROOT / name).is_file() and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to them."""
    return _OUTSIDE.sub(r"](repository/\1.txt)", markdown)
