"""Checkpoint folders made of a few tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import Tensor

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that writes tensors to a folder, over num_shards files with an index if not 0."""

    def write(tensors: dict[str, Tensor], *, num_shards: int = 0, folder: str = "model") -> Path:
        root = tmp_path / folder
        root.mkdir(exist_ok=True)
        if not num_shards:
            save_file(tensors, root / "model.safetensors")
            return root
        weight_map: dict[str, str] = {}
        for shard in range(num_shards):
            part = dict(list(tensors.items())[shard::num_shards])
            file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            save_file(part, root / file)
            weight_map |= dict.fromkeys(part, file)
        (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return root

    return write
