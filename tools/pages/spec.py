"""Pages of the data that a port is made of: vocabulary, config reading, names."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import firstlight.spec
from firstlight.errors import FirstlightError
from firstlight.spec import names, read
from firstlight.spec.names import DECODER, NameMap, Source
from firstlight.spec.read import Config
from pages.markdown import Noun, code, escaped, fence, function_rows, prose, public_members, signature, table, union
from pages.parameters import parameter_tables

FIRST = ("arch", "mixers", "feedforward", "norm", "noun", "weight", "caches", "bind")
# pages of their own, and what only the engine and the reports ask
ELSEWHERE = ("read", "names", "cards", "checklist", "clues", "cost", "evidence", "parts", "shapes")


def modules() -> list[ModuleType]:
    """Return the modules of the vocabulary: the known ones in order, then any new one."""
    found = [module.name for module in pkgutil.iter_modules(firstlight.spec.__path__)]
    ordered = [*FIRST, *(name for name in found if name not in (*FIRST, *ELSEWHERE))]
    loaded = [importlib.import_module(f"firstlight.spec.{name}") for name in ordered if name in found]
    return [module for module in loaded if any(map(inspect.isclass, public_members(module).values()))]


def nouns() -> list[Noun]:
    """Return every class of the vocabulary."""
    return [Noun(value) for module in modules() for value in public_members(module).values() if inspect.isclass(value)]


def vocabulary() -> str:
    """Return the page of all nouns."""
    texts = [
        "# Vocabulary",
        "A port declares a model with these frozen dataclasses. Every argument is given by name. A field without a "
        "default is required. Import a noun from the module that its section names.",
    ]
    for module in modules():
        texts += [f"## {module.__name__}", prose(module.__doc__)]
        functions, others = [], []
        for name, value in public_members(module).items():
            if inspect.isclass(value):
                texts.append(Noun(value).section())
            elif inspect.isfunction(value):
                functions.append(value)
            elif union(value):
                others.append((code(name), f"any of {union(value)}"))
            else:
                others.append((code(name), code(str(value))))
        if others:
            texts += [table(("name", "value"), others)]
        if functions:
            texts += [table(("function", ""), function_rows(functions))]
    return "\n\n".join(texts)


def config() -> str:
    """Return the page of reading a config.json."""
    helpers = [
        value
        for name, value in public_members(read).items()
        if inspect.isfunction(value) and name in ("yarn", "rope_scaling")
    ]
    words = [(code(name), ", ".join(map(code, spellings))) for name, spellings in sorted(read.ALIASES.items())]
    rope = [(code(kind), ", ".join(map(code, sorted(keys))) or "none") for kind, keys in sorted(read.ROPE_KEYS.items())]
    return "\n\n".join(
        [
            "# Reading a config",
            prose(read.__doc__),
            "`arch(cfg)` of a port gets a `Config`. Reading a key marks it as known, whatever its value; what is left "
            "unread at the end is an error. In a multimodal config the keys of `text_config` are read as if they stood "
            "at the top.",
            Noun(Config).section(2),
            "## Functions of firstlight.spec.read",
            table(("function", ""), function_rows(helpers)),
            "## Refusing by yourself",
            "A port may raise it for what `Config` cannot check; `cfg.where` is the file.",
            Noun(FirstlightError).section(3, methods=False),
            fence(signature(FirstlightError.__init__), "python"),
            "## Spellings that are one key",
            "Ask for the first; the others are found as well. Two that disagree are an error.",
            table(("key", "also found as"), words),
            "## Keys that need not be read",
            "They change nothing at inference, or repeat what other keys fix.",
            ", ".join(map(code, sorted(read.HARMLESS))),
            "## Rotary tables",
            "Keys of `rope_scaling` or `rope_parameters` by `rope_type`, beside "
            + ", ".join(map(code, sorted(read.ROPE_COMMON)))
            + "; another key or type is an error.",
            table(("rope_type", "keys"), rope),
            "## Words of per-layer lists",
            table(("read as", "old word"), [(code(new), code(old)) for old, new in sorted(read.OLD_WORDS.items())]),
        ]
    )


def parameter_names() -> str:
    """Return the page of name maps and of our parameter names."""
    rules = [(code(ours), _rule(rule)) for ours, rule in DECODER.rules.items()]
    ignored = [(code(pattern), escaped(why)) for pattern, why in DECODER.ignore.items()]
    return "\n\n".join(
        [
            "# Parameter names",
            prose(names.__doc__),
            Noun(NameMap).section(2),
            Noun(Source).section(2),
            "## DECODER: the rules most decoders share",
            escaped(f"prefixes: {', '.join(DECODER.prefixes)}")
            + " A port extends it: `NAMES = DECODER.extend({...})`.",
            table(("our prefix", "in the checkpoint, in order of preference"), rules),
            "Skipped tensors:",
            table(("pattern", "why"), ignored),
            "`MTP_LAYERS`, of the same module, is the reason that ports give as `extra_layers` where a checkpoint has "
            f'layers for multi-token prediction: "{names.MTP_LAYERS}".',
            "What a rule does not mention keeps its own ending: the rule `layers.{i}.mixer` turns "
            "`layers.3.mixer.q_proj.weight` into `model.layers.3.self_attn.q_proj.weight`.",
            "## Our parameters",
            "Names and shapes of every noun's parameters; `{i}` is a layer, `{e}` an expert. *when*: the field that "
            "brings it, or changes its shape. *example*: the shape at hidden_size 64 and small numbers. *spelled*: by "
            "`DECODER` for layer 3; where a checkpoint differs, `NAMES` needs a rule. A part of a tensor is "
            "written `name[expert] chunk k of n`.",
            parameter_tables(),
            "### A noun of a port's own",
            "The names that its `weights(hidden_size)` gives, below `layers.{i}.mixer` or `layers.{i}.ffn`.",
        ]
    )


def _rule(rule: object) -> str:
    choices = rule if isinstance(rule, tuple) else (rule,)
    return ", or ".join(code(choice) if isinstance(choice, str) else code(_source(choice)) for choice in choices)


def _source(source: Source) -> str:
    plain = Source(name=source.name)
    given = [
        f"{f}={getattr(source, f)!r}" for f in plain.__slots__ if f == "name" or getattr(source, f) != getattr(plain, f)
    ]
    return f"Source({', '.join(given)})"
