"""Reads config.json strictly: every key is read by the port, known to be harmless, or refused.

On day 0 an unknown key is usually an unknown feature. Released files and files written by
transformers spell the same fact differently; the spellings are aliases here, never in a port.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from firstlight.errors import FirstlightError, closest
from firstlight.spec.norm import LinearScaling, Llama3Scaling, Rope, Yarn

T = TypeVar("T", int, float, str, bool)
V = TypeVar("V")

# canonical key -> other spellings of the same fact
ALIASES: dict[str, tuple[str, ...]] = {
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
    "max_position_embeddings": ("model_max_length",),
    "dtype": ("torch_dtype",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "head_dim": ("attention_head_dim",),
    "scoring_func": ("moe_router_activation_func",),
}

# canonical word of a per-layer list -> the same in older files
OLD_WORDS = {"deepseek_sparse_attention": "indexed_attention"}

# characters of a value in a message
SHOWN = 80

# beyond every size, count and position of a model; a layer costs memory as soon as it is declared
LIMIT = 2**31
LIMITS = {"num_hidden_layers": 100_000}

# keys that change nothing at inference, or that repeat what other keys fix
HARMLESS = frozenset(
    """architectures auto_map transformers_version _name_or_path use_cache initializer_range attention_dropout
    bos_token_id eos_token_id pad_token_id pretraining_tp output_router_logits router_aux_loss_coef aux_loss_alpha
    seq_aux dtype torch_dtype model_type ep_size return_dict output_attentions output_hidden_states is_decoder
    tokenizer_class task_specific_params num_nextn_predict_layers num_mtp_layers qk_head_dim
    chunk_size_feed_forward hidden_dropout embd_pdrop resid_pdrop classifier_dropout problem_type id2label label2id
    vision_config image_token_id video_token_id image_start_token_id image_end_token_id video_start_token_id
    video_end_token_id text_config""".split()  # noqa: SIM905 - a list of words
)


@dataclass(slots=True)
class Config:
    """A config.json being read. `where` names the file in messages; `read` collects the keys a port used;
    `prefix` is the path of a nested object, as in "rope_scaling."; `sections` those that are read key by key."""

    raw: dict[str, Any]
    where: str = "config.json"
    read: set[str] = field(default_factory=set)
    prefix: str = ""
    sections: dict[str, Config] = field(default_factory=dict)

    def _find(self, key: str) -> tuple[str, Any] | None:
        spellings = (key, *ALIASES.get(key, ()))
        found = [(name, self.raw[name]) for name in spellings if self.raw.get(name) is not None]
        self.read.update(spellings)
        if len({json.dumps(value) for _, value in found}) > 1:
            raise self.contradiction({self.prefix + name: value for name, value in found})
        return found[0] if found else None

    def contradiction(self, spellings: Mapping[str, Any]) -> FirstlightError:
        """Return the error for spellings of one fact that disagree."""
        return FirstlightError(
            f"{' and '.join(spellings)} contradict each other",
            where=self.where,
            why="both spell the same fact: " + ", ".join(f"{name}={value!r}" for name, value in spellings.items()),
            fix="remove the wrong one",
        )

    def get(self, key: str, default: T) -> T:
        """Return a value of default's type, not negative, or default where absent or null. Raises: FirstlightError."""
        found = self._find(key)
        if found is None:
            return default
        value = self._typed(found[0], found[1], type(default))
        if not isinstance(value, str) and value < 0:
            raise self.wrong(f"{found[0]} must not be negative, got {value}")
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """Return a value of that type, an integer > 0, or None where the key is absent or null."""
        found = self._find(key)
        if found is None:
            return None
        value = self._typed(found[0], found[1], kind)
        return self._positive(found[0], value) if kind is int else value

    def require(self, key: str, kind: type[T]) -> T:
        """Return a value that must be there. Raises: FirstlightError."""
        value = self.optional(key, kind)
        if value is None:
            near = closest(key, sorted(set(self.raw) - self.read))
            raise FirstlightError(
                f"config.json lacks {self.prefix}{key}",
                where=self.where,
                why=f"the model needs it (spellings tried: {', '.join((key, *ALIASES.get(key, ())))})",
                fix=f"did you mean {near}?" if near else "compare with the config.json of the release",
            )
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer > 0."""
        return self.require(key, int) if default is None else self._positive(key, self.get(key, default))

    def above_zero(self, key: str) -> float:
        """Return a number > 0 that must be there."""
        return self._positive(key, self.require(key, float))

    def _positive(self, key: str, value: T) -> T:
        if not isinstance(value, str) and value <= 0:
            raise self.wrong(f"{key} must be positive, got {value}")
        return value

    def wrong(self, what: str) -> FirstlightError:
        """Return the error for a value that no release has. what: begins with the key."""
        fix = "compare with the config.json of the release"
        return FirstlightError(f"{self.prefix}{what}", where=self.where, fix=fix)

    def at_most(self, key: str, value: int, limit_key: str, limit: int) -> int:
        """Return value. Raises: FirstlightError if it exceeds the limit that another key sets."""
        if value > limit:
            raise self.wrong(f"{key}={value} exceeds {limit_key}={limit}")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers, None where absent or null. Raises: FirstlightError."""
        value = self.raw.get(key)
        self.read.add(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(f"{key} must list whole numbers, got {shown(value)}")
        return tuple(self._typed(f"{key}[{i}]", item, int) for i, item in enumerate(value))

    def section(self, key: str, keys: Collection[str] | None = None) -> Config:
        """Return a nested object as a config, empty where absent.

        keys: those it may have; None: each must be read, or it counts as unknown, like a key of this config.
        Raises: FirstlightError on a key not in keys.
        """
        if keys is None:
            if key not in self.sections:
                self.sections[key] = Config(self.table(key), where=self.where, prefix=f"{self.prefix}{key}.")
            return self.sections[key]
        table = {name: value for name, value in self.table(key).items() if value is not None}
        if extra := sorted(set(table) - set(keys)):
            near = closest(extra[0], sorted(keys))
            raise FirstlightError(
                f"{self.prefix}{key} has unknown keys: {', '.join(extra)}",
                where=self.where,
                why=f"known: {', '.join(sorted(keys))}",
                fix=f"did you mean {near}?"
                if near
                else "an unknown key is usually an unknown feature: extend the port",
            )
        return Config(table, where=self.where, prefix=f"{self.prefix}{key}.")

    def either(self, key: str, section: Config, nested: str, default: int) -> int:
        """Return an integer > 0 spelled here or, as `nested`, in a section. Raises: FirstlightError on disagreement."""
        inner, outer = section.optional(nested, int), self.optional(key, int)
        if inner is not None and outer is not None and inner != outer:
            raise self.contradiction({key: outer, section.prefix + nested: inner})
        return self.positive(key, default) if inner is None else section.positive(nested)

    def table(self, key: str) -> dict[str, Any]:
        """Return a nested object, empty where absent or null."""
        value = self.raw.get(key)
        self.read.add(key)
        if value is not None and not isinstance(value, dict):
            raise FirstlightError(f"{key} must be an object, got {value!r}", where=self.where)
        return dict(value or {})

    def per_layer(self, key: str, choices: Mapping[str, V], count: int | None = None) -> tuple[V, ...]:
        """Return what each layer has, by the word that a per-layer list holds for it. count None: as long as the list.

        Raises: FirstlightError if the list is absent or short, or holds another word.
        """
        listed = self.raw.get(key)
        words = self.names(key, len(listed) if count is None and isinstance(listed, list) else count or 0, choices)
        if words is None:
            raise FirstlightError(
                f"config.json lacks {self.prefix}{key}",
                where=self.where,
                why="it says what each layer is",
                fix="compare with the config.json of the release",
            )
        return tuple(choices[word] for word in words)

    def names(self, key: str, count: int, choices: Iterable[str]) -> tuple[str, ...] | None:
        """Return a per-layer list of words, or None where absent. Raises: FirstlightError on length or word."""
        value = self.raw.get(key)
        self.read.add(key)
        if value is None:
            return None
        allowed = tuple(choices)
        if not isinstance(value, list) or len(value) < count:
            raise FirstlightError(
                f"{key} must list {count} layers", where=self.where, why=f"num_hidden_layers={count}, got {value!r}"
            )
        words = [OLD_WORDS.get(word, word) if isinstance(word, str) else word for word in value[:count]]
        for i, word in enumerate(words):
            if word not in allowed:
                raise FirstlightError(
                    f"{key}[{i}] = {word!r} is not known", where=self.where, why=f"known: {', '.join(allowed)}"
                )
        return tuple(words)

    def expect(self, key: str, *allowed: Any) -> None:
        """Check that a key, where present, has one of the values the port was written for. Raises: FirstlightError."""
        found = self._find(key)
        if found and found[1] not in allowed:
            raise FirstlightError(
                f"{found[0]} = {found[1]!r} is not supported",
                where=self.where,
                why=f"this port knows {', '.join(repr(value) for value in allowed)}",
                fix="firstlight ops    lists what can be computed",
            )

    def ignore(self, *keys: str) -> None:
        """Declare keys without effect on this architecture."""
        self.read.update(keys)

    def divides(self, divisor_key: str, divisor: int, key: str, value: int) -> None:
        """Check that value is a multiple of divisor. Raises: FirstlightError naming both keys."""
        if divisor <= 0 or value % divisor:
            raise FirstlightError(
                f"{key}={value} is not a multiple of {divisor_key}={divisor}",
                where=self.where,
                why="heads or experts are split in equal groups",
                fix="compare with the config.json of the release",
            )

    def _typed(self, name: str, value: Any, kind: type[T]) -> T:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = kind(value) if abs(value) < 2**63 else math.inf
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FirstlightError(f"{self.prefix}{name} must be {kind.__name__}, got {shown(value)}", where=self.where)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.wrong(f"{name} must be a finite number")
        limit = LIMITS.get(name, LIMIT)
        if isinstance(value, int) and abs(value) >= limit:
            raise self.wrong(f"{name} must be below {limit:,}, got {shown(value)}")
        return value

    def unknown(self) -> dict[str, str | None]:
        """Return the keys nobody read, each with the nearest known key. Null values count as absent."""
        left = [key for key in self.raw if key not in self.read and key not in HARMLESS and self.raw[key] is not None]
        known = sorted(self.read | HARMLESS)
        found = {key: closest(key, known) for key in left}
        for name, section in self.sections.items():
            found |= {f"{name}.{key}": near for key, near in section.unknown().items()}
        return found

    def rope(self, dim: int, *, layout: str, theta: float = 10000.0, partial: float = 1.0) -> Rope:
        """Return the rotary positions in either spelling: rope_parameters, or rope_theta with rope_scaling.

        dim: dimensions that may rotate, of which `partial_rotary_factor` rotates the first part. theta, partial:
        where the config has none.
        """
        given = [key for key in ("rope_parameters", "rope_scaling") if self.table(key)]
        scalings = {key: rope_scaling(self.rope_section(key), self.get("max_position_embeddings", 0)) for key in given}
        if len(set(scalings.values())) > 1:
            raise self.contradiction({key: self.raw[key] for key in given})
        factor = self._rope_number("partial_rotary_factor", given, partial)
        rotated = int(dim * factor)
        if factor != 1 and (factor > 1 or rotated < 2 or rotated % 2):
            raise self.wrong(
                f"partial_rotary_factor={factor} rotates {rotated} of {dim} dimensions, not an even number up to {dim}"
            )
        base = self._rope_number("rope_theta", given, theta)
        chosen = "half" if layout == "half" else "interleave"
        scaling = scalings[given[0]] if given else None
        return Rope(theta=base, dim=rotated, layout=chosen, scaling=scaling)  # type: ignore[arg-type]

    def _rope_number(self, key: str, sections: Sequence[str], default: float) -> float:
        """Return a number > 0 that may stand beside the sections of rotary parameters and in them."""
        found = self._find(key)
        top = None if found is None else self._typed(key, found[1], float)
        nested = [value for name in sections if (value := self.rope_section(name).optional(key, float)) is not None]
        values = [*nested, *([] if top is None else [top])]
        if len(set(values)) > 1:
            raise self.contradiction({key: top, **{name: self.raw[name] for name in sections}})
        for value in values:
            self._positive(key, value)
        return values[0] if values else default

    def rope_section(self, key: str) -> Config:
        """Return a table of rotary parameters; `type` is an old spelling of `rope_type`."""
        table = self.table(key)
        old = table.pop("type", None)
        if old is not None and table.setdefault("rope_type", old) != old:
            raise self.contradiction({f"{key}.type": old, f"{key}.rope_type": table["rope_type"]})
        kind = table.get("rope_type") or "default"
        if not isinstance(kind, str) or kind not in ROPE_KEYS:
            raise FirstlightError(
                f"rope type {kind!r} is not supported",
                where=f"{self.where}  {key}",
                why=f"known: {', '.join(ROPE_KEYS)}",
            )
        return Config({key: table}, where=self.where).section(key, ROPE_KEYS[kind] | ROPE_COMMON)


ROPE_COMMON = {"rope_type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}
ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"},
}


def rope_scaling(table: Config, context: int) -> Yarn | Llama3Scaling | LinearScaling | None:
    """Return the scaling noun of a rope table. context: positions before scaling where the table names none."""
    kind, original = table.get("rope_type", "default"), table.get("original_max_position_embeddings", context)
    if kind == "linear":
        return LinearScaling(factor=table.above_zero("factor"))
    if kind == "llama3":
        low, high = table.above_zero("low_freq_factor"), table.above_zero("high_freq_factor")
        factor = table.above_zero("factor")
        return Llama3Scaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original)
    return yarn(table, original) if kind == "yarn" else None


def yarn(table: Config, original: int) -> Yarn:
    """Return a Yarn noun from a rope table; absent keys take the defaults of the paper."""
    return Yarn(
        factor=table.above_zero("factor"),
        original_max_position=original,
        beta_fast=table.get("beta_fast", 32.0),
        beta_slow=table.get("beta_slow", 1.0),
        mscale=table.get("mscale", 0.0),
        mscale_all_dim=table.get("mscale_all_dim", 0.0),
        attention_factor=table.optional("attention_factor", float),
        truncate=table.get("truncate", True),
    )


def shown(value: object) -> str:
    """Return a value of a config.json as text, a long one cut."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the text tower: its own where nested in text_config, before those beside it."""
    nested = raw.get("text_config")
    if not isinstance(nested, dict):
        return dict(raw)
    beside = {key: value for key, value in raw.items() if key != "text_config"}
    return {**beside, **nested, "model_type": raw.get("model_type", nested.get("model_type"))}


def read_config(raw: dict[str, Any], *, where: str) -> Config:
    """Return the text tower as a config. Raises: FirstlightError where a key beside text_config contradicts it."""
    cfg = Config(text_config(raw), where=where)
    nested = raw.get("text_config")
    for key, value in nested.items() if isinstance(nested, dict) else ():
        beside = raw.get(key)
        if key not in HARMLESS and None not in (beside, value) and beside != value:
            raise cfg.contradiction({key: beside, f"text_config.{key}": value})
    return cfg
