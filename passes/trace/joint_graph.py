"""Joint graph: the model's graph and its gradients as one global-view ATen graph, every value with its record.

    loss = cross_entropy(linear(x, w), t)
  becomes
    mm = aten.mm(x, t(w)) ... loss, and backward:  grad_w = aten.mm(t(grad), x)

AOTAutograd traces, with a short list of decompositions for operators whose rules are simpler in pieces (batch norm becomes means, and is
thereby synchronised). Aliases, detaches and common subexpressions that tracing leaves are removed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_aggregate

from meshc.errors import CaptureError
from meshc.frontend import capture
from meshc.frontend.capture import JointGraph, TorchGraph
from meshc.frontend.sources import module_calls, source_of
from meshc.frontend.symbols import Symbols
from meshc.ir import KEY, Record, calls, calls_of, is_getitem, leaves, op_name, operands, record, records, set_record, update, value_of
from meshc.ir.graph import equal_calls, output_of, placeholders, results_of, set_results
from meshc.ir.likeness import like
from meshc.ir.schemas import RESHAPES
from meshc.passes.phases.traced_model import Joint
from meshc.passes.trace.checkpoint_regions import mark_regions
from meshc.passes.trace.decompositions import decompositions
from meshc.program.program import Port

aten = torch.ops.aten

TRANSPARENT = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
CHECKS = {aten._assert_async.default, aten._assert_async.msg}
"""Assertions without a result (`one_hot` checks its classes with two), which a program leaves out: they would need a gather of what they
check. Indices are checked by their readers (`guards.py`)."""


def joint_graph(traced: TorchGraph) -> Joint:
    """The forward and backward of torch's graph, cleaned up."""
    joint = capture.joint_graph(traced, decompositions())
    graph = joint.module.graph
    if traced.symbols is not None:
        settle_sizes(graph, traced.symbols)
    constants = _held_constants(joint, traced)
    _lift_constants(joint, constants)
    inputs, outputs = _ports(joint, traced, constants)
    _record_all(graph)
    _say_dtypes(graph)
    mark_regions(graph)
    refuse_sparse(graph)
    refuse_mixed(graph)
    mark_module_outputs(graph, outputs)  # before common subexpressions of different modules become one value
    _forward_transparent(graph)
    forget_strides(graph)
    for check in CHECKS:
        for node in graph.find_nodes(op="call_function", target=check):
            graph.erase_node(node)
    _drop_empty(graph)
    for node, first in equal_calls(graph.nodes, apart=_kept_apart):  # each layer builds the same mask and casts the same table
        _replace(graph, node, first)
    graph.eliminate_dead_code()
    for node, port in zip(placeholders(graph), list(inputs), strict=True):
        if port.kind == "constant" and not node.users:
            inputs.remove(port)
            del constants[port.name]
            graph.erase_node(node)
    return Joint(graph, tuple(inputs), tuple(outputs), constants)


def _held_constants(joint: JointGraph, traced: TorchGraph) -> dict[str, torch.Tensor]:
    """Tensors that the model, or one of its functions, holds beside parameters and buffers, by their names in the graph."""
    constants: dict[str, torch.Tensor] = {}
    for position, (kind, target) in enumerate(joint.placeholders):
        if kind == "constant":
            name = f"constant_{len(constants)}"
            joint.placeholders[position] = (kind, name)
            constants[name] = getattr(traced.module, target)
    return constants


def _lift_constants(joint: JointGraph, constants: dict[str, torch.Tensor]) -> None:
    """Constant tensors of the trace become inputs of kind `constant`, and join `constants`; their values are read outside fake mode."""
    graph = joint.module.graph
    by_target: dict[str, Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        target = str(node.target)
        value = getattr(joint.module, target, None)
        if not isinstance(value, torch.Tensor):
            continue
        if not node.users:
            graph.erase_node(node)
            continue
        if target not in by_target:
            name = f"constant_{len(constants)}"
            with graph.inserting_after(placeholders(graph)[-1]):
                placeholder = graph.placeholder(name)
            placeholder.meta.update(node.meta)
            placeholder.meta.setdefault("val", value)
            by_target[target] = placeholder
            constants[name] = value
            joint.placeholders.append(("constant", name))
        node.replace_all_uses_with(by_target[target])
        graph.erase_node(node)


def _ports(joint: JointGraph, traced: TorchGraph, constants: dict[str, torch.Tensor]) -> tuple[list[Port], list[Port]]:
    graph = joint.module.graph
    inputs: list[Port] = []
    for node, (kind, name) in zip(placeholders(graph), joint.placeholders, strict=True):
        of = name if kind in ("tangent", "number") else ""
        inputs.append(Port(kind, name, shape_of(node), node.meta["val"].dtype, of=of, requires_grad=name in traced.trainable))
        text = "".join(c if c.isalnum() else "_" for c in (name if kind != "tangent" else f"tangent_{name}"))
        node._rename(text if text[0].isalpha() else f"_{text}")
    output = output_of(graph)
    kept: list[Node] = []
    outputs: list[Port] = []
    for value, (given, name) in zip(leaves(output.args[0]), joint.outputs, strict=True):
        if isinstance(value, Node) and given != "none":
            outputs.append(Port(given, name, shape_of(value), value.meta["val"].dtype, of=name if given == "gradient" else ""))
            kept.append(value)
    set_results(graph, kept)
    output.meta.pop("desc", None)
    return inputs, outputs


def _record_all(graph: Graph) -> None:
    late: set[Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("val")
        # torch tags autograd's own nodes; in the backward of a user's own function a view may have no tag
        if node.meta.get("partitioner_tag") == "is_backward" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        plain = Record(source=source_of(node), phase="backward" if node in late else "forward")
        if isinstance(value, list | tuple):
            shapes = node.meta.get(SHAPE) or [getattr(each, "shape", ()) for each in value]
            pairs = zip(value, shapes, strict=True)
            set_record(node, tuple(like(plain, shape=tuple(shape), dtype=getattr(each, "dtype", None)) for each, shape in pairs))
        else:
            set_record(node, like(plain, shape=shape_of(node), dtype=value.dtype) if isinstance(value, torch.Tensor) else plain)


def _say_dtypes(graph: Graph) -> None:
    """Adds explicit dtypes to factory calls (`ones`, `full`, `eye`) whose dtype is not float32: it was the default of the process that
    traced, and a program must not depend on one."""
    for node in calls(graph):
        schema = getattr(node.target, "_schema", None)
        found = records(node)[0].dtype
        if schema is None or found is None or not found.is_floating_point or found is torch.float32 or node.all_input_nodes:
            continue
        if "dtype" not in node.kwargs and any(argument.name == "dtype" and argument.kwarg_only for argument in schema.arguments):
            node.kwargs = {**node.kwargs, "dtype": found}


def _forward_transparent(graph: Graph) -> None:
    """Removes aliases; a view by the trace's strides becomes a reshape, which holds for any strides of a kernel's result."""
    for node in list(graph.nodes):
        if node.target in RESHAPES:
            node.target = aten.reshape.default
        elif node.target in TRANSPARENT:
            _replace(graph, node, node.args[0])
        elif node.target is aten._to_copy.default and not isinstance(node.args[0], Node):
            node.target = aten.scalar_tensor.default  # a number that vmap has cast


def _drop_empty(graph: Graph) -> None:
    """A concatenation with empty tensors (a cache that is still empty) is the other operand."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        kept = [x for x in node.args[0] if 0 not in shape_of(x)]
        if len(kept) == 1 and shape_of(kept[0]) == shape_of(node):
            _replace(graph, node, kept[0])
        elif 0 < len(kept) < len(node.args[0]):
            node.args = (kept, *node.args[1:])


def _replace(graph: Graph, node: Node, other: Node) -> None:
    """Replaces `node` by `other`, also in the modules that return it."""
    if not isinstance(node.meta[KEY], tuple) and not isinstance(other.meta[KEY], tuple):
        update(other, returned_by=tuple(dict.fromkeys((*record(other).returned_by, *record(node).returned_by))))
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _kept_apart(node: Node) -> str:
    """Additional key of a common subexpression. Of what is worth its memory across phases, forward and backward stay as traced; views and
    getitem are free. Values of sizes alone have their source lines: positions along a batch are not those along a sequence of as many
    tokens."""
    free = is_getitem(node) or node.target in (aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default)
    phase = "" if free else records(node)[0].phase
    lines = node.meta.get("stack_trace") if not node.all_input_nodes and shape_of(node) else ""
    return f"{phase} {lines}"


def operator_and_place(node: Node) -> str:
    """An operator and its place in the user's model, for messages."""
    return f"{op_name(node).removeprefix('aten.')} at {str(records(node)[0].source) or 'the model itself'}"


# Refusal of sparse tensors: rules and collectives cut dense arrays only.
#
# h = aten._to_sparse(x)          refused, with the user's line


def refuse_sparse(graph: Graph) -> None:
    """Raises CaptureError that lists every value whose layout is not strided. Layouts are those of the trace, in `val`."""
    faults = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            faults.append(f"{operator_and_place(node)}: {value.layout}")
    if faults:
        raise CaptureError(
            "sparse tensors in the model, and programs compute with dense ones:\n  " + "\n  ".join(faults[:4]) + "\n  "
            "what to do: leave out to_sparse(), or make the tensor dense outside the model; products with zeros are zero"
        )


# Return values of the user's modules: by value, the paths of the modules that return it.
#
#     linear: 3 dims, computed in mlp.down_proj, read by an addition of layers.0             returned by mlp.down_proj and mlp
#     keys:   4 dims, computed in layers.0.self_attn, an output of the model (a cache)        returned by layers.0.self_attn, layers.0, ...
#
# A value is returned by a call of a module if it was computed during the call and is read in forward after it, or is the model's output.
# That covers containers, whose own code computes nothing, and values that leave a module through a cache.


def mark_module_outputs(graph: Graph, outputs: Sequence[Port]) -> None:
    """Fills `returned_by` of every forward value, outermost module first; the whole model has no path and is left out."""
    results = {node for node, port in zip(results_of(graph), outputs, strict=True) if port.kind == "output"}
    modules = {node: dict(module_calls(node)) for node in calls_of(graph, "forward")}
    for node, made_in in modules.items():
        if isinstance(node.meta[KEY], tuple):
            continue  # read by getitem, of the same call
        readers = [modules[user] for user in node.users if user in modules] + [{}] * (node in results)
        returned = (path for call, path in made_in.items() if path and any(call not in reader for reader in readers))
        update(node, returned_by=tuple(dict.fromkeys(returned)))


# Symbolic sizes of a trace as numbers with their expressions, in place of nodes that compute them.
#
#     sym_size = aten.sym_size.int(x, 0);  mul = sym_size * 4;  y = aten.view(x, [mul, 16])
#   becomes
#     y = aten.view(x, [4 * n_batch, 16])
#
# Later passes compute with them as with any other size (`meshc/ir/sizes.py`).


SHAPE = "open_shape"


def settle_sizes(graph: Graph, symbols: Symbols) -> None:
    """Replaces every number that the graph computes by its expression; records the shape of every tensor."""
    numbers: dict[Node, Argument] = {}

    def settle_argument(argument: Argument) -> Argument:
        return numbers.get(argument, argument) if isinstance(argument, Node) else symbols.open(argument)

    for node in list(graph.nodes):
        node.args, node.kwargs = map_aggregate(node.args, settle_argument), map_aggregate(node.kwargs, settle_argument)
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool) and node.op == "call_function":
            numbers[node] = symbols.open(value)
        elif isinstance(value, torch.Tensor):
            node.meta[SHAPE] = symbols.shape(value.shape)
        elif isinstance(value, list | tuple):
            node.meta[SHAPE] = [symbols.shape(item.shape) if isinstance(item, torch.Tensor) else () for item in value]
    for node in reversed(list(graph.nodes)):
        asserts = node.op == "call_function" and not node.users and "val" not in node.meta  # on sizes: constraints have them
        if node in numbers or asserts:
            graph.erase_node(node)


def shape_of(node: Node) -> tuple[int, ...]:
    """The global shape of a traced node's tensor."""
    found: tuple[int, ...] = node.meta.get(SHAPE) or tuple(node.meta["val"].shape)
    return found


# Refusal of products whose operands differ in dtype: kernels refuse them, fake tensors do not, so a program would fail at its first call.
#
# mm(x: f64[4, 8], t: f32[8, 4])         refused, with the user's line: torch takes one dtype on both sides


PRODUCTS: Final = frozenset(getattr(aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "mv", "dot"))
"""Products that torch computes in one dtype, summands included."""


def refuse_mixed(graph: Graph) -> None:
    """Raises CaptureError that lists every forward product of several dtypes."""
    faults = []
    for node in graph.nodes:
        if node.target not in PRODUCTS or records(node)[0].phase != "forward":
            continue
        given = [records(made)[index] for made, index in map(value_of, operands(node))]
        if len({one.dtype for one in given}) > 1:
            said = " and ".join(f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in given)
            faults.append(f"{operator_and_place(node)}: {said}")
    if faults:
        raise CaptureError(
            "products of different dtypes, which torch does not compute:\n  " + "\n  ".join(faults[:4]) + "\n  "
            "what to do: pass inputs of the parameters' dtype, cast (x.to(self.weight.dtype)), or compile under torch.autocast;\n"
            "  where a compute line of the plan names the module ahead of it, let one name this module too"
        )


# Reshapes in place of strided views: memory layouts of a trace, as operators on values only.
#
#     y = as_strided(x, [4, 32, 1, 1], [32, 1, 32, 32])      becomes      y = x                     the same value under other strides
#     y = as_strided(x, [4, 32], [32, 1])                    becomes      y = reshape(x, [4, 32])   x is contiguous, and all of it is read
#     y = as_strided_scatter(z, x, [4, 32], [32, 1])         becomes      y = reshape(x, [128])     z has 128 elements, and all are written
#
# AOTAutograd emits strided views where a view of a view met autograd. Assumes the strides of the trace's fake tensors; views of a part of a
# value, or in another order than its memory, are unchanged, and then have no rule.


SOURCE = {aten.as_strided.default: 0, aten.as_strided_scatter.default: 1}
"""Operator -> the argument that has the elements of its result, if all of operand 0 is covered."""


def forget_strides(graph: Graph) -> None:
    """In place; every node has its record and, from the trace, its fake tensor."""
    for node in list(graph.nodes):
        if node.target in SOURCE and _covers_all(node, SOURCE[node.target] + 1):
            _reshape(graph, node, node.args[SOURCE[node.target]])


def _covers_all(node: Node, first: int) -> bool:
    """Whether the strided region (size, stride and offset begin at the argument `first`) is operand 0 from end to end, in its order."""
    args: Any = node.args
    size, stride, offset = args[first], args[first + 1], (args[first + 2] if len(args) > first + 2 else 0) or 0
    whole = args[0].meta["val"]
    return offset == 0 and prod(size) == whole.numel() and _dense(size, stride) and _dense(whole.shape, whole.stride())


def _dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether memory is in the order of indices; strides of dims of size 1 are ignored."""
    expected = 1
    for extent, step in zip(reversed(size), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


def _reshape(graph: Graph, node: Node, source: Node) -> None:
    new, shape = source, record(node).shape
    if record(source).shape != shape:
        with graph.inserting_before(node):
            new = graph.call_function(aten.reshape.default, (source, list(shape)))
        new.meta.update(node.meta)  # its record among it
    node.replace_all_uses_with(new)
    graph.erase_node(node)
