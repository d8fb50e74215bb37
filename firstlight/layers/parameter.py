"""Which part of which parameter a checkpoint tensor fills.

Projections that read the same input are stored as one matrix; their parts keep the names they
have in checkpoints, so that name maps never see the fusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A named region of a parameter."""

    name: str
    index: Index


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes. name: our name of the part; path: of the module that owns it."""

    name: str
    path: str
    module: nn.Module
    attribute: str
    index: Index

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the tensor must have."""
        parameter = getattr(self.module, self.attribute)
        return tuple(torch.empty(parameter.shape, device="meta")[self.index].shape)


class Module(nn.Module):
    """Base of all layers. parts: regions of a parameter by attribute; transparent: parts are named
    as if they belonged to the parent."""

    transparent = False

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, tuple[Part, ...]] = {}

    def add_parameter(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, parts: tuple[Part, ...] = ()
    ) -> None:
        """Register an uninitialised parameter. dtype None: that of the model."""
        tensor: Tensor = torch.empty(shape, dtype=dtype or torch.get_default_dtype(), device="meta")
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        if parts:
            self.parts[name] = parts


def targets(root: nn.Module, prefix: str = "") -> Iterator[Target]:
    """Yield the parts of every parameter below root, in module order, named from prefix."""
    for path, module in root.named_modules(prefix=prefix):
        base = path.rpartition(".")[0] if getattr(module, "transparent", False) else path
        for attribute in module._parameters:
            whole = (Part(attribute, ()),)
            for part in getattr(module, "parts", {}).get(attribute, whole):
                yield Target(f"{base}.{part.name}" if base else part.name, path, module, attribute, part.index)
