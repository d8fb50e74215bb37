"""Finds the port of a model: by file, by installed entry point, or by the checkpoint's model_type."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from firstlight.errors import EXIT_MISSING_OPERATORS, FirstlightError, closest
from firstlight.spec.arch import ArchSpec
from firstlight.spec.names import NameMap
from firstlight.spec.read import Config

ENTRY_POINT_GROUP = "firstlight.models"

# modules of this folder that declare no model
NOT_PORTS = ("declare", "known", "registry")

# a text tower may carry its own model_type, alone or nested
ALIASES = {"glm5_next_text": "glm5_next"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A declaration: config -> ArchSpec, and how the checkpoint spells the parameters. origin: where it came from."""

    model_type: str
    arch: Callable[[Config], ArchSpec]
    names: NameMap
    origin: str


def known_models() -> list[str]:
    """Return the model types of the package and of installed plugins, sorted."""
    import firstlight.models as package

    built_in = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name not in NOT_PORTS]
    plugins = [entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)]
    return sorted({*built_in, *plugins})


def find_port(model_type: str, *, port_file: Path | None = None, where: str = "config.json") -> Port:
    """Return the port for a model_type. port_file wins, then plugins, then the package.

    Raises: FirstlightError (exit code 3) if nobody knows the model_type.
    """
    if port_file is not None:
        return _port(model_type, load_file(port_file), str(port_file))
    name = ALIASES.get(model_type, model_type)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            return _port(name, _loaded(entry), f"entry point {entry.value}")
    if name not in known_models():
        near = closest(name, known_models())
        raise FirstlightError(
            f"no port for model_type {model_type!r}",
            where=f"{where}  model_type",
            why=f"known: {', '.join(known_models())}",
            fix=f"--port FILE.py{f' (nearest in name: {near})' if near else ''}; "
            "firstlight inspect shows which operators exist",
            exit_code=EXIT_MISSING_OPERATORS,
        )
    return _port(name, importlib.import_module(f"firstlight.models.{name}"), f"firstlight.models.{name}")


def load_file(path: Path) -> ModuleType:
    """Import a port file that lives outside the package. Raises: FirstlightError if absent or broken."""
    if not path.is_file():
        raise FirstlightError(
            "no such port file", where=str(path), fix="give a Python file that defines arch and NAMES"
        )
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"firstlight_port_{digest}", path)
    assert spec is not None, f"no import spec for {path}"
    assert spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    try:
        # dataclasses look their module up by name
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        raise FirstlightError(
            "the port file does not import", where=str(path), why=f"{type(error).__name__}: {error}"
        ) from error
    return module


def _loaded(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise FirstlightError(
            f"the installed port {entry.name} does not import",
            where=f"entry point {entry.value}",
            why=f"{type(error).__name__}: {error}",
            fix="mend or uninstall that package, or --port FILE.py",
        ) from error


def _port(model_type: str, module: Any, origin: str) -> Port:
    missing = [name for name in ("arch", "NAMES") if not hasattr(module, name)]
    if missing:
        raise FirstlightError(
            f"the port lacks {' and '.join(missing)}",
            where=origin,
            why="a port defines arch(cfg) and NAMES",
            fix="define them; docs/port.md has a whole one",
        )
    if not callable(module.arch) or not isinstance(module.NAMES, NameMap):
        raise FirstlightError(
            "the port's arch is no function, or its NAMES no NameMap",
            where=origin,
            why="a port defines arch(cfg) and NAMES",
            fix="NAMES = DECODER.extend({...}), from firstlight.spec.names",
        )
    return Port(model_type=model_type, arch=module.arch, names=module.NAMES, origin=origin)
