"""Finds the port of a model: by file, by installed entry point, or by the checkpoint's model_type."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from firstlight.errors import EXIT_MISSING_OPERATORS, FirstlightError, closest
from firstlight.models.deadline import NoEnd, deadline
from firstlight.ops.registry import Operator, OperatorTable, operator_table
from firstlight.spec.arch import ArchSpec
from firstlight.spec.names import NameMap
from firstlight.spec.read import Config

ENTRY_POINT_GROUP = "firstlight.models"

# modules of this folder that declare no model
NOT_PORTS = ("deadline", "declare", "known", "registry")

# a declaration is data: whatever needs longer does not come to an end
SECONDS = 20.0

# a text tower may carry its own model_type, alone or nested
ALIASES = {"glm5_next_text": "glm5_next"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A declaration: config -> ArchSpec, and how the checkpoint spells the parameters. origin: where it came from.

    register: adds the operators that the port brings. notices: what the user should know about the port.
    """

    model_type: str
    arch: Callable[[Config], ArchSpec]
    names: NameMap
    origin: str
    register: Callable[[OperatorTable], None] | None = None
    notices: tuple[str, ...] = ()

    def operators(self) -> OperatorTable:
        """Return the package's operators and those of the port. Raises: FirstlightError where it redefines one."""
        table = operator_table()
        if self.register is not None:
            known = dict(table.operators)
            with guarded("register(table)", self.origin):
                self.register(table)
            refuse_redefined(known, table, self.origin)
        return table


def known_models() -> list[str]:
    """Return the model types of the package and of installed plugins, sorted."""
    plugins = [entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)]
    return sorted({*built_in_models(), *plugins})


def built_in_models() -> list[str]:
    """Return the model types of the package."""
    import firstlight.models as package

    return [module.name for module in pkgutil.iter_modules(package.__path__) if module.name not in NOT_PORTS]


def find_port(model_type: str, *, port_file: Path | None = None, where: str = "config.json") -> Port:
    """Return the port for a model_type. port_file wins, then plugins, then the package.

    Raises: FirstlightError (exit code 3) if nobody knows the model_type.
    """
    name = ALIASES.get(model_type, model_type)
    if port_file is not None:
        return _port(model_type, load_file(port_file), str(port_file), shadows=name)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            return _port(name, _loaded(entry), f"entry point {entry.value}", shadows=name)
    if name not in known_models():
        near = closest(name, known_models())
        raise FirstlightError(
            f"no port for model_type {model_type!r}",
            where=f"{where}  model_type",
            why=f"known: {', '.join(known_models())}",
            fix=f"firstlight port new {_model_of(where)} -o newmodel.py    drafts one"
            + (f" (nearest in name: {near})" if near else ""),
            exit_code=EXIT_MISSING_OPERATORS,
        )
    return _port(name, importlib.import_module(f"firstlight.models.{name}"), f"firstlight.models.{name}")


def load_file(path: Path) -> ModuleType:
    """Import a port file that lives outside the package. Raises: FirstlightError if absent or broken."""
    require_file(path)
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"firstlight_port_{digest}", path)
    if spec is None or spec.loader is None:
        raise FirstlightError("not a Python file", where=str(path), why="its name must end in .py", fix="rename it")
    module = importlib.util.module_from_spec(spec)
    with guarded("the port file", str(path)):
        # dataclasses and operator targets look their module up by name
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def require_file(path: Path) -> None:
    """Raise FirstlightError if there is no port file at that place."""
    if not path.is_file():
        what = "the port file is a folder" if path.is_dir() else "no such port file"
        raise FirstlightError(what, where=str(path), fix="give a Python file that defines arch and NAMES")


@contextmanager
def guarded(what: str, origin: str, *, reading: str = "") -> Iterator[None]:
    """Turn whatever a port's own code does wrong into a FirstlightError that names its line, no end included."""
    try:
        with deadline(SECONDS):
            yield
    except FirstlightError:
        raise
    except (Exception, SystemExit, NoEnd) as error:
        last = innermost(error, origin)
        ran = isinstance(error, NoEnd)
        cause = f"does not come to an end in {SECONDS:.0f} s" if ran else f"fails: {type(error).__name__}: {error}"
        raise FirstlightError(
            f"{what} {cause}",
            where=f"{last.filename}:{last.lineno} in {last.name}" + (f", reading {reading}" if reading else ""),
            why=f"{origin} {'was stopped there' if ran else 'raises it'}",
            fix="mend the port" + (", or what it reads of the config.json" if reading else ""),
        ) from error


def innermost(error: BaseException, origin: str) -> traceback.FrameSummary:
    """Return the last frame of an error that lies in the port file, or the last of all."""
    port = str(Path(origin).resolve())
    if isinstance(error, SyntaxError) and error.filename:
        return traceback.FrameSummary(_as_given(error.filename, port, origin), error.lineno or 0, "the text")
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if frame.filename == port), frames[-1])
    return traceback.FrameSummary(_as_given(last.filename, port, origin), last.lineno, last.name)


def _as_given(filename: str, port: str, origin: str) -> str:
    """Return the file of a frame; the port file as the user spelt it."""
    return origin if filename == port else filename


def refuse_redefined(known: dict[str, Operator], table: OperatorTable, origin: str) -> None:
    """Raise FirstlightError where a body that the package has was replaced: the truth of an operator is one."""
    for name, operator in known.items():
        changed = [impl.name for impl in operator.impls if impl not in table.operators[name].impls]
        if changed:
            raise FirstlightError(
                f"the port redefines the body {changed[0]!r} of operator {name}",
                where=origin,
                why="an operator has one truth; other models and other ports use it as well",
                fix="register a new operator under another name, or a further body with a name of its own",
            )


def _model_of(where: str) -> str:
    return where.removesuffix("config.json").rstrip("/") or "."


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


def _port(model_type: str, module: Any, origin: str, *, shadows: str = "") -> Port:
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
    notices = (f"{origin} takes the place of the built-in port of {shadows}",) if shadows in built_in_models() else ()
    register = getattr(module, "register", None)
    return Port(
        model_type=model_type,
        arch=module.arch,
        names=module.NAMES,
        origin=origin,
        register=register,
        notices=notices,
    )
