"""Runs a mixer or feed-forward that a port file declares itself: its weights are parameters, its `forward` runs.

T tokens, H hidden.
"""

from __future__ import annotations

import inspect
import traceback

import torch
from torch import Tensor, nn

from firstlight.errors import FirstlightError
from firstlight.layers.context import LayerContext
from firstlight.layers.parameter import Module
from firstlight.spec.noun import NewNoun
from firstlight.spec.weight import Weight


class DeclaredLayer(Module):
    """The executable form of a NewNoun: one parameter per weight, under its dotted name."""

    def __init__(self, hidden_size: int, spec: NewNoun) -> None:
        super().__init__()
        self.spec = spec
        self.weights = spec.weights(hidden_size)
        for weight in self.weights:
            if weight.copies != 1:
                raise ValueError(f"{type(spec).__name__}: weight {weight.name} needs copies=1, got {weight.copies}")
            *path, attribute = weight.name.split(".")
            owner = self
            for name in path:
                if name not in owner._modules:
                    owner.add_module(name, Module())
                owner = owner.get_submodule(name)  # type: ignore[assignment]
            owner.add_parameter(attribute, weight.shape, dtype=torch.float32 if weight.float32 else None)

    def forward(self, x_TH: Tensor, ctx: LayerContext) -> Tensor:
        """Return y_TH of the port's own `forward`. Raises: FirstlightError, with its line, for whatever it raises."""
        weights = {weight.name: self._value(weight) for weight in self.weights}
        try:
            y_TH: Tensor = self.spec.forward(x_TH, weights, ctx)
        except FirstlightError:
            raise
        except Exception as error:
            name, file = type(self.spec).__name__, inspect.getfile(type(self.spec))
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
            raise FirstlightError(
                f"{name}.forward fails: {type(error).__name__}: {' '.join(map(str, error.args))}",
                where=f"{file}:{lines[-1]}" if lines else file,
                why="the port raises it",
                fix="mend the port",
            ) from error
        return y_TH

    def _value(self, weight: Weight) -> nn.Parameter:
        return self.get_parameter(weight.name)
