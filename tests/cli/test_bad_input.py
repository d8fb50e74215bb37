"""What bad input gets: an exit code, four lines that name the culprit, no stack trace."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Broken, Run
from safetensors.torch import load_file, save_file

Tiny = Callable[[str], Path]
QUICK = ("--reference", "ref", "--tokens", "6")


def resaved(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Rewrite the weights of a folder."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def sharded(folder: Path) -> dict[str, str]:
    """Split the weights of a folder over two shards with an index; return its weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = dict(list(tensors.items())[number - 1 :: 2])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """Write the index of shards."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refused(run: Run, *words: object, culprits: tuple[str, ...], code: int = 2) -> str:
    """Return the refusal of a command, after checking its code and that it names the culprits."""
    result = run(*words)
    assert result.code == code, (result.out, result.err)
    assert result.out == "" or result.out.startswith("model ")
    text = result.refusal()
    assert "internal error" not in text
    for culprit in culprits:
        assert culprit in text
    return text


@pytest.mark.parametrize("verb", ["inspect", "plan", "verify", "generate", "day0"])
def test_folder_without_config(run: Run, tmp_path: Path, verb: str) -> None:
    refused(run, verb, tmp_path, culprits=("config.json", str(tmp_path)))


@pytest.mark.parametrize("text", ['{"model_type": ', "[1, 2]", "\x00"])
def test_broken_config(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(run, "plan", tmp_path, culprits=("config.json",))


def test_config_without_model_type(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(run, "plan", tmp_path, culprits=("model_type",))


def test_unknown_keys_are_listed_with_the_nearest_known_key(run: Run, broken: Broken) -> None:
    folder = broken(hidden_sise=64, warp_factor=9)
    text = refused(run, "verify", folder, culprits=("hidden_sise (nearest known: hidden_size)", "warp_factor"))
    assert "--allow-unknown-keys" in text


def test_unknown_keys_that_were_let_pass_are_in_every_report(run: Run, broken: Broken, tmp_path: Path) -> None:
    folder, page = broken(warp_factor=9), tmp_path / "page.html"
    allowed = (folder, "--allow-unknown-keys")
    assert run("verify", *allowed, *QUICK, "--json").data()["unknown_keys"] == ["warp_factor"]
    assert run("plan", *allowed, "--json").data()["unknown_keys"] == ["warp_factor"]
    assert run("inspect", *allowed, "--json").data()["unknown_keys"] == ["warp_factor"]
    result = run("day0", *allowed, *QUICK, "--max-tokens", 2, "--output", page)
    assert result.code == 0, result.err
    assert "were let pass unread: warp_factor" in result.out
    assert "warp_factor" in page.read_text()


def test_missing_shard(run: Run, broken: Broken) -> None:
    folder = broken()
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(run, "verify", folder, *QUICK, culprits=("model-00002-of-00002.safetensors",))


def test_shards_that_are_all_there_work(run: Run, broken: Broken) -> None:
    folder = broken()
    sharded(folder)
    assert run("verify", folder, *QUICK).code == 0


@pytest.mark.parametrize("keep", [0, 4, 100, -5])
def test_truncated_weights(run: Run, broken: Broken, keep: int) -> None:
    path = broken() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(run, "verify", path.parent, *QUICK, culprits=("model.safetensors",))


def test_index_naming_an_absent_tensor(run: Run, broken: Broken) -> None:
    folder = broken()
    weight_map = sharded(folder)
    write_index(folder, {**weight_map, "model.ghost.weight": "model-00001-of-00002.safetensors"})
    refused(run, "verify", folder, *QUICK, culprits=("model.ghost.weight",))


def test_wrong_shapes(run: Run, broken: Broken) -> None:
    folder = broken()
    name = "model.layers.1.mlp.down_proj.weight"
    resaved(folder, lambda tensors: {**tensors, name: tensors[name][:, :-1].contiguous()})
    text = refused(run, "verify", folder, *QUICK, culprits=(name,))
    assert "[64, 127]" in text
    assert "[64, 128]" in text


@pytest.mark.parametrize("verb", ["verify", "generate"])
def test_missing_and_unexpected_tensors(run: Run, broken: Broken, verb: str) -> None:
    folder = broken()
    old, new = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.query.weight"
    resaved(folder, lambda tensors: {new if name == old else name: tensor for name, tensor in tensors.items()})
    words = QUICK if verb == "verify" else ("--prompt-ids", "1")
    refused(run, verb, folder, *words, culprits=(old, new))


def test_weights_in_an_unsupported_dtype(run: Run, broken: Broken) -> None:
    folder = broken()
    name = "model.norm.weight"
    resaved(folder, lambda tensors: {**tensors, name: tensors[name].to(torch.float8_e4m3fn)})
    refused(run, "verify", folder, *QUICK, culprits=(name, "F8_E4M3"))


@pytest.mark.parametrize("verb", ["inspect", "plan", "generate"])
def test_config_with_an_unsupported_dtype(run: Run, broken: Broken, verb: str) -> None:
    words = ("--prompt-ids", "1") if verb == "generate" else ()
    refused(run, verb, broken(dtype="float8_e5m2"), *words, culprits=("float8_e5m2",))


@pytest.mark.parametrize("verb", ["inspect", "plan", "verify", "generate", "day0"])
def test_unknown_model_type_exits_3(run: Run, broken: Broken, verb: str) -> None:
    folder = broken(model_type="llama9")
    result = run(verb, folder)
    assert result.code == 3
    text = result.refusal()
    assert "'llama9'" in text
    assert "nearest in name: llama" in text


@pytest.mark.parametrize(
    ("name", "changes", "culprits"),
    [
        (
            "llama",
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            ("num_attention_heads=4", "num_key_value_heads=3"),
        ),
        ("llama", {"num_key_value_heads": 0}, ("num_key_value_heads",)),
        ("llama", {"hidden_size": -64}, ("hidden_size",)),
        ("llama", {"hidden_size": "64"}, ("hidden_size", "'64'")),
        ("llama", {"num_hidden_layers": None}, ("num_hidden_layers",)),
        ("deepseek_v3", {"n_group": 3}, ("n_group=3",)),
    ],
)
def test_sizes_that_contradict(
    run: Run, broken: Broken, name: str, changes: dict[str, Any], culprits: tuple[str, ...]
) -> None:
    refused(run, "plan", broken(name, **changes), culprits=culprits)


def test_index_topk_larger_than_the_context_works(run: Run, broken: Broken) -> None:
    folder = broken("deepseek_v32", index_topk=8192)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] < 8192
    result = run("verify", folder, "--tokens", 20, "--layers", "0-1", "--reference", "transformers")
    assert result.code == 0, result.out + result.err
    assert run("generate", folder, "--prompt-ids", "1 2 3", "--max-tokens", 2).code == 0


@pytest.mark.parametrize("verb", ["inspect", "plan", "verify", "day0"])
def test_quantised_checkpoint_is_named(run: Run, broken: Broken, verb: str) -> None:
    folder = broken(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    refused(run, verb, folder, culprits=("fp8", "quantization_config"))


@pytest.mark.parametrize("words", [("-p", ""), ("--prompt-ids", ""), ("--chat", "-p", "")])
def test_empty_prompt(run: Run, words: tuple[str, ...]) -> None:
    refused(run, "generate", "demo", *words, culprits=("prompt is empty",))


@pytest.mark.parametrize("words", [(), ("-p", "a", "--prompt-ids", "1"), ("--chat", "--prompt-ids", "1")])
def test_no_prompt_or_two(run: Run, words: tuple[str, ...]) -> None:
    refused(run, "generate", "demo", *words, culprits=("--prompt",))


def test_prompt_longer_than_the_maximum(run: Run, tiny: Tiny) -> None:
    ids = " ".join(["7"] * 8)
    words = ("generate", tiny("llama"), "--prompt-ids", ids, "--max-model-len", 8)
    refused(run, *words, culprits=("the prompt has 8 tokens", "--max-model-len"))


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        (("--prompt-ids", "1", "--max-tokens", "8"), ("--max-tokens", "9 tokens", "maximum is 8", "--max-tokens=7")),
        (("--prompt-ids", "1", "--prompt-ids", "999"), ("token id 999",)),
    ],
)
def test_what_cannot_run_is_refused_before_weights_are_read(
    run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], culprits: tuple[str, ...]
) -> None:
    monkeypatch.setattr("firstlight.engine.llm.build_engine", lambda *a, **k: pytest.fail("weights were read"))
    refused(run, "generate", tiny("llama"), *words, "--max-model-len", 8, culprits=culprits)


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--max-num-batched-tokens", "2"), "--max-num-batched-tokens"),
        (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization"),
    ],
)
def test_engine_limits_out_of_range(run: Run, words: tuple[str, ...], culprit: str) -> None:
    refused(run, "generate", "demo", "-p", "a", *words, culprits=(culprit,))


@pytest.mark.parametrize("length", [0, 4097])
def test_maximum_length_beyond_that_of_the_model(run: Run, tiny: Tiny, length: int) -> None:
    words = ("generate", tiny("llama"), "--prompt-ids", "1", "--max-model-len", length)
    refused(run, *words, culprits=(f"--max-model-len {length}", "4096"))


@pytest.mark.parametrize(("ids", "culprit"), [("1 256", "256"), ("1,-2", "-2"), ("1 two", "two")])
def test_token_ids_out_of_range(run: Run, tiny: Tiny, ids: str, culprit: str) -> None:
    refused(run, "generate", tiny("llama"), "--prompt-ids", ids, culprits=(culprit,))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--top-k", "-2"),
        ("--min-p", "2"),
        ("--max-tokens", "0"),
        ("--seed", "-1"),
        ("--n", "0"),
        ("--logprobs", "-2"),
        ("--stop", ""),
    ],
)
def test_sampling_out_of_range(run: Run, flag: str, value: str) -> None:
    refused(run, "generate", "demo", "-p", "a", flag, value, culprits=(f"error: {flag} must be", f"where {flag}"))


@pytest.mark.parametrize("tokens", [0, -3, 5000])
def test_tokens_out_of_range(run: Run, tiny: Tiny, tokens: int) -> None:
    refused(run, "verify", tiny("llama"), "--reference", "ref", "--tokens", tokens, culprits=(f"--tokens {tokens}",))


@pytest.mark.parametrize("tol", ["0", "-1", "nan", "inf"])
def test_tolerance_out_of_range(run: Run, tiny: Tiny, tol: str) -> None:
    refused(run, "verify", tiny("llama"), "--tol", tol, culprits=("--tol",))


def test_unknown_reference(run: Run, tiny: Tiny) -> None:
    refused(run, "verify", tiny("llama"), "--reference", "oracle", culprits=("oracle", "transformers", "ref"))


def test_path_that_is_a_file(run: Run, broken: Broken) -> None:
    path = broken() / "model.safetensors"
    refused(run, "inspect", path, culprits=("model.safetensors is a file", str(path.parent)))


def test_path_that_is_nothing(run: Run, tmp_path: Path) -> None:
    refused(run, "inspect", tmp_path / "absent", culprits=("absent",))
    refused(run, "inspect", "kimi-linear-48b-a3", culprits=("did you mean kimi-linear-48b-a3b?",))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_no_read_permission(run: Run, broken: Broken, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    path = broken() / file
    path.chmod(0)
    if os.access(path, os.R_OK):
        # root reads all the same: make opening fail as it does for others
        real = Path.open

        def denied(self: Path, *args: Any, **kwargs: Any) -> Any:
            if self == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Path, "open", denied)
    refused(run, "verify", path.parent, *QUICK, culprits=(file, "ermission"))


@pytest.mark.parametrize(("verb", "flag"), [("verify", "--html"), ("verify", "--output"), ("day0", "--output")])
def test_disk_full_while_the_report_is_written(
    run: Run, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, flag: str
) -> None:
    path = tmp_path / "reports" / "report"
    path.parent.mkdir()
    path.write_text("the one before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    words = (verb, tiny("llama"), *QUICK, flag, path)
    refused(run, *words, culprits=(str(path), "No space left on device"))
    assert path.read_text() == "the one before"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("flag", ["--html", "--output"])
def test_report_into_an_absent_folder_is_refused_before_the_work(
    run: Run, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr("firstlight.verify.run.Verification.run", lambda self: pytest.fail("the work was begun"))
    path = tmp_path / "absent" / "report.html"
    refused(run, "verify", tiny("llama"), *QUICK, flag, path, culprits=(str(path), "there is no folder"))
    refused(run, "verify", tiny("llama"), *QUICK, flag, tmp_path, culprits=(str(tmp_path), "it is a folder"))


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("{", "not valid JSON"),
        ("[]", "not an object"),
        ('{"bindings": []}', "not a plan"),
        ('{"bindings": "none", "precision": {}}', "not a plan"),
    ],
)
def test_file_that_is_no_plan(run: Run, tiny: Tiny, tmp_path: Path, text: str, culprit: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    refused(run, "plan", tiny("llama"), "--plan", path, culprits=(culprit,))


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        (lambda plan: plan["bindings"].pop(), "lacks bindings"),
        (lambda plan: plan["bindings"].append(plan["bindings"][0]), "twice"),
        (lambda plan: plan["bindings"][0].update(op="warp"), "lacks bindings"),
        (lambda plan: plan["bindings"][0].update(impl="fastest"), "'fastest'"),
        (lambda plan: plan["parallel"].update(TP=2), "tensor parallelism over 2"),
        (lambda plan: plan.update(parallel=[]), "not a plan"),
        (lambda plan: plan.update(graph_mode=True), "graph_mode"),
        (lambda plan: plan.update(num_layers=3), "3 layers"),
        (lambda plan: plan["precision"].update(index="mxfp8"), "mxfp8"),
        (lambda plan: plan.update(surprise=1), "surprise"),
    ],
)
def test_plan_that_does_not_fit(
    run: Run, tiny: Tiny, tmp_path: Path, change: Callable[[dict[str, Any]], None], culprit: str
) -> None:
    plan, path = run("plan", tiny("llama"), "--json").data(), tmp_path / "plan.json"
    change(plan)
    path.write_text(json.dumps(plan))
    refused(run, "plan", tiny("llama"), "--plan", path, culprits=(culprit,))


def test_plan_goes_with_no_other_flag_of_the_plan(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(run("plan", tiny("llama"), "--json").out)
    refused(run, "plan", tiny("llama"), "--plan", path, "--op", "rope=ref", culprits=("--plan",))


@pytest.mark.parametrize(
    ("text", "culprit"),
    [("import no_such_module", "no_such_module"), ("x = 1", "arch and NAMES"), ("def", "SyntaxError")],
)
def test_broken_port_file(run: Run, tiny: Tiny, tmp_path: Path, text: str, culprit: str) -> None:
    path = tmp_path / "port.py"
    path.write_text(text)
    refused(run, "plan", tiny("llama"), "--port", path, culprits=(str(path), culprit))


def test_absent_plan(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    refused(run, "plan", tiny("llama"), "--plan", tmp_path / "no.json", culprits=("no such plan", "no.json"))


def test_absent_port_file(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    refused(run, "plan", tiny("llama"), "--port", tmp_path / "no.py", culprits=("no such port file", "no.py"))


def test_card_has_no_weights_to_verify(run: Run) -> None:
    refused(run, "verify", "qwen3-30b-a3b", culprits=("needs weights", "qwen3-30b-a3b"))
