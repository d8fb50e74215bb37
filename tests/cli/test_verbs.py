"""What each verb prints and returns, on tiny models."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from cli.conftest import Broken, Run

Tiny = Callable[[str], Path]
ROOT = Path(__file__).parents[2]

WRONG_EPS = """
from dataclasses import replace
from firstlight.models import llama
NAMES = llama.NAMES
def arch(cfg):
    spec = llama.arch(cfg)
    layers = list(spec.layers)
    layers[2] = replace(layers[2], norm=replace(layers[2].norm, eps=0.05))
    return replace(spec, layers=tuple(layers))
"""


@pytest.fixture
def wrong_port(tmp_path: Path) -> Path:
    """Return a port of llama with a wrong norm epsilon in layer 2."""
    path = tmp_path / "wrong_port.py"
    path.write_text(WRONG_EPS)
    return path


@pytest.mark.parametrize("verb", ["inspect", "plan", "verify", "day0"])
def test_default_model_is_the_demo_and_line_one_says_so(run: Run, tmp_path: Path, verb: str) -> None:
    fast = {"verify": ["--layers", 0, "--tokens", 8, "--reference", "ref"]}
    fast["day0"] = ["--reference", "ref", "--tokens", 8, "--max-tokens", 4, "--output", tmp_path / "page.html"]
    result = run(verb, *fast.get(verb, []))
    assert result.code == 0, result.err
    assert result.out.splitlines()[0].split()[:2] == ["model", "demo"]


def test_inspect_tells_parameters_of_a_card(run: Run) -> None:
    result = run("inspect", "kimi-linear-48b-a3b")
    assert result.code == 0
    assert "49.1B (49,122,681,728)" in result.out
    assert "KDA + MoE(256, top 8)" in result.out
    assert "0 new" in result.out


def test_inspect_json_is_one_document_with_the_numbers_of_the_screen(run: Run) -> None:
    result = run("inspect", "kimi-linear-48b-a3b", "--json")
    data = result.data()
    assert data["cost"]["4096"]["total"]["parameters"] == 49_122_681_728
    assert data["cost"]["131072"]["total"]["flops_per_token"] > data["cost"]["4096"]["total"]["flops_per_token"]
    assert sum(len(group["layers"]) for group in data["layers"]) == len(data["arch"]["layers"])


def test_inspect_of_an_unknown_model_shows_evidence_and_exits_3(run: Run, tmp_path: Path) -> None:
    config = {"model_type": "newmodel", "kv_lora_rank": 64, "qk_rope_head_dim": 16, "warp_factor": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("inspect", tmp_path)
    assert result.code == 3
    assert "newmodel" in result.refusal()
    assert "nearest: " in result.out
    assert "warp_factor" in result.out
    as_json = run("inspect", tmp_path / "config.json", "--json")
    assert as_json.code == 3
    assert any("warp_factor" in text for text in as_json.data()["evidence"]["unrecognised"])


def test_plan_json_is_accepted_again_and_an_edit_changes_the_body(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    path, folder = tmp_path / "plan.json", tiny("llama")
    data = run("plan", folder, "--json").data()
    for binding in data["bindings"]:
        if binding["op"] == "rms_norm" and binding["layer"] == 1:
            binding["impl"] = "ref"
    path.write_text(json.dumps(data))
    again = run("plan", folder, "--plan", path, "--json")
    assert again.code == 0
    assert again.data() == data
    shown = run("plan", folder, "--plan", path).out
    assert "ref: rms_norm" in shown


def test_verify_runs_the_bodies_of_an_edited_plan(
    run: Run, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import firstlight.ops.norm.ref as module

    path, folder = tmp_path / "plan.json", tiny("llama")
    data = run("plan", folder, "--json").data()
    for binding in data["bindings"]:
        binding["impl"] = "ref" if (binding["op"], binding["layer"]) == ("rms_norm", 1) else binding["impl"]
    path.write_text(json.dumps(data))
    right = module.rms_norm
    monkeypatch.setattr(module, "rms_norm", lambda *args, **kwargs: 1.01 * right(*args, **kwargs))
    found = run("verify", folder, "--plan", path, "--tokens", 9, "--json")
    assert found.code == 1
    assert {
        check["layer"] for check in found.data()["checks"] if check["kind"] == "module" and not check["passed"]
    } == {1}


def test_plan_explain_names_rejected_bodies_with_reasons(run: Run, tiny: Tiny) -> None:
    plain, explained = run("plan", tiny("llama")), run("plan", tiny("llama"), "--explain")
    assert "ranked below" not in plain.out
    assert "ref: valid, ranked below eager" in explained.out
    assert "weights " in explained.out


def test_plan_records_axes_it_does_without(run: Run, tiny: Tiny) -> None:
    result = run("plan", tiny("qwen3_moe"), "--parallel", "TP+PP", "--enable-expert-parallel", "--graph-mode")
    assert result.code == 0
    refused = [line.split()[1] for line in result.out.splitlines() if line.startswith("refused")]
    assert refused == ["TP:", "PP:", "EP:", "graph_mode:"]


@pytest.mark.parametrize(
    "flag",
    [
        "-tp",
        "--tp-size",
        "--tensor-parallel-size",
        "-dp",
        "--pipeline-parallel-size",
        "--prefill-context-parallel-size",
    ],
)
def test_plan_refuses_a_size_that_cannot_run(run: Run, tiny: Tiny, flag: str) -> None:
    result = run("plan", tiny("llama"), flag, 2)
    assert result.code == 2
    assert "not available yet" in result.refusal()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("mla=ref", {(i, s): "ref" for i in range(4) for s in ("prefill", "decode")}),
        ("2:mla=ref", {(2, "prefill"): "ref", (2, "decode"): "ref"}),
        ("decode:mla=eager", {(i, "decode"): "eager" for i in range(4)}),
        ("3:decode:mla=eager", {(3, "decode"): "eager"}),
    ],
)
def test_op_binds_where_it_says(run: Run, tiny: Tiny, asked: str, expected: dict[tuple[int, str], str]) -> None:
    def bodies(*words: str) -> dict[tuple[int, str], str]:
        bindings = run("plan", tiny("deepseek_v3"), "--json", *words).data()["bindings"]
        return {(b["layer"], b["stage"]): b["impl"] for b in bindings if b["op"] == "mla"}

    usual, found = bodies(), bodies("--op", asked)
    assert {place: impl for place, impl in found.items() if usual[place] != impl} == expected


@pytest.mark.parametrize(
    "asked", ["mla", "mla=", "x:y:mla=ref", "mla=fastest", "warp=ref", "9:mla=ref", "late:mla=ref"]
)
def test_op_that_nobody_has_is_refused(run: Run, tiny: Tiny, asked: str) -> None:
    result = run("plan", tiny("deepseek_v3"), "--op", asked)
    assert result.code == 2
    assert result.refusal()


@pytest.mark.parametrize("flag", ["--dtype", "--kv-cache-dtype", "--index-dtype", "--state-dtype"])
def test_unavailable_format_is_refused_by_its_flag(run: Run, tiny: Tiny, flag: str) -> None:
    result = run("plan", tiny("llama"), flag, "mxfp8")
    assert result.code == 2
    assert f"{flag} mxfp8" in result.refusal()


@pytest.mark.parametrize("reference", ["transformers", "ref"])
def test_verify_passes_on_an_intact_model(run: Run, tiny: Tiny, reference: str) -> None:
    result = run("verify", tiny("llama"), "--reference", reference, "--tokens", 20)
    assert result.code == 0, result.err
    assert "equal to" in result.out.splitlines()[-1]
    assert "FAIL" not in result.out


def test_verify_names_the_first_divergence_and_a_command_that_repeats_it(
    run: Run, tiny: Tiny, wrong_port: Path, tmp_path: Path
) -> None:
    page, data = tmp_path / "verify.html", tmp_path / "verify.json"
    result = run("verify", tiny("llama"), "--port", wrong_port, "--tokens", 20, "--html", page, "--output", data)
    assert result.code == 1
    assert "first divergence  layers.2.mixer_norm" in result.out
    repro = next(line.split(maxsplit=1)[1] for line in result.out.splitlines() if line.strip().startswith("repro"))
    assert f"--layers 2 --tokens 20 --reference transformers --port {wrong_port}" in repro
    again = run(*shlex.split(repro)[1:], "--json")
    assert again.code == 1
    assert again.data()["first_divergence"]["place"] == "layers.2.mixer_norm"
    assert json.loads(data.read_text())["repro"] == repro
    hint = again.data()["first_divergence"]["hint"]
    assert hint == "equal with norm.eps = 1e-06, rms_norm_eps of config.json (the port says 0.05)"
    assert f"hint     {hint}" in result.out
    assert "layers.2.mixer_norm" in page.read_text()
    assert hint in unescape(page.read_text())


def test_verify_lists_every_failed_check(run: Run, tiny: Tiny) -> None:
    found = run("verify", tiny("llama"), "--reference", "ref", "--tokens", 20, "--tol", "1e-12", "--json")
    failed = sum(not check["passed"] for check in found.data()["checks"])
    shown = run("verify", tiny("llama"), "--reference", "ref", "--tokens", 20, "--tol", "1e-12")
    assert (found.code, shown.code) == (1, 1)
    assert sum(" FAIL" in line for line in shown.out.splitlines()) == failed > 1


@pytest.mark.parametrize(("text", "layers"), [("0-1", [0, 1]), ("3", [3]), ("1,2", [1, 2])])
def test_layers_choose_what_is_compared(run: Run, tiny: Tiny, text: str, layers: list[int]) -> None:
    found = run("verify", tiny("llama"), "--reference", "ref", "--tokens", 6, "--layers", text, "--json")
    assert found.data()["layers"] == layers


@pytest.mark.parametrize("text", ["3-1", "0,2", "first", "", "-1", "9"])
def test_layers_that_are_no_range_are_refused(run: Run, tiny: Tiny, text: str) -> None:
    result = run("verify", tiny("llama"), "--reference", "ref", f"--layers={text}")
    assert result.code == 2
    assert result.refusal()


@pytest.mark.parametrize("reference", ["transformers", "ref"])
def test_until_stops_both_sides_after_a_layer(run: Run, tiny: Tiny, reference: str) -> None:
    words = ("verify", tiny("llama"), "--reference", reference, "--tokens", 6)
    found = run(*words, "--until", 1, "--json")
    assert found.code == 0
    assert found.data()["layers"] == [0, 1]
    assert {check["layer"] for check in found.data()["checks"]} <= {0, 1, None}
    assert "logits" not in {check["kind"] for check in found.data()["checks"]}


@pytest.mark.parametrize("words", [("--until", 1, "--layers", 0), ("--until", 9), ("--until", -1)])
def test_an_until_that_cannot_be_is_refused(run: Run, tiny: Tiny, words: tuple[object, ...]) -> None:
    result = run("verify", tiny("llama"), "--reference", "ref", *words)
    assert result.code == 2
    assert result.refusal()


def test_what_does_not_fit_is_strict_json(run: Run, broken: Broken) -> None:
    folder = broken("llama", num_hidden_layers=3)
    found = run("verify", folder, "--tokens", 6, "--json")
    assert found.code == 1
    checks = [check for check in found.data()["checks"] if check["kind"] == "weights"]
    assert {check["layer"] for check in checks} == {3}
    assert {check["error"] for check in checks} == {"inf"}


def test_verify_says_that_dtype_has_no_effect(run: Run, tiny: Tiny) -> None:
    words = ("verify", tiny("llama"), "--reference", "ref", "--tokens", 6, "--layers", 0, "--dtype", "bfloat16")
    assert "--dtype bfloat16 has no effect" in run(*words).err
    assert run(*words, "--quiet").err == ""


def test_generate_streams_the_same_text_that_json_holds(run: Run) -> None:
    words = ("generate", "-p", "At first light", "--temperature", 0, "--max-tokens", 6)
    streamed, told = run(*words), run(*words, "--json")
    assert (streamed.code, told.code) == (0, 0)
    assert streamed.out == told.data()["text"] + "\n"
    assert len(told.data()["ids"]) <= 6
    assert "tokens/s" in streamed.err
    assert "tokens/s" in told.err


def test_generate_repeats_itself_with_a_seed_and_not_with_another(run: Run, tiny: Tiny) -> None:
    words = ("generate", tiny("llama"), "--prompt-ids", "5,6 7", "--max-tokens", 12, "--json")
    one, same, other = (run(*words, "--seed", seed).data() for seed in (1, 1, 2))
    assert one["prompt_ids"] == [5, 6, 7]
    assert one["ids"] == same["ids"] != other["ids"]
    assert one["text"] is None


def test_generate_applies_the_chat_template(run: Run) -> None:
    words = ("generate", "-p", "hello", "--max-tokens", 1, "--json")
    plain, chat = run(*words).data(), run(*words, "--chat").data()
    assert plain["prompt"] == "hello"
    assert "hello" in chat["prompt"] != "hello"
    assert len(chat["prompt_ids"]) > len(plain["prompt_ids"])


def test_generate_stops_at_the_maximum_length(run: Run, tiny: Tiny) -> None:
    words = ("generate", tiny("llama"), "--prompt-ids", "5 6 7", "--max-model-len", 8, "--json", "--seed", 1)
    assert len(run(*words).data()["ids"]) == 5


def test_generate_runs_several_prompts_at_once_and_tells_each(run: Run) -> None:
    words = ("generate", "-p", "At first light", "-p", "hello", "--temperature", 0, "--max-tokens", 5)
    together = run(*words, "--json").data()
    alone = [run("generate", "-p", one["prompt"], *words[5:], "--json").data() for one in together]
    assert [one["prompt"] for one in together] == ["At first light", "hello"]
    assert [one["ids"] for one in together] == [one["ids"] for one in alone]
    shown = run(*words)
    assert shown.out == "".join(f"[{i}] {one['prompt']}\n{one['text']}\n" for i, one in enumerate(together, start=1))
    assert "2 texts, " in shown.err


def test_generate_numbers_the_continuations_of_a_prompt(run: Run, tiny: Tiny) -> None:
    words = ("generate", tiny("llama"), "--prompt-ids", "5 6", "--max-tokens", 4, "--n", 2)
    told = run(*words, "--json").data()
    assert [one["index"] for one in told] == [0, 1]
    assert told[0]["ids"] != told[1]["ids"]
    assert [line for line in run(*words).out.splitlines() if line.startswith("[")] == ["[1.1] 5 6", "[1.2] 5 6"]


def test_generate_tells_logprobs_in_json_alone(run: Run, tiny: Tiny) -> None:
    words = ("generate", tiny("llama"), "--prompt-ids", "5 6", "--max-tokens", 3, "--temperature", 0, "--logprobs", 2)
    told = run(*words, "--json")
    entries = told.data()["logprobs"]
    assert [len(entry) for entry in entries] == [2, 2, 2]
    assert all(entry[str(token)]["rank"] == 1 for token, entry in zip(told.data()["ids"], entries, strict=True))
    assert "no effect" not in told.err
    assert "--logprobs has no effect without --json" in run(*words).err


def test_generate_ends_at_a_stop_text_and_not_at_an_ignored_end(run: Run, tiny: Tiny) -> None:
    words = ("generate", "-p", "At first light", "--temperature", 0, "--max-tokens", 8, "--ignore-eos", "--json")
    whole = run(*words).data()
    assert (len(whole["ids"]), whole["finish_reason"]) == (8, "length")
    stop = whole["text"][3:6]
    stopped = run(*words, "--stop", "never there", "--stop", stop).data()
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)


def test_generate_with_min_p_1_takes_the_likeliest(run: Run, tiny: Tiny) -> None:
    words = ("generate", tiny("llama"), "--prompt-ids", "5 6", "--max-tokens", 6, "--json")
    assert run(*words, "--min-p", 1).data()["ids"] == run(*words, "--temperature", 0).data()["ids"]


@pytest.mark.parametrize(("flag", "cached"), [("--enable-prefix-caching", 64), ("--no-enable-prefix-caching", 0)])
def test_generate_shares_prefixes_unless_told_not_to(run: Run, tiny: Tiny, flag: str, cached: int) -> None:
    ids = " ".join(["7"] * 70)
    words = ("--prompt-ids", ids, "--prompt-ids", ids, "--max-tokens", 2, "--max-num-seqs", 1, flag, "--json")
    told = run("generate", tiny("llama"), *words).data()
    assert [one["num_cached_tokens"] for one in told] == [0, cached]


def test_generate_tells_a_failed_request_with_its_cause(run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise ArithmeticError("operator broke")

    monkeypatch.setattr("firstlight.engine.runner.Runner.execute", broken)
    result = run("generate", tiny("llama"), "--prompt-ids", "5 6")
    assert result.code == 1
    assert "ArithmeticError: operator broke" in result.refusal()


def test_ops_lists_bodies_and_why_one_cannot_run(run: Run) -> None:
    result = run("ops")
    assert result.code == 0
    assert "not in prefill" in next(line for line in result.out.splitlines() if "absorbed" in line)
    one = run("ops", "rope", "--json").data()
    assert {body["op"] for body in one} == {"rope"}
    assert {"ref", "eager"} <= {body["impl"] for body in one}
    assert all(body["usable"] for body in one)


def test_ops_of_an_unknown_name_tells_the_nearest(run: Run) -> None:
    result = run("ops", "roppe")
    assert result.code == 2
    assert "did you mean rope?" in result.refusal()


@pytest.mark.parametrize("verb", ["env", "collect-env"])
def test_env_tells_versions_and_warns_of_variables_without_effect(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    import torch

    monkeypatch.setenv("FIRSTLIGHT_TURBO", "1")
    result = run(verb, "--json")
    assert result.data()["packages"]["torch"] == torch.__version__
    assert any("FIRSTLIGHT_TURBO" in warning for warning in result.data()["warnings"])
    assert "FIRSTLIGHT_TURBO" in result.err


def test_day0_writes_a_page_and_names_it_last(
    run: Run, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("day0", tiny("llama"), "--tokens", 12, "--max-tokens", 4)
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == "report firstlight-day0-llama.html"
    assert "transformers is installed and knows llama" in result.out
    assert "mission's checklist" in (tmp_path / "firstlight-day0-llama.html").read_text()


def test_day0_reports_a_failed_proof_and_exits_1(run: Run, tiny: Tiny, tmp_path: Path, wrong_port: Path) -> None:
    page = tmp_path / "page.html"
    words = ("day0", tiny("llama"), "--port", wrong_port, "--tokens", 12, "--max-tokens", 4, "--output", page)
    result = run(*words, "--json")
    assert result.code == 1
    assert result.data()["report"] == str(page)
    assert result.data()["steps"][-1]["status"] == "not yet"
    assert "differs from its reference" in page.read_text()


def test_interruption_exits_130_without_a_stack_trace(run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("firstlight.verify.run.Verification.run", interrupted)
    result = run("verify", tiny("llama"), "--reference", "ref", "--quiet")
    assert (result.code, result.err) == (130, "interrupted\n")


def test_unexpected_exception_is_told_as_a_bug(run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr("firstlight.verify.run.Verification.run", fails)
    words = ("verify", tiny("llama"), "--reference", "ref", "--quiet")
    result = run(*words)
    assert result.code == 2
    assert "internal error: RuntimeError: out of ideas" in result.refusal()
    assert "in fails" in result.refusal()
    assert "Traceback" in run(*words, "--debug").err


def test_debug_shows_where_a_refusal_comes_from(run: Run) -> None:
    assert "Traceback" in run("ops", "roppe", "--debug").err


def test_stdout_that_takes_no_more_is_told() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "firstlight", "ops", "rope"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "standard output" in done.stderr
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_reader_that_leaves_is_no_error_to_tell() -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "firstlight", "ops"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(write)
    # what a shell says of a program that SIGPIPE has ended
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_appear_on_a_terminal_only(run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    words = ("verify", tiny("llama"), "--reference", "ref", "--tokens", 6, "--layers", 0)
    assert ("against ref" in run(*words).err) == terminal
    assert "against ref" not in run(*words, "--quiet").err


def test_config_alone_is_enough_to_plan(run: Run, broken: Broken) -> None:
    config = broken() / "config.json"
    (config.parent / "model.safetensors").unlink()
    assert run("plan", config).code == 0
    assert run("verify", config).code == 2
