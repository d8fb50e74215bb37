"""The embedded demo: small, reproducible, and accepted whole by transformers and by the loader."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from safetensors.torch import load_file

from firstlight.engine.assemble import declare, load_decoder
from firstlight.text.tokenizer import Tokenizer

TOOL = Path(__file__).parents[2] / "tools" / "make_demo.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """Return tools/make_demo.py as a module."""
    spec = importlib.util.spec_from_file_location("make_demo", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_folder_is_at_most_three_megabytes(demo_folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in demo_folder.iterdir()}
    assert sum(sizes.values()) <= 3_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(sizes)
    assert {"generation_config.json", "MODEL_CARD.md"} <= set(sizes)


def test_the_tool_gives_the_same_text_files_each_time(tool: ModuleType, demo_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        tool.write_text(tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
        kept = (demo_folder / file.name).read_text()
        if file.name != "tokenizer.json":
            assert file.read_text() == kept
        else:
            # other versions of the library may write other keys around the same model
            assert json.loads(file.read_text())["model"] == json.loads(kept)["model"]


def test_the_tool_gives_the_weights_that_are_embedded(tool: ModuleType, demo_folder: Path) -> None:
    made, kept = tool.make_weights(demo_folder), load_file(demo_folder / "model.safetensors")
    assert made.keys() == kept.keys()
    for name, tensor in kept.items():
        assert tensor.dtype == made[name].dtype, name
        assert torch.equal(tensor, made[name]), name
        assert tensor.unique().numel() > 1, name


def test_transformers_loads_it_with_nothing_missing(demo_folder: Path) -> None:
    load = transformers.Glm5NextForConditionalGeneration.from_pretrained
    _, info = load(demo_folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_the_loader_uses_every_tensor_but_the_vision_tower(demo_folder: Path) -> None:
    declared = declare("demo")
    assert declared.unknown_keys == ()
    _, report = load_decoder(declared, torch.bfloat16)
    names = load_file(demo_folder / "model.safetensors").keys()
    assert report.tensors == sum("visual" not in name for name in names)
    assert {group.reason for group in report.skipped} == {"vision tower, text only"}


def test_tokenizer_and_model_have_the_same_vocabulary(demo_folder: Path) -> None:
    tokenizer, arch = Tokenizer.load(demo_folder), declare("demo").arch
    assert tokenizer.vocab_size == arch.vocab_size == 512
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.eos_ids] == ["<|end|>", "<|user|>"]
