"""Programs as text: what a stage prints as, that reading it back loses nothing, and what is refused where."""

from __future__ import annotations

import math
import operator
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from meshc import ir
from meshc.errors import ArtifactError
from meshc.ir import Record, Source, spmd
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.ops import optim  # noqa: F401  # the operators by name
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port, Stage
from meshc.text import allowed_operators
from meshc.text.parse import parse_stage, parse_type
from meshc.text.printer import DTYPES, hash_program, hash_stage, print_program, print_stage, print_type, side_table

aten = torch.ops.aten
F32 = torch.float32
SIZES = {"dp": 2, "tp": 4, "cp": 3}


def place(*dims: str, partial: tuple[tuple[str, str], ...] = (), zero: frozenset[tuple[int, int]] = frozenset()) -> Sharding:
    found = parse_type(f"f32[{', '.join(dims)}] whole" if set(dims) <= {"1"} else f"f32[{', '.join(dims)}]")
    assert isinstance(found, Record) and found.sharding is not None
    return Sharding(found.sharding.dims, partial, zero)


def add(graph: Graph, name: str, record: Any, target: Any = None, *args: Any, **kwargs: Any) -> Node:
    node = graph.placeholder(name) if target is None else graph.create_node("call_function", target, args, kwargs, name)
    if record is not None:
        ir.set_record(node, record)
    return node


def mlp(local: bool = False) -> PlainProgram:
    """y = x @ w, summed over dp: one matmul and one collective."""
    mesh = Mesh("dp=2,tp=4")
    graph = Graph()

    def value(sharding: Sharding, **more: Any) -> Record:
        return Record(local_shape(sharding, SIZES) if local else sharding.shape, F32, sharding, **more)

    x_at, w_at = place("batch 8", "hidden 6/dp"), place("hidden 6/dp", "ffn 10/tp")
    h_at = place("batch 8", "ffn 10/tp", partial=(("dp", "sum"),))
    line = Source("/home/someone/model.py", 12, "h = self.up_proj(x)", "mlp.up_proj")
    x = add(graph, "x", value(x_at))
    w = add(graph, "w", value(w_at, reason="pin mlp.*"))
    h = add(graph, "h", value(h_at, source=line, reason="tp takes ffn"), aten.mm.default, x, w)
    y_at = h_at.without_partial()
    y = add(graph, "y", value(y_at, source=line, reason="output is whole", phase="backward"), spmd.all_reduce, h, ["dp"], "sum")
    graph.output((y,))
    ports = (
        Port("input", "x", (8, 6), F32, x_at),
        Port("parameter", "mlp.up_proj.weight", (6, 10), F32, w_at, requires_grad=True),
    )
    stage = Stage("main", graph, tuple(port.key for port in ports), ("output:y",))
    outputs = (Port("output", "y", (8, 10), F32, y_at, of="loss"),)
    plan = Plan("dp: hidden\ntp: ffn")
    schedule = (Instruction("run", "main"),)
    return PlainProgram({"main": stage}, mesh, plan, ports, outputs, schedule, {"mask": torch.ones(2)}, {"dp": 2, "tp": 4})


MLP = """\
def main(
    x: "f32[batch 8, hidden 6/dp]" = "input:x",
    w: "f32[hidden 6/dp, ffn 10/tp]" = "parameter:mlp.up_proj.weight",  # pin mlp.*
):
    # h = self.up_proj(x)
    h: "f32[batch 8, ffn 10/tp] partial(sum: dp)" = aten.mm(x, w)  # model.py:12 mlp.up_proj; tp takes ffn
    # -------- backward --------
    # h = self.up_proj(x)
    y: "f32[batch 8, ffn 10/tp]" = all_reduce(h, ["dp"], "sum")  # model.py:12 mlp.up_proj; output is whole
    return {
        "output:y": y,
    }
"""


def test_a_stage_prints_as_python() -> None:
    program = mlp()
    assert print_stage(program.stage, program) == MLP
    assert print_stage(program.stage) == MLP


def test_a_per_rank_stage_says_for_which_axes() -> None:
    program = mlp(local=True)
    text = print_stage(program.stage, program)
    assert text == '@ranks("dp=2,tp=4")\n' + MLP
    again = parse_stage(text, side_table(program.stage))
    records = {node.name: ir.record(node) for node in again.graph.nodes if ir.has_record(node)}
    assert records["w"].shape == (3, 3) and records["h"].shape == (8, 3)
    for node in program.stage.graph.nodes:
        assert node.op == "output" or records[node.name] == ir.record(node)
    assert print_stage(again, program) == text


def test_without_its_program_a_local_shape_is_printed() -> None:
    stage = mlp(local=True).stage
    text = print_stage(stage)
    assert 'w: "f32[hidden 6/dp, ffn 10/tp] local(3, 3)"' in text
    assert print_stage(parse_stage(text, side_table(stage))) == text


def test_comments_take_no_part_in_hash_and_parse() -> None:
    program = mlp()
    bare = parse_stage(print_stage(program.stage, program))
    assert hash_stage(bare, program) == hash_stage(program.stage, program)
    assert "#" not in print_stage(bare, program)
    assert hash_stage(mlp(local=True).stage, program) != hash_stage(program.stage, program)


def test_a_whole_program_prints() -> None:
    text = print_program(mlp())
    assert MLP.rstrip() in text
    for line in (
        'mesh = "dp=2,tp=4"',
        "microbatches = 1",
        '    port("parameter:mlp.up_proj.weight", "f32[hidden 6/dp, ffn 10/tp]", requires_grad=True),',
        '    port("output:y", "f32[batch 8, ffn 10/tp]", of="loss"),',
        '    run(stage="main"),',
    ):
        assert line in text.splitlines()
    compile(text, "program", "exec")  # it is Python to an editor
    assert text == print_program(mlp()) and "0x" not in text
    other = mlp()
    other.constants["mask"] = torch.zeros(2)
    assert hash_program(mlp()) == hash_program(mlp()) != hash_program(other)


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("f32[]", Record((), F32)),
        ("f32[] whole", Record((), F32, Sharding())),
        ("bf16[1, 1] whole", Record((1, 1), torch.bfloat16, Sharding(((), ())))),
        ("b8[8, 128]", Record((8, 128), torch.bool)),
        ("i64[1, 0]", Record((1, 0), torch.int64)),
        ("int", Record()),
        ("f32[] partial(sum: tp, max: dp)", Record((), F32, Sharding((), (("tp", "sum"), ("dp", "max"))))),
        (
            "f16[batch 8/dp/cp, heads 4/tp * head 32, 1] partial(min: ep)",
            Record(
                (8, 128, 1),
                torch.float16,
                Sharding(((Part("batch", 8, ("dp", "cp")),), (Part("heads", 4, ("tp",)), Part("head", 32)), ()), (("ep", "min"),)),
            ),
        ),
    ],
)
def test_types(text: str, record: Record) -> None:
    assert print_type(record) == text
    assert parse_type(text) == record


def test_a_type_says_which_padding_is_zero() -> None:
    sharding = place("batch 9/dp", "heads 5/tp * head 32", "seq 7/cp", zero=frozenset({(2, 0), (1, 0)}))
    text = print_type(Record(sharding.shape, F32, sharding))
    assert text == "f32[batch 9/dp, heads 5/tp * head 32, seq 7/cp] pad(zero: 1.0, 2.0)"
    found = parse_type(text)
    assert isinstance(found, Record) and found.sharding is not None
    assert found.sharding.zero == {(1, 0), (2, 0)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("f33[8]", "f33 is no dtype; these are: b8, i8"),
        ("f32[batch 8, 7]", "dims have factors in all places (1 aside) or in none"),
        ("f32[batch/dp]", "'batch/dp' is not FACTOR SIZE/AXIS/..."),
        ("f32[8] partial(sum: tp)", "a value without factors has no partial"),
        ("f32[a 8] partial(mean: tp)", "'mean: tp' is not REDUCTION: AXIS, with a reduction of sum, max, min"),
        ("f32[a 8] pad(zero: 0.1)", "pad() names a part that is not there"),
        ("f32[a 8] pad(one)", "pad(zero: 0.1, 2.0) lists parts as DIM.POSITION"),
        ("f32[a 8] stride(1)", "stride(1) is unknown or there twice"),
        ("f32[a 8/tp]", "is split over tp, but @ranks has dp"),
        ("f32 8", "is no type; for example f32[batch 8/dp"),
        ("(f32[8], )", "is no list of types"),
    ],
)
def test_a_wrong_type_is_refused(text: str, why: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        parse_type(text, {"dp": 2})
    assert why in str(caught.value)


words = st.sampled_from(["batch", "seq", "heads", "mlp.up_proj.1", "größe", "x-y_2"])
dtypes = st.sampled_from(sorted(DTYPES.values(), key=str))
parts = st.builds(Part, words, st.integers(0, 12), st.lists(st.sampled_from(sorted(SIZES)), unique=True, max_size=2).map(tuple))


@st.composite
def records(draw: st.DrawFn, local: bool) -> Record:
    if draw(st.booleans()):
        return Record(tuple(draw(st.lists(st.integers(0, 9), max_size=3))), draw(dtypes))
    dims = tuple(tuple(draw(st.lists(parts, max_size=2))) for _ in range(draw(st.integers(0, 3))))
    partial = draw(st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.sampled_from(["sum", "max", "min"])), max_size=2))
    places = [(dim, position) for dim, position, _ in Sharding(dims).parts()]
    zero = frozenset(draw(st.lists(st.sampled_from(places), max_size=2))) if places else frozenset()
    sharding = Sharding(dims, tuple(partial), zero)
    shape = local_shape(sharding, SIZES) if local else sharding.shape
    text = st.text(max_size=9)
    source = Source(draw(text), draw(st.integers(0, 99)), draw(text), draw(text))
    phase = draw(st.sampled_from(["forward", "update"]))
    return Record(shape if draw(st.booleans()) else (3, 1), draw(dtypes), sharding, source, draw(text), phase, again=draw(st.booleans()))


numbers = st.one_of(st.integers(), st.floats(), st.just(-0.0), st.booleans(), st.none(), st.just(math.inf))
others = st.sampled_from(
    [torch.device("cpu"), torch.device("cuda", 1), torch.strided, torch.channels_last, torch.preserve_format, *DTYPES.values()]
)
literals = st.recursive(
    st.one_of(numbers, others, st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=5,
)
names = st.sampled_from(["x", "mm", "view_1", "inf", "cpu", "f32", "aten", "all_reduce", "sum", "a_01", "getitem"])


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    local = draw(st.booleans())
    graph = Graph()
    values = [add(graph, draw(names), draw(st.none() | records(local))) for _ in range(draw(st.integers(1, 3)))]
    inputs = tuple(f"{draw(st.text(max_size=5))}:{index}" for index in range(len(values)))
    for _ in range(draw(st.integers(0, 6))):
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        made = draw(st.none() | records(local))
        match draw(st.integers(0, 5)):
            case 0:
                node = add(graph, draw(names), made, aten.add.Tensor, x, y, alpha=draw(numbers))
            case 1:
                node = add(
                    graph, draw(names), made, aten.full.default, draw(literals), draw(numbers), dtype=draw(dtypes), device=draw(others)
                )
            case 2:
                node = add(graph, draw(names), made, aten.index.Tensor, x, [None, y])
            case 3:
                node = add(graph, draw(names), made, spmd.all_gather, x, ["tp", "dp"], draw(literals))
            case 4:
                node = add(graph, draw(names), Record(), spmd.coordinate, "tp")
            case _:
                several = add(
                    graph, draw(names), (draw(records(local)), draw(records(local))), aten.max.dim, x, [draw(literals)]
                )
                node = add(graph, draw(names), made, operator.getitem, several, 1)
        values.append(node)
    results = draw(st.lists(st.sampled_from(values) | st.none(), max_size=3))
    graph.output(tuple(results))
    return Stage("main", graph, inputs, tuple(f"output:{index}" for index in range(len(results))))


@settings(max_examples=150)
@given(stages())
def test_reading_a_text_back_loses_nothing(stage: Stage) -> None:
    program = PlainProgram({}, Mesh("dp=2"), Plan(""), (), (), axis_sizes=SIZES)
    for owner in (None, program):
        text = print_stage(stage, owner)
        table = side_table(stage)
        again = parse_stage(text, table)
        assert print_stage(again, owner) == text
        assert side_table(again) == table
        assert (again.name, again.inputs, again.outputs) == (stage.name, stage.inputs, stage.outputs)
        for old, new in zip(stage.graph.nodes, again.graph.nodes, strict=True):
            assert (old.op, old.op == "placeholder" or old.target) == (new.op, new.op == "placeholder" or new.target)
            assert old.meta.get(ir.KEY) == new.meta.get(ir.KEY)
            if ir.has_record(old):
                assert [one.sharding and one.sharding.zero for one in ir.records(old)] == [
                    one.sharding and one.sharding.zero for one in ir.records(new)
                ]
        again.graph.lint()


def test_a_value_named_like_a_word_is_renamed() -> None:
    graph = Graph()
    clash, free = add(graph, "cpu", None), add(graph, "cpu_1", None)
    graph.output((clash, free))
    text = print_stage(Stage("main", graph, ("input:a", "input:b"), ("output:a", "output:b")))
    assert '    cpu_2 = "input:a",' in text and '    cpu_1 = "input:b",' in text and '"output:a": cpu_2' in text


def body(*lines: str, last: str = 'return {"output:y": x}') -> str:
    return 'def main(\n    x: "f32[2, 2]" = "input:x",\n):\n' + textwrap.indent("\n".join([*lines, last]), "    ") + "\n"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (body('y: "f32[2]" = os.system("true")'), 4, "the operator os.system is not on the allow-list"),
        (body('y: "f32[2]" = aten.from_file("/etc/passwd")'), 4, "aten.from_file is not on the allow-list: saved programs do not hold it"),
        (body('y: "f32[2]" = aten.rand([2])'), 4, "it draws from torch's generator; programs draw by meshc.random"),
        (body('y: "f32[2]" = eval("1")'), 4, "the operator eval is not on the allow-list"),
        (body('y: "f32[2]" = (lambda: 1)()'), 4, "is no operator's name"),
        (body('y: "f32[2]" = aten.relu(z)'), 4, "z is not defined above"),
        (body('y: "f32[2]" = aten.relu(aten.relu(x))'), 4, "aten.relu(x) may not stand here; an argument is a value's name, a number"),
        (body('y: "f32[2]" = aten.relu(*x)'), 4, "*x may not stand here"),
        (body('y: "f32[2]" = aten.relu(**x)'), 4, "** may not stand here"),
        (body('y: "f32[2]" = aten.relu(x.grad)'), 4, "x.grad may not stand here"),
        (body('y: "f32[2]" = x'), 4, 'a line is NAME: "TYPE" = OPERATOR(ARGUMENTS)'),
        (body("aten.relu(x)"), 4, 'a line is NAME: "TYPE" = OPERATOR(ARGUMENTS)'),
        (body("import os"), 4, 'a line is NAME: "TYPE" = OPERATOR(ARGUMENTS)'),
        (body("y: int = aten.relu(x)"), 4, "a type is a string"),
        (body('y: "f34[2]" = aten.relu(x)'), 4, "f34 is no dtype"),
        (body('x: "f32[2]" = aten.relu(x)'), 4, "x is assigned twice"),
        (body('f32: "f32[2]" = aten.relu(x)'), 4, "f32 is a word of the language"),
        (body(last="return x"), 4, "a stage ends with its results"),
        (body(last='y: "f32[2]" = aten.relu(x)'), 4, "a stage ends with its results"),
        (body(last="return {**x}"), 4, "a result's key is a string"),
        (body() + "import os\n", 5, "a stage's text is one function and nothing else"),
        ("import os\n", 1, "a stage's text is one function and nothing else"),
        ("", 1, "a stage's text is one function and nothing else"),
        ("def main(x):\n    return {}\n", 1, "every parameter has a key"),
        ('def main(*x: "f32[2]"):\n    return {}\n', 1, "a parameter is NAME"),
        ("@ranks(dp=2)\ndef main():\n    return {}\n", 1, "there is one @ranks, with one text"),
        ('@ranks("dp")\ndef main():\n    return {}\n', 1, "lists no axes"),
        ("@cache\ndef main():\n    return {}\n", 1, "the only decorators are @ranks"),
        (body()[:-4], 4, "this is no Python"),
    ],
)
def test_what_a_text_may_not_hold(text: str, line: int, why: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        parse_stage(text, where="stages/main.py")
    message = str(caught.value)
    assert why in message and message.startswith(f"stages/main.py, line {line}: ")
    assert text == "" or message.endswith("\n    " + text.split("\n")[line - 1].strip())


def test_what_has_no_text_is_refused_with_its_name() -> None:
    graph = Graph()
    graph.output((graph.create_node("call_function", aten.bernoulli.default, (torch.Generator(),), name="draw"),))
    with pytest.raises(ArtifactError, match="draw, an argument of aten.bernoulli: a Generator cannot stand in a program's text"):
        print_stage(Stage("main", graph, (), ("output:y",)))
    graph = Graph()
    graph.output((graph.create_node("get_attr", "weight"),))
    with pytest.raises(ArtifactError, match="weight is a get_attr of 'weight': a program's text holds calls of operators only"):
        print_stage(Stage("main", graph, (), ("output:y",)))
    with pytest.raises(ArtifactError, match="stage main has 2 parameters and 1 keys for them"):
        print_stage(Stage("main", mlp().stage.graph, ("input:x",), ("output:y",)))
    with pytest.raises(ArtifactError, match="'a b' cannot stand in a type"):
        print_type(Record((8,), F32, Sharding(((Part("a b", 8),),))))


OFF_THE_LIST = """
    aten.save aten.from_file aten._print aten.set_.source_Tensor aten.set_.source_Storage aten.resize_
    aten.record_stream aten.item aten.mm.out aten.manual_seed aten.native_dropout aten.bernoulli_.float
    aten._sparse_coo_tensor_unsafe aten._nested_view_from_buffer aten.mm.default aten.mm.nothing aten.mm.overloads
    aten.mm._schema aten.__class__ aten.no_such_operator aten aten. quantized.add torch.load prims.device_put
    aten.as_strided aten.as_strided_ aten.as_strided_copy aten._reshape_alias aten.set_ aten.resize_as_ aten.copy_ aten.add_.Tensor
    aten._foreach_add_.List aten._fused_adamw_ aten._fused_adagrad_ aten.native_batch_norm aten.index_put_ aten._index_put_impl_
    aten._scaled_dot_product_flash_attention aten._cudnn_rnn aten._local_scalar_dense aten.nonzero meshc.adam_ meshc.no_such_operator
"""


@pytest.mark.parametrize("name", OFF_THE_LIST.split())
def test_operators_off_the_list(name: str) -> None:
    with pytest.raises(ArtifactError, match="is not on the allow-list: .*; listed are those that meshc compiles models to"):
        allowed_operators.resolve(name)


@pytest.mark.parametrize(
    "target",
    [
        aten.mm.default,
        aten.add.Tensor,
        aten.native_layer_norm_backward.default,
        torch.ops.meshc.adam_many_.default,
        aten.convolution_backward.default,
        aten.empty.memory_format,
        aten.index_put.default,
        operator.getitem,
        *spmd.FUNCTIONS.values(),
    ],
)
def test_operators_on_the_list(target: Any) -> None:
    assert allowed_operators.resolve(allowed_operators.name_of(target)) is target


def test_other_callables_have_a_spelling_but_no_place() -> None:
    assert allowed_operators.spelling(torch.nn.functional.silu) == "torch.nn.functional.silu"
    with pytest.raises(ArtifactError, match="the operator torch.nn.functional.silu is not on the allow-list: it is no operator"):
        allowed_operators.name_of(torch.nn.functional.silu)


def test_operators_of_earlier_versions_are_those_that_took_their_place() -> None:
    for name, (now, order) in allowed_operators.EARLIER.items():
        assert allowed_operators.resolve(name) is allowed_operators.resolve(now)
        assert name not in allowed_operators.OPERATORS
        if order:
            arguments = [argument.name for argument in allowed_operators.resolve(now)._schema.arguments]  # type: ignore[attr-defined]
            assert list(allowed_operators.reorder_arguments(name, order.split())) == arguments
