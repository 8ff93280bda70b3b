"""Fewer key-value heads than ranks, on real ranks: each function is one check, run on the mesh tp=4 of models with two such heads."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

import meshc
from tests.models import llama
from tests.processes.generation import compiled, prompts
from tests.processes.generation import llama as generating
from tests.processes.reference import SEED, adamw, close, furthest, train
from tests.processes.session import run_checks

AXES = ("tp_kv_heads", "tp_group")


def steps(mesh: Any) -> None:
    """Of a step that is compiled at its first call, beside a program for evaluation that was asked for before and splits no heads."""
    case = llama(torch.float64, layers=1, batch=12)
    start, options = copy.deepcopy(case.model), meshc.Options(seed=SEED)
    step = meshc.TrainStep(case.model, optimizer=adamw(case.model.parameters()), clip_grad_norm=1.0)
    program, ids = meshc.compile(step, mesh, options=options), {"input_ids": case.kwargs["input_ids"]}
    losses = [program(**case.kwargs).item() for _ in range(2)]
    with torch.no_grad():
        evaluated = meshc.compile(case.model, mesh, kwargs=ids, plan="tp: ffn, vocab")
        logits = evaluated(**ids).logits
    assert program.mesh.names == evaluated.mesh.names == AXES
    weight = case.model.model.layers[0].self_attn.k_proj.weight
    assert weight.device_mesh.mesh_dim_names == AXES and weight.to_local().numel() * 2 == weight.numel()
    again = meshc.compile(step, mesh, kwargs=case.kwargs, options=options)
    again(**case.kwargs)
    state = program.state_dict(full=True)
    if dist.get_rank():
        return
    wanted, twin, _ = train(start, case.loss_of, case.kwargs, adamw)
    close(losses, wanted, 1e-5)  # rotary positions and the loss are in float32
    torch.testing.assert_close(logits, twin(**ids).logits, rtol=1e-4, atol=1e-5)
    assert furthest(state["model"], twin.state_dict())[0] > 1e-6  # after a third step


def generates(mesh: Any) -> None:
    """The cache of a head of keys is on the ranks whose queries read it."""
    program, model, twin = compiled(generating, mesh)
    wanted = twin.generate(prompts(), max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(prompts(), max_new_tokens=4, do_sample=False), wanted)
    assert program.mesh.names == AXES


def run(mesh: str, *names: str) -> None:
    run_checks([steps, generates], mesh, names)
