"""What the numbers of a report depend on besides the model: versions, devices, memory, variables."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from firstlight.errors import closest

PACKAGES = (
    "firstlight",
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "jinja2",
    "huggingface_hub",
    "triton",
)
PREFIX = "FIRSTLIGHT_"
# nothing is read from the environment yet
KNOWN_VARIABLES: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A machine and what is installed on it. packages: None where not installed; variables: those we read."""

    python: str
    platform: str
    packages: dict[str, str | None]
    devices: tuple[str, ...]
    cpu: str
    num_cpus: int
    memory_bytes: int | None
    torch_threads: int | None
    variables: dict[str, str]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return asdict(self)


def environment() -> Environment:
    """Return what is here."""
    devices, threads = _torch()
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in PACKAGES},
        devices=devices,
        cpu=_cpu(),
        num_cpus=_usable_cpus(),
        memory_bytes=_memory_bytes(),
        torch_threads=threads,
        variables={name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ},
        warnings=unknown_variables(os.environ),
    )


def unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for every FIRSTLIGHT_* variable that nobody reads."""
    warnings = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in KNOWN_VARIABLES:
            near = closest(name, KNOWN_VARIABLES)
            hint = f"did you mean {near}?" if near else "flags are given on the command line"
            warnings.append(f"{name} has no effect: {hint}")
    return tuple(warnings)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch() -> tuple[tuple[str, ...], int | None]:
    try:
        import torch
    except ImportError:
        return ("cpu",), None
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return tuple(devices), torch.get_num_threads()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
