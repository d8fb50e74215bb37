"""Fixtures for every test: memory that nobody wrote is NaN, one thread, the operator table, tiny checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.ops.registry import OperatorTable, operator_table

# one: on small tensors a second thread only waits, badly so on a busy machine
torch.set_num_threads(1)
# torch remembers its constructors at the first torch.device(): it must see its own torch.empty, not the one that
# tests replace it by, or an empty model would take real memory
with torch.device("meta"):
    torch.empty(0)

POISONED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.device.type != "meta" and tensor.dtype in POISONED:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return poisoned


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill torch.empty and torch.empty_like with NaN, so that reading unwritten memory shows."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))


@pytest.fixture(scope="session")
def table() -> OperatorTable:
    """Return the table of every operator of the package."""
    return operator_table()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return name -> folder of a tiny random checkpoint in hub layout; built once a session. Read only."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(name: str) -> Path:
        made = root / name
        if not made.exists():
            from fixtures import tiny_configs

            tiny_configs.build(name).save_pretrained(made)
            if name in tiny_configs.HUBIFY:
                tiny_configs.hubify(name, str(made))
        return made

    return folder


@pytest.fixture(scope="session")
def reference(tiny: Callable[[str], Path]) -> Callable[[str], Any]:
    """Return name -> the transformers model of a tiny checkpoint, fp32, eager attention; built once a session."""
    import transformers

    made: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in made:
            config = transformers.AutoConfig.from_pretrained(tiny(name))
            cls = getattr(transformers, config.architectures[0])
            made[name] = cls.from_pretrained(tiny(name), attn_implementation="eager", dtype=torch.float32).eval()
        return made[name]

    return model


sys.path.insert(0, str(Path(__file__).parent))
