"""Turns a function into a verb: shared flags become its parameters, exceptions become messages and exit codes."""

from __future__ import annotations

import errno
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

from firstlight.cli.flags import ModelFlags, OutputFlags
from firstlight.errors import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, FirstlightError

# the positional words, in the order in which they are given
LEADING = ("what", "file", "model")


def verb(function: Callable[..., int]) -> Callable[..., int]:
    """Return the command of a verb; it returns an exit code and raises nothing.

    Parameters that are flag dataclasses are replaced by their fields.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}

    @wraps(function)
    def command(**values: Any) -> int:
        given = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return guarded(function, {**given, **values})

    parameters = [p for name, p in inspect.signature(function).parameters.items() if name not in groups]
    own = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in parameters]
    shared = [parameter for group in groups.values() for parameter in _parameters(group)]
    # WHAT and MODEL first, then what only this verb has
    ordered = sorted((*own, *shared), key=lambda p: LEADING.index(p.name) if p.name in LEADING else len(LEADING))
    command.__signature__ = inspect.Signature(ordered, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {**{p.name: p.annotation for p in ordered}, "return": int}
    return command


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    made = []
    for field in fields(group):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        kind = inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(field.name, kind, default=default, annotation=hints[field.name]))
    return made


def guarded(function: Callable[..., int], values: dict[str, Any]) -> int:
    """Return the exit code of a verb; what went wrong is told in four lines on stderr."""
    output = next((value for value in values.values() if isinstance(value, OutputFlags)), OutputFlags())
    try:
        warn_of_variables(output)
        code = function(**values)
        # a full disk behind a pipe shows here
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return reader_gone()
    except Exception as error:
        if output.debug:
            traceback.print_exception(error)
        told = explained(error, function.__name__, values)
        print(told, file=sys.stderr)
        return told.exit_code


def reader_gone() -> int:
    """Return the exit code where nobody is left to tell: that of a program which the closed pipe has ended."""
    # the flush at exit must not fail again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


def explained(error: Exception, name: str, values: dict[str, Any]) -> FirstlightError:
    """Return what went wrong in four lines, whatever it was."""
    if isinstance(error, FirstlightError):
        return completed(error, name, values)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return system_error(error)
    return bug(error)


def completed(error: FirstlightError, name: str, values: dict[str, Any]) -> FirstlightError:
    """Return the error with its place, the command where it has none of its own, and flags in place of parameters."""
    model = next((value.model for value in values.values() if isinstance(value, ModelFlags)), "")
    command = f"firstlight {name.removeprefix('cmd_')}"
    parameters = [*values, *(field.name for value in values.values() if is_dataclass(value) for field in fields(value))]
    if error.where in parameters:
        # a word of one syllable may be meant as a word
        names = [name for name in parameters if "_" in name or name == error.where]
        words = re.compile(rf"\b({'|'.join(names)})\b")
        return FirstlightError(
            words.sub(_as_flag, error.what),
            where=words.sub(_as_flag, error.where),
            why=words.sub(_as_flag, error.why),
            fix=words.sub(_as_flag, error.fix),
            exit_code=error.exit_code,
        )
    return FirstlightError(
        error.what,
        where=error.where or f"{command} {model}".rstrip(),
        why=error.why,
        fix=error.fix,
        exit_code=error.exit_code,
    )


def _as_flag(name: re.Match[str]) -> str:
    return f"--{name[0].replace('_', '-')}"


def system_error(error: OSError) -> FirstlightError:
    """Return the error of a device that takes no more."""
    where = str(error.filename or "standard output")
    why = error.strerror or str(error)
    return FirstlightError("cannot write", where=where, why=why, fix="free some space, or write elsewhere")


def bug(error: Exception) -> FirstlightError:
    """Return the error that says that this is our own fault."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    first_line = (str(error).splitlines() or [""])[0]
    return FirstlightError(
        f"internal error: {type(error).__name__}: {first_line}",
        where=f"{last.filename}:{last.lineno} in {last.name}",
        why="this is a bug of firstlight, not of what you gave",
        fix="again with --debug for the stack trace, and report it",
    )


def warn_of_variables(output: OutputFlags) -> None:
    """Say on stderr which FIRSTLIGHT_* variables have no effect, unless quiet."""
    from firstlight.verify.environment import unknown_variables

    if not output.quiet:
        for warning in unknown_variables(os.environ):
            print(f"warning: {warning}", file=sys.stderr)


def epilog(*examples: str, docs: str) -> str:
    """Return the end of a help page: examples, and where the documentation is."""
    # \b keeps the lines as they are
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples), "", f"Docs: {docs}"])
