"""A report: its figures are those of the summary, its page is whole, asks for nothing, and shows what names say as text."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.report.figures import figures
from meshc.report.html import head_html, html
from meshc.report.markup import VOID, Markup, tag, text
from meshc.report.page import Page, head, page
from meshc.report.tree import Branch, ranges
from tests.broad import broad
from tests.passes.depth.stacks import Stack, compiled

HOSTILE = "<script>alert(1)<\\script><b onload='x'>\u202e"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return x + self.down(h)


class Named(nn.Module):
    """Three equal layers, and one whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.add_module(HOSTILE, nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.get_submodule(HOSTILE)(x)


@pytest.fixture(scope="module")
def program() -> meshc.Program:
    model = Named()
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=nn.functional.mse_loss)
    plan = "dp: batch; store params, grads, state\ntp: ffn"
    args, kwargs = (torch.zeros(64, 8),), {"target": torch.zeros(64, 4)}
    return meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=args, kwargs=kwargs, plan=plan)


@pytest.fixture(scope="module")
def found(program: meshc.Program) -> Page:
    return page(program.compiled, "Named", weighed=(), tried=())


class Read(HTMLParser):
    """A page as a strict reader has it: each element is closed by its own end. `texts` by the elements that they stand in."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert any(name == "svg" for name, _ in self.open), f"<{tag}/> is an open element outside of SVG"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(name for name, _ in self.open), data))

    def said(self) -> str:
        return " ".join(data for inside, data in self.texts if not {"script", "style"} & set(inside))


def test_the_page_is_whole_and_has_what_a_reader_looks_for(found: Page) -> None:
    source = html(found)
    read = Read(source)
    said = read.said()
    for section in ("plan", "axes", "time", "memory", "collectives", "model", "values"):
        assert any(name == "section" and each.get("id") == section for name, each in read.elements), section
    assert "Named" in said and "batch; store params, grads, state" in said
    axes = [data for inside, data in read.texts if data in ("dp", "tp") and inside[-1:] == ("span",)]
    assert {"dp", "tp"} == set(axes)
    largest = source[source.index('<table class="largest">') :]
    assert largest[: largest.index("</table>")].count("<tr>") == 1 + 10, "a row of headers and ten values"
    number = next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "return x + self.down(h)" in line)
    assert f"test_html.py:{number}" in said and "return x + self.down(h)" in said


def test_the_page_asks_for_nothing(found: Page) -> None:
    source = html(found)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", source)
    assert not any({"src", "data", "action"} & set(each) or name in ("link", "iframe", "img") for name, each in Read(source).elements)
    inside = {f"#{name}" for name in re.findall(r'id="(\w+)"', source)}
    assert {each["href"] for _, each in Read(source).elements if "href" in each} <= inside


def test_no_name_is_markup(found: Page) -> None:
    """The model's name, its modules, its lines, its plan: each as text, and the only script is the page's own, as its policy says."""
    hostile = replace(
        found, head=found.head._replace(name=HOSTILE, mesh=HOSTILE, device=HOSTILE, plan=((HOSTILE, HOSTILE),)), notes=[HOSTILE],
        largest=[one._replace(line=HOSTILE, code=HOSTILE, reason=HOSTILE) for one in found.largest],
    )  # fmt: skip
    for source in (html(found), html(hostile), head_html(hostile.head)):
        read = Read(source)
        assert "alert(1)" in read.said() and "\u202e" not in source, "control characters, which turn text around, are shown as escapes"
        assert not any(name == "b" or any(key.startswith("on") for key in each) for name, each in read.elements)
    scripts = [data for inside, data in Read(html(hostile)).texts if inside[-1:] == ("script",)]
    assert len(scripts) == 1
    hashed = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(each["content"] for name, each in Read(html(hostile)).elements if "http-equiv" in each)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"


def test_markup_escapes_all_but_itself() -> None:
    assert tag("td", "a < b", tag("b", 'c"d'), class_="n", data_find="x'y") == (
        '<td class="n" data-find="x&#x27;y">a &lt; b<b>c&quot;d</b></td>'
    )
    assert text("a\x00\udc80") == "a\\x00\\udc80" and text(Markup("<b>")) == "<b>"


def test_its_figures_are_those_of_the_summary(program: meshc.Program, found: Page) -> None:
    said = figures(program.compiled)
    assert found.head.step_s == said["seconds"]["together"]
    assert found.head.holds == said["memory_bytes"]["together"] == sum(size for _, size in found.memory.kinds)
    assert found.memory.kept + max(size for size, _ in found.memory.course) == found.head.holds
    assert found.memory.course[found.memory.peak][0] == max(size for size, _ in found.memory.course)
    moved = {(one["phase"], one["collective"], tuple(one["axes"])): (one["count"], one["bytes_per_rank"]) for one in said["collectives"]}
    assert {(one.phase, one.kind, one.axes): (one.times, one.bytes) for one in found.traffic} == moved
    for over in ("dp", "tp"):
        alone = sum(one.seconds for one in found.traffic if one.axes == (over,))
        assert alone == pytest.approx(said["seconds"][f"communicating over {over}"])


def test_what_an_axis_spares(program: meshc.Program, found: Page) -> None:
    """By hand: over dp lie parameters and moments, over tp the layers' weights and the bias of `up`; inputs come whole to each rank."""
    dp, tp = found.axes
    kept = peak_memory.peak_rank(program.compiled).kept
    parameters = (3 * (32 * 8 + 32 + 8 * 32) // 4 + (3 * 8 + 8 * 4 + 4) // 2) * 4
    assert kept["parameter"] == parameters and kept["state"] == 2 * parameters + 4 * 14, "and a count of steps for each of 14 parameters"
    assert dp.spared == 3 * parameters
    split = 3 * 3 * (32 * 8 + 32 + 8 * 32) * 4  # layers, a parameter and two moments, up's weight and bias and down's weight
    assert tp.spared == split // 2 // 2, "half of what a rank of dp has"
    assert (dp.times, dp.share) == (2.0, 1.0)
    over = [one for one in found.traffic if "tp" in one.axes]
    assert (tp.sends, tp.seconds) == (sum(one.times for one in over), pytest.approx(sum(one.seconds for one in over)))


def test_what_a_call_spends_its_time_on_is_the_whole_call(program: meshc.Program, found: Page) -> None:
    assert [one.start_s for one in found.spans] == [0.0, *(one.end_s for one in found.spans[:-1])]
    assert found.spans[-1].end_s == pytest.approx(found.head.step_s)
    computes = sum(one.end_s - one.start_s for one in found.spans if not one.waits)
    assert computes == pytest.approx(dict(found.times)["computing"])
    assert list(dict.fromkeys(one.phase for one in found.spans)) == ["forward", "backward", "update"]
    waits = sum(one.end_s - one.start_s for one in found.spans if one.waits)
    messages = sum(seconds for what, seconds in found.times.items() if what.startswith("communicating"))
    assert 0 < waits == pytest.approx(messages - found.hidden_s)


@pytest.mark.broad
def test_equal_layers_are_one_branch_and_others_are_not(found: Page) -> None:
    layers = next(one for one in found.tree.children if one.name == "layers")
    assert [(one.name, one.count) for one in layers.children] == [("0-2", 3)]
    assert found.tree.bytes == sum(one.bytes * one.count for one in found.tree.children)
    other = page(compiled(Stack([16, 16, 24, 16]), plan="ddp").compiled, "Stack").tree
    assert [(one.name, one.count) for one in named(other, "layers").children] == [("0-1, 3", 3), ("2", 1)]
    assert ranges([7, 0, 1, 2, 5]) == "0-2, 5, 7"


def named(branch: Branch, name: str) -> Branch:
    return next(one for one in branch.children if one.name == name)


def test_a_pipeline_has_stages_and_messages() -> None:
    model = Stack([16] * 4)
    made = page(compiled(model, mesh="pp=2,dp=2", microbatches=2).compiled, "Stack")
    assert len(made.stages.rows) >= 2 and made.axes[0].splits == "stages of the model" and made.axes[0].sends > 0
    assert made.axes[0].spared > 0 and made.timeline.count("<title>") >= 8
    Read(html(made))


@pytest.mark.parametrize(
    "plan, mesh, more",
    [("fsdp", "dp=2", {"microbatches": 2}), ("dp: batch\noffload state", "dp=2", {}),
     broad("ddp", "dp=2", {"train": False}), broad("ddp", "dp=1", {})],
)  # fmt: skip
def test_every_kind_of_program_has_one(plan: str, mesh: str, more: dict[str, Any]) -> None:
    program = compiled(Stack([16] * 2), mesh=mesh, plan=plan, **more).compiled
    for device in (None, "h100"):
        found = page(program, "Stack", device)
        Read(html(found))
        one_stage = len(program.stages) == 1
        assert bool(found.spans) == one_stage and (not one_stage or found.spans[-1].end_s == pytest.approx(found.head.step_s))
        assert bool(found.copies.rows) == ("offload" in plan)


def test_program_report_writes_it(program: meshc.Program, tmp_path: Path) -> None:
    program.report(tmp_path / "report.html")
    assert "Named" in Read((tmp_path / "report.html").read_text()).said()
    program.report(tmp_path / "h100.html", device="h100")
    assert "predicted for h100" in Read((tmp_path / "h100.html").read_text()).said()
    for wrong in (tmp_path, tmp_path / "report.svg"):
        with pytest.raises(PlanError, match=r"whose name ends in \.html"):
            program.report(wrong)


def test_what_was_weighed_stands_there_and_of_a_saved_program_where_it_is() -> None:
    found = compiled(Stack([16] * 2), plan="auto")
    weighed = found.compilations.last.made.weighed
    assert weighed
    told = Read(html(page(found.compiled, "Stack", weighed=weighed, tried=()))).said()
    assert "weighed for the plan" in told and weighed[0].name in told
    assert "not kept in a saved program" in Read(html(page(found.compiled, "Stack"))).said()


def test_what_a_notebook_shows(program: meshc.Program) -> None:
    said = Read(program._repr_html_()).said()
    assert program._repr_html_() == head_html(head(program.compiled, program.asked.name))
    assert "Named" in said and "dp=2,tp=2" in said and "tp: ffn" in said and "a call takes" in said and "a rank holds" in said
    waiting = meshc.compile(nn.Linear(2, 2).requires_grad_(False), meshc.Mesh("dp=2"), plan="ddp")
    assert "nothing is compiled yet" in Read(waiting._repr_html_()).said()
