"""Kinds of faults in a program's updates, schedules, stages, keys, types and random numbers, by name (`edited_lines.py` has the others)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch.fx import Node

from meshc import ir
from meshc.ir import record, records, spmd
from meshc.ir.graph import call, output_of
from meshc.ir.sharing import OVER_OPERAND, set_sharing
from meshc.ops.in_place import WRITERS
from meshc.program.program import PlainProgram, Stage
from tests.proof.edited_lines import draws, exchanged, kind, lists, nodes, on, pair, pick, put, rows_of, shape

aten = torch.ops.aten


# -------------------------------------------------------------------------------------------------------------------- updates


def _updates(program: PlainProgram) -> list[Node]:
    return nodes(program, *WRITERS, where=lambda node: isinstance(node.args[0], list | tuple))


def _column_kind(name: str, column: Callable[[int], int]) -> None:
    def edit(program: PlainProgram, chance: Random) -> PlainProgram | None:
        node = pick(chance, _updates(program))
        if node is None:
            return None
        rows = rows_of(node)
        lists = [row for row in rows if isinstance(row, list)]
        done = exchanged(rows[column(len(lists))], pair(chance, rows[column(len(lists))], shape))
        node.args = tuple(rows)
        return on(program, done)

    edit.__name__ = name
    kind(edit)


_column_kind("exchanges_gradients", lambda count: 1)
_column_kind("exchanges_parameters", lambda count: 0)
_column_kind("exchanges_states", lambda count: max(2, count - 2) if count > 2 else 0)


@kind
def exchanges_states_of_one_parameter(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, [node for node in _updates(program) if sum(isinstance(row, list | tuple) for row in node.args) > 3])
    if node is None:
        return None
    rows = rows_of(node)
    at = chance.randrange(len(rows[0]))
    rows[2][at], rows[3][at] = rows[3][at], rows[2][at]
    node.args = tuple(rows)
    return program


@kind
def leaves_a_parameter_out(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, [node for node in _updates(program) if len(node.args[0]) > 1])  # type: ignore[arg-type]
    if node is None:
        return None
    at = chance.randrange(len(node.args[0]))
    node.args = tuple([*row[:at], *row[at + 1 :]] if isinstance(row, list | tuple) else row for row in node.args)
    return program


@kind
def updates_a_parameter_twice(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, _updates(program))
    if node is None:
        return None
    at = chance.randrange(len(node.args[0]))
    node.args = tuple([*row, row[at]] if isinstance(row, list | tuple) else row for row in node.args)
    return program


@kind
def writes_over_what_is_still_read(program: PlainProgram, chance: Random) -> PlainProgram | None:
    """A reduction is left in the memory of its operand, which has another reader behind it."""
    node = pick(chance, nodes(program, spmd.all_reduce, where=lambda node: shape(node) == shape(node.args[0])))  # type: ignore[arg-type]
    if node is None:
        return None
    operand, readers = node.args[0], list(node.users)
    with node.graph.inserting_after(node):
        both = call(node.graph, records(node)[0], aten.add.Tensor, node, operand)
    with node.graph.inserting_after(both):
        again = call(node.graph, records(node)[0], aten.sub.Tensor, both, operand)
    for reader in readers:
        reader.replace_input_with(node, again)
    set_sharing(node, [OVER_OPERAND])
    return program


@kind
def exchanges_numbers_of_an_update(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, _updates(program))
    if node is None:
        return None
    args = list(node.args)
    numbers = [at for at, one in enumerate(args) if isinstance(one, Node)]
    if len(numbers) < 2:
        return None
    one, other = chance.sample(numbers, 2)
    args[one], args[other] = args[other], args[one]
    node.args = tuple(args)
    return program


# ---------------------------------------------------------------------------------------------------------- schedules and stages


def _schedule_kind(name: str, change: Callable[[list[Any], Random, PlainProgram], bool]) -> None:
    def edit(program: PlainProgram, chance: Random) -> PlainProgram | None:
        rows = list(program.schedule)
        if len(rows) < 2 or not change(rows, chance, program):
            return None
        return replace(program, schedule=tuple(rows))

    edit.__name__ = name
    kind(edit)


def _at(rows: Sequence[Any], op: str, chance: Random) -> int | None:
    return pick(chance, [at for at, row in enumerate(rows) if row.op == op])


def _drop(op: str) -> Callable[[list[Any], Random, PlainProgram], bool]:
    def change(rows: list[Any], chance: Random, program: PlainProgram) -> bool:
        at = _at(rows, op, chance)
        if at is not None:
            del rows[at]
        return at is not None

    return change


def _twice(op: str) -> Callable[[list[Any], Random, PlainProgram], bool]:
    def change(rows: list[Any], chance: Random, program: PlainProgram) -> bool:
        at = _at(rows, op, chance)
        if at is not None:
            rows.insert(at, rows[at])
        return at is not None

    return change


def _other_microbatch(rows: list[Any], chance: Random, program: PlainProgram) -> bool:
    at = pick(chance, [at for at, row in enumerate(rows) if row.microbatch])
    if at is not None:
        rows[at] = replace(rows[at], microbatch=rows[at].microbatch - 1)
    return at is not None


def _into_another(rows: list[Any], chance: Random, program: PlainProgram) -> bool:
    def made(row: Any) -> object:
        return shape(program.stages[row.stage].results()[row.value]) if row.op == "add" else None

    adds = [at for at, row in enumerate(rows) if row.op == "add"]
    places = pair(chance, adds, lambda at: (made(rows[at]), rows[at].microbatch))
    if places is None:
        return False
    one, other = adds[places[0]], adds[places[1]]
    rows[one], rows[other] = replace(rows[one], into=rows[other].into), replace(rows[other], into=rows[one].into)
    return True


def _runs_exchanged(rows: list[Any], chance: Random, program: PlainProgram) -> bool:
    runs = [at for at, row in enumerate(rows) if row.op == "run"]
    places = pair(chance, runs, lambda at: None)
    if places is None:
        return False
    one, other = runs[places[0]], runs[places[1]]
    rows[one], rows[other] = rows[other], rows[one]
    return True


_schedule_kind("leaves_a_part_out", _drop("add"))
_schedule_kind("adds_a_part_twice", _twice("add"))
_schedule_kind("leaves_a_run_out", _drop("run"))
_schedule_kind("runs_a_stage_twice", _twice("run"))
_schedule_kind("takes_another_microbatch", _other_microbatch)
_schedule_kind("adds_into_another_sum", _into_another)
_schedule_kind("runs_in_another_order", _runs_exchanged)


@kind
def loses_a_message(program: PlainProgram, chance: Random) -> PlainProgram | None:
    if program.pipeline is None:
        return None
    messages = dict(program.pipeline.messages)
    link = pick(chance, [link for link, keys in messages.items() if keys])
    if link is None:
        return None
    keys = list(messages[link])
    del keys[chance.randrange(len(keys))]
    messages[link] = tuple(keys)
    return replace(program, pipeline=replace(program.pipeline, messages=messages))


@kind
def gives_a_parameter_to_another_rank(program: PlainProgram, chance: Random) -> PlainProgram | None:
    if program.pipeline is None or not program.pipeline.owners:
        return None
    owners = dict(program.pipeline.owners)
    key = pick(chance, owners)
    owners[key] = (owners[key] + 1) % program.pipeline.schedule.ranks
    return replace(program, pipeline=replace(program.pipeline, owners=owners))


@kind
def does_not_return_a_part(program: PlainProgram, chance: Random) -> PlainProgram | None:
    if program.pipeline is None or not program.pipeline.returned:
        return None
    moves = list(program.pipeline.returned)
    del moves[chance.randrange(len(moves))]
    return replace(program, pipeline=replace(program.pipeline, returned=tuple(moves)))


def _actions_kind(name: str, change: Callable[[list[Any], Random], bool]) -> None:
    def edit(program: PlainProgram, chance: Random) -> PlainProgram | None:
        if program.pipeline is None:
            return None
        schedule = program.pipeline.schedule
        lists = [list(actions) for actions in schedule.lists]
        if not change(pick(chance, [one for one in lists if len(one) > 1]), chance):
            return None
        made = replace(schedule, lists=tuple(tuple(one) for one in lists))
        return replace(program, pipeline=replace(program.pipeline, schedule=made))

    edit.__name__ = name
    kind(edit)


def _without_action(actions: list[Any], chance: Random) -> bool:
    del actions[chance.randrange(len(actions))]
    return True


def _actions_exchanged(actions: list[Any], chance: Random) -> bool:
    return exchanged(actions, pair(chance, actions, lambda one: None))


_actions_kind("leaves_an_action_out", _without_action)
_actions_kind("exchanges_actions", _actions_exchanged)


# ----------------------------------------------------------------------------------------------------------------- keys and types


def _with_stage(program: PlainProgram, stage: Stage) -> PlainProgram:
    return replace(program, stages={**program.stages, stage.name: stage})


@kind
def exchanges_results(program: PlainProgram, chance: Random) -> PlainProgram | None:
    stage = pick(chance, program.stages.values())
    rows = list(output_of(stage.graph).args[0])
    if not exchanged(rows, pair(chance, rows, lambda one: shape(one) if isinstance(one, Node) else one)):
        return None
    output_of(stage.graph).args = (tuple(rows),)
    return program


@kind
def exchanges_inputs(program: PlainProgram, chance: Random) -> PlainProgram | None:
    stage = pick(chance, program.stages.values())
    keys, entered = list(stage.inputs), list(stage.keys())
    places = pair(chance, entered, shape)
    return _with_stage(program, replace(stage, inputs=tuple(keys))) if exchanged(keys, places) else None


@kind
def takes_a_message_in_another_dtype(program: PlainProgram, chance: Random) -> PlainProgram | None:
    flows = [node for stage in program.stages.values() for node, key in stage.keys().items() if key.startswith("flow:")]
    node = pick(chance, [node for node in flows if record(node).dtype == torch.float32])
    if node is not None:
        ir.update(node, dtype=torch.bfloat16)
    return on(program, node is not None)


@kind
def stores_a_value_otherwise(program: PlainProgram, chance: Random) -> PlainProgram | None:
    """A port is split over other axes than its readers say, or over none."""
    def other(port: Any) -> Any:
        dims = tuple(tuple(replace(part, axes=part.axes[1:]) for part in row) for row in port.sharding.dims)
        return replace(port, sharding=replace(port.sharding, dims=dims))

    at = pick(chance, [at for at, port in enumerate(program.inputs) if port.sharding is not None and any(port.sharding.split_axes())])
    if at is None:
        return None
    rows = list(program.inputs)
    rows[at] = other(rows[at])
    return replace(program, inputs=tuple(rows))


def _type_kind(name: str, where: Callable[[Any], bool], change: Callable[[Any, Random], Any]) -> None:
    def edit(program: PlainProgram, chance: Random) -> PlainProgram | None:
        typed = [(node, record(node).sharding) for node in nodes(program) if shape(node) is not None]
        node, _ = pick(chance, [(node, own) for node, own in typed if own is not None and where(own)]) or (None, None)
        if node is not None:
            ir.update(node, sharding=change(record(node).sharding, chance))
        return on(program, node is not None)

    edit.__name__ = name
    kind(edit)


def _split_otherwise(sharding: Any, chance: Random) -> Any:
    """The axes of the first split part split the next one, or none."""
    dims = [list(row) for row in sharding.dims]
    places = [(d, p) for d, row in enumerate(dims) for p, part in enumerate(row)]
    one = next((d, p) for d, p in places if dims[d][p].axes)
    axes = dims[one[0]][one[1]].axes
    dims[one[0]][one[1]] = replace(dims[one[0]][one[1]], axes=())
    others = [place for place in places if place != one and not dims[place[0]][place[1]].axes]
    if others:
        d, p = chance.choice(others)
        dims[d][p] = replace(dims[d][p], axes=axes)
    return replace(sharding, dims=tuple(map(tuple, dims)))


_type_kind("says_that_a_part_is_whole", lambda one: bool(one.partial), lambda one, _: replace(one, partial=()))
_type_kind("says_that_a_value_is_split_otherwise", lambda one: any(one.split_axes()), _split_otherwise)


@kind
def changes_a_constant(program: PlainProgram, chance: Random) -> PlainProgram | None:
    name = pick(chance, program.constants)
    if name is None:
        return None
    value = program.constants[name]
    return replace(program, constants={**program.constants, name: ~value if value.dtype == torch.bool else value + 1})


@kind
def draws_other_numbers(program: PlainProgram, chance: Random) -> PlainProgram | None:
    found = pick(chance, [(node, at) for node in draws(program) for at, one in enumerate(node.args) if type(one) is int])
    if found is not None:
        put(*found, found[0].args[found[1]] + 1)
    return on(program, found is not None)


@kind
def draws_another_tile(program: PlainProgram, chance: Random) -> PlainProgram | None:
    random = set(draws(program))
    found = pick(chance, [place for place in lists(program) if place[0] in random and any(isinstance(one, Node) for one in place[2])])
    if found is None:
        return None
    node, place, entries = found
    put(node, place, [0 if isinstance(one, Node) else one for one in entries])
    return program


@kind
def takes_another_slice(program: PlainProgram, chance: Random) -> PlainProgram | None:
    moved = nodes(program, aten.slice.Tensor, where=lambda node: len(node.args) > 3 and type(node.args[2]) is int and node.args[2] > 0)  # type: ignore[operator]
    node = pick(chance, moved)
    if node is not None:
        size = node.args[3] - node.args[2]
        start = max(0, node.args[2] - size)
        node.args = (*node.args[:2], start, start + size, *node.args[4:])
    return on(program, node is not None)


@kind
def joins_in_another_order(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, aten.cat.default, where=lambda node: len(set(node.args[0])) > 1))  # type: ignore[arg-type]
    if node is None:
        return None
    rows = list(node.args[0])
    done = exchanged(rows, pair(chance, rows, lambda one: None))
    put(node, 0, rows)
    return on(program, done)


@kind
def is_of_another_chunk(program: PlainProgram, chance: Random) -> PlainProgram | None:
    chunks = nodes(program, aten.slice.Tensor, where=lambda node: shape(node) is not None and record(node).chunk is not None)
    node = pick(chance, [node for node in chunks if type(node.args[2]) is int and record(node).chunk])
    if node is not None:
        size = node.args[3] - node.args[2]
        node.args = (*node.args[:2], 0, size, *node.args[4:])
    return on(program, node is not None)
