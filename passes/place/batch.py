"""The batch dim of each input: the first one, unless operators depend on positions along it.

    ids  i64[6, 4] -> embedding -> attention "b h q d!, b h k! d!, ..."     nothing runs along dim 0: it is the batch
    src  i64[6, 4] -> embedding -> rnn "t b h!"                             steps run along dim 0, nothing along dim 1: that is the batch
    h    f32[2, 4, 16] beside src                                           dim 1 is the batch, as it is the dim of src
    mask f32[6, 6] beside src                                               has no batch

Rows of a batch are independent until they are summed, so no model has recurrences, windows or attention keys along them, and no parameter
has a dim for them. Where the first dim has one of these, the batch is the factor that another input has as its first dim, or the only dim
along which nothing runs. Where there is neither, or positions of the first dim are selected by number, the batch is not clear, and the user
must pass `names=`. Assumes that factors are solved (`factorize`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from torch.fx import Node

from meshc.errors import CompileError
from meshc.ir import op_name, operands, records
from meshc.passes.phases.factor_names import BatchDims
from meshc.passes.phases.factors import Factors, Instance
from meshc.passes.phases.request import JoinedInputs, Request
from meshc.passes.place.written_out import written_out
from meshc.program.program import Port
from meshc.rules.index_bounds import bounds_of, origin
from meshc.rules.slices import OPERATORS as CROPS

Labels = Mapping[str, Sequence[str | None]]
Rows = Mapping[str, Sequence[tuple[int, ...]]]
"""By the key of an input port: the factors of each dim."""
BATCH = "batch"


class WrongJoinDim(CompileError):
    """Parts of a batch were joined along another dim than the model's batch. `dims`: the right dim of each input."""

    def __init__(self, dims: Mapping[str, int | None]) -> None:
        super().__init__("parts of the batch are joined along other dims")
        self.dims = dims

    def ambiguity_error(self) -> CompileError:
        """The user's error, where joining along that dim makes the model show yet another one."""
        said = ", ".join(f"{name!r}: {_labels(dim)}" for name, dim in self.dims.items())
        return CompileError(_unclear("which dims are the batch depends on along which the parts are joined", f"names={{{said}}}"))


def find_batch(factors: Factors, inputs: Sequence[Port], rows: Rows, names: Labels, joined: JoinedInputs | None) -> BatchDims:
    """The batch dim of each input. `names`: the user's names of dims; `joined`: dims along which inputs were joined from parts."""
    return _BatchSearch(factors, inputs, rows, names, joined).find_batch_dims()


def refuse_other_joint(request: Request, batch: BatchDims) -> None:
    """For inputs joined from ranks' parts: raises CompileError where the batch dim is not clear, WrongJoinDim where the parts were
    joined along another dim."""
    joined = request.joined
    if joined is None:
        return
    if batch.unclear:
        raise CompileError("\n".join(batch.unclear.values()))
    dims = {name: batch.dims.get(name, dim) for name, dim in joined.dims.items()}
    if dims == joined.dims:
        return
    if not joined.ranks:
        first = next(name for name, dim in dims.items() if dim != joined.dims[name])
        dim = dims[first]
        raise CompileError(
            f"the batch is dim {dim} of {first}, and its parts may have different numbers of rows (uneven_rows=True)\n"
            f"  why: ranks count the rows of a part before the model is looked at, along dim {joined.dims[first]} if nothing else is said\n"
            f"  what to do: say where they are: names={{{first!r}: {_labels(dim)}}}"
        )
    raise WrongJoinDim(dims)


def refuse_numbers_of_rows(request: Request, factors: Factors, batch: BatchDims) -> None:
    """For inputs joined from ranks' parts: raises CompileError where rows of the batch are indexed by an input, since each rank numbers its
    own rows."""
    rows = {factor for found in batch.factors.values() for factor in found}
    for instance in forward_instances(factors) if request.joined is not None else ():
        for index, picked in _indices(instance):
            source = origin(index)
            if source.op == "placeholder" and not rows.isdisjoint(picked):
                raise CompileError(
                    f'inputs="local": by {source.name} rows of the batch are picked at {_place(instance.node)}\n'
                    "  why: each rank passes its part of the batch, and numbers the rows of that; in the batch of all ranks rows of later\n"
                    "  parts have other numbers\n"
                    "  what to do: make the numbers in the model (torch.arange(x.shape[0])), or pass the whole batch on every rank: "
                    'inputs="global"'
                )


def _indices(instance: Instance) -> Iterator[tuple[Node, set[int]]]:
    """The indices that an operator reads or writes by, each with the classes of the dim that it indexes."""
    node = instance.node
    bounds = [one for one in bounds_of(node, operands(node)) if one.operand]
    dims = [tokens for tokens in instance.operands[0] if any(letter.startswith("v") for letter, _ in tokens)] if bounds else []
    if len(bounds) == 1:
        dims = [tuple(token for tokens in dims for token in tokens)]
    for bound, tokens in zip(bounds, dims, strict=False):
        yield operands(node)[bound.operand], {instance.factor[token] for token in tokens}


def _labels(dim: int | None) -> str:
    return "..." if dim is None else f"({'None, ' * dim}{BATCH!r}, ...)"


def _unclear(text: str, names: str, when: str = "") -> str:
    return (
        f'inputs="local": {text}\n'
        "  why: each rank passes its part of the batch, and parts are joined along the dim of the batch\n"
        f"  what to do: say it, for instance meshc.compile(..., {names}){when}"
    )


class _BatchSearch:
    """One search. `found`: by input, the batch dim and its batch factors; `known`: the batch factors of all inputs; `torn`: inputs of which
    several dims have a part of the batch each, as where parts were joined along another dim."""

    def __init__(self, factors: Factors, inputs: Sequence[Port], rows: Rows, names: Labels, joined: JoinedInputs | None) -> None:
        self.joined = joined
        ports = [port for port in inputs if port.kind == "input" and port.shape]
        self.shapes = {port.name: port.shape for port in ports}
        self.rows = {port.name: rows[port.key] for port in ports}
        self.labels = {port.name: (*names.get(port.name, ()), *[None] * len(port.shape)) for port in ports}
        self.along = _ordered_classes(factors)
        self.ordered = frozenset(self.along)
        self.picked = _indexed_classes(factors)
        for kind, held in (("parameter", self.along), ("buffer", self.picked)):
            for port in (port for port in inputs if port.kind == kind):
                for factor in chain(*rows[port.key]):
                    held.setdefault(factor, f"{port.name} has it too")
        for name, row in self.rows.items():
            for label, dims in zip(self.labels[name], row, strict=False):
                for factor in dims if label and label != BATCH else ():
                    self.along.setdefault(factor, f"names= calls it {label}")
        self.found: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.known: set[int] = set()
        self.torn: dict[str, str] = {}

    def find_batch_dims(self) -> BatchDims:
        self._take_all({name: labels.index(BATCH) for name, labels in self.labels.items() if BATCH in labels})
        self._take_all({name: 0 for name in self._remaining_inputs() if name not in self.torn and self._plain(name, 0)})
        self._take_all({name: dim for name in self._remaining_inputs() if (dim := self._only_plain(name)) is not None})
        dims: dict[str, int | None] = {name: dim for name, (dim, _) in self.found.items()}
        self._note_torn()
        unclear = {name: self._unclear_text(name) for name in self.torn}
        for name in self._remaining_inputs():
            why = self._why_not(name, 0)
            if all(self.labels[name][: len(self.shapes[name])]) or (why and self.found and not self._plain_dims(name)):
                dims[name] = None
            elif why or (self._why_picked(name, 0) and self._plain_dims(name)):
                unclear[name] = self._unclear_text(name)
            else:
                dims[name] = 0
        return BatchDims(dims, {name: factors for name, (_, factors) in self.found.items()}, unclear, self.ordered)

    def _remaining_inputs(self) -> list[str]:
        return [name for name in self.rows if name not in self.found]

    def _take(self, name: str, dim: int, some: tuple[int, ...]) -> None:
        self.found[name] = (dim, some)
        self.known.update(some)

    def _take_all(self, dims: Mapping[str, int]) -> None:
        """Takes these dims of inputs, and the inputs that share the batch of others."""
        for name, dim in dims.items():
            self._take(name, dim, self.rows[name][dim])
        groups = {factors: name for name, (_, factors) in self.found.items() if factors}
        for name in self._remaining_inputs():
            for factors, other in groups.items():
                have = [dim for dim, row in enumerate(self.rows[name]) if {*factors} & {*row}]
                whole = [dim for dim in have if {*factors} <= {*self.rows[name][dim]}]
                if name not in self.found and (whole or len(have) == 1):
                    dim = (whole or have)[0]
                    self._take(name, dim, tuple(factor for factor in self.rows[name][dim] if factor in factors))
                elif have and not whole:
                    self.torn[name] = f"dims {have} have what dim {self.found[other][0]} of {other} is made of"

    def _note_torn(self) -> None:
        """Records inputs whose batches share some factors, while each has a factor that the other lacks."""
        for name, (dim, factors) in self.found.items():
            for other, (place, theirs) in self.found.items():
                if {*factors} & {*theirs} and {*factors} - {*theirs} and {*theirs} - {*factors}:
                    self.torn.setdefault(name, f"dim {dim} has a part of what dim {place} of {other} is made of")

    def _why_not(self, name: str, dim: int) -> str:
        """The operator or name that rules a dim out as batch."""
        if not self.rows[name][dim] and self.labels[name][dim] not in (None, BATCH):
            return f"names= calls it {self.labels[name][dim]}"
        return next((self.along[factor] for factor in self.rows[name][dim] if factor in self.along), "")

    def _why_picked(self, name: str, dim: int) -> str:
        return next((self.picked[factor] for factor in self.rows[name][dim] if factor in self.picked), "")

    def _plain(self, name: str, dim: int) -> bool:
        """Whether a dim of several positions may be the batch: nothing runs along it."""
        return bool(self.rows[name][dim]) and not self._why_not(name, dim) and not self._why_picked(name, dim)

    def _plain_dims(self, name: str) -> list[int]:
        return [dim for dim in range(1, len(self.rows[name])) if self._plain(name, dim)]

    def _only_plain(self, name: str) -> int | None:
        """The only dim that may be the batch, where the first may not: one of size 1, if none has several positions."""
        if not self._why_not(name, 0):
            return None
        plain = self._plain_dims(name)
        ones = [dim for dim, row in enumerate(self.rows[name]) if not row and dim and not self.labels[name][dim]]
        dims = plain or ([] if self.known else ones)
        taken = [self._own_size(other, dim) for other, (dim, _) in self.found.items()]
        if len(dims) != 1 or (plain and self.known and self._own_size(name, dims[0]) not in taken):
            return None
        return dims[0]

    def _own_size(self, name: str, dim: int) -> int:
        """A rank's own size of a dim."""
        size = int(self.shapes[name][dim])
        joined = self.joined
        return size // joined.ranks if joined is not None and joined.ranks and joined.dims.get(name) == dim else size

    def _unclear_text(self, name: str) -> str:
        """The message on an input whose batch is not clear: what is known of its dims, and the line to write."""
        rank = len(self.shapes[name])
        shape = [self._own_size(name, dim) for dim in range(rank)]
        reasons = {dim: self._why_not(name, dim) or self._why_picked(name, dim) for dim in range(rank)}
        lines = [f"    dim {dim}: {why}" for dim, why in reasons.items() if why]
        lines += [f"    {self.torn[name]}"] if name in self.torn else []
        plain = self._plain_dims(name)
        place = plain[0] if plain else 0
        labels = tuple(BATCH if dim == place else None for dim in range(rank))
        what = "\n".join([f"which dim of {name} {shape} is the batch is not clear", *lines])
        none = "" if plain else ", and names of your own for all dims if it has none"
        return _unclear(what, f"names={{{name!r}: {labels}}}", f" if it is dim {place}{none}")


def _ordered_classes(factors: Factors) -> dict[int, str]:
    """Classes along which some operator depends on positions, with the reason: steps, windows, keys of attention. Only classes that are a
    letter's only factor: what runs along the tokens of all rows runs along no row."""
    found: dict[int, str] = {}
    for instance in forward_instances(factors):
        rule, what = instance.rule, "attention has keys along it"
        letters: list[str] = []
        if rule.steps is not None:
            letters, what = [rule.steps.letter], "a recurrence steps along it"
        elif rule.rings:
            letters = [passing.letter for passing in rule.rings.values()]
        elif "weighs" in rule.roles.values() and written_out(instance, factors) is not None:
            letters = [letter for letter, role in rule.roles.items() if role == "weighs"]
        for letter in letters:
            tokens = [token for token in instance.size if token[0] == letter]
            if len(tokens) == 1:
                found.setdefault(instance.factor[tokens[0]], f"{what}, {_place(instance.node)}")
        for token in instance.tied if instance.node.target not in CROPS else ():
            found.setdefault(instance.factor[token], f"windows lie along it, {_place(instance.node)}")
    return found


def _indexed_classes(factors: Factors) -> dict[int, str]:
    """Classes of which several positions are selected by number, one by one, as a loop over steps does."""
    numbers: dict[int, dict[object, Node]] = defaultdict(dict)
    for instance in forward_instances(factors):
        if op_name(instance.node) != "aten.select.int":
            continue
        _, dim, index = instance.node.args[:3]
        assert isinstance(dim, int)
        tokens = instance.operands[0][dim]
        if len(tokens) == 1:
            numbers[instance.factor[tokens[0]]][index] = instance.node
    return {
        factor: f"its positions are picked out by number, {_place(next(iter(nodes.values())))}"
        for factor, nodes in numbers.items()
        if len(nodes) > 1
    }


def forward_instances(factors: Factors) -> Iterator[Instance]:
    return (instance for node, instance in factors.instances.items() if records(node)[0].phase == "forward")


def _place(node: Node) -> str:
    return str(records(node)[0].source) or node.name
