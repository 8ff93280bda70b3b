"""`generate` with separate rows on each rank: prompts are gathered, and each rank gets back the tokens of its own rows.

    rank 0: model.generate(input_ids [2, 7], attention_mask)      both ranks: the model's own generate of [5, 9], the program's
    rank 1: model.generate(input_ids [3, 9], attention_mask)      calls of which split rows over the data axes; 2 rows, and 3, come back

A rank alone cannot: tokens come one by one, and a rank whose rows end sooner would leave the others waiting. Prompts of other lengths are
filled up as a collator does it: behind, where an encoder reads them, and else in front, with a mask.

Drawn tokens are those that each rank would have drawn for its rows alone, whatever its seed. The states of all ranks' generators come with
the prompts, every rank draws for all of them, and its own generator goes on behind the last draw that its rows needed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshc.api.compile_arguments import CompileArguments
from meshc.api.world import World
from meshc.errors import InputError, StateError
from meshc.frontend.libraries.stock_models import can_generate
from meshc.replacements import replace_for_good, replace_targets
from meshc.runtime.comm import collectives

MASK: Final = "attention_mask"
TOKENS: Final = ("inputs", "input_ids", MASK)
"""Inputs that are filled up."""
STATE: Final = "state of the generator"
"""Beside the prompts, what comes of each rank."""
Prompts = dict[str, Any]


class Generate:
    """Stands in the instance for `generate` of a model whose program takes parts of a batch."""

    def __init__(self, generate: Callable[..., Any]) -> None:
        self._generate = generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Generate:
        return Generate(_of_copy)

    def __reduce__(self) -> NoReturn:
        raise StateError("a compiled model is not pickled\n  what to do: program.save_pretrained(directory) on every rank")


def _of_copy(*args: Any, **kwargs: Any) -> NoReturn:
    raise StateError(
        "this is a copy of a compiled model, and has no program to generate by\n"
        "  what to do: compile the copy, meshc.compile(copy, mesh, ...); or `del copy.generate`, where it has whole plain parameters"
    )


def stand_in(model: nn.Module, generate: Callable[..., Any]) -> None:
    """From here on the model generates so, if it generates by transformers' own code."""
    if can_generate(model):
        replace_for_good("generation", Generate(generate), model)


def own(model: nn.Module) -> Callable[..., Any] | None:
    """The model's own `generate`, whatever stands in the instance for it."""
    found, kind = getattr(model, "generate", None), cast(Any, type(model))
    return kind.generate.__get__(model) if isinstance(found, Generate) else found


def of_parts(asked: CompileArguments, world: World, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the model's own `generate` gives of this rank's rows, generated with those of all ranks. All ranks call it, each with a row at
    least. Raises InputError for prompts that do not go together."""
    with world.refusable():
        given = _bind_prompts(args, kwargs)
        mine = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.dim()}
    rest = {name: value for name, value in given.items() if name not in mine}
    parts = asked.mesh.data_groups()
    device, place = next(iter(mine.values())).device, next(at for at, ranks in enumerate(parts) if dist.get_rank() in ranks)
    with world.failure_guard("bring prompts together"):
        all_ranks = _gather_prompts(world, {STATE: _states(device).get_rng_state(), **{name: x.cpu() for name, x in mine.items()}})
        told = [all_ranks[ranks[0]] for ranks in parts]  # those that have the same part pass the same
        states = [one.pop(STATE) for one in told]
        _refuse_unlike(told)
        before = max(_length(one) for one in told) - _length(mine)
        whole = {name: torch.cat(rows).to(device) for name, rows in _pad_prompts(model, told).items()}
    counts = [len(next(iter(one.values()))) for one in told]
    generate: Any = own(model)
    with _draw_by_parts(states, counts, place, device) as drawn:
        tokens = generate(**whole, **rest)
    if not isinstance(tokens, Tensor):
        raise InputError(
            "tokens alone come back of a batch that ranks have parts of\n  what to do: leave return_dict_in_generate out; or compile with "
            'inputs="global", and pass all prompts on every rank'
        ).mark_everywhere()
    times = len(tokens) // sum(counts)
    begin = sum(counts[:place]) * times
    found = tokens[begin : begin + counts[place] * times, 0 if _encodes(model) else before :]
    if len(drawn) > 1:
        _states(device).set_rng_state(drawn[_draws(found, len(drawn) - 1, _ends(model, rest))])
    return found


def _states(device: torch.device) -> Any:
    """Module with get_rng_state and set_rng_state for a device."""
    return torch if device.type == "cpu" else torch.get_device_module(device)


@contextlib.contextmanager
def _draw_by_parts(states: Sequence[Tensor], counts: Sequence[int], place: int, device: torch.device) -> Iterator[list[Tensor]]:
    """Inside, `torch.multinomial` of the rows of all parts draws those of a part by the generator of its rank. Yields the states that this
    rank's has: before the first draw, and behind each. A trace of a model meets torch's own."""
    from meshc.private import trace_rules

    draw, mine = torch.multinomial, [states[place]]
    generators = [torch.Generator(device) for _ in states]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)

    def multinomial(input: Tensor, num_samples: int, *more: Any, **named: Any) -> Tensor:
        if torch.compiler.is_compiling() or input.dim() != 2 or {"generator", "out"} & named.keys():
            return draw(input, num_samples, *more, **named)
        times, left = divmod(len(input), sum(counts))
        if left or not times:
            return draw(input, num_samples, *more, **named)
        parts_of = zip(input.split([count * times for count in counts]), generators, strict=True)
        found = torch.cat([draw(rows, num_samples, *more, **named, generator=generator) for rows, generator in parts_of])
        mine.append(generators[place].get_state())
        return found

    trace_rules.get_torch_obj_rule_map()  # Dynamo looks torch's functions up once: before one of them is another
    with replace_targets(drawn_tokens=multinomial):
        yield mine


def _draws(tokens: Tensor, draws: int, ends: Sequence[int]) -> int:
    """Number of draws that these rows needed, of all ranks' draws: `generate` stops when every row has ended."""
    ended = torch.isin(tokens[:, -draws:], torch.tensor(ends, device=tokens.device, dtype=tokens.dtype))
    needed = torch.where(ended.any(1), ended.int().argmax(1) + 1, draws)
    return min(int(needed.max()), draws)


def _ends(model: nn.Module, named: Mapping[str, Any]) -> list[int]:
    """The tokens that end a row; none where beams are searched, which goes on behind them."""
    configs = (named.get("generation_config"), getattr(model, "generation_config", None))

    def setting(name: str) -> Any:
        said = (named.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in said if value is not None), None)

    ends = setting("eos_token_id")
    if ends is None or (setting("num_beams") or 1) > 1:
        return []
    return torch.as_tensor(ends).reshape(-1).tolist()


def _bind_prompts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prompts:
    """Arguments by name, without labels, which the Trainer passes on."""
    if len(args) > 1:
        raise InputError("generate takes prompts, and all else by name\n  what to do: write generation_config=... and the like")
    found = {**({"inputs": args[0]} if args else {}), **{name: value for name, value in kwargs.items() if name != "labels"}}
    if not any(isinstance(value, Tensor) and value.dim() for value in found.values()):
        raise InputError("generate of parts of a batch takes prompts, as tensors with rows\n  what to do: pass input_ids")
    return found


def _gather_prompts(world: World, mine: Prompts) -> list[Prompts]:
    """Prompts of all ranks, in rank order, as bytes; their lengths are exchanged first."""
    written = io.BytesIO()
    torch.save(mine, written)
    data = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8).to(world.device)
    group = world.groups.world
    sizes = collectives.all_gather(torch.tensor([len(data)], device=world.device), group).wait().tolist()
    filled = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
    found = collectives.all_gather(filled[None], group).wait().cpu()
    return [torch.load(io.BytesIO(bytes(row[:size].tolist())), weights_only=True) for row, size in zip(found, sizes, strict=True)]


def _refuse_unlike(told: Sequence[Prompts]) -> None:
    for one in told:
        rows = {name: len(value) for name, value in one.items()}
        if one.keys() != told[0].keys() or len(set(rows.values())) > 1 or not min(rows.values()):
            raise InputError(
                f"generate of parts of a batch: one rank passed {rows} rows, another {', '.join(told[0])}\n"
                "  what to do: pass the same arguments on all ranks, each with as many rows, and one at least"
            ).mark_everywhere()


def _pad_prompts(model: nn.Module, told: Sequence[Prompts]) -> dict[str, list[Tensor]]:
    """By name the rows of each place, as long as the longest. Raises InputError for what nobody knows how to fill up."""
    found = {name: [one[name] for one in told] for name in told[0]}
    tokens = next((name for name in TOKENS if name in found), None)
    if tokens is not None and tokens != MASK and len({one.shape[1:] for one in found[tokens]}) > 1:
        found.setdefault(MASK, [torch.ones_like(one) for one in found[tokens]])
    for name, rows in found.items():
        if len({one.shape[1:] for one in rows}) == 1:
            continue
        if name not in TOKENS or rows[0].dim() != 2:
            raise InputError(
                f"{name} of the ranks has other sizes: {' and '.join(str(list(one.shape)) for one in rows)}\n"
                "  what to do: pad it to one size on all ranks"
            ).mark_everywhere()
        longest, value = max(one.shape[1] for one in rows), 0 if name == MASK else _padding(model)
        for at, one in enumerate(rows):
            missing = longest - one.shape[1]
            rows[at] = torch.nn.functional.pad(one, (0, missing) if _encodes(model) else (missing, 0), value=value)
    return found


def _length(one: Prompts) -> int:
    return next((int(one[name].shape[1]) for name in TOKENS if name in one and one[name].dim() == 2), 0)


def _encodes(model: nn.Module) -> bool:
    """Whether prompts are an encoder's, and tokens begin anew."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _padding(model: nn.Module) -> int:
    """The token that fills up; any will do behind a mask."""
    said = [getattr(getattr(model, name, None), "pad_token_id", None) for name in ("generation_config", "config")]
    return next((int(one) for one in said if one is not None), 0)
