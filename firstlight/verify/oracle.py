"""What a reference hands over: for every layer, what went into its modules and what came out.

T tokens. Tensors have no batch dimension: verification runs one unpadded sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a reference module: its tensor arguments and results, in order. name: the module's path."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A layer's calls by our module path inside the layer ("" is the layer itself), and its states in our layout."""

    calls: Mapping[str, Call] = field(default_factory=dict)
    states: Mapping[str, Tensor] = field(default_factory=dict)


# layer number, or None for what lies outside the layers
Visit = Callable[[int | None, Trace], None]


class Oracle(Protocol):
    """A reference that runs a sequence and shows every layer as it passes.

    independent: it has a declaration of its own, so that equality proves ours.
    """

    description: str
    independent: bool

    def run(self, ids_T: Tensor, layers: range, visit: Visit) -> Tensor | None:
        """Run the model to the last of `layers`; call visit after each and at the end with None.

        Return logits [T, V], None if layers were left out at the end.
        """
        ...

    def contradiction(self, ids_T: Tensor, logits_TV: Tensor) -> str:
        """Return how the reference's logits change when it runs another way, "" if they do not."""
        ...


class Recorder:
    """Keeps the calls of chosen modules until taken.

    modules: our path -> (their name, the module). batch_tokens: tokens of the one sequence, where the modules
    carry a batch dimension that is to be dropped; None where they have none.
    """

    def __init__(self, modules: Mapping[str, tuple[str, nn.Module]], *, batch_tokens: int | None = None) -> None:
        self.calls: dict[str, Call] = {}
        self.batch_tokens = batch_tokens
        self.handles = [self._watch(path, name, module) for path, (name, module) in modules.items()]

    def _watch(self, path: str, name: str, module: nn.Module) -> Any:
        def after(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            given, made = ((*args, *kwargs.values()), result)
            self.calls[path] = Call(name, tensors(given, self.batch_tokens), tensors(made, self.batch_tokens))

        return module.register_forward_hook(after, with_kwargs=True)

    def take(self) -> dict[str, Call]:
        """Return the calls recorded since the last take, and forget them."""
        calls, self.calls = self.calls, {}
        return calls

    def close(self) -> None:
        """Stop watching."""
        for handle in self.handles:
            handle.remove()


def tensors(value: Any, batch_tokens: int | None = None) -> tuple[Tensor, ...]:
    """Return copies of the tensors of a call's arguments or results, nested tuples included.

    batch_tokens: see Recorder.
    """
    if isinstance(value, Tensor):
        # a copy: later layers may write in place
        copy = value.detach().clone()
        return (copy.squeeze(0) if batch_tokens and copy.shape[:2] == (1, batch_tokens) else copy,)
    if isinstance(value, (tuple, list)):
        return tuple(found for item in value for found in tensors(item, batch_tokens))
    return ()
