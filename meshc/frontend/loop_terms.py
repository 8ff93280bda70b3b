"""Terms of a loop over experts: the meaning of each value in it (the expert, its tokens, their rows, the expert's output, weights).

    torch.where(selected == i)     found: (token, slot)         weights[token, slot, None]     weight, a column
    x[token]                       rows                         self.experts[i](x[token])      made

The loop's own code runs, on symbols in the place of tensors. A call of values from outside of the loop alone is free: it means inside the
loop what it means outside. A call of rows, of matrices of the loop's expert and of nothing else is a step of the expert.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshc.frontend.expert_tape import ROW_INPUT, Call, Name, map_values
from meshc.frontend.libraries.known_experts import SWITCH

FREE: Final = ("free", "zeros")
MADE: Final = ("made", "weighed")
PLAIN: Final = (int, float, str, bool, type(None), torch.Size)
PLACE: Final = "\0"
"""The loop's expert in a string, as in f"expert_{i}"."""
OPERATORS: Final = "add sub mul truediv floordiv mod pow matmul and or xor".split()
COMPARISONS: Final = "eq ne lt le gt ge neg pos invert".split()
FLAT: Final = ("flatten", "view", "reshape")
CASTS: Final = ("to", "type_as", "float", "cpu", "tolist", "item")
MASK: Final[dict[str, tuple[Any, ...]]] = {"any": ([[]], "full"), "sum": ([[]], "count"), "cast": (None, "")}
METHODS: Final[dict[str, tuple[Any, ...]]] = {
    "counts cast": (None, "counts"),
    "onehot permute": ([[2, 1, 0]], "masks"),
    "masks sum": ([[-1, -2], [-2, -1]], "counted"),
    "chosen nonzero": ([[]], "hits"),
    "mask where": ([[]], "found"),
    "any where": ([[]], "found", "tokens"),
    "slots where": ([[]], "turned found"),
    "mask nonzero": ([[]], "places"),
    "any nonzero": ([[]], "places", "tokens"),
    **{f"{kind} {name}": row for kind in ("mask", "any", "slots") for name, row in MASK.items()},
    "mask squeeze": ([[0]], "mask"),
    "slots squeeze": ([[0]], "slots"),
    "mask reduced": ([[-1], [-1, True]], "any"),
    "any unsqueeze": ([[-1]], "any", "wide"),
    "any flat": (None, "any"),
    "places squeeze": ([[], [1], [-1]], "token", "first"),
    "places flat": (None, "token", "first"),
    "token numel": (None, "count"),
    "token size": (None, "count"),
    "scores reduced": ([[-1], [-1, True]], "weight", "choice", "all", "masked"),
    "weight unsqueeze": ([[-1], [1]], "weight", "wide"),
    "weight cast": (None, "weight"),
    "weighed cast": (None, "weighed"),
    "weighed squeeze": ([[1], [-1]], "weighed"),  # rows are wider than 1
    "index cast": ([[]], "index"),
    "matrix t": ([[]], "turned"),
    "matrix transpose": ([[0, 1], [1, 0], [-1, -2], [-2, -1]], "turned"),
}
"""Kind and method -> the numbers that it may be given (None: any), the kind of the result ("": the same), and its flags beside."""


class NotUnderstood(Exception):
    """Raised for a statement of a loop over experts that is not understood."""


SELF: Final = Name("self")


@dataclass(frozen=True, eq=False)
class Term:
    """The meaning of a value of a loop: its kind, how it is evaluated, the terms that it comes from (`of`), and flags (`more`).

    free       the same as outside of the loop; zeros: also the sum, before the loop; method: an attribute, of whatever value
    onehot     [tokens, slots, experts] of choices; masks: [experts, slots, tokens]
    mask       [tokens, slots] of the loop's expert; slots: [slots, tokens]; any: [tokens]
    hits       the numbers of experts that are chosen; counts: how often each is; index: the loop's expert; next: the one behind it
    found      indices where a mask is true; places: the same as rows of one tensor; token, slot: its columns
    count      of an expert's tokens; empty, full, past: a comparison that is true where there are none, if there are, for no expert
    expert     the module; matrix: its rows of stacked parameters, turned: transposed; made: its output, or a step towards it
    weight     values of the expert's tokens, by "token" (rows, if not "wide"), by "choice" or by "expert"; weighed: weight times output
    scores     weights [tokens, slots] of the loop's expert, zeros for other experts

    Where the expert is given all tokens, made and weighed are "all", and "masked" if tokens that have not chosen it count nothing.
    "first": a token that has this meaning only if each token has one choice. "tokens": places that come from a mask of tokens (any).
    "distinct": choices in which no token has an expert twice.
    `leaves`: names outside of the loop that the value is computed from. `held`: the object, of the module's own or of the file's.
    """

    kind: str
    value: Any = field(default_factory=object)
    of: tuple[Term, ...] = ()
    more: tuple[object, ...] = ()
    leaves: frozenset[str] = frozenset()
    held: Any = None


class Symbol:
    """A term in the place of a value, while the user's own code runs."""

    __slots__ = ("_term", "_terms")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, terms: Terms, term: Term) -> None:
        object.__setattr__(self, "_terms", terms)
        object.__setattr__(self, "_term", term)

    def __setattr__(self, name: str, value: object) -> None:
        raise NotUnderstood

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._terms.attribute(self._term, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._terms.call(self._term, args, kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self._terms.apply("getitem", operator.getitem, (self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._terms.apply("setitem", operator.setitem, (self, index, value))

    def __iter__(self) -> Iterator[Any]:
        raise NotUnderstood

    def __bool__(self) -> bool:
        return self._terms.truth(self._term.kind)

    def __format__(self, spec: str) -> str:
        if self._term.kind != "index":
            raise NotUnderstood
        return PLACE


def _add_operators() -> None:
    def method(name: str, turned: bool = False) -> Any:
        function = getattr(operator, f"__{name}__")
        return lambda self, *others: self._terms.apply(name, function, (*others, self) if turned else (self, *others))

    for name in (*OPERATORS, *COMPARISONS):
        setattr(Symbol, f"__{name}__", method(name))
    for name in OPERATORS:
        setattr(Symbol, f"__r{name}__", method(name, turned=True))
        setattr(Symbol, f"__i{name}__", method(f"i{name}"))


_add_operators()


def count_numbered(held: Any, key: str | None) -> int:
    """How many names of a dict are `key` and a number, counted from 0; None: the length of a list."""
    return len(held) if key is None else next(count for count in range(len(held) + 1) if f"{key}{count}" not in held)


class Terms:
    """container  the container of the experts; `key`: prefix of their names there; None: numbered
    expected   the number of experts that the loop's range has; past: a number that is no expert's, which the loop skips
    choice     the choices that all masks compare; one_hot: choices are one-hot rows, or rows of zeros
    weights    names of the stacked parameters that the loop's expert has read
    source     all rows, of which the expert has its own
    steps      of the expert so far, (name of a value, call); changed: the last value has been weighed in place
    added      (the sum, term added to it); written: values are assigned, not added; once, single: as in `Loop`
    case       what is assumed of the loop's expert: "full": it has tokens; "empty": it has none; "past": it is none
    inside     the loop's own code is running
    asked      kinds of the terms that a condition has asked for their truth
    """

    def __init__(self, module: nn.Module, stacked: dict[str, int], case: str) -> None:
        self.module, self.stacked, self.case = module, stacked, case
        self.container: Term | None = None
        self.key: str | None = None
        self.expected: object = None
        self.past: object = None
        self.choice: Term | None = None
        self.one_hot = self.once = self.single = self.written = self.changed = self.has_slots = self.inside = False
        self.weights: dict[str, None] = {}
        self.source: Term | None = None
        self.steps: list[tuple[str, Call]] = []
        self.added: tuple[Term, Term] | None = None
        self.asked: set[str] = set()

    # What the user's code does with symbols.

    def constant(self, value: object, at: Any, leaves: frozenset[str] = frozenset()) -> Any:
        """An object of the module's or the file's: plain values are themselves."""
        return value if isinstance(value, PLAIN) else Symbol(self, Term("free", at, leaves=leaves, held=value))

    def attribute(self, term: Term, name: str) -> Any:
        term = self.operand(Symbol(self, term))
        if term.kind == "token" and name == "shape":
            return [Symbol(self, Term("count"))]
        if term.kind == "matrix" and name in ("T", "mT"):
            return Symbol(self, replace(term, kind="turned"))
        if term.held is None:
            return Symbol(self, Term("method", Call(getattr, (_code(term), name)), (term,), (name,), term.leaves))
        found = getattr(term.held, name)
        if isinstance(term.held, Tensor) and name in ("size", "dim", "numel"):
            return found
        if isinstance(term.held, ModuleType):
            return self.constant(found, found)
        own = isinstance(found, nn.ModuleList | nn.ModuleDict) or term.value == SELF and name in self.stacked
        return self.constant(found, Call(getattr, (term.value, name)), term.leaves | {f"self.{name}"} if own else term.leaves)

    def call(self, term: Term, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if term.kind == "method":
            name = str(term.more[0])
            return self.apply(name if hasattr(Tensor, name) else "", term, args, kwargs, term.of[0])
        if term.kind == "expert":
            (rows,) = self.operand(args)
            if kwargs or _kind(rows) != "free" and not _is_rows(rows):
                raise NotUnderstood
            return Symbol(self, Term("made", of=(rows,), more=("all",)) if rows.kind == "free" else Term("made", of=rows.of))
        name = getattr(term.held, "__name__", "")
        known = str(getattr(term.held, "__module__", None) or "torch").startswith("torch")
        return self.apply(name if known else "", term, args, kwargs)

    def apply(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *subject: Term) -> Any:
        """A call: by a rule; else free, or a step of the expert."""
        if self.added is not None:
            raise NotUnderstood  # a statement after the sum
        given, named = self.operand(args), dict(self.operand([*(kwargs or {}).items()]))
        found, terms = self.rule(name, *subject, *given, **named), _parts((subject or function, given, *named.values()), Term)
        call = Call(_code(function), _code(given), _code((*named.items(),)))
        if found is None and not all(each.kind in FREE for each in terms):
            found = self.step(name, call, (*subject, *given), terms)
        elif found is None or found.kind == "zeros":
            more = found.more if found is not None else ("topk",) * (name == "topk")
            if name == "getitem" and given[1] == 1 and "topk" in given[0].more:
                more = ("distinct",)
            leaves = frozenset().union(*(each.leaves for each in terms))
            found = Term("free" if found is None else "zeros", call, subject if name in FLAT else (), more, leaves)
        return Symbol(self, found)

    def operand(self, x: Any) -> Any:
        """A value that a call reads, with terms in the place of symbols."""

        def term_of(x: Any) -> Any:
            term = x._term if isinstance(x, Symbol) else x
            if _kind(term) != "method":
                return term
            of = term.of[0]
            kind = "made" if of.kind == "made" or _is_rows(of) else "free" if of.kind in FREE else ""
            return replace(term, kind=kind, of=of.of, more=())

        return map_values(x, term_of)

    def truth(self, kind: str) -> bool:
        if kind not in ("count", "full", "empty", "past"):
            raise NotUnderstood
        self.asked.add("past" if kind == "past" else "empty")
        return kind == self.case if kind in ("past", "empty") else self.case != "empty"

    def length(self, x: Any) -> Any:
        """`len`"""
        count = isinstance(x, Symbol) and x._term.kind == "token"
        return Symbol(self, Term("count")) if count else len(x._term.held if isinstance(x, Symbol) else x)

    def items(self, x: Any, count: int) -> Any:
        """The `count` values that an assignment takes apart; 0: the value. A free value that an iteration computes has no meaning: the loop
        may draw it again for each expert."""
        term = self.operand(x)
        if self.inside and _kind(term) == "free" and isinstance(term.value, Call):
            raise NotUnderstood
        if count == 0:
            return x
        if not isinstance(term, Term) or term.kind in ("free", "made"):
            return [x[at] for at in range(count)] if isinstance(term, Term) else x
        if term.kind not in ("found", "turned found") or term.kind == "turned found" and count != 2:
            raise NotUnderstood
        kinds = ["slot", "token"] if term.kind == "turned found" else ["token"] * max(count - 1, 1) + ["slot"] * (count > 1)
        self.has_slots = self.has_slots or count > 1
        return [Symbol(self, Term(kind, more=term.more)) for kind in kinds]

    # Rules.

    def adds_all(self, into: Term, value: Term) -> Term:
        """`out = out + value` for all tokens."""
        if "all" not in value.more:
            raise NotUnderstood
        self.once = "masked" in value.more and "choice" not in value.more and not self.is_distinct()
        self.added = into, value
        return Term("total", of=(into,))

    def write(self, into: Term, index: Any, value: Any) -> Term:
        """`out[index] = value`, of rows, or of the sum of rows there and a value."""
        if _kind(value) == "sum" and value.of[0].value == Call(operator.getitem, (into.value, _code(index))):
            value = value.of[1]
        else:
            self.single = self.written = True  # with several choices, the last expert's value would remain
        return self.adds(into, index, value, indexed=True)

    def adds(self, into: Term, places: Any, value: Any, indexed: bool) -> Term:
        inner = [*places] if isinstance(places, tuple) else [places]
        kinds = {*map(_kind, inner)}
        fits = kinds == {"token"} or len(inner) == 1 and kinds <= {"any", "mask"}
        if into.kind != "zeros" or _kind(value) not in MADE or "all" in value.more or not fits or self.changed and value.kind == "made":
            raise NotUnderstood
        self.added = into, value
        tokens = "any" in kinds or any("tokens" in each.more for each in inner)
        self.single = self.single or "mask" in kinds or not tokens and any("first" in each.more for each in inner)
        self.once = (tokens or "expert" in value.more or indexed and self.has_slots) and not self.is_distinct()
        return into

    def is_distinct(self) -> bool:
        """Whether the statements in front of the loop show that no token chooses an expert twice."""
        return self.choice is not None and "distinct" in self.choice.more

    def use_choice(self, choice: Term, term: Term) -> Term:
        """A term of these choices. Raises NotUnderstood if they are not those of other terms."""
        if self.choice is not None and self.choice.value != choice.value:
            raise NotUnderstood
        self.choice = choice
        return replace(term, of=(choice,))

    def holds(self, container: Term, key: str | None) -> Term:
        """The loop's expert in a container. Raises NotUnderstood if it is none, or another than before."""
        if not isinstance(container.held, nn.ModuleList if key is None else nn.ModuleDict):
            raise NotUnderstood
        count = count_numbered(container.held, key)
        if count < 2 or self.expected not in (None, count) or self.container is not None and self.container.held is not container.held:
            raise NotUnderstood
        self.container, self.key = container, key
        return Term("expert")

    def step(self, name: str, call: Call, operands: Sequence[Any], terms: Sequence[Term]) -> Term:
        """A call of rows, of matrices of the loop's expert, and of what the module and the file have beside."""
        if name in CASTS and _kind(operands[0]) == "made" and any(each.leaves - {"self"} for each in terms):
            return operands[0]
        own = [each for each in terms if each.kind == "made" or _is_rows(each)]
        if self.changed or not own or name[:1] == "i" and name[1:] in OPERATORS and _is_rows(operands[0]):
            raise NotUnderstood
        self.source = self.source or own[0].of[0]
        if any(self.source.value != each.of[0].value or "all" in each.more for each in own):
            raise NotUnderstood
        turned = name == "matmul" and _kind(operands[1]) == "turned"
        for each in terms:
            beside = each.kind == "free" and each.leaves <= {"self"} and each.value != SELF
            if each not in own and each.kind != "matrix" and not beside and not (turned and each is operands[1]):
                raise NotUnderstood
        made = Name(f"made {len(self.steps)}")
        self.steps.append((made.name, Call(F.linear, call.args) if turned else call))
        return Term("made", made, (self.source,))

    def times(self, left: Any, right: Any) -> Term | None:
        if _kind(left) in ("made", "mask"):
            left, right = right, left
        kinds = _kind(left), _kind(right)
        if kinds == ("free", "mask"):
            return Term("scores", of=(left,))
        if kinds[1] != "made":
            return None
        if kinds[0] == "any" and "wide" in left.more and "all" in right.more:
            return replace(right, more=(*right.more, "masked"))
        if kinds[0] != "weight" or _is_rows(left) and self.source is not None and left.of[0].value == self.source.value:
            return None
        if self.changed or ("all" in left.more) != ("all" in right.more) or not ("wide" in left.more or _is_rows(left)):
            raise NotUnderstood
        return Term("weighed", right.value, (*right.of, *left.of), (*left.more, *(right.more if "all" in left.more else ())))

    def rule(self, name: str, *args: Any, **kwargs: Any) -> Term | None:
        """The term of a call; None: there is no rule for it."""
        x, other = (*args, None, None)[:2]
        kind, numbers = _kind(x), _parts([*args[1:], *kwargs.values()], int)
        if name in ("getitem", "setitem"):
            return self.item(x, other) if name == "getitem" else self.write(x, other, args[2])
        if name == "mul" or name == "imul" and kind == "made":
            found = self.times(x, other)
            self.changed = self.changed or found is not None and found.kind == "weighed" and name == "imul"
            return found
        if name == "add" and kind == "index" and other == 1:
            return Term("next")
        if name in ("add", "iadd") and {kind, _kind(other)} & {*MADE}:
            into, value = (x, other) if _kind(other) in MADE else (other, x)
            if _kind(into) == "zeros":
                return self.adds_all(into, value)
            return Term("sum", of=(into, value)) if _is_rows(into) and into.of[0].kind == "zeros" else None
        if name == "index_add_" and len(args) == 4 and not kwargs and args[1] == 0:
            return self.adds(x, args[2], args[3], indexed=False)
        if name in (*COMPARISONS, "greater"):
            return self.comparison(name, x, other)
        if name in ("zeros_like", "zeros", "new_zeros", "empty_like", "empty", "new_empty"):
            return Term("zeros", more=("blank",) * ("empty" in name))
        if name in ("bincount", "one_hot") and kind == "free":
            flat = x.of[0] if x.of and name == "bincount" else x
            return Term("counts" if name == "bincount" else "onehot", of=(flat,), leaves=x.leaves)
        if name == "where" and len(args) == 3:
            chosen = kind == "any" and "wide" in x.more and _kind(other) in MADE and "all" in other.more
            return replace(other, more=(*other.more, "masked")) if chosen and (args[2] == 0 or _kind(args[2]) == "zeros") else None
        if name == "permute" and kind == "free" and numbers == [2, 1, 0] and type(self.module).__module__.startswith(SWITCH):
            self.one_hot = True
            return self.use_choice(x, Term("masks", leaves=x.leaves))
        return self.method(name, x, numbers)

    def method(self, name: str, x: Any, numbers: list[int]) -> Term | None:
        if name == "nonzero" and numbers == [True]:  # as_tuple
            name, numbers = "where", []
        name = "flat" if name == "flatten" or name in FLAT and numbers == [-1] else "cast" if name in CASTS else name
        name = "reduced" if name in ("any", "sum") and -1 in numbers and -2 not in numbers else name
        kind = _kind(x)
        if kind == "rows_in_one" and name in ("flat", *FLAT) and numbers[:1] == [-1]:
            return replace(x, kind="weight", more=("token",))
        if kind == "made" and self.container is not None and (name == "cast" or name == "squeeze" and numbers in ([1], [-1])):
            return x
        shapes, made, *more = METHODS.get(f"{kind} {name}", ([], ""))
        if shapes is not None and numbers not in shapes or _is_rows(x) and name == "cast":
            return None
        if kind == "weight" and "all" in x.more and "flat" not in x.more and numbers == [1]:
            return None
        wide = ("wide",) * (name == "reduced" and len(numbers) > 1)
        if kind == "onehot":
            self.use_choice(x.of[0], x)
        return replace(x, kind=made or kind, more=(*x.more, *more, *wide))

    def comparison(self, name: str, x: Any, other: Any) -> Term | None:
        match name, _kind(x), _kind(other):
            case ("eq", "free", "index") | ("eq", "index", "free"):
                return self.use_choice(x if x.kind == "free" else other, Term("mask"))
            case "eq" | "ge", "index", "" if isinstance(other, int):
                self.past = other
                return Term("past")
            case "eq" | "ne" | "gt", "count", "" if other == 0:
                return Term("empty" if name == "eq" else "full")
            case "gt" | "greater", "counted", "" if other == 0:
                return replace(x, kind="chosen")
        return None

    def item(self, x: Any, index: Any) -> Term | None:
        inner = [*index] if isinstance(index, tuple) else [index]
        kinds = ["none" if each is None else "gate" if _is_gate(each) else _kind(each) for each in inner]
        wide = ("wide",) if kinds[-1] == "none" else ()
        match _kind(x), kinds:
            case "free", ["index"] if isinstance(x.held, nn.ModuleList):
                return self.holds(x, None)
            case "free", [""] if isinstance(x.held, nn.ModuleDict) and isinstance(index, str) and index.endswith(PLACE):
                return self.holds(x, index.removesuffix(PLACE))
            case "free", ["index"] if isinstance(x.held, nn.Parameter) and x.leaves - {"self"}:
                self.weights[x.value.args[1]] = None
                return Term("matrix", Name(f"self.{x.value.args[1]}"))
            case "masks", ["index"]:
                return replace(x, kind="slots")
            case "index", [""] if index == 0:
                return x
            case "found", [""] if index == 0:  # torch.where(mask)[0]
                return replace(x, kind="token", more=(*x.more, "first"))
            case "counts", ["index"]:
                return self.use_choice(x.of[0], Term("count"))
            case "any" | "weight", _ if wide and _all_before(inner) and not _is_rows(x):  # x[..., None]
                return replace(x, more=(*x.more, "wide"))
        if _kind(x) not in FREE:
            return None
        *before, last = kinds[: len(kinds) - len(wide)] or [""]
        if last in ("index", "gate") and _all_before(inner[: len(before) + 1]):
            flat = len(inner) == 2 and isinstance(inner[0], slice) and last == "index"
            return Term("weight", of=(x,), more=("expert", "all", *(("wide",) if wide or last == "gate" else ("flat",) * flat)))
        if not {"token", "any", "mask", "slots"} & {*kinds}:
            return None
        taken = Call(operator.getitem, (x.value, _code(index)))
        if kinds == ["none", "token"]:
            return Term("rows_in_one", taken, (x,))
        tokens = {*before} <= {"token"} and last == "token" or before == [] and last in ("any", "mask")
        rows = {*before} == {"token"} or before in (["any"], ["mask"]) and last == "index"
        if not tokens and not (rows and last in ("slot", "index")):
            raise NotUnderstood
        by = "token" if tokens else "choice" if last == "slot" else "expert"
        return Term("weight", taken, (x,), (by, *wide))


def _code(x: Any) -> Any:
    """How an operand is evaluated."""
    return map_values(x, lambda each: ROW_INPUT if _is_rows(each) else each.value if isinstance(each, Term) else each)


def _parts(x: Any, kind: type) -> list[Any]:
    found: list[Any] = []
    map_values(x, found.append)
    return [each for each in found if isinstance(each, kind)]


def _kind(x: Any) -> str:
    return x.kind if isinstance(x, Term) else ""


def _is_rows(x: Any) -> bool:
    return _kind(x) == "weight" and x.more == ("token",)


def _is_gate(x: Any) -> bool:
    """Whether an index is i : i + 1."""
    return isinstance(x, slice) and _kind(x.start) == "index" and _kind(x.stop) == "next" and x.step is None


def _all_before(index: Sequence[Any]) -> bool:
    """Whether an index takes all of the dims in front of its last: x[.., i], x[:, i]."""
    return len(index) > 1 and all(isinstance(each, slice) and each == slice(None) or each is ... for each in index[:-1])
