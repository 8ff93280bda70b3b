"""Errors for models that cannot be traced as one graph, in the user's terms: torch's error becomes one with the user's line and advice.

Advice is data, first match first. Code that torch traces and no program can have, a value or a size that depends on tensor values, is
searched for in the graph.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch.fx import GraphModule, Node

from meshc.errors import CaptureError, InputError, MeshcError
from meshc.frames import is_torch, is_users
from meshc.frontend.admission import does_not_bind
from meshc.frontend.in_place_changes import changed_operand
from meshc.frontend.known_outcomes import is_sized_by_values
from meshc.frontend.selected_places import is_by_mask, is_unbacked
from meshc.frontend.selected_rows import STOPPED
from meshc.frontend.sources import bodies_of, source_of
from meshc.ir import Source
from meshc.private import FakeTensor, HigherOrderOperator

GRADIENTS: Final = ("grad", "_autograd_grad")
"""Names of calls that take gradients in a graph, torch.func's last."""

Frame = tuple[str, int, str]
"""File, line, function."""

_KEEP: Final = (
    "keep it a tensor: one of no dims adds, multiplies and compares as a number does; or compute the number outside the model and pass it "
    "as an argument"
)
_FIXED: Final = (
    "keep the size fixed: torch.where(mask, x, 0), or x * mask with sums divided by mask.sum(); sizes that data decides are made outside "
    "the model"
)
_BRANCH: Final = (
    "replace the branch by torch.where, or compute the condition outside the model; where it asks for a flag that is set once and kept in "
    "a buffer, give the module the flag itself before compiling: flag = bool(module.flag); del module.flag; module.flag = flag"
)
_BRANCHES: Final = r"^(cond|while_loop|scan|associative_scan|map_impl)$"
_TRY_IT: Final = (
    "call the model itself with these inputs: if it raises the same, their shapes or dtypes do not fit the model; if it does not, write "
    "that line in another way, or outside of the model"
)
_OTHERWISE: Final = (
    "write that line in another way, or outside of the model: torch's tracer does not take it, and so refuses "
    "torch.export.export(model, args, strict=True)"
)
_SPLITTING: Final = (
    "take it out: meshc calls backward and the optimizer itself (meshc.TrainStep); a gradient that the model needs for itself is "
    "torch.autograd.grad(y.sum(), x, create_graph=True)"
)

RANDOMNESS: Final = (
    'say whether each draws for itself, torch.vmap(..., randomness="different"), or one draw is for all, randomness="same" (jacfwd takes '
    "it too; hessian(f) is jacfwd(jacrev(f)), and jacrev of jacrev needs none); or draw outside, and pass it in"
)
_OWN: Final = "docs/add-a-rule.md has an example"

OF_LIBRARIES: Final[tuple[tuple[str, str], ...]] = (
    (r"cheb_conv\.py", (
        "give lambda_max in the call (2.0 for normalization=\"sym\"), and in a copy of the layer write torch.where(loop_mask, "
        "edge_weight - 1, edge_weight): no maximum is taken over edges that are selected, and none are selected again"
    )),
    (r"cluster_gcn_conv\.py", (
        "in a copy of the layer write torch.where(row == col, edge_weight + self.diag_lambda * deg_inv[col], edge_weight)"
    )),
    (r"rgcn_conv\.py|torch_geometric/nn/dense/linear\.py", (
        "set torch_geometric.backend.use_segment_matmul = False, and give a HeteroLinear sorted types and is_sorted=True: which kernel is "
        "faster is asked of how many rows each type has"
    )),
    (r"torch_geometric/utils/(_scatter|_to_dense_batch)\.py|hypergraph_conv\.py", (
        "say how many there are: size= of a pooling, batch_size= and max_num_nodes= of to_dense_batch, num_edges= of a HypergraphConv's "
        "call; a model that pools by itself takes batch_size=, or is copied with such a line"
    )),
    (r"torch_geometric/utils/loop\.py|self_loops\(", (
        "add self-loops before the call (torch_geometric.utils.add_remaining_self_loops(edge_index, num_nodes=n)), and build the layer "
        "with add_self_loops=False: how many of a graph's edges are such loops, its values say"
    )),
    (r"transformer_lumina2\.py", (
        "where all prompts have one length, write [attention_mask.shape[1]] * len(attention_mask) for attention_mask.sum(dim=1).tolist(); "
        "how long a row of the model is follows from that list"
    )),
    (r"valid_prompt_token_indices", (
        "give the model a processor of your own (set_attn_processor) that takes all tokens of a prompt and masks: "
        "F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :]), the mask with ones for the picture's tokens"
    )),
)  # fmt: skip
"""(pattern of a library's file or code, what to do)."""
ADVICE: Final[tuple[tuple[str, str], ...]] = (
    *OF_LIBRARIES,
    (r"randomness error mode", RANDOMNESS),
    (r"would mutate a captured Tensor", (
        "give the function what it changes as an argument; batch norm, whose statistics a call in training changes, through "
        "torch.func.functional_call with the buffers, or without any (torch.func.replace_all_batch_norm_modules_), or in evaluation"
    )),
    (r"_fw_primal|_autograd_grad at", (
        "write torch.func.jacrev for jacfwd: torch does not trace tangents of gradients for all directions at once; or "
        "torch.func.jvp for the directions that are needed"
    )),
    (r"must override the setup_context|TransformType\.\w+", (
        "no transform of torch.func goes through that call; torch.autograd.grad(y.sum(), x, create_graph=True) with x.requires_grad_() "
        "gives the same gradient, in a program as on one device"
    )),
    (r"Batching rule not implemented", (
        "torch's vmap has no form of that operator: call it with the rows as a batch, outside of vmap; or write it out in others"
    )),
    (r"forward AD with", (
        "torch has no tangents of that operator: take the derivative backwards (torch.func.vjp, jacrev, grad), or write the operator out "
        "in others"
    )),
    (r"\bfunctionalize\(", "leave functionalize out, and call the function itself: a program has no changes in place of the model's own"),
    (r"\blinearize\(", "y, tangent = torch.func.jvp(f, (x,), (v,)) for each v that torch.func.linearize's function would be called with"),
    (r"no fake impl registered", f"give the operator a fake (register_fake), which says what it makes of which shapes; {_OWN}"),
    (r"pack_padded_sequence|pad_packed_sequence|PackedSequence", (
        "give the layer the padded tensor, and mask what is beyond each length: out, _ = rnn(x); "
        "torch.where((torch.arange(x.shape[1]) < lengths[:, None])[..., None], out, 0)"
    )),
    (r"Tensor\.backward\(\)|autograd\.backward", _SPLITTING),
    (r"appears to not have been used in the graph", (
        "allow_unused=True gives None for it; if it is used, x.requires_grad_() has to stand before what is computed of x, and "
        "torch.func.grad and torch.func.vjp take that as a function of x"
    )),
    (r"tensors does not require grad|differentiated Tensors does not require grad", (
        "under torch.no_grad(), put what is differentiated and the call into `with torch.enable_grad():`, and x.requires_grad_() before "
        "both; or write torch.func.grad(lambda x: model(x).sum())(x), which needs neither"
    )),
    (r"\bVariable\(", "write x.detach().requires_grad_() for Variable(x, requires_grad=True)"),
    (r"compute_mask_indices|compute_num_masked_span", (
        "set mask_time_prob and mask_feature_prob to 0 in the model's configuration (model.config.apply_spec_augment = False): which spans "
        "are masked is drawn outside of torch; masks that the model takes as mask_time_indices may be drawn before the call"
    )),
    (r"loss_for_object_detection|HungarianMatcher|linear_sum_assignment", (
        "compile the model without labels, and call its loss (model.loss_function) on what the program gives: which box belongs to which "
        "label is found outside of torch, from values"
    )),
    (r"/models/detection/", (
        "compile the part of fixed sizes, meshc.compile(model.backbone, mesh, args=(images,)) with images as the model's transform stacks "
        "them, and call the model as before: how many boxes there are is found from values"
    )),
    (r"layer_?drop", (
        "set layerdrop (encoder_layerdrop, decoder_layerdrop) to 0 in the model's configuration: which layers run must not be drawn from "
        "call to call"
    )),
    (r"RandomValueSource|Random\.random", (
        "draw by torch (torch.rand([])), whose numbers are drawn anew in each call; a branch on what Python's random gives cannot be held "
        "by a program: in a stock model set layerdrop and the like to 0, or call it in evaluation mode"
    )),
    (r"Eq\(u\d+, u\d+\)", (
        "give the mask a name and select by that (keep = labels >= 0; a[keep], b[keep]): of two masks torch does not know that they select "
        "as many"
    )),
    (r"[Dd]ata-dependent branching|Data.dependent jump|Caused by: if ", _BRANCH),
    (r"ToFloat\(u\d+\)", _KEEP),
    (r"tolist\(\)|\.item\(\)|unbacked symbols", _KEEP),
    (r"[Dd]ata.dependent|GuardOnDataDependent|Dynamic shape operator", _FIXED),
    (r"backwards? hooks", (
        "take hooks of whole modules (register_full_backward_hook) out; of a parameter's gradient: parameter.register_hook, which a "
        "step runs; of that of a value within forward, or of what the model returns: h.register_hook there"
    )),
    (r"Shape mismatch with out=", "leave out= out, y = torch.mm(a, b), or give it a tensor that has the result's shape"),
    (r"data_ptr", "take the address out of the model: a traced tensor has none"),
    (r"requires_grad_\(\).* by a functorch transform", (
        "leave requires_grad_() out of what a transform of torch.func is given: it takes the gradient of its function's arguments; or "
        "take the gradient by torch.autograd.grad, without the transform"
    )),
    (r"requires_grad_\(\)", "set requires_grad on the input before the call, or on parameters"),
    (r"not linked with support for cuda|device mismatch|Torch not compiled with CUDA", (
        "make tensors on the device of an input or a parameter (device=x.device), and leave out .cuda() and .to(\"cuda\"): a program "
        "places them itself"
    )),
    (r"Generator reconstruction", "return a list or a tuple, not a generator"),
    (r"copy\.deepcopy", "copy tensors by x.clone(); a stock model that copies its cache is trained with use_cache=False"),
    (r"duplicate tensor input", "give a function of autograd each tensor once, and a copy (x.clone()) the second time"),
    (r"breakpoint|pdb", "take the breakpoint out; MESHC_DUMP shows what each pass leaves"),
    (r"is_dependent", "leave validate_args out: what a distribution checks of its arguments reads values, and is left out of a trace"),
    (r"Failed to trace builtin operator|marked as skipped|Unsupported", (
        "take that call out of forward (files, threads, clocks, other libraries are no part of a program), or do it outside the model"
    )),
)  # fmt: skip
"""(pattern of the tracer's message, what to do)."""

CONTENT: Final[tuple[tuple[str, str, str], ...]] = (
    (r"^(wrapped_)?(item|__int__|__float__|__bool__|__index__|_local_scalar_dense|tolist|sym_\w+|int|float|bool)$",
     "reads a number out of a tensor", _KEEP),
    (_BRANCHES, "runs code by what a tensor holds", (
        "compute both ways and take torch.where, or write a loop of fixed length in Python"
    )),
    (r"repeat_interleave", "repeats rows as often as a tensor says", (
        "give output_size=... and the counts as integers, or repeat outside the model"
    )),
    (r"^bincount\b", "makes a tensor as long as the largest value says", (
        "say how long it is: torch.nn.functional.one_hot(x, n).sum(0); with weights torch.zeros(n).index_add(0, x, weights)"
    )),
    (r"^histogram(dd)?\b", "counts by a kernel that has no shapes without values", (
        "torch.histc(x, bins, low, high) gives the counts, torch.linspace(low, high, bins + 1) where they end"
    )),
    (r"unique", "makes a tensor whose size depends on which values are equal", "find unique values outside the model"),
    (r"", "makes a tensor whose size depends on the values of another", _FIXED),
)  # fmt: skip
"""Calls whose value or size depends on tensor values: (pattern of the call's name, what it does, what to do)."""

_BY_VALUES: Final = r"^(bincount|histogram|histogramdd)\b"
"""Calls whose result has no known shape before the values, even where the model implies one: bincount(x).view(8)."""


UNBOUND: Final = r"failed to bind arguments|raised exception TypeError\(.*argument"
"""Dynamo's words for arguments that a function does not take; the second from torch 2.14 on."""
NOT_RUN: Final = r"\A.*when making fake tensor call|raised exception RuntimeError\(['\"]Dynamo failed to run FX node"
"""Its words for an operator that does not take its operands; the second for some from torch 2.14 on."""


def explain_error(error: Exception, signature: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> MeshcError:
    """The error to raise for an error of torch's tracer."""
    if isinstance(error, MeshcError):
        return error
    text = str(error)
    unfit = does_not_bind(signature, args, kwargs) if re.search(UNBOUND, text) else ""
    foreign = re.search(r"inputs with type `<class '([^']+)'>` is not supported", text)
    if foreign:
        name = foreign[1].rsplit(".", 1)[-1]
        unfit = (
            f"an input is a {name}, a class that torch cannot take apart\n  what to do: pass its tensors as arguments; or register it: "
            f"torch.utils._pytree.register_dataclass({name}) or register_pytree_node"
        )
    if unfit:
        return InputError(unfit)
    frame = user_frame(text, [(f.filename, f.lineno or 0, f.name) for f in getattr(error, "real_stack", None) or ()])
    where = f"\n  in your model: {frame}" if frame else ""
    returned = _output_message(text)
    if returned:
        return CaptureError(returned)
    raised = re.search(r"raised exception (\w+)\((?:[(\[]+ConstantVariable\(str: )?(['\"])(.*)\2\)", text)  # in brackets in torch 2.11
    lines = [line for line in text.splitlines() if line.strip()]
    if raised and raised[1] in (kind.__name__ for kind in MeshcError.__subclasses__()):  # raised by a replacement of a part of the model
        said, _, advice = raised[3].partition("; what to do: ")
        return CaptureError(f"{said}{where}" + (f"\n  what to do: {advice}" if advice else ""))
    refused = re.search(NOT_RUN, text) is not None
    raised = None if refused else raised
    reason = f"it raises {raised[1]}: {raised[3]}" if raised else lines[0] if lines else type(error).__name__
    if refused and "no fake impl registered" in text:
        reason = f"{_innermost(error)}".split(". ")[0]
    elif refused:
        inner = str(_innermost(error))
        got = re.search(r": got \w+\((['\"])(.*)\1\)", inner, re.DOTALL)
        reason = f"an operator does not take what it is given: {got[2] if got else inner}"
    seen = _code(error) if raised else f"{reason}\n{text}\n{_code(error)}"
    advice = next((advice for pattern, advice in ADVICE if re.search(pattern, seen)), _TRY_IT if refused or raised else _OTHERWISE)
    return CaptureError(f"the model cannot be traced as one graph: {reason}{where}\n  what to do: {advice}")


def refuse_no_gradient(error: RuntimeError, graph: GraphModule) -> None:
    """Raises CaptureError if autograd reached an operator without a gradient: one of the user's, or the backward of another."""
    found = re.search(r"backward through (\S+) but no autograd formula|derivative for '?([\w:]+)'? is not implemented", str(error))
    if found is None:
        return
    name = (found[1] or found[2]).removesuffix(".default")
    gradients = [node for node in graph.graph.nodes if _name(node) in GRADIENTS]
    if name.endswith("_backward") and gradients:
        lines = dict.fromkeys(f"\n  in your model: {_place(source_of(node))}" for node in gradients)
        raise CaptureError(
            f"a gradient that the model takes is itself differentiated, and {name} has no gradient{''.join(lines)}\n"
            f"  why: it goes through {re.sub(r'^_|_backward$', '', re.split('[.:]+', name)[-1])}, which has no second derivative\n"
            "  what to do: write that operator out in others (products, sums, exp); or, where nothing is trained through the gradient, "
            "leave create_graph=True out, or .detach() it"
        ) from error
    source = next((source_of(node) for node in graph.graph.nodes if str(node.target).removesuffix(".default") == name), None)
    where = f" at {source}" if source is not None and source.file else ""
    raise CaptureError(
        f"{name}{where} has no gradient, and what takes one depends on it\n  what to do: give the operator one (register_autograd), an "
        f"operator itself if it is to be split ({_OWN}); or call it under torch.no_grad()"
    ) from error


def refuse_changed(error: RuntimeError, graph: GraphModule) -> None:
    """Raises CaptureError, with the lines of such changes, if backward reads a value that the model has changed in place since."""
    found = re.search(r"modified by an inplace operation: \[[\w.]+ \[([\d, ]*)\]\]", str(error))
    if found is None:
        return
    shape = tuple(int(size) for size in found[1].split(",") if size.strip())
    pairs = [(node, changed_operand(node)) for body in bodies_of(graph) for node in body.graph.nodes]
    lines = dict.fromkeys(f"\n  {_place(source_of(node))}" for node, operand in pairs if operand is not None and _shape(operand) == shape)
    raise CaptureError(
        f"the model changes a tensor of shape {list(shape)} in place that backward reads{''.join(lines)}\n"
        "  why: torch's autograd refuses that, in a call of the model itself too\n"
        "  what to do: make a new tensor there (x = x + y for x += y), or change a copy (x.clone()); in training also use_cache=False"
    ) from error


def _shape(node: Node) -> tuple[int, ...] | None:
    value = node.meta.get("example_value", node.meta.get("val"))
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


@contextmanager
def without_log_echo() -> Iterator[None]:
    """A context for a trace, without torch's log message beside an error that it raises."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_is_no_echo)
    try:
        yield
    finally:
        log.removeFilter(_is_no_echo)


def _is_no_echo(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def _output_message(text: str) -> str:
    """The message for an output of a class that torch cannot flatten; "" for any other error."""
    found = re.search(r"unrecognized type (\w+)\((\w*)\) at output", text)
    if found is None:
        return ""
    name = found[2] or found[1].removesuffix("Variable").lower()
    advice = f"torch.utils._pytree.register_dataclass({name}) if it is a dataclass; or return a tuple, a dict or a ModelOutput"
    return f"the model returns a {name}, a class whose fields torch does not know\n  what to do: {advice}"


def _innermost(error: BaseException) -> BaseException:
    inner = error.__cause__ or error.__context__
    return error if inner is None else _innermost(inner)


def _code(error: Exception) -> str:
    """The text of the user's line, which often says more than the tracer's message."""
    frames = [frame for frame in getattr(error, "real_stack", None) or () if not is_torch(frame.filename)]
    return str(frames[-1].line or "") if frames else ""


def user_frame(text: str, further: Sequence[Frame] = ()) -> str:
    """The innermost frame of the user's own code in a message, as text, or "". `further` frames come after those of the text."""
    shown = [(file, int(line), name) for file, line, name in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)]
    users = [f"{file}:{line} in {name}" for file, line, name in (*shown, *further) if is_users(file)]
    return users[-1] if users else ""


def refuse_values(graph: GraphModule) -> None:
    """Raises CaptureError, with each first such call, if a value or a size of the graph depends on tensor values."""
    calls = [node for body in bodies_of(graph) for node in body.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    unbacked = [node for node in calls if is_unbacked(node) and not any(map(is_unbacked, node.all_input_nodes))]
    by_values = [node for node in calls if node.op != "call_module" and _is_by_values(node) and not is_unbacked(node)]
    branching = [
        node
        for node in graph.graph.nodes
        if isinstance(node.target, HigherOrderOperator) and re.search(_BRANCHES, node.target.name())
    ]
    faults = [_content(node) for node in (*unbacked, *by_values, *branching)]
    if faults:
        raise CaptureError(
            "the model cannot be compiled, since tensors decide what it computes:\n  "
            + "\n  ".join(dict.fromkeys(faults))
            + "\n  why: each rank runs the same list of operators with sizes known beforehand, and no rank sees all values"
        )


def _is_by_values(node: Node) -> bool:
    """Whether values say of what size the result is, although a trace has given it one."""
    sized = is_sized_by_values(node) and _name(node) != "getitem" and node.kwargs.get("output_size") is None
    return sized or is_by_mask(node) or re.search(_BY_VALUES, _name(node)) is not None


def _content(node: Node) -> str:
    name = _name(node)
    does, advice = next((does, advice) for pattern, does, advice in CONTENT if re.search(pattern, name))
    call = "indexing with a mask" if name == "getitem" else f"{name}()"
    source = source_of(node)
    there, why = node.meta.get(STOPPED, (node, ""))
    seen = f"{source.file} {source.code} {source_of(there).file}"
    advice = next((said for pattern, said in OF_LIBRARIES if re.search(pattern, seen)), advice)
    line = _place(source_of(there))
    at = f" at {line}" if source_of(there).file and line != _place(source) else ""
    further = f", and{at} {why}" if why else ""
    return f"{_place(source)}: {call} {does}{further}; what to do: {advice}"


def _place(source: Source) -> str:
    place = f"{source.file}:{source.line}" if source.file else str(source)
    return f"{place} `{source.code}`" if source.code else place


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def refuse_change_in_place(kind: str, name: str, trainable: Collection[str]) -> None:
    """Refuses changes in place of inputs, of constants, and of parameters in training. Raises CaptureError."""
    if kind == "constant":
        raise CaptureError(
            f"the model changes a tensor in place ({name}) that is neither its parameter nor its buffer; a program holds it as a constant\n"
            "  what to do: make it a buffer (register_buffer)"
        )
    if kind == "input":
        raise CaptureError(
            f"the model changes its input {name} in place; a program takes its inputs as they are and gives them back unchanged\n"
            f"  what to do: work on a copy in the model ({name} = {name}.clone()), or return the new value"
        )
    if kind == "parameter" and name in trainable and torch.is_grad_enabled():
        raise CaptureError(
            f"the model changes its parameter {name} in place while it is differentiated\n"
            "  what to do: change it outside the model between calls, or keep it as a buffer"
        )


def refuse_array(graph: GraphModule, target: str) -> None:
    """Refuses a numpy array that is no argument: in a trace it is a tensor without values. Raises CaptureError."""
    held = getattr(graph, target)
    reader = next((user for node in graph.graph.find_nodes(op="get_attr", target=target) for user in node.users), None)
    if not isinstance(held, FakeTensor) or reader is None:
        return
    raise CaptureError(
        f"the model reads an array of numpy's, of shape {list(held.shape)}, that is not among its arguments\n"
        f"  in your model: {source_of(reader)}\n"
        "  why: a trace makes a tensor of it that has no values\n"
        "  what to do: make it a tensor outside of the model, torch.from_numpy(array), and a buffer if it changes (register_buffer)"
    )
