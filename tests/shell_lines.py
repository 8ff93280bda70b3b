"""Command lines on pages, looked up and not run: programs, targets, modules, files, options that they name must be there.

    for line in lines(page):
        assert faults(line) == []
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Final

from torch.distributed.run import get_args_parser

from meshc import environment
from meshc.__main__ import _parser

ROOT: Final = Path(__file__).resolve().parent.parent
MAKEFILE: Final = (ROOT / "Makefile").read_text()
TARGETS: Final = frozenset(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
SETTINGS: Final = frozenset(re.findall(r"^(?:export )?([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))
OF_READERS: Final = ("train.py", "mlp.py", "train_unconditional.py")
"""Scripts that a page has its reader write, that stand for a reader's own, or that are another project's."""
PROGRAMS: Final = ("make", "python", "python3", ".venv/bin/python", "torchrun", "meshc", "cd")
BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND: Final = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(map(re.escape, PROGRAMS))}) \S")


def lines(page: str) -> Iterator[str]:
    """Those in blocks of `sh` and in indented ones, without what stands behind two spaces: a comment, or a second command."""
    blocks = [text.splitlines() for kind, text in BLOCK.findall(page) if kind == "sh"]
    indented = [line.strip() for line in BLOCK.sub("", page).splitlines() if line.startswith("    ")]
    for line in [*(line for block in blocks for line in block), *indented]:
        yield from (part for part in re.split(r"\s{2,}", line) if COMMAND.match(part))


def spans(page: str) -> Iterator[str]:
    """Those between backquotes within a line: often a part of a command, such as `meshc show --json`."""
    text = BLOCK.sub("", page).replace("\n", " ")
    yield from (span for span in re.findall(r"`([^`]+)`", text) if COMMAND.match(span))


def faults(line: str, partly: bool = False, folder: Path = ROOT) -> list[str]:
    """What a command line names that is not there. partly: arguments that a command must have may be left out."""
    words = shlex.split(line, comments=True)
    found = []
    while words and (setting := re.fullmatch(r"([A-Z_]+)=.*", words[0])):
        found += [f"{setting[1]} is read by nobody"] * (setting[1] not in {*environment.KNOWN, *SETTINGS})
        words = words[1:]
    program, *rest = words
    if program == "make":
        return found + _make(rest)
    if program == "cd":
        return found + [f"there is no folder {rest[0]}"] * (not (folder / rest[0]).is_dir())
    if program == "torchrun" or rest[:2] == ["-m", "torch.distributed.run"]:
        return found + _torchrun(rest[2 * (program != "torchrun") :], partly, folder)
    if program == "meshc":
        return found + _meshc(rest, partly)
    return found + (_module(rest[1], rest[2:], partly) if rest[0] == "-m" else _file(rest[0], rest[1:], folder))


def _make(words: list[str]) -> list[str]:
    known = [word.partition("=")[0] in SETTINGS if "=" in word else word in TARGETS for word in words]
    return [f"make knows no {word}" for word, there in zip(words, known, strict=True) if not there]


def _torchrun(words: list[str], partly: bool, folder: Path) -> list[str]:
    given, said = _parsed(get_args_parser(), [*words, OF_READERS[0]] if partly else words)
    if given is None:
        return [f"torchrun: {said}"]
    if given.module:
        return _module(given.training_script, given.training_script_args, partly)
    return _file(given.training_script, given.training_script_args, folder)


def _meshc(words: list[str], partly: bool) -> list[str]:
    parser = _parser()
    if not partly:
        given, said = _parsed(parser, words)
        return [] if given is not None else [f"meshc: {said}"]
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    if words[0] not in commands:
        return [f"meshc knows no {words[0]}"]
    known = commands[words[0]]._option_string_actions
    return [f"meshc {words[0]} knows no {word}" for word in words if word.startswith("--") and word not in known]


def _module(name: str, words: list[str], partly: bool) -> list[str]:
    if name == "meshc":
        return _meshc(words, partly)
    if name == "pytest":
        return [f"there is no {word}" for word in words if word.startswith("tests/") and not (ROOT / word).exists()]
    spec = importlib.util.find_spec(name)
    if spec is None:
        return [f"there is no module {name}"]
    main = importlib.util.find_spec(f"{name}.__main__") if spec.submodule_search_locations else spec
    assert main is not None and main.origin is not None
    return _options(Path(main.origin), words)


def _file(name: str, words: list[str], folder: Path) -> list[str]:
    if name in OF_READERS:
        return []
    path = next((place / name for place in (folder, ROOT / "examples" / "own_operator") if (place / name).exists()), None)
    return [f"there is no file {name}"] if path is None else _options(path, words)


def _options(path: Path, words: list[str]) -> list[str]:
    """A script's options stand in its text."""
    text = path.read_text()
    return [f"{path.name} knows no {word}" for word in words if word.startswith("--") and f'"{word}"' not in text]


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace | None, str]:
    with redirect_stderr(io.StringIO()) as said:
        try:
            return parser.parse_args(words), ""
        except SystemExit:
            return None, said.getvalue().strip().splitlines()[-1]
