"""Faults of the kinds that real systems had, planted into proved programs: each is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node

import meshc
from meshc.ir import record, records, spmd
from meshc.ir.graph import call, copy_graph, output_of
from meshc.program.program import PlainProgram, Port, Stage
from meshc.proof.erasure import erase
from tests.golden.cases import CASES, gpt, train
from tests.proof.edited_lines import behind, put

aten, ours = torch.ops.aten, torch.ops.meshc
BASES = ("gpt dp tp", "gpt fsdp microbatches", "gpt pipeline", "rows uneven", "resnet dp", "few bits")


def few_bits() -> meshc.Program:
    """Products in 8 bits, masked weights, and gradients in 8 bits with their errors."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 16))
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss)
    plan = "dp: batch\ntp: ffn\nprecision 0: float8 row\nsparse 2: 2:4\ncompress dp: int8"
    inputs = {"args": (torch.randn(8, 64),), "kwargs": {"target": torch.randn(8, 16)}}
    return meshc.compile(step, meshc.Mesh("dp=2,tp=2"), plan=plan, **inputs)


@cache
def base(name: str) -> tuple[PlainProgram, Stage]:
    made = few_bits if name == "few bits" else CASES.get(name)
    program = made() if made is not None else train(gpt(batch=5), "dp_shard=3", clip=1.0)
    return program.compiled, program.lowered.joint.as_stage()


@dataclass
class Edit:
    """A program of which lines are changed."""

    program: PlainProgram

    @staticmethod
    def of(name: str) -> Edit:
        program, _ = base(name)
        return Edit(replace(program, stages={key: replace(stage, graph=copy_graph(stage.graph)) for key, stage in program.stages.items()}))

    def lines(self, target: object, where: Callable[[Node], bool] = lambda node: True) -> list[Node]:
        nodes = [node for stage in self.program.stages.values() for node in stage.graph.nodes]
        found = [node for node in nodes if node.op == "call_function" and node.target is target and where(node)]
        assert found, f"no line calls {target}"
        return found

    def entering(self, key: str) -> Node:
        return next(node for stage in self.program.stages.values() for node, own in stage.keys().items() if own == key)


def is_copy(node: Node) -> None:
    """The line does nothing, and says that it does."""
    node.target, node.args, node.kwargs = aten.clone.default, (node.args[0],), {}


def over(*axes: str) -> Callable[[Node], bool]:
    return lambda node: list(node.args[1]) == list(axes)  # type: ignore[arg-type]


def swapped(node: Node, one: int, other: int) -> None:
    args = list(node.args)
    args[one], args[other] = args[other], args[one]
    node.args = tuple(args)


def row_of(node: Node, column: int, change: Callable[[list[Any]], None]) -> None:
    rows = [list(row) if isinstance(row, list | tuple) else row for row in node.args]
    change(rows[column])
    node.args = tuple(rows)


def pair_swapped(rows: list[Any]) -> None:
    alike = next((i, j) for i in range(len(rows)) for j in range(i) if record(rows[i]).shape == record(rows[j]).shape)
    rows[alike[0]], rows[alike[1]] = rows[alike[1]], rows[alike[0]]


def number(kind: type, change: Callable[[Any], Any]) -> Callable[[Node], None]:
    def edit(node: Node) -> None:
        place = next(at for at, argument in enumerate(node.args) if type(argument) is kind)
        put(node, place, change(node.args[place]))

    return edit


def outputs_swapped(edit: Edit) -> None:
    stage = next(iter(edit.program.stages.values()))
    keys, rows = list(stage.outputs), list(output_of(stage.graph).args[0])  # type: ignore[arg-type]
    i, j = next(
        (i, j) for i in range(len(rows)) for j in range(i)
        if keys[i].startswith("parameter") and keys[j].startswith("parameter") and record(rows[i]).shape == record(rows[j]).shape
    )  # fmt: skip
    rows[i], rows[j] = rows[j], rows[i]
    output_of(stage.graph).args = (tuple(rows),)


def schedule(change: Callable[[list[Any]], None]) -> Callable[[Edit], None]:
    def edit(one: Edit) -> None:
        rows = list(one.program.schedule)
        change(rows)
        one.program = replace(one.program, schedule=tuple(rows))

    return edit


def without_last_add(rows: list[Any]) -> None:
    del rows[max(at for at, row in enumerate(rows) if row.op == "add")]


def added_twice(rows: list[Any]) -> None:
    at = next(at for at, row in enumerate(rows) if row.op == "add")
    rows.insert(at, rows[at])


def read_early(rows: list[Any]) -> None:
    """The last stage runs before the last part has been added."""
    at = max(at for at, row in enumerate(rows) if row.op == "run")
    rows.insert(max(at for at, row in enumerate(rows) if row.op == "add"), rows.pop(at))


def run_again(rows: list[Any]) -> None:
    rows[:] = [replace(row, microbatch=0) if row.microbatch == 1 else row for row in rows]


def enters_otherwise(edit: Edit) -> None:
    """A parameter is stored split over another axis than its readers say."""

    def changed(port: Port) -> Port:
        if port.kind != "parameter" or port.sharding is None or "tp" not in port.sharding.split_axes():
            return port
        other = {"tp": "dp", "dp": "tp"}
        dims = (tuple(replace(part, axes=tuple(map(other.get, part.axes))) for part in row) for row in port.sharding.dims)  # type: ignore[arg-type]
        return replace(port, sharding=replace(port.sharding, dims=tuple(dims)))

    edit.program = replace(edit.program, inputs=tuple(map(changed, edit.program.inputs)))


def given_otherwise(edit: Edit) -> None:
    """One stage gives another loss than the others."""
    stage = next(stage for name, stage in edit.program.stages.items() if name.startswith("after_"))
    loss = stage.results()["output:output"]
    with stage.graph.inserting_after(loss):
        output_of(stage.graph).replace_input_with(loss, call(stage.graph, record(loss), aten.neg.default, loss))


def not_sent(edit: Edit) -> None:
    assert edit.program.pipeline is not None
    messages = dict(edit.program.pipeline.messages)
    link = next(link for link, keys in messages.items() if keys)
    messages[link] = messages[link][1:]
    edit.program = replace(edit.program, pipeline=replace(edit.program.pipeline, messages=messages))


def other_place(edit: Edit) -> None:
    """A rank's rows are cut by its place on another axis."""
    (shard, *_), places = edit.lines(spmd.shard), edit.lines(spmd.coordinate)
    other = next(place for place in places if place.args[0] != shard.args[3].args[0])  # type: ignore[union-attr]
    shard.prepend(other)
    put(shard, 3, other)


def mask_longer(edit: Edit) -> None:
    (mask, *_) = edit.lines(spmd.mask)
    count = mask.args[2]
    assert isinstance(count, Node)
    with mask.graph.inserting_before(mask):
        longer = call(mask.graph, records(count)[0], spmd.tile_count, count.args[0] + 1, *count.args[1:])  # type: ignore[operator]
    put(mask, 2, longer)


def on(
    target: object, edit: Callable[[Node], object], where: Callable[[Node], bool] = lambda node: True, nth: int = 0
) -> Callable[[Edit], None]:
    def change(one: Edit) -> None:
        edit(one.lines(target, where)[nth])

    return change


def reduced(how: str) -> Callable[[Node], bool]:
    return lambda node: node.args[2] == how


def not_kept(edit: Edit) -> None:
    """What rounding leaves over is lost: an error stays what it was."""
    for stage in edit.program.stages.values():
        key = next(key for key in stage.outputs if key.endswith("part_errors"))
        output_of(stage.graph).replace_input_with(stage.results()[key], edit.entering(key))


def first_read(node: Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


DP_TP, MICRO, PIPE, UNEVEN, CONV, FEW = BASES
UPDATE = ours.adam_many_.default
FAULTS: Mapping[str, tuple[str, Callable[[Edit], None]]] = {
    "an all-reduce is missing": (DP_TP, on(spmd.all_reduce, first_read, over("tp"))),
    "an all-reduce is a copy": (DP_TP, on(spmd.all_reduce, is_copy, over("tp"))),
    "an all-reduce twice": (DP_TP, on(spmd.all_reduce, lambda n: behind(n, spmd.all_reduce, ["tp"], "sum"), over("tp"))),
    "an all-reduce over another axis": (DP_TP, on(spmd.all_reduce, lambda n: put(n, 1, ["dp"]), over("tp"))),
    "gradients reduced over another axis": (DP_TP, on(spmd.all_reduce, lambda n: put(n, 1, ["tp"]), over("dp"))),
    "gradients reduced over both axes": (DP_TP, on(spmd.all_reduce, lambda n: put(n, 1, ["dp", "tp"]), over("dp"))),
    "a maximum for a sum": (DP_TP, on(spmd.all_reduce, lambda n: put(n, 2, "max"), over("tp"))),
    "a gradient halved": (DP_TP, on(spmd.all_reduce, lambda n: behind(n, aten.div.Scalar, 2), over("tp"), -1)),
    "a bias counted on every rank": (DP_TP, on(spmd.keep_first, first_read)),
    "a bias counted on every rank, by a copy": (DP_TP, on(spmd.keep_first, is_copy)),
    "rows cut by another axis's place": (DP_TP, other_place),
    "every rank has the second's rows": (DP_TP, on(spmd.shard, lambda n: put(n, 3, 1))),
    "queries for keys": (DP_TP, on(ours.attention.default, lambda n: swapped(n, 0, 1))),
    "keys for values": (DP_TP, on(ours.attention.default, lambda n: swapped(n, 1, 2))),
    "attention that sees all": (DP_TP, on(ours.attention.default, number(bool, lambda causal: not causal))),
    "attention with another scale": (DP_TP, on(ours.attention.default, number(float, lambda scale: scale / 2))),
    "another scale in backward alone": (DP_TP, on(ours.attention_backward.default, number(float, lambda scale: scale / 2))),
    "dropout drawn by another number": (DP_TP, on(ours.dropout.default, number(int, lambda call: call + 1))),
    "dropout with another rate": (DP_TP, on(ours.dropout.default, number(float, lambda rate: rate / 2))),
    "a residual branch left out": (DP_TP, on(aten.add.Tensor, first_read, lambda n: len(record(n).shape) == 3)),
    "a residual branch twice": (DP_TP, on(aten.add.Tensor, lambda n: put(n, 1, n.args[0]), lambda n: len(record(n).shape) == 3)),
    "a matrix not transposed": (DP_TP, on(aten.t.default, first_read, lambda n: record(n).shape[0] == record(n).shape[1])),
    "a matrix not transposed, by a copy": (DP_TP, on(aten.t.default, is_copy, lambda n: record(n).shape[0] == record(n).shape[1])),
    "a clip that scales up": (DP_TP, on(aten.clamp.default, first_read)),
    "a clip by another bound": (DP_TP, on(aten.clamp.default, lambda n: put(n, 2, 2.0))),
    "gradients exchanged between parameters": (DP_TP, on(UPDATE, lambda n: row_of(n, 1, pair_swapped))),
    "states exchanged between parameters": (DP_TP, on(UPDATE, lambda n: row_of(n, 2, pair_swapped))),
    "first and second moments exchanged": (DP_TP, on(UPDATE, lambda n: swapped(n, 2, 3))),
    "betas exchanged": (DP_TP, on(UPDATE, lambda n: swapped(n, 6, 7))),
    "decay coupled": (DP_TP, on(UPDATE, lambda n: put(n, len(n.args) - 2, not n.args[-2]))),
    "a parameter not updated": (DP_TP, on(UPDATE, lambda n: [row_of(n, column, lambda rows: rows.pop()) for column in range(5)])),
    "a parameter updated twice": (DP_TP, on(UPDATE, lambda n: n.append(n.graph.node_copy(n)))),
    "parameters given under each other's names": (DP_TP, outputs_swapped),
    "an index checked against another range": (DP_TP, on(ours.check_index.default, lambda n: put(n, 2, 12))),
    "a bundle taken apart one element off": (MICRO, on(aten.slice.Tensor, lambda n: [put(n, 2, n.args[2] + 1), put(n, 3, n.args[3] + 1)],  # type: ignore[operator]
                                              lambda n: record(n).sharding is None and n.args[1] == 1, 1)),  # fmt: skip
    "a gather of another parameter": (MICRO, on(aten.cat.default, lambda n: row_of(n, 0, pair_swapped))),
    "a microbatch's part not added": (MICRO, schedule(without_last_add)),
    "a sum read before it is complete": (MICRO, schedule(read_early)),
    "a microbatch's part added twice": (MICRO, schedule(added_twice)),
    "a microbatch runs again in place of another": (MICRO, schedule(run_again)),
    "every microbatch reads the first's rows": (MICRO, on(spmd.shard, lambda n: put(n, 3, 0), lambda n: n.args[3].args[0] == "mb")),  # type: ignore[union-attr]
    "a parameter that enters split over another axis": (DP_TP, enters_otherwise),
    "a stage that gives another loss": (PIPE, given_otherwise),
    "a value not sent": (PIPE, not_sent),
    "a sum over one stage alone": (PIPE, on(spmd.all_reduce, is_copy, over("pp"))),
    "padding not masked": (UNEVEN, on(spmd.mask, first_read)),
    "padding masked by another number": (UNEVEN, on(spmd.mask, lambda n: put(n, 3, 1.0))),
    "a mask one position too long": (UNEVEN, mask_longer),
    "a rank's own mean in a norm": (CONV, on(spmd.all_reduce, is_copy)),
    "a scale of a tile": (FEW, on(spmd.all_reduce, first_read, reduced("min"))),
    "a scale reduced over another axis": (FEW, on(spmd.all_reduce, lambda n: put(n, 1, ["tp"]), reduced("min"))),
    "the largest scale for the smallest": (FEW, on(spmd.all_reduce, lambda n: put(n, 2, "max"), reduced("min"))),
    "a scale that is not rounded": (FEW, on(ours.scale_of.default, lambda n: put(n, 3, ""))),
    "a decoded value grown by a sixteenth": (FEW, on(ours.dequantize_blocks.default, lambda n: behind(n, aten.mul.Tensor, 1.0625))),
    "a peak of a tile": (FEW, on(spmd.all_reduce, first_read, reduced("max"))),
    "an error that is not added": (FEW, on(aten.add.Tensor, first_read, lambda n: str(n.args[1]).endswith("errors"))),
    "an error that is not kept": (FEW, not_kept),
    "a mask along the other dim": (FEW, on(ours.keep_largest.default, lambda n: put(n, 1, 0))),
    "a mask of one": (FEW, on(ours.keep_largest.default, lambda n: put(n, 2, 1))),
    "a gradient of dense weights": (FEW, on(ours.keep_largest.default, first_read, nth=-1)),
    "parts sent to one rank for another": (FEW, on(spmd.all_to_all, lambda n: swapped(n, 2, 3), lambda n: list(n.args[2:]) == [1, 0])),
    "another momentum of running means": (CONV, on(aten.mul.Tensor, lambda n: put(n, 1, 0.8), lambda n: n.args[1] in (0.1, 0.9))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_refused(name: str) -> None:
    source, plant = FAULTS[name]
    _, traced = base(source)
    edit = Edit.of(source)
    plant(edit)
    for stage in edit.program.stages.values():
        stage.graph.lint()
    assert not erase(edit.program, traced).holds


@pytest.mark.parametrize("name", BASES)
def test_bases_are_proved(name: str) -> None:
    program, traced = base(name)
    assert erase(program, traced).holds


