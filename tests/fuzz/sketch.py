"""A random program as data: leaves, steps, outputs; and as the text of an nn.Module, which is what gets compiled.

    leaves   p0: parameter f64[6, 8]     x0: input f64[5, 6]
    steps    v0 = torch.matmul(x0, p0)       v1 = torch.relu(v0)
    outputs  v1

A step's text is Python over `{0}`, `{1}`, ... (its operands) and `{out}` (its result, or `{out0}`, `{out1}`, ... for several). Everything
about a sketch is a function of its data, so it can be printed, run again, and made smaller.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPACE: dict[str, Any] = {"torch": torch, "F": F, "nn": nn}
"""What the text of a step may name."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program starts from: a parameter, a buffer, or an input. Its values follow from `seed`.

    integers lie in [low, high); `grad` is whether an input asks for its gradient
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str = "float64"
    low: int = 0
    high: int = 1
    grad: bool = False
    seed: int = 0

    @property
    def text(self) -> str:
        """An expression for its values."""
        generator = f"generator=torch.Generator().manual_seed({self.seed})"
        if self.dtype == "float64":
            made = f"torch.randn({list(self.shape)}, {generator}, dtype=torch.float64)"
            return f"nn.Parameter({made})" if self.kind == "parameter" else made + ".requires_grad_()" * self.grad
        low, high = (0, 2) if self.dtype == "bool" else (self.low, self.high)
        made = f"torch.randint({low}, {high}, {list(self.shape)}, {generator})"
        return f"{made}.bool()" if self.dtype == "bool" else made

    def value(self) -> Tensor:
        made: Tensor = eval(self.text, dict(SPACE))
        return made


@dataclass(frozen=True)
class Step:
    """`text` over operands, results `outs`; `op` is the entry of the menu that it came from."""

    op: str
    text: str
    operands: tuple[str, ...]
    outs: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The statements, with names in place."""
        outs = {"out": self.outs[0], **{f"out{index}": name for index, name in enumerate(self.outs)}}
        return self.text.format(*self.operands, **outs).split("\n")


@dataclass(frozen=True)
class Sketch:
    """A program.

    parts  the numbers of steps in each submodule of a list, in order
    loss   its output is one number
    batch  rows of the batch with which all inputs begin, or 0
    """

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    parts: tuple[int, ...] = ()
    loss: bool = False
    batch: int = 0

    def of_kind(self, kind: str) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind == kind]

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of one call."""
        return {leaf.name: leaf.value() for leaf in self.of_kind("input")}

    @property
    def size(self) -> tuple[int, int, int, int]:
        """What shrinking makes smaller: steps, outputs, leaves, elements."""
        elements = sum(sum(leaf.shape) for leaf in self.leaves)
        return len(self.steps), len(self.outputs), len(self.leaves), elements


def run_step(step: Step, env: dict[str, Any]) -> None:
    """Run one step on the tensors of `env`, which gets its results."""
    space = {**SPACE, **env}
    exec("\n".join(step.lines), space)
    for name in step.outs:
        env[name] = space[name]


def text(sketch: Sketch) -> str:
    """The nn.Module, as Python."""
    lines: list[str] = []
    body: list[str] = []
    start = 0
    for index, count in enumerate(sketch.parts or (len(sketch.steps),)):
        steps = sketch.steps[start : start + count]
        rest = sketch.steps[start + count :]
        start += count
        if not sketch.parts or not steps:
            body += [line for step in steps for line in step.lines]
            continue
        made = [name for step in steps for name in step.outs]
        later = {name for step in rest for name in step.operands} | set(sketch.outputs)
        takes = list(dict.fromkeys(name for step in steps for name in step.operands if name not in made))
        gives = [name for name in made if name in later] or [made[-1]]
        lines += [f"class Part{index}(nn.Module):", f"    def forward(self, {', '.join(takes)}):" if takes else "    def forward(self):"]
        lines += [f"        {line}" for step in steps for line in step.lines]
        lines += [f"        return {', '.join(gives)}", "", ""]
        body.append(f"{', '.join(gives)} = self.parts[{sum(map(bool, sketch.parts[:index]))}]({', '.join(takes)})")
    return "\n".join([*lines, *_module(sketch, body)]) + "\n"


def _module(sketch: Sketch, body: Sequence[str]) -> list[str]:
    parameters, buffers = sketch.of_kind("parameter"), sketch.of_kind("buffer")
    parts = ", ".join(f"Part{index}()" for index, count in enumerate(sketch.parts) if count)
    init = [f"self.{leaf.name} = {leaf.text}" for leaf in parameters]
    init += [f"self.register_buffer({leaf.name!r}, {leaf.text})" for leaf in buffers]
    init += [f"self.parts = nn.ModuleList([{parts}])"] if parts else []
    arguments = "".join(f", {leaf.name}" for leaf in sketch.of_kind("input"))
    used = {name for step in sketch.steps for name in step.operands} | set(sketch.outputs)
    read = [f"{leaf.name} = self.{leaf.name}" for leaf in (*parameters, *buffers) if leaf.name in used]
    given = ", ".join(sketch.outputs)
    result = " + ".join(f"{name}.sum() / {name}.numel()" for name in sketch.outputs) if sketch.loss else f"({given},)"
    return [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *[f"        {line}" for line in init],
        "",
        f"    def forward(self{arguments}):",
        *[f"        {line}" for line in (*read, *body)],
        f"        return {result}",
    ]


def module(sketch: Sketch) -> nn.Module:
    """The nn.Module, made from its text; tracebacks and sources show the text's lines."""
    source = text(sketch)
    name = f"<sketch {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space = dict(SPACE)
    exec(compile(source, name, "exec"), space)
    made: nn.Module = space["Model"]()
    return made


def script(
    sketch: Sketch, mesh: str, plan: str, title: str, step: Mapping[str, Any] | None = None, inputs: str = "global",
    attention: str | None = None, remat: str | None = None,
) -> str:  # fmt: skip
    """A file to run with Python that compiles and verifies; `step` are the arguments of a TrainStep, if it is one."""
    given = ", ".join(f"{leaf.name!r}: {leaf.text}" for leaf in sketch.of_kind("input"))
    what = "model"
    if step is not None:
        extra = "".join(f", {key}={value!r}" for key, value in step.items())
        what = f"meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9){extra})"
    local = ", inputs='local'" if inputs == "local" else ""
    asked = {"sequence": f"meshc.SplitSequence(attention={attention!r})" if attention else "", "remat": repr(remat) if remat else ""}
    named = ", ".join(f"{name}={value}" for name, value in asked.items() if value)
    options = f", options=meshc.Options({named})" if named else ""
    return "\n".join([
        *(f"# {line}" for line in title.splitlines()), "import torch", "import torch.nn.functional as F", "from torch import nn", "",
        "import meshc", "", "", text(sketch), "", "model = Model()", f"inputs = {{{given}}}",
        f"program = meshc.compile({what}, meshc.Mesh({mesh!r}), kwargs=inputs, plan={plan!r}{local}{options})",
        "print(program)", "print(meshc.verify(program, inputs, dtype=torch.float64))", "",
    ])  # fmt: skip


def execute(sketch: Sketch, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Every value of a run over these leaves."""
    env: dict[str, Any] = dict(values)
    for step in sketch.steps:
        run_step(step, env)
    return env
