"""Calls with a key-value cache: padded inputs for the program, and its output cut back to the call's rows and tokens.

    program(input_ids=[3, 40], cache=DynamicCache())      [4, 64], cache=[], cache_length=None; the cache has buffers of 64, 40 in use
    program(input_ids=[3, 1], cache=cache)                [4, 1], cache=[[k, v], ...], cache_length=40

Rows, tokens and buffers are filled up to sizes of which there are few (`meshc/frontend/padded_calls.py`), so that few programs serve all
calls: one for each size of a prompt, one for each size of the buffers. A token that is filled up stands behind the others, where none of
them sees it; what it leaves in a buffer is written over by the next one. (A model with recurrent layers would see it, and so would one
whose rotary frequencies follow the length: their prompts are not filled up.) The output is cut to what was asked for, and the cache in
it is the one that came, which has the new buffers (`meshc/runtime/run/cache_layers.py`). A decoder's encoder, which generate calls by
itself, has no cache: its calls are filled up all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from meshc.api import user_caches
from meshc.api.compile_arguments import Arguments, CompileArguments
from meshc.errors import CaptureError, InputError
from meshc.frontend.libraries import stock_models
from meshc.frontend.libraries.stock_caches import BEGIN, LENGTH, NAMES, can_be_padded
from meshc.frontend.libraries.stock_rope import follows_length
from meshc.frontend.output_tree import AS_PASSED
from meshc.frontend.padded_calls import ALONE, BOTH, ENCODER, SEEN, CallSizes, Table
from meshc.frontend.padded_sizes import capacity_of, rows_of, tokens_of
from meshc.ir import trees
from meshc.runtime.run.session import digest_of

KEPT: Final = "logits_to_keep"
MASK: Final = "attention_mask"
FIRST: Final[Mapping[str, tuple[str, ...]]] = {
    "t": ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds"),
    "s": ("encoder_outputs", "input_ids", "inputs_embeds"),
}
"""Inputs that say how many rows and tokens a call has, the first that there is."""
ADVICE: Final = (
    "\n  why: all ranks work on one sequence, and what a rank has of the cache belongs to the tokens that it was given\n"
    "  what to do: draw the same on every rank, torch.manual_seed(n) before generate; pass the same prompts everywhere"
)

OF_LENGTH: Final = (
    "  beside that: this call hands the model its cache, and one program serves all lengths of it, so that the length is a tensor, as\n"
    "  it is for a StaticCache of transformers. To a model that makes positions of the length pass position_ids, as generate does;\n"
    "  another that takes no StaticCache generates with use_cache=False, a program for each length"
)


UNCACHED: Final = (
    ("it takes gradients, and a cache has none", "call it under torch.no_grad(), as generate does"),
    ("the program takes parts of a batch", 'compile it with inputs="global"'),
    ("its outputs are left as they lie", 'compile it with outputs="plain"'),
    ("sizes are left open by Options(dynamic=...)", "compile the model once more without it, for generation"),
    (
        "its attention is flex_attention, whose mask does not follow a length that is a tensor",
        'load the model with attn_implementation="sdpa" (or "eager")',
    ),
    ("it has labels, and a loss counts every token", "pass the whole sequence, without a cache"),
    ("it says use_cache=False", "leave one of the two out"),
    ("it says return_dict=False, and outputs with a cache have names", "leave it out"),
)
"""Why a call goes with no cache, and what to do, in the order in which `_refuse_calls` asks."""


@dataclass(frozen=True)
class PaddedCall:
    """
    args, kwargs  what the program gets
    table, sizes  what its dims are, and were
    kept          how many tokens have logits
    cache, name   the user's cache, and the argument it came as; None for a call without
    past          how many tokens it held
    first         the token that comes first in buffers of windows
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    table: Table
    sizes: CallSizes
    kept: int = 0
    cache: Any = None
    name: str = NAMES[0]
    past: int = 0
    first: int = 0

    def compared_sizes(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and values that ranks compare before the call: a digest of the tensors, and the number of past tokens."""
        plain = [value for key, value in self.kwargs.items() if isinstance(value, Tensor) and key not in (self.name, LENGTH, BEGIN)]
        return ("a digest of what is passed", "the number of tokens before it"), (digest_of(plain), self.past)

    def crop_output(self, output: Any) -> Any:
        """The output as the model would give it: cut to the call's rows and tokens, with the user's cache. Raises InputError for an
        output that nobody knows how to cut."""
        if self.cache is not None:
            have = self.sizes.have
            left = output[self.name]
            held: Any = self.kwargs[self.name] if left is AS_PASSED else user_caches.held_by(left)
            user_caches.write_back(self.cache, held, have["r"], self.past + have["t"], have.get("s", 0), self.first)
        for name in [name for name in output if name != self.name]:
            output[name] = trees.map_leaves(self.sizes.output_cutter(self.table, name, self.kept), output[name])
        if self.cache is not None:
            output[self.name] = self.cache
        return output


def pad_cached_call(asked: CompileArguments, given: Arguments) -> PaddedCall | None:
    """What a call with a cache, or of an encoder, becomes; None for another. Raises InputError for a cache that no program takes."""
    if asked.path and not asked.by_hand and not stock_models.can_generate(asked.called):
        return _of_encoder(asked, given)
    if not any(map(user_caches.is_cache, (*given[0], *given[1].values()))):
        return None
    _refuse_release()
    name, cache, rest, named = _split_cache(asked, given)
    table = ALONE if not hasattr(cache, "cross_attention_cache") else BOTH if _takes_tokens(asked) else SEEN
    user_caches.refuse_others(cache)
    _refuse_calls(asked, named)
    have = _sizes(named, table)
    past, first = user_caches.length_of(cache), None
    if user_caches.has_windows(cache):
        _refuse_pairs(asked, named, past, past > user_caches.visible_tokens(cache))
    if past and user_caches.rows_in(cache) != have["r"]:
        raise InputError(f"the cache holds {user_caches.rows_in(cache)} rows, and {have['r']} were passed")
    states = user_caches.has_states(cache)
    if states and past and have["t"] > 1:
        raise InputError(
            f"{have['t']} tokens were passed behind a cache that holds some already, and states of recurrent layers take one at a time\n"
            "  what to do: begin with an empty cache and the whole text; do not pass prefill_chunk_size"
        )
    each_counts = states or ((have["t"] > 1 or "s" in have) and follows_length(asked.called))  # a token alone is filled up with none
    filled = _padded_sizes(asked, named, table, have, past, each_counts)
    buffers: list[Any] | dict[str, Any] = {} if states else []
    if past:
        if asked.mesh.device_mesh is None:
            raise InputError(
                f'a cache that holds tokens lies on ranks, and meshc.Mesh("{asked.mesh}") has none\n'
                "  what to do: pass an empty cache, DynamicCache(), or compile with a DeviceMesh under torchrun"
            )
        buffers, first = user_caches.buffers_of(cache, asked.mesh.device_mesh, filled["r"], past + filled["t"], filled.get("s", 0))
        filled["k"] = user_caches.capacity_in(buffers) or capacity_of(past + filled["t"], 0, -1)
    sizes = CallSizes({**have, "k": past + have["t"]}, {"k": filled["t"], **filled})
    if table is BOTH and named.get(MASK) is None:
        named[MASK] = torch.ones(have["r"], have["s"], dtype=torch.int64)
    call = {key: sizes.pad_input(table, key, value) for key, value in named.items()}
    kept = named.get(KEPT, 0)
    if isinstance(kept, int) and kept and have["t"] > 1:
        call[KEPT] = torch.arange(max(have["t"] - kept, 0), have["t"])
    call |= {name: buffers, LENGTH: torch.tensor(past) if past else None}
    if first is not None:
        call[BEGIN] = torch.tensor(first)
    return PaddedCall(rest, call, table, sizes, kept if isinstance(kept, int) and kept else have["t"], cache, name, past, first or 0)


@contextmanager
def explain_refusal(kwargs: Mapping[str, object]) -> Iterator[None]:
    """A context for compiling: what a model refuses of a call with a cache is said to be of that."""
    try:
        yield
    except CaptureError as error:
        if kwargs.get(LENGTH) is not None:
            error.args = (f"{error}\n{OF_LENGTH}",)
        raise


def _by_name(asked: CompileArguments, given: Arguments) -> tuple[list[str], dict[str, object], tuple[object, ...]]:
    """Names that the model's forward has for its arguments, what was given by name, and what it has no names for."""
    takes, (args, kwargs) = [parameter.name for parameter in asked.traced.parameters or ()], given
    return takes, {**dict(zip(takes, args, strict=False)), **kwargs}, args[len(takes) :]


def _of_encoder(asked: CompileArguments, given: Arguments) -> PaddedCall | None:
    takes, named, rest = _by_name(asked, given)
    reads = MASK in takes and any(named.get(name) is not None for name in FIRST["s"])  # of sound and pictures each size is a program
    if not reads or asked.inputs != "global" or _takes_gradient(asked):
        return None
    have = _sizes(named, ENCODER)
    sizes = CallSizes(have, _padded_sizes(asked, named, ENCODER, have, 0, follows_length(asked.called)))
    if named.get(MASK) is None:
        named[MASK] = torch.ones(have["r"], have["s"], dtype=torch.int64)
    return PaddedCall(rest, {key: sizes.pad_input(ENCODER, key, value) for key, value in named.items()}, ENCODER, sizes)


def _sizes(named: Mapping[str, object], table: Table) -> dict[str, int]:
    """Rows and tokens of a call, by letter. Raises InputError for one without tokens."""
    found: dict[str, int] = {}
    for letter, names in FIRST.items():
        for name in names:
            if table.inputs.get(name) == f"r{letter}" and named.get(name) is not None:
                first = next((leaf for leaf in trees.leaves(named[name]) if isinstance(leaf, Tensor)), None)
                if first is None or first.dim() < 2:
                    raise InputError(f"{name} has rows and tokens, [rows, tokens]")
                found |= {"r": int(first.shape[0]), letter: int(first.shape[1])}
                break
    wanted = {letters[1] for letters in table.inputs.values()} - {"."}
    if missing := wanted - found.keys():
        ways = " or ".join(name for name, letters in table.inputs.items() if letters[1] in missing)
        raise InputError(
            f"a call with a cache takes tokens, [rows, tokens]: {ways}\n"
            "  what to do: pass what the model's own generate passes; of sound or pictures encoder_outputs, which model.get_encoder() makes"
        )
    return found


def _padded_sizes(
    asked: CompileArguments, named: Mapping[str, object], table: Table, have: Mapping[str, int], past: int, each_counts: bool = False
) -> dict[str, int]:
    """What rows and tokens are filled up to; what they are, where an input has dims that nobody knows. each_counts: tokens stay as many,
    since any one changes states of recurrent layers, or frequencies that follow the length."""
    known = {*table.inputs, *table.masks, KEPT}
    if any(_holds_tensors(value) for key, value in named.items() if key not in known):
        return dict(have)
    if each_counts:
        return {**have, "r": rows_of(have["r"], asked.mesh.data_ranks)}
    most = _positions(asked)
    as_they_are = "rs" if table is SEEN else "r"
    filled = {letter: tokens_of(have[letter], most - (past if letter == "t" else 0)) for letter in have if letter not in as_they_are}
    return {**have, "r": rows_of(have["r"], asked.mesh.data_ranks), **filled}


def _holds_tensors(value: object) -> bool:
    """Whether it is a tensor or a tree of some: of images a dict of what their encoder has made."""
    is_tree = isinstance(value, Mapping | list | tuple)
    return isinstance(value, Tensor) or is_tree and any(isinstance(leaf, Tensor) for leaf in trees.leaves(value))


def _takes_tokens(asked: CompileArguments) -> bool:
    """Whether the model's encoder takes tokens, which a mask says there are; one of sound or pictures takes something else."""
    return getattr(asked.called, "main_input_name", "input_ids") == "input_ids"


def _split_cache(asked: CompileArguments, given: Arguments) -> tuple[str, Any, tuple[object, ...], dict[str, object]]:
    """The cache, the argument it is, and the other arguments, by name where the model's forward has names for them."""
    takes, named, rest = _by_name(asked, given)
    found = [key for key, value in named.items() if user_caches.is_cache(value)]
    name = next((one for one in NAMES if one in takes), NAMES[0])
    if len(found) != 1 or found[0] not in NAMES or asked.step is not None:
        raise InputError(
            f"a program takes one cache, as {name}; this call has one as {', '.join(found)}\n"
            "  what to do: pass what the model's own generate passes"
        )
    cache = named.pop(found[0])
    return name, cache, rest, named


def _refuse_release() -> None:
    """Raises InputError under a transformers whose caches are made otherwise."""
    if not can_be_padded():
        import transformers

        raise InputError(
            f"this call has a cache, and a program takes caches of transformers 5.23 or later: {transformers.__version__} is installed\n"
            "  what to do: pip install -U transformers; or generate(..., use_cache=False), which compiles a program for each length"
        )


def _takes_gradient(asked: CompileArguments) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in asked.module.parameters())


def _refuse_calls(asked: CompileArguments, named: Mapping[str, object]) -> None:
    """Calls that no cache goes with. Raises InputError."""
    wrong = (
        _takes_gradient(asked), asked.inputs != "global", asked.outputs != "plain", bool(asked.dynamic),
        "flex_attention" in _attentions(asked), named.get("labels") is not None, named.get("use_cache") is False,
        named.get("return_dict") is False,
    )  # fmt: skip
    if any(wrong):
        whys, cures = zip(*(told for told, is_so in zip(UNCACHED, wrong, strict=True) if is_so), strict=True)
        raise InputError(f"this call has a cache, and cannot: {'; '.join(whys)}\n  what to do: {'; '.join(cures)}")


def _refuse_pairs(asked: CompileArguments, named: Mapping[str, object], past: int, beyond: bool) -> None:
    """What is said of pairs of tokens, where layers have windows whose buffers do not hold all. Raises InputError."""
    if past and any(isinstance(leaf, Tensor) and leaf.dim() == 4 for leaf in trees.leaves([named.get(mask) for mask in ALONE.masks])):
        raise InputError(
            "a mask of pairs of tokens was passed behind a cache of layers with windows, which do not hold all tokens\n"
            "  what to do: pass a mask of tokens, [rows, tokens], or none"
        )
    shows = named.get("output_attentions", getattr(_text_config(asked), "output_attentions", False))
    if beyond and shows:
        raise InputError(
            "output_attentions was asked for behind a cache of layers with windows, which no longer hold all tokens\n"
            "  what to do: leave it out; or call the model on the whole text, without a cache"
        )


def _attentions(asked: CompileArguments) -> set[str]:
    """By which of transformers' attentions the model attends, and its decoder of text."""
    return {str(getattr(one, "_attn_implementation", "")) for one in (getattr(asked.called, "config", None), _text_config(asked))}


def _positions(asked: CompileArguments) -> int:
    """How many positions the model has, as far as its configuration says."""
    return int(getattr(_text_config(asked), "max_position_embeddings", None) or 1 << 62)


def _text_config(asked: CompileArguments) -> Any:
    config: Any = getattr(asked.called, "config", None)
    try:
        return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    except ValueError:  # it has several texts
        return config
