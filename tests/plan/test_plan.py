"""Plans and recipes: the grammar both ways, what is refused and how it reads, and the entry that each axis gets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshc.errors import PlanError
from meshc.ir.mesh import Mesh
from meshc.plan.entries import STORES, AxisEntry, FactorTerm, OperatorPin, OperatorSplit, Pin, PinDim, PinFactor, StoreLine
from meshc.plan.plan import Plan, contradictions
from meshc.plan.recipes import RECIPES, explain, resolve

TEXT = """\
# Ulysses beside fully sharded data parallelism
dp:batch;store state,params , grads
tp: heads, ffn,model.layers.0.mlp.up_proj.weight.0 > seq   # ranks

cp: heads@attention > seq@model.layers.*
pp: -
pin lm_head.weight: vocab / tp, _  only
pin *.c_attn.weight: _, qkv! * heads/tp/cp * head
store lm_head.weight state : vocab/dp / tp,_
store *.c_attn.weight grads,params: _, hidden!
store norm.* state, params, grads: hidden/dp
pin op:lm_head/backward/mm.2 : partial / cp, vocab/tp, - /dp,hidden [2]/x/y
pin input:ids:batch/dp,seq
"""

CANONICAL = """\
dp: batch; store params, grads, state
tp: heads, ffn, model.layers.0.mlp.up_proj.weight.0 > seq
cp: heads@attention > seq@model.layers.*
pp: -
pin lm_head.weight: vocab/tp, _  only
pin *.c_attn.weight: _, qkv! * heads/tp/cp * head
pin input:ids: batch/dp, seq
pin op:lm_head/backward/mm.2: vocab/tp, hidden[2]/x/y, -/dp, partial/cp
store lm_head.weight state: vocab/dp/tp, _
store *.c_attn.weight params, grads: _, hidden!
store norm.*: hidden/dp"""


def refusal(lines: object) -> str:
    with pytest.raises(PlanError) as caught:
        Plan(lines)  # type: ignore[arg-type]
    return str(caught.value)


NAMES = st.sampled_from(["dp", "tp", "cp", "pin", "stores", "auto", "only", "x_1", "_y"])
FACTORS = st.one_of(
    st.sampled_from(["heads", "kv_heads", "0.weight.1", "model.*.up-proj.weight.0", "*.q.0", "only_x", "_only", "store"]),
    st.from_regex(r"[a-z]\w*(\.\w+)*", fullmatch=True).filter(lambda factor: factor not in ("only", "auto")),
)
REGIONS = st.sampled_from(["attention", "model.layers.*", "*.mlp", "model.layers.[0-3]", "h.?"])
PATTERNS = st.sampled_from(["fc.weight", "*.weight", "input:x", "value:model.layers.*.mlp", "layers.[!0].w"])
OPERATORS = st.sampled_from(["*", "lm_head", "/update", "model.layers.*/backward", "h.[!0].mlp/*/mm*", "norm/forward/mul.2"])


@st.composite
def axis_entries(draw: st.DrawFn, axis: str) -> AxisEntry:
    terms = draw(st.lists(st.builds(FactorTerm, FACTORS, st.none() | REGIONS), unique=True, max_size=4))
    cuts = draw(st.lists(st.booleans(), min_size=len(terms), max_size=len(terms)))
    ranks: list[list[FactorTerm]] = []
    for term, cut in zip(terms, cuts, strict=True):
        if cut or not ranks:
            ranks.append([])
        ranks[-1].append(term)
    if not ranks and draw(st.booleans()):
        return AxisEntry(axis, auto=True)
    return AxisEntry(axis, tuple(map(tuple, ranks)), draw(kinds(st.sets(st.sampled_from(STORES)))))


def kinds(drawn: st.SearchStrategy[set[str]]) -> st.SearchStrategy[tuple[str, ...]]:
    return drawn.map(lambda kept: tuple(word for word in STORES if word in kept))


@st.composite
def pin_factors(draw: st.DrawFn) -> PinFactor:
    axes = draw(st.lists(NAMES, max_size=2))
    return PinFactor(draw(FACTORS), tuple(axes), not axes and draw(st.booleans()))


PIN_DIMS = st.lists(pin_factors(), max_size=3, unique_by=lambda part: part.factor).map(lambda parts: PinDim(tuple(parts)))
PINS = st.builds(
    lambda pattern, dims, only: Pin(pattern, tuple(dims), only), PATTERNS, st.lists(PIN_DIMS, min_size=1, max_size=3), st.booleans()
)
STORE_LINES = st.builds(
    lambda pattern, dims, kept: StoreLine(pattern, tuple(dims), kept),
    PATTERNS.filter(lambda pattern: ":" not in pattern),
    st.lists(st.lists(pin_factors(), max_size=3).map(lambda parts: PinDim(tuple(parts))), min_size=1, max_size=3),
    kinds(st.sets(st.sampled_from(STORES), min_size=1)),
)

@st.composite
def operator_pins(draw: st.DrawFn) -> OperatorPin:
    """Each axis once, each factor once."""
    axes = draw(st.lists(NAMES, unique=True, min_size=1, max_size=4))
    named = st.tuples(FACTORS.filter(lambda factor: factor not in ("partial", "_")), st.integers(1, 3))
    places = draw(st.lists(st.sampled_from(["-", "partial"]) | named, min_size=len(axes), max_size=len(axes)))
    splits: dict[tuple[str, int], tuple[str, ...]] = {}
    for axis, place in zip(axes, places, strict=True):
        if isinstance(place, tuple):
            splits[place] = (*splits.get(place, ()), axis)
    left = {word: tuple(axis for axis, place in zip(axes, places, strict=True) if place == word) for word in ("-", "partial")}
    found = tuple(OperatorSplit(factor, row, number) for (factor, number), row in splits.items())
    return OperatorPin(draw(OPERATORS), found, left["-"], left["partial"])


PLANS = st.builds(
    Plan.of,
    st.lists(NAMES, unique=True, max_size=4).flatmap(lambda axes: st.tuples(*map(axis_entries, axes))),
    st.lists(PINS, max_size=3),
    st.lists(STORE_LINES, max_size=2),
    st.lists(operator_pins(), max_size=3),
)


@given(PLANS)
def test_text_round_trips(plan: Plan) -> None:
    assert Plan(str(plan)) == plan


@given(st.text(alphabet="tp:heads,>@;-_*/!# \nin.onlyrmsu", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        plan = Plan(text)
    except PlanError:
        return
    assert Plan(str(plan)) == plan


def test_canonical_text() -> None:
    plan = Plan(TEXT)
    assert str(plan) == CANONICAL
    assert Plan(CANONICAL) == plan
    assert repr(Plan("tp: heads")) == "Plan('tp: heads')"


def test_structure() -> None:
    plan = Plan(TEXT)
    assert plan.entry("cp") == AxisEntry("cp", ((FactorTerm("heads", "attention"),), (FactorTerm("seq", "model.layers.*"),)))
    assert plan.entry("pp") == AxisEntry("pp")
    assert plan.entry("ep") is None
    tp = plan.entry("tp")
    assert tp is not None and [len(rank) for rank in tp.ranks] == [3, 1]
    assert (tp.line, tp.text) == (3, "tp: heads, ffn,model.layers.0.mlp.up_proj.weight.0 > seq")
    assert plan.pins[0] == Pin("lm_head.weight", (PinDim((PinFactor("vocab", ("tp",)),)), PinDim()), only=True)
    assert plan.pins[1].dims[1].factors == (PinFactor("qkv", whole=True), PinFactor("heads", ("tp", "cp")), PinFactor("head"))
    assert plan.pins[1].splits() == [("tp", 1, "heads"), ("cp", 1, "heads")]
    assert plan.stores[0] == StoreLine("lm_head.weight", (PinDim((PinFactor("vocab", ("dp", "tp")),)), PinDim()), ("state",))
    assert [line.kinds for line in plan.stores] == [("state",), ("params", "grads"), ("params", "grads", "state")]
    assert [line.line for line in plan.stores] == [9, 10, 11]


def test_globs() -> None:
    plan = Plan("pin *.weight: ffn/tp, _\npin fc.weight: _, ffn\npin input:*: batch")
    assert [pin.line for pin in plan.pins if pin.matches("fc.weight")] == [1, 2]
    assert [pin.line for pin in plan.pins if pin.matches("input:ids")] == [3]
    assert FactorTerm("layers.*.up.weight.0").covers("layers.11.up.weight.0")
    assert not FactorTerm("heads").covers("kv_heads")


def test_other_forms_hold_the_same_lines(tmp_path: Path) -> None:
    lines = ["dp: batch; store state", "tp: heads, ffn", "cp: -", "pin input:ids: batch/dp, _", "pin *.weight: ffn/tp, _"]
    plan = Plan([*lines, "store a grads, state: ffn/dp"])
    pins = ["input:ids: batch/dp, _", "*.weight: ffn/tp, _"]
    entries = {"dp": "batch; store state", "tp": "heads, ffn", "cp": "-"}
    assert Plan(str(plan).splitlines()) == plan
    assert Plan({**entries, "pin": pins, "store": ["a grads, state: ffn/dp"]}) == plan
    mixed = {"pin input:ids": "batch/dp, _", "pin": {"*.weight": "ffn/tp, _"}, "store a grads, state": "ffn/dp"}
    assert Plan({**entries, **mixed}) == plan
    assert Plan(plan) == plan
    files = {
        "a.plan": str(plan),
        "a.yaml": 'dp: batch; store state\ntp: heads, ffn\ncp: "-"\npin:\n- "input:ids: batch/dp, _"\n- "*.weight": ffn/tp, _\n'
        "store:\n  a grads, state: ffn/dp",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert Plan.load(tmp_path / name) == plan, name
    assert [line.line for line in (*Plan.load(tmp_path / "a.yaml").pins, *Plan.load(tmp_path / "a.yaml").stores)] == [5, 6, 8]


def test_toml(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.toml", tmp_path / "b.toml"
    good.write_text('dp = "batch; store state"\ncp = "-"\npin = ["input:ids: batch/dp, _"]')
    bad.write_text("tp = heads")
    if sys.version_info < (3, 11):
        with pytest.raises(PlanError, match="TOML needs Python 3.11"):
            Plan.load(good)
        return
    assert Plan.load(good) == Plan("dp: batch; store state\ncp: -\npin input:ids: batch/dp, _")
    with pytest.raises(PlanError, match='entries are quoted in TOML, as in tp = "heads, ffn"'):
        Plan.load(bad)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    bad = {
        "b.yaml": "tp: heads\ntp: ffn\n",
        "c.yaml": "tp: [heads]\n",
        "d.yaml": "cp: -\n",
        "b.plan": "tp heads",
        "b.json": "{}",
    }
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
    messages = {}
    for name in [*bad, "none.plan"]:
        with pytest.raises(PlanError) as caught:
            Plan.load(tmp_path / name)
        messages[name] = str(caught.value).replace(f"{tmp_path}/", "")
    assert "line 1, `tp: heads` and line 2, `tp: ffn`" in messages["b.yaml"]
    assert messages["c.yaml"] == "c.yaml: line 1: the entry tp holds a list or a mapping; write text, as in tp: heads, ffn"
    assert 'quote what is special in YAML: "-"' in messages["d.yaml"]
    assert messages["b.plan"].startswith("b.plan cannot be read:\n  line 1: tp heads\n")
    assert messages["b.json"] == "b.json: a plan is read from a file that ends in .plan, .yaml, .yml, .toml"
    assert messages["none.plan"].startswith("the plan file none.plan cannot be read as text: ")


def test_every_bad_line_is_shown() -> None:
    assert refusal("tp heads\n\ndp: batch; store param  # all\ncp: seq\npin fc.weight: ffn!/tp") == (
        "this plan cannot be read:\n"
        "  line 1: tp heads\n"
        "             ^ after the axis comes a colon: `tp: heads, ffn`\n"
        "  line 3: dp: batch; store param\n"
        "                           ^ param cannot be stored (did you mean params?)\n"
        "  line 5: pin fc.weight: ffn!/tp\n"
        "                         ^ `ffn!` is kept whole, so no axis splits it: drop the ! or the axis"
    )


@pytest.mark.parametrize(
    ("line", "column", "fix"),
    [
        (": heads", 0, "a line starts with the name of a mesh axis, with `pin` or `store`"),
        ("tp:", 3, "a factor belongs here"),
        ("tp: heads,, ffn", 10, "a factor belongs here"),
        ("tp: heads >", 11, "a factor belongs here"),
        ("tp: heads ffn", 10, "separate factors by `,`"),
        ("tp: heads, heads", 11, "heads is there twice"),
        ("tp: heads@", 10, "a region follows @"),
        ("tp: -, heads", 5, "separate factors by `,`"),
        ("tp: heads; keep params", 11, "only `store params, grads, state`"),
        ("tp: heads; store", 16, "what is stored split belongs here"),
        ("tp: heads; store grads, grads", 24, "grads is there twice"),
        ("pin fc.weight ffn", 14, "after the pattern comes a colon"),
        ("pin output:x: ffn", 4, "a pin names parameters"),
        ("pin fc.weight:", 14, "a dim is FACTOR, FACTOR/AXIS, FACTOR! or _"),
        ("pin fc.weight: only", 15, "only is no factor"),
        ("pin fc.weight: _/tp", 15, "_ is no factor"),
        ("pin fc.weight: ffn/, _", 19, "a mesh axis follows `/`"),
        ("pin fc.weight: ffn/tp!", 15, "`ffn!` is kept whole"),
        ("pin fc.weight: ffn * ffn", 21, "ffn is there twice in one dim"),
        ("pin fc.weight: ffn ffn", 19, "separate dims by `,`"),
        ("tp: auto; store params", 8, "`tp: auto` stands alone"),
        ("tp: heads, auto", 11, "auto is no factor: `tp: auto` alone leaves an axis to the search"),
        ("pin fc.weight: auto/tp", 15, "auto is no factor"),
        ("store: batch", 0, "store is no axis's name"),
        ("store input:x: a", 6, "what lies between steps are parameters"),
        ("store fc.weight ffn/tp, _", 16, "after the pattern comes a colon: `store fc.weight: ffn/tp, _`"),
        ("store fc.weight state, state: ffn", 23, "state is there twice"),
        ("store fc.weight state ffn", 22, "then comes a colon"),
        ("store fc.weight: ffn/tp, _  only", 28, "separate dims by `,`"),
        ("store fc.weight: ffn!/tp", 17, "`ffn!` is kept whole"),
        ("remat layers.*: cheep", 16, "cheep is no policy (did you mean cheap?)"),
        ("remat layers.*", 14, "then comes a colon, and a policy: none, cheap, selective, layer, sqrt"),
        ("remat: cheap", 5, "a remat line names modules, with * for any text, and a policy"),
        ("remat layers.*: cheap, layer", 21, "a remat line ends after its policy"),
        ("keep layers.0", 5, "a keep line names what modules return, with * for any text"),
        ("keep value:layers.0, value:layers.1", 19, "a keep line ends after the name of a value"),
        ("offload", 7, "an offload line names `state`, `params`, modules (`model.layers.*`) or what they return"),
        ("offload params, update", 8, "the update runs on the host where its state lies there: `offload state, update`"),
        ("offload grads", 8, "grads cannot lie on the host yet: `state` and `params` can"),
        ("offload state: fc.weight", 13, "an offload line ends after its pattern"),
        ("offload value:a, value:b", 15, "an offload line ends after its pattern"),
        ("pin op:lm_head/backwards: batch/dp", 7, "backwards is no phase (did you mean backward?)"),
        ("pin op:a/forward/mm/2: batch/dp", 7, "a pin of operators names MODULES, MODULES/PHASE or MODULES/PHASE/OPERATOR"),
        ("pin op:lm_head: batch/dp tp", 25, "separate what axes do by `,`"),
        ("pin op:lm_head: batch", 21, "a mesh axis follows, as in `batch/tp`: a pin of operators says what axes do"),
        ("pin op:lm_head: _, batch/dp", 16, "_ is no factor: an axis that is left open is left out"),
        ("pin op:lm_head: vocab!", 16, "say it of an axis: `-/AXIS` is an axis that splits nothing"),
        ("pin op:lm_head: -", 16, "a pin of operators says what axes do"),
        ("pin op:lm_head: auto/tp", 16, "auto is no factor"),
        ("pin op:lm_head: batch/dp, -/dp", 28, "dp is there twice: an axis does one thing in an operator"),
        ("pin op:lm_head: batch/dp, batch/tp", 26, "batch is there twice: write its axes one after the other, `batch/dp/tp`"),
    ],
)
def test_bad_line(line: str, column: int, fix: str) -> None:
    message = refusal(line).splitlines()
    assert message[1] == f"  line 1: {line}"
    assert message[2].startswith(f"{' ' * (10 + column)}^ {fix}"), "\n".join(message)


def test_bad_forms() -> None:
    assert "the plan's entry 'tp' holds ['heads']; write text" in refusal({"tp": ["heads"]})
    assert "not 4" in refusal(4)
    assert refusal({"tp": "heads,"}).splitlines()[1] == "  tp: heads,"


def test_two_entries_for_an_axis() -> None:
    assert refusal("dp: batch\ntp: heads\ndp: seq") == (
        "this plan cannot be read:\n  an axis has two entries, which should be one: line 1, `dp: batch` and line 3, `dp: seq`"
    )


def test_joining() -> None:
    assert Plan("dp: batch") + Plan("pin fc.weight: ffn, _\ntp: ffn") == Plan("dp: batch\ntp: ffn\npin fc.weight: ffn, _")
    with pytest.raises(PlanError, match="`dp: batch` and line 1, `dp: seq`"):
        Plan("dp: batch") + Plan("dp: seq")


def test_axes_that_the_mesh_lacks() -> None:
    with pytest.raises(PlanError) as caught:
        Plan("tpp: heads\nx: seq\npin fc.weight: ffn/y, _").check(Mesh("dp=2,tp=2"))
    assert str(caught.value) == (
        "the plan does not fit the mesh dp=2,tp=2, or itself:\n"
        "  line 1, `tpp: heads`: the mesh has no axis tpp (did you mean tp?)\n"
        "  line 2, `x: seq`: the mesh has no axis x (there are: dp, tp)\n"
        "  line 3, `pin fc.weight: ffn/y, _`: the mesh has no axis y (there are: dp, tp)"
    )


def test_contradictory_pins_of_one_pattern() -> None:
    with pytest.raises(PlanError) as caught:
        Plan("pin a: ffn/tp, _\npin b: seq/tp, _\npin a: ffn!, _\npin b: seq/tp, hidden/tp\npin a: ffn/dp, _").check(Mesh("dp=2,tp=2"))
    assert str(caught.value).splitlines()[1:] == [
        "  line 4, `pin b: seq/tp, hidden/tp`: tp splits seq in dim 0 and hidden in dim 1; an axis splits a value once",
        "  line 1, `pin a: ffn/tp, _` and line 3, `pin a: ffn!, _`: "
        "ffn in dim 0 is split by tp in one and whole in the other; keep one of the two",
        "  line 1, `pin a: ffn/tp, _` and line 5, `pin a: ffn/dp, _`: "
        "ffn in dim 0 is split by tp in one and split by dp in the other; keep one of the two",
        "  line 3, `pin a: ffn!, _` and line 5, `pin a: ffn/dp, _`: "
        "ffn in dim 0 is whole in one and split by dp in the other; keep one of the two",
        "  line 2, `pin b: seq/tp, _` and line 4, `pin b: seq/tp, hidden/tp`: "
        "tp splits seq in dim 0 and hidden in dim 1; an axis splits a value once",
    ]


def test_contradictions_between_patterns() -> None:
    pins = Plan("pin *.weight: ffn/tp, _\npin fc.*: _, hidden/tp\npin fc.weight: seq, _\npin f*: _").pins
    assert contradictions(pins[:2]) == [
        "line 1, `pin *.weight: ffn/tp, _` and line 2, `pin fc.*: _, hidden/tp`: "
        "tp splits ffn in dim 0 and hidden in dim 1; an axis splits a value once"
    ]
    assert contradictions([pins[0], pins[2]]) == [
        "line 1, `pin *.weight: ffn/tp, _` and line 3, `pin fc.weight: seq, _`: "
        "dim 0 is ffn/tp and seq; if the dim holds these factors together, write one pin and join them by *"
    ]
    assert contradictions([pins[1], pins[3]]) == [
        "line 2, `pin fc.*: _, hidden/tp` and line 4, `pin f*: _`: they name 2 and 1 dims; a pin has one entry for each dim of the tensor"
    ]


def test_contradictory_store_lines() -> None:
    """Of one kind; what two lines say of two kinds has nothing to do with each other."""
    with pytest.raises(PlanError) as caught:
        Plan("store a: b/dp, _\nstore a params: b!, _\nstore a grads: _, c/tp\nstore a state: b/dp/tp/dp, _\nstore a grads: b/x, _").check(
            Mesh("dp=2,tp=2")
        )
    twice = "b in dim 0 is split by dp in one and "
    assert str(caught.value).splitlines()[1:] == [
        "  line 5, `store a grads: b/x, _`: the mesh has no axis x (there are: dp, tp)",
        "  line 4, `store a state: b/dp/tp/dp, _`: dp splits b in dim 0 twice; an axis splits a value once",
        f"  line 1, `store a: b/dp, _` and line 2, `store a params: b!, _`: {twice}whole in the other; keep one of the two",
        f"  line 1, `store a: b/dp, _` and line 5, `store a grads: b/x, _`: {twice}split by x in the other; keep one of the two",
        f"  line 1, `store a: b/dp, _` and line 4, `store a state: b/dp/tp/dp, _`: {twice}"
        "split by dp, then tp, then dp in the other; keep one of the two",
    ]
    Plan("store a params: b/dp, _\nstore a state: b/dp/tp, _\nstore a grads: b!, _").check(Mesh("dp=2,tp=2"))
    Plan("store a: b/dp * b\nstore a: b * b/tp").check(Mesh("dp=2,tp=2"))
    with pytest.raises(PlanError, match="b in dim 0 is split by tp in one and whole in the other"):
        Plan("store a: b/dp * b/tp\nstore a: b * b!").check(Mesh("dp=2,tp=2"))


def test_reserved_words() -> None:
    """A lone line that begins with one is a plan by hand; no axis has the name."""
    for word in ("store", "remat", "keep", "offload"):
        with pytest.raises(PlanError, match=f"no axis may be called {word}: lines of plans begin with it"):
            Mesh(f"{word}=2")
        with pytest.raises(PlanError, match="this plan cannot be read"):
            resolve(f"{word} layers,", Mesh("dp=2"))


def test_an_axis_may_be_left_to_the_search_but_not_stages() -> None:
    assert str(resolve("dp: batch\ntp: auto\nx: auto", Mesh("dp=2,tp=2,x=2"))) == "dp: batch\ntp: auto\nx: auto"
    with pytest.raises(PlanError) as caught:
        resolve("dp: auto\npp: auto", Mesh("dp=2,pp=2"))
    assert str(caught.value) == (
        "the mesh dp=2,pp=2 cannot be planned:\n"
        "  line 2, `pp: auto`: pp has stages, which are searched for in any case\n"
        "    what to do: leave the line out"
    )


def test_pins_that_agree() -> None:
    pins = Plan("pin a: heads/tp, _\npin a: heads/tp * head!, hidden\npin a: heads, hidden!\npin a: _, _").pins
    assert contradictions(pins) == []


@pytest.mark.parametrize(
    ("mesh", "plan", "expected"),
    [
        ("dp=2,tp=2", None, "dp: batch\ntp: heads, ffn, vocab > features@products"),
        ("dp=2,tp=2,pp=2", "auto", "dp: auto\ntp: auto\npp: -"),
        ("dp=2,tp=1", " auto ", "dp: auto\ntp: -"),
        ("dp=2,tp=1", "tp: auto", "dp: batch\ntp: -"),
        ("dp=2,x=2", None, "dp: batch\nx: auto"),
        ("dp=2,x=2", "fsdp", "dp: batch; store params, grads, state\nx: auto"),
        ("batch=2,sp=2", None, "batch: batch\nsp: heads, ffn, vocab > seq > features@products"),
        ("fsdp=2,cp=2", None, "fsdp: batch; store params, grads, state\ncp: heads@attention > seq"),
        ("dp_replicate=2,dp_shard=2", None, "dp_replicate: batch\ndp_shard: batch; store params, grads, state"),
        ("dp_replicate=2,dp_shard=2", "hsdp", "dp_replicate: batch\ndp_shard: batch; store params, grads, state"),
        ("dp=2", "ddp", "dp: batch"),
        ("dp=2", "zero1", "dp: batch; store state"),
        ("dp=2", "zero2", "dp: batch; store grads, state"),
        ("dp=2,tp=2", "fsdp + megatron_sp", "dp: batch; store params, grads, state\ntp: heads, ffn, vocab > seq > features@products"),
        ("dp=2,tp=2", "zero1", "dp: batch; store state\ntp: heads, ffn, vocab > features@products"),
        ("dp=2,dp_shard=2", "ddp+fsdp", "dp: batch\ndp_shard: batch; store params, grads, state"),
        ("dp=2,tp=2,cp=2", "ulysses+megatron+ddp", "dp: batch\ntp: heads, ffn, vocab > features@products\ncp: heads@attention > seq"),
        ("dp=2,tp=2", "tp: ffn", "dp: batch\ntp: ffn"),
        ("dp=2,x=2", {"x": "-"}, "dp: batch\nx: -"),
        ("dp=2,ep=1,pp=1", None, "dp: batch\nep: experts > batch\npp: -"),
        ("dp=2,ep=4", None, "dp: batch\nep: experts > batch"),
        ("dp=2,ep=4", "auto", "dp: auto\nep: experts > batch"),
    ],
)
def test_every_axis_gets_an_entry(mesh: str, plan: str | dict[str, str] | None, expected: str) -> None:
    resolved = resolve(plan, Mesh(mesh))
    assert str(resolved) == expected
    again = resolve(resolved, Mesh(mesh))
    assert again == resolved and [entry.source for entry in again.axes] == [entry.source for entry in resolved.axes]


@pytest.mark.parametrize(
    ("mesh", "plan", "message"),
    [
        ("dp=2", "megatron+hsdp", "recipe megatron needs an axis tp\n  recipe hsdp needs an axis dp_replicate and dp_shard/fsdp"),
        (
            "dp=2,tp=2", "fdsp",
            "there is no recipe 'fdsp'; recipes are ddp, zero1, zero2, fsdp, hsdp, megatron, megatron_sp, ulysses, experts",
        ),
        ("dp=2", "ddp+ddp", "recipe ddp is there twice"),
        ("dp=2", "zero1+fsdp", "axis dp would take each of the recipes zero1, fsdp: keep one"),
        ("dp=2", "ddp+fsdp", "recipe fsdp has no axis left: another recipe of ddp+fsdp has taken dp/batch or dp_shard/fsdp"),
        ("dp=2", "tp: heads", "line 1, `tp: heads`: the mesh has no axis tp"),
    ],
)
def test_refused(mesh: str, plan: str | None, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve(plan, Mesh(mesh))
    assert message in str(caught.value)


def test_recipes_are_plans() -> None:
    for recipe in RECIPES.values():
        for name, text in recipe.entries:
            assert str(Plan(f"{name}: {text}")) == f"{name}: {text}"


def test_explain() -> None:
    assert explain("x: seq\n\ntp: heads@attention > seq; store params\npin fc.weight: ffn/tp,_ only", Mesh("dp=2,tp=4,x=1")) == (
        "axis  ranks  splits                 stores split  from\n"
        "dp    2      batch                  -             role dp, recipe ddp\n"
        "tp    4      heads@attention > seq  params        hand, line 3\n"
        "x     1      seq                    -             hand, line 1\n"
        "pin fc.weight: ffn/tp, _  only"
    )
    assert explain("fsdp", Mesh("dp=2")).splitlines()[1] == "dp    2      batch   params, grads, state  recipe fsdp"


def test_pins_of_operators() -> None:
    plan = Plan("pin op:*.mlp/backward/mm*: ffn/dp/tp, batch[2]/cp, -/sp\npin op: ffn/tp, _\npin op:/update: partial/dp/tp")
    first, second = plan.operators
    assert first == OperatorPin("*.mlp/backward/mm*", (OperatorSplit("ffn", ("dp", "tp")), OperatorSplit("batch", ("cp",), 2)), ("sp",))
    assert first.axes == ("dp", "tp", "cp", "sp") and first.where == "line 1, `pin op:*.mlp/backward/mm*: ffn/dp/tp, batch[2]/cp, -/sp`"
    assert second == OperatorPin("/update", partial=("dp", "tp")), "of the model itself"
    assert [pin.pattern for pin in plan.pins] == ["op"], "a parameter may be called so"
    names = ["h.0.mlp/backward/mm.2", "h.0.mlp/forward/mm", "h.0.mlp/backward/add", "mlp/backward/mm"]
    assert [first.matches(name) for name in names] == [True, False, False, False]
    assert Plan({"pin": ["op:lm_head: vocab/tp"]}) == Plan("pin op:lm_head: vocab/tp")
    with pytest.raises(PlanError, match=r"line 1, `pin op:a: b/x`: the mesh has no axis x \(there are: dp, tp\)"):
        Plan("pin op:a: b/x").check(Mesh("dp=2,tp=2"))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    plan = Plan(TEXT)
    plan.save(tmp_path / "a.plan")
    assert Plan.load(tmp_path / "a.plan") == plan and (tmp_path / "a.plan").read_text() == CANONICAL + "\n"
    with pytest.raises(PlanError, match=r"a\.toml: a plan is written as lines, to a file that ends in \.plan"):
        plan.save(tmp_path / "a.toml")
