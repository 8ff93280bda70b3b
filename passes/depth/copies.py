"""The whole model's graph, grown from the captured part by copies of block 1 of a stretch behind it.

    block 0, block 1, block 2, block 3      becomes      block 0, block 1, 28 copies of it, block 2, block 3

Block 2 then reads the last copy where it read block 1, and block 1 reads the first copy where it read block 2 (a gradient). Behind them,
numbers of random calls and of forward operators (`seq_nr`), and numbers in names, are one step higher for each copy.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from meshc.ir import KEY, Record, records
from meshc.ir.graph import placeholders, results_of
from meshc.ir.schemas import call_number, with_call
from meshc.passes.depth.block_twins import same_records, twins
from meshc.passes.depth.blocks import NAMED, Blocks, blocks_of
from meshc.passes.depth.mentions import LayerRenaming, Mentions
from meshc.passes.depth.order import order_with_copies
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.captured_depth import Depth
from meshc.passes.phases.traced_model import Joint
from meshc.program.program import Port

SEQUENCE = "seq_nr"


@dataclass(frozen=True)
class GrownGraph:
    """The whole model's graph.

    kept    captured node -> its node in `graph`
    copies  node of block 1 -> its copies, by number from 1
    draws   the number of additional random calls
    """

    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    kept: Mapping[Node, Node]
    copies: Mapping[Node, Mapping[int, Node]]
    draws: int


def copy_name(name: str, number: int) -> str:
    """The name of a copy of a value of the global view."""
    return f"{name}__{number}" if number else name


class GraphGrower:
    """Builds the whole model's graph. Raises Unequal.
    pairs  for a per-rank graph: names of values of the global view in block 1 -> in block 2; None for the global view itself"""

    def __init__(self, graph: Graph, blocks: Blocks, mentions: Mentions, pairs: Mapping[str, str] | None = None) -> None:
        self.graph, self.blocks, self.mentions, self.pairs = graph, blocks, mentions, pairs
        self.count = mentions.stretch.left_out
        self.twins = {twin.one: twin for twin in twins(graph, blocks, mentions, pairs or {})}
        self.others = {twin.other: twin for twin in self.twins.values()}
        self.places = list(self.twins)
        self.made = Graph()
        self.kept: dict[Node, Node] = {}
        self.copies: dict[Node, dict[int, Node]] = {node: {} for node in self.twins}
        self.sequence = NumberSteps((one.meta.get(SEQUENCE), twin.other.meta.get(SEQUENCE)) for one, twin in self.twins.items())
        self.calls = NumberSteps((call_number(one), call_number(twin.other)) for one, twin in self.twins.items())

    def build_graph(self, inputs: Sequence[Port], outputs: Sequence[Port]) -> GrownGraph:
        self._refuse_readers()
        ports = dict(zip(placeholders(self.graph), inputs, strict=True))
        partner = {one: twin.other for one, twin in self.twins.items()}
        pairs = [(one, other) for one, other in partner.items() if one in ports]
        called = Series(((one.name, other.name) for one, other in pairs), self.count)
        entering = Ports(((ports[one], ports[other]) for one, other in pairs), self.mentions)
        entered: list[Port] = []
        for node, number in order_with_copies([node for node in self.graph.nodes if node.op != "output"], self.blocks, partner, self.count):
            name = self._name(node, number, called)
            if number:
                self.copies[node][number] = self._copy(node, number, name)
            else:
                self.kept[node] = self._keep(node, name)
            if node in ports:
                entered.append(entering.copy(ports[node], ports[partner[node]], number) if number else entering.later(ports[node]))
        left = self._results(outputs)
        return GrownGraph(self.made, tuple(entered), tuple(left), self.kept, self.copies, self.calls.step * self.count)

    def _name(self, node: Node, number: int, called: Series) -> str:
        """A node's new name: in a per-rank graph as in one that was captured whole; in the global view so that names of the captured part
        stay valid."""
        if self.pairs is None:
            return copy_name(node.name, number)
        if node.op != "placeholder":
            return re.sub(r"_\d+$", "", node.name)
        return called.copy(node.name, self.twins[node].other.name, number) if number else called.later(node.name)

    def _refuse_readers(self) -> None:
        """Nodes of inner blocks are read by their own and by neighbouring blocks alone. Raises Unequal."""
        for nodes, near in ((self.twins, (0, 1, 2)), (self.others, (1, 2, 3))):
            for node in nodes:
                for user in node.users:
                    if user.op != "output" and self.blocks.get(user) not in near:
                        raise Unequal(f"{user.name} outside the layers reads {node.name} of one inside")

    # ------------------------------------------------------------------------------------------------------------------ the nodes

    def _keep(self, node: Node, name: str) -> Node:
        """Copies a captured node into the new graph."""
        twin = self.twins.get(node) or self.others.get(node)
        reads = iter(twin.reads if twin is not None else ())

        def there(operand: Node) -> Node:
            block, place = next(reads, None) or (0, 0)
            if block and (node in self.twins) == (block > 0):  # what stands on the side of the copies
                return self._at(1 if block > 0 else self.count, place, node)
            return self.kept[operand]

        number = call_number(node)
        later = None if number is None else self.calls.later(number, self.count)
        layers = self.mentions.later() if node not in self.others else self.mentions.other(self.others[node].fixed)
        made = self._make(node, name, there, later, layers)
        self._describe(made, node, 0, layers, self.sequence.later(node.meta.get(SEQUENCE), self.count))
        return made

    def _copy(self, node: Node, number: int, name: str) -> Node:
        """Builds the copy `number` of a node of block 1."""
        twin = self.twins[node]
        reads = iter(twin.reads)

        def there(operand: Node) -> Node:
            relative = next(reads)
            return self.kept[operand] if relative is None else self._at(number + relative[0], relative[1], node)

        call = call_number(node)
        layers = self.mentions.inside(twin.fixed, number)
        made = self._make(node, name, there, None if call is None else call + number * twin.draws, layers)
        sequence = self.sequence.copy(node.meta.get(SEQUENCE), twin.other.meta.get(SEQUENCE), number, self.count)
        self._describe(made, node, number, layers, sequence)
        return made

    def _at(self, block: int, place: int, reader: Node) -> Node:
        """The node at `place` of a block, counted from block 1 as 0."""
        node = self.places[place]
        if block > self.count:
            found = self.kept.get(self.twins[node].other)
        else:
            found = self.copies[node].get(block) if block else self.kept.get(node)
        if found is None:
            raise Unequal(f"{reader.name} reads {node.name} of a layer that comes after it")
        return found

    def _make(self, node: Node, name: str, there: Callable[[Node], Node], call: int | None, layers: LayerRenaming) -> Node:
        if node.op == "placeholder":
            return self.made.placeholder(name)
        given = with_call(node, call) if call is not None else node.args
        if any(isinstance(argument, str) for argument in given):
            given = tuple(layers.text(argument) if isinstance(argument, str) else argument for argument in given)
        made = self.made.create_node(node.op, node.target, name=name)
        made.args = map_arg(given, there)  # behind create_node, which would look through all of them for sizes
        if node.kwargs:
            made.kwargs = map_arg(node.kwargs, there)
        return made

    def _describe(self, made: Node, node: Node, number: int, layers: LayerRenaming, sequence: int | None) -> None:
        found = tuple(self._record(record, number, layers) for record in records(node))
        made.meta[KEY] = found if isinstance(node.meta[KEY], tuple) else found[0]
        if sequence is not None:
            made.meta[SEQUENCE] = sequence

    def _record(self, record: Record, number: int, layers: LayerRenaming) -> Record:
        value, dot, index = record.of.partition(".")
        named = number and self.pairs is not None and value in self.pairs
        return layers.record(record, copy_name(value, number) + dot + index if named else record.of)

    # ---------------------------------------------------------------------------------------------------------------- the results

    def _results(self, outputs: Sequence[Port]) -> list[Port]:
        """Writes the graph's output; returns its ports."""
        results = results_of(self.graph)
        places: dict[Node, list[int]] = defaultdict(list)
        for place, node in enumerate(results):
            places[node].append(place)
        partner: dict[int, int] = {}
        for one, twin in self.twins.items():
            if len(places[one]) != len(places[twin.other]):
                raise Unequal(f"{one.name} leaves the graph, and its equal in the next layer does not")
            partner.update(zip(places[one], places[twin.other], strict=True))
        blocks = {place: self.blocks[node] for place, node in enumerate(results) if node in self.blocks}
        leaving = Ports(((outputs[one], outputs[other]) for one, other in partner.items()), self.mentions)
        made, left = list[Node](), list[Port]()
        for place, number in order_with_copies(range(len(results)), blocks, partner, self.count):
            node, port = results[place], outputs[place]
            made.append(self.copies[node][number] if number else self.kept[node])
            left.append(leaving.copy(port, outputs[partner[place]], number) if number else leaving.later(port))
        self._refuse_missing(outputs, left, results)
        self.made.output(tuple(made))
        return left

    def _refuse_missing(self, outputs: Sequence[Port], left: Sequence[Port], results: Sequence[Node]) -> None:
        """Results with a layer's name leave the graph for every layer. One value may be the gradient of all layers (of layers whose results
        are summed), and then belongs to no block. Raises Unequal."""
        inside = [place for place, port in enumerate(outputs) if port.kind in NAMED and self.mentions.block(port.of or port.name) == 1]
        if sum(port.kind in NAMED for port in left) == sum(port.kind in NAMED for port in outputs) + self.count * len(inside):
            return
        apart = next((place for place in inside if self.blocks.get(results[place]) != 1), inside[0])
        raise Unequal(f"{outputs[apart].kind} {outputs[apart].of or outputs[apart].name} is made outside of its layer")


class Ports:
    """Ports of a stretch's blocks: names go on from block to block, shardings mention the copies' layers. `pairs`: ports of block 1 and of
    block 2."""

    def __init__(self, pairs: Iterable[tuple[Port, Port]], mentions: Mentions) -> None:
        found, self.mentions = list(pairs), mentions
        count = mentions.stretch.left_out
        self.fixed = {a.key: same_records([_record(a)], [_record(b)], mentions, lambda name: name, a.key) for a, b in found}
        self.keys = Series(((a.key, b.key) for a, b in found), count)
        self.of = Series(((a.of, b.of) for a, b in found), count)

    def copy(self, one: Port, other: Port, number: int) -> Port:
        name = self.keys.copy(one.key, other.key, number).partition(":")[2]
        return self._port(one, name, self.of.copy(one.of, other.of, number), self.mentions.inside(self.fixed[one.key], number))

    def later(self, port: Port) -> Port:
        return self._port(port, self.keys.later(port.key).partition(":")[2], self.of.later(port.of), self.mentions.later())

    def _port(self, port: Port, name: str, of: str, layers: LayerRenaming) -> Port:
        sharding = None if port.sharding is None else layers.sharding(port.sharding)
        return replace(port, name=name, of=of, sharding=sharding)


def _record(port: Port) -> Record:
    return Record(port.shape, port.dtype, port.sharding, phase=f"{port.kind} {port.requires_grad}")


class NumberSteps:
    """Numbers that grow by one step from block to block, unless all blocks have the same. `pairs`: those of block 1 and of block 2."""

    def __init__(self, pairs: Iterable[tuple[int | None, int | None]]) -> None:
        apart = [(one, other) for one, other in pairs if one is not None and other is not None and one != other]
        steps = {other - one for one, other in apart}
        if len(steps) > 1 or any(step < 0 for step in steps):
            raise Unequal(f"the calls of a layer are numbered {', '.join(map(str, sorted(steps)))} further on in the next")
        self.step = steps.pop() if steps else 0
        self.least = min((other for _, other in apart), default=0)

    def later(self, number: Any, copies: int) -> Any:
        """The number of a captured node in the whole model."""
        return number + copies * self.step if number is not None and self.step and number >= self.least else number

    def copy(self, one: int | None, other: int | None, number: int, copies: int) -> int | None:
        if one is None:
            return None
        return one + number * self.step if one != other else self.later(one, copies)


# The global view of the whole model, grown from that of the captured layers on request: passes have decided shardings by then; stages look
# up the forward operator of a gradient in this view, and verification runs it.


def view_of(joint: Joint, depth: Depth | None) -> Callable[[], Joint]:
    """Grown on first use, since most compilations need none. Raises Unequal then."""
    return (lambda: joint) if depth is None else cache(partial(_grow_view, joint, depth))


def _grow_view(joint: Joint, depth: Depth) -> Joint:
    """The whole model's graph; its ports have no shardings."""
    for stretch in reversed(depth.stretches):
        mentions = Mentions(stretch)
        inputs, outputs = (tuple(replace(port, sharding=None) for port in ports) for ports in (joint.inputs, joint.outputs))
        plain = replace(joint, inputs=inputs, outputs=outputs)
        made = GraphGrower(plain.graph, blocks_of(plain, mentions), mentions).build_graph(inputs, outputs)
        updates = {made.kept[node]: mentions.later().text(name) for node, name in joint.updates.items()}
        for node, row in made.copies.items():
            if node in joint.updates:
                updates |= {copy: mentions.inside(frozenset(), number).text(joint.updates[node]) for number, copy in row.items()}
        joint = Joint(made.graph, made.inputs, made.outputs, joint.constants, updates)
    return joint


# Names of ports that go on from block to block, by the number in which they differ.
#
# parameter:model.layers.1.mlp.up_proj.weight    parameter:model.layers.2.mlp.up_proj.weight    ..3.., ..4..
# output:past_key_values.0.1                     output:past_key_values.0.2                     0.3, 0.4


NUMBER: Final = re.compile(r"(\d+)")


class Series:
    """
    pairs   a name of block 1 and its equal of block 2
    copies  the number of blocks between them
    """

    def __init__(self, pairs: Iterable[tuple[str, str]], copies: int) -> None:
        self.copies = copies
        self._steps: dict[str, tuple[int, int]] = {}
        """The text before a number -> (the least number in block 2, its step)."""
        for one, other in pairs:
            place = _place(one, other)
            if place is not None:
                a, b = NUMBER.split(one), NUMBER.split(other)
                prefix, step = "".join(a[:place]), int(b[place]) - int(a[place])
                least, known = self._steps.get(prefix, (int(b[place]), step))
                if known != step or step <= 0:
                    raise Unequal(f"{one} and {other} of the next layer do not go on in equal steps")
                self._steps[prefix] = min(least, int(b[place])), step

    def copy(self, one: str, other: str, number: int) -> str:
        """The name in the copy `number`."""
        place = _place(one, other)
        if place is None:
            return one
        a, b = NUMBER.split(one), NUMBER.split(other)
        a[place] = str(int(a[place]) + number * (int(b[place]) - int(a[place])))
        return "".join(a)

    def later(self, name: str) -> str:
        """A captured name in the whole model."""
        parts = NUMBER.split(name)
        for place in range(1, len(parts), 2):
            found = self._steps.get("".join(parts[:place]))
            if found is not None and int(parts[place]) >= found[0]:
                parts[place] = str(int(parts[place]) + self.copies * found[1])
                return "".join(parts)
        return name


def _place(one: str, other: str) -> int | None:
    """The index at which two names differ, in the list of their texts and numbers; None if they are equal."""
    a, b = NUMBER.split(one), NUMBER.split(other)
    places = [place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if not places and len(a) == len(b):
        return None
    if len(a) != len(b) or len(places) != 1 or places[0] % 2 == 0:
        raise Unequal(f"{one} is {other} in the next layer")
    return places[0]
