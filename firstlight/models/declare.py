"""Runs a port on a config.json: the declaration, or why there is none."""

from __future__ import annotations

from typing import Any

from firstlight.errors import FirstlightError
from firstlight.models.registry import Port, guarded
from firstlight.spec.arch import ArchSpec
from firstlight.spec.choices import misfits
from firstlight.spec.read import Config, read_config


def read_arch(
    raw: dict[str, Any], port: Port, *, where: str = "config.json", allow_unknown_keys: bool = False
) -> tuple[ArchSpec, tuple[str, ...]]:
    """Return the ArchSpec of a config.json and the unknown keys that were allowed.

    Raises: FirstlightError on unknown keys (unless allowed) and on a quantised checkpoint.
    """
    cfg = read_config(raw, where=where)
    refuse_quantised(cfg)
    with guarded(f"arch(cfg) for {port.model_type}", port.origin, reading=where):
        spec = port.arch(cfg)
    if not isinstance(spec, ArchSpec):
        raise FirstlightError(
            f"the port of {port.model_type} returns {type(spec).__name__}, not an ArchSpec",
            where=port.origin,
            why="arch(cfg) returns the declaration of the model",
            fix="return decoder(...) of firstlight.models.llama, or an ArchSpec",
        )
    for misfit in misfits(spec):
        raise FirstlightError(
            f"the port of {port.model_type} is mistyped: {misfit}",
            where=port.origin,
            why="the fields of the vocabulary have types",
            fix="docs/reference/vocabulary.md lists every field",
        )
    unknown = cfg.unknown()
    if unknown and not allow_unknown_keys:
        hints = [f"{key}{f' (nearest known: {near})' if near else ''}" for key, near in sorted(unknown.items())]
        count = f"{len(unknown)} key{'s' if len(unknown) > 1 else ''}"
        raise FirstlightError(
            f"config.json has {count} that the {port.model_type} port does not know",
            where=f"{where}  {', '.join(hints)}",
            why="an unknown key is usually an unknown feature; ignoring it would give wrong numbers",
            fix="--allow-unknown-keys if they change nothing (recorded in the report), or extend the port",
        )
    return spec, tuple(sorted(unknown))


def refuse_quantised(cfg: Config) -> None:
    """Raise FirstlightError if the checkpoint is quantised: those formats are not read yet."""
    table = cfg.table("quantization_config")
    if table:
        method = table.get("quant_method", table.get("quant_algo", "unnamed"))
        raise FirstlightError(
            f"quantised checkpoint: {method}",
            where=f"{cfg.where}  quantization_config",
            why="weights are read as float32, float16 or bfloat16; quantised weights are not supported yet",
            fix="use the bfloat16 release of this model",
        )
