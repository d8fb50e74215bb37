"""docs/engine.md is true: its code runs, and its tables name what there is."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.args import EngineArgs
from firstlight.engine.sampling_params import SamplingParams
from firstlight.memory.prefix import PrefixCounters

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")


def blocks() -> list[str]:
    """Return the Python of the page."""
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_offline_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks()[0], {})
    assert "At first light" in capsys.readouterr().out


def test_code_of_coroutines_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks()[1]
    names: dict[str, Any] = {}
    start, stop = code.split("engine.shutdown()")[0], "engine.shutdown()"
    assert stop in code
    exec(start, names)
    asyncio.run(names["answer"]("At first light"))
    exec(stop, names)
    assert capsys.readouterr().out.strip()


def test_every_parameter_limit_and_counter_is_told() -> None:
    # bad_words_ids is filled in by the tokenizer's side
    wanted = {field.name for field in fields(SamplingParams)} - {"bad_words_ids"}
    wanted |= {field.name for field in fields(EngineArgs)} - {"poison", "seed"}
    wanted |= {field.name for field in fields(PrefixCounters)}
    told = set(re.findall(r"`(\w+)[`=]", PAGE))
    assert wanted <= told, wanted - told
