"""bench: both sides do the same work on the same prompts, differences are told, and the document is complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Run, run  # noqa: F401

from firstlight.bench.baseline import Baseline, Clock, upto
from firstlight.bench.latency import Load, latency, random_prompts
from firstlight.bench.prefix import Shared, prefix
from firstlight.bench.report import Row, document, result_path, save
from firstlight.bench.throughput import Stream, mixed_lengths, throughput
from firstlight.engine.llm import LLM
from firstlight.errors import FirstlightError

Tiny = Callable[[str], Path]
KEYS = {"command", "device", "commit", "versions", "threads", "rows"}


@pytest.fixture
def llm(tiny: Tiny) -> Any:
    """Return a tiny model in fp32."""
    made = LLM(str(tiny("llama")), dtype="float32", max_model_len=256)
    yield made
    made.close()


@pytest.fixture
def baseline(tiny: Tiny) -> Baseline:
    """Return the same in transformers."""
    return Baseline(tiny("llama"), "float32", "cpu")


def test_latency_compares_equal_work(llm: LLM, baseline: Baseline) -> None:
    rows = latency(llm, baseline, Load(case="tiny", input_len=9, output_len=5, batch_size=2, num_iters=2))
    assert [row.op for row in rows] == ["ttft", "tpot", "latency"]
    assert {row.case for row in rows} == {"tiny b2 in9 out5"}
    for row in rows:
        assert row.correct is True and row.more["differences"] == []
        assert row.ms > 0 and row.ratio is not None
        assert row.ratio == pytest.approx(row.baseline[baseline.name] / row.ms)
    ttft, tpot, whole = rows
    assert ttft.ms < whole.ms
    assert tpot.ms < whole.ms
    # both sides made 2 x 5 tokens
    assert whole.more["baseline_tokens_per_s"] == pytest.approx(10 / whole.baseline[baseline.name] * 1000, rel=0.5)


def test_throughput_counts_the_tokens_of_all_prompts(llm: LLM, baseline: Baseline) -> None:
    stream = Stream(case="tiny", num_prompts=4, input_len=40, output_len=3, num_iters=1)
    (row,) = throughput(llm, baseline, stream)
    assert (row.op, row.case, row.correct) == ("throughput", "tiny 4 x in16-40 out3", True)
    assert row.more["num_tokens"] == 12
    assert list(row.baseline) == [f"{baseline.name} one by one"]


def test_without_a_baseline_nothing_is_claimed_to_be_correct(llm: LLM) -> None:
    rows = latency(llm, None, Load(case="tiny", input_len=4, output_len=2, num_iters=1))
    assert all(row.correct is None and row.baseline == {} and row.ratio is None for row in rows)
    assert "ratio" not in rows[0].to_dict()


def test_lengths_are_spread_over_the_whole_range() -> None:
    stream = Stream(case="", num_prompts=32, input_len=256, output_len=1)
    lengths = mixed_lengths(stream, seed=1)
    assert (min(lengths), max(lengths), len(lengths)) == (16, 256, 32)
    assert len(set(lengths)) == 32
    assert lengths != sorted(lengths)
    assert mixed_lengths(stream, seed=1) == lengths
    assert mixed_lengths(Stream(case="", num_prompts=1, input_len=3, output_len=1), seed=0) == [3]


def test_prompts_depend_on_the_seed_alone(llm: LLM) -> None:
    one, same, other = (random_prompts([8, 3], llm, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert [len(ids) for ids in one] == [8, 3]


def test_a_wrong_token_is_told_with_its_place_and_a_tie_is_none(
    baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    theirs = [baseline.generate([ids], 4).ids[0] for ids in prompts]
    assert baseline.differences(prompts, theirs, theirs) == []
    wrong = [theirs[0], [*theirs[1][:2], theirs[1][2] + 1, 0]]
    (told,) = baseline.differences(prompts, wrong, theirs)
    assert told.startswith(f"prompt 1 token 2: [{theirs[1][2] + 1}] for [{theirs[1][2]}]")
    assert len(baseline.differences(prompts, [theirs[0], theirs[1][:1]], theirs)) == 1
    monkeypatch.setattr(baseline, "gap", lambda ids: 1e-7)
    assert baseline.differences(prompts, wrong, theirs) == []


def test_the_baseline_ends_where_a_text_ends(baseline: Baseline) -> None:
    whole = baseline.generate([[5, 6, 7]], 6).ids[0]
    end = whole[2]
    assert baseline.generate([[5, 6, 7]], 6, [end]).ids[0] == whole[: whole.index(end) + 1]
    assert upto([1, 2, 3, 2], [2]) == [1, 2]
    assert upto([1, 2], []) == [1, 2]


def test_the_clock_sees_the_prompt_and_every_token(baseline: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: list[Clock] = []

    def made() -> Clock:
        clocks.append(Clock())
        return clocks[-1]

    monkeypatch.setattr("firstlight.bench.baseline.Clock", made)
    found = baseline.generate([[5, 6, 7]], 4)
    assert len(clocks[0].times) == 1 + 4
    assert 0 < found.first_s < found.total_s


def test_a_shared_prefix_is_stored_once(tiny: Tiny) -> None:
    def build(cached: bool) -> LLM:
        return LLM(str(tiny("glm5_next")), dtype="float32", max_num_seqs=8, enable_prefix_caching=cached)

    (row,) = prefix(build, Shared(case="tiny", num_prompts=8, input_len=256, output_len=2))
    assert row.correct is True
    assert row.more["cached_tokens"] == 8 * 256
    roles, pages = 3, 256 // 64
    assert row.more["pages_apart"] % 8 == 0
    # the prefix once, and for each request the page that its tail begins
    assert row.more["pages"] <= roles * (pages + 8) < row.more["pages_apart"] + roles


def test_the_document_has_everything_that_makes_runs_comparable(tmp_path: Path) -> None:
    row = Row(op="tpot", case="m b1", ms=2.0, floor_ms=1.0, baseline={"other 1.0": 5.0}, correct=True, more={"x": 3})
    data = document("firstlight bench latency", [row], device="cpu")
    assert set(data) == KEYS
    assert data["rows"] == [
        {
            "op": "tpot",
            "case": "m b1",
            "ms": 2.0,
            "floor_ms": 1.0,
            "baseline": {"other 1.0": 5.0},
            "ratio": 2.5,
            "correct": True,
            "x": 3,
        }
    ]
    assert {"firstlight", "torch", "triton"} <= set(data["versions"])
    path = result_path(tmp_path, "cpu", "latency", "my model/float32")
    assert path == tmp_path / "latency-my_model_float32.json"
    save(data, path)
    assert json.loads(path.read_text()) == data
    assert result_path(None, "cuda:0", "a") == Path("benchmarks/results/gpu/a.json")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FirstlightError) as error:
        save({}, tmp_path / "file" / "x.json")
    assert str(tmp_path) in error.value.where


@pytest.mark.parametrize("what", ["latency", "throughput"])
def test_the_last_line_is_one_document_and_is_kept_if_asked(
    what: str,
    run: Run,  # noqa: F811
    tiny: Tiny,
    tmp_path: Path,
) -> None:
    words = ("bench", what, tiny("llama"), "--input-len", 20, "--output-len", 3, "--num-iters", 1, "--num-prompts", 3)
    result = run(*words, "--save-result", "--result-dir", tmp_path)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("model ")
    data = json.loads(lines[-1])
    assert set(data) == KEYS
    assert all(row["correct"] is True and row["ratio"] > 0 for row in data["rows"])
    assert any("torch threads" in line for line in lines)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == data
    alone = run(*words, "--json", "--baseline", "none")
    assert len(alone.out.splitlines()) == 1
    assert all(row["correct"] is None for row in alone.data()["rows"])


def test_the_scheduler_is_measured_without_weights(run: Run) -> None:  # noqa: F811
    result = run("bench", "scheduler", "kimi-linear-48b-a3b", "--num-prompts", 6, "--num-iters", 40, "--json")
    assert result.code == 0, result.err
    (row,) = result.data()["rows"]
    assert (row["op"], row["num_steps"], row["correct"]) == ("schedule_apply", 40, True)
    assert row["case"].endswith("6 decode rows")


def test_a_baseline_that_differs_fails_the_bench(
    run: Run,  # noqa: F811
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Baseline, "differences", lambda *given: ["prompt 0 token 3: [1] for [2], lead 0.5"])
    result = run("bench", "latency", tiny("llama"), "--input-len", 4, "--output-len", 2, "--num-iters", 1)
    assert result.code == 1
    assert any(line.endswith("  NO") for line in result.out.splitlines())
    assert "first difference: prompt 0 token 3" in result.out


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        (("latencyy",), ("'latencyy'", "did you mean latency?")),
        (("latency", "demo", "--baseline", "vllm"), ("--baseline", "transformers")),
        (("latency", "demo", "--num-iters", "0"), ("--num-iters 0",)),
        (("throughput", "demo", "--num-prompts", "-1"), ("--num-prompts -1",)),
        (("latency", "demo", "--input-len", "4096"), ("the prompt has 4096 tokens",)),
        (("latency", "kimi-linear-48b-a3b"), ("weights",)),
    ],
)
def test_bad_words_are_refused_in_four_lines(
    run: Run,  # noqa: F811
    words: tuple[str, ...],
    culprits: tuple[str, ...],
) -> None:
    result = run("bench", *words)
    assert result.code == 2
    told = result.refusal()
    assert all(culprit in told for culprit in culprits)
