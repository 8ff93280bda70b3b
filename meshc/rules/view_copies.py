"""Sharding rules of operators that copy a view (`view_copy`, ...): those of the views, since values of a program share no memory."""

from __future__ import annotations

import torch

from meshc.rules import layout
from meshc.rules.rule import RuleFunction

aten = torch.ops.aten

VIEWS: dict[object, object] = {
    aten.alias_copy.default: aten.alias.default,
    aten.expand_copy.default: aten.expand.default,
    aten.lift_fresh.default: aten.lift_fresh_copy.default,
    aten.permute_copy.default: aten.permute.default,
    aten.split_with_sizes_copy.default: aten.split_with_sizes.default,
    aten.squeeze_copy.default: aten.squeeze.default,
    aten.squeeze_copy.dim: aten.squeeze.dim,
    aten.squeeze_copy.dims: aten.squeeze.dims,
    aten.t_copy.default: aten.t.default,
    aten.transpose_copy.int: aten.transpose.int,
    aten.unbind_copy.int: aten.unbind.int,
    aten.unsqueeze_copy.default: aten.unsqueeze.default,
    aten.view_copy.default: aten.view.default,
}


RULES: dict[object, RuleFunction] = {copy: layout.RULES[view] for copy, view in VIEWS.items()}
