"""firstlight: runs a new open-weights LLM on the day it is released, and proves the port right.

Importing the package is cheap: what it offers is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstlight.engine.args import EngineArgs
    from firstlight.engine.assemble import Declared, build_runner, declare
    from firstlight.engine.async_engine import AsyncEngine
    from firstlight.engine.llm import LLM
    from firstlight.engine.outputs import RequestOutput
    from firstlight.engine.sampling_params import SamplingParams
    from firstlight.errors import FirstlightError
    from firstlight.plan.planner import Plan, Planner
    from firstlight.spec.arch import ArchSpec

_EXPORTS = {
    "LLM": "firstlight.engine.llm",
    "ArchSpec": "firstlight.spec.arch",
    "AsyncEngine": "firstlight.engine.async_engine",
    "Declared": "firstlight.engine.assemble",
    "EngineArgs": "firstlight.engine.args",
    "FirstlightError": "firstlight.errors",
    "Plan": "firstlight.plan.planner",
    "Planner": "firstlight.plan.planner",
    "RequestOutput": "firstlight.engine.outputs",
    "SamplingParams": "firstlight.engine.sampling_params",
    "build_runner": "firstlight.engine.assemble",
    "declare": "firstlight.engine.assemble",
}

__all__ = [
    "LLM",
    "ArchSpec",
    "AsyncEngine",
    "Declared",
    "EngineArgs",
    "FirstlightError",
    "Plan",
    "Planner",
    "RequestOutput",
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
