"""Runs the Python of the pages as its reader would, block after block: on ranks that have nothing set up, in one folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

import meshc
from tests.processes.scenes import SCENES

DOCS = Path(meshc.__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """kind: the word behind the fence. before: how many lines of the page stand before the block's first."""

    kind: str
    text: str
    before: int


def blocks(page: str, *kinds: str) -> list[Block]:
    """All of a page in order, or those of some kinds. `page` is seen from docs/."""
    text = (DOCS / page).read_text()
    found = [Block(found[1], found[2], text[: found.start(2)].count("\n")) for found in BLOCK.finditer(text)]
    return [block for block in found if not kinds or block.kind in kinds]


@contextlib.contextmanager
def _folder(name: str) -> Iterator[None]:
    """Works in a folder that the ranks of a launch share, which goes with the last of them."""
    path = Path(tempfile.gettempdir()) / f"page-{name}-{os.environ.get('MASTER_PORT', os.getpid())}"
    path.mkdir(exist_ok=True)
    os.chdir(path)
    try:
        yield
        if dist.is_initialized():
            dist.barrier()
    finally:
        os.chdir(DOCS)
        shutil.rmtree(path, ignore_errors=True)


def run(*names: str) -> None:
    """Scenes by their names, one after the other."""
    scenes = {scene.name: scene for scene in SCENES}
    for scene in (scenes[name] for name in names):
        module = ModuleType("page_" + re.sub(r"\W", "_", scene.name))
        sys.modules[module.__name__] = module  # which a trace of a class of it looks for
        python = blocks(scene.page, "python")
        parts = [scene.before, *("\n" * python[number].before + python[number].text for number in scene.blocks), scene.after]
        with _folder(scene.name):  # what a page writes
            for part in parts:
                exec(compile(part, str(DOCS / scene.page), "exec"), vars(module))
        print(f"ran {scene.name}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
