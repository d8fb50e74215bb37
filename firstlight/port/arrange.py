"""Which layer has which variant, as code: by a per-layer list of config.json, by a count of dense layers, or listed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from firstlight.port.observe import Observation, per_layer_keys
from firstlight.port.text import GUESS, WIDTH, mapping
from firstlight.port.values import reader

# keys that count the leading dense layers
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """lines: statements that bind the name to a tuple with one noun a layer. count: whether they need num_layers."""

    lines: tuple[str, ...]
    count: bool = False


def arrange(seen: Observation, name: str, variants: Mapping[str, str], layers: Sequence[str]) -> Arrangement:
    """Return how the layers are told apart. variants: code of each by its label; layers: the label of each layer."""
    if len(variants) == 1:
        return Arrangement((f"{name} = ({variants[layers[0]]},) * num_layers",), count=True)
    listed = per_layer_keys(seen)
    # names of this part first: mlp_layer_types says more of a feed-forward than layer_types
    for key in sorted(listed, key=lambda key: (("mlp" in key) != (name == "ffns"), key != "layer_types", key)):
        words = listed[key]
        says = dict(zip(words, layers, strict=True))
        if all(says[word] == label for word, label in zip(words, layers, strict=True)):
            counted = seen.value("num_hidden_layers") is not None
            choices = {word: variants[label] for word, label in says.items()}
            lines = mapping(f'{name} = cfg.per_layer("{key}", ', choices, ", num_layers)" if counted else ")")
            return Arrangement(tuple(lines), counted)
    for key, numbers in seen.integer_lists.items():
        for label in variants if len(variants) == 2 else ():
            for first in (0, 1):
                if {i + first for i, one in enumerate(layers) if one == label} == set(numbers):
                    return by_number(name, key, label, variants, first)
    for key in DENSE_FIRST:
        first = seen.value(key)
        if isinstance(first, int) and len(variants) == 2 and set(layers[:first]).isdisjoint(layers[first:]) and first:
            dense, sparse = variants[layers[0]], variants[layers[-1]]
            split = (
                f'first = cfg.get("{key}", 0)',
                f"{name} = ({dense},) * first + ({sparse},) * (num_layers - first)",
            )
            return Arrangement(split, count=True)
    return Arrangement(listing(name, variants, layers))


def by_number(name: str, key: str, label: str, variants: Mapping[str, str], first: int) -> Arrangement:
    """Return the arrangement by a list of layer numbers. first: the number of the first layer."""
    (other,) = (code for one, code in variants.items() if one != label)
    number = f"i + {first}" if first else "i"
    return Arrangement(
        (
            f"numbers = {reader(key, 'integers')} or ()",
            f"{name} = tuple({variants[label]} if {number} in numbers else {other} for i in range(num_layers))",
        ),
        count=True,
    )


def listing(name: str, variants: Mapping[str, str], layers: Sequence[str]) -> tuple[str, ...]:
    """Return a literal arrangement, for a config that does not tell the layers apart."""
    rows = textwrap.wrap(", ".join(f'"{label}"' for label in layers) + ",", WIDTH - 8)
    return (
        GUESS + "by the tensors of each layer; nothing in config.json tells the layers apart so",
        *mapping("kinds = ", variants, ""),
        f"{name} = tuple(",
        "    kinds[kind]",
        "    for kind in (",
        *(f"        {row}" for row in rows),
        "    )",
        ")",
    )
