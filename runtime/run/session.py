"""Session: one program on this rank; checks and moves inputs, runs the schedule, writes state back, returns outputs.

A session checks its inputs before anything is sent, moves them to the device, adds the optimizer's numbers, seed and step, runs the
executor, and returns outputs as the model would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshc.cost.peak_memory import uses_host
from meshc.errors import InputError, StateError
from meshc.frontend.admission import foreign_tensor
from meshc.frontend.module_watch import ModuleState
from meshc.frontend.output_tree import AS_PASSED, OutputTree
from meshc.ir import layouts, op_name, spmd
from meshc.ir.keys import is_a, key_of, name_of
from meshc.ir.sharding import local_shape
from meshc.ir.sharing import OVER_OPERAND, sharing_of
from meshc.ops.random import seed_step
from meshc.program.program import PlainProgram, Port
from meshc.runtime.agreement.compare import digest_number, first_other
from meshc.runtime.comm import collectives
from meshc.runtime.comm.uneven_rows import UnevenBatch
from meshc.runtime.failure.step_numbers import Stream
from meshc.runtime.run.backward_programs import BackwardPrograms, Make
from meshc.runtime.run.cuda_graph import ON_DEVICE, GraphedCalls, refusal
from meshc.runtime.run.duplicate_batches import DuplicateBatchCheck
from meshc.runtime.run.executor import Executor
from meshc.runtime.state.changes import is_rare_turn
from meshc.runtime.state.store import Store
from meshc.runtime.state.stored_tensor import UserTensors, memories_of

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
"""Parts of a call; in module mode BACKWARD is run by torch's autograd, later."""


OF_WHOLE: Final = (
    'but inputs="global" takes the same on every rank.\n'
    '  what to do: pass the whole batch everywhere, or compile with inputs="local" if each rank has its own part'
)
OTHER_CALL: Final = (
    "this rank calls {called}, and rank {other} calls something else at the same time: all ranks make the same calls in one order\n"
    "  what to do: call it on every rank, evaluation too: all ranks compute it together, and each has the result"
)
OF_COMMON: Final = (
    "which has no dim of the batch, so that it is the same on every rank.\n"
    "  what to do: pass the same everywhere, or, if it has a row for each row of the batch, say which dim that is, by\n"
    "  meshc.compile(..., names={{{name!r}: (...)}})"
)
OF_PARTS: Final = (
    "but they have the same part of the batch: no axis with a data role (dp, dp_shard) lies between them.\n"
    '  what to do: deal the batch out by the data axes alone, or pass the whole batch everywhere and compile with inputs="global"'
)


class CachePorts:
    """Cache inputs and outputs: which output is the same buffer as which input, and the local tensors known of inputs. There is one call
    per token, so the local tensor of a buffer is remembered until another buffer comes in its place.

    names   names of the ports that are parts of a cache

    same    for each output the index of the input with its name and sharding; None if there is none
    beside  indices of outputs that are no part of a cache
    """

    def __init__(self, inputs: Sequence[Port], results: Sequence[Port], names: Collection[str]) -> None:
        places = {port.name: place for place, port in enumerate(inputs) if port.name in names}
        found = [places.get(port.name) for port in results]
        alike = [place is not None and inputs[place].sharding == port.sharding for place, port in zip(found, results, strict=True)]
        self.same = [place if fits else None for place, fits in zip(found, alike, strict=True)]
        self.beside = [at for at, port in enumerate(results) if port.name not in names]
        self._pairs = [(at, place) for at, place in enumerate(self.same) if place is not None]
        self._may_stand = len(self._pairs) + len(self.beside) == len(results) and bool(self._pairs)
        self._as_taken: list[ref[DTensor] | None] = [None] * len(inputs)

    def stand(self, leaves: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether there are caches, and every cache output is the tensor that was passed as its input."""
        return self._may_stand and all([leaves[at] is tensors[place] for at, place in self._pairs])

    def as_taken(self, place: int, tensor: torch.Tensor) -> torch.Tensor | None:
        """The local tensor of an input that `note` has seen; None for another tensor."""
        known = self._as_taken[place]
        return tensor._local_tensor if known is not None and known() is tensor and isinstance(tensor, DTensor) else None

    def note(self, place: int, tensor: torch.Tensor, taken: torch.Tensor) -> None:
        """Remembers `tensor` if the program takes its own local tensor."""
        if isinstance(tensor, DTensor) and taken is tensor._local_tensor:
            self._as_taken[place] = ref(tensor)


class Session:
    """A loaded program with its store. `output_tree` rebuilds the output; None returns outputs by path. `make_backward`, for a program
    with a backward stage, builds the program for a set of outputs that received gradients."""

    def __init__(
        self,
        program: PlainProgram,
        store: Store,
        executor: Executor,
        output_tree: OutputTree | None = None,
        cuda_graph: str | bool = "auto",
        make_backward: Make | None = None,
        check_inputs: int | None = None,
    ) -> None:
        self.program = program
        self.store = store
        self.executor = executor
        self.output_tree = output_tree
        self.device = executor.device
        self.inputs = [port for port in program.inputs if port.kind == "input"]
        self.results = [port for port in program.outputs if port.kind == "output"]
        self.trained = [port for port in program.inputs if port.kind == "parameter" and port.requires_grad]
        self.trained_tensors = [store.live_of(port.key) for port in self.trained]
        self._metrics = [port for port in program.outputs if port.kind == "metric"]
        self.tangents = {port.name: port for port in program.inputs if port.kind == "tangent"}
        self.gradients = {port.name: port for port in program.outputs if port.kind == "gradient"}
        stored = ("parameter", "buffer", "state")
        kept, self._written = ([port.key for port in ports if port.kind in stored] for ports in (program.inputs, program.outputs))
        self._buffers = {key: store.buffer(key) for key in kept}  # the same tensors for as long as the session lives
        mine = program.mesh.coordinates(dist.get_rank())
        self._owned = [key for key in self._written if program.owns(key, mine)]
        self._owned_buffers = [self._buffers[key] for key in self._owned]
        # by the store's own keys, which of tied tensors are one
        self._marked = frozenset(held.key for key in self._written if (held := store.find(key)) is not None)
        self.numbers: dict[str, torch.Tensor] = {
            port.key: torch.zeros((), dtype=torch.float64, device=self.device if port.name.split(".")[-1] in ON_DEVICE else "cpu")
            for port in program.inputs
            if port.kind == "number"
        }
        self.number_names = [*map(name_of, self.numbers)]
        self._given: dict[str, float] = {}
        """What `numbers` hold."""
        self.random = next((port.key for port in program.inputs if port.kind == "random"), None)
        self.seed_step = torch.zeros(2, dtype=torch.int64, device=self.device)
        takes = self.numbers or self.random is not None
        self.stream = executor.board.numbers.stream("program") if executor.board is not None and takes else None
        self._sends = {part: _axes_of_sends(program, part) for part in (FORWARD, BACKWARD)}
        if executor.board is not None:
            store.changes.open(executor.board, self._buffers, self._sends.values())
        self.caches = set() if output_tree is None else set(output_tree.caches())
        self.local = program.info.get("inputs") == "local" and program.info.get("outputs") != "dtensor"
        self.call_keys = [port.key for port in program.inputs if port.kind in ("input", "number", "random")]
        """Of what a call begins with, beside tensors that stay from call to call."""
        lasting = executor.constants | dict(sorted(self._buffers.items(), key=lambda row: is_a(row[0], "parameter")))
        self.kept_memory = dict(zip(memories_of(lasting.values()), lasting, strict=True))
        """Their keys by the address of their memory; of several in one memory the user's own."""
        read = [key for key in program.stages[BACKWARD].inputs if not is_a(key, "tangent")] if BACKWARD in program.stages else []
        stays = lasting.keys() - self._written
        self.saved_keys = [key for key in read if key not in stays]
        """Of values that backward reads of each call."""
        self.read_by_backward = {key: lasting[key] for key in read if key in stays}
        """What it reads of what stays from call to call, by key."""
        self._users: tuple[int, UserTensors] | None = None
        self._plain = {
            port.key
            for port in program.outputs
            if port.name not in self.caches and (self.local or port.sharding is None or not port.sharding.split_axes())
        }
        """Keys of outputs that are whole on every rank, or the rank's own part of the batch."""
        self._specs: dict[str, tuple[Any, bool]] = {}
        """Of the DTensors that this program returns, by port, the spec, which takes longer to build than the rest, and whether the value as
        it is is this rank's part."""
        self._cached = CachePorts(self.inputs, self.results, self.caches)
        self._stands = False
        """Whether this call has found the model unchanged."""
        self._fit: object = None
        """Of the last call whose inputs were checked and fit, what calls that look alike have in common."""
        self.calls = 0
        self.check_inputs = check_inputs
        self._partners, self._common = _ranks_with_equal_inputs(program), _batchless_inputs(program)
        self._parts = DuplicateBatchCheck(program, store)
        self.backwards = BackwardPrograms(program, executor, make_backward) if make_backward and "backward" in program.stages else None
        on_device = dist.get_world_size() == 1 or collectives.waits_on_device(dist.group.WORLD)
        traced = "off: MESHC_TRACE records one instruction after another" if executor.recorder is not None else ""
        in_stages = program.pipeline is not None
        offloads = uses_host(program) or any(self._buffers[key].device.type != self.device.type for key in self._written)
        nodes = [node for stage in program.stages.values() for node in stage.graph.nodes]
        by_choice = any(node.target in spmd.OF_ROWS or op_name(node) == "meshc.used_rows" for node in nodes)  # wait for how many there are
        self.lent = tuple(_overwritten_inputs(program))
        """Keys of inputs that a call writes in place and returns."""
        has_backward = self.backwards is not None
        self.cuda_graph = traced or refusal(
            self.device, cuda_graph, program.mode, on_device, in_stages, offloads, by_choice, has_backward, bool(self.caches)
        )
        self._await_host = self.device.type == "cuda" and any(port.storage != "device" for port in program.inputs)
        self._graphed = None if self.cuda_graph else GraphedCalls(self, must=cuda_graph is True)

    # ------------------------------------------------------------------------------------------------------------------- inputs

    def values(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """All inputs of the executor, by key. Called without gradients."""
        self.store.check_filled()
        stands, self._stands = self._stands, False
        self.store.adopt_changes(stands)
        self.note_run(FORWARD, self.calling)
        if self.stream is not None:
            self._note(self.stream, numbers)
        values: dict[str, torch.Tensor] = dict(self._buffers)
        for place, (port, tensor) in enumerate(zip(self.inputs, tensors, strict=True)):
            values[port.key] = self._input_tile(place, port, tensor)
        for (key, tensor), name in zip(self.numbers.items(), self.number_names, strict=True):
            given = numbers[name]
            if given is not self._given.get(key):  # the same float as in the last call is there already
                tensor.fill_(given)
                self._given[key] = given
            values[key] = tensor if self.backwards is None else tensor.clone()  # a backward comes after other calls, maybe
        if self.random is not None:
            self.seed_step.copy_(seed_step(self.store.seed, self.store.step))
            # a backward that draws again comes after other calls, maybe
            values[self.random] = self.seed_step if self.backwards is None else self.seed_step.clone()
        return values

    def user_tensors(self) -> UserTensors:
        """The parameters, as a user may write to them; others once experts have moved."""
        if self._users is None or self._users[0] != self.store.moves:
            mine = [key for key in self._buffers if is_a(key, "parameter")]
            stored = {key: held for key in mine if (held := self.store.find(key)) is not None}
            self._users = self.store.moves, UserTensors({key: self._buffers[key] for key in mine}, stored)
        return self._users[1]

    @property
    def calling(self) -> str:
        """The program that this rank has called last, as messages name it."""
        return "" if self.executor.board is None else self.executor.board.calling

    def note_run(self, part: str, calling: str) -> None:
        """Notes that a part of a call begins, for the comparison between ranks of runs and of changes by hand before them."""
        if self.executor.board is not None:
            what = calling if part == FORWARD else f"the backward of {calling}"
            self.store.changes.note_run(self.executor.board, self._sends[part], what)

    def _input_tile(self, place: int, port: Port, tensor: torch.Tensor) -> torch.Tensor:
        if port.name not in self.caches:
            return self._to_local_tile(port, tensor)
        taken = self._cached.as_taken(place, tensor)
        if taken is None:
            taken = self._to_local_tile(port, tensor)
            self._cached.note(place, tensor, taken)
        return taken

    def _note(self, stream: Stream, numbers: Mapping[str, float]) -> None:
        """Notes the numbers of this call for the comparison of ranks; the step of random numbers as an offset, which rarely changes."""
        names, given = tuple(numbers), tuple(numbers.values())
        if self.random is not None:
            names += ("the seed of random numbers", "the step of random numbers, less the program's calls,")
            given += (self.store.seed, self.store.step - stream.count)
        stream.note(names, given)

    def tangent(self, port: Port, gradient: torch.Tensor) -> torch.Tensor:
        """An output's gradient, as the local tensor that the program takes."""
        return self._to_local_tile(port, gradient.detach().contiguous())

    def _to_local_tile(self, port: Port, tensor: torch.Tensor) -> torch.Tensor:
        """The local tensor that the program takes: a plain tensor as it is, a DTensor's local tensor, resharded if the program needs
        another sharding. Without gradients."""
        if not isinstance(tensor, DTensor):
            return tensor.detach().to(self.device)
        if port.sharding is None:
            return self.store.transfers.full(tensor)
        placements = layouts.torch_placements(port.sharding, self.program.mesh)
        return self.store.transfers.to_tile(self.store.transfers.chunk_of(tensor, placements), port.sharding)

    def check(self, tensors: Sequence[object], dealt: UnevenBatch | None, known: object, state: ModuleState) -> None:
        """Raises for inputs that the program was not compiled for, and for a model without values, before anything is sent. dealt: row
        counts of inputs in uneven parts. known: one object for all calls that look alike, which are checked once; state: of the model,
        likewise."""
        self.store.refuse_unfilled()
        self._stands = self.store.refuse_changed_model(state)
        if known is not self._fit:
            self._refuse_misfits(tensors, dealt)
            self._fit = known

    def _refuse_misfits(self, tensors: Sequence[object], dealt: UnevenBatch | None) -> None:
        faults = []
        sizes = self.program.axis_sizes
        for port, tensor in zip(self.inputs, tensors, strict=True):
            whole = port.sharding is None or isinstance(tensor, DTensor)
            wanted = port.shape if whole else local_shape(port.sharding, sizes)  # type: ignore[arg-type]
            if dealt is not None and not whole:
                wanted = dealt.shape_of_part(wanted, port.sharding)
            if not isinstance(tensor, torch.Tensor):
                faults.append(f"{port.name} must be a tensor, not {type(tensor).__name__}")
            elif (fault := foreign_tensor(port.name, tensor)) or tensor.is_meta:
                faults.append(fault or f"{port.name} is a meta tensor: it has a shape and no values; what to do: pass the values")
            elif tuple(tensor.shape) != wanted or tensor.dtype != port.dtype:
                faults.append(
                    f"{port.name} is {tensor.dtype} of shape {list(tensor.shape)}, the program takes {port.dtype} of shape {list(wanted)}"
                )
        if faults:
            raise InputError("inputs do not match the program:\n  " + "\n  ".join(faults))

    def tiles(self, tensors: Sequence[torch.Tensor], dealt: UnevenBatch) -> list[torch.Tensor]:
        """This rank's tiles of parts of the batch with unequal numbers of rows."""
        pairs = zip(self.inputs, tensors, strict=True)
        return [x if isinstance(x, DTensor) else dealt.tile(x.to(self.device), port.sharding, port.name) for port, x in pairs]

    def compare_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Ranks that are to pass the same inputs compare digests, at the calls that `Options.check_inputs` says; so do ranks that are to
        pass different parts of a batch, until that is settled."""
        self.calls += 1
        if not _is_check_due(self.calls, self.check_inputs) or not tensors or not (self._partners or self._common or self._parts.open):
            return
        plain = [tensor for port, tensor in zip(self.inputs, tensors, strict=True) if port.name not in self.caches]
        common = [tensor for port, tensor in zip(self.inputs, tensors, strict=True) if port.name in self._common]
        called = self.executor.board.last_call_name if self.executor.board is not None else ""
        told = [digest_of(plain), digest_of(common), digest_number([called.encode()])]
        if self.executor.board is not None:
            self.executor.board.numbers.note_sends(range(dist.get_world_size()))
        with self.executor.failure_guard(self.store.step, "compare inputs"):
            digests = collectives.numbers_of_ranks(told, self.device, self.store.transfers.groups.world)
        other = next((rank for rank, row in enumerate(digests) if row[2] != told[2]), None)
        if other is not None:
            raise StateError(OTHER_CALL.format(called=called, other=other)).mark_everywhere()
        other = first_other([row[1] for row in digests])
        if other is not None:
            names = " or ".join(sorted(self._common))
            raise InputError(f"ranks 0 and {other} passed different {names}, {OF_COMMON.format(name=min(self._common))}").mark_everywhere()
        found = next(((ranks[0], rank) for ranks in self._partners for rank in ranks if digests[rank][0] != digests[ranks[0]][0]), None)
        if found is not None:
            why = OF_PARTS if self.program.info.get("inputs") == "local" else OF_WHOLE
            raise InputError(f"ranks {found[0]} and {found[1]} passed different inputs, {why}").mark_everywhere()
        self._parts.compare([row[0] for row in digests])

    # ------------------------------------------------------------------------------------------------------------------ outputs

    def finish(self, env: Mapping[str, torch.Tensor]) -> None:
        """Writes results back to stored buffers, and marks them as written."""
        values = list(map(env.__getitem__, self._owned))
        if not all(map(is_, self._owned_buffers, values)):
            for buffer, value in zip(self._owned_buffers, values, strict=True):
                if value is not buffer:
                    buffer.copy_(value)
        self.note_written()
        if self._await_host:  # readers of host memory do not wait for streams
            torch.cuda.current_stream(self.device).synchronize()

    def note_written(self) -> None:
        """Marks copies of the buffers that a call has written as out of date."""
        if self._marked:
            self.store.mark_written(self._marked)

    def leaves(self, env: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """The program's outputs, as a list. tensors: the call's inputs; a cache that was written in place is returned as the same
        tensor."""
        found = []
        for port, place in zip(self.results, self._cached.same, strict=True):
            value, given = env[port.key], tensors[place] if place is not None and tensors else None
            here = isinstance(given, DTensor) and given._local_tensor is value
            found.append(given if here and given is not None else self.output(port, value))
        return found

    def parts(self, leaves: Sequence[torch.Tensor], dealt: UnevenBatch | None) -> Sequence[torch.Tensor]:
        """Outputs with the rows that this rank has passed, where ranks passed unequal numbers of rows."""
        if dealt is None:
            return leaves
        pairs = zip(self.results, leaves, strict=True)
        return [x if isinstance(x, DTensor) else dealt.part(x, port.sharding, port.name) for port, x in pairs]

    def metrics(self, env: Mapping[str, torch.Tensor], dealt: UnevenBatch | None = None) -> dict[str, torch.Tensor]:
        """Metrics of a step, by name."""
        found = {port.name: self.output(port, env[port.key]) for port in self._metrics}
        if dealt is None:
            return found
        return {port.name: dealt.part(found[port.name], port.sharding, port.name) for port in self._metrics}

    def build_output(self, leaves: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor] = ()) -> object:
        """Output tensors in the model's own structure, or by path if the structure is unknown. tensors: the call's inputs; a cache that
        comes back whole is AS_PASSED in the structure."""
        if self.output_tree is None:
            return {port.name: leaf for port, leaf in zip(self.results, leaves, strict=True)}
        if tensors and self._cached.stand(leaves, tensors):
            return self.output_tree.build_around(AS_PASSED, [leaves[at] for at in self._cached.beside])
        return self.output_tree.build(leaves)

    def output(self, port: Port, value: torch.Tensor) -> torch.Tensor:
        """A plain tensor if the value is whole on every rank, or the rank's own part of the batch; else a DTensor."""
        return value if port.key in self._plain else self._dtensor(port, value)

    def _dtensor(self, port: Port, value: torch.Tensor) -> DTensor:
        mesh, sharding = self.program.mesh, port.sharding
        spec, whole = self._specs.get(port.key, (None, False))
        if whole:
            return DTensor(value.view_as(value), spec, requires_grad=False)
        assert sharding is not None
        aligned = layouts.is_aligned(sharding, mesh)
        if aligned:
            local = layouts.tile_to_chunk(value, sharding, mesh, mesh.coordinates(dist.get_rank()))
        else:
            local = self.store.transfers.to_chunk(value, sharding)
        if spec is not None:
            return DTensor(local.view_as(local), spec, requires_grad=False)
        made = layouts.dtensor_of(local, mesh.device_mesh, layouts.torch_placements(sharding, mesh), port.shape)
        self._specs[port.key] = made._spec, aligned and local.shape == value.shape
        return made

    def parameter_gradient(self, gradient: Port, value: torch.Tensor) -> DTensor:
        """A gradient as autograd needs it: a DTensor like its parameter."""
        held, sharding = self.store.find(key_of("parameter", gradient.name)), gradient.sharding
        return self._dtensor(gradient, value if held is None or sharding is None else held.as_model(value, sharding))

    def run(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """One call: values, schedule, write-back. Returns every value by key."""
        with torch.set_grad_enabled(False):  # half of what `no_grad` takes
            if self._graphed is None:
                return self.work(self.values(tensors, numbers))
            env = self._graphed.run(tensors, numbers)
        self.cuda_graph = self._graphed.status
        return env

    def work(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The schedule on given values, and the write-back."""
        env = self.executor.run(values, self.store.step)
        self.finish(env)
        return env


def _axes_of_sends(program: PlainProgram, part: str) -> tuple[str, ...]:
    """The axes along which the stages of a part send; all axes in a pipeline, in which every rank waits for all others."""
    stages = [stage for name, stage in program.stages.items() if (name == BACKWARD) == (part == BACKWARD)]
    nodes = [node for stage in stages for node in stage.graph.nodes if spmd.is_collective(node.target)]
    found = {axis for node in nodes for axis in node.args[1]}
    return tuple(axis.name for axis in program.mesh.axes if axis.size > 1 and (axis.name in found or program.pipeline is not None))


def _overwritten_inputs(program: PlainProgram) -> Iterator[str]:
    """Keys of inputs that the program writes in place: buffers of a cache."""
    for stage in program.stages.values():
        keys = stage.keys()
        for node in stage.graph.nodes:
            if node in keys and any(OVER_OPERAND in sharing_of(user) for user in node.users):
                if is_a(keys[node], "input"):
                    yield keys[node]


def _ranks_with_equal_inputs(program: PlainProgram) -> list[list[int]]:
    """Groups of two or more ranks that are to pass the same inputs: all ranks, or the ranks with the same part of the batch."""
    inputs = program.info.get("inputs")
    if inputs not in ("global", "local"):
        return []
    found = program.mesh.data_groups() if inputs == "local" else [[*program.mesh.ranks]]
    return [ranks for ranks in found if len(ranks) > 1]


def _batchless_inputs(program: PlainProgram) -> frozenset[str]:
    """Names of inputs without a batch dim, in a program whose ranks pass parts of the batch."""
    if program.info.get("inputs") != "local":
        return frozenset()
    axes = {*program.mesh.data_axes}
    ports = [port for port in program.inputs if port.kind == "input"] if axes else []
    return frozenset(port.name for port in ports if port.sharding is None or not axes & port.sharding.split_axes())


def _is_check_due(call: int, every: int | None) -> bool:
    """Whether inputs are compared at call number `call`, from 1."""
    if every is None:
        return is_rare_turn(call)
    return every > 0 and (call - 1) % every == 0


def digest_of(tensors: Sequence[torch.Tensor]) -> int:
    """Digest of the whole tensors' values, 64 bits."""
    plain = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return digest_number(x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for x in plain)
