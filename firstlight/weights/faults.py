"""What of a checkpoint and of a model does not fit the other: by name pattern, each with its likely cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from firstlight.spec.evidence import numbered
from firstlight.spec.names import NameMap
from firstlight.spec.parts import ranges
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.loadplan import LoadPlan, Missing

Kind = Literal["tensor", "parameter", "shape"]
Shape = tuple[int, ...]

# what a tensor without a place is for, by its name, and the field that gives it one
FIELDS = (
    (r"e_score_correction_bias|expert_bias$", 'a selection bias: Router(bias="selection")'),
    (r"shared_experts?_gate\b", 'a gate on the shared expert: SharedExpert(gate="sigmoid")'),
    (r"shared_experts?\b", "a shared expert that the declaration leaves out: MoE(shared=SharedExpert(...))"),
    (r"\b(q|k|query|key)_(layer)?norm\b", "a norm of query and key heads: qk_norm=Norm(...)"),
    (r"\bindexer\b", "an index that the declaration leaves out: indexer=Indexer(...)"),
    (r"sinks?$", "learned sinks: sinks=True"),
    (r"\bg(_[ab])?_proj\b", "a gate on the output: output_gate=OutputGate(...)"),
    (r"\b(mtp|nextn)\b", "multi-token prediction, which is not run: NAMES.extend(ignore={...}) with that reason"),
)
LEFT_OVER = "a rule in NAMES, a field of the noun that owns it, or NAMES.extend(ignore={...}) with the reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A pattern of names that does not fit. name: the first of them, ours or the checkpoint's; fix: its likely cause.

    layers: those it is found in, none where it lies outside.
    """

    kind: Kind
    name: str
    what: str
    layers: tuple[int, ...] = ()
    fix: str = ""

    @property
    def where(self) -> str:
        """The layers in words, "" outside."""
        word = "layer" if len(self.layers) == 1 else "layers"
        return f"{word} {ranges(list(self.layers))}" if self.layers else ""


def faults(plan: LoadPlan, checkpoint: Checkpoint, rules: NameMap) -> tuple[Fault, ...]:
    """Return every fault of a plan made by these rules, one per name pattern; what no tensor fills comes first."""
    missing = {one.name: one for one in plan.missing}
    pairs = renamings(missing, {name: checkpoint.shape(name) for name in plan.unexpected})
    rule = {name: _rule(ours, theirs, missing, rules) for ours, theirs in pairs.items() for name in (ours, theirs)}
    found = [_parameter(pattern, names, missing[names[0]], rule) for pattern, names in folded(missing).items()]
    wrong = {one.name: one for one in plan.mismatched}
    for pattern, names in folded(wrong).items():
        one = wrong[names[0]]
        what = f"{pattern} is {list(one.found)}, the declaration needs {list(one.expected)}"
        fix = "correct the size in the declaration"
        found.append(Fault(kind="shape", name=names[0], what=what, layers=layers_of(names), fix=fix))
    for pattern, names in folded(plan.unexpected).items():
        what = f"{pattern} {list(checkpoint.shape(names[0]))} has no place"
        fix = rule.get(pattern) or _field(names[0], plan)
        found.append(Fault(kind="tensor", name=names[0], what=what, layers=layers_of(names), fix=fix))
    found += [
        Fault(kind="tensor", name=name, what=f"{name} is stored as {dtype}, which cannot be read")
        for name, dtype in plan.unsupported
    ]
    return tuple(found)


def _parameter(pattern: str, names: list[str], first: Missing, rule: Mapping[str, str]) -> Fault:
    looked = f"looked for {', '.join(first.spellings)}" if first.spellings else "NAMES has no rule for it"
    if pattern in rule:
        looked += f"; {rule[pattern]}"
    elif ".ffn.shared" in pattern:
        looked += "; without a shared expert: MoE(shared=None)"
    what = f"no tensor fills {pattern}"
    return Fault(kind="parameter", name=names[0], what=what, layers=layers_of(names), fix=looked)


def _field(name: str, plan: LoadPlan) -> str:
    owner, _, leaf = name.rpartition(".")
    if leaf == "bias" and any(entry.candidate.name == f"{owner}.weight" for entry in plan.entries):
        return f"a bias that the declaration leaves out: bias=True, or the like, in the noun that owns {owner}"
    return next((text for pattern, text in FIELDS if re.search(pattern, name)), LEFT_OVER)


def renamings(missing: Mapping[str, Missing], unexpected: Mapping[str, Shape]) -> dict[str, str]:
    """Return our pattern -> the pattern of the checkpoint that must be it: of its shape, one word apart, alone."""
    offered = {pattern: unexpected[names[0]] for pattern, names in folded(unexpected).items()}
    claims: dict[str, list[str]] = {}
    for pattern, names in folded(missing).items():
        one = missing[names[0]]
        spelt = [numbered(spelling) for spelling in one.spellings]
        near = [new for new, shape in offered.items() if sizes(shape) == sizes(one.shape) and _one_apart(spelt, new)]
        if len(near) == 1:
            claims.setdefault(near[0], []).append(pattern)
    return {ours[0]: new for new, ours in claims.items() if len(ours) == 1}


def _one_apart(spellings: Iterable[str], name: str) -> bool:
    return any(sum(common(spelling, name)) >= min(spelling.count("."), name.count(".")) for spelling in spellings)


def common(first: str, second: str) -> tuple[int, int]:
    """Return how many words two dotted names share at the start and, of what is left, at the end."""
    a, b = first.split("."), second.split(".")
    most = min(len(a), len(b))
    start = next((k for k in range(most) if a[k] != b[k]), most)
    end = next((k for k in range(most - start) if a[-1 - k] != b[-1 - k]), most - start)
    return start, end


def _rule(ours: str, theirs: str, missing: Iterable[str], rules: NameMap) -> str:
    """Return the rule that maps our pattern to the checkpoint's: the shortest that no longer one overrules."""
    name = folded(missing)[ours][0]
    for same in range(common(ours, theirs)[1], -1, -1):
        left, right = (".".join(words[: len(words) - same]) for words in (ours.split("."), theirs.split(".")))
        for number in ("{i}", "{e}"):
            left, right = (text.replace("{n}", number, 1) for text in (left, right))
        if any(numbered(c.name) == theirs for c in rules.extend({left: right}).candidates(name)):
            return f'renamed, it seems: NAMES.extend({{"{left}": "{right}"}})'
    return f"renamed, it seems: the checkpoint has {theirs}"


def sizes(shape: Shape) -> list[int]:
    """Return a shape without its dimensions of size 1."""
    return [n for n in shape if n != 1]


def folded(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names by pattern, numbers replaced by {n}."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(numbered(name), []).append(name)
    return found


def layers_of(names: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of the layers that names lie in, none outside."""
    parts = [name.split(".") for name in names]
    return tuple(sorted({int(words[words.index("layers") + 1]) for words in parts if "layers" in words[:-1]}))
