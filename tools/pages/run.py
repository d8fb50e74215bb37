"""Pages of what runs: what `forward` may use, the operators, the ports of the package."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import firstlight.ops
from firstlight.layers import context
from firstlight.models.known import probe
from firstlight.models.registry import ALIASES, built_in_models, find_port
from firstlight.ops import groups, rows
from firstlight.ops.paged import cache
from firstlight.ops.registry import Impl, OperatorTable, operator_table
from firstlight.plan.explain import body_verdicts
from firstlight.spec.read import HARMLESS
from pages.markdown import Noun, code, escaped, fence, function_rows, prose, public_members, rest, signature, table


def forward() -> str:
    """Return the page of what a port's own noun is given."""
    shown = [context.LayerContext, context.Ops, rows.Rows, context.LayerCache, cache.Paged, cache.State]
    shown += [groups.Group, context.Scratch]
    return "\n\n".join(
        [
            "# Inside forward",
            "A noun that the vocabulary lacks is a frozen dataclass of the port that subclasses "
            "[`NewNoun`](vocabulary.md#newnoun). Its `forward(x_TH, weights, ctx)` computes all rows of a step. "
            "`x_TH` is the normed input [T, H]; `weights` maps the names of `weights()` to tensors; `ctx` is a "
            "`LayerContext`. It returns [T, H] in the dtype of x. There is no prefill or decode: a row with start > 0 "
            "has history, one with start = 0 has none, whatever its length. Shape letters: T tokens of all rows, "
            "R rows, H hidden.",
            "What is remembered between steps lives only in `ctx.cache`: entries per token in `pages`, tensors per "
            "sequence in `states`, under the names that `declare` gave them. Operators write them in place. A "
            "stateful loop iterates `ctx.rows.pieces()` and copies the state to the slot that a piece names: that is "
            "how the prefix cache gets its checkpoints.",
            *(Noun(cls).section(2) for cls in shown),
        ]
    )


def operators() -> str:
    """Return the page of operators and bodies."""
    texts = [
        "# Operators and bodies",
        "An operator has one truth, `ref`, and faster bodies. The planner takes the body of the highest rank that "
        "accepts layer, stage, format and device; `--op NAME=BODY` asks for another. In `forward` of a port's own noun "
        "an operator is called as `ctx.ops.NAME(...)` with the arguments below. Caches (`Paged`, `State`) and `Rows` "
        "are described in [Inside forward](forward.md). How to add one: [Add an operator](../operators.md).",
    ]
    everything = operator_table()
    index = [
        (
            f"[`{name}`](#{name})",
            escaped(everything[name].summary),
            ", ".join(code(i.name) for i in everything[name].impls),
        )
        for name in everything.names()
    ]
    texts.append(table(("operator", "computes", "bodies, best first"), index))
    for module in pkgutil.iter_modules(firstlight.ops.__path__):
        if module.ispkg:
            texts += _family(module.name)
    texts += [
        "## Registering",
        "A port with a function `register(table)` beside `arch` and `NAMES` adds operators of its own; a body lives in "
        'the port file as `f"{__name__}:function"`. [A noun of your own](../new-noun.md) has a whole one.',
        Noun(OperatorTable).section(),
        Noun(Impl).section(),
        "`rejects` gets a [`BindContext`](vocabulary.md#bindcontext).",
    ]
    return "\n\n".join(texts)


def _family(name: str) -> list[str]:
    package = importlib.import_module(f"firstlight.ops.{name}")
    found = OperatorTable()
    package.register(found)
    ref = inspect.getmodule(found[found.names()[0]].impl("ref").load())
    readme = Path(str(package.__file__)).with_name("README.md").read_text(encoding="utf-8")
    body = readme.split("\n", 1)[1].strip("\n")
    legend = inspect.cleandoc(ref.__doc__ or "").partition("Shapes:")[2] if ref else ""
    texts = [f"## Family {name}", body]
    texts += [escaped(f"Shapes:{legend}")] if legend else []
    verdicts = body_verdicts(found)
    for operator in found.operators.values():
        function = operator.impl("ref").load()
        bodies = [
            (
                code(v.impl),
                str(v.rank),
                escaped("; ".join(f"not in {k}: {why}" for k, why in v.refusals.items())),
                code(v.target),
            )
            for v in verdicts
            if v.op == operator.name
        ]
        texts += [
            f"### {operator.name}",
            escaped(operator.summary[0].upper() + operator.summary[1:]) + ".",
            fence(signature(function), "python"),
            rest(function.__doc__),
            table(("body", "rank", "where it cannot run", "found at"), bodies),
        ]
    return texts


def models() -> str:
    """Return the page of the ports of the package, with their text: examples to start from."""
    texts = [
        "# Ports in the package",
        "Each is a whole port: start from the nearest one. A port file may import the functions listed here. "
        "*Keys* are the config keys that it reads, in their first spelling or another; keys that never need reading "
        "are left out.",
    ]
    for name in built_in_models():
        port = find_port(name)
        module = importlib.import_module(f"firstlight.models.{name}")
        functions = [v for v in public_members(module).values() if inspect.isfunction(v) and v.__name__ != "arch"]
        keys = sorted(key for key in probe(port).config_keys if key not in HARMLESS)
        also = sorted(other for other, canonical in ALIASES.items() if canonical == name)
        texts += [f"## {name}", prose(module.__doc__)]
        texts += [f"Also for the model_type {', '.join(map(code, also))}."] if also else []
        texts += [f"Keys: {', '.join(map(code, keys))}."]
        if functions:
            texts += [table((f"function of firstlight.models.{name}", ""), function_rows(functions))]
        source = inspect.getsource(module)
        texts += [f'??? example "firstlight/models/{name}.py"\n\n' + _indented(fence(source, "python"))]
    return "\n\n".join(texts)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
