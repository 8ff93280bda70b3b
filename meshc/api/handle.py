"""`Program`, the result of `meshc.compile`: called like the model, inspected, saved, and holder of the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshc.api import batch_parts, generating, submodule_calls, trainer
from meshc.api.compilations import AdmittedCall, Compilations
from meshc.api.compile_arguments import CompileArguments
from meshc.api.masked_state import mask_state
from meshc.api.skipped_steps import scale_number, settle_scale
from meshc.api.world import Context, World
from meshc.cost.expert_balance import LEAST
from meshc.errors import StateError
from meshc.frames import warn_at_users_line
from meshc.frontend import model_init, outer_transforms
from meshc.frontend.expert_load import with_loads
from meshc.frontend.libraries import stock_models
from meshc.frontend.libraries.stock_accelerate import schedule_note, tell_accelerate
from meshc.frontend.libraries.stock_trainer import is_marked, tell_trainer, with_trainer_counts
from meshc.frontend.loss_scaling import SKIPPED
from meshc.frontend.train_step import TracedFunction, TrainStep
from meshc.ir.mesh import Mesh
from meshc.lazy_module import LazyModule
from meshc.optimizer.optimizer import mark_stepped, numbers, rates
from meshc.optimizer.step_hooks import post_hooks, refuse_pre_hooks
from meshc.options import Options
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.plan import Plan
from meshc.program.program import PlainProgram, Port
from meshc.runtime.run.autograd import ForwardCall, ProgramFunction
from meshc.runtime.run.session import Session
from meshc.runtime.state.optimizer_counts import OptimizerCounts
from meshc.runtime.state.ownership import calls_allowed, run_calls, runs_program, runs_restored
from meshc.runtime.state.store import Store
from meshc.text import printer

LOOKED_AT = "values looked at in a call"

if TYPE_CHECKING:
    from meshc.api import explaining, pretrained, proving, rebalancing, saving
    from meshc.cost import call_timeline
    from meshc.passes import dump
    from meshc.passes.driver import compile_program as driver
    from meshc.pipelining import draw
    from meshc.pipelining.timing import Timeline
    from meshc.proof.outcome import ProgramProof
    from meshc.report import explanation, html, page, search_tables, summary
    from meshc.report.rebalance_report import RebalanceReport
    from meshc.runtime.saved import initial_values
else:  # what looks into a program is imported when somebody looks
    explaining, driver, dump = (LazyModule(f"meshc.{name}") for name in ("api.explaining", "passes.driver.compile_program", "passes.dump"))
    pretrained, proving = LazyModule("meshc.api.pretrained"), LazyModule("meshc.api.proving")
    rebalancing, saving = LazyModule("meshc.api.rebalancing"), LazyModule("meshc.api.saving")
    html, page, summary = (LazyModule(f"meshc.report.{name}") for name in ("html", "page", "summary"))
    explanation, search_tables = LazyModule("meshc.report.explanation"), LazyModule("meshc.report.search_tables")
    call_timeline, draw = LazyModule("meshc.cost.call_timeline"), LazyModule("meshc.pipelining.draw")
    initial_values = LazyModule("meshc.runtime.saved.initial_values")


class Program:
    """A compiled module, step or function. Called like the model.

    It holds one compilation per key (input structure, shapes, dtypes, training flags, requires_grad, grad mode, autocast); `compiled` is
    the one that ran last.
    """

    def __init__(self, asked: CompileArguments, world: World) -> None:
        self.world = world
        self.compilations = Compilations(asked, world, self.run_by_model)
        self.metrics: dict[str, Any] = {}
        self._counts: OptimizerCounts | None = None
        self._adding: Program | None = None
        """Of a training step, what adds gradients up."""
        self._of_model: Program | None = None
        """Of a training step, what calls of its model run."""
        self._run: Callable[..., Any] | None = None
        """What a call of the module runs for this program."""
        self._whole: Program | None = None
        """Of a model of which ranks have parts of a batch, what generates for all of them."""
        self.parts: dict[str, Program] = {}
        """What calls of modules in the model run, by their paths: of those that generate calls by itself, and that somebody has."""
        self._trained = 0
        """Calls in training."""

    if not TYPE_CHECKING:  # what a Program has not is an error to the type checker too

        def __getattr__(self, name: str) -> object:
            made = vars(self).get("compilations")
            raise AttributeError(f"a meshc.Program has no {name!r}" + ("" if made is None else made.asked.advice_on_attribute(name)))

    @property
    def asked(self) -> CompileArguments:
        """What was asked for; on the axes that stand for those of the mesh, once it is known that some are taken apart."""
        return self.compilations.asked

    def run_by_model(self) -> None:
        """From here on a call of the module that is compiled runs its program, where there are ranks to run it; calls of modules in it
        alone run programs of their own, and so do those of a training step's model."""
        called = self.asked.called
        if self.asked.step is not None and self.world.has_ranks:
            if self._of_model is None and not runs_program(self.asked.module):
                self._of_model = Program(self.asked.of_model(), self.world)
                self._of_model.run_by_model()
            elif self._of_model is not None and runs_program(self.asked.module, self._of_model._run):
                self._of_model.run_by_model()
        if not isinstance(called, nn.Module) or not self.world.has_ranks:
            return
        shared = batch_parts.rank_parts(self.asked)
        tell_trainer(called, shared, trainer.save_by_all)
        stock_models.tell_generate(called)
        self._run = with_trainer_counts(self.__call__, self.asked.data_ranks) if is_marked(called) else self.__call__
        run_calls(called, self._run)
        if called is self.asked.module:
            tell_accelerate(called, shared)
            self._run_by_parts(called)

    def _run_by_parts(self, model: nn.Module) -> None:
        paths = stock_models.called_by_generate(model)
        for path in ("", *paths) if self.asked.inputs == "local" else ():
            generating.stand_in(model.get_submodule(path), partial(self._generate_parts, path))
        for path in paths:
            if path not in self.parts:
                self.parts[path] = Program(self.asked.part(path), self.world)
                self.parts[path].run_by_model()
        if self.compilations.store is not None or Store.of(model) is not None:
            for path, module in submodule_calls.callable_modules(model):
                if path not in self.parts:
                    run_calls(module, partial(self._call_part, path))

    def _call_part(self, path: str, *args: object, **kwargs: object) -> Any:
        """A call of a module in the model, by somebody who has reached into it."""
        if path not in self.parts:
            with self.world.refusable():
                submodule_calls.refuse_stages(path, self.asked.module, self.asked.mesh)
            self.parts[path] = Program(self.asked.part(path, by_hand=True), self.world)
            submodule_calls.warn_of_many(self.asked.module, [path for path, part in self.parts.items() if part.asked.by_hand])
        return self.parts[path](*args, **kwargs)

    def __repr__(self) -> str:
        """What was compiled for what, in a line; `print(program)` is its text."""
        compiled = len(self.compilations.kept)
        many = f"{compiled} program{'s' if compiled != 1 else ''} compiled"
        plan = ", ".join(str(self.plan).splitlines()) or "none"
        return f"<meshc.Program of {self.asked.name} on {self.mesh}, {self.asked.inputs} inputs, plan {plan!r}, {many}>"

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compile for these inputs. All ranks call it."""
        with self.guarded("compile"):
            self.compilations.prepare(self.compilations.admit((args, kwargs)))

    def guarded(self, what: str) -> Context:
        """A context for one thread, in which this rank's failure reaches the others, and theirs this one."""
        return self.compilations.failure_guard(what)

    # ------------------------------------------------------------------------------------------------------------------ calling

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the program like the model. Raises InputError for inputs that do not fit, PeerError if another rank failed."""
        # What a call passes before anything of it is sent: `refuse_call` (there are ranks), `refuse_around` (no transform is outside), the
        # guard (no rank has failed, no other thread is inside), `admit` (the arguments, their form and key), `prepare` (a compilation for
        # the key: what is new, ranks agree on), `check` (the model is as it was, the inputs fit), `compare` (what ranks must pass alike)
        self.world.refuse_call()
        outer_transforms.refuse_around((*args, *kwargs.values()))
        with self.guarded("call"):
            call = self.compilations.admit((args, kwargs))
            output = self._call(call)
            return output if call.cached is None else call.cached.crop_output(output)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own `generate` gives, whose every call of the model is one of the program: its arguments, its result, the same
        on every rank (docs/generation.md). Raises StateError for a model without one."""
        own = generating.own(self.asked.module)
        if own is None:
            raise StateError(
                f"{self.asked.name} has no generate\n"
                "  what to do: compile a model that has one, meshc.compile(model, mesh, ...), as a transformers causal model does"
            )
        return own(*args, **kwargs) if self.asked.inputs == "global" else self._generate_parts("", *args, **kwargs)

    def _generate_parts(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the model or of one in it, of rows of each rank's own."""
        self.world.refuse_call()
        if self._whole is None:
            self._whole = Program(self.asked.with_whole_batch(), self.world)
        model = self.asked.module
        with runs_restored(model):
            self._whole.run_by_model()
            return generating.of_parts(self.asked, self.world, model.get_submodule(path), args, kwargs)

    def __reduce__(self) -> Any:
        raise StateError(
            "a program lives in its process, with its groups and its part of the parameters, and is neither pickled nor copied\n"
            "  what to do: program.save(path) for `meshc run`; program.state_dict() or torch.distributed.checkpoint for its state"
        )

    def _call(self, call: AdmittedCall) -> Any:
        compilation, tensors, dealt = self.compilations.prepare(call), call.tensors, call.dealt
        session, own = compilation.session, compilation.reads.numbers()
        assert session is not None
        with self.world.refusable():
            session.check(tensors, dealt, call.known, call.state)
        self.compilations.compare(call)
        self.world.begin(lambda: self.asked.name)
        if dealt is not None:
            with self.guarded("move rows"):
                tensors = session.tiles(tensors, dealt)
        session.compare_inputs(tensors)
        if self.step is not None or session.backwards is not None:
            self._trained += 1
            # at the second call, before which a loop has its schedulers
            if self._trained == 2 and (note := schedule_note(self.asked.data_ranks, session.store.parameter_key)):
                warn_at_users_line(note)
        if self.step is not None:
            return self._train(call, session, tensors, own)
        if session.backwards is not None:
            leaves = self._differentiable(session, tensors, own)
        else:
            leaves = session.leaves(session.run(tensors, own), tensors)
        session.store.step += 1
        return session.build_output(session.parts(leaves, dealt), tensors)

    def _train(self, call: AdmittedCall, session: Session, tensors: list[torch.Tensor], own: Mapping[str, float]) -> torch.Tensor:
        optimizers = call.optimizers
        assert optimizers is not None
        with self.world.refusable():
            refuse_pre_hooks(optimizers)
        counts = self._counts = self._counts or OptimizerCounts(session.store, optimizers)
        counts.read_changes()
        rows = enumerate(numbers(optimizers))
        assert self.step is not None
        optimizers_own = {f"{index}.{name}": value for index, row in rows for name, value in row.items()}
        values = {**own, **scale_number(self.step), **optimizers_own}
        env = session.run(tensors, {name: values[name] for name in session.number_names})
        session.store.step += 1
        scaling = {} if self.asked.adds else settle_scale(self.step, session, env)
        if not self.asked.adds:
            counts.write_back()
            if not scaling.get(SKIPPED):
                mark_stepped(optimizers)
            if self.options.training.keep_gradients:
                session.store.show_gradients()
            if (behind := post_hooks(optimizers)) and not scaling.get(SKIPPED):
                session.store.sync()
                for hook in behind:
                    hook()
        loss: torch.Tensor = session.output(session.results[0], env[session.results[0].key])
        self.metrics = {"loss": loss, **with_loads(session.metrics(env, call.dealt)), **scaling, "lr": rates(optimizers)}
        return loss

    def accumulate(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Called like the program: forward and backward, whose gradients are added to those of the calls of it since the last step. The
        program's next call adds its own to them and updates: together what `loss.backward()` several times, then clipping and
        `optimizer.step()`, do on one device. Gradients are sums, so divide losses by the number of calls if their mean is meant.

        Returns the loss; `metrics` has that, the loss function's metrics, and the norm of the sum so far. With `microbatches=` one call
        does the same with one reduction. Raises StateError without `Options(training=Training(accumulate=True))`."""
        if self.step is None or not self.options.training.accumulate:
            raise StateError(
                "gradients are added up over calls by a training step that keeps their sum\n"
                "  what to do: meshc.compile(meshc.TrainStep(...), mesh, options=meshc.Options(training=meshc.Training(accumulate=True)))\n"
                "  or one call with the whole batch, TrainStep(..., microbatches=N), which reduces once"
            )
        self.world.refuse_call()
        if not self.compilations.has_compilation:  # how state is stored is the step's to say
            self.prepare(args, dict(kwargs))
        if self._adding is None:
            self._adding = Program(self.asked.having(adds=True), self.world)
        loss: torch.Tensor = self._adding(*args, **kwargs)
        self.metrics = self._adding.metrics
        return loss

    def _differentiable(self, session: Session, tensors: list[torch.Tensor], own: Mapping[str, float]) -> Sequence[torch.Tensor]:
        wanting = [(port, tensor) for port, tensor in zip(session.inputs, tensors, strict=True) if tensor.requires_grad]
        inputs = [port for port, _ in wanting]
        call = ForwardCall(session, inputs, self._scales(session), self._times(inputs), own)
        leaves: Sequence[torch.Tensor] = ProgramFunction.apply(call, tensors, *session.trained_tensors, *[tensor for _, tensor in wanting])
        return leaves

    def _scales(self, session: Session) -> dict[str, float | None]:
        """What a gradient of each output is multiplied by, where each rank has a loss of its own part."""
        if self.asked.inputs != "local":
            return {}
        scale = {"mean": 1.0 / self.asked.data_ranks, "sum": 1.0, None: None}[self.options.local_inputs.loss]
        return {port.name: scale for port in session.results if _is_split(port)}

    def _times(self, ports: Sequence[Port]) -> dict[str, float]:
        """What a gradient of each input is multiplied by, so that it is the rank's own loss's, as that which comes in is."""
        if self.asked.inputs != "local" or self.options.local_inputs.loss != "mean":
            return {}
        return {port.name: float(self.asked.data_ranks) for port in ports if _is_split(port)}

    # ------------------------------------------------------------------------------------------------------------------ looking

    @property
    def mesh(self) -> Mesh:
        return self.asked.mesh

    @property
    def plan(self) -> Plan:
        """The plan; what a search has found for axes that were left open, for the call that ran last."""
        return self.compilations.plan

    @property
    def options(self) -> Options:
        return self.asked.options

    @property
    def step(self) -> TrainStep | None:
        return self.asked.step

    @property
    def traced(self) -> TracedFunction:
        return self.asked.traced

    @property
    def timings(self) -> dict[str, float]:
        """Seconds that each pass of the last compilation took; on rank 0, where its program serves all. Beside these, as "values
        looked at in a call", how many values of Python each call looks at, to see that they are as they were (docs/fixed.md)."""
        return {**self.compilations.seconds, LOOKED_AT: float(self.compilations.value_keys.count)}

    @property
    def compiled(self) -> PlainProgram:
        """The compiled program that ran last."""
        return self.compilations.last.program

    @property
    def general(self) -> PlainProgram:
        """The compiled program that serves all dynamic sizes; without any, that is `compiled`."""
        return self.compilations.last.made.program

    @property
    def lowered(self) -> LoweredProgram:
        """What the passes have left of the compiled program, and under which request. On a rank that has its program from rank 0 they run
        for it now, at each use."""
        return self.compilations.last.made.lower_here()

    def __str__(self) -> str:
        return printer.print_program(self.general)

    def summary(self, device: str | None = None) -> str:
        """Tables: parameters with placements and bytes per rank; stages; collectives; memory, by kind, drawn over a call, and the largest
        values when most is there; time, on `device` ("h100") or the mesh's; what was weighed for axes that the plan left open, and tried
        where a pipeline left a choice."""
        made = self.compilations.last.made
        own = summary.summary(self.compiled, device, self.options.budget)
        tables = (own, search_tables.plan_candidates_table(made.weighed), search_tables.stage_candidates_table(made.tried))
        return "\n".join(table for table in tables if table)

    def timeline(self, path: str | Path | None = None) -> Timeline:
        """What a call is predicted to look like: when each rank of the pipeline runs which stage on which microbatch, and what it sends.

        path  a folder, for `timeline.svg` and `timeline.json` (a trace that ui.perfetto.dev shows); or one file, .svg or .json

        The timeline has `events`, `makespan_s`, `bubble` and more. Without a pipeline it has one row, since all ranks do the same.
        MESHC_TRACE writes the same of a real run (docs/pipelines.md). Raises PlanError for a path of another kind.
        """
        line = call_timeline.predict_timeline(self.compiled)
        if path is not None:
            draw.write(line, path)
        return line

    def report(self, path: str | Path, device: str | None = None) -> None:
        """Write one page of HTML that says what was decided and why (docs/report.md): the plan and what was weighed for it, what each axis
        saves and costs, the predicted time and timeline, memory over a call with the ten largest values at the peak, collectives with their
        reasons and lines of the model, modules with how all that they hold lies, equal layers once; with a box that searches it. The page
        needs nothing else, and no network. Times are those of `device` ("h100"), or of the mesh's. Ranks exchange nothing for it: call it
        on one. Raises PlanError for a path that does not end in .html, StateError before anything is compiled, FileError if it cannot be
        written."""
        made = self.compilations.last.made
        found = page.page(self.compiled, self.asked.name, device, self.options.budget, made.weighed, made.tried)
        html.write(found, path)

    def _repr_html_(self) -> str:
        """For notebooks: the head of the report; before anything is compiled what was asked."""
        if not self.compilations.has_compilation:
            return html.asked_html(self.asked.name, str(self.mesh), str(self.plan))
        return html.head_html(page.head(self.compiled, self.asked.name, budget=self.options.budget))

    def explain(self, name: str) -> str:
        """What was chosen for a parameter ("layers.3.mlp.up_proj.weight"), for the operators of a module, or for a line of the printed
        program: how it lies, what it splits, which collectives that causes and what they take. Of a plan that was searched for also the two
        best alternatives, with what each costs more and where that falls. Of a value of forward ("value:layers.3.mlp.act", its name,
        or a line of the model, "model.py:12") whether backward finds it kept, recomputes it or has it fetched from the host: who said so,
        its bytes, what that takes, and which line of a plan would change it. Raises PlanError for a name that nothing has."""
        return explanation.text(explaining.explain_choice(self.lowered, self.general, self.asked.plan, name))

    def prove(self, sizes: Mapping[str, int] | None = None) -> ProgramProof:
        """A proof that what each rank runs is the traced graph of the model, its backward and its update, line by line, at full size and
        without running either (docs/proof.md). `print` it: what was proved and what is trusted, or the first line that is not proved, with
        the traced call that it should be; `holds` says which. Ranks exchange nothing for it: call it on one.

        sizes  of what is open (Options(dynamic=)), by name: it is proved for these, by default for all that the program serves; where
               that is not shown, for those that it was compiled with, and the text says so

        Raises InputError for sizes that the program does not serve."""
        return proving.prove_program(self, sizes)

    def factors(self) -> str:
        """What a plan can name: names, sizes, members."""
        placed = self.lowered.placed
        return summary.factors(placed.names, placed.factors, self.compiled)

    def dump(self, path: str | Path) -> None:
        """Write the program's text after every pass, numbered, into a folder."""
        with calls_allowed(self.asked.module):
            driver.compile_program(self.lowered.request, dump.dumper(path))

    def save(self, path: str | Path, weights: bool = True) -> None:
        """Write the artifact: a folder of texts, JSON and (without a process group, or on rank 0) weights."""
        with self.world.together("save"):
            saving.save(self, path, weights)

    def save_pretrained(self, path: str | Path, **kwargs: Any) -> None:
        """Write a folder that plain transformers loads with `from_pretrained`: configuration, weights in safetensors, and their index
        where there are several. All ranks call it; parameters are gathered one at a time and rank 0, which needs host memory for all of
        them, writes by the model's own `save_pretrained`, which `kwargs` go to (`max_shard_size="2GB"`). A folder that it wrote before is
        replaced once the new one is complete; files in it that are no weights (a tokenizer's) stay.

        Raises StateError for a model without `save_pretrained` and for a folder of something else; FileError if it cannot be written."""
        with self.world.together("save_pretrained"):
            pretrained.save_pretrained(self, path, **kwargs)

    def rebalance(self, loads: rebalancing.Loads | None = None, *, least: float = LEAST, copies: int | None = None) -> RebalanceReport:
        """Move experts between ranks, by what they have to do, so that ranks have as much; with `Experts(copies=)` those with most to
        do are stored on several ranks. Between two steps; all ranks call it.

        loads  by the path of a layer's experts how much each has to do (tokens, over one step or many), the same on every rank: a tensor
               [experts], a list, or what `metrics["experts"]` holds; None: what the last step has measured
        least  a layer's experts move if what the busiest rank has falls by more than this share
        copies how many places of each rank may have copies of others' experts; None: all that there are, 0: none from now on

        Each rank keeps as many experts of a layer as it has. Rows of parameters and of optimizer state are sent to where they are wanted, a
        tensor at a time; programs stay as they are. Parameters, `state_dict` and files have experts in the model's order as before; a
        DTensor of what has moved is a copy, brought up to date by `sync` and `state_dict`, with memory only until the next step.
        Returns what was done, layer by layer; as text, a table.

        Raises StateError without `Experts(placement="movable")`, before a first step if no loads are given, and for optimizer state that
        has no row for each expert; PlanError where no axis splits experts; InputError for loads that do not fit the model."""
        self.world.refuse_call()
        with self.world.together("rebalance"):
            return rebalancing.rebalance(self, loads, least, copies)

    # -------------------------------------------------------------------------------------------------------------------- state

    @property
    def store(self) -> Store:
        if self.compilations.store is None:
            raise StateError("this program has no state yet: it needs a process group, and a first call or example inputs")
        return self.compilations.store

    def state_dict(self, full: bool = False, masked: bool = False) -> dict[str, Any]:
        """Model and optimizer by name, seed and step, as DTensors; with `full`, whole CPU tensors on rank 0; with `masked` too, weights
        under sparse lines have zeros where products do not read them (docs/sparsity.md)."""
        if masked and not full:
            raise StateError("state_dict(masked=True) is of whole tensors\n  what to do: state_dict(full=True, masked=True)")
        with self.world.together("state_dict"):
            state, program = self.store.state_dict(full), self.general
        return mask_state(state, program.info.get("sparse", {})) if masked else state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        with self.world.together("load_state_dict"):
            self.store.load_state_dict(state)

    def init_weights(self, fn: Callable[[nn.Module], object] | None = None) -> None:
        """Give a model its first values, each rank no more than its own part of them: for a model that was built on `meta`, or anew.

        fn  writes the values into the model that it is given; None: the model's own way (`init_weights()`, as transformers has it; else
            `reset_parameters()` of each module, then `_init_weights(module)` of the model). What it leaves alone stays as it is

        Every rank runs `fn`, on tensors without memory, and computes its tiles of what was written, a tensor at a time; so beyond its own
        part a rank needs room for its part of the largest, or for all of one that no part of can be computed alone (`orthogonal_`). Values
        are the same on every mesh, and those that `meshc.init_weights(model, fn, seed=seed)` gives on one device: random calls are
        numbered (docs/randomness.md), with the program's seed. Optimizer state that begins as a copy of a parameter begins again. All
        ranks call it.

        Raises StateError, before anything is changed, if `fn` fails, does something else on another rank, or leaves something of a model
        from `meta` without values; and for a program without a process group."""
        self.world.refuse_call()
        with self.world.together("init_weights"):
            initial_values.init_weights(self.store, fn or model_init.initialise)

    def sync(self) -> None:
        """Bring the live parameters up to date where they do not share memory with the program."""
        with self.world.together("sync"):
            self.store.sync()


def _is_split(port: Port) -> bool:
    return port.sharding is not None and bool(port.sharding.split_axes())
