"""Model on one device, run as the lines of a plan say that change what is computed: what programs are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from meshc.frontend.batch_norms import synced_norms
from meshc.frontend.double_copy import double_by_default
from meshc.frontend.faults import on_one_device
from meshc.frontend.flex_on_cpu import written_out_flex
from meshc.frontend.gradient_hooks import Hooks
from meshc.frontend.reference_random import Microbatch, ReferenceRandom
from meshc.frontend.traced_gradients import RetainedGraphs
from meshc.frontend.train_step import split_result
from meshc.ir import trees
from meshc.ir.functions import Function
from meshc.ir.keys import kind_of, name_of
from meshc.ops.random import seed_step
from meshc.program.microbatch_split import MicrobatchSplit
from meshc.program.program import PlainProgram
from meshc.runtime.simulator.float64_comparison import WidenedConstants, WidenedOperators
from meshc.runtime.simulator.plain_copy import ModelSnapshot
from meshc.runtime.simulator.reference_compression import CompressedGradients
from meshc.runtime.simulator.reference_dtypes import ReferenceDtypes
from meshc.runtime.simulator.reference_formats import FewBits, Formats
from meshc.runtime.simulator.reference_masks import ReferenceMasks
from meshc.runtime.simulator.reference_products import DecodedProducts
from meshc.runtime.simulator.reference_scales import DelayedScales
from meshc.runtime.simulator.reference_stages import RoundedStages
from meshc.runtime.simulator.sensitivity import RoundingPerturbation


@dataclass(frozen=True)
class Reference:
    """The model on one device, as a plain copy, and how to call it.

    parts      cut of the inputs into microbatches, for a step that is their mean
    perturbed  seed of random roundings (`sensitivity.py`), if any
    hooks      hooks on gradients between backward and the optimizer, by parameter
    numbers    Python numbers that are inputs of the program, by name
    formats    of products, as the plan's precision lines say
    masks      of its weights, as the plan's sparse lines say
    scales     of formats that delay them
    compressed what the plan's compress line makes of gradients, if there is one
    stages     what its line about a pipeline makes of values that cross stages, likewise
    eight_bits whether the model itself multiplies 8-bit values, of which a CPU has not all products
    dtypes     in which modules compute, as the plan's compute lines say
    scaler     torch's own, which scales the loss, divides gradients and skips steps
    """

    module: nn.Module
    function: Function
    args: tuple[object, ...]
    kwargs: dict[str, object]
    seed: int = 0
    double: bool = False
    parts: MicrobatchSplit | None = None
    perturbed: int | None = None
    hooks: Mapping[str, Hooks] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    formats: Formats = field(default_factory=dict)
    masks: ReferenceMasks | None = None
    compressed: CompressedGradients | None = None
    eight_bits: bool = False
    stages: RoundedStages | None = None
    dtypes: ReferenceDtypes | None = None
    scaler: torch.amp.GradScaler = field(default_factory=partial(torch.amp.GradScaler, "cpu", enabled=False))
    scales: DelayedScales = field(default_factory=DelayedScales)

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Context of the model and its backward, with the random draws of a step."""
        with self._under(ReferenceRandom(self.seed, step)):
            yield

    def call_model(self) -> object:
        """The model's output for the whole batch; call it, and backward, inside `at`."""
        return self.function(self.module, *self.args, **self.kwargs)

    def inputs(self, program: PlainProgram) -> dict[str, torch.Tensor]:
        """The tensors among the inputs, by the program's names for them."""
        leaves = [leaf for leaf in trees.leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]
        return dict(zip([port.name for port in program.inputs if port.kind == "input"], leaves, strict=True))

    def train(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a step, and its metrics; gradients are added to those of the module.

        If the step is a mean of microbatches, plain accumulation of loss / M.
        """
        if self.parts is None:
            with self.at(step):
                loss, metrics = split_result(self.call_model())
                with nullcontext() if self.compressed is None else self.compressed.watch(self.module):
                    self.scaler.scale(loss).backward()
            self.dense_gradients()
            return loss.detach(), metrics
        drawn = self._draws_of_the_whole(step)
        total = torch.zeros(())
        sums: dict[str, torch.Tensor] = {}
        for index in range(self.parts.count):
            random = ReferenceRandom(self.seed, step, Microbatch(drawn, self.parts.count, index))
            args, kwargs = self.parts.microbatch_inputs((self.args, self.kwargs), index)
            with self._under(random):
                loss, metrics = split_result(self.function(self.module, *args, **kwargs))
                self.scaler.scale(loss / self.parts.count).backward()
            total = total + loss.detach() / self.parts.count
            sums = {name: sums.get(name, 0) + value / self.parts.count for name, value in metrics.items()}
        self.dense_gradients()
        return total, sums

    def dense_gradients(self) -> None:
        """Makes gradients dense, as a program's are, also for `nn.Embedding(sparse=True)`."""
        for parameter in self.module.parameters():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()

    def _draws_of_the_whole(self, step: int) -> list[tuple[str, tuple[int, ...]]]:
        """The random draws of the whole batch. Restores the buffers."""
        before, random = ModelSnapshot(self.module), ReferenceRandom(self.seed, step)
        with torch.no_grad(), self._under(random):
            self.call_model()
        before.put_back()
        return random.drawn

    @contextmanager
    def _under(self, random: ReferenceRandom) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(on_one_device())
            if self.perturbed is not None:
                stack.enter_context(RoundingPerturbation(self.perturbed))
            stack.enter_context(double_by_default(self.double))
            if self.double:
                stack.enter_context(WidenedConstants())
                stack.enter_context(WidenedOperators())
            stack.enter_context(random)
            stack.enter_context(written_out_flex())
            stack.enter_context(synced_norms())
            stack.enter_context(RetainedGraphs())
            if self.formats or self.masks is not None:
                torch.clear_autocast_cache()  # copies of weights that a run before has made are not known in this one
                stack.enter_context(FewBits(self.module, self.formats, self.scales, self.masks, seed_step(random.seed, random.step)))
            if self.eight_bits:
                stack.enter_context(DecodedProducts())
            if self.stages is not None:
                stack.enter_context(self.stages.watch())
            if self.dtypes is not None:  # last, so that those above see the casts
                stack.enter_context(self.dtypes.cast_parameters())
            yield

    def refine_gradients(self) -> None:
        """Makes the gradients those of sparse lines."""
        if self.masks is not None:
            self.masks.refine_gradients()

    def forget_steps(self) -> None:
        """Forgets what earlier steps have left beside parameters and the optimizers' state."""
        self.scales.clear()
        if self.compressed is not None:
            self.compressed.errors.clear()
        if self.masks is not None:
            self.masks.forget_steps()

    def end_step(self) -> None:
        """Does behind an update what sparse lines and delayed scales do."""
        self.scales.end_step()
        if self.masks is not None:
            self.masks.fix_weights()
            self.masks.end_step()

    def state_beside(self, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By name, what steps have left beside parameters and the optimizers' state. `found`: what the program has left, by key."""
        errors = {} if self.compressed is None else self.compressed.errors
        names = [name_of(key) for key in found if kind_of(key) == "state"]
        return errors | self.scales.state(names) | ({} if self.masks is None else self.masks.state(names))
