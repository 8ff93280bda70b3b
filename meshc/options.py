"""Options of `meshc.compile`: what most runs set, and groups of what belongs together. Later features add fields, never parameters.

    Options(memory_budget="60GB", experts=Experts(capacity=1.25))        request.options.experts.capacity

What contradicts itself, and what does not go with what is compiled, is refused here alone. Names that stood in no group work for a
release more: `NAMES` says where each is now.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from meshc.errors import PlanError
from meshc.frontend import dynamic_dims
from meshc.frontend.expert_capacity import OVERFLOW, PRIORITY, Capacity
from meshc.ir.functions import Function
from meshc.ir.quantities import read_bytes
from meshc.optimizer.spec import KEPT, Training
from meshc.plan.memory_lines import POLICIES
from meshc.program.instance import KEPT as KEPT_SIZES

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class SplitSequence:
    """What is done where an axis splits the sequence.

    attention   "ring", keys and values pass round its ranks a block at a time, and none holds them all; "zigzag", likewise, in an order
                that gives every rank as much to do under a causal mask; "gather", each has all; default: of each attention what is
                predicted to be faster. An attention whose keys cannot pass round is refused where that is asked, and has them gathered
                where nothing is
    recurrence  of a selective scan, a linear attention or a gated delta rule: "join", each rank takes the steps of its stretch at once,
                and all gather what stretches come to; "turns", ranks hand the state on, a part of the rows at a time; default: of each
                what is predicted to be faster. An LSTM's steps are taken in turns in any case
    """

    attention: str | None = None
    recurrence: str | None = None


@dataclass(frozen=True)
class Pipelining:
    """What a mesh with an axis pp of two ranks or more has.

    splits           names of modules at which the second and further stages begin: ["model.layers.8", ...]; default: stages of equal
                     predicted time
    schedule         a name ("1f1b"; docs/pipelines.md lists them), each rank's list as text, or a function of (ranks, stages, microbatches,
                     costs) that returns each rank's actions (docs/add-a-schedule.md), the same on every rank; default: the one predicted
                     to be fastest among those that fit
    stages_per_rank  how many stages each rank has, of equal predicted time; default: as many as the schedule wants
    microbatches     of an inference: in how many parts the batch goes through; default: the predicted best that fits. A TrainStep has its
                     own
    """

    splits: Sequence[str] | None = None
    schedule: str | Function | None = None
    stages_per_rank: int | None = None
    microbatches: int | None = None


@dataclass(frozen=True)
class LocalInputs:
    """What `inputs="local"` has.

    loss         in module mode: what a loss made of local outputs means over the data ranks, "mean" or "sum"
    uneven_rows  True: parts may have different numbers of rows, or none; the batch is the rows of all ranks in order. Ranks then tell each
                 other how many at each call, and rows move so that tiles are equal
    """

    loss: str | None = None
    uneven_rows: bool = False


@dataclass(frozen=True)
class Experts:
    """What routed experts have.

    bound        where axes split them: places that a rank has for rows of its experts, for each row of the batch, in multiples of what
                 falls to it if all are chosen alike (1.5); a step in which more are chosen raises. Default: for the worst case
    dispatch     how rows go to experts on other nodes: "hierarchical", a row crosses to a node once and is spread among its ranks, and what
                 they make of it is added up there and crosses once; "flat", from each rank to each; default, "auto": what is predicted to
                 be faster
    capacity     what an expert takes of a group of tokens, in multiples of what falls to it if all are chosen alike (1.25): of T tokens
                 that choose k of E experts each, ceil(k T / E * capacity). This is another meaning than the model's, the same on every
                 mesh; default: whatever chooses it
    overflow     what becomes of a choice that its expert does not take: "drop", it counts nothing; "pass", the token itself counts in the
                 place of what the expert would have made of it; "error", the step raises
    group        tokens of a group; default: those of a row of the batch
    priority     whom an expert takes: "position", the first of a group, or "weight", those that weigh it highest
    placement    "movable": stock experts may move to other ranks between steps (`program.rebalance`), and where each is stored is data
                 that programs read. Default: each stays where its number puts it
    copies       with experts that may move: places that each rank has for copies of experts of other ranks, in each layer, which
                 `program.rebalance` gives to those with most to do. It costs each step the copies' weights, forward and as gradients
    bias_update  by how much the bias of a router (DeepSeek V3's `e_score_correction_bias`) changes after a step: up where an expert had
                 fewer tokens than the mean, down where it had more (0.001). Default: it stays, as the model leaves it
    """

    bound: float | None = None
    dispatch: str = "auto"
    capacity: float | None = None
    overflow: str = OVERFLOW[0]
    group: int | None = None
    priority: str = PRIORITY[0]
    placement: str | None = None
    copies: int = 0
    bias_update: float | None = None

    @property
    def limit(self) -> Capacity | None:
        """The capacity with what becomes of tokens beyond it; None without one."""
        return None if self.capacity is None else Capacity(self.capacity, self.overflow, self.group, self.priority)


@dataclass(frozen=True)
class Debugging:
    """What is changed to find a fault, or to see what something costs.

    cuda_graph     "auto", True or False: one CUDA graph of a step, or of a call with a cache; True: of other inference too (docs/gpu.md)
    check_inputs   with inputs="global", at which calls ranks compare a digest of their inputs: None (default) the 1st, 2nd, 4th, 8th, ...
                   1024th and every 1024th after it; N the 1st and every Nth after it (1: every call); 0 none. A comparison copies the
                   inputs to the CPU, hashes them (about 1 ns a byte) and sends 8 bytes to all ranks
    check_indices  labels and indices that are out of range raise, on CUDA by an assertion on the device; False: they count as rows of zeros
    depth          "auto": of layers that are proved equal four are traced, and the program grows from them; "whole": all are
    kept_sizes     how many programs a Program keeps ready, one for each kind of call (sizes, dtypes, training or not): of more, the one
                   that was not used for longest is dropped, and compiled again when it is called again
    """

    cuda_graph: str | bool = "auto"
    check_inputs: int | None = None
    check_indices: bool = True
    depth: str = "auto"
    kept_sizes: int = KEPT_SIZES


GROUPS: Final[dict[str, type[Any]]] = {
    "sequence": SplitSequence, "pipeline": Pipelining, "training": Training, "local_inputs": LocalInputs, "experts": Experts,
    "debugging": Debugging,
}  # fmt: skip
"""By field of `Options`, what groups options."""

_OTHER_NAMES: Final = {("pipeline", "splits"): "pp_splits", ("local_inputs", "loss"): "local_loss", ("experts", "overflow"): "overflow"}

NAMES: Final = {
    _OTHER_NAMES.get((group, one.name), f"expert_{one.name}" if group == "experts" else one.name): (group, one.name)
    for group, kind in GROUPS.items()
    for one in fields(kind)
}
"""By one name, which saved programs and messages of ranks have, the group and field of an option that is in a group."""


def _accept_names(kind: type[Kind]) -> type[Kind]:
    """The class, whose constructor takes `NAMES` too, with a warning that says what to write. Goes with the next release, as does
    `Options.as_written`."""
    generated = kind.__init__

    @wraps(generated)
    def construct(self: Kind, *args: Any, **given: Any) -> None:
        flat = {name: given.pop(name) for name in [*given] if name in NAMES}
        object.__setattr__(self, "_flat", frozenset(flat))
        for name, value in flat.items():
            group, field = NAMES[name]
            there = given.get(group, GROUPS[group]())
            if getattr(there, field) not in (value, getattr(GROUPS[group](), field)):
                raise PlanError(
                    f"Options({name}={value!r}, {group}={GROUPS[group].__name__}({field}={getattr(there, field)!r})): one option, given "
                    f"twice\n  what to do: leave {name} out"
                )
            given[group] = replace(there, **{field: value})
        if flat:
            old, new = (", ".join(f"{name}=..." for name in flat), ", ".join(_in_groups(flat)))
            warnings.warn(f"meshc.Options({old}) is meshc.Options({new}) now: old names go with the next release", DeprecationWarning, 2)
        generated(self, *args, **given)

    kind.__init__ = construct  # type: ignore[method-assign, assignment]
    return kind


def _in_groups(names: dict[str, object]) -> Iterator[str]:
    for group, kind in GROUPS.items():
        if said := [f"{NAMES[name][1]}=..." for name in names if NAMES[name][0] == group]:
            yield f"{group}=meshc.{kind.__name__}({', '.join(said)})"


@_accept_names
@dataclass(frozen=True)
class Options:
    """
    seed           of meshc's random numbers; default: rank 0's `torch.initial_seed()` at compile
    dynamic        sizes that calls choose, in the form of torch.export's dynamic_shapes:
                   {"input_ids": {0: Dim("batch", max=64), 1: Dim("seq", max=2048)}}; one program serves all sizes in the ranges
    memory_budget  bytes that a rank may hold by the predicted peak, or text such as "80GB": what holds more is not chosen, and refused if
                   it is named; default: a GPU's memory, which bounds only what is left open; on CPU ranks no bound
    host_budget    bytes of its host's memory that a rank may use to keep the memory_budget, or text: what backward reads, optimizer state
                   and parameters are stored there in between where that is predicted to take less than recomputing values, of a program
                   with a backward; default: nothing but what lines of the plan say
    remat          what backward recomputes in place of keeping it: "none"; "cheap", what takes little beside products; "selective", all
                   but products and attention; "layer", all of a layer but what others read; "sqrt", likewise of several layers; default:
                   what takes least time of all that makes a rank keep the memory_budget; without one what of "cheap" takes little for
                   what it saves
    cache          where compiled programs are kept on disk for a next start of the same job: a folder, or True for `programs` where meshc
                   keeps its kernels (docs/compile-time.md); False: nowhere; default: where MESHC_PROGRAMS says, and nowhere without it
    sequence       a SplitSequence: how attention and recurrences run where an axis splits the sequence
    pipeline       a Pipelining: stages, schedule and, of an inference, microbatches
    training       a Training: what only a TrainStep can have, as optimizer state in fewer bits
    local_inputs   a LocalInputs: what `inputs="local"` has
    experts        an Experts: capacity, dispatch and placement of routed experts
    debugging      a Debugging: checks, and switches that tell where a fault is

    Options that are in a group now are taken by their earlier names for a release more, with a DeprecationWarning that says what to write:
    `Options(expert_capacity=1.25)` is `Options(experts=Experts(capacity=1.25))`, and likewise `expert_*`, `overflow`; `pp_splits`
    (`Pipelining(splits=)`), `schedule`; `local_loss` (`LocalInputs(loss=)`), `uneven_rows`; `attention`; `keep_gradients`; `cuda_graph`.
    """

    seed: int | None = None
    dynamic: object = None
    memory_budget: int | str | None = None
    host_budget: int | str | None = None
    remat: str | None = None
    cache: bool | str | Path | None = None
    sequence: SplitSequence = SplitSequence()
    pipeline: Pipelining = Pipelining()
    training: Training = Training()
    local_inputs: LocalInputs = LocalInputs()
    experts: Experts = Experts()
    debugging: Debugging = Debugging()

    if TYPE_CHECKING:  # names of before there were groups: a type checker takes them as long as the constructor does
        attention: str | None = None
        recurrence: str | None = None
        pp_splits: Sequence[str] | None = None
        schedule: str | Function | None = None
        stages_per_rank: int | None = None
        microbatches: int | None = None
        optimizer_state: str | None = None
        master_weights: bool = False
        keep_gradients: bool = False
        accumulate: bool = False
        local_loss: str | None = None
        uneven_rows: bool = False
        expert_bound: float | None = None
        expert_dispatch: str = "auto"
        expert_capacity: float | None = None
        overflow: str = "drop"
        expert_group: int | None = None
        expert_priority: str = "position"
        expert_placement: str | None = None
        expert_copies: int = 0
        expert_bias_update: float | None = None
        cuda_graph: str | bool = "auto"
        check_inputs: int | None = None
        check_indices: bool = True
        depth: str = "auto"
        kept_sizes: int = KEPT_SIZES
    else:

        def __getattr__(self, name: str) -> object:
            if name not in NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            group, field = NAMES[name]
            return getattr(getattr(self, group), field)

    def __post_init__(self) -> None:
        for name in ("memory_budget", "host_budget"):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, read_bytes(text, f"Options({name}=...)"))
        for said in _contradictions(self):
            raise PlanError(self.as_written(said))

    @property
    def budget(self) -> int | None:
        """`memory_budget` in bytes."""
        assert not isinstance(self.memory_budget, str), "it was read when it was given"
        return self.memory_budget

    @property
    def host_room(self) -> int | None:
        """`host_budget` in bytes."""
        assert not isinstance(self.host_budget, str), "it was read when it was given"
        return self.host_budget

    def by_name(self) -> dict[str, object]:
        """Each option's value by its one name."""
        alone = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in GROUPS}
        return {**alone, **{name: getattr(getattr(self, group), field) for name, (group, field) in NAMES.items()}}

    def having(self, **changes: Any) -> Options:
        """With other values, by name. They are not checked: the compiler may try together what a user may not give together."""
        found = copy.copy(self)
        for name, value in changes.items():
            group, field = NAMES.get(name, ("", ""))
            there = getattr(found, group or name)
            object.__setattr__(found, group or name, replace(there, **{field: value}) if group else value)
        return found

    def as_written(self, text: str) -> str:
        """The text of a message, in which options stand in their groups, with the names that were given in place of these."""
        for group in dict.fromkeys(NAMES[name][0] for name in self._flat):  # type: ignore[attr-defined]
            kind, names = GROUPS[group].__name__, {field: name for name, (of, field) in NAMES.items() if of == group}

            def flat(given: re.Match[str], names: dict[str, str] = names) -> str:
                return re.sub(r"\b(\w+)=", lambda one: f"{names.get(one[1], one[1])}=", given[1])

            text = re.sub(rf"\b{group}={kind}\(((?:[^()]|\([^()]*\))*)\)", flat, text)
            text = re.sub(rf"\b{kind}\(((?:[^()]|\([^()]*\))*)\)", lambda one: flat(one).removesuffix("="), text)
        return text


def refuse_others(options: object) -> None:
    """Anything but Options. Raises PlanError."""
    if not isinstance(options, Options):
        raise PlanError(f"options is of the type {type(options).__name__}\n  what to do: options=meshc.Options(...)")


def refuse_with(options: Options, step: bool, inputs: str) -> None:
    """What does not go with what is compiled, a training step or none, of global or local inputs. Raises PlanError."""
    training = options.training
    said = None
    if options.experts.bias_update is not None and not step:
        said = (
            "Options(experts=Experts(bias_update=)): routers' biases change after a step, and what is compiled is none\n"
            "  what to do: compile a meshc.TrainStep, or leave the option out"
        )
    elif (training.keep_gradients or training.accumulate) and not step:
        said = (
            "Options(training=Training(keep_gradients=, accumulate=)) are of a training step, and what is compiled is none\n"
            "  what to do: compile a meshc.TrainStep; a module's own backward leaves and adds up gradients as torch does"
        )
    elif options.local_inputs.uneven_rows and inputs == "global":
        said = (
            'Options(local_inputs=LocalInputs(uneven_rows=True)): each rank passes rows of its own, which is inputs="local"\n'
            '  what to do: say so, or leave it out: with inputs="global" every rank passes the whole batch, of any number of rows'
        )
    if said is not None:
        raise PlanError(options.as_written(said))


_CHOICES: Final[dict[str, tuple[Sequence[str | None], str]]] = {
    "depth": (("auto", "whole"), "use 'auto' or 'whole'"),
    "optimizer_state": ((None, *KEPT), f"use {' or '.join(map(repr, KEPT))}, or None"),
    "remat": ((None, *POLICIES), f"use one of {', '.join(POLICIES)}"),
    "attention": ((None, "ring", "zigzag", "gather"), "use 'ring', 'zigzag' or 'gather', or None"),
    "recurrence": ((None, "turns", "join"), "use 'turns' or 'join', or None"),
    "expert_dispatch": (("auto", "flat", "hierarchical"), "use 'auto', 'flat' or 'hierarchical'"),
    "overflow": (OVERFLOW, f"use one of {', '.join(map(repr, OVERFLOW))}"),
    "expert_priority": (PRIORITY, f"use one of {', '.join(map(repr, PRIORITY))}"),
    "expert_placement": ((None, "movable"), "use 'movable', or None"),
    "local_loss": ((None, "mean", "sum"), "use 'mean' or 'sum'"),
}
"""Of options that are one of some words, these, and what is said of others."""

_NUMBERS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(("microbatches", "memory_budget", "host_budget", "stages_per_rank", "kept_sizes"), (lambda x: x >= 1, "at least 1")),
    "check_inputs": (lambda x: x >= 0, "0 (never), 1 (every call) or more"),
    "expert_bound": (lambda x: x > 0, "a number above 0, such as 1.5, or None"),
    "expert_capacity": (lambda x: x > 0, "a number above 0, such as 1.25, or None"),
    "expert_group": (lambda x: x >= 1, "at least 1 token, or None, the tokens of a row of the batch"),
    "expert_bias_update": (lambda x: 0 < x < inf, "a number above 0, such as 0.001, or None"),
}
"""Of options that are numbers, which they may be, and what is said of others."""


def _contradictions(options: Options) -> Iterator[str]:
    """What is wrong with options whatever is compiled, options in their groups (`Options.as_written`)."""
    values = options.by_name()
    for name, (may_be, said) in _NUMBERS.items():
        if values[name] is not None and not may_be(values[name]):
            yield f"{_in_its_group(name, values[name])}: {said}"
    for name, (words, said) in _CHOICES.items():
        if values[name] not in words:
            yield f"{_in_its_group(name, values[name])}: {said}"
    if options.host_budget is not None and options.memory_budget is None:
        yield (
            f"Options(host_budget={options.host_budget}): what a rank may use of its host to keep a memory_budget, and there is none\n"
            '  what to do: say what it may hold, Options(memory_budget="24GB", host_budget=...), or say what lies there by '
            "lines of the plan, as `offload state`"
        )
    if options.host_budget is not None and options.remat is not None:
        yield (
            f"Options(remat={options.remat!r}, host_budget=...): a policy says what is recomputed, and nothing is weighed for a budget\n"
            "  what to do: leave one of them out; lines of the plan, as `offload state`, go with a policy"
        )
    schedule, splits = values["schedule"], values["pp_splits"]
    if schedule is not None and not isinstance(schedule, str) and not callable(schedule):
        yield f"{_in_its_group('schedule', schedule)}: a schedule's name, its text, or a function that makes its lists"
    if isinstance(splits, str):
        yield f"{_in_its_group('pp_splits', splits)}: give a list of module names, [{splits!r}]"
    if not isinstance(options.cache, bool | str | Path | None) or options.cache == "":
        yield f"Options(cache={options.cache!r}): a folder, True or False"
    dynamic_dims.parse_dynamic(options.dynamic)
    yield from _contradictions_of_experts(options.experts, bool(options.dynamic))


def _contradictions_of_experts(experts: Experts, dynamic: bool) -> Iterator[str]:
    of_capacity = ("overflow", "group", "priority")
    if experts.capacity is None and (alone := [name for name in of_capacity if getattr(experts, name) != getattr(Experts(), name)]):
        yield (
            f"Options(experts=Experts({alone[0]}=)) says what becomes of a capacity\n"
            "  what to do: Options(experts=Experts(capacity=1.25)) beside it"
        )
    if experts.bound is not None and experts.capacity is not None:
        yield "Options(experts=Experts(bound=..., capacity=...)): a capacity is a bound\n  what to do: leave Experts(bound=) out"
    if experts.placement is not None and experts.bound is not None:
        yield (
            'Options(experts=Experts(bound=..., placement="movable")): a bound that is exceeded names experts by where they lie\n'
            "  what to do: leave one of them out; Experts(capacity=) goes with experts that move"
        )
    if experts.copies < 0 or (experts.copies and experts.placement is None):
        yield (
            f"Options(experts=Experts(copies={experts.copies!r})): places for copies of experts on each rank, 0 or more, of experts that "
            'may move\n  what to do: Options(experts=Experts(placement="movable", copies=1))'
        )
    counted = next((name for name in ("bound", "capacity") if getattr(experts, name) is not None), None)
    if counted is not None and dynamic:
        yield (
            f"Options(dynamic=..., experts=Experts({counted}=...)): places for tokens are counted while the model is traced, and sizes are "
            "open then\n  what to do: leave one of them out"
        )


def _in_its_group(name: str, value: object) -> str:
    """One option with its value, as a user writes it."""
    group, field = NAMES.get(name, ("", ""))
    return f"Options({group}={GROUPS[group].__name__}({field}={value!r}))" if group else f"Options({name}={value!r})"
