"""Pipelines as text for people, as JSON for a saved program, and read back from that JSON.

    pipeline = "pp"

    pipeline_schedule = [
        "0: F0.0 SEND:F0.0>1 RECV:B1.0>0 B0.0",
        "1: RECV:F0.0>1 F1.0 B1.0 SEND:B1.0>0",
    ]

    messages = [
        message("F0>1", ["flow:add_3"]),        values sent from stage 0 to stage 1 in each microbatch
        message("B1>0", ["flow:mm_9"]),
    ]

    owners = [
        owner(0, ["parameter:up.weight", "state:up.weight/exp_avg"]),
        owner(1, ["parameter:down.weight", "state:down.weight/exp_avg"]),
    ]

    shared = [move("parameter:up.weight", 0, 1)]        once a call: before the first microbatch
    returned = [move("sum:mm_12", 1, 0)]                and after the last

    starts = [start("start_1_all_reduce", ["sum:mm_14", "sum:mm_16"], "B1.3")]      a stage; sums, which are complete within that action
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, TypedDict

from meshc.errors import ScheduleError
from meshc.pipelining.pipeline_stages import Move, Pipeline, Start
from meshc.pipelining.schedule import Action, StageLink, parse, parse_instruction

_LINK: Final = re.compile(r"([FB])(\d{1,9})>(\d{1,9})")


class PipelineJson(TypedDict):
    """A pipeline in JSON. `pipeline_from_json` validates one that comes from a file."""

    axis: str
    name: str
    schedule: list[str]
    messages: dict[str, list[str]]
    owners: dict[str, int]
    shared: list[list[str | int]]
    returned: list[list[str | int]]
    starts: list[list[str | list[str]]]


def listings(pipeline: Pipeline) -> list[tuple[str, list[str]]]:
    """The pipeline's sections in a program's text: (title, items)."""
    by_owner: dict[int, list[str]] = defaultdict(list)
    for key, rank in pipeline.owners.items():
        by_owner[rank].append(key)
    return [
        ("pipeline_schedule", [json.dumps(line) for line in str(pipeline.schedule).splitlines()]),
        ("messages", [f'message("{link}", {json.dumps(list(keys))})' for link, keys in sorted(pipeline.messages.items())]),
        ("owners", [f"owner({rank}, {json.dumps(by_owner[rank])})" for rank in sorted(by_owner)]),
        ("shared", [_move(move) for move in pipeline.shared]),
        ("returned", [_move(move) for move in pipeline.returned]),
        ("starts", [f'start({json.dumps(one.stage)}, {json.dumps(list(one.keys))}, "{one.during}")' for one in pipeline.starts]),
    ]


def _move(move: Move) -> str:
    return f"move({json.dumps(move.key)}, {move.source}, {move.target})"


def pipeline_to_json(pipeline: Pipeline) -> PipelineJson:
    """The pipeline as JSON data."""
    return {
        "axis": pipeline.axis,
        "name": pipeline.schedule.name,
        "schedule": str(pipeline.schedule).splitlines(),
        "messages": {str(link): list(keys) for link, keys in sorted(pipeline.messages.items())},
        "owners": dict(pipeline.owners),
        "shared": [[move.key, move.source, move.target] for move in pipeline.shared],
        "returned": [[move.key, move.source, move.target] for move in pipeline.returned],
        "starts": [[one.stage, list(one.keys), str(one.during)] for one in pipeline.starts],
    }


def pipeline_from_json(told: PipelineJson) -> Pipeline:
    """The pipeline of JSON data from `pipeline_to_json`. Raises ScheduleError for malformed data; `completeness.refuse_incomplete` checks
    if it can run."""
    links = {_link(text): _keys(text, keys) for text, keys in told["messages"].items()}
    lines = told["schedule"]
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ScheduleError(f"the pipeline's schedule is a list of lines, one a rank, not {lines!r:.60}")
    return Pipeline(
        str(told["axis"]),
        parse("\n".join(lines), links, str(told.get("name", ""))),
        links,
        {str(key): _rank(f"owners: {key}", rank) for key, rank in told["owners"].items()},
        _moves("shared", told["shared"]),
        _moves("returned", told["returned"]),
        tuple(_start(row) for row in told["starts"]),
    )


def _link(text: str) -> StageLink:
    found = _LINK.fullmatch(text)
    if found is None:
        raise ScheduleError(f"messages: {text!r} is no link between stages, as in F0>1 or B1>0")
    return StageLink(found[1], int(found[2]), int(found[3]))


def _keys(link: str, keys: object) -> tuple[str, ...]:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ScheduleError(f"messages: {link} carries a list of keys, not {keys!r:.60}")
    return tuple(map(str, keys))


def _start(row: object) -> Start:
    match row:
        case [str(stage), [*keys], str(during)] if all(isinstance(key, str) for key in keys):
            action = parse_instruction(during)
            if isinstance(action, Action):
                return Start(stage, tuple(map(str, keys)), action)
    example = '["start_1_all_reduce", ["sum:mm_14"], "B1.3"]'
    raise ScheduleError(f"starts: each is a stage, the sums that it reads and the action that makes them whole: {example}, not {row!r:.60}")


def _rank(what: str, rank: object) -> int:
    if type(rank) is not int or rank < 0:
        raise ScheduleError(f"{what}: {rank!r:.60} is no place on the pipeline axis")
    return rank


def _moves(what: str, rows: object) -> tuple[Move, ...]:
    if not isinstance(rows, Sequence) or any(not isinstance(row, Sequence) or len(row) != 3 or not isinstance(row[0], str) for row in rows):
        raise ScheduleError(f"{what}: a move is a key and two places on the pipeline axis, as in [\"parameter:w\", 0, 1], not {rows!r:.60}")
    return tuple(Move(key, _rank(f"{what}: {key}", source), _rank(f"{what}: {key}", target)) for key, source, target in rows)
