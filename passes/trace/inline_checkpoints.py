"""Inline: the body of a checkpointed region, in the place of its call.

    h = tag_activation_checkpoint(body, x, w, use_reentrant=False)         h = gelu(linear(x, w))
    y = getitem(h, 0)                                             becomes  y = h

`torch.utils.checkpoint` changes how much is kept for backward, not what is computed, except that buffers are written once more in
backward. Later passes replace calls one by one (random draws get their numbers in the order of the model,
attention becomes one operator), so they must see all of them. Each node of a body is tagged with its region and the region's policy
(`passes/trace/checkpoint_regions.py`). Runs after `autocast`, which casts within a body by the regions around its call.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from meshc.errors import CompileError
from meshc.frontend.capture import TorchGraph
from meshc.frontend.in_place_changes import changed_operand, is_changed_later
from meshc.frontend.inner_transforms import storage_of
from meshc.frontend.sources import source_of
from meshc.ir.graph import descendants_of, output_of, placeholders
from meshc.ops.signatures import bind_with_defaults
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.chains import attribute, run_call, traced_value
from meshc.passes.trace.checkpoint_regions import CHECKPOINT, POLICY, REGION, tag_region

functional = torch.nn.functional


def inline_checkpoints(traced: TracedModel) -> TracedModel:
    """Replaces the calls, nested bodies included."""
    module, names = traced.model.module, Counter[str]()
    places: dict[Node, CheckpointedRegion] = {}
    while calls := module.graph.find_nodes(op="call_function", target=CHECKPOINT):
        for call in calls:
            _inline(module, call, names, places)
    regions: dict[CheckpointedRegion, None] = {}  # in the order in which the model runs them
    for node in module.graph.nodes:
        for region in places[node].enclosing() if node in places else ():
            region.nodes.append(node)
            regions[region] = None
    if regions:
        repeat_writes(traced.model, [*regions])
    module.recompile()
    return traced


def _inline(module: GraphModule, call: Node, names: Counter[str], places: dict[Node, CheckpointedRegion]) -> None:
    """Replaces one call. `names`: by module, the number of its regions so far; `places`: the region of each node."""
    name, *operands = call.args
    assert isinstance(name, Node)
    body = module.get_submodule(str(name.target))
    assert isinstance(body, GraphModule)
    region = CheckpointedRegion(bool(call.kwargs.get("use_reentrant")), places.get(call))
    if region.reentrant and requires_grad(call) and not any(requires_grad(one) for one in call.all_input_nodes if one.op != "get_attr"):
        raise CompileError(
            "none of the inputs of a checkpointed region takes a gradient, and so, with use_reentrant=True, none of its parameters\n"
            f"  in your model: {source_of(call)}\n"
            "  why: torch leaves their gradients None, with a warning, and a program would train them\n"
            "  what to do: checkpoint(..., use_reentrant=False); of a stock model, model.gradient_checkpointing_enable("
            'gradient_checkpointing_kwargs={"use_reentrant": False}); or freeze these parameters'
        )
    tag_region(body, call, names)
    env = dict[Node, Argument](zip(placeholders(body.graph), operands, strict=True))
    for node in body.graph.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = made = _copy_node(module, body, node, call, env)
            places[made] = region
    _replace(module.graph, call, map_arg(output_of(body.graph).args[0], env.__getitem__))


def _copy_node(module: GraphModule, body: GraphModule, node: Node, call: Node, env: dict[Node, Any]) -> Node:
    """Copies a node of the body, with its tags, before the call. An attribute of the body gets a name in the model."""
    with module.graph.inserting_before(call):
        made = module.graph.node_copy(node, env.__getitem__)
    if node.op == "get_attr":
        made.target = f"{call.name}_{str(node.target).replace('.', '_')}"
        setattr(module, made.target, attribute(node, body))
    if "nn_module_stack" not in made.meta and "nn_module_stack" in call.meta:
        made.meta["nn_module_stack"] = call.meta["nn_module_stack"]
    return made


def _replace(graph: Graph, call: Node, result: Any) -> None:
    """Readers of the call read the body's result: a value, or items by number."""
    for user in list(call.users):
        if user.target is operator.getitem and isinstance(result, list | tuple):
            index = user.args[1]
            assert isinstance(index, int)
            user.replace_all_uses_with(result[index])
            graph.erase_node(user)
    if call.users:
        assert isinstance(result, Node)
        call.replace_all_uses_with(result)
    body = call.args[0]
    graph.erase_node(call)
    if isinstance(body, Node) and not body.users:
        graph.erase_node(body)


# Repeat writes: buffer writes of a checkpointed region, once more for each time that torch recomputes it in backward.
#
#     add_(seen, 1);  normal = batch_norm(x, mean, var, ..., True, 0.1)                 in a region
#   is followed by
#     add_(seen, 1);  batch_norm(x, mean, var, ..., True, 0.1)                          whose statistics are those that are there already
#
# torch recomputes a region when backward reaches it, from the last region to the first, nested regions after their outer one; buffers hold
# the first run's values by then, and are written a second time. A region of `use_reentrant=False` stops behind the last call that saves
# something for backward. A buffer that nothing else reads is written behind its region, so that equal layers stay alike; others at the end,
# in backward's order. A region whose values depend on buffers that it writes would change, and is refused.


STATISTICS: Final = {
    functional.batch_norm: "training", torch.batch_norm: "training", functional.instance_norm: "use_input_stats",
    torch.instance_norm: "use_input_stats",
}  # fmt: skip
"""Norms that write running statistics -> the argument that turns this on; their results then do not depend on these."""

WRITES_LAST: Final = (functional.instance_norm, torch.instance_norm)
"""Norms that write statistics after saving for backward: torch stops in between."""


@dataclass(eq=False)
class CheckpointedRegion:
    """A checkpointed region that has been inlined; `nodes` include those of nested regions.
    reentrant  torch recomputes all of the region, whatever backward needs"""

    reentrant: bool
    around: CheckpointedRegion | None
    nodes: list[Node] = field(default_factory=list)

    def enclosing(self) -> Iterator[CheckpointedRegion]:
        """The region itself, and those around it."""
        yield self
        if self.around is not None:
            yield from self.around.enclosing()


def repeat_writes(model: TorchGraph, regions: Sequence[CheckpointedRegion]) -> None:
    """Edits the graph in place. Raises CompileError."""
    writes = BufferWrites(model)
    late: list[list[Node]] = []
    for region in (one for one in regions if one.around is None):
        again = [node for each in _in_backward(region, regions) for node in writes.repeated_nodes(each)]
        if again and writes.is_private(again, region):
            _copy(again, region.nodes[-1].next)
        else:
            late.append(again)
    for again in reversed(late):
        _copy(again, output_of(model.module.graph))


def _in_backward(region: CheckpointedRegion, regions: Sequence[CheckpointedRegion]) -> Iterator[CheckpointedRegion]:
    """A region and its nested ones, in the order in which backward reaches them."""
    yield region
    for inner in reversed([one for one in regions if one.around is region]):
        yield from _in_backward(inner, regions)


def _copy(nodes: Sequence[Node], before: Node) -> None:
    copies: dict[Node, Node] = {}
    for node in nodes:
        with node.graph.inserting_before(before):
            copies[node] = node.graph.node_copy(node, partial(_copy_operand, node, copies))
        for name in (REGION, POLICY):
            copies[node].meta.pop(name, None)


def _copy_operand(node: Node, copies: Mapping[Node, Node], used: Node) -> Node:
    """An operand of a node's copy: the operand's copy, or its value when the node read it."""
    if used in copies or used.op in ("get_attr", "placeholder") or not is_changed_later(used):
        return copies.get(used, used)
    with node.graph.inserting_before(node):
        held = node.graph.call_method("clone", (used,))
    held.meta.update(used.meta)
    return held


class BufferWrites:
    """Nodes of a torch-level graph that write into tensors of the model."""

    def __init__(self, model: TorchGraph) -> None:
        self.model = model

    def repeated_nodes(self, region: CheckpointedRegion) -> list[Node]:
        """The nodes that torch runs once more: writes, and their operands that depend on written buffers. Raises CompileError if other
        values depend on them."""
        if not any(map(self._written_buffers, region.nodes)) or not _is_reached(region):
            return []
        nodes = region.nodes
        if not region.reentrant:
            end = next((index for index in reversed(range(len(nodes))) if self._keeps(nodes[index])), -1)
            nodes = nodes[: end if end >= 0 and nodes[end].target in WRITES_LAST else end + 1]
        wanted = {node for node in nodes if self._written_buffers(node)}
        written = {held for node in wanted for held in self._written_buffers(node)}
        depend: set[Node] = set()
        for node in region.nodes:
            if any(used in depend or self._buffer_of(used) in written for used in self._result_operands(node)):
                depend.add(node)
                if requires_grad(node):
                    raise CompileError(_dependence_text(node))
        for node in reversed(nodes):
            if node in wanted:
                wanted.update(used for used in node.all_input_nodes if used in depend)
        return [node for node in nodes if node in wanted]

    def is_private(self, nodes: Sequence[Node], region: CheckpointedRegion) -> bool:
        """Whether nothing outside a region reads or writes the buffers that these nodes write."""
        written = {held for node in nodes for held in self._written_buffers(node)}
        readers = {user for node in self.model.module.graph.nodes if self._buffer_of(node) in written for user in node.users}
        return readers.issubset(region.nodes)

    def _buffer_of(self, node: Node) -> int | None:
        """The id of the model's tensor whose memory a value shares, if any."""
        while node.op != "get_attr":
            memory = storage_of(node)
            viewed = (used for used in node.all_input_nodes if memory is not None and storage_of(used) == memory)
            behind = changed_operand(node) or next(viewed, None)
            if behind is None:
                return None
            node = behind
        return id(attribute(node, self.model.module))

    def _written_buffers(self, node: Node) -> list[int]:
        targets: list[Node | None] = [*self._statistics(node)] or [changed_operand(node)]
        return [held for target in targets if target is not None and (held := self._buffer_of(target)) is not None]

    def _result_operands(self, node: Node) -> list[Node]:
        """The operands that a node's result depends on."""
        statistics = [one for one in self._statistics(node) if self._buffer_of(one) is not None]
        return [used for used in node.all_input_nodes if used not in statistics]

    def _statistics(self, node: Node) -> list[Node]:
        """The running statistics that a norm writes."""
        if node.op != "call_function" or node.target not in STATISTICS:
            return []
        given = bind_with_defaults(node.target, node.args, node.kwargs)
        found = (given["running_mean"], given["running_var"]) if given[STATISTICS[node.target]] else ()
        return [one for one in found if isinstance(one, Node)]

    def _keeps(self, node: Node) -> bool:
        """Whether torch's own call saves something for backward."""
        kept: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            kept.append(value)
            return value

        if node.op not in ("call_function", "call_method") or not requires_grad(node):
            return False
        args, kwargs = map_arg((node.args, node.kwargs), self._fresh)
        with self.model.fake_mode, torch.enable_grad(), torch._C._DisableAutocast(), torch.autograd.graph.saved_tensors_hooks(keep, keep):
            run_call(node, args, kwargs)
        return bool(kept)

    def _fresh(self, node: Node) -> Any:
        """A fake value like the trace's, without its autograd history."""
        value = traced_value(node, self.model.module)
        if not isinstance(value, Tensor):
            return value
        with self.model.fake_mode, torch.enable_grad():
            return value.detach().requires_grad_(value.requires_grad).clone()


def _is_reached(region: CheckpointedRegion) -> bool:
    """Whether backward reaches a region from the graph's results."""
    reached = descendants_of((node for node in region.nodes if requires_grad(node)), requires_grad)
    return any(user.op == "output" for node in reached if requires_grad(node) for user in node.users)


def requires_grad(node: Node) -> bool:
    """Whether a node's value in the trace, or an item of it, requires a gradient."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in (value if isinstance(value, tuple | list) else [value]))


def _dependence_text(node: Node) -> str:
    source = source_of(node)
    return (
        "a checkpointed region changes a buffer that its own values depend on\n"
        f"  in your model: {source} `{source.code}`\n"
        "  why: torch runs a region again in backward, when the buffer holds other values: gradients would be those of another function\n"
        "  what to do: take what reads the buffer, or what changes it, out of the region"
    )
