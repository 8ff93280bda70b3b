"""Autocast: regions of automatic mixed precision, as explicit casts.

    enter = _enter_autocast('cuda', bf16, True, None)
    h = linear(x, w, b)                                    h = linear(x.to(bf16), w.to(bf16), b.to(bf16))
    y = layer_norm(h, (8,), g)            becomes          y = layer_norm(h.to(f32), (8,), g)
    z = multi_head_attention_forward(y, ...)               z = its ATen calls, each with its casts
    _exit_autocast(enter)

Torch casts by dispatch key: above autograd, at the outermost ATen operator that is on the device's list. So each call of a region is run on
fake tensors under a mode that sees ATen calls at the same level (below autograd, composites off the list decomposed) and records them
and their casts. If the call, given cast operands and no autocast, makes the same ATen calls on the same dtypes, the casts go in front of
it; else the recorded ATen calls take its place. The lists are data (`meshc.frontend.autocast_policy`), so the machine that
compiles does not matter.

A float32 leaf (a parameter, mostly) has one cast in a region, as in torch's cache: its gradients add up in the lower dtype.
Runs right after capture, because later passes replace torch's functions by operators that know no autocast.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, map_arg

from meshc.errors import CompileError
from meshc.frontend.autocast_policy import Region, eligible, inner_region
from meshc.frontend.capture import TorchGraph
from meshc.frontend.sources import source_of
from meshc.frontend.traced_gradients import GRADIENT
from meshc.ir import trees
from meshc.ir.functions import Keywords, Target
from meshc.ir.graph import placeholders
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.autocast_calls import WHOLE, AtenCallRecorder, AutocastRefused, Casts, tensors, trace
from meshc.passes.trace.checkpoint_regions import CHECKPOINT
from meshc.passes.trace.raise_flex import FLEX
from meshc.private import FakeTensor, FakeTensorMode

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_ANYWHERE: Final = "  what to do: call it in a region with enabled=False, with the dtypes that it shall have"
_GRADIENT_WITHIN: Final = (
    "casts are put into a model's own calls, before those of its gradients are there\n"
    "  what to do: take the gradient behind the region, or here under torch.autocast(device_type, enabled=False): backward runs in the "
    "dtypes of its forward, which stays in the region"
)


def lower_autocast(traced: TracedModel) -> TracedModel:
    """Replaces the autocast regions of the model by casts."""
    return replace(traced, model=as_casts(traced.model, traced.mesh.device_type))


def as_casts(traced: TorchGraph, device: str | None = None) -> TorchGraph:
    """Replaces the autocast regions of a graph by casts, in place.

    `device` is the mesh's device type. Capture traces on CPU stand-ins, so a region whose device the model read from a tensor says "cpu":
    it means `device` then, or else that of the region around it. Every other region follows the lists of the device that it names.
    """
    if not any(_has_region(module) for module in traced.module.modules() if isinstance(module, GraphModule)):
        return traced
    entered = placeholders(traced.module.graph)
    inputs = [node.meta.get("example_value", node.meta.get("val")) for node in entered]  # an unused one has only "val"
    lowering = AutocastLowering(traced.module, traced.fake_mode, device)
    with _settings(), torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd(), traced.fake_mode:
        lowering.lower_graph(inputs, [])
    return replace(traced, notes=(*traced.notes, *lowering.notes()))


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """A context without oneDNN's own variants of operators, as in capture; restores the gradient mode, which the graph sets."""
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)


def _has_region(module: GraphModule) -> bool:
    return bool(module.graph.find_nodes(op="call_function", target=ENTER))


Result = TypeVar("Result")


class AutocastLowering:
    """A graph (the model's, or the body of a checkpoint), walked once in order with a fake value for every node."""

    def __init__(self, module: GraphModule, fake_mode: FakeTensorMode, device: str | None) -> None:
        self.module, self.graph, self.fake_mode, self.device = module, module.graph, fake_mode, device
        self.values: dict[Node, Any] = {}
        self.casts = Casts()
        self.erased: set[Node] = set()
        self.emitted: set[Node] = set()
        self.retyped: set[torch.dtype] = set()
        self.bodies: list[AutocastLowering] = []

    def lower_graph(self, inputs: Sequence[object], around: list[Region]) -> object:
        """Lowers the graph, whose call is inside the regions `around`, outermost first; returns its fake outputs."""
        stack = list(around)
        outside: dict[Node, int] = {}
        feed = iter(inputs)
        result: object = None
        for node in list(self.graph.nodes):
            if node in self.erased:
                continue
            if node.op == "placeholder":
                self.values[node] = next(feed)
            elif node.op == "get_attr":
                self.values[node] = self._attribute(node)
            elif node.op == "output":
                result = self._value(node.args[0])
            elif node.target is ENTER:
                outside[node] = len(stack)
                stack.append(self._at(node, inner_region, stack, self.device, *node.args))
            elif node.target is EXIT:
                del stack[outside[node.args[0]] :]
                if not stack:  # torch clears its cache
                    self.casts.of_leaf.clear()
            else:
                self._at(node, self._call, node, stack)
                self._retype(node)
        for target in (EXIT, ENTER):
            for node in self.graph.find_nodes(op="call_function", target=target):
                self.graph.erase_node(node)
        self.graph.lint()
        self.module.recompile()
        return result

    def _at(self, node: Node, function: Callable[..., Result], *args: object) -> Result:
        try:
            return function(*args)
        except (AutocastRefused, RuntimeError, TypeError, ValueError) as error:
            name = getattr(node.target, "__name__", node.target)
            advice = "" if error.args == (_GRADIENT_WITHIN,) else f"\n{_ANYWHERE}"
            raise CompileError(f"{name}() at {source_of(node)} cannot be compiled under autocast: {error}{advice}") from error

    def _value(self, argument: Argument) -> Any:
        return map_arg(argument, lambda node: self.values[node])

    def _attribute(self, node: Node) -> object:
        value: object = operator.attrgetter(str(node.target))(self.module)
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            return self.fake_mode.from_tensor(value)
        return value

    def _call(self, node: Node, stack: list[Region]) -> None:
        region = stack[-1] if stack and stack[-1].enabled else None
        args, kwargs = self._value(node.args), self._value(node.kwargs)
        if node.target is CHECKPOINT:
            self.bodies.append(AutocastLowering(args[0], self.fake_mode, self.device))
            self.values[node] = self.bodies[-1].lower_graph(args[1:], stack)
        elif node.target is GRADIENT:
            if region:
                raise AutocastRefused(_GRADIENT_WITHIN)
            self.values[node] = _gradients(node, self._value(node.args[1]))
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            if region and node.target is FLEX:
                args, region = (*self._flex(node, args[:3], region), *args[3:]), None
            if region or any(_has_region(leaf) for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, GraphModule)):
                raise AutocastRefused("of the operators that take functions, meshc lowers autocast in checkpoint only")
            self.values[node] = _apply(node, args, kwargs)
        elif region is None:
            self.values[node] = _apply(node, args, kwargs)
        else:
            with AtenCallRecorder(region.device, region, self.casts) as watch:
                self.values[node] = _apply(node, args, kwargs)
            if watch.made and not self._hoist(node, watch, args, kwargs):
                self._expand(node, watch)

    def _flex(self, node: Node, operands: Sequence[Tensor], region: Region) -> list[Tensor]:
        """torch casts queries, keys and values of flex_attention; its score functions run outside the region."""
        cast = []
        for used, value in zip(node.args[:3], operands, strict=True):
            assert isinstance(used, Node)
            if eligible(value.dtype) and value.dtype != region.dtype:
                value = self.casts.make(value, region.dtype, region)
                used = self._cast_node(value, used, node)
            cast.append((used, value))
        node.args = (*(used for used, _ in cast), *node.args[3:])
        return [value for _, value in cast]

    def _hoist(self, node: Node, watch: AtenCallRecorder, args: Sequence[object], kwargs: Keywords) -> bool:
        """Puts the casts in front of the call, if the call then does what torch does: the same ATen calls on the same dtypes."""
        operands = tensors((args, kwargs))
        uses = Counter(map(id, operands))
        made: dict[int, list[Tensor]] = {}
        for cast in {id(cast): cast for cast in watch.made}.values():
            made.setdefault(id(self.casts.source[id(cast)]), []).append(cast)
        if any(len(casts) not in (1, uses[source]) for source, casts in made.items()):
            return False  # cast several times inside, and each cast has a gradient of its own

        def turns() -> dict[int, Iterator[Tensor]]:
            return {source: iter(casts * (uses[source] // len(casts))) for source, casts in made.items()}

        turn = turns()
        cast_args, cast_kwargs = trees.map_leaves(lambda leaf: next(turn[id(leaf)]) if id(leaf) in turn else leaf, (args, kwargs))
        try:
            with AtenCallRecorder(watch.device, None, self.casts) as plain:
                result = _apply(node, cast_args, cast_kwargs)
        except (RuntimeError, TypeError, ValueError):
            return False
        first = {id(operand): position for position, operand in reversed(list(enumerate(operands)))}
        names = [first[id(operand)] for operand in operands]
        if trace(watch, operands, names, self.values[node]) != trace(plain, tensors((cast_args, cast_kwargs)), names, result):
            return False
        turn = turns()

        def argument(used: Node) -> Argument:
            if not any(id(leaf) in turn for leaf in tensors(self.values[used])):
                return used
            wires = self._wires([used], node)

            def leaf_argument(leaf: object) -> object:
                if id(leaf) in turn:
                    return self._cast_node(next(turn[id(leaf)]), wires[id(leaf)], node)
                return wires.get(id(leaf), leaf)

            rewired: Argument = trees.map_leaves(leaf_argument, self.values[used])
            return rewired

        node.args, node.kwargs = map_arg(node.args, argument), map_arg(node.kwargs, argument)
        return True

    def _expand(self, node: Node, watch: AtenCallRecorder) -> None:
        """Replaces the call by the recorded ATen calls, with their casts."""
        wires = self._wires(node.all_input_nodes, node)

        def wire(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in wires:
                source = self.casts.source.get(id(leaf))
                if source is None or id(source) not in wires:
                    raise AutocastRefused("it uses a tensor that is no operand")
                wires[id(leaf)] = self._cast_node(leaf, wires[id(source)], node)
            return wires[id(leaf)]

        for call in watch.calls:
            name = call.function.name()
            if torch.Tag.nondeterministic_seeded in call.function.tags and name not in WHOLE:
                raise AutocastRefused(f"it draws random numbers by {name}")
            args, kwargs = trees.map_leaves(wire, (call.args, call.kwargs))
            new = self._emit("call_function", WHOLE.get(name, call.function), args, kwargs, call.out, node)
            wires.update(self._wires([new], node))
        structure = trees.map_leaves(wire, self.values[node])
        for user in list(node.users):
            part = structure[user.args[1]] if user.target is operator.getitem else None
            if isinstance(part, Node):
                user.replace_all_uses_with(part)
                self._erase(user)
            elif isinstance(structure, (Node, tuple, list)) and user.target is not getattr:
                user.args = map_arg(user.args, lambda used: structure if used is node else used)
                user.kwargs = map_arg(user.kwargs, lambda used: structure if used is node else used)
            else:
                raise AutocastRefused("its result is used in a way that meshc does not know")
        self._erase(node)

    def _erase(self, node: Node) -> None:
        self.erased.add(node)
        self.graph.erase_node(node)

    def _wires(self, nodes: Sequence[Node], near: Node) -> dict[int, Node]:
        """By tensor id, the node of every tensor that `nodes` have as values, themselves or in a list."""
        wires: dict[int, Node] = {}

        def visit(node: Node, value: object) -> None:
            if isinstance(value, Tensor):
                wires[id(value)] = node
            elif isinstance(value, (tuple, list)):
                for index, item in enumerate(value):
                    if tensors(item):
                        visit(self._emit("call_function", operator.getitem, (node, index), {}, item, near), item)

        for node in nodes:
            visit(node, self.values[node])
        return wires

    def _cast_node(self, cast: Tensor, source: Node, near: Node) -> Node:
        if id(cast) not in self.casts.node:
            self.casts.node[id(cast)] = self._emit("call_method", "to", (source, cast.dtype), {}, cast, near)
        return self.casts.node[id(cast)]

    def _emit(
        self, op: str, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument], value: object, near: Node
    ) -> Node:
        with self.graph.inserting_before(near):
            node = self.graph.create_node(op, target, args, kwargs)
        node.meta = {key: near.meta[key] for key in ("stack_trace", "nn_module_stack") if key in near.meta}
        node.meta["example_value"] = self.values[node] = value
        self.emitted.add(node)
        return node

    def _retype(self, node: Node) -> None:
        old, new = node.meta.get("example_value"), self.values[node]
        if isinstance(old, Tensor) and isinstance(new, Tensor) and old.dtype != new.dtype:
            node.meta["example_value"] = new
            self.retyped.add(old.dtype)

    def notes(self) -> list[str]:
        """Lines of the model that seem to read a tensor's dtype, in a graph where tensors had other dtypes as traced than on the device."""
        found = [note for body in self.bodies for note in body.notes()]
        for node in self.graph.nodes:
            source = source_of(node)
            named = {leaf for leaf in trees.leaves((node.args, node.kwargs)) if isinstance(leaf, torch.dtype)}
            for dtype in named & self.retyped if node not in self.emitted else ():
                word = str(dtype).removeprefix("torch.")
                if word not in source.code and word.removesuffix("32") + "(" not in source.code:
                    place = f"{source.file.rsplit('/', 1)[-1]}:{source.line}: {source.code}"
                    found.append(f"{place}\n  {dtype} here may be a tensor's dtype as traced; under autocast it is another on the device")
        return list(dict.fromkeys(found))


def _gradients(node: Node, inputs: Tensor | Sequence[Tensor]) -> list[Tensor | None]:
    """Fake gradients: in the shapes of the trace and the dtypes of the inputs here. Autograd is off."""
    of = [inputs] if isinstance(inputs, Tensor) else inputs
    return [one if one is None else one.to(x.dtype) for one, x in zip(node.meta["example_value"], of, strict=True)]


def _apply(node: Node, args: Sequence[object], kwargs: Keywords) -> object:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
