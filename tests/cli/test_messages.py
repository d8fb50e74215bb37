"""What messages say: the culprit as the user knows it, what helps, and nothing that fills a line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Broken, Run

Tiny = Callable[[str], Path]
ROOT = Path(__file__).parents[2]
QUICK = ("--reference", "ref", "--tokens", "6")


def refused(run: Run, *words: object) -> str:
    """Return the refusal of a command that must be the user's own fault."""
    result = run(*words)
    assert result.code == 2, (result.out, result.err)
    text = result.refusal()
    assert "internal error" not in text
    return text


@pytest.mark.parametrize("verb", ["verify", "generate", "day0"])
def test_what_the_plan_refuses_is_said_on_stderr(run: Run, tiny: Tiny, tmp_path: Path, verb: str) -> None:
    words: dict[str, tuple[object, ...]] = {
        "verify": (*QUICK, "--layers", 0),
        "generate": ("--prompt-ids", "1", "--max-tokens", 1),
        "day0": (*QUICK, "--max-tokens", 1, "--output", tmp_path / "page.html"),
    }
    asked = ("--graph-mode", "--enable-expert-parallel")
    result = run(verb, tiny("llama"), *words[verb], *asked)
    assert result.code == 0, result.err
    notices = [line for line in result.err.splitlines() if line.startswith("notice: ")]
    assert [line.split()[1] for line in notices] == ["EP", "graph_mode"]
    assert all("refused: " in line and "not available yet" in line for line in notices)


@pytest.mark.parametrize("verb", ["verify", "day0", "generate"])
@pytest.mark.parametrize("seed", ["-1", "99999999999999999999999"])
def test_a_seed_that_no_generator_takes_is_refused_by_its_flag(run: Run, tiny: Tiny, verb: str, seed: str) -> None:
    words = ("--prompt-ids", "1") if verb == "generate" else QUICK
    assert "error: --seed must be an integer" in refused(run, verb, tiny("llama"), *words, "--seed", seed)


def test_day0_refuses_a_length_before_the_proof(run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.verify.day0.run_day0", lambda *a, **k: pytest.fail("the work was begun"))
    assert "error: --max-tokens must be" in refused(run, "day0", tiny("llama"), *QUICK, "--max-tokens", 0)


@pytest.mark.parametrize("ids", ["1,,2", ",1", "1,", "1 , , 2"])
def test_token_ids_with_a_gap_are_refused(run: Run, tiny: Tiny, ids: str) -> None:
    assert "--prompt-ids" in refused(run, "generate", tiny("llama"), "--prompt-ids", ids)


def test_axes_with_a_gap_are_refused(run: Run, tiny: Tiny) -> None:
    assert "unknown parallel axis ''" in refused(run, "plan", tiny("llama"), "--parallel", "TP++EP")


def test_a_line_is_left_out_rather_than_filled(run: Run, broken: Broken) -> None:
    text = refused(run, "plan", broken(hidden_size=[64]))
    assert "hidden_size must be int" in text
    assert "it cannot be used" not in text
    assert "--help" not in text


def test_config_without_model_type_is_told_which_there_are(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    text = refused(run, "plan", tmp_path)
    assert "deepseek_v32" in text
    assert "--port FILE.py" in text


def test_prompt_beyond_the_own_maximum_of_a_model_is_to_be_shortened(run: Run, broken: Broken) -> None:
    folder = broken(max_position_embeddings=8)
    text = refused(run, "generate", folder, "--prompt-ids", " ".join(["7"] * 9))
    assert "try   shorten the prompt" in text.splitlines()[-1]
    assert "raise" not in text


def test_only_a_key_of_nearly_that_name_is_suggested(run: Run, broken: Broken) -> None:
    text = refused(run, "plan", broken("qwen3_moe", num_hidden_layers=None, mlp_only_layers=[], num_hiden_layers=4))
    assert "did you mean num_hiden_layers?" in text


def test_an_unlike_key_is_not_suggested(run: Run, broken: Broken) -> None:
    text = refused(run, "plan", broken("qwen3_moe", num_hidden_layers=None, mlp_only_layers=[]))
    assert "mlp_only_layers" not in text


def test_broken_plan_is_to_be_written_again(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    text = refused(run, "plan", tiny("llama"), "--plan", path)
    assert "download" not in text
    assert "firstlight plan MODEL --json > plan.json" in text


@pytest.mark.parametrize("device", ["cuda:99", "npu", 0, ["cpu"]])
def test_plan_for_a_device_that_is_not_here(run: Run, tiny: Tiny, tmp_path: Path, device: Any) -> None:
    path, made = tmp_path / "plan.json", run("plan", tiny("llama"), "--json").data()
    path.write_text(json.dumps({**made, "device": device}))
    words = ("generate", tiny("llama"), "--prompt-ids", "1", "--plan", path)
    text = refused(run, *words)
    assert f"the plan is for device {device!r}" in text
    assert "this machine has cpu" in text


@pytest.mark.parametrize("field", ["layer", "stage", "op", "impl"])
@pytest.mark.parametrize("value", [["a"], {"a": 1}])
def test_plan_with_a_list_in_the_place_of_a_name(
    run: Run, tiny: Tiny, tmp_path: Path, field: str, value: object
) -> None:
    path, made = tmp_path / "plan.json", run("plan", tiny("llama"), "--json").data()
    made["bindings"][0][field] = value
    path.write_text(json.dumps(made))
    assert "not a plan" in refused(run, "plan", tiny("llama"), "--plan", path)


def test_folder_in_the_place_of_the_weights(run: Run, broken: Broken) -> None:
    path = broken() / "model.safetensors"
    path.unlink()
    path.mkdir()
    text = refused(run, "verify", path.parent, *QUICK)
    assert "model.safetensors is a folder" in text
    assert "link" not in text


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "1" * 5000 + "}"])
def test_config_that_no_parser_takes(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "not valid JSON" in refused(run, "plan", tmp_path)


def test_lone_config_is_named_by_its_file(run: Run, broken: Broken) -> None:
    folder = broken()
    lone = (folder / "config.json").rename(folder / "new-model.json")
    assert run("inspect", lone, "--json").data()["model"] == "new-model"


@pytest.mark.parametrize("words", ["inspect demo", "ops", "--version", "plan demo --json"])
def test_closed_stdout_is_told(words: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m firstlight {words} >&-', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "where standard output" in done.stderr
    assert "internal error" not in done.stderr


def test_closed_stderr_does_not_reach_stdout() -> None:
    command = ["sh", "-c", 'exec "$0" -m firstlight plan no-such-model 2>&-', sys.executable]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
