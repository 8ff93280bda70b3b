"""Terms of a loop over experts: the meaning of each expression in it (the expert, its tokens, their rows, the expert's output, weights).

    torch.where(selected == i)     found: (token, slot)         weights[token, slot, None]     weight, a column
    x[token]                       rows                         self.experts[i](x[token])      made

Any other expression without a name of the loop is free: it means inside the loop what it means outside.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from torch import nn

from meshc.frontend.libraries.known_experts import SWITCH


class NotUnderstood(Exception):
    """Raised for a statement of a loop over experts that is not understood."""


@dataclass(frozen=True)
class Term:
    """The meaning of an expression of a loop: its kind, the expressions from outside the loop that it reads (`of`), and flags (`more`).

    free       the same as outside of the loop
    onehot     [tokens, slots, experts] of choices; masks: [experts, slots, tokens]; mask: that of the loop's expert; any: tokens with one
    hits       the numbers of experts that are chosen; counts: how often each is; index: the loop's expert; number: one of the module's own
    found      indices where a mask is true; places: the same as rows of one tensor; token, slot: its columns
    expert     the module; rows: its input; made: its output; weight: [rows, 1]; weighed: weight times output
    scores     weights [tokens, slots] of the loop's expert, zeros for other experts

    Where the expert is given all tokens, made and weighed are "all", and "masked" if tokens that have not chosen it count nothing.
    `code`: the expression in the extracted function of one expert's rows and weights (`inline_experts.py`).
    "single": a token, or a mask used as an index, that has this meaning only if each token has one choice. "tokens": places that come
    from a mask of tokens (any).
    """

    kind: str
    of: tuple[ast.expr, ...] = ()
    more: tuple[object, ...] = ()
    code: ast.expr | None = None

    def where(self, kind: str) -> Term:
        """The indices where a mask is true."""
        return Term(kind, self.of, (*self.more, *("tokens",) * (self.kind == "any")))

    def first(self) -> Term:
        """The indices along the first dim alone."""
        return Term("token", more=("tokens",) if "tokens" in self.more else ("single",))


def count_numbered(held: Any, key: str) -> int:
    """How many names of a dict are `key` and a number, counted from 0."""
    count = 0
    while f"{key}{count}" in held:
        count += 1
    return count


class Terms:
    """known      term of each name
    within     names that the loop assigns
    container  attributes from the module to the container of its experts; `key`: prefix of their names there; None: they are numbered
    numbers    global names of the file with int values
    choice     the expression of choices that all masks compare; one_hot: choices are one-hot rows, or rows of zeros
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.known: dict[str, Term] = {}
        self.numbers: dict[str, int] = {}
        self.within: set[str] = set()
        self.container: tuple[str, ...] | None = None
        self.key: str | None = None
        self.expected: object = None
        self.choice: ast.expr | None = None
        self.one_hot = False

    def holds(self, path: tuple[str, ...] | None, key: str | None) -> None:
        """Records the container of the experts. Raises NotUnderstood if it is none, or another than before."""
        held: Any = self.module
        for name in path or ():
            held = getattr(held, name, None)
        wanted = nn.ModuleList if key is None else nn.ModuleDict
        if path is None or not isinstance(held, wanted):
            raise NotUnderstood
        count = len(held) if key is None else count_numbered(held, key)
        if count < 2 or self.expected not in (None, count):
            raise NotUnderstood
        if self.container not in (None, path):
            raise NotUnderstood
        self.container, self.key = path, key

    def own_value(self, test: ast.expr) -> object:
        """The value of an expression of the module's attributes and numbers alone. Raises NotUnderstood."""
        local = {**self.numbers, **{name: term.more[0] for name, term in self.known.items() if term.kind == "number"}}
        if not names_of(test) <= {"self", "len", *local}:
            raise NotUnderstood
        try:
            # the user's own code
            return eval(compile(ast.Expression(test), "", "eval"), {"self": self.module, "len": len, **local})  # noqa: S307
        except Exception as error:
            raise NotUnderstood from error

    def own_number(self, x: ast.expr) -> object:
        """As `own_value`, but None for any other expression."""
        try:
            return self.own_value(x) if names_of(x) else None
        except NotUnderstood:
            return None

    def kind(self, x: ast.expr) -> str:
        try:
            return self.term(x).kind
        except NotUnderstood:
            return ""

    def tokens(self, places: ast.expr) -> bool:
        """Whether an index selects tokens: by the indices of a mask, or by a mask of tokens."""
        inner = places.elts if isinstance(places, ast.Tuple) else [places]
        kinds = [self.kind(each) for each in inner]
        return all(kind == "token" for kind in kinds) or kinds == ["any"] or kinds == ["mask"] and "turned" not in self.term(inner[0]).more

    def use_choice(self, choice: ast.expr) -> None:
        if self.choice is not None and ast.dump(self.choice) != ast.dump(choice):
            raise NotUnderstood
        self.choice = choice

    def term(self, x: ast.expr) -> Term:
        if isinstance(x, ast.Name) and x.id in self.known:
            return self.known[x.id]
        found = self.subscript(x) if isinstance(x, ast.Subscript) else self.call_term(x) if isinstance(x, ast.Call) else None
        if isinstance(x, ast.Compare) and len(x.ops) == 1 and isinstance(x.ops[0], ast.Eq) and self.kind(x.comparators[0]) == "index":
            self.free(x.left)
            self.use_choice(x.left)
            found = Term("mask", (x.left,))
        if isinstance(x, ast.Compare) and len(x.ops) == 1 and isinstance(x.ops[0], ast.Gt) and is_zero(x.comparators[0]):
            found = self.mask_sum_term(x.left)
        if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult):
            found = self.times(self.term(x.left), self.term(x.right))
        return found or self.free(x)

    def free(self, x: ast.expr) -> Term:
        if any(name in self.within or self.known.get(name, Term("")).kind not in ("", "zeros", "number") for name in names_of(x)):
            raise NotUnderstood
        return Term("free", (x,))

    def times(self, left: Term, right: Term) -> Term | None:
        if left.kind in ("made", "mask"):
            left, right = right, left
        if left.kind == "free" and right.kind == "mask" and "turned" not in right.more:
            return Term("scores", left.of)
        if right.kind != "made":
            return None
        if left.kind == "any" and "wide" in left.more and "all" in right.more:
            return Term("made", right.of, (*right.more, "masked"))
        if ("all" in left.more) != ("all" in right.more):
            raise NotUnderstood
        if left.kind == "weight" and "wide" in left.more and "all" in left.more:
            return Term("weighed", (*right.of, *left.of), (*left.more, *right.more))
        if left.kind == "rows":  # weights [tokens, 1]
            return Term("weighed", (*right.of, *left.of), ("token",))
        if left.kind == "weight" and "wide" in left.more:
            return Term("weighed", (*right.of, *left.of), left.more)
        raise NotUnderstood

    def mask_sum_term(self, x: ast.expr) -> Term | None:
        """`masks.sum(dim=(-1, -2))`"""
        summed = isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr == "sum"
        if (
            summed
            and self.kind(x.func.value) == "masks"  # type: ignore[attr-defined]
            and {-1, -2} == set(numbers_of([*x.args, *(k.value for k in x.keywords)]))  # type: ignore[attr-defined]
        ):
            return Term("counted")
        return None

    def subscript(self, x: ast.Subscript) -> Term | None:
        index = x.slice
        inner = list(index.elts) if isinstance(index, ast.Tuple) else [index]
        kinds = [self.kind(each) if not is_none(each) else "none" for each in inner]
        path = path_of(x.value)
        if path is not None and len(inner) == 1 and (key := self.key_of(index)) is not False:
            assert key is None or isinstance(key, str)
            self.holds(path, key)
            return Term("expert")
        value = self.subscript(x.value) if isinstance(x.value, ast.Subscript) else self.known.get(getattr(x.value, "id", ""))
        if value is not None and value.kind == "masks" and kinds == ["index"]:
            return Term("mask", value.of, ("turned", *value.more))
        if value is not None and value.kind == "index" and is_zero(index):
            return Term("index")
        if is_zero(index) and self.kind(x.value) == "found" and "turned" not in self.term(x.value).more:  # torch.where(mask)[0]
            return self.term(x.value).first()
        if value is not None and value.kind == "weight" and len(inner) == 2 and isinstance(inner[0], ast.Slice) and kinds[1] == "none":
            return Term("weight", value.of, (*value.more, "wide"))
        if value is not None and value.kind in ("any", "weight") and kinds[-1] == "none" and _all_before(inner):  # x[..., None]
            return Term(value.kind, value.of, (*value.more, "wide"))
        if (wide := self.of_gates(inner, kinds)) is not None:
            return Term("weight", self.free(x.value).of, ("expert", "all", *wide))
        if not {"token", "any", "mask"} & set(kinds):
            return None
        if any(kind == "mask" and "turned" in self.term(each).more for each, kind in zip(inner, kinds, strict=True)):
            raise NotUnderstood
        kinds = ["any" if kind == "mask" else kind for kind in kinds]
        of = self.free(x.value).of
        wide = ("wide",) if kinds[-1] == "none" else ()
        plain = [kind for kind in kinds if kind != "none"]
        if kinds[0] == "none" and plain == ["token"]:
            return Term("rows_in_one", of)
        if plain == ["any"] or set(plain) == {"token"}:
            return Term("weight", of, ("token", *wide)) if wide else Term("rows", of)
        if plain[-1] == "slot" and set(plain[:-1]) == {"token"}:
            return Term("weight", of, ("choice", *wide))
        if plain[-1] == "index" and (plain[:-1] == ["any"] or set(plain[:-1]) == {"token"}):
            return Term("weight", of, ("expert", *wide))
        raise NotUnderstood

    def of_gates(self, inner: Sequence[ast.expr], kinds: Sequence[str]) -> tuple[str, ...] | None:
        """Flags of the loop's expert's column of gates [.., experts]: "wide" for [.., 1]; None if the index is another."""
        last = inner[-1]
        if isinstance(last, ast.Slice) and _all_before(inner):
            low, high = last.lower, last.upper
            ends = isinstance(high, ast.BinOp) and isinstance(high.op, ast.Add) and self.kind(high.left) == "index" and _is_one(high.right)
            return ("wide",) if ends and low is not None and self.kind(low) == "index" and last.step is None else None
        if len(inner) > 2 and kinds[-2:] == ["index", "none"] and _all_before(inner[:-1]):
            return ("wide",)
        return ("flat",) * (len(inner) == 2 and isinstance(inner[0], ast.Slice)) if kinds[-1] == "index" and _all_before(inner) else None

    def key_of(self, index: ast.expr) -> str | None | bool:
        """The prefix of an index by name, as in f"expert_{i}"; None: an index by number; False: no index of an expert."""
        if self.kind(index) == "index":
            return None
        parts = index.values if isinstance(index, ast.JoinedStr) else []
        if len(parts) == 2 and isinstance(parts[0], ast.Constant) and isinstance(parts[1], ast.FormattedValue):
            return str(parts[0].value) if self.kind(parts[1].value) == "index" else False
        return "" if is_call(index, "str") and len(index.args) == 1 and self.kind(index.args[0]) == "index" else False

    def call_term(self, x: ast.Call) -> Term | None:
        if isinstance(x.func, ast.Name | ast.Subscript) and self.kind(x.func) == "expert":
            rows = self.term(x.args[0]) if len(x.args) == 1 and not x.keywords else Term("")
            return (
                Term("made", rows.of, ("all",) if rows.kind == "free" else ()) if rows.kind in ("rows", "free") else raise_not_understood()
            )
        name = called_name(x)
        if name in ("torch.where", "torch.nonzero") and self.kind(x.args[0]) in ("mask", "any") and len(x.args) == 1:
            return self.term(x.args[0]).where("found" if name == "torch.where" or as_tuple(x) else "places")
        if name == "torch.where" and len(x.args) == 3 and not x.keywords:
            where, made, other = (self.term(each) for each in x.args)
            fits = where.kind == "any" and "wide" in where.more and made.kind in ("made", "weighed") and "all" in made.more
            return (
                Term(made.kind, made.of, (*made.more, "masked"))
                if fits and (is_zero(x.args[2]) or other.kind == "zeros")
                else raise_not_understood()
            )
        if name in ("torch.nn.functional.one_hot", "F.one_hot", "nn.functional.one_hot", "one_hot"):
            return Term("onehot", self.free(x.args[0]).of)
        if name in ("torch.greater", "torch.gt") and len(x.args) == 2 and is_zero(x.args[1]):
            return self.mask_sum_term(x.args[0])
        if name in ("torch.zeros_like", "torch.zeros"):
            return Term("zeros")
        if name in ("torch.empty_like", "torch.empty"):
            return Term("zeros", more=("blank",))
        if name == "torch.bincount" and len(x.args) == 1 and all(each.arg == "minlength" for each in x.keywords):
            flat = x.args[0]
            if isinstance(flat, ast.Call) and isinstance(flat.func, ast.Attribute) and flat.func.attr in ("flatten", "view", "reshape"):
                flat = flat.func.value
            return Term("counts", self.free(flat).of)
        return self.method(x) if isinstance(x.func, ast.Attribute) else None

    def method(self, x: ast.Call) -> Term | None:
        assert isinstance(x.func, ast.Attribute)
        name, numbers = x.func.attr, list(numbers_of([*x.args, *(each.value for each in x.keywords)]))
        of = self.term(x.func.value)
        if name in ("new_zeros", "new_empty"):
            return Term("zeros", more=("blank",) * (name == "new_empty"))
        if of.kind == "counts" and name in ("tolist", "cpu"):
            return of
        if of.kind == "onehot" and name == "permute" and numbers == [2, 1, 0]:
            self.use_choice(of.of[0])
            return Term("masks", of.of)
        if of.kind == "free" and name == "permute" and numbers == [2, 1, 0] and type(self.module).__module__.startswith(SWITCH):
            self.use_choice(of.of[0])
            self.one_hot = True
            return Term("masks", of.of)
        if of.kind == "counted" and name == "nonzero" and not x.args and not x.keywords:
            return Term("hits")
        if of.kind in ("mask", "any") and name == "nonzero" and as_tuple(x):
            return of.where("found")
        if of.kind in ("mask", "any") and name == "nonzero" and not x.args and not x.keywords:
            return of.where("places")
        flat = name == "squeeze" and numbers in ([], [1], [-1]) or name == "flatten" or name in ("view", "reshape") and numbers == [-1]
        if of.kind == "places" and flat and "turned" not in of.more:
            return of.first()
        if of.kind in ("made", "weighed") and name == "squeeze" and numbers in ([1], [-1]):  # rows are wider than 1
            return of
        if of.kind == "mask" and name == "squeeze" and numbers == [0]:
            return of
        if of.kind == "mask" and name == "any" and numbers in ([-1], [-1, True]) and "turned" not in of.more:
            return Term("any", of.of, ("wide",) * (len(numbers) - 1))
        if of.kind == "any" and name == "unsqueeze" and numbers == [-1]:
            return Term("any", of.of, ("wide",))
        if of.kind in ("mask", "any") and name in ("to", "type_as", "float"):
            return of
        if of.kind == "scores" and name == "sum" and numbers in ([-1], [-1, True]):
            return Term("weight", of.of, ("choice", "all", "masked", *("wide",) * (len(numbers) - 1)))
        if of.kind == "any" and (name in ("view", "reshape") and numbers == [-1] or name == "flatten"):
            return of
        if of.kind == "rows_in_one" and name in ("reshape", "view") and numbers[:1] == [-1] and len(x.args) == 2:
            return Term("rows", of.of)
        if of.kind == "weight" and "all" in of.more and name == "unsqueeze" and numbers != [-1] and "flat" not in of.more:
            raise NotUnderstood
        if of.kind in ("weight", "rows") and name == "unsqueeze" and numbers in ([-1], [1]):
            return Term("weight", of.of, (*(of.more or ("token",)), "wide"))
        if of.kind in ("made", "weighed", "weight") and name in ("to", "type_as"):
            return of
        if of.kind == "index" and name == "item":
            return of
        return None if of.kind == "free" else raise_not_understood()


def raise_not_understood() -> NoReturn:
    raise NotUnderstood


def names_of(x: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(x) if isinstance(each, ast.Name)}


def is_zero(x: ast.expr) -> bool:
    return isinstance(x, ast.Constant) and x.value == 0 and not isinstance(x.value, bool)


def _is_one(x: ast.expr) -> bool:
    return isinstance(x, ast.Constant) and x.value == 1 and not isinstance(x.value, bool)


def _all_before(index: Sequence[ast.expr]) -> bool:
    """Whether an index takes all of the dims in front of its last: x[.., i], x[:, i]."""
    whole = [isinstance(each, ast.Slice) and each.lower is each.upper is each.step is None for each in index[:-1]]
    dots = [isinstance(each, ast.Constant) and each.value is ... for each in index[:-1]]
    return len(index) > 1 and all(one or other for one, other in zip(whole, dots, strict=True))


def is_none(x: ast.expr) -> bool:
    return isinstance(x, ast.Constant) and x.value is None


def is_call(x: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id == name and not x.keywords


def called_name(x: ast.Call) -> str:
    return ast.unparse(x.func) if isinstance(x.func, ast.Attribute | ast.Name) else ""


def as_tuple(x: ast.Call) -> bool:
    return [each.arg for each in x.keywords] == ["as_tuple"] and getattr(x.keywords[0].value, "value", None) is True


def numbers_of(given: Sequence[ast.expr]) -> Iterator[int]:
    for each in given:
        try:
            value = ast.literal_eval(each)
        except ValueError:
            continue
        yield from (value if isinstance(value, tuple | list) else [value])


def path_of(x: ast.expr) -> tuple[str, ...] | None:
    """The attributes of `self.a.b`; None for another expression."""
    names: list[str] = []
    while isinstance(x, ast.Attribute):
        names.append(x.attr)
        x = x.value
    return tuple(reversed(names)) if isinstance(x, ast.Name) and x.id == "self" else None
