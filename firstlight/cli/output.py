"""Printing: tables and notices for people, one JSON document for programs, bars on a terminal only."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from firstlight.cli.flags import DEMO, OutputFlags

if TYPE_CHECKING:
    from rich.console import Console

    from firstlight.plan.planner import Plan

GOOD, BAD, WAIT, SOFT = "green", "bold red", "yellow", "dim"
Cell = str | tuple[str, str]
Advance = Callable[[float], None]


class Output:
    """Where a verb prints. stdout is for its result, stderr for all else."""

    def __init__(self, flags: OutputFlags) -> None:
        self.flags = flags

    def console(self, *, stderr: bool = False) -> Console:
        """Return a console on one of the streams as they are now; NO_COLOR is honoured."""
        from rich.console import Console

        stream = sys.stderr if stderr else sys.stdout
        return Console(file=stream, highlight=False, markup=False, emoji=False)

    def json(self, data: Any) -> None:
        """Print one JSON document on stdout."""
        print(json_text(data))

    def last_line(self, data: Any) -> None:
        """Print one JSON document on one line of stdout, in JSON mode or not."""
        print(json_text(data, indent=None))

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line of the result, nothing in JSON mode."""
        if not self.flags.json:
            self.console().print(text, style=style or None, soft_wrap=True)

    def table(self, rows: Sequence[Sequence[Cell]], *, header: Sequence[str] = (), right: Sequence[int] = ()) -> None:
        """Print rows in columns. A cell is text or (text, style); right: columns aligned so."""
        if self.flags.json or not rows:
            return
        if sys.stdout.isatty():
            self._fitted(rows, header, right)
            return
        # a pipe has no width to fit: a row stays a line
        for line in columns([header, *rows] if header else rows, right):
            print(line)

    def _fitted(self, rows: Sequence[Sequence[Cell]], header: Sequence[str], right: Sequence[int]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=bool(header), header_style=SOFT, padding=(0, 2, 0, 0))
        for column in range(max(len(row) for row in rows)):
            title = header[column] if column < len(header) else ""
            table.add_column(title, justify="right" if column in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else Text(cell[0], style=cell[1]) for cell in row))
        self.console().print(table)

    def stream(self, text: str) -> None:
        """Print a piece of a text on stdout at once; a terminal gets no control characters of a model's making."""
        from firstlight.text.visible import visible

        if not self.flags.json:
            sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()

    def model(self, name: str, *, stderr: bool = False) -> None:
        """Say in line one which model this is."""
        hint = "   the embedded one; MODEL may be a folder, a config.json, a card or a hub id" if name == DEMO else ""
        if stderr or self.flags.json:
            self.note(f"model  {name}{hint}")
        else:
            self.line(f"model  {name}{hint}")

    def note(self, text: str, style: str = SOFT) -> None:
        """Print a notice on stderr, unless quiet."""
        if not self.flags.quiet:
            self.console(stderr=True).print(text, style=style, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning on stderr, unless quiet."""
        self.note(f"warning: {text}", WAIT)

    def notices(self, texts: Iterable[str]) -> None:
        """Print notices, a line each."""
        for text in texts:
            self.note(f"notice: {text}", WAIT)

    def refusals(self, plan: Plan) -> None:
        """Say what was asked for and the plan does without, a line each."""
        self.notices(f"{refused.what} is refused: {refused.reason}" for refused in plan.refused)

    @contextmanager
    def bar(self, title: str, total: float) -> Iterator[Advance]:
        """Have a progress bar on stderr inside the block, if that is a terminal; the function advances it."""
        with self.bars({title: total}) as advance:
            yield advance[title]

    @contextmanager
    def bars(self, totals: Mapping[str, float]) -> Iterator[dict[str, Advance]]:
        """Have a bar per title on stderr inside the block, if that is a terminal; the functions advance them."""
        if self.flags.quiet or not sys.stderr.isatty():
            yield dict.fromkeys(totals, lambda step: None)
            return
        from rich.progress import Progress

        with Progress(console=self.console(stderr=True), transient=True) as progress:
            tasks = {title: progress.add_task(title, total=total) for title, total in totals.items()}
            yield {title: partial(progress.advance, task) for title, task in tasks.items()}


def columns(rows: Sequence[Sequence[Cell]], right: Sequence[int] = ()) -> list[str]:
    """Return aligned lines without styles or trailing blanks."""
    texts = [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*texts, fillvalue="")]
    return ["  ".join(_aligned(text, widths[i], i in right) for i, text in enumerate(row)).rstrip() for row in texts]


def _aligned(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def json_text(data: Any, *, indent: int | None = 1) -> str:
    """Return data as strict JSON: a number that is not finite becomes its name. indent None: on one line."""
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
