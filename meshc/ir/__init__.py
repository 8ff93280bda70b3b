"""The language that passes, programs and the runtime share: nodes' records, shardings, meshes, sizes.

`ir.record(node)` and its like are those of `meshc/ir/nodes.py`.
"""

from meshc.ir.nodes import (
    KEY,
    PHASES,
    Record,
    Source,
    calls,
    calls_of,
    comparison_key,
    has_record,
    is_getitem,
    is_integer,
    is_tensor,
    leaves,
    local_bytes,
    op_name,
    operands,
    phase_of,
    record,
    records,
    runs_on_host,
    set_record,
    update,
    value_of,
)

__all__ = [
    "KEY", "PHASES", "Record", "Source", "calls", "calls_of", "comparison_key", "has_record", "is_getitem", "is_integer",
    "is_tensor", "leaves", "local_bytes", "op_name", "operands", "phase_of", "record", "records", "runs_on_host", "set_record",
    "update", "value_of",
]  # fmt: skip
