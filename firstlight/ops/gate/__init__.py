"""Gates on the output of a mixer or of the shared expert."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "output_gate",
        "y act(gate), elementwise; sigmoid or silu",
        Impl("ref", "firstlight.ops.gate.ref:output_gate"),
        Impl("eager", "firstlight.ops.gate.eager:output_gate", rank=10),
    )
    table.register(
        "shared_gate",
        "y sigmoid(w . x), one factor per token",
        Impl("ref", "firstlight.ops.gate.ref:shared_gate"),
        Impl("eager", "firstlight.ops.gate.eager:shared_gate", rank=10),
    )
