"""Models and ports with a fault each, for the pages that show what the tool says about it.

A fault changes the folder it is called in, where ./NewModel is a sound llama.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MODEL = Path("NewModel")
EVEN = ("model.layers.0.self_attn.", "model.layers.2.self_attn.")
FAULTS: dict[str, Callable[[], None]] = {}

PORT = '''"""NewModel: as llama."""

from dataclasses import replace

from firstlight.models import llama

NAMES = llama.NAMES


def arch(cfg):
    return llama.arch(cfg)
'''


def fault(function: Callable[[], None]) -> Callable[[], None]:
    """Register a fault under its name, with dashes."""
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


def config(**changes: Any) -> None:
    """Change keys of the config.json; None removes one."""
    path = MODEL / "config.json"
    merged = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Rewrite the weights."""
    path = MODEL / "model.safetensors"
    save_file(change(load_file(path)), path)


def port(old: str = "", new: str = "", *, text: str = PORT) -> None:
    """Write newmodel.py, changed in one place."""
    assert old in text
    Path("newmodel.py").write_text(text.replace(old, new) if old else text)


@fault
def none() -> None:
    """Leave the model sound, with a sound port beside it."""
    port()


@fault
def unknown_model_type() -> None:
    """Call the architecture something else."""
    config(model_type="newmodel")


@fault
def no_config() -> None:
    """Take the config.json away."""
    (MODEL / "config.json").unlink()


@fault
def unread_key() -> None:
    """Add a key that the port does not read."""
    config(attention_sink_size=4)


@fault
def missing_key() -> None:
    """Take away a key that the port needs."""
    config(intermediate_size=None)


@fault
def unsupported_value() -> None:
    """Ask for what the port was not written for."""
    config(hidden_act="gelu")


@fault
def quantised() -> None:
    """Say that the checkpoint is quantised."""
    config(quantization_config={"quant_method": "fp8"})


@fault
def renamed_tensor() -> None:
    """Spell a tensor as the name map does not."""
    old, new = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.query.weight"
    tensors(lambda found: {new if name == old else name: tensor for name, tensor in found.items()})


@fault
def additional_tensor() -> None:
    """Add a tensor that nothing reads."""
    tensors(lambda found: {**found, "model.layers.0.self_attn.g_proj.weight": torch.zeros(4, 4)})


@fault
def absent_tensor() -> None:
    """Take a tensor away."""
    tensors(lambda found: {name: tensor for name, tensor in found.items() if name != "model.norm.weight"})


@fault
def wrong_shape() -> None:
    """Cut a column off a tensor."""
    name = "model.layers.1.mlp.down_proj.weight"
    tensors(lambda found: {**found, name: found[name][:, :-1].contiguous()})


@fault
def truncated_weights() -> None:
    """Cut the weights off as a broken download does."""
    path = MODEL / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


@fault
def port_does_not_import() -> None:
    """Import a name that is not there."""
    port("import llama", "import llamas")


@fault
def port_raises() -> None:
    """Fail inside arch."""
    port("return llama.arch(cfg)", 'return replace(llama.arch(cfg), layers=cfg.raw["layers"])')


@fault
def port_does_not_end() -> None:
    """Never return from arch."""
    port("return llama.arch(cfg)", "while True:\n        pass")


@fault
def port_lacks_names() -> None:
    """Leave NAMES out."""
    port("NAMES = llama.NAMES\n", "")


@fault
def missing_operator() -> None:
    """Declare a residual that no operator computes."""
    port(
        "return llama.arch(cfg)",
        "return replace(llama.arch(cfg), residual=BlockAttnRes(block_size=2))",
        text=PORT.replace("from dataclasses", "from firstlight.spec.arch import BlockAttnRes\nfrom dataclasses"),
    )


@fault
def wrong_epsilon() -> None:
    """Read the epsilon of the norms wrongly."""
    port(
        "return llama.arch(cfg)",
        "spec = llama.arch(cfg)\n    norm = replace(spec.norm, eps=1e-2)\n    return replace("
        "spec, norm=norm, layers=tuple(replace(layer, norm=norm) for layer in spec.layers))",
    )


@fault
def wrong_rotary() -> None:
    """Turn neighbours instead of halves."""
    port(
        "return llama.arch(cfg)",
        "spec = llama.arch(cfg)\n    mixer = spec.layers[0].mixer\n    mixer = replace(mixer, rope=replace("
        'mixer.rope, layout="interleave"))\n'
        "    return replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers))",
    )


@fault
def running_mean() -> None:
    """Make a checkpoint for the port on the page of new nouns, with that port beside it."""
    page = (Path(__file__).parents[2] / "docs" / "new-noun.md").read_text(encoding="utf-8")
    Path("newmodel.py").write_text(page.split("```python\n")[1].split("```")[0])
    config(model_type="newmodel", mean_channels=24)
    draw = torch.Generator().manual_seed(0)

    def change(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: tensor for name, tensor in found.items() if not name.startswith(EVEN)}
        shapes = {"in_proj": (72, 64), "o_proj": (64, 24)}
        made = {
            f"{layer}{name}.weight": torch.randn(shape, generator=draw) / 8
            for layer in EVEN
            for name, shape in shapes.items()
        }
        return {**kept, **made}

    tensors(change)
