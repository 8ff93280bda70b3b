"""Options of `meshc.compile`, rarely changed. Later features add fields here, never parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Final

from meshc.errors import PlanError
from meshc.frontend import dynamic_dims
from meshc.frontend.expert_capacity import Capacity, capacity_from_options
from meshc.ir.functions import Function
from meshc.ir.quantities import read_bytes
from meshc.optimizer.spec import KEPT, Keeping
from meshc.plan.remat_lines import POLICIES
from meshc.program.instance import KEPT as KEPT_SIZES

EXPERTS: Final = (
    "expert_bound", "expert_capacity", "overflow", "expert_group", "expert_priority", "expert_placement", "expert_copies",
    "expert_bias_update", "expert_dispatch",
)  # fmt: skip
"""Fields that are about routed experts."""


@dataclass(frozen=True)
class Options:
    """
    seed           of meshc's random numbers; default: rank 0's `torch.initial_seed()` at compile
    cuda_graph     "auto", True or False: one CUDA graph of a step, or of a call with a cache; True: of other inference too (docs/gpu.md)
    dynamic        sizes that calls choose, in the form of torch.export's dynamic_shapes:
                   {"input_ids": {0: Dim("batch", max=64), 1: Dim("seq", max=2048)}}; one program serves all sizes in the ranges
    kept_sizes     how many programs a Program keeps ready, one for each kind of call (sizes, dtypes, training or not): of more, the one
                   that was not used for longest is dropped, and compiled again when it is called again
    pp_splits      names of modules at which the second and further stages of a pipeline begin: ["model.layers.8", ...];
                   default: stages of equal predicted time
    schedule       of a pipeline: a name ("1f1b"; docs/pipelines.md lists them), each rank's list as text, or a function of (ranks, stages,
                   microbatches, costs) that returns each rank's actions (docs/add-a-schedule.md), the same on every rank; default: the one
                   predicted to be fastest among those that fit
    stages_per_rank  how many stages of a pipeline each rank has, of equal predicted time; default: as many as the schedule wants
    microbatches   of an inference over a pipeline: in how many parts the batch goes through it; default: the predicted best that fits.
                   A TrainStep has its own
    memory_budget  bytes that a rank may hold by the predicted peak, or text such as "80GB": what holds more is not chosen, and refused if
                   it is named; default: a GPU's memory, which bounds only what is left open; on CPU ranks no bound
    host_budget    bytes of its host's memory that a rank may use to keep the memory_budget, or text: what backward reads, optimizer state
                   and parameters lie there in between where that is predicted to take less than recomputing values, of a program with a
                   backward; default: nothing but what lines of the plan say
    check_inputs   with inputs="global", at which calls ranks compare a digest of their inputs: None (default) the 1st, 2nd, 4th, 8th, ...
                   1024th and every 1024th after it; N the 1st and every Nth after it (1: every call); 0 none. A comparison copies the
                   inputs to the CPU, hashes them (about 1 ns a byte) and sends 8 bytes to all ranks
    local_loss     with inputs="local" in module mode: what a loss made of local outputs means over the data ranks, "mean" or "sum"
    uneven_rows    with inputs="local", True: parts may have different numbers of rows, or none; the batch is the rows of all ranks in
                   order. Ranks then tell each other how many at each call, and rows move so that tiles are equal
    check_indices  labels and indices that are out of range raise, on CUDA by an assertion on the device; False: they count as rows of zeros
    remat          what backward recomputes in place of keeping it: "none"; "cheap", what takes little beside products; "selective", all
                   but products and attention; "layer", all of a layer but what others read; "sqrt", likewise of several layers; default:
                   what takes least time of all that makes a rank keep the memory_budget; without one what of "cheap" takes little for
                   what it saves
    optimizer_state  in what a TrainStep keeps the optimizer's state between steps: "bf16", or "8bit", a byte an element and a float32 scale
                   for each 256 of a row; rounded up or down by a draw that is the same on every mesh; default: as the optimizer has it
    master_weights  True: of parameters in 16 bits a float32 copy is kept beside the optimizer's state, and updated; the parameter is its
                   rounding
    attention      where an axis splits the sequence: "ring", keys and values pass round its ranks a block at a time, and none holds them
                   all; "zigzag", likewise, in an order that gives every rank as much to do under a causal mask; "gather", each has all;
                   default: of each attention what is predicted to be faster. An attention whose keys cannot pass round is
                   refused where that is asked, and has them gathered where nothing is
    recurrence     where an axis splits the sequence of a selective scan, a linear attention or a gated delta rule: "join", each rank takes
                   the steps of its stretch at once, and all gather what stretches come to; "turns", ranks hand the state on, a part of the
                   rows at a time; default: of each what is predicted to be faster. An LSTM's steps are taken in turns in any case
    expert_bound   where axes split routed experts: places that a rank has for rows of its experts, for each row of the batch, in multiples
                   of what falls to it if all are chosen alike (1.5); a step in which more are chosen raises. Default: for the worst case
    expert_dispatch  how rows go to experts on other nodes: "hierarchical", a row crosses to a node once and is spread among its ranks, and
                   what they make of it is added up there and crosses once; "flat", from each rank to each; default, "auto": what is
                   predicted to be faster
    expert_capacity  what a routed expert takes of a group of tokens, in multiples of what falls to it if all are chosen alike (1.25): of T
                   tokens that choose k of E experts each, ceil(k T / E * expert_capacity). This is another meaning than the model's, the
                   same on every mesh; default: whatever chooses it
    overflow       what becomes of a choice that its expert does not take: "drop", it counts nothing; "pass", the token itself counts in the
                   place of what the expert would have made of it; "error", the step raises
    expert_group   tokens of a group; default: those of a row of the batch
    expert_priority  whom an expert takes: "position", the first of a group, or "weight", those that weigh it highest
    expert_placement  "movable": stock experts may move to other ranks between steps (`program.rebalance`), and where each lies is data that
                   programs read. Default: each stays where its number puts it
    expert_copies  with experts that may move: places that each rank has for copies of experts of other ranks, in each layer, which
                   `program.rebalance` gives to those with most to do. It costs each step the copies' weights, forward and as gradients
    expert_bias_update  by how much the bias of a router (DeepSeek V3's `e_score_correction_bias`) changes after a step: up where an expert
                   had fewer tokens than the mean, down where it had more (0.001). Default: it stays, as the model leaves it
    keep_gradients  of a training step: after each call `parameter.grad` is the gradient that the parameter was updated with, behind hooks
                   and clipping, as a DTensor that lies as the optimizer's state does; it costs a rank their bytes
    accumulate     of a training step: `program.accumulate(...)` may add up gradients over several calls; it costs a rank their bytes
    cache          where compiled programs are kept on disk for a next start of the same job: a folder, or True for `programs` where meshc
                   keeps its kernels (docs/compile-time.md); False: nowhere; default: where MESHC_PROGRAMS says, and nowhere without it
    depth          "auto": of layers that are proved equal four are traced, and the program grows from them; "whole": all are
    """

    seed: int | None = None
    cuda_graph: str | bool = "auto"
    dynamic: object = None
    kept_sizes: int = KEPT_SIZES
    pp_splits: Sequence[str] | None = None
    schedule: str | Function | None = None
    stages_per_rank: int | None = None
    microbatches: int | None = None
    memory_budget: int | str | None = None
    host_budget: int | str | None = None
    check_inputs: int | None = None
    local_loss: str | None = None
    uneven_rows: bool = False
    check_indices: bool = True
    optimizer_state: str | None = None
    master_weights: bool = False
    keep_gradients: bool = False
    accumulate: bool = False
    cache: bool | str | Path | None = None
    depth: str = "auto"
    remat: str | None = None
    attention: str | None = None
    recurrence: str | None = None
    expert_bound: float | None = None
    expert_dispatch: str = "auto"
    expert_capacity: float | None = None
    overflow: str = "drop"
    expert_group: int | None = None
    expert_priority: str = "position"
    expert_placement: str | None = None
    expert_copies: int = 0
    expert_bias_update: float | None = None

    def __post_init__(self) -> None:
        for name in ("memory_budget", "host_budget"):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, read_bytes(text, f"Options({name}=...)"))
        if self.host_budget is not None and self.memory_budget is None:
            raise PlanError(
                f"Options(host_budget={self.host_budget}): what a rank may use of its host to keep a memory_budget, and there is none\n"
                '  what to do: say what it may hold, Options(memory_budget="24GB", host_budget=...), or say what lies there by '
                "lines of the plan, as `offload state`"
            )
        if self.host_budget is not None and self.remat is not None:
            raise PlanError(
                f"Options(remat={self.remat!r}, host_budget=...): a policy says what is recomputed, and nothing is weighed for a budget\n"
                "  what to do: leave one of them out; lines of the plan, as `offload state`, go with a policy"
            )
        for name in ("microbatches", "memory_budget", "host_budget", "stages_per_rank", "kept_sizes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"Options({name}={value}): at least 1")
        if self.check_inputs is not None and self.check_inputs < 0:
            raise PlanError(f"Options(check_inputs={self.check_inputs}): 0 (never), 1 (every call) or more")
        if self.schedule is not None and not isinstance(self.schedule, str) and not callable(self.schedule):
            raise PlanError(f"Options(schedule={self.schedule!r}): a schedule's name, its text, or a function that makes its lists")
        if isinstance(self.pp_splits, str):
            raise PlanError(f"Options(pp_splits={self.pp_splits!r}): give a list of module names, [{self.pp_splits!r}]")
        if not isinstance(self.cache, bool | str | Path | None) or self.cache == "":
            raise PlanError(f"Options(cache={self.cache!r}): a folder, True or False")
        dynamic_dims.parse_dynamic(self.dynamic)
        if self.depth not in ("auto", "whole"):
            raise PlanError(f"Options(depth={self.depth!r}): use 'auto' or 'whole'")
        if self.optimizer_state is not None and self.optimizer_state not in KEPT:
            raise PlanError(f"Options(optimizer_state={self.optimizer_state!r}): use {' or '.join(map(repr, KEPT))}, or None")
        if self.remat is not None and self.remat not in POLICIES:
            raise PlanError(f"Options(remat={self.remat!r}): use one of {', '.join(POLICIES)}")
        if self.attention not in (None, "ring", "zigzag", "gather"):
            raise PlanError(f"Options(attention={self.attention!r}): use 'ring', 'zigzag' or 'gather', or None")
        if self.recurrence not in (None, "turns", "join"):
            raise PlanError(f"Options(recurrence={self.recurrence!r}): use 'turns' or 'join', or None")
        if self.expert_bound is not None and not self.expert_bound > 0:
            raise PlanError(f"Options(expert_bound={self.expert_bound!r}): a number above 0, such as 1.5, or None")
        capacity = self.capacity
        if self.expert_bound is not None and capacity is not None:
            raise PlanError("Options(expert_bound=..., expert_capacity=...): a capacity is a bound\n  what to do: leave expert_bound out")
        if self.expert_bias_update is not None and not 0 < self.expert_bias_update < inf:
            raise PlanError(f"Options(expert_bias_update={self.expert_bias_update!r}): a number above 0, such as 0.001, or None")
        if self.expert_dispatch not in ("auto", "flat", "hierarchical"):
            raise PlanError(f"Options(expert_dispatch={self.expert_dispatch!r}): use 'auto', 'flat' or 'hierarchical'")
        if self.expert_placement not in (None, "movable"):
            raise PlanError(f"Options(expert_placement={self.expert_placement!r}): use 'movable', or None")
        if self.expert_placement is not None and self.expert_bound is not None:
            raise PlanError(
                'Options(expert_bound=..., expert_placement="movable"): a bound that is exceeded names experts by where they lie\n'
                "  what to do: leave one of them out; expert_capacity goes with experts that move"
            )
        if self.expert_copies < 0 or (self.expert_copies and self.expert_placement is None):
            raise PlanError(
                f"Options(expert_copies={self.expert_copies!r}): places for copies of experts on each rank, 0 or more, of experts that may "
                'move\n  what to do: Options(expert_placement="movable", expert_copies=1)'
            )
        counted = "expert_bound" if self.expert_bound is not None else "expert_capacity" if capacity is not None else None
        if counted is not None and self.dynamic:
            raise PlanError(
                f"Options(dynamic=..., {counted}=...): places for tokens are counted while the model is traced, and sizes are open then\n"
                "  what to do: leave one of them out"
            )
        if self.local_loss not in (None, "mean", "sum"):
            raise PlanError(f"Options(local_loss={self.local_loss!r}): use 'mean' or 'sum'")

    @property
    def budget(self) -> int | None:
        """`memory_budget` in bytes."""
        assert not isinstance(self.memory_budget, str), "it was read when it was given"
        return self.memory_budget

    @property
    def capacity(self) -> Capacity | None:
        """What routed experts take at most."""
        return capacity_from_options(self.expert_capacity, self.overflow, self.expert_group, self.expert_priority)

    def of_experts(self) -> dict[str, float | str]:
        """What is said of routed experts otherwise than by default, by field."""
        return {each.name: value for each in fields(self) if each.name in EXPERTS and (value := getattr(self, each.name)) != each.default}

    @property
    def keeping(self) -> Keeping:
        """How a program keeps the optimizer's state."""
        return Keeping(self.optimizer_state, self.master_weights, self.keep_gradients, self.accumulate)


def refuse_others(options: object) -> None:
    """Anything but Options. Raises PlanError."""
    if not isinstance(options, Options):
        raise PlanError(f"options is of the type {type(options).__name__}\n  what to do: options=meshc.Options(...)")
