"""Tracing: a model to one torch-level graph, and that graph to one ATen graph with its backward. The one file that calls torch's tracers.

Tracing happens on fake CPU tensors of global shape, whatever device the model is on (meta parameters silently give no gradients, fake
cuda tensors abort on a CPU build). Two private entry points of torch are used, and `tests/frontend/test_capture.py` is their canary:
`torch._dynamo.functional_export._dynamo_graph_capture_for_export` and `torch._functorch.aot_autograd.aot_export_joint_with_descriptors`.
Both are imported in the functions that use them: the import takes a quarter of the time of `import meshc`, and running a saved program
needs neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from meshc.errors import CaptureError
from meshc.frontend import trace_errors
from meshc.frontend.capture_patches import apply_capture_patches, settle_graph, traceable_model
from meshc.frontend.compute_dtypes import AS_STORED, ComputeDtypes, cast_inputs
from meshc.frontend.double_copy import double_by_default, wide_dtype, widen_casts
from meshc.frontend.inner_transforms import storage_of
from meshc.frontend.linalg_checks import settle_checks
from meshc.frontend.output_tree import OutputTree
from meshc.frontend.read_numbers import NumberInputs
from meshc.frontend.read_places import FUNCTION, MODEL, ReadPlace, watched_at_calls
from meshc.frontend.read_values import Number, PlaceLookup, methods
from meshc.frontend.side_effects import TraceObservations
from meshc.frontend.skipped_work import with_lazy_code, without_lookups
from meshc.frontend.sources import source_of
from meshc.frontend.symbols import Symbols
from meshc.ir import trees
from meshc.ir.functions import Function
from meshc.ir.graph import output_of, placeholders, results_of, set_results
from meshc.ir.keys import PortKind, key_of
from meshc.ir.paths import input_names
from meshc.ir.sizes import Dynamic
from meshc.private import (
    BufferAOTInput,
    FakeTensorMode,
    GradAOTOutput,
    OpOverload,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TracingContext,
    tracing,
)

ROOT = "module."
SEED_STEP = "meshc_seed_step"


class Root(nn.Module):
    """The module that is traced: calls `function(module, *args, **kwargs)` under the autocast state of the caller."""

    def __init__(self, module: nn.Module, function: Function, autocast: Sequence[tuple[str, torch.dtype]] = ()) -> None:
        super().__init__()
        self.module = module
        self.function = function
        self.autocast = tuple(autocast)

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self._within(self.autocast, args, kwargs)

    def _within(self, regions: tuple[tuple[str, torch.dtype], ...], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        if not regions:
            return self.function(self.module, *args, **kwargs)
        with torch.autocast("cpu", regions[0][1]):  # on any device: capture runs on the CPU, and the autocast pass knows the mesh's device
            return self._within(regions[1:], args, kwargs)


@dataclass(frozen=True)
class TorchGraph:
    """A torch-level graph of the whole model.

    inputs    (path, fake tensor) of each tensor input, in order
    tensors   fake parameters and buffers by qualified name
    double    the graph is a copy in double precision
    seen      what the trace has observed of Python: the code that has run, all that was read
    reads     places among these that each call checks again
    numbers   numbers among these that are inputs, by the attributes of the graph that stand for them
    computed  dtypes of parameters in the trace, where these are not those of their storage
    """

    module: GraphModule
    args: tuple[object, ...]
    kwargs: dict[str, object]
    inputs: list[tuple[str, Tensor]]
    tensors: dict[str, Tensor]
    trainable: set[str]
    aliases: dict[str, str]
    output_tree: OutputTree
    random_calls: int = 0
    notes: tuple[str, ...] = ()
    symbols: Symbols | None = None
    seen: TraceObservations = field(default_factory=TraceObservations)
    double: bool = False
    reads: tuple[ReadPlace, ...] = ()
    numbers: Mapping[str, Number] = field(default_factory=dict)
    computed: ComputeDtypes = AS_STORED

    @property
    def fake_mode(self) -> FakeTensorMode:
        return self.module.meta["fake_mode"]


@dataclass
class JointGraph:
    """An ATen graph with its backward.

    placeholders  (kind, name or output path) of each placeholder: parameter, buffer, constant, input, number, random or tangent
    outputs       (kind, name or path) of each output of the graph: output, gradient, buffer or none
    """

    module: GraphModule
    placeholders: list[tuple[PortKind, str]]
    outputs: list[tuple[PortKind | Literal["none"], str]]


@contextlib.contextmanager
def fake_tensors(
    module: nn.Module, mode: FakeTensorMode | None, double: bool = False, computed: ComputeDtypes = AS_STORED
) -> Iterator[tuple[dict[str, Tensor], dict[str, str]]]:
    """A context with fake CPU parameters and buffers of global shape in `module`; the originals are always put back. Without a mode the
    fake tensors are of the device meta.

    Yields the fake tensors by qualified name, and the aliases (second name -> first name) of tied ones.
    """
    swapped: list[tuple[dict[str, object], str, Any]] = []
    fakes: dict[int, tuple[str, Tensor]] = {}
    made: set[int] = set()
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    try:
        for prefix, owner in module.named_modules(remove_duplicate=False):
            for store in (owner._parameters, owner._buffers):
                for key, value in list(store.items()):
                    if value is None or id(value) in made:
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    if id(value) in fakes:
                        aliases[name], fake = fakes[id(value)]
                    else:
                        with mode or contextlib.nullcontext():
                            device = "meta" if mode is None else "cpu"
                            dtype = computed.parameters.get(name, wide_dtype(value.dtype, double))
                            fake = torch.empty(tuple(value.shape), dtype=dtype, device=device)
                            if isinstance(value, nn.Parameter):
                                fake = nn.Parameter(fake, requires_grad=value.requires_grad)
                        fakes[id(value)] = name, fake
                        made.add(id(fake))
                        tensors[name] = fake
                    swapped.append((store, key, value))
                    store[key] = fake
        yield tensors, aliases
    finally:
        for store, key, value in reversed(swapped):
            store[key] = value


def _stand_in(
    mode: FakeTensorMode, grad: bool, double: bool, opened: Mapping[str, Mapping[int, Dynamic]], name: str, leaf: object
) -> object:
    """A fake CPU tensor for an input, its open dims marked dynamic; a leaf that is no tensor is returned as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    shape = [opened.get(name, {}).get(dim, extent) for dim, extent in enumerate(leaf.shape)]
    with mode:
        made = torch.empty([s.hint if isinstance(s, Dynamic) else s for s in shape], dtype=wide_dtype(leaf.dtype, double), device="cpu")
    for dim in opened.get(name, {}):
        torch._dynamo.maybe_mark_dynamic(made, dim)
    return made.requires_grad_(grad and leaf.requires_grad)


def torch_graph(
    module: nn.Module,
    function: Function,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    signature: Callable[..., object],
    grad: bool,
    autocast: Sequence[tuple[str, torch.dtype]] = (),
    double: bool = False,
    dynamic: Mapping[str, Mapping[int, Dynamic]] | None = None,
    numbers: Sequence[ReadPlace] = (),
    computed: ComputeDtypes = AS_STORED,
) -> TorchGraph:
    """Trace `function(module, *args, **kwargs)` to one graph. Raises CaptureError with the user's line where torch cannot.

    `dynamic` has the open dims of inputs, by path; `numbers` has the places of Python numbers that become inputs; `computed` the dtypes of
    parameters, and of what goes into modules, where a plan says others.
    """
    from meshc.private import graph_capture

    mode = FakeTensorMode()
    opened = dynamic or {}
    fake = partial(_stand_in, mode, grad, double, opened)
    names = input_names(signature, args, kwargs)
    given, spec = trees.flatten((tuple(args), dict(kwargs)))
    fake_args, fake_kwargs = trees.unflatten([fake(name, leaf) for name, leaf in zip(names, given, strict=True)], spec)
    leaves = trees.leaves((fake_args, fake_kwargs))
    inputs = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)]
    root, inputs_of_python = Root(module, function, autocast), NumberInputs(numbers, module, function)
    root.training = module.training  # the root's own flag alone: a model in training may hold layers in evaluation (frozen norms)
    with mode:
        inputs_of_python.register(root)
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    with (
        fake_tensors(module, mode, double, computed) as (tensors, aliases), cast_inputs(module, computed.inputs),
        torch.set_grad_enabled(grad), _dynamo_settings(), traceable_model(module),
        without_lookups(), with_lazy_code(), trace_errors.without_log_echo(), double_by_default(double),
    ):  # fmt: skip
        try:
            with apply_capture_patches(bool(opened)) as seen, inputs_of_python.read_as_inputs(root):
                graph = graph_capture(root)(*fake_args, **fake_kwargs)
            watched = watched_at_calls(seen.places)
            reads = tuple(dict.fromkeys((*watched, *methods(PlaceLookup({MODEL: module, FUNCTION: function}), watched, seen.code))))
        except Exception as error:
            raise trace_errors.explain_error(error, signature, args, kwargs) from error
    inputs_of_python.refuse_constants(seen.constants)
    notes = [*seen.notes(), *settle_graph(graph)]
    graph.meta["fake_mode"] = graph.meta.get("fake_mode") or mode
    tree = _arrange_outputs(graph, leaves)
    if double:
        widen_casts(graph)
    held = graph, fake_args, fake_kwargs, inputs, tensors, trainable, aliases, tree
    kept = replace(seen, said=[])
    by_attribute = inputs_of_python.by_attribute
    traced = TorchGraph(
        *held, notes=tuple(notes), double=double, reads=reads, numbers=by_attribute, seen=kept, computed=computed
    )  # fmt: skip
    return _with_dynamic_sizes(traced, opened) if opened else traced


def _with_dynamic_sizes(traced: TorchGraph, dynamic: Mapping[str, Mapping[int, Dynamic]]) -> TorchGraph:
    """The trace with torch's symbolic tensors as its inputs, and the symbol of each of the user's dynamic sizes."""
    _refuse_sizes_as_outputs(traced)
    values = [node.meta["val"] for node in placeholders(traced.module.graph)]
    symbolic = [value for value in values if isinstance(value, Tensor)]
    extents: list[tuple[Any, Dynamic]] = []
    for (name, given), tensor in zip(traced.inputs, symbolic, strict=True):
        tensor.requires_grad_(given.requires_grad)
        for dim, size in dynamic.get(name, {}).items():
            extent: object = tensor.shape[dim]
            if not isinstance(extent, torch.SymInt) or not extent.node.expr.is_Symbol:
                raise CaptureError(
                    f"the model fixes dim {dim} of {name} at {extent}, and it was to stay open as {size.name}\n"
                    "  what to do: leave it out of Options(dynamic=...), or take the number out of the model"
                )
            extents.append((extent, size))
    leaves, spec = trees.flatten((traced.args, traced.kwargs))
    rest = iter(symbolic)
    args, kwargs = trees.unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    inputs = [(name, tensor) for (name, _), tensor in zip(traced.inputs, symbolic, strict=True)]
    return replace(traced, args=args, kwargs=kwargs, inputs=inputs, symbols=Symbols(extents))


def _refuse_sizes_as_outputs(traced: TorchGraph) -> None:
    """Refuses a dynamic size as an output: an output that is no tensor is a constant of the program. Raises CaptureError."""
    for name, leaf in zip(traced.output_tree.paths(), results_of(traced.module.graph), strict=True):
        if isinstance(leaf, Node) and not isinstance(leaf.meta.get("example_value"), Tensor | None):
            raise CaptureError(
                f"the model returns a number (output {name}) that follows from a size that was to stay open\n"
                "  what to do: return tensors, whose shapes say it, or leave the size out of Options(dynamic=...)"
            )


def _arrange_outputs(module: GraphModule, inputs: Sequence[object]) -> OutputTree:
    """Makes each output a value of its own; returns the outputs' tree.

    Caches are detached: no gradient flows into them. An output that shares memory with an input, a parameter or another output becomes a
    copy: AOTAutograd gives such outputs no tangent, since it would rebuild them as views of their base.
    """
    graph, codegen = module.graph, cast(Any, module.graph._codegen)  # a captured graph's, which flattens and unflattens
    given = dict(zip(placeholders(graph), inputs, strict=True))
    leaves: list[Any] = [*results_of(graph)]
    outer = [given.get(leaf, leaf) for leaf in leaves]
    plain = {index: leaf for index, leaf in enumerate(outer) if not isinstance(leaf, Node | Tensor)}
    tree = OutputTree(codegen.pytree_info.out_spec, plain)
    caches = tree.caches()
    taken = {storage_of(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for index, (path, node) in enumerate(zip(tree.paths(), leaves, strict=True)):
        if not isinstance(node, Node):
            continue
        methods = ["detach"] if path in caches else []
        if getattr(node.meta.get("example_value"), "requires_grad", False):
            methods += ["clone"] if storage_of(node) in taken else []
            taken.add(storage_of(node))
        for method in methods:
            with graph.inserting_before(output_of(graph)):
                leaves[index] = graph.call_method(method, (leaves[index],))
            leaves[index].meta.update(node.meta)
    set_results(graph, leaves)
    module.recompile()
    return tree


@contextlib.contextmanager
def _dynamo_settings() -> Iterator[None]:
    """A context for tracing: recurrent layers are traced, guards on default arguments are kept; oneDNN's variants of operators, of which no
    rule knows, are off."""
    enabled = torch._C._get_mkldnn_enabled()
    with torch._dynamo.config.patch(allow_rnn=True, skip_guards_on_constant_func_defaults=False):
        torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(enabled)


def joint_graph(traced: TorchGraph, decompositions: Mapping[object, Function]) -> JointGraph:
    """AOTAutograd's ATen graph: outputs, and one gradient per trainable parameter and differentiable input when tracing with grad."""
    from meshc.private import aot_export_joint_with_descriptors

    names = traced.module.meta.get("dynamo_flat_name_to_original_fqn", {})
    by_tensor = {id(tensor): name for name, tensor in traced.tensors.items()}
    flat = {name.replace(".", "_"): name for name in traced.tensors}

    def qualified_name(target: str) -> str:
        name = by_tensor.get(id(getattr(traced.module, target, None)))
        if name is None and target in names:
            name = names[target].removeprefix("_export_root.").removeprefix(ROOT)
        name = name or flat.get(target.split("_module_", 1)[-1], target)
        return traced.aliases.get(name, name)

    with (
        tracing(TracingContext(traced.fake_mode)), torch._C._DisableAutocast(), double_by_default(traced.double), _dynamo_settings(),
        with_lazy_code(), trees.registration(), trace_errors.without_log_echo(), contextlib.ExitStack() as stack,
    ):  # fmt: skip
        try:
            joint = aot_export_joint_with_descriptors(
                stack, traced.module, traced.args, traced.kwargs, decompositions=cast(dict[OpOverload, Function], dict(decompositions))
            )
        except RuntimeError as error:
            trace_errors.refuse_no_gradient(error, traced.module)
            trace_errors.refuse_changed(error, traced.module)
            raise
    module = joint.graph_module
    settle_checks(module.graph)
    for node in placeholders(module.graph):
        if not isinstance(node.meta.get("val"), Tensor):  # numbers, flags and strings become constants of the graph
            node.replace_all_uses_with(node.meta.get("val"))  # type: ignore[arg-type]  # it takes constants too
            module.graph.erase_node(node)
    entered = [_input_name(node.meta["desc"], qualified_name, traced) for node in placeholders(module.graph)]
    output = output_of(module.graph)
    outputs = [_output_name(description, qualified_name, traced) for description in output.meta["desc"]]
    return JointGraph(module, entered, outputs)


def _input_name(description: Any, qualified: Callable[[str], str], traced: TorchGraph) -> tuple[PortKind, str]:
    if isinstance(description, ParamAOTInput):
        name = qualified(description.target)
        if name not in traced.tensors:
            raise CaptureError(_foreign_parameter_message(description.target, traced))
        return "parameter", name
    if isinstance(description, BufferAOTInput):
        name = qualified(description.target)
        if name not in traced.tensors:  # a tensor of the model beside its parameters and buffers is named by its attribute in the trace
            if description.target in traced.numbers:
                return "number", traced.numbers[description.target].name
            if name == SEED_STEP:
                return "random", name
            trace_errors.refuse_array(traced.module, description.target)
            return "constant", description.target
        return "buffer", name
    if isinstance(description, PlainAOTInput):
        before = trees.leaves((traced.args, traced.kwargs))[: description.idx]
        return "input", traced.inputs[sum(isinstance(leaf, Tensor) for leaf in before)][0]
    if type(description).__name__ == "TangentAOTInput":
        inner = description.output
        if isinstance(inner, PlainAOTOutput):
            return "tangent", traced.output_tree.paths()[inner.idx]
        return "tangent", str(inner)
    raise CaptureError(f"torch's tracer gave an input of a kind that meshc does not know: {description}")


def _foreign_parameter_message(target: str, traced: TorchGraph) -> str:
    """The message for a parameter of another module than the compiled one, which a function reads directly."""
    readers = [user for node in traced.module.graph.find_nodes(op="get_attr", target=target) for user in node.users]
    where = f"\n  in your model: {source_of(readers[0])}" if readers else ""
    shape = list(getattr(traced.module, target).shape)
    return (
        f"a parameter of shape {shape} is read that is none of the model's: a loss, or the model itself, calls another module{where}\n"
        "  why: a program keeps, splits and updates the parameters of one module\n"
        "  what to do: put both modules into one nn.Module and compile that; a teacher's parameters have requires_grad_(False) there"
    )


def _output_name(description: object, qualified: Callable[[str], str], traced: TorchGraph) -> tuple[PortKind | Literal["none"], str]:
    if isinstance(description, PlainAOTOutput):
        return "output", traced.output_tree.paths()[description.idx]
    if isinstance(description, GradAOTOutput):
        kind, name = _input_name(description.grad_of, qualified, traced)
        if kind == "constant":
            raise CaptureError(
                f"a tensor of the model ({name}) takes a gradient and is not its parameter\n  what to do: make it an nn.Parameter"
            )
        return "gradient", name if kind == "parameter" else key_of(kind, name)
    if description is None:
        return "none", ""
    mutated = getattr(description, "mutated_input", None)
    if mutated is not None:
        kind, name = _input_name(mutated, qualified, traced)
        trace_errors.refuse_change_in_place(kind, name, traced.trainable)
        return kind, name
    raise CaptureError(f"torch's tracer gave an output of a kind that meshc does not know: {description}")
