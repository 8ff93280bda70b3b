"""Runs the blocks of a page's Python, one after the other, as its reader would: on ranks that have nothing set up."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

import meshc

DOCS = Path(meshc.__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[str]:
    """Each with as many empty lines before it as the page has, so that an error names the page's line."""
    text = (DOCS / page).read_text()
    return ["\n" * text[: found.start(1)].count("\n") + found[1] for found in BLOCK.finditer(text)]


def run(*pages: str) -> None:
    """page:N runs the first N blocks of a page."""
    for page, count in (given.split(":") for given in pages):
        module = ModuleType("page_" + re.sub(r"\W", "_", page))
        sys.modules[module.__name__] = module  # which a trace of a class of it looks for
        for block in blocks(page)[: int(count)]:
            exec(compile(block, str(DOCS / page), "exec"), vars(module))
        print(f"ran {page} {count}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
