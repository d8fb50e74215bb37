"""What ports read and cover, found by running them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from reference_configs import TINY, tiny_config

from firstlight.models.known import known_ports, probe
from firstlight.models.llama import NAMES, arch
from firstlight.models.registry import Port, find_port, known_models
from firstlight.spec.arch import ArchSpec
from firstlight.spec.cards import card, card_names
from firstlight.spec.evidence import KnownPort
from firstlight.spec.read import HARMLESS, Config, text_config


@pytest.fixture(scope="module")
def known() -> dict[str, KnownPort]:
    """Return what the shipped ports read and cover."""
    return known_ports()


def test_helpers_are_no_ports() -> None:
    assert not {"declare", "known", "registry"} & set(known_models())


def test_every_port_is_probed_to_its_end(known: dict[str, KnownPort]) -> None:
    assert list(known) == known_models()
    assert [port.note for port in known.values()] == [""] * len(known)


@pytest.mark.parametrize("name", TINY)
def test_a_probe_finds_every_key_of_a_config_that_the_port_accepts(name: str, known: dict[str, KnownPort]) -> None:
    raw = text_config(tiny_config(name))
    told = {key for key, value in raw.items() if value is not None and key not in HARMLESS}
    assert told <= known[raw["model_type"]].config_keys


@pytest.mark.parametrize("name", card_names())
def test_a_probe_finds_every_key_of_a_card(name: str, known: dict[str, KnownPort]) -> None:
    raw = text_config(card(name))
    assert {key for key in raw if raw[key] is not None} <= known[raw["model_type"]].config_keys | HARMLESS


def test_a_probe_finds_tensors_that_only_a_flag_brings(known: dict[str, KnownPort]) -> None:
    patterns = known["llama"].tensor_patterns
    assert {"layers.{n}.self_attn.q_proj.bias", "layers.{n}.mlp.up_proj.bias", "lm_head.weight"} <= patterns
    assert "layers.{n}.mlp.experts.{n}.up_proj.weight" not in patterns


def test_a_probe_finds_every_spelling_of_a_tensor(known: dict[str, KnownPort]) -> None:
    patterns = known["qwen3_moe"].tensor_patterns
    assert "layers.{n}.mlp.experts.{n}.gate_proj.weight" in patterns
    assert "layers.{n}.mlp.experts.gate_up_proj" in patterns


def test_a_port_that_cannot_be_probed_says_why_and_keeps_what_it_read() -> None:
    def broken(cfg: Config) -> ArchSpec:
        table: dict[str, Any] = cfg.table("a_table")
        cfg.positive("a_size")
        return arch(Config({"hidden_size": table["absent"]}))

    found = probe(Port(model_type="broken", arch=broken, names=NAMES, origin="test"))
    assert {"a_table", "a_size"} <= found.config_keys
    assert "stopped" in found.note
    assert "absent" in found.note
    assert found.tensor_patterns == frozenset()


def test_a_copy_of_every_port_works_as_a_port_file(tmp_path: Path) -> None:
    for name in known_models():
        source = Path(importlib.import_module(f"firstlight.models.{name}").__file__ or "")
        copy = tmp_path / f"copy_of_{name}.py"
        copy.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        assert find_port(name, port_file=copy).origin == str(copy)
