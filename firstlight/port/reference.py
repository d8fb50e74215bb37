"""What the transformers class of a model says, if there is one: its module tree on the meta device, and its text.

No weight is read and nothing is run. A class that transformers does not know leaves everything empty.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from firstlight.errors import FirstlightError

EPS = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFact:
    """One module: its class, the epsilon of a norm, the text of the class."""

    name: str
    cls: str
    eps: float | None
    text: str

    def says(self, *patterns: str) -> bool:
        """Return whether the text of the class holds one of these regular expressions."""
        return any(re.search(pattern, self.text) for pattern in patterns)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Modules by path. version: of transformers, empty if it knows no such class. why: then the reason.

    config: what its config class makes of config.json, defaults filled in.
    """

    version: str = ""
    why: str = ""
    modules: Mapping[str, ModuleFact] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def by_layer(self) -> Mapping[int | None, list[ModuleFact]]:
        """Modules of the language model by layer, None for those outside."""
        found: dict[int | None, list[ModuleFact]] = {}
        for path, fact in self.modules.items():
            inside = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", path)
            if "visual" not in path and "audio" not in path:
                found.setdefault(int(inside[1]) if inside else None, []).append(fact)
        return found

    @classmethod
    def of(cls, folder: Path, prefix: str) -> Reference:
        """Return the facts of the class that transformers has for a folder. prefix: of the layers in the checkpoint."""
        from firstlight.verify.oracle_hf import build_model, require_transformers

        try:
            transformers = require_transformers()
            model = build_model(folder)
        except FirstlightError as error:
            return cls(why=error.why or error.what)
        found = {}
        for path, module in model.named_modules():
            eps = next((value for name in EPS if isinstance(value := getattr(module, name, None), float)), None)
            found[path] = ModuleFact(name=path, cls=type(module).__name__, eps=eps, text=_text(type(module)))
        config = model.config.get_text_config().to_dict()
        return cls(version=transformers.__version__, modules=found, config=config)

    def find(self, layer: int | None, *suffixes: str) -> ModuleFact | None:
        """Return the module of a layer (None: outside the layers) whose path ends so; the first suffix that fits."""
        here = self.by_layer.get(layer, ())
        fitting = (fact for suffix in suffixes for fact in here if f".{fact.name}".endswith(f".{suffix}"))
        return next(fitting, None)

    def inside(self, layer: int) -> list[ModuleFact]:
        """Return the modules of a layer of the language model."""
        return list(self.by_layer.get(layer, ()))

    def norm_like(self, layer: int | None, *suffixes: str) -> ModuleFact | None:
        """Return the first of `find` that has an epsilon."""
        for suffix in suffixes:
            fact = self.find(layer, suffix)
            if fact is not None and fact.eps is not None:
                return fact
        return None


def _text(cls: type) -> str:
    try:
        text = inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
    # what a docstring tells is not what the class does
    return re.sub(r'"""[\s\S]*?"""|#[^\n]*', "", text)
