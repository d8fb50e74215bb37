"""Weights as data: name, shape, and how a token uses them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor, or `copies` alike (`{e}` in the name), of which a token reads `used`.

    multiplies: every element read costs one multiply-add per token. float32: kept so in any dtype.
    copies 0: stored elsewhere, such as a head tied to the embedding.
    """

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    used: int = 1
    multiplies: bool = False
    float32: bool = False

    @property
    def parameters(self) -> int:
        """Elements stored."""
        return prod(self.shape) * self.copies

    @property
    def active(self) -> int:
        """Elements stored that one token reads."""
        return prod(self.shape) * min(self.used, self.copies)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one token."""
        return prod(self.shape) * self.used if self.multiplies else 0


Weights = tuple[Weight, ...]


def linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Weights:
    """Return a projection, with its bias if any."""
    weight = Weight(name=f"{name}.weight", shape=(outputs, inputs), multiplies=True)
    return (weight, Weight(name=f"{name}.bias", shape=(outputs,))) if bias else (weight,)


def norm(name: str, dim: int, kind: str = "rms") -> Weights:
    """Return a norm's weight, and the bias of a LayerNorm."""
    weight = Weight(name=f"{name}.weight", shape=(dim,))
    return (weight, Weight(name=f"{name}.bias", shape=(dim,))) if kind == "layer" else (weight,)
