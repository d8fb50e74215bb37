"""Reports as one HTML page each: no external assets, light and dark, printable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from firstlight.plan.amounts import amount, quantity, tokens
from firstlight.plan.explain import BoundOp, PlanRow
from firstlight.spec.parts import ranges
from firstlight.text.visible import visible
from firstlight.verify.day0 import Day0Report
from firstlight.verify.report import VerifyReport
from firstlight.verify.summary import LayerRow, layer_rows, worst_by_place

TEMPLATES = Path(__file__).parent / "templates"
# a bar starts at 1e-9, below fp32 rounding, and is full at an error as large as the value
DECADES = 9
BAR_WIDTH = 260


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBar:
    """A row of the proof and its bar. length and limit: of BAR_WIDTH, on a logarithmic scale."""

    row: LayerRow
    length: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyChoice:
    """A body and why, with the layers and stages that it runs in."""

    op: BoundOp
    stages: tuple[str, ...]
    place: str


def render_day0(report: Day0Report) -> str:
    """Return the page of a day0 report."""
    return (
        templates()
        .get_template("day0.html")
        .render(
            report=report,
            proof=report.proof,
            bars=error_bars(report.proof),
            worst=worst_by_place(report.proof),
            choices=body_choices(report.rows),
        )
    )


def render_verify(report: VerifyReport, *, repro: str = "") -> str:
    """Return the page of a verification. repro: the command that repeats its first failure."""
    return (
        templates()
        .get_template("verify.html")
        .render(proof=report, bars=error_bars(report), worst=worst_by_place(report), repro=repro)
    )


def error_bars(report: VerifyReport) -> tuple[ErrorBar, ...]:
    """Return a bar per layer, of its worst check."""
    return tuple(
        ErrorBar(row=row, length=_on_scale(row.worst.relative), limit=_on_scale(row.worst.tolerance))
        for row in layer_rows(report)
    )


def body_choices(rows: Sequence[PlanRow]) -> tuple[BodyChoice, ...]:
    """Return each choice of a body once, with all the layers and stages in which it was made for the same reasons."""
    places: dict[tuple[BoundOp, tuple[str, ...]], list[PlanRow]] = {}
    for row in rows:
        for op in row.ops:
            places.setdefault((op, row.stages), []).append(row)
    return tuple(BodyChoice(op=op, stages=stages, place=_place(found)) for (op, stages), found in places.items())


def _place(rows: Sequence[PlanRow]) -> str:
    outside = ["outside"] if any(not row.layers for row in rows) else []
    layers = sorted({layer for row in rows for layer in row.layers})
    return ", ".join([*outside, *filter(None, [ranges(layers)])])


def _on_scale(value: float) -> float:
    if not math.isfinite(value):
        return BAR_WIDTH
    decades = math.log10(value) + DECADES if value > 0 else 0.0
    return round(BAR_WIDTH * min(max(decades / DECADES, 0.0), 1.0), 1)


@lru_cache(maxsize=1)
def templates() -> Environment:
    """Return the templates of this folder; values are escaped, and a name that is not given is an error."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "quantity": quantity,
        "tokens": tokens,
        "sci": sci,
        "params": params,
        "breakable": breakable,
        "visible": visible,
    }
    env.globals |= {"BAR_WIDTH": BAR_WIDTH}
    return env


def sci(value: float) -> str:
    """Return an error in two digits."""
    return "0" if value == 0 else f"{value:.1e}"


def params(value: float) -> str:
    """Return a number of parameters."""
    return amount(value, thousand="K", billion="B")


def breakable(value: object) -> Markup:
    """Return escaped text that may wrap after dots, slashes and underscores."""
    text = str(escape(value))
    for mark in (".", "/", "_"):
        text = text.replace(mark, f"{mark}<wbr>")
    return Markup(text)
