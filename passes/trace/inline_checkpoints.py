"""Inline: the body of a checkpointed region, in the place of its call.

    h = tag_activation_checkpoint(body, x, w, use_reentrant=False)         h = gelu(linear(x, w))
    y = getitem(h, 0)                                             becomes  y = h

`torch.utils.checkpoint` changes how much is kept for backward, not what is computed, except that buffers are written once more in backward
(`passes/trace/repeat_writes.py`). Later passes replace calls one by one (random draws get their numbers in the order of the model,
attention becomes one operator), so they must see all of them. Each node of a body is tagged with its region and the region's policy
(`passes/trace/checkpoint_regions.py`). Runs after `autocast`, which casts within a body by the regions around its call.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from meshc.errors import CompileError
from meshc.frontend.sources import source_of
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.checkpoint_regions import carry_region, tag_region
from meshc.passes.trace.repeat_writes import CheckpointedRegion, repeat_writes, requires_grad

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def inline_checkpoints(traced: TracedModel) -> TracedModel:
    """Replaces the calls, nested bodies included."""
    module, names = traced.model.module, Counter[str]()
    places: dict[Node, CheckpointedRegion] = {}
    calls = module.graph.find_nodes(op="call_function", target=CHECKPOINT)
    while calls:
        for call in calls:
            _inline(module, call, names, places)
        calls = module.graph.find_nodes(op="call_function", target=CHECKPOINT)
    if places:
        repeat_writes(traced.model, _regions(module.graph, places))
    module.recompile()
    return traced


def _regions(graph: Graph, places: Mapping[Node, CheckpointedRegion]) -> list[CheckpointedRegion]:
    """The regions, in the order in which the model runs them, with their nodes."""
    regions: dict[CheckpointedRegion, None] = {}
    for node in graph.nodes:
        for region in places[node].enclosing() if node in places else ():
            region.nodes.append(node)
            regions[region] = None
    return [*regions]


def _inline(module: GraphModule, call: Node, names: Counter[str], places: dict[Node, CheckpointedRegion]) -> None:
    """Replaces one call. `names`: by module, the number of its regions so far; `places`: the region of each node."""
    body = _body(module, call)
    region = CheckpointedRegion(bool(call.kwargs.get("use_reentrant")), places.get(call))
    if region.reentrant and requires_grad(call) and not any(requires_grad(one) for one in call.all_input_nodes if one.op != "get_attr"):
        raise CompileError(_without_gradient(call))
    tag_region(body, call, names)
    operands = iter(call.args[1:])
    env: dict[Node, Argument] = {}
    result: Argument = None
    for node in body.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(operands)
        elif node.op == "output":
            result = map_arg(node.args[0], lambda used: env[used])
        else:
            env[node] = made = _copy(module, body, node, call, env)
            places[made] = region
    _replace(module.graph, call, result)


def _without_gradient(call: Node) -> str:
    return (
        "none of the inputs of a checkpointed region takes a gradient, and so, with use_reentrant=True, none of its parameters\n"
        f"  in your model: {source_of(call)}\n"
        "  why: torch leaves their gradients None, with a warning, and a program would train them\n"
        "  what to do: checkpoint(..., use_reentrant=False); of a stock model, model.gradient_checkpointing_enable("
        'gradient_checkpointing_kwargs={"use_reentrant": False}); or freeze these parameters'
    )


def _body(module: GraphModule, call: Node) -> GraphModule:
    name = call.args[0]
    assert isinstance(name, Node)
    body = module.get_submodule(str(name.target))
    assert isinstance(body, GraphModule)
    return body


def _copy(module: GraphModule, body: GraphModule, node: Node, call: Node, env: dict[Node, Argument]) -> Node:
    """Copies a node of the body before the call. An attribute of the body gets a name in the model."""
    with module.graph.inserting_before(call):
        made = module.graph.node_copy(node, lambda used: env[used])
    if node.op == "get_attr":
        held = operator.attrgetter(str(node.target))(body)
        made.target = f"{call.name}_{str(node.target).replace('.', '_')}"
        setattr(module, made.target, held)
    carry_region(node, made)
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
