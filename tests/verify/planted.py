"""A port file that changes one fact of a port of the package, and its verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firstlight.engine.assemble import declare
from firstlight.verify.report import VerifyReport
from firstlight.verify.run import VerifyOptions, verify

PORT = """
from dataclasses import is_dataclass, replace, fields
from firstlight.models import {base}
from firstlight.spec.norm import Norm

NAMES = {base}.NAMES.extend({{}}, ignore={{r"e_score_correction_bias" + ("" if {drop_bias} else "^"): "planted"}})


def planted(n):
    if isinstance(n, tuple):
        return tuple(planted(item) for item in n)
    if not is_dataclass(n):
        return n
    n = replace(n, **{{f.name: planted(getattr(n, f.name)) for f in fields(n)}})
    return replace(n, {change}) if type(n).__name__ == "{noun}" else n


def arch(cfg):
    return planted({base}.arch(cfg))
"""


def write_port(folder: Path, base: str, noun: str, change: str) -> Path:
    """Return a port file that changes one fact of a port of the package."""
    path = folder / "planted.py"
    path.write_text(PORT.format(base=base, noun=noun, change=change, drop_bias="bias='none'" in change))
    return path


def run(folder: Path, port: Path | None = None, **options: Any) -> VerifyReport:
    """Return the report under default settings, or with other options."""
    declared = declare(str(folder), port_file=port)
    return verify(declared, declared.plan(), VerifyOptions(**options))
