"""Plans read back from files. What does not fit is in tests/cli/test_bad_input.py."""

from __future__ import annotations

import json
from pathlib import Path

from firstlight.engine.assemble import declare
from firstlight.plan.stored import read_plan


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    model, path = declare("qwen3-30b-a3b"), tmp_path / "plan.json"
    plan = model.planner().bind(3, "decode", "rope", "ref").build(parallel="TP")
    path.write_text(json.dumps(plan.to_dict()))
    assert read_plan(path, model.arch, model.table) == plan
