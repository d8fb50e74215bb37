"""What the known ports read and cover, found by running each of them; nothing is kept by hand.

A port is run twice on a config that holds nothing: once every question is answered with its
default, once every flag is turned over and every optional number is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from firstlight.models.registry import Port, find_port, known_models
from firstlight.spec.arch import ArchSpec
from firstlight.spec.evidence import KnownPort, tensor_pattern
from firstlight.spec.names import NameMap
from firstlight.spec.parts import OUTSIDE, parts
from firstlight.spec.read import Config
from firstlight.spec.shapes import part_weights

T = TypeVar("T", int, float, str, bool)

# divides every usual number of heads and experts; as a number of layers it is more than one period of the hybrids
SIZE = 8


@dataclass(slots=True)
class RecordingConfig(Config):
    """A config without keys that answers every question. flipped: with the opposite of a flag's default."""

    flipped: bool = False

    def get(self, key: str, default: T) -> T:
        """Return the default, or its opposite."""
        value = Config.get(self, key, default)
        return type(default)(not value) if self.flipped and isinstance(default, bool) else value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """Return None or, flipped, a plausible number."""
        value = Config.optional(self, key, kind)
        return kind(SIZE) if value is None and self.flipped and kind in (int, float) else value

    def require(self, key: str, kind: type[T]) -> T:
        """Return a plausible value."""
        self._find(key)
        return kind(SIZE)


def known_ports() -> dict[str, KnownPort]:
    """Return what every known port reads and covers, by model type."""
    return {name: probe(find_port(name)) for name in known_models()}


def probe(port: Port) -> KnownPort:
    """Return what one port reads and covers; a run that stops leaves a note with the reason."""
    keys: set[str] = set()
    patterns: set[str] = set()
    operators: set[str] = set()
    notes = []
    for flipped in (False, True):
        cfg = RecordingConfig({}, where=f"probe of {port.model_type}", flipped=flipped)
        try:
            arch = port.arch(cfg)
        except Exception as error:
            # a plugin is someone else's code
            notes.append(f"probe{' with flags turned over' if flipped else ''} stopped: {error}".splitlines()[0])
        else:
            patterns |= set(checkpoint_patterns(arch, port.names))
            operators.update(arch.operators(), *(arch.layer_operators(i) for i in range(len(arch.layers))))
        keys |= cfg.read
    return KnownPort(
        model_type=port.model_type,
        config_keys=frozenset(keys),
        tensor_patterns=frozenset(patterns),
        operators=frozenset(operators),
        names=port.names,
        note="; ".join(notes),
    )


def checkpoint_patterns(arch: ArchSpec, names: NameMap) -> Iterator[str]:
    """Yield every spelling that a checkpoint of the model may have, numbers replaced by {n}."""
    for part in parts(arch):
        for place in part.places:
            for weight in part_weights(arch, part, place):
                inner = weight.name.replace("{e}", "0")
                ours = inner if place == OUTSIDE else f"layers.{place}.{inner}"
                yield from (tensor_pattern(candidate.name) for candidate in names.candidates(ours))
