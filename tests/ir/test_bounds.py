"""Files that ask for more than any program holds: each is refused by name, before memory and minutes are taken."""

from __future__ import annotations

import json
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshc
from meshc import artifact
from meshc.__main__ import main
from meshc.cost.devices import device, read_devices, write_devices
from meshc.errors import ArtifactError, PlanError, ScheduleError
from meshc.ir import sizes
from meshc.ir.bounds import MOST_RANKS, parse_json
from meshc.ir.mesh import Mesh
from meshc.pipelining import perfetto_trace, schedule
from meshc.plan.plan import Plan
from meshc.program.program import Port
from meshc.runtime.saved.checkpoint_folder import SavedState, save_state
from meshc.text.parse import parse_sizes, parse_type
from tests.broad import broad
from tests.models import mlp

pytestmark = pytest.mark.timeout(60)

POWERS = "((9 ** 7) ** 7)"


def quickly(call: Callable[[], Any], kind: type[Exception], said: str) -> None:
    """The call is refused within 500 MB. What is not bounded takes minutes, or does not end: then this file's limit of a minute ends it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(kind, match=said):
        call()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "program"
    meshc.compile(mlp().model, Mesh("dp=2"), kwargs={"x": torch.ones(4, 24)}).save(path)
    return path


def edited(saved: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(saved, to)
    told = json.loads((to / artifact.PROGRAM).read_text())
    change(told)
    (to / artifact.PROGRAM).write_text(json.dumps(told))
    return to


# ------------------------------------------------------------------------------------------------------------------- sizes and types


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"f32[{{{POWERS}}}]", "comes to an integer of some 46 digits"),
        (f"f32[{{{POWERS} ** 7}}]", "comes to an integer"),
        ("f32[{(" * 40 + "9" + " ** 7)" * 40 + "}]", "no type|comes to"),
        (f"f32[{'9' * 5000}]", "no type"),
        (f"f32[{{{'9' * 4000}}}]", "comes to an integer"),
        (f"f32[{{{' + '.join(['n_a'] * 600)}}}]", "more than 500 names"),
        ("f32[{((((n_a - 1) ** 7) ** 7) ** 7)}]", "multiplied out"),
        ("f32[{" + " * ".join(["(n_a + n_b + n_c + n_d + 1)"] * 12) + "}]", "multiplied out|comes to"),
    ],
)
def test_expressions_of_sizes_are_bounded(text: str, said: str) -> None:
    hints = {"n_a": 2, "n_b": 3, "n_c": 5, "n_d": 7}
    quickly(lambda: parse_type(text, None, hints), ArtifactError, said)


@pytest.mark.parametrize("size", ["seq 1..8 0", "seq 9..8 5", "seq 1..8 1", f"seq 1..{'9' * 5000} 7"])
def test_dynamic_sizes_are_bounded(size: str) -> None:
    quickly(lambda: parse_sizes(size), ArtifactError, "is no dynamic size")


def test_expressions_that_programs_print_are_read() -> None:
    hints = {"n_batch": 11, "n_seq": 37}
    for text in ("-(-n_batch // 2) * 16", "n_batch * n_seq ** 2", "max(n_batch, 4) * 128", "2 * (n_batch // 3) + n_seq % 4"):
        assert str(sizes.parse(str(sizes.parse(text, hints)), hints)) == str(sizes.parse(text, hints))


# ----------------------------------------------------------------------------------------------------------------- meshes, schedules


@pytest.mark.parametrize("text", ["dp=2000000000", "dp=65536,tp=65536", f"dp={'9' * 5000}", f"dp=2 ranks 0 {'9' * 5000}"])
def test_meshes_are_bounded(text: str) -> None:
    quickly(lambda: Mesh(text), PlanError, "at most 1048576|more than 18 digits")
    assert MOST_RANKS >= 256 * 4096


def test_a_large_mesh_is_one() -> None:
    assert Mesh("dp=64,tp=64").world_size == 4096


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0: F999999999.0", "at most 65536"),
        ("0: F0.0\n999999999: F1.0", "give rank 1, 2, 3, 4, 5, 6, 7, 8 a line"),
        (f"0: F{'9' * 5000}.0", "cannot be read"),
        ("0:" + " F0.0" * 1_200_000, "at most 1048576"),
    ],
)
def test_pipeline_schedules_are_bounded(text: str, said: str) -> None:
    quickly(lambda: schedule.parse(text), ScheduleError, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: told["schedule"].extend(told["schedule"] * 70_000), "at most 65536 instructions"),
        (lambda told: told.update(mesh="dp=2000000000"), "at most 1048576"),
        (lambda told: told.update(microbatches=10**30), "the number of microbatches"),
        (lambda told: told.update(microbatches=1e400), "Infinity is no number"),
        (lambda told: told["axis_sizes"].update(dp=10**40), "the axis dp is an integer of some 40 digits"),
        (lambda told: told["schedule"][0].update(stage=["forward"]), "an instruction's stage is a list"),
        (lambda told: told["inputs"][0].update(type=f"f32[{{{POWERS}}}]"), "comes to an integer"),
        (lambda told: told.update(plan=3), "does not describe a program"),
        (lambda told: told.update(sizes="n 1..8 5", constraints=["( == 2"]), "relates no two sizes"),
    ],
)
def test_a_program_that_asks_for_too_much_is_not_shown(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], object], said: str
) -> None:
    path = edited(saved, tmp_path / "edited", change)
    quickly(lambda: artifact.load(path, allow_edited=True), ArtifactError, said)
    assert main(["show", str(path), "--allow-edited"]) == 1
    assert str(path) in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.plan", "\n" * 3_000_000, "has 3000000 bytes or more, of which 262144 may be read"),
        ("p.plan", "?\n" * 5000, "more than 4096 lines"),
        ("p.plan", "pin a: " + "*".join(f"a{i}" for i in range(20_000)), "line 1 has .* of which 4096 may be"),
        ("p.plan", "?\n" * 4000, "and 3950 more"),
        ("p.toml", "tp = " + "[" * 30_000, "p.toml"),
        ("p.toml", ".".join(["a"] * 3000) + " = 1", "'a' holds {'a': {'a': "),
        ("p.toml", "tp = " + "9" * 5000, "p.toml"),
        ("p.yaml", "tp: " + "[" * 5000, "p.yaml: maximum recursion depth"),
        ("p.yaml", "x: &x y\npin: [" + ",".join(["*x"] * 20_000) + "]\n", "more than 4096 lines"),
        ("p.yaml", "pin: &a [*a]", "holds a list or a mapping"),
        ("p.yaml", "? [a]\n: b", "is no axis"),
        ("p.yaml", "tp: batch\n" * 20_000, "200000 characters, of which 65536 may be read; put the same lines into a .plan file"),
    ],
)
def test_plan_files_are_bounded(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    quickly(lambda: Plan.load(tmp_path / name), PlanError, said)


def test_a_plan_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    (tmp_path / "p.plan").symlink_to("/dev/zero")
    quickly(lambda: Plan.load(tmp_path / "p.plan"), PlanError, "has 262145 bytes or more")


def test_pins_of_one_tensor_are_few() -> None:
    """Each is held against each: four thousand took a minute."""
    plan = Plan("\n".join(f"pin a: b{i}/tp" for i in range(4000)))
    quickly(lambda: plan.check(Mesh("tp=2")), PlanError, "`pin a: b0/tp` and 3999 more pins are about one tensor, of which 64 may be")


# ---------------------------------------------------------------------------------------------------------------------------- traces

SLICE = {"ph": "X", "name": "F0.0", "pid": 0, "ts": 0, "dur": 5}


@pytest.mark.parametrize(
    ("events", "other", "said"),
    [
        ([{**SLICE, "pid": 1_000_000_000}], {}, "the process, which is a rank, of F0.0 is 1000000000"),
        ([{**SLICE, "pid": float("nan")}], {}, "NaN is no number"),
        ([{**SLICE, "ts": float("inf")}], {}, "Infinity is no number"),
        ([{**SLICE, "ts": 1e300}], {}, "the time of F0.0 is 1e"),
        ([{**SLICE, "dur": -1}], {}, "the length of F0.0"),
        ([{**SLICE, "pid": "0"}], {}, "is '0', and must be an integer"),
        ([SLICE], {"ranks": 10**9}, "the number of ranks"),
        ([SLICE], {"pipelines": [[5]]}, "a pipeline's rank"),
        ([SLICE], {"pipelines": 3}, "lists of ranks"),
        ([SLICE], [3], "is no trace"),
        ([3], {}, "is no trace"),
        ([{**SLICE, "name": 5}], {}, "is no trace"),
        broad([SLICE] * 530_000, {}, "of which 524288 can be drawn"),
    ],
)
def test_traces_are_bounded(events: list[Any], other: Any, said: str) -> None:
    text = json.dumps({"traceEvents": events, "otherData": other})
    quickly(lambda: perfetto_trace.trace_to_timeline(text, "t.json"), ArtifactError, f"t.json.*{said}")


def test_events_of_a_trace_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if few could be drawn: half a million of them are read above."""
    assert perfetto_trace.MOST_EVENTS == 524288
    monkeypatch.setattr(perfetto_trace, "MOST_EVENTS", 3)
    four, three = (json.dumps({"traceEvents": [SLICE] * count, "otherData": {}}) for count in (4, 3))
    quickly(lambda: perfetto_trace.trace_to_timeline(four, "t.json"), ArtifactError, "t.json is .* of 4 events, of which 3 can be drawn")
    perfetto_trace.trace_to_timeline(three, "t.json")


def test_the_command_names_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": [{**SLICE, "pid": 10**9}]}))
    assert main(["show", str(file), "--timeline", str(tmp_path / "t.svg")]) == 1
    assert f"{file}: the process" in capsys.readouterr().err
    file.write_bytes(b"\xff\xfe{")
    assert main(["show", str(file), "--timeline", str(tmp_path / "t.svg")]) == 1
    assert f"{file} cannot be read as text" in capsys.readouterr().err


@pytest.mark.parametrize("length", [0, 1e-300, 1e-7, 1e14])
def test_traces_of_any_length_are_drawn(tmp_path: Path, length: float) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": [{**SLICE, "dur": length}]}))
    assert main(["show", str(file), "--timeline", str(tmp_path / "t.svg")]) == 0


# -------------------------------------------------------------------------------------------------------------------- JSON, devices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "is no JSON"),
        ("[[]" + ",[]" * 5_000_000 + "]", "of which 4000000 may be read"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ("9" * 5000, "is no JSON"),
        ("NaN", "NaN is no number"),
    ],
)
def test_json_is_bounded(text: str, said: str) -> None:
    quickly(lambda: parse_json(text, "it"), ArtifactError, said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_Bps = ", "memory_Bps = nan #", "memory_Bps is nan"),
        ("memory_Bps = ", "memory_Bps = 0 #", "memory_Bps is 0"),
        ("memory_Bps = ", f"memory_Bps = 1{'0' * 4000} #", "memory_Bps is an integer of some 4000 digits"),
        ("memory_Bps = ", f"memory_Bps = 1{'0' * 5000} #", "delete the file"),
        ("ranks_per_node = ", "ranks_per_node = -3 #", "ranks_per_node is -3"),
        ("ranks_per_node = ", "ranks_per_node = 1.5 #", "ranks_per_node is 1.5"),
        ("float32 = ", "float32 = 'fast' #", "float32 is 'fast'"),
        ("latency_s = ", "latency_s = inf #", "latency_s is inf"),
        ("launch_s = ", "launch_s = [[1]] #", "launch_s is a list"),
        ("[cpu]", f"deep = {'[' * 5000}{']' * 5000}\n[cpu]", "delete the file"),
        ("[cpu]", "more = 3\n[cpu]", "more stands in no section"),
    ],
)
def test_figures_of_devices_are_bounded(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "devices.toml"
    write_devices([device("cpu")], path)
    path.write_text(path.read_text().replace(old, new, 1))
    quickly(lambda: read_devices(path), ArtifactError, f"(?s){path}.*{said}")


# ---------------------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: told.update(mesh="dp=2000000000"), "at most 1048576"),
        (lambda told: told.update(step=float("nan")), "NaN is no number"),
        (lambda told: told.update(step=-1), "the step is -1"),
        (lambda told: told.update(seed=10**40), "the seed is an integer of some 40 digits"),
        (lambda told: told["tensors"].update({"parameter:w": "f32[1000000, 1000000]"}), "parameter:w is .4, 4. in rank_00000"),
        (lambda told: told["tensors"].update({"parameter:w": f"f32[{{{POWERS}}}]"}), "comes to an integer"),
        (lambda told: told.update(tensors=[]), "does not describe a state"),
        (lambda told: told["files"].update({"rank_00000.safetensors": 1e400}), "Infinity is no number"),
    ],
)
def test_states_are_bounded(tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    path = tmp_path / "state"
    port = Port("parameter", "w", (4, 4), torch.float32)
    save_state(path, Mesh("dp=1"), 0, [(port, torch.ones(4, 4))], 0, 0, lambda text: [text])
    told = json.loads((path / "state.json").read_text())
    told["version"] = 1  # the version without hashes, which anybody may edit
    told["files"] = {name: row["bytes"] for name, row in told["files"].items()}
    change(told)
    (path / "state.json").write_text(json.dumps(told))

    def loaded() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has no hashes
            with SavedState(path) as state:
                state.tile("parameter:w", None, {}, {})

    quickly(loaded, ArtifactError, said)
