"""The text of a drafted port."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from firstlight.port.arrange import arrange
from firstlight.port.leftover import open_keys
from firstlight.port.mixers import Skeleton
from firstlight.port.names import Pairing
from firstlight.port.observe import Observation
from firstlight.port.text import GUESS, TODO, Call, wrapped
from firstlight.spec.names import Rule, Source

HOMES = {
    "firstlight.ops.registry": ("Impl", "OperatorTable"),
    "firstlight.spec.arch": ("ArchSpec", "HyperConnections", "Layer", "PreNorm"),
    "firstlight.spec.caches": ("CacheDecl", "CacheDtypes"),
    "firstlight.spec.feedforward": ("GLU", "Act", "Latent", "MoE", "Router", "SharedExpert"),
    "firstlight.spec.mixers": (
        "Decay", "DeltaRule", "GQAttention", "Indexer", "KeyPool", "MLAttention", "Mamba2", "OutputGate",
    ),
    "firstlight.spec.names": ("DECODER", "MTP_LAYERS", "Source"),
    "firstlight.spec.norm": ("Norm", "softmax_scale"),
    "firstlight.spec.noun": ("NOTHING", "NewNoun"),
    "firstlight.spec.read": ("Config",),
    "firstlight.spec.weight": ("Weight", "Weights"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a draft consists of. mixers, ffns: the different declarations, and which of them each layer has."""

    seen: Observation
    mixers: tuple[Mapping[str, Call | Skeleton], tuple[str, ...]]
    ffns: tuple[Mapping[str, Call | Skeleton], tuple[str, ...]]
    norm: Call
    final_norm: Call
    residual: Call
    sizes: Call
    statements: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    rules: Mapping[str, Rule] = field(default_factory=dict)
    pairing: Pairing | None = None


def compose(parts: Parts) -> str:
    """Return the port file."""
    nouns = [line for one in declarations(parts) for line in one]
    body = [*name_map(parts), *new_operators(parts), *nouns, "", "", *arch(parts)]
    text = "\n".join(body)
    return "\n".join([*head(parts), "", *imports(text), "", text]) + "\n"


def head(parts: Parts) -> list[str]:
    """Return the docstring of the file."""
    seen = parts.seen
    reference = f" and the class of {seen.says}" if seen.reference.version else ""
    return [
        f'"""{seen.source.model_type}, drafted from config.json, the tensors of {len(seen.layers)} layers{reference}.',
        "",
        "A comment with `guess` names the evidence that a value rests on; one with `todo` is left for you.",
        "`firstlight port status FILE MODEL` lists what is missing until nothing is.",
        '"""',
        "",
        "from __future__ import annotations",
    ]


def imports(text: str) -> list[str]:
    """Return the imports that the text needs."""
    used = set(re.findall(r"\b[A-Za-z_]\w*\b", re.sub(r"#.*|\"[^\"\n]*\"", "", text)))
    lines = []
    if "NewNoun" in used:
        lines += ["from collections.abc import Mapping", "from dataclasses import dataclass"]
        lines += ["from typing import Any, ClassVar", ""]
    for home, names in HOMES.items():
        if wanted := [name for name in names if name in used]:
            lines.append(f"from {home} import {', '.join(wanted)}")
    return lines


def name_map(parts: Parts) -> list[str]:
    """Return NAMES."""
    seen, arguments = parts.seen, []
    rows = []
    for ours, rule in parts.rules.items():
        guesses = parts.pairing.guesses if parts.pairing else {}
        guess = guesses.get(ours) or guesses.get(f"{ours}.weight")
        rows += wrapped(GUESS + guess, "        ") if guess else []
        rows.append(f'        "{ours}": {rule_code(rule)},')
    for name in sorted(parts.pairing.left) if parts.pairing else ():
        rows += wrapped(f"{TODO}no tensor found for {name}", "        ")
    arguments += ["    {", *rows, "    },"] if rows else ["    {},"]
    if seen.prefix != "model.":
        arguments.append(f'    prefixes=("{seen.prefix}",),')
    if towers := sorted({tower(name) for name in seen.other}):
        arguments.append("    ignore={" + ", ".join(f'r"{name}": "another tower, not run"' for name in towers) + "},")
    arguments += ["    extra_layers=MTP_LAYERS,"] if seen.beyond else []
    if arguments == ["    {},"]:
        return ["NAMES = DECODER"]
    return ["NAMES = DECODER.extend(", *arguments, ")"]


def tower(name: str) -> str:
    """Return a pattern for the tower that a tensor belongs to."""
    word = re.search(r"(?:^|\.)(visual|vision\w*|audio\w*|image\w*|multi_modal_projector|mm_projector)\.", name)
    return rf"(^|\.){word[1]}\." if word else re.escape(name)


def rule_code(rule: Rule) -> str:
    """Return a rule as code."""
    if isinstance(rule, tuple):
        return f"({', '.join(rule_code(one) for one in rule)})"
    if isinstance(rule, str):
        return f'"{rule}"'
    return f"Source({', '.join(source_words(rule))})"


def source_words(source: Source) -> Iterator[str]:
    """Yield the arguments of a Source that are not the usual ones."""
    yield f'name="{source.name}"'
    for name in ("expert", "chunk", "transpose", "interleave"):
        value = getattr(source, name)
        if value:
            yield f"{name}={value}"


def declarations(parts: Parts) -> Iterator[list[str]]:
    """Yield the function or class of every noun that is not a plain one."""
    for made, _ in (parts.mixers, parts.ffns):
        for label, one in made.items():
            yield ["", "", *(skeleton(label, one) if isinstance(one, Skeleton) else function(label, one))]


def function(label: str, call: Call) -> list[str]:
    """Return the function that declares a noun."""
    return [f"def {label}(cfg: Config) -> {call.noun}:", f"    return {call.lines(4)[0]}", *call.lines(4)[1:]]


def skeleton(label: str, one: Skeleton) -> list[str]:
    """Return a class for what the vocabulary lacks: its weights are there, its arithmetic is to be written."""
    rows = []
    for weight in one.tensors:
        flags = "".join(f", {flag}=True" for flag in ("multiplies", "float32") if getattr(weight, flag))
        rows.append(f'            Weight(name="{weight.name}", shape={weight.shape}{flags}),')
    name = class_name(label)
    lines = ["@dataclass(frozen=True, slots=True, kw_only=True)", f"class {name}(NewNoun):"]
    lines += [f'    """{one.meaning[0].upper()}{one.meaning[1:]}: the tensors of {one.block}."""', ""]
    lines += [f'    label: ClassVar[str] = "{label}"', "", "    def operators(self) -> tuple[str, ...]:"]
    lines += [f'        return ("linear", "{one.operator}")', ""]
    lines += ["    def weights(self, hidden_size: int) -> Weights:", "        return (", *rows, "        )", ""]
    if one.part == "mixer":
        lines += ["    def declare(self, dtypes: CacheDtypes) -> CacheDecl:"]
        lines += [f"        {TODO}what a sequence keeps between steps: pages by token, states by sequence"]
        lines += ["        return CacheDecl()", ""]
    lines += ["    def forward(self, x_TH: Any, weights: Mapping[str, Any], ctx: Any) -> Any:"]
    lines += [f"        {TODO}call ctx.ops.linear, ctx.ops.{one.operator} and other operators of the package"]
    return [*lines, f'        raise NotImplementedError("the forward pass of {name} is not written")']


def new_operators(parts: Parts) -> list[str]:
    """Return `register` and the references of the operators that no room has, nothing if there are none."""
    made = {**parts.mixers[0], **parts.ffns[0]}
    found = {one.operator: one.meaning for one in made.values() if isinstance(one, Skeleton)}
    if not found:
        return []
    lines = ["", "", "def register(table: OperatorTable) -> None:"]
    lines += [
        '    """Add the operators that only this port has; each runs by its reference until it has a fast body."""'
    ]
    for name, meaning in found.items():
        lines.append(f'    table.register("{name}", "{meaning}", Impl("ref", f"{{__name__}}:{name}"))')
    for name, meaning in found.items():
        lines += ["", "", f"def {name}(x_TH: Any, state: Any, rows: Any) -> Any:", f'    """{meaning}."""']
        lines += [f"    {TODO}the equation, in fp32, row by row and token by token; its arguments are yours to choose"]
        lines.append(f'    raise NotImplementedError("the operator {name} is not written")')
    return lines


def class_name(label: str) -> str:
    """Return the name of the class of a new noun."""
    return "".join(word.capitalize() for word in label.split("_"))


def arch(parts: Parts) -> list[str]:
    """Return `arch(cfg)`."""
    seen = parts.seen
    plans = [
        arrange(seen, name, {label: code(label, made) for label in dict.fromkeys(order)}, order)
        for name, (made, order) in (("mixers", parts.mixers), ("ffns", parts.ffns))
    ]
    counted = any(plan.count for plan in plans)
    statements = [f"    {line}" for text in parts.statements for line in text.splitlines()]
    what = f"Return the declaration of a {seen.source.model_type} config."
    lines = ["def arch(cfg: Config) -> ArchSpec:", f'    """{what}"""']
    if counted:
        named = seen.value("num_hidden_layers") is not None
        lines += [] if named else [f"    {GUESS}by the tensors; no key of config.json counts the layers"]
        count = 'cfg.positive("num_hidden_layers")' if named else len(seen.layers)
        lines.append(f"    num_layers = {count}")
    lines += [f"    {line}" for plan in plans for line in plan.lines]
    if not counted and "num_layers" in "".join(statements):
        lines.append("    num_layers = len(mixers)")
    lines += statements + [f"    {line}" for line in open_keys(seen, parts.unread)]
    lines += bound("norm", parts.norm)
    one_norm = "\n".join(parts.norm.lines()) == "\n".join(parts.final_norm.lines())
    lines += [] if one_norm else bound("final_norm", parts.final_norm)
    pairs = "for mixer, ffn in zip(mixers, ffns, strict=True)"
    lines.append(f"    layers = tuple(Layer(mixer=mixer, ffn=ffn, norm=norm) {pairs})")
    spec = parts.sizes.set("layers", "layers").set("norm", "norm" if one_norm else "final_norm")
    spec.set("residual", parts.residual).set("tie_word_embeddings", 'cfg.get("tie_word_embeddings", False)')
    spec.set("mtp_layers", 'cfg.get("num_nextn_predict_layers", 0)').set("dtype", 'cfg.get("dtype", "float32")')
    return [*lines, f"    return {spec.lines(4)[0]}", *spec.lines(4)[1:]]


def bound(name: str, call: Call) -> list[str]:
    """Return a statement that binds a call to a name."""
    text = call.lines(4)
    return [f"    {name} = {text[0]}", *text[1:]]


def code(label: str, made: Mapping[str, Call | Skeleton]) -> str:
    """Return the code that makes a variant."""
    if label == "NOTHING":
        return label
    if isinstance(made[label], Skeleton):
        return f"{class_name(label)}()"
    return f"{label}(cfg)"
