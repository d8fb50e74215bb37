"""Values that no release has are refused, and old words of a released file are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from reference_configs import Raw, changed, declare, refusal, tiny_config

from firstlight.errors import FirstlightError
from firstlight.models import registry
from firstlight.models.declare import read_arch
from firstlight.models.llama import NAMES
from firstlight.models.registry import Port, find_port
from firstlight.spec.arch import ArchSpec, PreNorm

HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"qk_rope_head_dim": -8}, "qk_rope_head_dim must not be negative, got -8"),
        ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts must not be negative, got -1"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must not be negative"),
        ("kimi_linear", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must not be negative"),
        ("llama", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must not be negative"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank must be positive"),
        ("qwen3", {"sliding_window": -4}, "sliding_window must be positive"),
        ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps must not be negative"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ("llama", {"num_attention_heads": HUGE}, "num_attention_heads must be below"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be below"),
        ("llama", {"rms_norm_eps": HUGE}, "rms_norm_eps must be a finite number"),
        ("qwen3_moe", {"mlp_only_layers": [99]}, "mlp_only_layers=99 exceeds"),
        ("qwen3_moe", {"mlp_only_layers": [HUGE]}, "mlp_only_layers[0] must be below"),
        ("glm5_next", {"hc_mult": 0}, "hc_mult must be positive"),
        ("llama", {"rope_theta": 0, "rope_parameters": None}, "rope_theta must be positive"),
        ("llama", {"rope_theta": -1.0, "rope_parameters": None}, "rope_theta must be positive"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta must be positive"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor must be positive"),
    ],
)
def test_a_value_that_no_release_has_is_refused(name: str, changes: Raw, message: str) -> None:
    assert refusal(changed(name, **changes)).what.startswith(message)


@pytest.mark.parametrize("name", ["kimi_linear", "glm5_next"])
@pytest.mark.parametrize(
    "lists", [{"kda_layers": [99]}, {"full_attn_layers": [99]}, {"kda_layers": [1], "full_attn_layers": [1]}]
)
def test_layer_lists_beside_layer_types_are_checked(name: str, lists: Raw) -> None:
    found = refusal(changed(name, linear_attn_config=lists))
    assert found.what == "kda_layers and full_attn_layers do not cover each layer once"


@pytest.mark.parametrize("name", ["kimi_linear", "glm5_next"])
def test_one_layer_list_that_disagrees_with_layer_types_is_refused(name: str) -> None:
    assert "contradict each other" in refusal(changed(name, linear_attn_config={"kda_layers": [2]})).what


@pytest.mark.parametrize("name", ["kimi_linear", "glm5_next"])
@pytest.mark.parametrize("key", ["kda_layers", "full_attn_layers"])
def test_one_layer_list_is_enough(name: str, key: str) -> None:
    raw = changed(name)
    word = "linear_attention" if key == "kda_layers" else None
    kinds = raw["layer_types"]
    numbers = [i + 1 for i, kind in enumerate(kinds) if (kind == "linear_attention") == (word is not None)]
    assert declare({**raw, "layer_types": None, "linear_attn_config": {key: numbers}}) == declare(raw)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "glm5_next"])
def test_the_old_word_for_indexed_attention_is_read(name: str) -> None:
    raw = changed(name)
    usual = ["indexed_attention"] * raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or usual
    old = ["deepseek_sparse_attention" if kind == "indexed_attention" else kind for kind in kinds]
    assert "deepseek_sparse_attention" in old
    assert declare({**raw, "layer_types": old}) == declare({**raw, "layer_types": kinds})


def raised(cfg: Any) -> Any:
    """Fail as a port under work does."""
    return {}["no_such_size"]


def test_a_port_that_raises_is_named_with_the_exception_and_its_line() -> None:
    port = Port(model_type="mine", arch=raised, names=NAMES, origin="mine.py")
    with pytest.raises(FirstlightError) as refused:
        read_arch(tiny_config("llama"), port)
    line = raised.__code__.co_firstlineno + 2
    assert refused.value.what == "arch(cfg) for mine fails: KeyError: 'no_such_size'"
    assert f"{Path(__file__).name}:{line}" in refused.value.where
    assert "mine.py" in refused.value.why


@pytest.mark.parametrize("found", [None, {}, SimpleNamespace(layers=())])
def test_a_port_that_returns_no_declaration_is_refused(found: Any) -> None:
    port = Port(model_type="mine", arch=lambda cfg: found, names=NAMES, origin="mine.py")
    with pytest.raises(FirstlightError) as refused:
        read_arch(tiny_config("llama"), port)
    assert f"returns {type(found).__name__}, not an ArchSpec" in refused.value.what


def mixer(spec: ArchSpec, **fields: Any) -> ArchSpec:
    """Return the spec with fields of its first mixer changed."""
    first = replace(spec.layers[0], mixer=replace(cast("Any", spec.layers[0].mixer), **fields))
    return replace(spec, layers=(first, *spec.layers[1:]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: replace(spec, layers=list(spec.layers)), "layers must be tuple, got list"),
        (lambda spec: replace(spec, residual=PreNorm), "residual must be PreNorm or HyperConnections"),
        (lambda spec: replace(spec, tie_word_embeddings=1), "tie_word_embeddings must be bool, got int 1"),
        (lambda spec: replace(spec, vocab_size=256.0), "vocab_size must be int, got float 256.0"),
        (lambda spec: mixer(spec, scaling="0.1"), "layers[0].mixer.scaling must be float, got str '0.1'"),
        (lambda spec: mixer(spec, sliding_window=True), "layers[0].mixer.sliding_window must be int or None, got bool"),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_path(change: Callable[[Any], Any], said: str) -> None:
    sound = find_port("llama").arch
    port = Port(model_type="mine", arch=lambda cfg: change(sound(cfg)), names=NAMES, origin="mine.py")
    with pytest.raises(FirstlightError) as refused:
        read_arch(tiny_config("llama"), port)
    assert said in refused.value.what
    assert refused.value.where == "mine.py"


@pytest.mark.parametrize(("arch", "names"), [(None, NAMES), (raised, {"a": "b"})])
def test_a_port_whose_parts_are_of_another_kind_is_refused(
    arch: Any, names: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(arch=arch, NAMES=names)
    monkeypatch.setattr(registry, "load_file", lambda path: module)
    with pytest.raises(FirstlightError, match="no function, or its NAMES no NameMap"):
        find_port("mine", port_file=tmp_path / "mine.py")


def test_an_installed_port_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise ImportError("no module named gone")

    entry = SimpleNamespace(name="mine", value="gone:port", load=load)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(FirstlightError) as refused:
        find_port("mine")
    assert "gone:port" in refused.value.where
    assert "no module named gone" in refused.value.why
