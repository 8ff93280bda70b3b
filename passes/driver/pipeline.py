"""The compiler's table of contents: every pass, in order, with the reason where its place is not obvious."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from meshc.errors import ArtifactError, CaptureError, CompileError, PlanError
from meshc.frontend.admission import refuse_empty
from meshc.frontend.capture import torch_graph
from meshc.frontend.faults import phase
from meshc.frontend.leftovers import given_up
from meshc.frontend.spared import fewer_collections
from meshc.ir import calls, records, value_of
from meshc.ir.mesh import DATA_ROLES, role
from meshc.ir.paths import input_names
from meshc.ir.sharding import Sharding
from meshc.ir.sizes import Dynamic
from meshc.ir.spmd import MICROBATCH
from meshc.passes.lower import collectives, emit, group_regions
from meshc.passes.lower.specialise import specialise
from meshc.passes.microbatches import cut, microbatch
from meshc.passes.partition.partition import partition
from meshc.passes.phases.draft import Draft, Request
from meshc.passes.phases.factors import Value
from meshc.passes.place import annotate as annotate_pass
from meshc.passes.place import work
from meshc.passes.place.factorize import factorize
from meshc.passes.place.names import name_factors
from meshc.passes.place.one_row import compare, interests_of_rows, opened, reopened, settle, why_whole
from meshc.passes.place.propagate import Interest, Propagator
from meshc.passes.place.stored_updates import state_storage
from meshc.passes.stages import cut_stages
from meshc.passes.stages.choose import choose_microbatches
from meshc.passes.stages.fit import DoesNotFit
from meshc.passes.stages.gather_once import gathers_once
from meshc.passes.trace import autocast, differentiate, fold_masks, inline, parts, raise_ops, update
from meshc.plan.recipes import resolve
from meshc.program import instance
from meshc.program.program import Port, Program, Stage
from meshc.text.allowed import refusal, spelling

Pass = Callable[[Draft], Draft]


def _capture(draft: Draft) -> Draft:
    ask = draft.request
    args, kwargs = ask.args, dict(ask.kwargs)
    if parts.means(ask):
        draft.parts = parts.find_parts(_whole_forward(ask), ask)
        args, kwargs = draft.parts.like_one((args, kwargs))
    opened = _open(draft, args, kwargs)
    traced = torch_graph(
        ask.module, ask.function, args, kwargs, signature=ask.signature, grad=ask.grad, autocast=ask.autocast, double=ask.double,
        dynamic=opened,
    )  # fmt: skip
    if ask.train:
        refuse_empty(traced.inputs)
    draft.traced, draft.output_tree = traced, traced.output_tree
    draft.cache_outputs = traced.output_tree.caches()
    return draft


def _open(draft: Draft, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, dict[int, Dynamic]]:
    """The dims of inputs that are left open, each with its size."""
    ask = draft.request
    dynamic = draft.opened.dims if draft.opened is not None else ask.dynamic
    if not dynamic:
        return {}
    if draft.parts is not None:
        raise PlanError('Options(dynamic=...) and batch_mix="mean_of_parts" do not go together yet: leave one of them out')
    names = input_names(ask.signature, args, kwargs)
    leaves = zip(names, pytree.tree_leaves((tuple(args), dict(kwargs))), strict=True)
    inputs = [(name, tuple(leaf.shape)) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
    fixed = {size for tensor in (*ask.module.parameters(), *ask.module.buffers()) for size in tensor.shape}
    for path, shape in inputs:
        fixed |= {size for dim, size in enumerate(shape) if dim not in dynamic.dims.get(path, {})}
    pieces = prod(draft.sizes.values())
    found = dynamic.settled(inputs, fixed, pieces)
    draft.dynamic = tuple(found.values())
    return {path: {dim: found[name] for dim, name in row.items()} for path, row in dynamic.dims.items()}


def _whole_forward(request: Request) -> Draft:
    """The forward graph of the whole batch with its factors, for a step that is traced for one microbatch."""
    draft = Draft(parts.whole_forward(request))
    with torch.no_grad():
        for run in (_capture, _autocast, _inline, _raise, _differentiate, _factorize):
            draft = run(draft)
    return draft


def _autocast(draft: Draft) -> Draft:
    assert draft.traced is not None
    draft.traced = autocast.lower_autocast(draft.traced, draft.mesh.device_type)
    return draft


def _inline(draft: Draft) -> Draft:
    assert draft.traced is not None
    draft.traced = inline.inline_checkpoints(draft.traced)
    return draft


def _raise(draft: Draft) -> Draft:
    assert draft.traced is not None
    draft.traced = raise_ops.raise_ops(draft.traced)
    draft.random_calls = draft.traced.random_calls
    return draft


def _differentiate(draft: Draft) -> Draft:
    assert draft.traced is not None
    draft.notes += draft.traced.notes
    draft.graph, draft.inputs, draft.outputs, draft.constants = differentiate.differentiate(draft.traced)
    if draft.traced.symbols is not None:
        draft.dynamic, draft.constraints = draft.traced.symbols.constraints(draft.traced.fake_mode.shape_env, draft.dynamic)
    if draft.request.train:
        draft = update.close_loss(draft)
    if draft.parts is not None:
        parts.number_draws(draft.the_graph(), draft.parts)
        parts.mark_sums(draft, draft.parts.count)
    return draft


def _alike(draft: Draft) -> list[tuple[tuple[Node, int], tuple[Node, int]]]:
    """Gradients, new values and tangents with what they are gradients, new values and tangents of."""
    inputs = draft.placeholders()
    results = {port.key: value_of(node) for port, node in zip(draft.outputs, draft.results(), strict=True)}
    pairs = []
    for key, value in results.items():
        kind, name = key.split(":", 1)
        other = inputs.get(f"parameter:{name}" if kind == "gradient" and ":" not in name else name if kind == "gradient" else key)
        if other is not None:
            pairs.append((value, (other, 0)))
        tangent = inputs.get(f"tangent:{name}")
        if kind == "output" and tangent is not None:
            pairs.append((value, (tangent, 0)))
    return pairs


def _factorize(draft: Draft) -> Draft:
    draft.factors = factorize(draft.the_graph(), _alike(draft))
    draft.notes += draft.factors.dropped
    draft.names = name_factors(draft.the_graph(), draft.factors, draft.inputs, draft.request.names)
    return draft


def _propagate(draft: Draft) -> Draft:
    assert draft.factors is not None and draft.names is not None and draft.plan is not None
    propagator = Propagator(draft.the_graph(), draft.factors, draft.names, draft.plan, draft.sizes, draft.inputs)
    propagator.updates = draft.updates
    if draft.opened is not None:
        propagator.interest = interests_of_rows(draft, propagator.interest)
    propagator.fixed = draft.request.fixed
    propagator.pins = draft.pins
    propagator.storage_pins = draft.storage_pins
    propagator.spread_pins = draft.spread_pins
    if draft.parts is not None:
        propagator.interest[MICROBATCH] = Interest(MICROBATCH, {})  # the graph is one microbatch's already
    if draft.request.inputs == "local":
        propagator.local_batch = tuple(axis.name for axis in draft.mesh.axes if role(axis.name) in DATA_ROLES and axis.size > 1)
    draft.assignment = propagator.run()
    draft.inputs = [replace(port, sharding=_lies(propagator, port, node)) for port, node in zip(draft.inputs, _nodes(draft), strict=True)]
    draft.outputs = [
        replace(port, sharding=_leaves(propagator, draft, port, node)) for port, node in zip(draft.outputs, draft.results(), strict=True)
    ]
    if draft.request.inputs == "local":
        _tangents_as_outputs(draft)
    _warn_replicated(draft)
    _note_idle_pins(draft)
    return draft


def _tangents_as_outputs(draft: Draft) -> None:
    """With local inputs an output is a rank's part of the batch, and so is the gradient that comes back for it; likewise for inputs."""
    outputs = {port.name: port.sharding for port in draft.outputs if port.kind == "output"}
    inputs = {f"input:{port.name}": port.sharding for port in draft.inputs if port.kind == "input"}
    draft.inputs = [replace(port, sharding=outputs[port.name]) if port.kind == "tangent" else port for port in draft.inputs]
    draft.outputs = [
        replace(port, sharding=inputs[port.name]) if port.kind == "gradient" and port.name in inputs else port for port in draft.outputs
    ]


def _nodes(draft: Draft) -> list[Node]:
    return list(draft.the_graph().find_nodes(op="placeholder"))


def _lies(propagator: Propagator, port: Port, node: Node) -> Sharding:
    whole = propagator.result.whole((node, 0))
    if port.kind == "parameter":
        return propagator.storage(port.name, "parameter")
    if port.kind == "state":
        dims, parameter = propagator.factors.dims, propagator.parameter(port.of)
        return state_storage(whole, dims[(node, 0)], propagator.storage(port.of, "state"), dims[(parameter, 0)])
    if port.kind == "input":
        return propagator.given((node, 0)) or whole
    return whole


def _leaves(propagator: Propagator, draft: Draft, port: Port, node: Node) -> Sharding:
    value = value_of(node)
    whole = propagator.result.whole(value)
    if port.kind in ("parameter", "state"):
        like = next((p for p in draft.inputs if p.key == port.key), None)
        return like.sharding if like is not None and like.sharding is not None else whole
    if port.kind == "gradient" and not port.name.startswith("input:"):
        return propagator.storage(port.name, "gradient")
    if port.kind == "metric" and len(whole.dims) > 0:
        given = propagator.given(value) if MICROBATCH in draft.sizes else None
        local = draft.request.inputs == "local"
        return _batch_only(propagator, value, whole, given) if given is not None or local else whole
    if port.kind == "output":
        given = propagator.given(value)
        if port.name in draft.cache_outputs or draft.request.outputs == "dtensor":
            return _known(given, whole)
        if MICROBATCH in draft.sizes and not draft.request.train and given is not None:
            return _batch_only(propagator, value, whole, given)  # a microbatch gives its rows
        if draft.request.inputs == "local":
            return _batch_only(propagator, value, whole, None)
    return whole


def _known(given: Sharding | None, whole: Sharding) -> Sharding:
    return whole if given is None else given.without_pending()


def _batch_only(propagator: Propagator, value: Value, whole: Sharding, given: Sharding | None) -> Sharding:
    """Split along batch alone: as it is given, or over the data axes."""
    for dim, row in enumerate(propagator.factors.dims[value]):
        for position, factor in enumerate(row):
            if "batch" in propagator.names.also[factor]:
                axes = propagator.local_batch if given is None else given.dims[dim][position].axes
                return whole.with_axes(dim, position, axes)
    return whole


def _note_idle_pins(draft: Draft) -> None:
    """A value that every rank makes where it is used, in whatever part is asked for, lies nowhere that a pin could change."""
    assert draft.assignment is not None
    for (node, index), slots in draft.pins.items():
        if node.op == "call_function" and node in draft.assignment.free and any(slots.values()):
            modules = ", ".join(records(node)[index].returned_by) or node.name
            draft.notes.append(
                f"the pin of value:{modules} has no effect: nothing but integers goes into it, so each rank makes the part it uses"
            )


def _warn_replicated(draft: Draft) -> None:
    assert draft.assignment is not None
    seen: dict[str, tuple[int, int, str]] = {}
    for node in draft.assignment.replicated:
        size = 0
        for result in records(node):
            if result.dtype is not None:
                count = result.dtype.itemsize
                for extent in result.shape:
                    count *= draft.real(extent)
                size += count
        name = str(node.target).removesuffix(".default")
        times, total, where = seen.get(name, (0, 0, str(records(node)[0].source)))
        seen[name] = (times + 1, total + size, where)
    for name, (times, total, where) in seen.items():
        draft.notes.append(f"{name} has no rule: it runs whole on every rank ({times}x, {total:,} bytes of results), first at {where}")


def _partition(draft: Draft) -> Draft:
    assert draft.assignment is not None
    wants = [port.sharding for port in draft.outputs]
    cut = parts.cut_inputs(draft) if draft.parts is not None else {}
    known = [want for want in wants if want is not None]
    guarded = draft.mesh.device_type if draft.request.check_indices else None
    graph = partition(draft.the_graph(), draft.assignment, draft.inputs, known, cut, draft.dynamic, gathers_once(draft), guarded)
    stage = Stage("main", graph, tuple(port.key for port in draft.inputs), tuple(port.key for port in draft.outputs))
    draft.stages = {"main": stage}
    return draft


@dataclass(frozen=True)
class Entry:
    name: str
    run: Pass


PASSES: tuple[Entry, ...] = (
    Entry("capture", _capture),
    Entry("autocast", _autocast),  # before raise: custom operators ignore autocast
    Entry("inline", _inline),  # before raise, which looks at every call
    Entry("raise", _raise),  # before AOTAutograd: one node forward and one backward for each composite
    Entry("differentiate", _differentiate),
    Entry("fold_masks", fold_masks.fold_masks),  # once values are pure; before factorize, so that masks tie no dims together
    Entry("update", update.append_update),  # on the global view, so that norms and updates shard by the same rules as the model
    Entry("factorize", _factorize),
    Entry("annotate", annotate_pass.annotate),
    Entry("propagate", _propagate),
    Entry("partition", _partition),
    Entry("microbatch", microbatch.split_microbatches),  # after partition: a microbatch is one more axis there
    Entry("stages", cut_stages.cut_stages),  # likewise: a stage hands on what lies on its rank; after microbatch, whose parts it cuts
    Entry("cut", cut.cut_backward),  # likewise: what lies where decides what is saved
    Entry("collectives", collectives.schedule_collectives),  # once it is settled which stage a collective is in
    Entry("emit", emit.fuse_updates),
    Entry("regions", group_regions.group_regions),  # last: what stands in a region is what runs in it
)

PLANLESS = [entry.name for entry in PASSES].index("annotate")
"""How many passes come before the first that reads the plan."""
TRACED = [entry.name for entry in PASSES].index("update")
"""How many passes come before the first that reads the optimizer."""
STAGED = [entry.name for entry in PASSES].index("stages") + 1
"""How many have run once a pipeline's stages are known."""

Hook = Callable[[str, Draft], None]


def compile_program(request: Request, hook: Hook | None = None, traced: Draft | None = None) -> tuple[Program, Draft]:
    """Run all passes, or with `traced` those that are left. `hook(name, draft)` is called after each one (dumps, verification). Raises
    MeshcError and nothing else, but for what a hook raises."""
    with given_up(), fewer_collections():
        return _compiled(request, hook, traced)


def trace(request: Request) -> Draft:
    """What passes leave that know nothing of the optimizer, for several programs of requests that differ in it alone. Tracing is most of
    the time of a compilation."""
    with given_up(), fewer_collections():
        return run_passes(start(request), PASSES[:TRACED])


def _compiled(request: Request, hook: Hook | None, traced: Draft | None) -> tuple[Program, Draft]:
    if traced is None:
        draft = run_passes(start(request), PASSES[:PLANLESS], hook)
    else:
        draft = run_passes(traced.beside(request), PASSES[TRACED:PLANLESS], hook)
    rows = opened(draft)
    if rows is not None:
        try:
            again = run_passes(reopened(draft, rows), PASSES[:PLANLESS], hook)
            with phase("comparing one row with several"):
                compare(draft, again)
            return _planned(again, hook)
        except (ArtifactError, CaptureError, CompileError, PlanError) as error:
            draft.kept_whole = why_whole(error)
    return _planned(draft, hook)


def _planned(draft: Draft, hook: Hook | None) -> tuple[Program, Draft]:
    """The passes that read the plan."""
    request = draft.request
    if request.microbatches is None:
        begin = time.process_time()
        with phase("choosing the number of microbatches"):
            with_count = replace(request, microbatches=choose_microbatches(draft, lambda own: _fitting(own, PASSES[PLANLESS:STAGED])))
        draft = replace(draft, request=with_count, sizes=start(with_count).sizes)
        draft.seconds["choose"] = time.process_time() - begin
    draft = _fitting(draft, PASSES[PLANLESS:], hook)
    with phase("putting the program together"):
        program = finish(draft)
        if draft.opened is None:
            return program, draft
        return instance.put(program, draft.opened.values), settle(draft)


def _fitting(draft: Draft, entries: Sequence[Entry], hook: Hook | None = None) -> Draft:
    """The passes after `factorize`. If a pipeline does not fit with its parameters gathered once, they are gathered more often."""
    spare = draft.again(replace(draft.request, gather_once=False), seconds=draft.seconds)
    try:
        return run_passes(draft, entries, hook)
    except DoesNotFit:
        return run_passes(spare, entries, hook)


def start(request: Request) -> Draft:
    draft = Draft(request)
    draft.plan = resolve(request.plan, request.mesh)
    draft.sizes = {axis.name: axis.size for axis in request.mesh.axes}
    if request.count > 1:
        draft.sizes[MICROBATCH] = request.count
    return draft


def run_passes(draft: Draft, entries: Sequence[Entry], hook: Hook | None = None) -> Draft:
    for entry in entries:
        begin = time.process_time()
        with phase(f"the pass {entry.name}"):
            draft = entry.run(draft)
        draft.seconds[entry.name] = time.process_time() - begin
        if hook is not None:
            hook(entry.name, draft)
    return draft


def finish(draft: Draft) -> Program:
    """The program that a draft has become after the last pass."""
    request = draft.request
    assert draft.plan is not None
    draft.notes += _unlisted(draft)
    return Program(
        stages=draft.stages,
        mesh=request.mesh,
        plan=draft.plan,
        inputs=tuple(draft.inputs),
        outputs=tuple(draft.outputs),
        schedule=draft.schedule,
        constants=draft.constants,
        axis_sizes=draft.sizes,
        microbatches=request.count,
        mode="step" if request.train else ("autograd" if request.grad else "forward"),
        notes=draft.notes,
        dynamic=draft.dynamic,
        constraints=draft.constraints,
        pipeline=draft.pipeline,
        backend=request.backend,
        info={
            "output_paths": draft.output_tree.paths() if draft.output_tree else [], "random_calls": draft.random_calls,
            "inputs": request.inputs, "outputs": request.outputs,
            "work": [row.plain() for row in work.account(draft)],
            **({"batch_mix": request.batch_mix} if draft.parts is not None else {}),
            **_pipeline_asked(draft),
        },
    )


def _pipeline_asked(draft: Draft) -> dict[str, Any]:
    """What compiling a pipeline again takes; of a function the schedule that it has made."""
    request, pipeline = draft.request, draft.pipeline
    if pipeline is None:
        return {}
    made = request.schedule if request.schedule is None or isinstance(request.schedule, str) else str(pipeline.schedule)
    each = {"stages_per_rank": request.stages_per_rank} if request.stages_per_rank is not None else {}
    return {"schedule": made, "pp_splits": list(request.pp_splits), **each}


def _unlisted(draft: Draft) -> list[str]:
    """A note for each operator that a saved program may not name."""
    targets = {node.target for stage in draft.stages.values() for node in calls(stage.graph) if refusal(node.target) is not None}
    why = "is no operator that a saved program may name: this one runs here and cannot be saved"
    return [f"{name} {why}" for name in sorted(map(spelling, targets))]


def specialised(program: Program, draft: Draft, received: Collection[str]) -> Program:
    """The program whose backward begins at the outputs named in `received` alone; its forward stage is `program`'s own.

    `draft` is what the last pass left of `program`. Tangents of other outputs are no inputs any more, and gradients that depend on none of
    those received are no outputs.
    """
    if draft.backward is None:
        return program
    own = replace(draft, stages={"backward": specialise(draft.backward, received)}, seconds={})
    backward = run_passes(own, PASSES[[entry.name for entry in PASSES].index("cut") + 1 :]).stages["backward"]
    return replace(
        program,
        stages={**program.stages, "backward": backward},
        inputs=tuple(port for port in program.inputs if port.kind != "tangent" or port.name in received),
        outputs=tuple(port for port in program.outputs if port.kind != "gradient" or port.key in backward.outputs),
    )
