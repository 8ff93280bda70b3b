"""What the site does with the pages as it is built (`make site`); the pages stay as they are read in the repository.

    `docs/plans.md`                between backquotes becomes a link to that page
    README.md                      is a page too; its pictures are beside the pages
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

README = Path(__file__).resolve().parent.parent / "README.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "readme.md", content=README.read_text().replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def link(found: re.Match[str]) -> str:
        target = files.get_file_from_path(found[1])
        if target is None:
            return found[0]
        return f"[{found[1]}]({posixpath.relpath(found[1], posixpath.dirname(page.file.src_uri) or '.')})"

    return re.sub(r"`docs/([\w./-]+\.md)`", link, markdown)
