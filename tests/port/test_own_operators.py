"""A port file with a mixer and an operator of its own: it runs everywhere, and what is wrong with it is told.

The port is the one on the documentation's page of new nouns, over a checkpoint made for it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from docs.faults import FAULTS
from tiny_engine import prompt

from firstlight import LLM, SamplingParams
from firstlight.engine.assemble import Declared, declare
from firstlight.errors import FirstlightError
from firstlight.models import registry
from firstlight.models.deadline import deadline
from firstlight.models.registry import find_port
from firstlight.port.report import count_lines, render, report
from firstlight.quant.policy import PrecisionPolicy
from firstlight.spec.caches import CacheDtypes
from firstlight.verify.run import VerifyOptions, verify

Tiny = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def place(tmp_path: Path, tiny: Tiny) -> Path:
    """Return a folder with ./NewModel and newmodel.py."""
    shutil.copytree(tiny("llama"), tmp_path / "NewModel")
    with contextlib.chdir(tmp_path):
        FAULTS["running-mean"]()
    return tmp_path


def declared(place: Path, old: str = "", new: str = "") -> Declared:
    """Return the model by its port, one text of the file replaced."""
    file = place / "newmodel.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    return declare(str(place / "NewModel"), port_file=file)


def ids(place: Path, prompts: list[list[int]], **args: object) -> list[tuple[int, ...]]:
    """Return the greedy continuations of prompts."""
    llm = LLM(str(place / "NewModel"), port=place / "newmodel.py", dtype="float32", **args)
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], GREEDY, use_tqdm=False)
    llm.close()
    return [output.outputs[0].token_ids for output in outputs]


def test_chunks_neighbours_and_prefix_cache_change_nothing(place: Path) -> None:
    shared = prompt(70, seed=3)
    prompts = [shared, shared[:65] + prompt(9, seed=4), prompt(5, seed=5), shared]
    alone = [ids(place, [one], max_num_seqs=1, enable_prefix_caching=False)[0] for one in prompts]
    assert ids(place, prompts, max_num_batched_tokens=16, max_num_seqs=4) == alone
    # one after another, so that the later ones find what the first left
    assert ids(place, prompts, max_num_seqs=1, enable_prefix_caching=True) == alone


def test_the_prefix_cache_restores_the_state_of_a_new_noun(place: Path) -> None:
    shared = prompt(70, seed=3)
    llm = LLM(str(place / "NewModel"), port=place / "newmodel.py", dtype="float32", max_num_seqs=1)
    first, again = (llm.generate([{"prompt_token_ids": shared}], GREEDY, use_tqdm=False)[0] for _ in range(2))
    llm.close()
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert (again.num_cached_tokens or 0) > 0


def test_the_plan_says_that_an_operator_runs_by_its_reference(place: Path) -> None:
    found = declared(place)
    binding = next(one for one in found.plan().bindings if one.op == "running_mean")
    assert binding.impl == "ref"
    assert "only" in binding.reason or "ref" in binding.reason


def test_a_second_body_of_the_port_is_chosen_and_equals_its_reference(place: Path) -> None:
    faster = 'Impl("ref", f"{__name__}:running_mean"), Impl("eager", f"{__name__}:running_mean", rank=10)'
    found = declared(place, 'Impl("ref", f"{__name__}:running_mean")', faster)
    plan = found.plan(PrecisionPolicy(backbone="float32"))
    assert {one.impl for one in plan.bindings if one.op == "running_mean"} == {"eager"}
    assert verify(found, plan, VerifyOptions(reference="ref")).passed


def test_a_state_that_is_not_carried_shows_in_the_split(place: Path) -> None:
    found = declared(place, "            state.data[slot] = h_C\n", "            pass\n")
    proof = verify(found, found.plan(), VerifyOptions(reference="ref"))
    assert not proof.passed
    assert "mixer.split" in {check.module for check in proof.checks if not check.passed}


def test_a_port_over_a_built_in_one_is_told(place: Path, tiny: Tiny) -> None:
    assert declared(place).port.notices == ()
    notices = find_port("llama", port_file=place / "newmodel.py").notices
    assert len(notices) == 1
    assert "takes the place of the built-in port of llama" in notices[0]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"running_mean", "h <-', '"rms_norm", "h <-', "redefines the body 'ref' of operator rms_norm"),
        ('Impl("ref", f', 'Impl("eager", f', "register(table) fails: ValueError: operator running_mean has no ref"),
        (
            "    table.register(",
            "    while True:\n        pass\n    table.register(",
            "register(table) does not come to an end",
        ),
    ],
)
def test_a_bad_register_is_told(place: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, what: str) -> None:
    monkeypatch.setattr(registry, "deadline", lambda seconds: deadline(0.5))
    with pytest.raises(FirstlightError) as refused:
        declared(place, old, new)
    assert what in refused.value.what
    assert "newmodel.py" in f"{refused.value.where} {refused.value.why}"


def test_a_report_tells_what_is_new_and_counts_the_lines(place: Path) -> None:
    found = report(str(place / "NewModel"), place / "newmodel.py", reference="ref")
    assert found.operators == ("running_mean",)
    assert [part.part for part in found.parts if part.origin == "new"] == ["running mean"]
    assert found.status.complete
    # the reference runs the same declaration
    assert not found.passed
    text = (place / "newmodel.py").read_text()
    assert found.lines == count_lines(text)
    assert found.lines.total == text.count("\n")
    assert 0 < found.speed.floor_ms < found.speed.ms
    page = render(found)
    assert "running_mean" in page
    assert "http://" not in page
    assert "https://" not in page


def test_lines_of_code_leave_out_comments_blanks_and_docstrings() -> None:
    top = '"""A.\n\nB.\n"""\n\n# c\nx = (\n    1,  # guess: d\n)\n\n\n'
    found = count_lines(top + 'def f():\n    """G."""\n    # guess: e\n    return """h\n\n    i"""\n')
    assert (found.total, found.code, found.guesses) == (17, 7, 2)


def test_the_memory_of_a_new_noun_is_counted(place: Path) -> None:
    found = declared(place)
    decl = found.arch.layers[0].mixer.declare(CacheDtypes())
    assert decl.bytes_per_sequence == 24 * 4


def test_memory_that_forward_never_touches_is_told(place: Path) -> None:
    file = place / "newmodel.py"
    spare = 'PerSequence(name="spare", shape=(2,), dtype=dtypes.state, kind="recurrent")'
    file.write_text(file.read_text().replace("states=(state,)", f"states=(state, {spare})"))
    found = declare(str(place / "NewModel"), port_file=file)
    first = verify(found, found.plan(), VerifyOptions(reference="ref")).first_divergence
    assert first is not None
    assert (first.kind, first.place) == ("caches", "layers.0.mixer.spare")
    assert first.note == "declare() keeps the states 'spare', which forward never touches"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'ctx.cache.states["mean"]',
            'ctx.cache.states["average"]',
            "no 'average' is declared here; declare() keeps mean",
        ),
        ('ctx.cache.states["mean"]', 'ctx.cache.pages["keys"]', "no 'keys' is declared here; declare() keeps nothing"),
        (".chunk(3, dim=-1)", ".chunk(2, dim=-1)", "ValueError: not enough values to unpack"),
        ("ctx.ops.running_mean(", "ctx.ops.rms_norm(", "rms_norm"),
    ],
)
def test_a_forward_that_raises_is_told_with_its_line(place: Path, old: str, new: str, said: str) -> None:
    file = place / "newmodel.py"
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if old in text)
    found = declared(place, old, new)
    with pytest.raises(FirstlightError) as refused:
        verify(found, found.plan(), VerifyOptions(reference="ref"))
    assert said in refused.value.what
    assert refused.value.where == f"{file}:{line}"
