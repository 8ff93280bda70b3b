"""Bytes that a rank holds in a call, and their peak: a liveness walk over the instructions that it runs.

A value is live from the operator that computes it to the last operator that reads it, or to the end of the call if another stage reads
it. Views share the storage of their base, and updates write into their operands, also before `fuse_updates` has marked them. Parameters,
buffers and optimizer state are live for the whole call and counted separately, as are copies of them that the user sees; workspace of
kernels is not counted, nor are values that a compiled region never stores in memory (`fused_values.py`). Host memory is counted
separately, by the same walk. The operand of a copy to the host, or of a collective, stays on the device until the transfer has been
waited for, also if that is in another stage (`program/in_flight.py`). A message between pipeline stages counts on its sender until the
last instruction there that reads it, as if it had left by then; gloo keeps it until the update.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from types import MappingProxyType

from torch.fx import Node

from meshc import ir
from meshc.cost import region_lifetimes
from meshc.cost.fused_values import is_fused
from meshc.cost.storage_owners import producing_call, storage_owner
from meshc.ir import layouts, sharing, spmd
from meshc.ir.keys import is_a, name_of
from meshc.ir.mesh import Mesh
from meshc.ir.schemas import argument_names
from meshc.ir.sharding import local_shape
from meshc.ir.sharing import Words
from meshc.ir.storage_moves import TIERS
from meshc.ir.trail import compute_tracked, is_tracked, largest
from meshc.pipelining.pipeline_stages import slot
from meshc.private import OpOverload
from meshc.program import in_flight, packing
from meshc.program.accumulate import ACCUMULATES, is_added, whole_of
from meshc.program.program import RUNS, Instruction, PlainProgram, Port, Stage
from meshc.program.rank_instructions import last_reads, steps_of
from meshc.program.static_memory import Span, assign_memory, spans

KEPT = ("parameter", "state", "buffer", "constant", "input")
"""Kinds of ports whose values are live for the whole call."""
COPY = "copy"
"""The kind of additional copies that the user sees of parameters and state whose sharding torch's placements cannot describe."""


@dataclass(frozen=True)
class Peak:
    """The peak of live bytes of values that the program computes on a rank.

    total      bytes at the peak;  gradients  bytes of parameters' gradients among them
    at         the node at the peak, with its source and stage, as text
    step       position of the instruction in its rank's list
    """

    total: int = 0
    gradients: int = 0
    at: str = ""
    step: int = 0


@dataclass(frozen=True)
class RankBytes:
    """One rank's memory in a call.

    rank    coordinate on the pipeline axis; 0 without a pipeline, where all ranks need the same memory
    kept    bytes of values that are live for the whole call, by kind
    beside  bytes outside the device's memory, by the row of reports (`Tier.row`): values stored in other tiers for the whole call, and on
            the host the peak of offloaded values
    """

    rank: int
    kept: Mapping[str, int]
    peak: Peak
    beside: Mapping[str, int] = field(default_factory=dict)

    @property
    def host(self) -> int:
        """Peak bytes on the rank's host."""
        return self.beside.get(TIERS["host"].row, 0)

    @property
    def total(self) -> int:
        return sum(self.kept.values()) + self.peak.total


def port_bytes(port: Port, sizes: Mapping[str, int]) -> int:
    """Bytes of a port's value on each rank, padding included."""
    shape = port.shape if port.sharding is None else local_shape(port.sharding, sizes)
    return prod(shape) * port.dtype.itemsize


def copy_bytes(port: Port, mesh: Mesh) -> int:
    """Bytes of the DTensor that the user sees if it is a copy in torch's placements; 0 if it shares the program's buffer."""
    if port.kind not in ("parameter", "state") or port.sharding is None or layouts.shares_memory(port.sharding, mesh):
        return 0
    return prod(layouts.largest_chunk(port.shape, layouts.torch_placements(port.sharding, mesh), mesh)) * port.dtype.itemsize


def real_bytes(port: Port, sizes: Mapping[str, int]) -> float:
    """Mean bytes of a port's value on a rank, without padding."""
    tiles = 1 if port.sharding is None else prod(sizes[axis] for axis in port.sharding.split_axes())
    return prod(port.shape) * port.dtype.itemsize / tiles


def runs(program: PlainProgram) -> Counter[str]:
    """Runs of each stage in one call: on every rank, or, in a pipeline, on the rank that owns the stage."""
    pipeline = program.pipeline
    lists = [program.schedule] if pipeline is None else [steps_of(program, {pipeline.axis: r}) for r in range(pipeline.schedule.ranks)]
    return Counter(step.stage for steps in lists for step in steps if step.op in RUNS)


def updates(node: Node) -> Iterator[tuple[Node, Node]]:
    """(parameter, gradient) of each parameter that an optimizer's operator updates."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target.namespace != "meshc":
        return
    arguments = argument_names(node.target)[:2]
    if arguments == ("params", "grads"):
        yield from zip(node.args[0], node.args[1], strict=True)  # type: ignore[arg-type]
    elif arguments == ("param", "grad"):
        yield node.args[0], node.args[1]  # type: ignore[misc]


def output_bytes(stage: Stage, host: bool | None = None, cpu: bool = False) -> dict[str, int]:
    """Bytes of each tensor that a stage returns, by key, shared storage included.

    host  True counts values on the host only, False values on the device only (others are 0), None counts both
    cpu   whether the ranks' device is the host
    """
    return {
        key: _bytes_in_pool(value, ir.record(value), host, cpu)
        for key, value in stage.results().items() if isinstance(value, Node) and ir.is_tensor(value)
    }  # fmt: skip


def _bytes_in_pool(made_by: Node, one: ir.Record, host: bool | None, cpu: bool) -> int:
    """Of a rank whose device is the host, that is a pool of copies alone: what operators make there has the device's memory."""
    there = one.storage != "device" and not (cpu and ir.runs_on_host(made_by))
    return ir.local_bytes(one) if host is None or there == host else 0


def value_bytes(program: PlainProgram, host: bool | None = None) -> dict[str, int]:
    """Bytes on a rank of whatever enters a program, or a stage gives to another, by key; `host` as of `output_bytes`."""
    found = {port.key: port_bytes(port, program.axis_sizes) if host in (None, port.storage != "device") else 0 for port in program.inputs}
    for stage in program.stages.values():
        for key, size in output_bytes(stage, host, _is_host_device(program)).items():
            op, whole = whole_of(key) or ("", key)
            found.setdefault(whole, size * (program.microbatches if op == "join" else 1))
    return found


def _is_host_device(program: PlainProgram) -> bool:
    """Whether a rank's device is the host."""
    return program.mesh.device_type == "cpu"


def by_rank(program: PlainProgram, words: Words = sharing.sharing_of) -> list[RankBytes]:
    """Memory of each rank of the pipeline axis; of one rank without a pipeline. `words`: the function that says which memory a value
    shares."""
    found = []
    given, offloaded = WalkInputs(program, words), WalkInputs(program, words, host=True) if uses_host(program) else None
    for rank in range(1 if program.pipeline is None else program.pipeline.schedule.ranks):
        coordinates = {} if program.pipeline is None else {program.pipeline.axis: rank}
        kept, beside = Counter[str](), dict.fromkeys((tier.row for tier in TIERS.values()), 0)
        for port in program.inputs:
            if port.kind in KEPT and program.owns(port.key, coordinates):
                tier = TIERS.get(port.storage)
                held, kind, of_copies = (kept, port.kind, COPY) if tier is None else (beside, tier.row, tier.row)
                held[kind] += port_bytes(port, program.axis_sizes)
                if copied := copy_bytes(port, program.mesh):
                    held[of_copies] += copied
        if offloaded is not None:
            beside[TIERS["host"].row] += _peak(program, coordinates, offloaded).total
        found.append(RankBytes(rank, kept, _peak(program, coordinates, given), beside))
    return found


def uses_host(program: PlainProgram) -> bool:
    """Whether any stage copies a value to the host or back."""
    return any(spmd.is_host_copy(node.target) for stage in program.stages.values() for node in stage.graph.nodes)


def peak_rank(program: PlainProgram, words: Words = sharing.sharing_of) -> RankBytes:
    """The rank with the largest total."""
    return max(by_rank(program, words), key=lambda one: one.total)


def peak(program: PlainProgram) -> Peak:
    """The peak of one call; in a pipeline, of the rank with the largest total."""
    return peak_rank(program).peak


class WalkInputs:
    """Inputs of the liveness walk that all ranks share, for the device's memory or for the host's (`host`).

    made   bytes of each stage output, by key;  sizes  bytes of inputs and stage outputs (`value_bytes`)
    """

    def __init__(self, program: PlainProgram, words: Words, host: bool = False) -> None:
        self.words, self.host, self.cpu = words, host, _is_host_device(program)
        self.made = {key: size for stage in program.stages.values() for key, size in output_bytes(stage, host, self.cpu).items()}
        self.sizes = value_bytes(program, host)
        self._walks: dict[str, StageLiveness] = {}

    def walk(self, stage: Stage) -> StageLiveness:
        if stage.name not in self._walks:
            self._walks[stage.name] = StageLiveness(stage, self.words, self.host, self.cpu)
        return self._walks[stage.name]


@dataclass(frozen=True)
class Moment:
    """An instruction in which a rank computes values.

    position    index in the rank's list of instructions
    waiting     bytes of values that wait between stages meanwhile, by key; valid only until the walk goes on
    read        bytes of operands of collectives in flight between stages, by key; valid only until the walk goes on
    walk, left  the stage that runs, and the values of this run; None for an instruction that joins rows
    rows        bytes of the joined rows
    """

    position: int
    step: Instruction
    waiting: Mapping[str, int]
    read: Mapping[str, int]
    walk: StageLiveness | None = None
    left: RunLiveness | None = None
    rows: int = 0

    @property
    def peak(self) -> Peak:
        waiting = sum(self.waiting.values())
        if self.left is None:  # all parts are live, and are copied into one tensor
            return Peak(waiting + self.rows, 0, f"rows of {name_of(self.step.into)} joined", self.position)
        grown = sum(size for key, size in self.waiting.items() if is_a(key, "gradient", "sum"))
        inside = self.left.peak
        return Peak(waiting + sum(self.read.values()) + inside.total, inside.gradients + grown, inside.at, self.position)


def moments(program: PlainProgram, coordinates: Mapping[str, int], given: WalkInputs) -> Iterator[Moment]:
    """The instructions of one rank that compute values, in order. A received value is live from the posting of its receive."""
    steps = steps_of(program, coordinates)
    carried: dict[str, int] = {}  # bytes of values waiting between stages, by key
    sizes, made = given.sizes, given.made
    read: dict[str, int] = {}  # bytes of operands of collectives in flight between stages, by the collective's key
    walked: dict[tuple[object, ...], RunLiveness] = {}
    for position, (step, last) in enumerate(zip(steps, last_reads(program, steps), strict=True)):
        if step.op in RUNS:
            stage = program.stages[step.stage]
            freed = {key: carried.pop(at, 0) for key in stage.inputs if (at := slot(key, step.microbatch)) in last}
            summed = any(is_added(key) and (whole := whole_of(key)) is not None and whole[1] in carried for key in stage.outputs)
            arriving = {key: read.pop(at) for key in stage.inputs if (at := slot(key, step.microbatch)) in read}
            case = stage.name, summed, frozenset(freed.items()), frozenset(arriving.items())
            if case not in walked:
                walked[case] = given.walk(stage).peak(freed, summed, arriving)
            left = walked[case]
            yield Moment(position, step, carried, read, given.walk(stage), left)
            carried.update((slot(key, step.microbatch), size) for key, size in left.values.items())
            read.update((slot(key, step.microbatch), size) for key, size in left.read.items())
        elif step.op in ACCUMULATES:
            carried.pop(step.value, None)
            carried[step.into] = made[step.value]  # a sum of its own, also of a part that shared a larger storage
        elif step.op == "join":
            carried.pop(step.value, None)
            rows = carried[step.into] = carried.get(step.into, 0) + made[step.value]
            if rows >= sizes[step.into]:
                yield Moment(position, step, carried, read, rows=rows)
        elif step.op == "recv":
            carried.update((slot(key, step.microbatch), sizes[key]) for key in step.keys)
        for key in last if step.op == "send" else ():
            carried.pop(key, None)


def _peak(program: PlainProgram, coordinates: Mapping[str, int], given: WalkInputs) -> Peak:
    """The peak over one rank's list of instructions."""
    best = Peak()
    for moment in moments(program, coordinates, given):
        peak = moment.peak
        best = peak if peak.total > best.total else best
    return best


@dataclass(frozen=True)
class RunLiveness:
    """Live values of one run of a stage.

    values  bytes of each value that the run returns to other stages, by key
    read    bytes of operands of collectives that the run leaves in flight, by the collective's key
    size    bytes of each value with a live range;  last  its last position;  grown  the gradients of parameters among them
    beside  (first position, last position, bytes) of memory that is no value's
    alive   live bytes before the first node;  growing  bytes of gradients among them
    peak    the peak inside the stage
    """

    values: Mapping[str, int]
    read: Mapping[str, int]
    size: Mapping[Node, int]
    last: Mapping[Node, int]
    grown: Collection[Node]
    beside: Sequence[tuple[int, int, int]]
    alive: int
    growing: int
    peak: Peak = field(default_factory=Peak)


class StageLiveness:
    """Live ranges of a stage's values, as far as they are equal in all of its runs.

    home   the node that allocates a value's storage;  size  bytes of the storages that are allocated in the stage
    born   position from which a value is live;  last  position of the last node that reads its storage
    ends   (key, value) of the stage's results
    kept   bytes of values in static memory, which is allocated once for all runs;  kept_when  their spans;  kept_bytes  a function
           that returns the bytes of that memory
    beside   (first position, last position, bytes) of copies that collectives send
    joining  bytes of parts that a collective's result is joined from, by the position at which the collective is waited for
    leaving  operands of collectives that leave the stage in flight, by key;  sent  bytes of the copies that these send, by key
    """

    def __init__(self, stage: Stage, words: Words = sharing.sharing_of, host: bool = False, cpu: bool = False) -> None:
        self.stage, self.nodes, self.entering = stage, list(stage.graph.nodes), stage.keys()
        self.home: dict[Node, Node] = {}
        self.size: dict[Node, int] = {}
        self.born: dict[Node, int] = {}
        self.last: dict[Node, int] = {}
        self.ends: list[tuple[str, Node]] = []
        self.beside: list[tuple[int, int, int]] = []
        self.joining: dict[int, int] = {}
        self.leaving: dict[str, Node] = {}
        self.sent: dict[str, int] = {}
        self.host = host
        inside = packing.pieces(stage.graph, words)
        joined = {piece.whole for piece in inside.values()}
        first: dict[Node, Node] = {}  # the first value written into each joined value's memory
        for position, node in enumerate(self.nodes):
            self.last[node] = self.born[node] = position
            if node.op == "output":
                self.ends = [(key, value) for key, value in zip(stage.outputs, node.args[0], strict=True) if isinstance(value, Node)]
                continue
            whole = inside[node].whole if node in inside else node
            if (call := producing_call(node)) is not None:
                self.home[node], self.born[node], self.last[call] = node, self.born[call], position
                self.size[node] = _bytes_in_pool(node, ir.record(node), host, cpu)
                self.size[call] -= self.size[node]
                continue
            if whole in joined:
                self.home[node] = first.setdefault(whole, node)
            else:
                self.home[node] = self.home.get(storage_owner(node, words), node)
            if self.home[node] is node:
                made = node.op == "call_function" and ir.has_record(node)
                self.size[node] = _allocated_bytes(node, whole, host, cpu) if made else 0
            for operand in node.all_input_nodes:
                self.last[self.home[operand]] = position
        self._apply_region_lifetimes()
        self._extend_in_flight()
        self.gradients = {gradient for node in self.nodes for _, gradient in updates(node)}
        self.gradients |= {node for node, key in self.entering.items() if is_a(key, "sum")}
        kept = spans(stage.graph, words)
        self.kept = {first.get(node, node): ir.local_bytes(ir.record(node)) for node in kept}
        self.kept_when = tuple(kept.values())
        self.kept_bytes = partial(_assigned_bytes, self.kept_when)

    def _apply_region_lifetimes(self) -> None:
        """Extends live ranges in compiled regions beyond the order of lines, and ends those whose memory the last reader writes over."""
        place = {node: index for index, node in enumerate(self.nodes)}
        for piece, reader in region_lifetimes.bucket_piece_readers(self.nodes).items():
            bucket = self.home[piece.all_input_nodes[0]]
            self.last[bucket] = max(self.last[bucket], place[reader])
        kernels = region_lifetimes.fused_recomputes(self.nodes)
        over: dict[Node, set[Node]] = {}
        for node, other in kernels.items():
            home = self.home[node]
            self.last[home] = max(self.last[home], place[other])
            alone = {self.home[operand] for operand in region_lifetimes.reusable_operands(node, other)}
            over[other] = over.get(other, alone) & alone
        for other, homes in over.items():
            dying = [home for home in homes if self.size.get(home) and self.last[home] == place[other]]
            if dying:
                self.last[min(dying, key=place.__getitem__)] -= 1

    def _extend_in_flight(self) -> None:
        """Extends the live range of a transfer's operand until the transfer has been waited for."""
        place = {node: index for index, node in enumerate(self.nodes)}
        arriving = [node for node, key in self.entering.items() if is_a(key, "early")]
        until = in_flight.waits(self.nodes, arriving)
        self.arrived = {self.entering[node]: place[until[node]] for node in arriving if node in until}
        leaving = {value: [key] for key, value in self.ends if is_a(key, "early")}
        for node in self.nodes:
            if node.op != "call_function" or not (spmd.is_collective(node.target) or spmd.is_host_copy(node.target)):
                continue
            waited = place[until[node]] if node in until and node not in leaving else len(self.nodes)
            if in_flight.holds_operand(node):
                home = self.home[node.all_input_nodes[0]]
                self.last[home] = max(self.last[home], waited - 1)
                self.leaving |= {key: home for key in leaving.get(node, ())}
            if not self.host:
                if size := in_flight.sent_bytes(node):
                    self.sent |= dict.fromkeys(leaving.get(node, ()), size)
                    self.beside.append((place[node], waited - 1, size))
                if size := in_flight.merged_bytes(node):
                    self.joining[waited] = largest(self.joining.get(waited, 0), size)

    def peak(self, freed: Mapping[str, int], summed: bool, arriving: Mapping[str, int] = MappingProxyType({})) -> RunLiveness:
        """The live values of one run, with the peak inside the stage.

        freed     bytes of inputs that no later instruction reads, by key: each is dead after its last use here
        summed    whether the sums that parts are accumulated into exist already: then a part is dead once it is added; otherwise it
                  becomes the sum
        arriving  bytes of operands of collectives that are in flight when the run starts, by key: dead once these are waited for
        """
        size, last, gradients = dict(self.size), dict(self.last), set(self.gradients)
        for node, key in self.entering.items():
            if node in size:
                size[node] = freed.get(key, 0)
        results: dict[Node, list[str]] = {}
        for key, value in self.ends:
            if not (summed and is_added(key)):
                results.setdefault(self.home[value], []).append(key)
                last[self.home[value]] = len(self.nodes) - 1
                if is_a(key, "gradient"):
                    gradients.add(value)
        grown = {self.home[node] for node in gradients if node in self.home}
        alive, growing = sum(freed.values()) + sum(arriving.values()), 0
        held = {node: size.pop(node, 0) for node in self.kept}  # the runtime has this memory for good
        alive += compute_tracked(self.kept_bytes, *self.kept.values(), *held.values())
        growing += compute_tracked(self.kept_bytes, *self.kept.values(), *(more if node in grown else 0 for node, more in held.items()))
        beside = [*self.beside, *((-1, self.arrived.get(key, len(self.nodes)) - 1, size) for key, size in arriving.items())]
        leaves = {names[0]: size[node] for node, names in results.items() if size.get(node)}
        read = {key: size.get(home, 0) for key, home in self.leaving.items() if home not in results} | self.sent
        left = RunLiveness(leaves, read, size, last, grown, beside, alive, growing)
        return replace(left, peak=self._highest(left))

    def kept_together(self) -> list[list[Node]]:
        """Values in static memory, grouped by the piece of memory that they share."""
        kept = list(self.kept)
        return [[kept[value] for value in values] for values in assign_memory(self.kept_when, list(self.kept.values()))]

    def course(self, left: RunLiveness) -> Iterator[tuple[int, int, int]]:
        """At each node the largest (live bytes, bytes of gradients among them, bytes of collectives' results that are being joined). The
        third is 0 unless joining, which comes before the node's own result is allocated, needs more than the node itself."""
        size, alive, growing = left.size, left.alive, left.growing
        coming, dying = defaultdict[int, list[Node]](list), defaultdict[int, list[Node]](list)
        for node in size:
            coming[self.born[node] if node.op != "placeholder" else -1].append(node)
            dying[left.last[node]].append(node)
        change: Counter[int] = Counter()  # before each position
        for first, until, more in left.beside:
            change[first] += more if first >= 0 else 0
            change[until + 1] -= more
        for position in range(len(self.nodes)):
            alive += change[position]
            joined = alive + self.joining.get(position, 0), growing, self.joining.get(position, 0)
            for new in coming[position]:
                alive += size[new]
                growing += size[new] if new in left.grown else 0
            yield joined if joined[2] and joined[0] >= alive else (alive, growing, 0)
            for dead in dying[position]:
                alive -= size[dead]
                growing -= size[dead] if dead in left.grown else 0

    def _highest(self, left: RunLiveness) -> Peak:
        most, gradients, at = 0, 0, -1
        course = list(self.course(left))
        if any(is_tracked(alive) for alive, _, _ in course):
            return Peak(*_tracked_peak([alive for alive, _, _ in course], [growing for _, growing, _ in course]))
        for position, (alive, growing, _) in enumerate(course):
            if alive > most:
                most, gradients, at = alive, growing, position
        return Peak(most, gradients, "" if at < 0 else _place(self.stage, self.nodes[at]))


def _assigned_bytes(when: Sequence[Span], *numbers: int) -> int:
    """Bytes of the static memory that values share one after another. `numbers`: the sizes by which memory is assigned, then the sizes
    that are counted, one of each per value."""
    sizes, counting = numbers[: len(when)], numbers[len(when) :]
    return sum(max(counting[value] for value in values) for values in assign_memory(when, sizes))


def _tracked_peak(alive: Sequence[int], growing: Sequence[int]) -> tuple[int, int]:
    """Peak (total, gradients) of tracked numbers; the position of the peak is not needed then."""
    return largest(0, *alive), compute_tracked(_beside_largest, *alive, *growing)


def _beside_largest(*numbers: int) -> int:
    """The element of the second half of `numbers` at the index of the first half's maximum."""
    count = len(numbers) // 2
    return numbers[count + max(range(count), key=numbers.__getitem__)]


def _allocated_bytes(node: Node, whole: Node, host: bool, cpu: bool) -> int:
    """Bytes that a node allocates: of its own result, or of the `whole` that it is the first part of; on the host, or on the device."""
    return 0 if is_fused(node) else sum(_bytes_in_pool(whole, one, host, cpu) for one in ir.records(whole))


def _place(stage: Stage, node: Node) -> str:
    found = ir.records(node)[0].source if ir.has_record(node) and ir.records(node) else None
    where = f" at {found}" if found is not None and str(found) else ""
    return f"{node.name}{where}" + (f", stage {stage.name}" if stage.name != "main" else "")
