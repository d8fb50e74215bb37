"""What a model without a port shows of itself: its config, its tensors layer by layer, its reference's modules.

Only the headers of the safetensors are read. Nothing here decides what the model is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from firstlight.errors import FirstlightError
from firstlight.port.reference import Reference
from firstlight.spec.read import ALIASES, OLD_WORDS, text_config
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.source import ModelSource

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

LAYER = re.compile(r"^(?P<prefix>.*?)layers\.(?P<i>\d+)\.(?P<rest>.+)$")
OTHER_TOWERS = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|image\w*|multi_modal_projector|mm_projector)\.")
MIXER_BLOCKS = re.compile(r"attn|attention|mixer|linear|ssm|mamba|recurrent|rnn|conv")
FFN_BLOCKS = re.compile(r"mlp|ffn|feed_forward|moe|expert")
MIXER_SIGNS = re.compile(r"(^|\.)(q_proj|k_proj|qkv|kv_|A_log|dt_bias|conv1d|in_proj|wq|wk)")
FFN_SIGNS = re.compile(r"(^|\.)(experts|up_proj|down_proj|w1|w2|fc1|fc2|gate_up)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """The tensors of one layer, expert numbers replaced by {e}.

    mixer, ffn: the blocks they lie in, "" where there is none; by name below the block. norms: of the layer itself.
    rest: what lies in neither.
    """

    mixer_block: str
    ffn_block: str
    mixer: Shapes
    ffn: Shapes
    norms: Shapes
    rest: Shapes


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A model to be ported. prefix: before `layers.` in tensor names; experts: how many each layer numbers.

    other: tensors of other towers, which are not run. beyond: tensors of layers past the last.
    """

    source: ModelSource
    raw: Mapping[str, Any]
    prefix: str
    layers: tuple[LayerTensors, ...]
    outside: Shapes
    other: tuple[str, ...]
    beyond: tuple[str, ...]
    num_experts: int
    reference: Reference = field(repr=False)

    @cached_property
    def hidden(self) -> int:
        """Width of the residual stream."""
        wide = (shape[-1] for shape in self.outside.values() if len(shape) == 2)
        return int(self.raw.get("hidden_size", 0)) or next(wide)

    @property
    def says(self) -> str:
        """How a finding of the reference is introduced in a comment."""
        return f"transformers {self.reference.version}"

    def key(self, *names: str) -> str | None:
        """Return the first of these config keys that has a value in any spelling, by its canonical name."""
        return next((name for name in names if self.value(name) is not None), None)

    def value(self, name: str) -> Any:
        """Return the value of a config key in any of its spellings, None if it has none. A dot leads into an object."""
        table, _, leaf = name.rpartition(".")
        holder = self.raw.get(table) if table else self.raw
        found = (
            [holder.get(spelling) for spelling in (leaf, *ALIASES.get(leaf, ()))] if isinstance(holder, dict) else []
        )
        return next((value for value in found if value is not None), None)

    @cached_property
    def integer_lists(self) -> dict[str, tuple[int, ...]]:
        """Every list of whole numbers in the config, by key; a dot leads into an object."""
        found = dict(self.raw)
        for key, value in self.raw.items():
            found |= {f"{key}.{leaf}": inner for leaf, inner in value.items()} if isinstance(value, dict) else {}
        return {
            key: tuple(value)
            for key, value in found.items()
            if isinstance(value, list) and value and all(type(one) is int for one in value)
        }

    def usual(self, name: str) -> Any:
        """Return what transformers takes for a key that config.json leaves out, None if it has no such key."""
        return None if self.value(name) is not None else self.reference.config.get(name.rpartition(".")[2])


def observe(source: ModelSource) -> Observation:
    """Return what a model shows. Raises: FirstlightError if there are no weights, or no layers in them."""
    folder = source.require_folder("drafting a port, which needs the names and shapes of the tensors,")
    raw = text_config(source.raw)
    with Checkpoint.open(folder) as checkpoint:
        shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    other = tuple(name for name in shapes if OTHER_TOWERS.search(name))
    inner: dict[int, dict[str, Shape]] = {}
    outside: dict[str, Shape] = {}
    prefixes: dict[str, int] = {}
    for name in (name for name in shapes if name not in other):
        found = LAYER.match(name)
        if found is None:
            outside[name] = shapes[name]
            continue
        prefixes[found["prefix"]] = prefixes.get(found["prefix"], 0) + 1
        inner.setdefault(int(found["i"]), {})[found["rest"]] = shapes[name]
    if not inner:
        raise FirstlightError(
            "no tensor lies in a layer",
            where=str(folder),
            why=f"tensor names hold layers.N. where a decoder has layers; here: {', '.join(list(shapes)[:4])}",
            fix="write the port by hand: docs/port.md",
        )
    count = raw.get("num_hidden_layers")
    count = count if isinstance(count, int) and 0 < count <= len(inner) else len(inner)
    prefix = max(prefixes, key=lambda text: prefixes[text])
    experts = {int(n) for rest in inner.values() for name in rest for n in re.findall(r"experts\.(\d+)\.", name)}
    return Observation(
        source=source,
        raw=raw,
        prefix=prefix,
        layers=tuple(layer_tensors(inner.get(i, {}), int(raw.get("hidden_size", 0))) for i in range(count)),
        outside=outside,
        other=other,
        beyond=tuple(f"{prefix}layers.{i}.{name}" for i in sorted(inner) if i >= count for name in inner[i]),
        num_experts=max(experts) + 1 if experts else 0,
        reference=Reference.of(folder, prefix),
    )


def layer_tensors(names: Shapes, hidden: int) -> LayerTensors:
    """Return the tensors of a layer by block. A lone block is a feed-forward if its tensors are those of one."""
    blocks: dict[str, dict[str, Shape]] = {}
    for name, shape in names.items():
        block, _, rest = re.sub(r"experts\.\d+\.", "experts.{e}.", name).partition(".")
        blocks.setdefault(block, {})[rest] = shape
    norms = {block for block, rest in blocks.items() if is_norm(block, rest, hidden)}
    large = [block for block in blocks if block not in norms and any(rest for rest in blocks[block])]
    mixer = next((b for b in large if MIXER_BLOCKS.search(b) and has(MIXER_SIGNS, blocks[b])), "")
    ffn = next((b for b in large if b != mixer and (FFN_BLOCKS.search(b) or has(FFN_SIGNS, blocks[b]))), "")
    mixer = mixer or next((b for b in large if b != ffn and has(MIXER_SIGNS, blocks[b])), "")
    return LayerTensors(
        mixer_block=mixer,
        ffn_block=ffn,
        mixer=blocks.get(mixer, {}),
        ffn=blocks.get(ffn, {}),
        norms={f"{b}.{name}": shape for b in blocks if b in norms for name, shape in blocks[b].items()},
        rest={
            f"{b}.{name}".rstrip("."): shape
            for b in blocks
            if b not in norms and b not in (mixer, ffn)
            for name, shape in blocks[b].items()
        },
    )


def is_norm(block: str, tensors: Shapes, hidden: int) -> bool:
    """Return whether a block is a norm of the residual stream."""
    named = "norm" in block or block.startswith("ln")
    return named and set(tensors) <= {"weight", "bias"} and all(shape == (hidden,) for shape in tensors.values())


def has(signs: re.Pattern[str], names: Iterable[str]) -> bool:
    """Return whether any name shows a sign."""
    return any(signs.search(name) for name in names)


def words_of(seen: Observation, key: str) -> tuple[str, ...] | None:
    """Return the words of a per-layer list of config.json, None if the key holds no such list."""
    value = seen.raw.get(key)
    if not isinstance(value, list) or len(value) < len(seen.layers) or not all(isinstance(w, str) for w in value):
        return None
    return tuple(str(OLD_WORDS.get(word, word)) for word in value[: len(seen.layers)])


def per_layer_keys(seen: Observation) -> dict[str, tuple[str, ...]]:
    """Return every per-layer list of words by key."""
    return {key: words for key in seen.raw if (words := words_of(seen, key)) is not None}
