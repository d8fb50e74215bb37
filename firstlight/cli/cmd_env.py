"""env: what the numbers depend on."""

from __future__ import annotations

from firstlight.cli.flags import OutputFlags
from firstlight.cli.output import WAIT, Cell, Output
from firstlight.errors import EXIT_OK


def env(output: OutputFlags) -> int:
    """Versions, devices, memory, threads, and FIRSTLIGHT_* variables."""
    from firstlight.plan.amounts import quantity
    from firstlight.verify.environment import environment

    out, here = Output(output), environment()
    if out.flags.json:
        out.json(here.to_dict())
        return EXIT_OK
    rows: list[tuple[Cell, ...]] = [("python", here.python), ("platform", here.platform)]
    rows += [(name, version or "not installed") for name, version in here.packages.items()]
    rows += [("device", device) for device in here.devices]
    rows += [
        ("cpu", f"{here.cpu}, {here.num_cpus} usable"),
        ("memory", quantity(here.memory_bytes, "B") if here.memory_bytes else "unknown"),
        ("torch threads", str(here.torch_threads or "-")),
    ]
    rows += [(name, value) for name, value in here.variables.items()]
    rows += [("warning", (warning, WAIT)) for warning in here.warnings]
    out.table(rows)
    return EXIT_OK
