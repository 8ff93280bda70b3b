"""Summary of a program as text: shardings, collectives with reasons, memory, predicted time; list of collectives; table of factors.

All figures come from the program's own graphs and from the device's figures; nothing is measured, and no process group is needed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch.fx import Node

from meshc import ir
from meshc.cost import divided_work, peak_memory
from meshc.cost.call_timeline import MODES, predict_timeline
from meshc.cost.devices import Device, devices_of
from meshc.cost.divided_work import collapse_layers
from meshc.cost.flops import flops
from meshc.cost.links import collective_seconds, payload
from meshc.cost.padding_waste import padding
from meshc.cost.program_clock import Seconds, program_seconds
from meshc.cost.stage_clock import HOST
from meshc.ir import PHASES, Source, spmd
from meshc.ir.graph import placeholders
from meshc.ir.keys import is_a, name_of
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.ir.spmd import MICROBATCH
from meshc.ir.storage_moves import TIERS
from meshc.program.program import PlainProgram, Port
from meshc.report import memory_report, offload_table, precision_table
from meshc.report.account import STAGE_HEADERS, link_accounts, stage_rows
from meshc.report.tables import bytes_text, dtensor_placements, part_text, placement, seconds_text, table, without_columns

CHANGING: Final = ("precision", "compress", "sparse")
"""First words of the lines of a plan that change what is computed."""
PLAN_LINES: Final = 20
"""Lines of a plan that are shown."""


@dataclass(frozen=True)
class CollectiveUse:
    """One collective of a program.

    bytes_per_rank  bytes of the operand on each rank; of the result for an all_gather, the larger side; of halo and halo_sum the bytes
                    that the rank with most receives, or sends
    times           runs in a call of the program (one per microbatch, for instance)
    dtype           of what travels
    seconds         predicted seconds of all these runs, without overlap; 0 without a device
    """

    phase: str
    kind: str
    axes: tuple[str, ...]
    bytes_per_rank: int
    node: str
    reason: str
    source: Source
    stage: str = ""
    times: int = 1
    seconds: float = 0.0
    dtype: torch.dtype | None = None


def collectives(program: PlainProgram, device: Device | None = None) -> list[CollectiveUse]:
    """All collectives of a program, stage by stage in their order; in a pipeline those of all its ranks. `device`: the device whose
    seconds are predicted; without it `seconds` is 0."""
    runs = peak_memory.runs(program)
    found = []
    for stage in program.stages.values():
        for node in stage.graph.nodes:
            if not spmd.is_collective(node.target) or tuple(node.args[1]) == (MICROBATCH,):
                continue
            record = ir.record(node)
            size = payload(node, program.axis_sizes)
            kind = node.target.__name__
            times = runs[stage.name]
            takes = 0.0 if device is None else times * collective_seconds(node, program.mesh, device)
            found.append(
                CollectiveUse(
                    record.phase, kind, tuple(node.args[1]), size, node.name, record.reason, record.source, stage.name, times, takes,
                    record.dtype,
                )
            )
    return found


class CollectiveTraffic(NamedTuple):
    """Collectives of a call of one kind, over the same axes, in one phase. largest: bytes of the largest; reason: of most bytes."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    times: int
    bytes: int
    largest: int
    seconds: float
    reason: str


def traffic(uses: Iterable[CollectiveUse]) -> list[CollectiveTraffic]:
    """The collectives by phase, kind and axes, phase after phase."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[CollectiveUse]] = defaultdict(list)
    for use in uses:
        groups[use.phase, use.kind, use.axes].append(use)
    return [
        CollectiveTraffic(
            *key, sum(use.times for use in those), sum(use.times * use.bytes_per_rank for use in those),
            max(use.bytes_per_rank for use in those), sum(use.seconds for use in those), _mostly(those),
        )
        for key, those in sorted(groups.items(), key=lambda item: PHASES.index(item[0][0]))
    ]  # fmt: skip


def summary(program: PlainProgram, device: str | None = None, budget: int | None = None) -> str:
    """What a user wants to know of a compiled program before running it; times are those of a device by name, or of the mesh's. `budget`:
    bytes that a rank may hold, where the user has said so."""
    on = devices_of(program.mesh, device).slowest()
    blocks = [_head(program), precision_table.precision_table(program, on), _parameters(program), _pipeline(program, device)]
    blocks += [_collectives(program), _offload_table(program)]
    blocks += [memory_report.memory_table(program, budget), _time(program, device, on), _work(program)]
    blocks += [_padding(program), _notes(program)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _head(program: PlainProgram) -> str:
    ranks = program.mesh.world_size
    what = MODES.get(program.mode, program.mode)
    batches = f", {program.microbatches} microbatches" if program.microbatches > 1 else ""
    regions = f", compiled regions ({program.backend})" if program.backend != "eager" else ""
    head = f"{what} for {ranks} rank{'s' * (ranks > 1)}, mesh {program.mesh}{batches}{regions}"
    lines = str(program.plan).splitlines()
    changing = [line for line in lines if line.split()[0] in CHANGING]
    if changing:
        head += "\n  changes what is computed: " + "; ".join(changing)
    return "\n".join([head, *(f"  {line}" for line in _plan([line for line in lines if line not in changing]))])


def _plan(lines: list[str]) -> list[str]:
    """A plan's lines; of a long plan, such as a search may find, the first PLAN_LINES."""
    if len(lines) <= PLAN_LINES:
        return lines
    return [*lines[:PLAN_LINES], f'and {len(lines) - PLAN_LINES} more lines: print(program.plan), or program.plan.save("found.plan")']


# ----------------------------------------------------------------------------------------------------------------------- parameters


class _ParameterGroupKey(NamedTuple):
    """Columns that the parameters of one row share; `gradient` and `state` are "" if they are stored like the parameter."""

    name: str
    shape: tuple[int, ...]
    sharding: str
    placements: str
    gradient: str
    state: str
    dtype: torch.dtype


def _parameters(program: PlainProgram) -> str:
    sizes = program.axis_sizes
    gradients = gradient_shardings(program)
    states: dict[str, list[Port]] = defaultdict(list)
    for port in program.inputs:
        if port.kind == "state":
            states[port.of].append(port)
    staged = None if program.pipeline is None else program.pipeline.axis
    axes = [name for name in program.mesh.names if name != staged]
    groups: dict[_ParameterGroupKey, list[Port]] = defaultdict(list)
    for port in program.inputs:
        if port.kind == "parameter":
            kept = [state for state in states[port.name] if state.shape == port.shape]
            others = (
                _placement(gradients.get(port.name), port.sharding, sizes),
                _placement(kept[0].sharding if kept else None, port.sharding, sizes),
            )
            stored = placement(port.sharding, port.shape), dtensor_placements(port.sharding, program.mesh, axes)
            groups[_ParameterGroupKey(collapse_layers(port.name), port.shape, *stored, *others, port.dtype)].append(port)
    if not groups:
        return ""
    rows = []
    axis = "" if program.pipeline is None else f"rank of {program.pipeline.axis}"
    for one, ports in groups.items():
        here, size = _on_ranks(program, ports, [[port] for port in ports])
        _, state_size = _on_ranks(program, ports, [states[port.name] for port in ports])
        kind = str(one.dtype).removeprefix("torch.")
        theirs = [kept for port in ports for kept in states[port.name]]
        there = {kept.storage for kept in theirs}
        where = next((f" on the {one}" for one in reversed([*TIERS]) if one in there), "")
        cells = one.sharding, one.placements, one.gradient, one.state
        rows.append((one.name, len(ports), kind, *cells, here, bytes_text(size), bytes_text(state_size) + where))
    places = f"DTensor over ({', '.join(axes)})"
    headers = ["parameter", "count", "dtype", "sharding", places, "its gradient", "its state", axis, "bytes/rank", "state/rank"]
    empty = [column for column in (5, 6, 7, 9) if all(row[column] in ("", "0 B") for row in rows)]
    headers, shown = without_columns(headers, rows, empty)
    return table(shown, headers, "parameters (sizes are global)")


def _on_ranks(program: PlainProgram, owned: Sequence[Port], values: Sequence[Sequence[Port]]) -> tuple[str, int]:
    """The ranks of the pipeline axis that own any of the ports `owned`, as text, and the largest bytes of their `values` on one rank."""
    found: Counter[int | None] = Counter()
    for port, mine in zip(owned, values, strict=True):
        owner = None if program.pipeline is None else program.pipeline.owners.get(port.key)
        found[owner] += sum(peak_memory.port_bytes(value, program.axis_sizes) for value in mine)
    ranks = sorted(owner for owner in found if owner is not None)
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if whole else ", ".join(map(str, ranks)), max(found.values())


def _placement(other: Sharding | None, own: Sharding | None, sizes: Mapping[str, int]) -> str:
    """The placement of a gradient or of state; "" if it equals the parameter's."""
    if other is None or own is None or (local_shape(other, sizes) == local_shape(own, sizes) and _axes(other) == _axes(own)):
        return ""
    return placement(other, other.shape)


def _axes(sharding: Sharding) -> list[list[str]]:
    """The axes that split each dim, in order: two orders give tiles of one shape with different rows."""
    return [[axis for part in parts for axis in part.axes] for parts in sharding.dims]


def gradient_shardings(program: PlainProgram) -> dict[str, Sharding]:
    """Sharding of each parameter's gradient, as the update reads it or as it leaves the program."""
    found = {port.name: port.sharding for port in program.outputs if port.kind == "gradient" and port.sharding is not None}
    for stage in program.stages.values():
        keys = stage.keys()
        for node in stage.graph.nodes:
            for parameter, gradient in peak_memory.updates(node):
                while parameter.op == "call_function" and parameter.target is not torch.ops.aten.cat.default:
                    parameter = parameter.all_input_nodes[0]  # the update runs on another tile than the stored one
                name = name_of(keys[parameter]) if is_a(keys.get(parameter, ""), "parameter") else ""
                sharding = ir.record(gradient).sharding if ir.is_tensor(gradient) else None
                if name and sharding is not None:
                    found[name] = sharding.without_partial()
    return found


# ------------------------------------------------------------------------------------------------------------------------- pipeline


def _pipeline(program: PlainProgram, device: str | None) -> str:
    """The schedule, its stages, and what goes between its ranks."""
    pipeline = program.pipeline
    if pipeline is None:
        return ""
    line = predict_timeline(program, device)
    headers, rows = [*STAGE_HEADERS], stage_rows(program, device)
    schedule = pipeline.schedule
    title = (
        f"pipeline over {pipeline.axis}, schedule {schedule.name or 'of your own'}: {schedule.microbatches} "
        f"microbatch{'es' * (schedule.microbatches > 1)}, {100 * line.bubble:.1f} % bubble predicted"
    )
    if not schedule.trains:
        headers, rows = headers[:5], [row[:5] for row in rows]
    links = [(f"{one.source} to {one.target}", one.messages, bytes_text(one.bytes)) for one in link_accounts(program)]
    return f"{table(rows, headers, title)}\n{table(links, ['ranks', 'messages', 'bytes'], '  sent between stages in a call')}"


# ---------------------------------------------------------------------------------------------------------------------- collectives


def _collectives(program: PlainProgram) -> str:
    found = traffic(collectives(program))
    if not found:
        return "no collectives: ranks do not communicate"
    rows = [
        (one.phase, one.kind, ", ".join(one.axes), one.times, bytes_text(one.bytes), bytes_text(one.largest), one.reason) for one in found
    ]
    headers = ["phase", "collective", "axes", "count", "bytes/rank", "largest", "mostly for"]
    sized = "bytes of the operand; of the result for all_gather; what moves for halo and zigzag"
    return table(rows, headers, f"collectives of one call{_of_ranks(program)} ({sized})")


def _mostly(uses: Iterable[CollectiveUse]) -> str:
    """The reason with the largest number of bytes."""
    said: Counter[str] = Counter()
    for use in uses:
        said[why(use)] += use.times * use.bytes_per_rank
    return said.most_common(1)[0][0]


def why(use: CollectiveUse) -> str:
    """The reason without the plan's line, which is printed above the table, and without other values sent along."""
    said = use.reason.partition("; ")[0].partition(" together: ")
    if said[1]:
        return said[0] + " together"
    where = f" in {use.source.module}" if use.source.module and " of " not in said[0] else ""
    return " ".join(collapse_layers(word) if "." in word else word for word in f"{said[0]}{where}".split(" "))


def _offload_table(program: PlainProgram) -> str:
    rows = offload_table.rows_of(program)
    return table(rows, offload_table.HEADERS, f"copies between device and host in one call{_of_ranks(program)}") if rows else ""


def _of_ranks(program: PlainProgram) -> str:
    return "" if program.pipeline is None else f", of all ranks of {program.pipeline.axis} together"


# ----------------------------------------------------------------------------------------------------------------------------- time


def _time(program: PlainProgram, device: str | None, on: Device) -> str:
    takes = program_seconds(program, device)
    rows = [*times(program, takes).items(), ("together", takes.total)]
    if program.pipeline is not None:
        rows[0] = ("computing, on the rank that does so longest", takes.compute)
    title = f"predicted time of a call ({on.name}: {on.source})"
    lines = [table([(what, seconds_text(one)) for what, one in rows], ["", "takes"], title)]
    if takes.communication:
        lines.append(
            f"  {seconds_text(takes.hidden_s)} of the communication{' and of the host' * bool(takes.there)} hidden behind computing"
        )
    return "\n".join(lines)


def times(program: PlainProgram, takes: Seconds) -> dict[str, float]:
    """Seconds of a call by the printed names of what they are spent on; communication that computing hides is not counted."""
    found = {"computing": takes.compute}
    if takes.there:
        found["computing on the host"] = takes.there
    for axes, one in takes.communication.items():
        found["copying to the host and back" if axes == HOST else f"communicating over {axes}"] = one
    if program.pipeline is not None:
        found["waiting for other stages"] = takes.idle
    return found


# ----------------------------------------------------------------------------------------------------------------------------- work


def _work(program: PlainProgram) -> str:
    """The share of the arithmetic that each axis splits, and how much of it ranks repeat."""
    title = "work (matrix products, convolutions, attention)"
    rows = divided_work.work_rows(program)
    if rows is None:
        return f"{title}\n  not known: the program was made by a meshc that did not keep it; compile again"
    total = sum(row.flops for row in rows)
    if not total:
        return ""
    axes = [axis for axis in program.mesh.axes if axis.size > 1 and (program.pipeline is None or axis.name != program.pipeline.axis)]
    shares = [
        (axis.name, axis.size, _percent(divided_work.share(rows, axis.name)), _percent(divided_work.share(rows, axis.name, legal=True)))
        for axis in axes
    ]
    lines = [table(shares, ["axis", "ranks", "of the arithmetic split", "of what it could split"], title) if shares else title]
    lines += [
        f"  {axis.name} splits nothing of {row}: {100 * row.flops / total:.1f} %, "
        f"{'which another entry of the plan may split' if row.by_axis[axis.name] == divided_work.COULD else 'which has no legal split'}"
        for axis in axes
        for row in divided_work.largest_whole(rows, axis.name)
    ]
    repeated = f"all ranks together do {_total_arithmetic(program) / total:.2f} times that (padding, and what is repeated)"
    lines.append(f"  {bytes_text(total, 'FLOP')} a call; {repeated}")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _total_arithmetic(program: PlainProgram) -> float:
    """Flops of all ranks in one call, from their graphs."""
    runs = peak_memory.runs(program)
    one = sum(flops(node) * runs[stage.name] for stage in program.stages.values() for node in ir.calls(stage.graph))
    pipelines = 1 if program.pipeline is None else program.pipeline.schedule.ranks  # each stage runs on one rank of the axis only
    return one * program.mesh.world_size / pipelines


# -------------------------------------------------------------------------------------------------------------------------- padding


def _padding(program: PlainProgram) -> str:
    rows = [
        (
            part_text(Part(row.factor, row.size, row.axes)), row.tile, f"{100 * row.share:.1f} %", bytes_text(row.kept_bytes),
            f"{100 * row.compute_share:.1f} %",
        )
        for row in padding(program)
    ]  # fmt: skip
    headers = ["factor", "tile", "padding", "kept bytes/rank", "of the arithmetic"]
    return table(rows, headers, "what padding wastes (averages over the ranks)") if rows else ""


# ------------------------------------------------------------------------------------------------------------------- notes, factors


def _notes(program: PlainProgram) -> str:
    return "\n".join(["notes", *(f"  {note}" for note in program.notes)]) if program.notes else ""


class Names(Protocol):
    """`of`: class -> name, `also`: class -> all its names (`meshc.passes.place.find_factors`)."""

    @property
    def of(self) -> Mapping[int, str]: ...
    @property
    def also(self) -> Mapping[int, Iterable[str]]: ...


class FactorClasses(Protocol):
    """`dims`: (node, result) -> classes of each dim, `size`: of each class (`meshc.passes.phases.factors`)."""

    @property
    def dims(self) -> Mapping[tuple[Node, int], Sequence[Sequence[int]]]: ...
    @property
    def size(self) -> Mapping[int, int]: ...


def factors(names: Names, found: FactorClasses, program: PlainProgram) -> str:
    """Table of the factors that a plan can name: one row per name, with sizes, number of classes and some members."""
    members: dict[int, list[str]] = defaultdict(list)
    graph = next((node.graph for node, _ in found.dims), None)
    if graph is not None:
        for port, node in zip(program.inputs, placeholders(graph), strict=True):
            if port.kind in ("parameter", "input", "buffer"):
                shown = collapse_layers(port.name) if port.kind != "input" else port.key
                for dim, row in enumerate(found.dims[(node, 0)]):
                    for factor in row:
                        members[factor].append(f"{shown}[{dim}]")
    groups: dict[str, list[int]] = defaultdict(list)
    for factor in sorted(found.size):
        groups[collapse_layers(names.of[factor])].append(factor)
    rows = []
    for name, classes in groups.items():
        aliases = sorted({alias for factor in classes for alias in names.also[factor]} - {names.of[factor] for factor in classes})
        inside = list(dict.fromkeys(member for factor in classes for member in members[factor]))
        if inside or not re.fullmatch(r"f\d+", name):
            extents = sorted({found.size[factor] for factor in classes})
            shown = ", ".join(inside[:3]) + (f", ... {len(inside) - 3} more" if len(inside) > 3 else "")
            rows.append((name, ", ".join(aliases), ", ".join(map(str, extents)), len(classes), shown))
    rows.sort(key=lambda row: "." in row[0])
    return table(rows, ["factor", "also", "size", "classes", "dims that have it"], "factors") + "\n"


__all__ = ["CollectiveUse", "collapse_layers", "collectives", "factors", "gradient_shardings", "summary", "why"]
