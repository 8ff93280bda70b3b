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
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from meshc.errors import CompileError
from meshc.frontend.sources import source_of
from meshc.ir.graph import output_of, placeholders
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.checkpoint_regions import CHECKPOINT, tag_region
from meshc.passes.trace.repeat_writes import CheckpointedRegion, repeat_writes, requires_grad


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
            env[node] = made = _copy(module, body, node, call, env)
            places[made] = region
    _replace(module.graph, call, map_arg(output_of(body.graph).args[0], env.__getitem__))


def _copy(module: GraphModule, body: GraphModule, node: Node, call: Node, env: dict[Node, Any]) -> Node:
    """Copies a node of the body, with its tags, before the call. An attribute of the body gets a name in the model."""
    with module.graph.inserting_before(call):
        made = module.graph.node_copy(node, env.__getitem__)
    if node.op == "get_attr":
        made.target = f"{call.name}_{str(node.target).replace('.', '_')}"
        setattr(module, made.target, operator.attrgetter(str(node.target))(body))
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
