"""Checkpoints of several spellings and layouts end in the same parameters, or in none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_decoder import (
    CHECKED,
    HIDDEN,
    Decoder,
    Matrix,
    all_meta,
    expected,
    fuse_experts,
    fused_names,
    loaded,
    planned,
    stored,
)

from firstlight.errors import FirstlightError
from firstlight.spec.names import DECODER, Source
from firstlight.weights.load import check_tied, load_into, unload


def mappings(folder: Path) -> int:
    """Return how many mappings of files of a folder this process holds."""
    return Path("/proc/self/maps").read_text().count(str(folder))


@pytest.mark.parametrize("num_shards", [0, 3])
def test_every_parameter_gets_its_values(save: Callable[..., Path], num_shards: int) -> None:
    tensors = stored()
    parameters = dict(loaded(save(tensors, num_shards=num_shards)).named_parameters())
    for name in CHECKED:
        assert torch.equal(parameters[name], expected(tensors, name)), name
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in parameters.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16, torch.float32])
def test_values_are_cast_to_the_dtype_of_the_parameter(
    save: Callable[..., Path], dtype: torch.dtype, own: torch.dtype
) -> None:
    tensors = stored(dtype=dtype)
    model = Decoder(dtype=own)
    plan, checkpoint = planned(save(tensors), model)
    num_bytes = load_into(plan, checkpoint)
    parameters = dict(model.named_parameters())
    for name in CHECKED:
        kept = torch.float32 if name.endswith("A_log") else own
        assert parameters[name].dtype == kept
        assert torch.equal(parameters[name], expected(tensors, name).to(kept)), name
    assert num_bytes == sum(parameter.nbytes for parameter in parameters.values())


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
def test_fused_experts_give_the_parameters_of_single_ones(
    save: Callable[..., Path], interleave: bool, transpose: bool
) -> None:
    tensors = stored()
    single = loaded(save(tensors))
    folder = save(fuse_experts(tensors, interleave=interleave, transpose=transpose), folder="fused")
    fused = loaded(folder, fused_names(interleave=interleave, transpose=transpose))
    for (name, one), other in zip(single.named_parameters(), fused.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_name_map_of_decoders_takes_fused_experts_as_well(save: Callable[..., Path]) -> None:
    tensors = stored()
    model = loaded(save(fuse_experts(tensors)))
    gate_up = model.get_parameter("layers.0.ffn.experts.gate_up")
    assert torch.equal(gate_up, expected(tensors, "layers.0.ffn.experts.gate_up"))


def test_layout_of_fused_experts_is_chosen_by_shape(save: Callable[..., Path]) -> None:
    tensors = stored()
    base = "{body}layers.{i}.mlp.experts.down_proj"
    either = (Source(name=base, expert=True), Source(name=base, expert=True, transpose=True))
    names = fused_names(interleave=False, transpose=True).extend(
        {"layers.{i}.ffn.experts.{e}.down_proj.weight": either}
    )
    model = loaded(save(fuse_experts(tensors, transpose=True)), names)
    assert torch.equal(model.get_parameter("layers.0.ffn.experts.down"), expected(tensors, "layers.0.ffn.experts.down"))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
def test_prefix_alternatives_are_tried_in_turn(save: Callable[..., Path], prefix: str) -> None:
    names = DECODER.extend({}, prefixes=("model.language_model.", "model.", ""))
    model = loaded(save(stored(prefix=prefix)), names)
    assert torch.equal(model.get_parameter("norm.weight"), stored(prefix=prefix)[f"{prefix}norm.weight"])


def test_unsupported_format_is_found_before_anything_is_read(save: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = stored()
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(1)
    model = Decoder()
    plan, checkpoint = planned(save(tensors), model)
    assert plan.unsupported == ((name, "F8_E4M3"),)
    with pytest.raises(FirstlightError) as caught:
        load_into(plan, checkpoint)
    assert f"{name} is F8_E4M3" in caught.value.why and "F32, F16, BF16" in caught.value.fix
    assert all_meta(model)


def test_tied_model_without_a_stored_head_has_nothing_to_say(save: Callable[..., Path]) -> None:
    tensors = stored()
    del tensors["lm_head.weight"]
    plan, checkpoint = planned(save(tensors), Decoder(tied=True))
    plan.raise_if_bad("here")
    assert plan.tied is None and plan.skipped == {} and check_tied(plan, checkpoint) == ()


def test_tied_model_skips_a_stored_head_of_the_same_values_with_a_notice(save: Callable[..., Path]) -> None:
    tensors = stored()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    plan, checkpoint = planned(save(tensors), Decoder(tied=True))
    plan.raise_if_bad("here")
    assert list(plan.skipped) == ["lm_head.weight"]
    (notice,) = check_tied(plan, checkpoint)
    assert "lm_head.weight" in notice and "warning" not in notice


@pytest.mark.parametrize("where", ["first row", "last row", "shape", "format"])
def test_tied_model_warns_if_the_stored_head_differs(save: Callable[..., Path], where: str) -> None:
    tensors = stored()
    head = torch.randn(2500, HIDDEN, generator=torch.Generator().manual_seed(1))
    tensors["model.embed_tokens.weight"] = head.clone()
    head[0 if where == "first row" else -1, -1] += 1
    other = {"shape": head[:-1].contiguous(), "format": head.to(torch.float8_e4m3fn)}
    tensors["lm_head.weight"] = other.get(where, head)
    model = Decoder(tied=True)
    model.embed = Matrix((2500, HIDDEN))
    plan, checkpoint = planned(save(tensors), model)
    plan.raise_if_bad("here")
    (notice,) = check_tied(plan, checkpoint)
    assert notice.startswith("warning: lm_head.weight") and "tie_word_embeddings" in notice


def test_prefix_loads_one_layer_and_leaves_the_others(save: Callable[..., Path]) -> None:
    model = Decoder(layers=11)
    plan, checkpoint = planned(save(stored(layers=11)), model)
    num_bytes = load_into(plan, checkpoint, prefix="layers.1")
    real = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert real == {name for name, _ in model.named_parameters() if name.startswith("layers.1.")}
    assert num_bytes == sum(parameter.nbytes for parameter in model.layers[1].parameters())


def test_unloaded_layer_can_be_loaded_again(save: Callable[..., Path]) -> None:
    tensors = stored()
    folder = save(tensors)
    model = Decoder(dtype=torch.bfloat16)
    plan, checkpoint = planned(folder, model)
    before = [(name, parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()]
    load_into(plan, checkpoint)
    unload(model)
    assert all_meta(model)
    assert before == [(name, parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()]
    load_into(plan, checkpoint, prefix="layers.0")
    gate_up = model.get_parameter("layers.0.ffn.experts.gate_up")
    assert torch.equal(gate_up, expected(tensors, "layers.0.ffn.experts.gate_up").bfloat16())


def test_whole_tensor_of_equal_dtype_stays_in_the_file(save: Callable[..., Path]) -> None:
    folder = save(stored())
    model = Decoder()
    plan, checkpoint = planned(folder, model)
    load_into(plan, checkpoint, prefix="layers.0.ffn.experts")
    assert mappings(folder) == 0, "concatenated parts are copies"
    load_into(plan, checkpoint, prefix="embed")
    assert mappings(folder) > 0
    unload(model)
    assert mappings(folder) == 0


def test_mapped_pages_are_released_during_a_long_load(
    save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(stored())
    model = Decoder(dtype=torch.bfloat16)
    plan, checkpoint = planned(folder, model)
    held: list[int] = []

    def record(num_bytes: int) -> None:
        held.append(mappings(folder))

    load_into(plan, checkpoint, prefix="layers.0.ffn", progress=record)
    assert min(held) > 0
    held.clear()
    monkeypatch.setattr("firstlight.weights.load.RELEASE_BYTES", 0)
    load_into(plan, checkpoint, prefix="layers.0.ffn", progress=record)
    assert len(held) == 3 and max(held) == 0


def test_transposed_tensor_becomes_a_contiguous_parameter(save: Callable[..., Path]) -> None:
    tensors = stored()
    head = tensors["lm_head.weight"]
    folder = save(tensors | {"lm_head.weight": head.T.contiguous()})
    model = loaded(folder, DECODER.extend({"head.weight": Source(name="lm_head.weight", transpose=True)}))
    parameter = model.get_parameter("head.weight")
    assert parameter.is_contiguous() and torch.equal(parameter, head)


def test_writing_to_a_parameter_leaves_the_file_as_it_was(save: Callable[..., Path]) -> None:
    folder = save(stored())
    before = (folder / "model.safetensors").read_bytes()
    loaded(folder).get_parameter("embed.weight").zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_progress_counts_all_bytes(save: Callable[..., Path]) -> None:
    model = Decoder()
    plan, checkpoint = planned(save(stored()), model)
    steps: list[int] = []
    num_bytes = load_into(plan, checkpoint, progress=steps.append)
    assert sum(steps) == num_bytes and len(steps) == len(list(model.parameters()))


def test_failure_half_way_leaves_all_parameters_as_they_were(save: Callable[..., Path]) -> None:
    folder = save(stored(), num_shards=3)
    model = Decoder()
    plan, checkpoint = planned(folder, model)
    file = folder / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    steps: list[int] = []
    with pytest.raises(FirstlightError, match="damaged"):
        load_into(plan, checkpoint, progress=steps.append)
    assert steps, "some parameters were filled before the fault"
    assert all_meta(model)


def test_interrupt_leaves_all_parameters_as_they_were(save: Callable[..., Path]) -> None:
    model = Decoder()
    plan, checkpoint = planned(save(stored()), model)

    def interrupt(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_into(plan, checkpoint, progress=interrupt)
    assert all_meta(model)


def test_plan_with_faults_is_not_loaded_not_even_a_layer_without_faults(save: Callable[..., Path]) -> None:
    tensors = stored()
    del tensors["model.norm.weight"]
    model = Decoder()
    plan, checkpoint = planned(save(tensors), model)
    with pytest.raises(FirstlightError) as caught:
        load_into(plan, checkpoint, prefix="layers.0")
    assert caught.value.where == str(checkpoint.folder) and all_meta(model)


def test_parameter_filled_in_part_is_never_set(save: Callable[..., Path]) -> None:
    model = Decoder()
    plan, checkpoint = planned(save(stored()), model)
    entries = tuple(entry for entry in plan.entries if entry.target.name != "layers.0.mixer.k_proj.weight")
    with pytest.raises(AssertionError, match=r"layers\.0\.mixer\.qkv\.weight"):
        load_into(replace(plan, entries=entries), checkpoint)
    assert all_meta(model)


STREAM = """
import sys
from pathlib import Path
import torch
from torch import nn
from firstlight.layers.parameter import Module, targets
from firstlight.spec.names import NameMap
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import load_into, resolve, unload

class Layer(Module):
    def __init__(self):
        super().__init__()
        self.add_parameter("weight", (1024, 6144), dtype=getattr(torch, sys.argv[2]))

class Stack(Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(8)])

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

torch.set_num_threads(1)
model = Stack()
names = NameMap(rules={"layers.{i}": "layers.{i}"})
torch.ones(10).sum()
before = peak()
with Checkpoint.open(Path(sys.argv[1])) as checkpoint:
    plan = resolve(targets(model), names, checkpoint)
    for i, layer in enumerate(model.layers):
        load_into(plan, checkpoint, prefix=f"layers.{i}")
        assert layer.weight.view(torch.uint8).max() > 0
        unload(layer)
print(peak() - before)
"""


@pytest.mark.parametrize(("dtype", "layers_held"), [("float32", 1), ("bfloat16", 1.5)])
def test_streaming_needs_the_memory_of_one_layer(tmp_path: Path, dtype: str, layers_held: float) -> None:
    """Without a cast: the pages of a layer. With one: those, and the half as large parameter."""
    layer_mib = 24
    save_file({f"layers.{i}.weight": torch.ones(1024, 6144) for i in range(8)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", STREAM, str(tmp_path), dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak_mib = int(result.stdout) / 1024
    # 12: pages of code that are touched for the first time during the load
    assert peak_mib < layers_held * layer_mib + 12, "of 192 MiB"
