"""Texts that say what is not so: each is refused before anything runs, with its file and line."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
import torch

from meshc.check import check_program
from meshc.errors import ArtifactError
from meshc.ir import Record, record
from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port
from meshc.text.parse import parse_one_type, parse_stage

INPUTS = {
    "x": ("input:x", "f32[batch 4/dp, width 8]"),
    "i": ("input:i", "i64[5]"),
    "m": ("input:m", "b8[2, 8]"),
    "w": ("parameter:w", "f32[8, 6]"),
    "v": ("parameter:v", "f32[8, 6]"),
    "s": ("state:w/exp_avg", "f32[8, 6]"),
    "n": ("state:w/step", "f32[]"),
    "r": ("number:0.lr", "f64[]"),
    "c": ("constant:c", "f32[3]"),
    "q": ("random:seed_step", "i64[2]"),
}


def program(*lines: str, result: str = "x", **changes: str) -> PlainProgram:
    """A program of one stage on dp=2, whose text is these lines after the parameters; `changes` are other types of parameters."""
    types = {name: type_ for name, (_, type_) in INPUTS.items()} | changes
    parameters = [f'    {name}: "{types[name]}" = "{key}",' for name, (key, _) in INPUTS.items()]
    body = [f"    {line}" for line in lines]
    text = ['@ranks("dp=2")', "def main(", *parameters, "):", *body, f'    return {{"output:y": {result}}}', ""]
    stage = parse_stage("\n".join(text), where="stages/main.py")
    (output,) = stage.graph.find_nodes(op="output")
    made = record(output.args[0][0])
    outputs = (Port("output", "y", made.shape if made.sharding is None else made.sharding.shape, made.dtype or torch.int64, made.sharding),)
    inputs = tuple(port(key, parse_one_type(type_)) for key, type_ in INPUTS.values())
    schedule, constants = (Instruction("run", "main"),), {"c": torch.ones(3)}
    return PlainProgram({"main": stage}, Mesh("dp=2"), Plan("dp: batch"), inputs, outputs, schedule, constants, {"dp": 2})


def port(key: str, value: Record) -> Port:
    assert value.dtype is not None
    return Port(*key.split(":", 1), value.shape, value.dtype, value.sharding)


FIRST = 3 + len(INPUTS) + 1
"""The line on which the body of a text begins."""


def told(made: PlainProgram) -> str:
    with pytest.raises(ArtifactError) as caught:
        check_program(made, "program.json")
    assert "what to do: compile and save the program again" in str(caught.value)
    return str(caught.value)


SOUND = """
    y: "f32[2, 6]" = aten.mm(x, w)
    y: "f32[batch 4/dp, width 8]" = aten.relu(x)
    y: "f32[4, 8]" = all_gather(x, ["dp"], 0)
    y: "f32[8, 6]" = all_reduce(v, ["dp"], "sum")
    y: "f32[4, 12]" = all_to_all(v, ["dp"], 0, 1)
    y: "f32[2, 8]" = ring_shift(x, ["dp"], 1)
    y: "f32[2, 8]" = to_zigzag(x, ["dp"], 0)
    y: "f32[2, 8]" = from_zigzag(x, ["dp"], 1)
    y: "int" = ring_place(1, 1, 2)
    y: "f32[2, 8]" = aten.slice.Tensor(x, 0, 0, 9223372036854775807)
    y: "f32[2, 5]" = aten.index_select(x, 1, i)
    y: "f32[4, 8]" = meshc.uniform(q, 3, [4, 8], [4, 8], [0, 0], f32)
    y: "f32[2, 8]" = aten.add.Tensor(x, 4611686018427387904)
    y: "int" = coordinate("dp")
    y: "int" = meshc.sgd_plain_many_([w, v], [v, w], r, r, False)
"""


@pytest.mark.parametrize("line", [line.strip() for line in SOUND.strip().splitlines()])
def test_sound_lines_are_let_through(line: str) -> None:
    check_program(program(line), "program.json")


WRONG: list[tuple[str, str]] = [
    # what is declared is not what is made
    ('y: "f32[2, 7]" = aten.mm(x, w)', "its operator gives f32[2, 6], declared is f32[2, 7]"),
    ('y: "f64[2, 6]" = aten.mm(x, w)', "its operator gives f32[2, 6], declared is f64[2, 6]"),
    ('y: "f32[12]" = aten.mm(x, w)', "its operator gives f32[2, 6]"),
    ('y: "f32[900000]" = aten.relu(x)', "its operator gives f32[2, 8]"),
    ('y: "int" = aten.relu(x)', "its operator gives f32[2, 8], declared is int"),
    ('y: "f32[]" = coordinate("dp")', "its operator gives int, declared is f32[]"),
    ('y: "f32[batch 5/dp, width 8]" = aten.relu(x)', "declared is f32[batch 5/dp, width 8], [3, 8] on a rank"),
    ('y: "f32[batch 4/dp, width 8] local(2, 9)" = aten.relu(x)', "its shape is [2, 9], but a rank's tile of"),
    ('y: "(f32[2, 8], f32[2, 8])" = aten.relu(x)', "its operator gives f32[2, 8], declared is (f32[2, 8], f32[2, 8])"),
    ('y: "(f32[2], i64[2], i64[2])" = aten.max.dim(x, 1)', "its operator gives 2 results, 3 are declared"),
    ('y: "f32[2]" = aten.max.dim(x, 1)', "its operator gives (f32[2], i64[2]), declared is f32[2]"),
    ('y = aten.relu(x)', "it has no type"),
    # operands that the operator does not take
    ('y: "f32[2, 6]" = aten.mm(x, x)', "its operator does not take these operands: RuntimeError: a and b must have same reduction dim"),
    ('y: "f32[2, 5]" = aten.index_select(x, 1, c)', "its operator does not take these operands: "),
    ('y: "f32[5, 8]" = aten.embedding(x, c)', "its operator does not take these operands: "),
    ('y: "f32[2, 5]" = aten.gather(x, 1, c)', "its operator does not take these operands: "),
    ('y: "f32[2, 8]" = aten.relu(x, 3, 4)', "its operator does not take these operands: "),
    ('y: "f32[2, 8]" = aten.relu(x, out=x)', "its operator does not take these operands: "),
    ('y: "f32[2, 8]" = aten.relu("x")', "its operator does not take these operands: "),
    ('y: "f32[2, 8]" = meshc.dropout_backward(x, c, 0.5)', "its operator does not take these operands: "),
    ('y: "f32[2]" = meshc.take(x, c, -100)', "its operator does not take these operands: "),
    ('y: "f32[2, 8]" = aten.view(x, [-1, -1])', "its operator does not take these operands: "),
    ('y: "f32[17]" = aten.view(x, [17])', "its operator does not take these operands: "),
    ('y: "f32[2, 9]" = aten.expand(x, [2, 9])', "its operator does not take these operands: "),
    ('y: "f32[1, 8]" = aten.select.int(x, 0, 5)', "its operator does not take these operands: "),
    # sizes that a kernel would believe
    ('y: "f32[-1]" = aten.full([-1], 0.0)', "'f32[-1]' is no type"),
    ('y: "f32[4]" = aten.full([-4], 0.0)', "its operator does not take these operands: "),
    (f'y: "f32[{2**62}]" = aten.full([{2**62}], 0.0)', "is no type"),
    (f'y: "f32[{2**47}]" = aten.full([{2**47}], 0.0)', "is larger than any value of a program"),
    (f'y: "f32[4]" = aten.full([{2**62}], 0.0)', "larger than any size of a program"),
    (f'y: "f32[{2**40}, {2**40}]" = aten.full([{2**40}, {2**40}], 0.0)', "is larger than any value of a program"),
    (f'y: "f32[2, 8]" = aten.constant_pad_nd(x, [{2**63 - 1}, {-(2**63)}])', "larger than any size of a program"),
    (f'y: "f32[2, 8]" = aten.slice.Tensor(x, 0, 0, {2**64})', "larger than any size of a program"),
    (f'y: "f32[{", ".join(["1"] * 40)}]" = aten.view(x, [2, 8])', "it has 40 dims; values have at most 32"),
    ('y: "(f32[8], f32[8])" = aten.unbind.int(w)', "it gives 8 results, 2 are declared"),
    ('y: "(f32[8, 6], f32[8, 6])" = aten.split.Tensor(w, 1)', "it gives 8 results, 2 are declared"),
    ('y: "f32[2, 8]" = aten.empty_like(x, pin_memory=True)', "programs pin no memory"),
    ('y: "f32[2]" = aten.full([2], 0.0, device=meta)', "a value on the meta device has no memory"),
    # collectives, tiles, integers
    ('y: "f32[2, 8]" = all_reduce(x, ["tp"], "sum")', "there is no axis 'tp'; the axes are dp"),
    ('y: "f32[2, 8]" = all_reduce(x, ["dp", "dp"], "sum")', "a collective is over each axis once"),
    ('y: "f32[2, 8]" = all_reduce(x, [], "sum")', "a collective is over a list of axes"),
    ('y: "f32[2, 8]" = all_reduce(x, "dp", "sum")', "a collective is over a list of axes"),
    ('y: "f32[2, 8]" = all_reduce(x, ["dp"], "mean")', "'mean' is no reduction"),
    ('y: "f32[2, 8]" = all_reduce(x, ["dp"])', "all_reduce takes 3 arguments, not 2"),
    ('y: "f32[2, 8]" = all_reduce(x, ["dp"], reduction="sum")', "all_reduce takes no keywords"),
    ('y: "f32[2, 8]" = all_gather(x, ["dp"], 0)', "its operator gives f32[4, 8]"),
    ('y: "f32[2, 16]" = all_gather(x, ["dp"], 2)', "the dim is 2, no integer from 0 to 1"),
    ('y: "f32[2, 16]" = all_gather(x, ["dp"], -1)', "the dim is -1, no integer from 0 to 1"),
    ('y: "f32[1]" = reduce_scatter(c, ["dp"], 0, "sum")', "dim 0 has 3 positions, which 2 ranks do not divide"),
    ('y: "f32[2, 8]" = broadcast(x, ["dp"], 2)', "the index of the rank that sends is 2, no integer from 0 to 1"),
    ('y: "f32[2, 8]" = broadcast(x, ["dp"], True)', "the index of the rank that sends is True"),
    ('y: "f32[2, 8]" = ring_shift(x, ["dp"], 2)', "the number of places is 2, no integer from 1 to 1"),
    ('y: "f32[2, 8]" = ring_shift(x, [], 1)', "a collective is over a list of axes"),
    ('y: "f32[2, 8]" = to_zigzag(x, ["tp"], 0)', "tp"),
    ('y: "f32[2, 8]" = from_zigzag(x, ["dp"], 2)', "the dim is 2, no integer from 0 to 1"),
    ('y: "int" = ring_place(0, 3, 2)', "the number of places is 3, no integer from 0 to 2"),
    ('y: "int" = ring_place(0, 1, 0)', "the number of ranks is 0"),
    ('y: "f32[2, 9]" = halo(x, ["dp"], 1, 16, [16, 1, 0], 0.0)', "a window is [size, stride, offset, length]"),
    ('y: "f32[2, 9]" = halo(x, ["dp"], 1, 32, [32, 1, 0, 9], 0.0)', "dim 1 has 8 positions; a rank has 16 there"),
    ('y: "f32[2, 8]" = halo_sum(x, ["dp"], 1, 16, [16, 1, 0, 9])', "dim 1 has 8 positions; a rank has 9 there"),
    ('y: "f32[2, 8]" = halo(x, ["dp"], 1, 16, [16, 1, 0, -9], 0.0)', "has a negative size, stride or length"),
    ('y: "f32[2, 4]" = shard(x, 1, 2, 2)', "the tile is 2, no integer from 0 to 1"),
    ('y: "f32[2, 8]" = shard(x, 1, 0, 0)', "the number of tiles is 0"),
    ('y: "f32[2, 8]" = mask(x, 5, 1, 0.0)', "the dim is 5"),
    ('y: "f32[2, 8]" = mask(x, 0, 1, "0")', "'0' is no number"),
    ('y: "f32[2, 8]" = keep_first(x, "0")', "the index is '0'"),
    ('y: "int" = coordinate("ep")', "there is no axis 'ep'"),
    ('y: "int" = tile_start(9, [2], [0, 1])', "a tile has a count and a coordinate for each axis"),
    ('y: "int" = tile_start(9, [0], [1])', "the number of tiles is 0"),
    ('y: "f32[2, 8]" = getitem(x, 0)', "it takes result 0 of a value that has one"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "why"), WRONG)
def test_a_wrong_line_is_refused_with_its_place(line: str, why: str) -> None:
    try:
        made = program(line)
    except ArtifactError as error:  # the grammar refuses it
        message = str(error)
    else:
        message = told(made)
    assert f"stages/main.py, line {FIRST}: " in message and why in message
    assert line.replace('"', "")[:20] in message.replace('"', "")


OFF_THE_LIST = """
    aten._reshape_alias(x, [900000], [1])
    aten.as_strided(x, [900000], [1])
    aten.as_strided_copy(x, [900000], [1])
    aten.as_strided_scatter(x, x, [900000], [1])
    aten.resize_(x, [900000])
    aten.resize_as_(x, w)
    aten.set_.source_Tensor(x, w)
    aten.mm.out(x, w, out=x)
    aten.add_.Tensor(w, 1.0)
    aten.copy_(w, v)
    aten.index_put_(w, [i], x)
    aten._index_put_impl_(w, [i], x, False, True)
    aten._foreach_add_.Scalar([w], 1.0)
    aten._fused_adagrad_([w], [v], [s], [n])
    aten.max_pool2d_with_indices_backward.grad_input(x, x, x, x)
    aten._local_scalar_dense(n)
    aten.from_file("/etc/passwd")
    aten.data(x)
    aten.rand([2])
    meshc.adam_(w, v, s, s, n, r, r, r, r, r, True, False)
    quantized.add(x, x)
    os.system("true")
"""


@pytest.mark.parametrize("call", [line.strip() for line in OFF_THE_LIST.strip().splitlines()])
def test_operators_that_no_model_is_compiled_to(call: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        program(f'y: "f32[900000]" = {call}')
    assert f"stages/main.py, line {FIRST}: the operator" in str(caught.value)
    assert "is not on the allow-list" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("meshc.sgd_plain_many_([x], [x], r, r, False)", "it writes into x, in the memory of input:x, which is no parameter"),
        ("meshc.sgd_plain_many_([c], [c], r, r, False)", "it writes into c, in the memory of constant:c, which is no parameter"),
        ("meshc.sgd_plain_many_([t], [x], r, r, False)", "it writes into t, in the memory of input:x, which is no parameter"),
        ("meshc.sgd_plain_many_([w, w], [v, v], r, r, False)", "it writes into one value twice"),
        ("meshc.sgd_plain_many_([w], [c], r, r, False)", "its operator does not take these operands: "),
        ("meshc.sgd_plain_many_([w], [v, v], r, r, False)", "its operator does not take these operands: "),
    ],
)
def test_an_update_writes_into_what_the_program_keeps(call: str, why: str) -> None:
    message = told(program('t: "f32[2, 8]" = mask(x, 0, 2, 0.0)', f'y: "int" = {call}'))
    assert f"stages/main.py, line {FIRST + 1}: y = meshc.sgd_plain_many_(...): {why}" in message


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('y: "f32[0, 8]" = aten.slice.Tensor(x, 0, k, k)', "its start is a number that depends on the rank"),
        ('y: "f32[8]" = aten.select.int(x, 0, k)', "its index is a number that depends on the rank"),
        ('y: "f32[0]" = aten.full([k], 0.0)', "its size is a number that depends on the rank"),
        ('y: "f32[0, 8]" = meshc.uniform(q, 3, [4, 8], [k, 8], [0, 0], f32)', "its local_shape is a number that depends on the rank"),
    ],
)
def test_a_ranks_place_decides_no_shape(line: str, why: str) -> None:
    message = told(program('k: "int" = coordinate("dp")', line))
    assert f"stages/main.py, line {FIRST + 1}: " in message and why in message
    check_program(program('k: "int" = coordinate("dp")', 'y: "f32[2, 8]" = aten.add.Tensor(x, k)'), "program.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"w": "f32[8, 7]"}, "line 6: it takes parameter:w as f32[8, 7], but program.json says f32[8, 6]"),
        ({"w": "f64[8, 6]"}, "line 6: it takes parameter:w as f64[8, 6]"),
        ({"c": "f32[900000]"}, "line 11: it takes constant:c as f32[900000], but program.json says f32[3]"),
        ({"x": "f32[batch 4/tp, width 8] local(2, 8)"}, "names the axis tp; the axes are dp"),
        ({"x": "f32[batch 4/dp/dp, width 8]"}, "uses the axis dp twice"),
        ({"i": "int"}, "line 4: the parameter i: a stage takes tensors"),
    ],
)
def test_a_stage_takes_what_the_signature_says(changes: dict[str, str], why: str) -> None:
    assert why in told(program(**changes))


def other(**changes: Any) -> PlainProgram:
    made = program('y: "f32[2, 6]" = aten.mm(x, w)', result="y")
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"constants": {}}, "program.json: there is no constant c; there are none"),
        ({"constants": {"c": torch.ones(4)}}, "program.json: the constant c is torch.float32 [4], the program takes torch.float32 [3]"),
        ({"outputs": (Port("output", "y", (9, 6), torch.float32),)}, "it gives output:y as f32[2, 6], but program.json says f32[9, 6]"),
        ({"outputs": (Port("output", "z", (2, 6), torch.float32),)}, "program.json: nothing gives output:z"),
        ({"axis_sizes": {"dp": 4}}, "program.json: the axes are {'dp': 4}, but the mesh is dp=2"),
        ({"axis_sizes": {"dp": 2, "mb": 3}}, "there are 1 microbatches, but the axis mb has 3"),
        ({"schedule": (Instruction("run", "main", 7),)}, "the schedule names microbatch 7; there are 1, from 0 on"),
        ({"schedule": (Instruction("run", "none"),)}, "the schedule runs 'none', but the stages are main"),
        ({"schedule": (Instruction("send", "main"),)}, "the instruction 'send', which no program without pipeline stages has"),
        ({"schedule": (Instruction("add", "main", 0, "part:y", "sum:y"),)}, "takes part:y into sum:y, and nothing has made it since"),
        ({"schedule": ()}, "program.json: nothing gives output:y"),
        ({"inputs": ()}, "main of microbatch 0 needs input:x, which is not there"),
        ({"backend": "os"}, "program.json: the backend is 'os'; a program is for eager or inductor"),
    ],
)
def test_signature_constants_and_schedule_agree_with_the_stages(changes: dict[str, Any], why: str) -> None:
    check_program(other(), "program.json")
    assert why in told(other(**changes))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"seed": "1"}, "info: seed is '1', not an integer of 64 bits"),
        ({"seed": 1 << 80}, "not an integer of 64 bits"),
        ({"numbers": ["0.lr"]}, "not numbers by name"),
        ({"numbers": {"0.lr": "0.1"}}, "not numbers by name"),
        ({"fresh": {"w/exp_avg": [0.0]}}, "not numbers, or null, by name"),
        ({"output_paths": "y"}, "info: output_paths is 'y', not a list of paths"),
        ({"work": [["up", "aten.mm", "forward"]]}, "not rows of a module"),
        ({"work": [["up", "aten.mm", "forward", 10**400, {"dp": "split"}]]}, "not rows of a module"),
        ({"numbers": {"0.lr": 10**400}}, "not numbers by name"),
        ({"work": [["up", "aten.mm", "forward", 1, {"tp": "split"}]]}, "a row of work is of 'up' and says nothing of the axes dp"),
    ],
)
def test_what_stands_beside_the_text_is_of_its_kind(entry: dict[str, Any], why: str) -> None:
    message = told(other(info=entry))
    assert message.startswith("program.json, info: ") and why in message


def test_all_faults_are_told_at_once_and_each_once() -> None:
    message = told(program('a: "f32[2, 7]" = aten.mm(x, w)', 'b: "f32[2, 7]" = aten.relu(a)', 'c_1: "f32[9]" = aten.relu(b)'))
    assert len(re.findall(r"^stages/main.py, line", message, re.MULTILINE)) == 2, textwrap.indent(message, "  ")
    assert f"line {FIRST}: " in message and f"line {FIRST + 2}: " in message
