"""Depthwise causal convolution with a carried window."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "short_conv",
        "depthwise causal convolution, width W, with state",
        Impl("ref", "firstlight.ops.short_conv.ref:short_conv"),
        Impl("eager", "firstlight.ops.short_conv.eager:short_conv", rank=10),
    )
