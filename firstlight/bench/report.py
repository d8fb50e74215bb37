"""What a measurement is kept as, so that any two runs compare: one JSON document, one row per case."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstlight.errors import FirstlightError
from firstlight.verify.environment import environment

RESULTS = Path("benchmarks") / "results"
PACKAGES = ("firstlight", "torch", "transformers", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case. op, case: stable names. ms: the median. floor_ms: from the byte and FLOP model, None if there is none.

    baseline: name -> its ms in the same run. correct: whether both gave the same; None where there was nothing to
    compare with. more: further numbers by name.
    """

    op: str
    case: str
    ms: float
    floor_ms: float | None = None
    baseline: dict[str, float] = field(default_factory=dict)
    correct: bool | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """How many times as long the baseline takes, None without one."""
        return next(iter(self.baseline.values())) / self.ms if self.baseline and self.ms else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        found: dict[str, Any] = {"op": self.op, "case": self.case, "ms": self.ms}
        if self.floor_ms is not None:
            found["floor_ms"] = self.floor_ms
        if self.baseline:
            found |= {"baseline": self.baseline, "ratio": self.ratio}
        return {**found, "correct": self.correct, **self.more}


def document(command: str, rows: list[Row], *, device: str) -> dict[str, Any]:
    """Return everything that is kept of a run. device: that of the plan."""
    here = environment()
    return {
        "command": command,
        "device": next((d for d in here.devices if d.startswith("cuda")), here.cpu) if device != "cpu" else here.cpu,
        "commit": commit(),
        "versions": {name: here.packages[name] for name in PACKAGES},
        "threads": here.torch_threads,
        "rows": [row.to_dict() for row in rows],
    }


def commit() -> str:
    """Return the commit of the package's repository, "-dirty" where files differ from it, "unknown" outside one."""
    folder = Path(__file__).parent
    try:
        words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
        found = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip() or "unknown"


def result_path(folder: Path | None, device: str, *names: str) -> Path:
    """Return where a result is kept: by default below benchmarks/results, by kind of device."""
    kind = "gpu" if device.startswith("cuda") else "cpu"
    name = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", name) for name in names)
    return (folder or RESULTS / kind) / f"{name}.json"


def save(data: dict[str, Any], path: Path) -> None:
    """Write a document. Raises: FirstlightError where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="ascii")
    except OSError as error:
        raise FirstlightError(
            "the result cannot be written", where=str(path), why=error.strerror or str(error), fix="--result-dir DIR"
        ) from None
