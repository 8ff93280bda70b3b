"""Saved programs and states, changed in a few places as a stranger would: texts, JSON, headers and bytes of tensors.

Each is shown, summed up and run on simulated ranks. It does so, or a `MeshcError` says why not; where a file cannot be read, it names it.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshc
from meshc import artifact
from meshc.errors import ArtifactError, MeshcError
from meshc.ir.mesh import Mesh
from meshc.program.program import PlainProgram, Port
from meshc.report.summary import summary
from meshc.runtime.saved.checkpoint_folder import SavedState, save_state
from meshc.runtime.simulator.simulation import simulate
from meshc.text import printer
from meshc.text.allowed_operators import OPERATORS
from tests.attack.mutate import REALS, WILD

LISTED = sorted(OPERATORS)
MOST_BYTES = 1 << 26
"""Of a program's inputs on all ranks: larger ones are not made."""


class Pooled(nn.Module):
    """Operators whose kernels trust indices: pooling, bags of embeddings, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 8, mode="sum")
        self.up = nn.Conv2d(1, 4, 3, padding=1)
        self.out = nn.Linear(8 + 16, 4)

    def forward(self, x: torch.Tensor, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_max_pool2d(nn.functional.max_pool2d(self.up(x), 2), 2).flatten(1)
        return self.out(torch.cat([pooled, self.table(words, offsets)], 1))


def _chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))


def build(folder: Path) -> list[Path]:
    """Saved programs of some kinds, and one saved state."""
    torch.manual_seed(0)
    made: list[Path] = []

    def keep(name: str, program: Any) -> None:
        program.save(folder / name)
        made.append(folder / name)

    def step(model: nn.Module) -> meshc.TrainStep:
        return meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=nn.functional.cross_entropy)

    x, target = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep("step", meshc.compile(step(_chain()), Mesh("dp=2,tp=2"), args=(x,), kwargs={"target": target}))
        staged = meshc.TrainStep(
            chain := _chain(), optimizer=torch.optim.SGD(chain.parameters(), lr=0.1), loss=nn.functional.mse_loss, microbatches=2
        )
        keep(
            "pipeline",
            meshc.compile(
                staged, Mesh("pp=2"), args=(x,), kwargs={"target": x}, options=meshc.Options(pipeline=meshc.Pipelining(splits=["3"]))
            ),
        )
        images = torch.randn(4, 1, 8, 8), torch.randint(0, 10, (9,)), torch.tensor([0, 2, 4, 7])
        keep("pooled", meshc.compile(step(Pooled()), Mesh("dp=2"), args=images, kwargs={"target": target}, backend="inductor"))
    tiles: list[tuple[Port, torch.Tensor | None]] = [(Port("parameter", "w", (4, 4), torch.float32), torch.ones(4, 4))]
    save_state(folder / "state", Mesh("dp=1"), 0, tiles, 0, 0, lambda told: [told])
    return [*made, folder / "state"]


def attack(saved: Path, to: Path, draw: random.Random) -> str | None:
    """A copy of `saved`, changed, is used; None if that is as it should be, or what is wrong with it."""
    shutil.copytree(saved, to)
    try:
        files = sorted(file for file in to.rglob("*") if file.is_file())
        for _ in range(draw.choice([1, 1, 2, 4])):
            _change(draw.choice(files), draw)
        return _used(to)
    finally:
        shutil.rmtree(to, ignore_errors=True)


def _used(folder: Path) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (folder / "state.json").exists():
                with SavedState(folder) as state:
                    for key in state.tensors:
                        state.tile(key, None, {}, {})
                return None
            program = artifact.load(folder, allow_edited=True)
    except ArtifactError as error:
        return None if str(folder) in str(error) else f"the message names no file: {error}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            printer.print_program(program)
            summary(program)
            _run(program, folder)
    except MeshcError:
        pass
    return None


def _run(program: PlainProgram, folder: Path) -> None:
    ports = [port for port in program.inputs if port.kind != "constant"]
    if sum(torch.Size(port.shape).numel() * port.dtype.itemsize for port in ports) * program.mesh.world_size > MOST_BYTES:
        return
    values = {port.key: _value(port) for port in ports}
    with artifact.open_weights(folder) as weights:
        for port in ports:
            if port.name in weights.names and port.kind in ("parameter", "buffer") and weights.shape(port.name) == port.shape:
                values[port.key] = weights.tensor(port.name).to(port.dtype)
    if program.mesh.world_size <= 8:
        simulate(program, values, poison=False)


def _value(port: Port) -> torch.Tensor:
    if port.dtype.is_floating_point:
        return torch.randn(port.shape).to(port.dtype)
    return torch.zeros(port.shape, dtype=port.dtype) if port.dtype.is_complex else torch.randint(0, 2, port.shape).to(port.dtype)


# --------------------------------------------------------------------------------------------------------------------------- changes


def _change(file: Path, draw: random.Random) -> None:
    if draw.random() < 0.1:
        return _bytes(file, draw)
    if file.suffix == ".json":
        return _json(file, draw)
    return _text(file, draw) if file.suffix == ".py" else _bytes(file, draw)


def _bytes(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if not content:
        return
    how = draw.randrange(4)
    if how == 0:
        content = content[: draw.randrange(len(content))]
    elif how == 1:
        content[:8] = draw.choice([0, 1, 1 << 20, 1 << 40, (1 << 64) - 1, len(content)]).to_bytes(8, "little")
    else:
        for _ in range(draw.choice([1, 2, 8])):
            place = draw.randrange(min(len(content), 600) if how == 2 else len(content))
            content[place] = draw.choice([content[place] ^ (1 << draw.randrange(8)), draw.randrange(256), ord("9"), ord("["), ord("{")])
    file.write_bytes(bytes(content))


def _json(file: Path, draw: random.Random) -> None:
    try:
        told = json.loads(file.read_text())
    except (ValueError, OSError):
        return
    unhashed = draw.random() < 0.3
    if unhashed and file.name == "state.json":
        told["version"] = 1
        told.pop("sha256", None)
    places = list(_places(told))
    if not places:
        return
    held, key = draw.choice(places)
    how = draw.random()
    if how < 0.1 and isinstance(held, dict):
        del held[key]
    elif how < 0.2 and isinstance(held, list):
        held.extend(held[: MOST_BYTES // file.stat().st_size] * draw.choice([1, 3, 1000]))
    elif isinstance(held[key], str) and how < 0.6:
        held[key] = _edited(held[key], draw)
    else:
        held[key] = draw.choice([*WILD, *REALS, None, True, "", "x", [], {}, [[]], {"a": 1}, "9" * 400, 10**400, _deep(draw)])
    try:
        written = _resealed(told) if unhashed and file.name == "manifest.json" else json.dumps(told)
    except RecursionError:  # lists in lists in a place that is deep already: what the writer cannot write, nobody reads
        return
    file.write_text(written if draw.random() < 0.95 else written.replace("{", '{"format": 3,', 1))


def _resealed(told: dict[str, Any]) -> str:
    """The table with its own hash put right, as who edits on purpose would."""
    text = json.dumps({**{name: value for name, value in told.items() if name != "sha256"}, "sha256": "0" * 64})[:-1] + "\n}\n"
    start = text.rindex("0" * 64)
    return text[:start] + hashlib.sha256(text[:start].encode()).hexdigest() + text[start + 64 :]


def _deep(draw: random.Random) -> Any:
    found: Any = 1
    for _ in range(draw.choice([10, 900])):
        found = [found]
    return found


def _places(told: Any) -> Iterator[tuple[Any, Any]]:
    left = [told]
    while left:
        held = left.pop()
        for key in held if isinstance(held, dict) else range(len(held)) if isinstance(held, list) else ():
            yield held, key
            left.append(held[key])


def _text(file: Path, draw: random.Random) -> None:
    lines = file.read_text(errors="replace").split("\n")
    for _ in range(draw.choice([1, 1, 3])):
        place = draw.randrange(len(lines))
        lines[place] = _edited(lines[place], draw)
    how = draw.random()
    if how < 0.1:
        del lines[draw.randrange(len(lines))]
    elif how < 0.2:
        lines.insert(draw.randrange(len(lines)), draw.choice(lines))
    file.write_text("\n".join(lines))


def _edited(line: str, draw: random.Random) -> str:
    """One number, name, operator or dtype of a line is another one."""
    edits: list[tuple[str, Callable[[], str]]] = [
        (r"-?\d+", lambda: str(draw.choice(WILD))),
        (r"-?\d+", lambda: str(draw.randint(0, 9))),
        (r"(aten|meshc)\.[\w.]+", lambda: draw.choice(LISTED)),
        (r"\b[fib]\d+\b", lambda: draw.choice(["f32", "f64", "i64", "i32", "bf16", "b8", "c64"])),
        (r"\b[a-z]\w*\b", lambda: draw.choice(re.findall(r"\b[a-z]\w*\b", line) or ["x"])),
        (r"\[[^\[\]]*\]", lambda: draw.choice(["[]", "[0]", "[-1]", "[4, 8]", "[8, 4]", f"[{draw.choice(WILD)}]"])),
        (r"[\[\](){}*/,:=]", lambda: draw.choice("[](){}*/,:=")),
        (r"\d+", lambda: "{((9 ** 7) ** 7)}"),
    ]
    pattern, other = draw.choice(edits)
    found = list(re.finditer(pattern, line))
    if not found:
        return line
    match = draw.choice(found)
    return line[: match.start()] + other() + line[match.end() :]
