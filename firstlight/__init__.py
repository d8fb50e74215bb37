"""firstlight: runs a new open-weights LLM on the day it is released, and proves the port right.

Importing the package is cheap: what it offers is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstlight.engine.assemble import Declared, build_runner, declare
    from firstlight.engine.sampler import SamplingParams
    from firstlight.errors import FirstlightError
    from firstlight.plan.planner import Plan, Planner
    from firstlight.spec.arch import ArchSpec

_EXPORTS = {
    "ArchSpec": "firstlight.spec.arch",
    "Declared": "firstlight.engine.assemble",
    "FirstlightError": "firstlight.errors",
    "Plan": "firstlight.plan.planner",
    "Planner": "firstlight.plan.planner",
    "SamplingParams": "firstlight.engine.sampler",
    "build_runner": "firstlight.engine.assemble",
    "declare": "firstlight.engine.assemble",
}

__all__ = [
    "ArchSpec",
    "Declared",
    "FirstlightError",
    "Plan",
    "Planner",
    "SamplingParams",
    "__version__",
    "build_runner",
    "declare",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'firstlight' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("firstlight")
    except PackageNotFoundError:
        return "not installed"
