"""The report folds what was skipped and keeps every notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from firstlight.layers.parameter import Module, targets
from firstlight.spec.names import NameMap
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import load_into, resolve
from firstlight.weights.report import LoadReport, SkippedGroup, summarise


class Matrix(Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_parameter("weight", (2, 3), dtype=torch.float16)


def report_of(folder: Path) -> LoadReport:
    model = Matrix()
    names = NameMap(rules={"weight": "weight"}, ignore={r"^mtp\.": "draft head", r"inv_freq$": "computed"})
    checkpoint = Checkpoint.open(folder)
    plan = resolve(targets(model), names, checkpoint)
    return summarise(plan, checkpoint, num_bytes=load_into(plan, checkpoint), notices=("one more",))


def test_skipped_tensors_are_folded_over_their_numbers(save: Callable[..., Path]) -> None:
    tensors = {"weight": torch.ones(2, 3)}
    tensors |= {f"mtp.layers.{i}.experts.{e}.w": torch.ones(1) for i in range(2) for e in range(12)}
    tensors |= {f"layers.{i}.inv_freq": torch.ones(1) for i in range(3)}
    report = report_of(save(tensors))
    assert sorted(report.skipped, key=lambda group: group.count) == [
        SkippedGroup(pattern="layers.*.inv_freq", count=3, reason="computed"),
        SkippedGroup(pattern="mtp.layers.*.experts.*.w", count=24, reason="draft head"),
    ]
    assert (report.tensors, report.bytes) == (1, 12)


def test_notices_of_the_checkpoint_and_of_the_load_are_kept(save: Callable[..., Path]) -> None:
    folder = save({"weight": torch.ones(2, 3)})
    save_file({"x": torch.ones(1)}, folder / "stray.safetensors")
    stray, more = report_of(folder).notices
    assert "stray.safetensors" in stray and more == "one more"


def test_report_survives_json(save: Callable[..., Path]) -> None:
    report = report_of(save({"weight": torch.ones(2, 3), "inv_freq": torch.ones(1)}))
    assert json.loads(json.dumps(report.to_dict())) == {
        "tensors": 1,
        "bytes": 12,
        "skipped": [{"pattern": "inv_freq", "count": 1, "reason": "computed"}],
        "notices": ["one more"],
    }
