"""How a checkpoint spells our parameters, as data.

Our names are those of the modules ("layers.3.mixer.q_proj.weight"). A NameMap rewrites the longest
matching prefix; `{i}` stands for a layer number and `{e}` for an expert number. Templates may hold
`{body}`, for which each of `prefixes` is tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One checkpoint tensor, or a part of one.

    expert: take index `{e}` of dimension 0. chunk (k, n): then the k-th of n equal parts of the
    first dimension left. transpose: swap the last two dimensions first. interleave: the parts of
    `chunk` alternate row by row instead of following each other.
    """

    name: str
    expert: bool = False
    chunk: tuple[int, int] | None = None
    transpose: bool = False
    interleave: bool = False


Rule = str | Source | tuple["str | Source", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A resolved Source: a concrete checkpoint name and the expert index it needs, if any."""

    name: str
    source: Source
    expert: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """rules: our prefix -> checkpoint template(s), alternatives in order of preference.

    prefixes: what `{body}` may be. ignore: regular expressions of checkpoint tensors that are
    skipped, each with the reason shown to the user. extra_layers: why layers numbered num_layers
    and up are skipped; empty where there must be none.
    """

    rules: Mapping[str, Rule]
    prefixes: tuple[str, ...] = ("model.",)
    ignore: Mapping[str, str] = field(default_factory=dict)
    extra_layers: str = ""
    num_layers: int | None = None

    def extend(
        self,
        rules: Mapping[str, Rule],
        *,
        prefixes: tuple[str, ...] | None = None,
        ignore: Mapping[str, str] | None = None,
        extra_layers: str | None = None,
    ) -> NameMap:
        """Return a map with further or replaced rules."""
        return replace(
            self,
            rules={**self.rules, **rules},
            prefixes=prefixes or self.prefixes,
            ignore={**self.ignore, **(ignore or {})},
            extra_layers=self.extra_layers if extra_layers is None else extra_layers,
        )

    def at(self, num_layers: int) -> NameMap:
        """Return the map for a model of that many layers."""
        return replace(self, num_layers=num_layers)

    def candidates(self, name: str) -> list[Candidate]:
        """Return every spelling of one of our parameter names, most preferred first; empty if no rule fits."""
        best: tuple[tuple[int, int], re.Match[str], Rule] | None = None
        for key, rule in self.rules.items():
            pattern = re.escape(key).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
            match = re.match(pattern + r"(?P<rest>$|\..*)", name)
            # the longest prefix wins, and of two that cover the same the one with fewer placeholders
            covered = (len(name) - len(match["rest"]), -key.count("{")) if match else (0, 0)
            if match and (best is None or covered > best[0]):
                best = (covered, match, rule)
        return [] if best is None else self._expand(best[1], best[2])

    def _expand(self, match: re.Match[str], rule: Rule) -> list[Candidate]:
        groups = match.groupdict()
        found = []
        for item in rule if isinstance(rule, tuple) else (rule,):
            source = item if isinstance(item, Source) else Source(name=item)
            for body in self.prefixes if "{body}" in source.name else ("",):
                filled = (
                    source.name.replace("{body}", body)
                    .replace("{i}", groups.get("i") or "")
                    .replace("{e}", groups.get("e") or "")
                )
                expert = int(groups["e"]) if source.expert else None
                found.append(Candidate(name=filled + groups["rest"], source=source, expert=expert))
        return found

    def ignored(self, name: str) -> str | None:
        """Return why a checkpoint tensor is skipped, or None if it must be used."""
        for pattern, reason in self.ignore.items():
            if re.search(pattern, name):
                return reason
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if self.extra_layers and self.num_layers is not None and layer and int(layer[1]) >= self.num_layers:
            return self.extra_layers
        return None


DECODER = NameMap(
    rules={
        "embed": "{body}embed_tokens",
        "norm": "{body}norm",
        "head": "lm_head",
        "layers.{i}.mixer_norm": "{body}layers.{i}.input_layernorm",
        "layers.{i}.ffn_norm": "{body}layers.{i}.post_attention_layernorm",
        "layers.{i}.mixer": "{body}layers.{i}.self_attn",
        "layers.{i}.ffn": "{body}layers.{i}.mlp",
        "layers.{i}.ffn.router": "{body}layers.{i}.mlp.gate",
        "layers.{i}.ffn.router.bias": "{body}layers.{i}.mlp.gate.e_score_correction_bias",
        "layers.{i}.ffn.shared": "{body}layers.{i}.mlp.shared_experts",
        "layers.{i}.ffn.experts.{e}.gate_proj.weight": (
            "{body}layers.{i}.mlp.experts.{e}.gate_proj.weight",
            Source(name="{body}layers.{i}.mlp.experts.gate_up_proj", expert=True, chunk=(0, 2)),
        ),
        "layers.{i}.ffn.experts.{e}.up_proj.weight": (
            "{body}layers.{i}.mlp.experts.{e}.up_proj.weight",
            Source(name="{body}layers.{i}.mlp.experts.gate_up_proj", expert=True, chunk=(1, 2)),
        ),
        "layers.{i}.ffn.experts.{e}.down_proj.weight": (
            "{body}layers.{i}.mlp.experts.{e}.down_proj.weight",
            Source(name="{body}layers.{i}.mlp.experts.down_proj", expert=True),
        ),
    },
    # buffers that old checkpoints carry and that are computed here
    ignore={r"rotary_emb\.inv_freq$": "rotary table, computed"},
)
"""The spelling most decoders share; a port extends it."""

MTP_LAYERS = "multi-token prediction layer, not run"
