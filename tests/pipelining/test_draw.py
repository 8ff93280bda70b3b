"""Pictures and traces of timelines: every action is there, in its place, and a trace is read back."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from meshc.errors import ArtifactError
from meshc.passes.stages.schedules import build
from meshc.pipelining import draw, perfetto_trace
from meshc.pipelining.events import StageRun
from meshc.pipelining.schedule import Action, Message, Recv, Send, parse
from meshc.pipelining.timing import Costs, Event, Timeline, equal_costs, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, ranks: int, microbatches: int, second: float = 1.0) -> Timeline:
    schedule = build(name, ranks, microbatches)
    costs = equal_costs(schedule.stages, second, 1.5 * second, second)
    return simulate(schedule, Costs(costs.seconds, 0.25 * second))


def boxes(picture: str) -> dict[str, ElementTree.Element]:
    """Title of each action -> its group."""
    root = ElementTree.fromstring(picture)
    return {group.findtext(f"{SVG}title", ""): group for group in root.iter(f"{SVG}g")}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v", "dualpipe_v"])
def test_every_action_has_a_box_of_its_place_and_length(name: str) -> None:
    line = timeline(name, 8, 32)
    found = boxes(draw.svg(line))
    assert len(found) == sum(map(len, line.action_events))
    edges = []
    for events in line.action_events:
        for event in events:
            assert isinstance(event.instruction, Action)
            start, end = (f"{seconds:.4g}" for seconds in (event.start_s, event.end_s))
            group = found[f"{event.instruction} on rank {event.rank}, {start} to {end} s"]
            box, label = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
            assert box is not None and label is not None
            assert label.text == str(event.instruction.microbatch)
            assert float(label.attrib["font-size"]) >= 9, "legible"
            assert float(label.attrib["font-size"]) * 0.64 * len(str(label.text)) <= float(box.attrib["width"]), "inside its box"
            assert float(box.attrib["y"]) == 58 + 32 * event.rank
            edges.append((event.start_s, float(box.attrib["x"])))
            edges.append((event.end_s, float(box.attrib["x"]) + float(box.attrib["width"])))
    scale = (max(edges)[1] - min(edges)[1]) / line.makespan_s
    assert all(x == pytest.approx(min(edges)[1] + scale * (seconds - min(edges)[0]), abs=0.02) for seconds, x in edges)


def test_words_of_a_picture() -> None:
    picture = draw.svg(timeline("zb_v", 2, 4, 0.001))
    root = ElementTree.fromstring(picture)
    words = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    assert words[0].startswith("zb_v") and re.search(r"[\d.]+ ms, idle [\d.]+ %", words[0])
    assert words[1:5] == ["forward (F)", "gradient of inputs (I)", "gradient of weights (W)", "paler: later stages of the rank"]
    assert {"rank 0", "rank 1", "0 ms", "5 ms"} <= set(words)
    assert re.fullmatch(r"idle [\d.]+ %, holds up to 4", words[6])
    fills = {box.attrib["fill"] for group in root.iter(f"{SVG}g") for box in group.iter(f"{SVG}rect")}
    assert len(fills) == 6, "three ops in two stages of a rank"


def test_names_cannot_break_the_picture_and_nothing_can_be_drawn() -> None:
    assert "a&lt;b&amp;c" in draw.svg(Timeline((), 1, "a<b&c"))
    assert boxes(draw.svg(Timeline((), 2))) == {}
    flat = Timeline((Event(0, Action("F", 0, 0), 1.0, 1.0),), 1)
    assert list(boxes(draw.svg(flat))) == ["F0.0 on rank 0, 0 to 0 ns"]
    stage = "<script>alert(1)</script>"
    picture = ElementTree.fromstring(draw.svg(Timeline((Event(0, StageRun(stage), 0.0, 1.0),), 1, "x")))
    assert not any(element.tag.endswith("script") for element in picture.iter()) and stage in "".join(picture.itertext())


def test_pipelines_stand_one_below_the_other() -> None:
    """Ranks 0 and 2 are one, 1 and 3 another, as on a mesh pp=2,dp=2; rank 1 has a stage before the first microbatch."""
    events = [Event(rank, Action("F", int(rank > 1), 0), 1.0, 2.0) for rank in range(4)] + [Event(1, StageRun("before_0"), 0.0, 1.0)]
    line = Timeline(tuple(events), 4, pipelines=((0, 2), (1, 3)))
    root = ElementTree.fromstring(draw.svg(line))
    rows = {str(text.text): float(text.attrib["y"]) for text in root.iter(f"{SVG}text") if str(text.text).startswith("rank ")}
    assert rows == {"rank 0": 75, "rank 2": 107, "rank 1": 139, "rank 3": 171}
    tops = {}
    for title, group in boxes(draw.svg(line)).items():
        box = group.find(f"{SVG}rect")
        assert box is not None
        tops[title.split(",")[0]] = float(box.attrib["y"])
    assert tops == {
        "F0.0 on rank 0": 58, "F1.0 on rank 2": 90, "F0.0 on rank 1": 122, "before_0 on rank 1": 122, "F1.0 on rank 3": 154,
    }  # fmt: skip
    assert (line.call_s, line.makespan_s, line.bubble) == (2.0, 1.0, 0.0)
    again = perfetto_trace.trace_to_timeline(perfetto_trace.timeline_to_trace(line))
    assert again.pipelines == line.pipelines and again.call_s == pytest.approx(2.0)


def test_messages_that_overlap_are_no_slices_of_a_thread() -> None:
    """Two are on their way from rank 0 to 1 at a time: the second is an asynchronous pair, and both are read back."""
    lists = [Event(stage, Action("F", stage, k), 4.0 * stage + k, 4.0 * stage + k + 1) for stage in (0, 1) for k in (0, 1)]
    sends = [Event(0, Send(Message(Action("F", 0, k), 1)), k + 1.0, 3.5) for k in (0, 1)]
    text = perfetto_trace.timeline_to_trace(Timeline((*lists, *sends), 2))
    written = [event for event in json.loads(text)["traceEvents"] if event.get("cat") == "message"]
    kinds = {event["name"]: event["ph"] for event in written if event["ph"] in "Xb"}
    assert kinds == {"SEND:F0.0>1": "X", "SEND:F0.1>1": "b"}
    found = {str(event.instruction): (event.start_s, event.end_s) for event in perfetto_trace.trace_to_timeline(text).events}
    assert found["SEND:F0.0>1"] == (1.0, 3.5) and found["SEND:F0.1>1"] == (2.0, 3.5)


def test_text() -> None:
    line = simulate(parse("0: F0.0 F0.1 F3.0 F3.1\n1: F1.0 F2.0 F1.1 F2.1"), equal_costs(4))
    assert draw.text(line) == "0  F0 F1    f0    f1\n1     F0 f0 F1 f1"
    assert draw.text(line, 0.5) == "0  F0    F1          f0          f1\n1        F0    f0    F1    f1"


# Traces.


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v", "dualpipe_v", "inference"])
def test_a_trace_is_read_back(name: str) -> None:
    line = timeline(name, 3, 7, 0.001)
    again = perfetto_trace.trace_to_timeline(perfetto_trace.timeline_to_trace(line))
    assert (again.ranks, again.name, len(again.events)) == (3, name, len(line.events))
    for found, event in zip(sorted(again.events, key=key), sorted(line.events, key=key), strict=True):
        assert key(found) == key(event)
        assert (found.start_s, found.end_s) == (pytest.approx(event.start_s), pytest.approx(event.end_s))
    assert again.bubble == pytest.approx(line.bubble)
    assert again.peaks() == line.peaks()


def key(event: Event) -> tuple[int, str]:
    return event.rank, str(event.instruction)


def test_what_is_in_a_trace() -> None:
    line = simulate(parse("0: F0.0 B0.0\n1: F1.0 B1.0"), Costs(equal_costs(2, 1e-3, 1e-3, 1e-3).seconds, 5e-4))
    events = json.loads(perfetto_trace.timeline_to_trace(line))["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert {name: (event["pid"], event["tid"], event["ts"], event["dur"]) for name, event in slices.items()} == {
        "F0.0": (0, 0, 0, 1000),
        "SEND:F0.0>1": (0, 2, 1000, 500),
        "F1.0": (1, 0, 1500, 1000),
        "B1.0": (1, 0, 2500, 2000),
        "SEND:B1.0>0": (1, 1, 4500, 500),
        "B0.0": (0, 0, 5000, 2000),
    }
    arrows = {(event["ph"], event["name"]): event for event in events if event["ph"] in "sf"}
    for message, made, user in (("F0.0>1", "F0.0", "F1.0"), ("B1.0>0", "B1.0", "B0.0")):
        start, finish = arrows["s", message], arrows["f", message]
        assert start["id"] == finish["id"] and finish["bp"] == "e"
        assert slices[made]["ts"] <= start["ts"] < slices[made]["ts"] + slices[made]["dur"] and start["pid"] == slices[made]["pid"]
        assert (finish["pid"], finish["ts"]) == (slices[user]["pid"], slices[user]["ts"])
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {(0, 0): "compute", (1, 0): "compute", (0, 2): "to rank 1", (1, 1): "to rank 0"}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 0", "rank 1"]


def test_a_trace_of_others_is_read_for_what_is_like_ours() -> None:
    """A bare list of events, as profilers write it too, with kernels among them."""
    text = json.dumps(
        [
            {"ph": "X", "name": "F0.0", "pid": 1, "tid": 7, "ts": 10, "dur": 5},
            {"ph": "X", "name": "ampere_sgemm", "pid": 1, "tid": 8, "ts": 11, "dur": 2},
            {"ph": "i", "name": "F0.1", "pid": 1, "tid": 7, "ts": 10},
        ]
    )
    line = perfetto_trace.trace_to_timeline(text)
    assert line.ranks == 2
    assert [(event.rank, str(event.instruction)) for event in line.events] == [(1, "F0.0")]
    assert line.makespan_s == pytest.approx(5e-6)


@pytest.mark.parametrize(
    "text, says",
    [
        ("no", "this is no JSON, it was truncated or edited: Expecting value"),
        ("{}", "this is no trace: KeyError: 'traceEvents'"),
        ('[{"ph": "X", "name": "F0.0", "pid": 0, "ts": 1}]', "this is no trace: KeyError: 'dur'"),
        ('{"traceEvents": []}', "this is a trace without a slice that is called like an action, as in"),
    ],
)
def test_what_is_no_trace(text: str, says: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        perfetto_trace.trace_to_timeline(text)
    assert says in str(caught.value)


def test_messages_are_in_a_timeline_at_both_ends() -> None:
    kinds = [type(event.instruction) for event in timeline("1f1b", 2, 1).events]
    assert (kinds.count(Action), kinds.count(Send), kinds.count(Recv)) == (4, 2, 2)
