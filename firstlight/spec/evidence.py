"""What can be told about a model that has no port: which parts its names betray, which known
architecture is nearest, and what nobody here knows. Nothing is guessed silently: what no clue
explains is listed as unrecognised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from firstlight.spec.clues import CLUES, SWITCHES, Clue
from firstlight.spec.names import NameMap
from firstlight.spec.read import ALIASES, HARMLESS, text_config

CONTAINERS = re.compile(r"^(?:(?:model|language_model|text_model|transformer|backbone)\.)+")
CANONICAL = {spelling: key for key, spellings in ALIASES.items() for spelling in spellings}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPort:
    """What a port reads and covers. note: why the sets may be incomplete, empty if they are complete."""

    model_type: str
    config_keys: frozenset[str]
    tensor_patterns: frozenset[str]
    operators: frozenset[str]
    names: NameMap
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part that was recognised. sources: the keys with their values and the tensor name patterns that say so."""

    part: str
    meaning: str
    sources: tuple[str, ...]
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearness:
    """How alike a known port is. score: mean of the Jaccard indices of the key sets and, where names were given, of
    the tensor name patterns. Keys without effect are left out, spellings of one fact count as one."""

    model_type: str
    score: float
    key_score: float
    tensor_score: float | None
    shared_keys: tuple[str, ...]
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    patterns_only_here: tuple[str, ...]
    patterns_only_there: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that names say about a model.

    unread_keys and uncovered_patterns: what no known port reads or covers. lacking_operators: hinted
    at, known to nobody. unrecognised: keys, words and patterns that no clue explains.
    """

    model_type: str
    findings: tuple[Finding, ...]
    nearest: Nearness | None
    ranking: tuple[tuple[str, float], ...]
    unread_keys: tuple[str, ...]
    uncovered_patterns: tuple[str, ...]
    lacking_operators: tuple[str, ...]
    unrecognised: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"no port for model_type {self.model_type!r}"]
        lines += [f"  {f.part:12s} {f.meaning}: {_some(f.sources)}" for f in self.findings]
        if self.nearest:
            near = self.nearest
            others = ", ".join(f"{name} {score:.2f}" for name, score in self.ranking[1:])
            lines.append(
                f"nearest: {near.model_type}, likeness {near.score:.2f}{f' (then {others})' if others else ''}"
            )
        # what nobody recognises is said once, with its value
        odd = {re.split(r"[.=]| = ", word.removeprefix("tensor "))[0] for word in self.unrecognised}
        odd |= {word.removeprefix("tensor ") for word in self.unrecognised}
        for title, names in (
            ("keys no port reads", tuple(key for key in self.unread_keys if key not in odd)),
            ("tensors no port covers", tuple(name for name in self.uncovered_patterns if name not in odd)),
            ("operators lacking", self.lacking_operators),
            ("unrecognised", self.unrecognised),
            ("note", self.notes),
        ):
            lines += [f"{title}: {', '.join(names)}"] if names else []
        return "\n".join(lines)


def _some(words: Sequence[str], most: int = 6) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def recognise(
    raw_config: dict[str, Any],
    tensor_names: Sequence[str] = (),
    *,
    known: Mapping[str, KnownPort],
    operators: Collection[str] = (),
) -> Evidence:
    """Return what the config keys and tensor names of a model betray.

    known: what the ports read and cover. operators: names that exist beyond those the ports use.
    """
    raw = text_config(raw_config)
    facts = {fact: shown for fact, shown in config_facts(raw).items() if not _switched_off(fact, raw)}
    inner, beyond = _split_layers(tensor_names, raw)
    patterns = {tensor_pattern(name): name for name in inner}
    findings = _findings(raw, facts, patterns) + cached(raw)
    if beyond:
        sources = tuple(sorted({f"tensors layers.{number}.*" for number in beyond}))
        findings += (Finding(part="MTP", meaning="layers beyond num_hidden_layers", sources=sources),)
    hinted = dict.fromkeys(name for finding in findings for name in finding.operators)
    have = {*operators, *(name for port in known.values() for name in port.operators)}
    ranked = sorted(
        (nearness(raw, patterns, port) for port in known.values()), key=lambda near: (-near.score, near.model_type)
    )
    read = {key for port in known.values() for key in port.config_keys}
    covered = {pattern for port in known.values() for pattern in port.tensor_patterns}
    return Evidence(
        model_type=str(raw.get("model_type", "")),
        findings=findings,
        nearest=ranked[0] if ranked else None,
        ranking=tuple((near.model_type, near.score) for near in ranked[:3]),
        unread_keys=tuple(sorted(key for key in _telling(raw) if key not in read)),
        uncovered_patterns=tuple(
            sorted(numbered(name) for p, name in patterns.items() if p not in covered and not _skipped(name, known))
        ),
        lacking_operators=tuple(name for name in hinted if name not in have),
        unrecognised=_unrecognised(facts, patterns),
        notes=tuple(f"{port.model_type}: {port.note}" for port in known.values() if port.note),
    )


def tensor_pattern(name: str) -> str:
    """Return a tensor name without its container prefix, its numbers replaced by {n}."""
    return numbered(CONTAINERS.sub("", name))


def numbered(name: str) -> str:
    """Return a tensor name with its numbers replaced by {n}."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{n}", name)


def config_facts(raw: dict[str, Any]) -> dict[str, str]:
    """Return fact -> how it is shown as a source, for every key that says something (not null)."""
    found: dict[str, str] = {}
    for key, value in raw.items():
        words = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        told = {f"{key}={word}": f"{key} = {word}" for word in words if isinstance(word, str)}
        if value is not None and not told:
            told = {key: key if isinstance(value, (dict, list)) else f"{key} = {value}"}
        if isinstance(value, dict):
            told |= {f"{key}.{fact}": f"{key}.{shown}" for fact, shown in config_facts(value).items()}
        found |= told
    return found


def _switched_off(fact: str, raw: dict[str, Any]) -> bool:
    return any(raw.get(switch) is False and fact in keys for switch, keys in SWITCHES.items())


def _telling(raw: dict[str, Any]) -> set[str]:
    return {key for key, value in raw.items() if value is not None and key not in HARMLESS}


def _split_layers(names: Sequence[str], raw: dict[str, Any]) -> tuple[list[str], set[int]]:
    """Return the names inside the layers that the config counts, and the numbers of layers beyond."""
    count, inner, beyond = raw.get("num_hidden_layers"), [], set()
    for name in names:
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer and isinstance(count, int) and int(layer[1]) >= count:
            beyond.add(int(layer[1]))
        else:
            inner.append(name)
    return inner, beyond


def _findings(raw: dict[str, Any], facts: Mapping[str, str], patterns: Mapping[str, str]) -> tuple[Finding, ...]:
    found = []
    for clue in CLUES:
        if any(raw.get(key) is not None for key in clue.unless):
            continue
        sources = dict.fromkeys(shown for fact, shown in facts.items() if _explains(clue, fact) and _speaks(raw, fact))
        sources |= dict.fromkeys(f"tensor {numbered(patterns[p])}" for p in sorted(patterns) if _covers(clue, p))
        if sources:
            found.append(
                Finding(part=clue.part, meaning=clue.meaning, sources=tuple(sources), operators=clue.operators)
            )
    return tuple(found)


def _explains(clue: Clue, fact: str) -> bool:
    return bool(clue.facts) and re.fullmatch(clue.facts, fact) is not None


def _covers(clue: Clue, pattern: str) -> bool:
    return bool(clue.tensors) and re.search(clue.tensors, pattern) is not None


def _speaks(raw: dict[str, Any], fact: str) -> bool:
    """Return whether a fact asserts something: a key that is false, zero or empty does not."""
    return fact not in raw or bool(raw[fact])


def _unrecognised(facts: Mapping[str, str], patterns: Mapping[str, str]) -> tuple[str, ...]:
    unknown = [fact for fact in facts if not any(_explains(clue, fact) for clue in CLUES)]
    # what stands inside an unrecognised object says nothing more
    told = [fact for fact in unknown if fact.split(".")[0] not in unknown or "." not in fact]
    keys = [facts[fact] for fact in told if re.split(r"[.=]", fact)[0] not in HARMLESS]
    odd = [p for p in sorted(patterns) if not any(_covers(clue, p) for clue in CLUES)]
    return (*keys, *(f"tensor {numbered(patterns[p])}" for p in odd))


def _skipped(name: str, known: Mapping[str, KnownPort]) -> bool:
    return any(port.names.ignored(name) is not None for port in known.values())


def nearness(raw: dict[str, Any], patterns: Collection[str], port: KnownPort) -> Nearness:
    """Return how alike a model and a port are; the tensor score is None where no names were given."""
    keys = {CANONICAL.get(key, key) for key in _telling(raw)}
    read = {CANONICAL.get(key, key) for key in port.config_keys if key not in HARMLESS}
    key_score, tensors = jaccard(keys, read), set(patterns)
    tensor_score = jaccard(tensors, set(port.tensor_patterns)) if tensors else None
    return Nearness(
        model_type=port.model_type,
        score=round(key_score if tensor_score is None else (key_score + tensor_score) / 2, 4),
        key_score=round(key_score, 4),
        tensor_score=None if tensor_score is None else round(tensor_score, 4),
        shared_keys=tuple(sorted(keys & read)),
        only_here=tuple(sorted(keys - read)),
        only_there=tuple(sorted(read - keys)),
        patterns_only_here=tuple(sorted(tensors - port.tensor_patterns)) if tensors else (),
        patterns_only_there=tuple(sorted(port.tensor_patterns - tensors)) if tensors else (),
    )


def jaccard(a: Collection[str], b: Collection[str]) -> float:
    """Return shared / all, 0 for two empty sets."""
    union = {*a} | {*b}
    return len({*a} & {*b}) / len(union) if union else 0.0


def cached(raw: dict[str, Any]) -> tuple[Finding, ...]:
    """Return what the sizes say about the caches: values per token or per sequence of one layer."""
    return tuple(Finding(part="cache", meaning=meaning, sources=sources) for meaning, sources in _cached(raw))


def _cached(raw: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    table = raw.get("linear_attn_config")
    sizes = {**raw, **{f"linear_{k}": v for k, v in (table.items() if isinstance(table, dict) else ())}}

    def has(*keys: str) -> bool:
        return all(isinstance(sizes.get(key), int) for key in keys)

    latent, grouped = ("kv_lora_rank", "qk_rope_head_dim"), ("num_key_value_heads", "head_dim")
    state, per_head = (
        ("linear_num_heads", "linear_head_dim"),
        ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
    )
    space = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    if has(*latent):
        yield f"latent row of {sizes[latent[0]] + sizes[latent[1]]} values per token", latent
    elif has(*grouped):
        yield f"keys and values, {2 * sizes[grouped[0]] * sizes[grouped[1]]} values per token", grouped
    if has("index_head_dim", "index_kpool"):
        text = f"index key of {sizes['index_head_dim']} values per {sizes['index_kpool']} tokens"
        yield text, ("index_head_dim", "index_kpool")
    elif has("index_head_dim"):
        yield f"index key of {sizes['index_head_dim']} values per token", ("index_head_dim",)
    if has(*state):
        yield f"recurrent state of {sizes[state[0]]} x {sizes[state[1]]} x {sizes[state[1]]} values per sequence", state
    if has(*space):
        yield "recurrent state of " + " x ".join(str(sizes[key]) for key in space) + " values per sequence", space
    if has(*per_head):
        yield "recurrent state of " + " x ".join(str(sizes[key]) for key in per_head) + " values per sequence", per_head
