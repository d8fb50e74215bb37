"""A small decoder of the layers' base classes, its checkpoint, and the parameters that must come out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from firstlight.layers.parameter import Module, Part, targets
from firstlight.spec.names import DECODER, NameMap, Source
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import load_into, resolve
from firstlight.weights.loadplan import LoadPlan

VOCAB, HIDDEN, INNER, EXPERTS, LAYERS = 12, 8, 6, 4, 2


class Matrix(Module):
    def __init__(self, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.add_parameter("weight", shape, dtype=dtype)


class Qkv(Module):
    transparent = True

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        names = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        bounds = ((0, 8), (8, 12), (12, 16))
        parts = tuple(Part(name, (slice(*bound),)) for name, bound in zip(names, bounds, strict=True))
        self.add_parameter("weight", (16, HIDDEN), dtype=dtype, parts=parts)


class Mixer(Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.qkv = Qkv(dtype)
        self.conv = Matrix((HIDDEN, 4), dtype=dtype)
        self.add_parameter("A_log", (4,), dtype=torch.float32)


class Experts(Module):
    transparent = True

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        ends = (("gate_proj", slice(0, INNER)), ("up_proj", slice(INNER, 2 * INNER)))
        gate_up = tuple(Part(f"experts.{e}.{name}.weight", (e, rows)) for e in range(EXPERTS) for name, rows in ends)
        down = tuple(Part(f"experts.{e}.down_proj.weight", (e,)) for e in range(EXPERTS))
        self.add_parameter("gate_up", (EXPERTS, 2 * INNER, HIDDEN), dtype=dtype, parts=gate_up)
        self.add_parameter("down", (EXPERTS, HIDDEN, INNER), dtype=dtype, parts=down)


class Ffn(Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.router = Matrix((EXPERTS, HIDDEN), dtype=dtype)
        self.experts = Experts(dtype)


class Layer(Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.mixer_norm = Matrix((HIDDEN,), dtype=dtype)
        self.mixer = Mixer(dtype)
        self.ffn = Ffn(dtype)


class Decoder(Module):
    def __init__(self, *, tied: bool = False, dtype: torch.dtype | None = None, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = Matrix((VOCAB, HIDDEN), dtype=dtype)
        self.layers = nn.ModuleList([Layer(dtype) for _ in range(layers)])
        self.norm = Matrix((HIDDEN,), dtype=dtype)
        if not tied:
            self.head = Matrix((VOCAB, HIDDEN), dtype=dtype)


def stored(*, prefix: str = "model.", layers: int = LAYERS, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with one tensor per expert."""
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        layer = f"{prefix}layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (HIDDEN,),
            f"{layer}self_attn.q_proj.weight": (8, HIDDEN),
            f"{layer}self_attn.k_proj.weight": (4, HIDDEN),
            f"{layer}self_attn.v_proj.weight": (4, HIDDEN),
            f"{layer}self_attn.conv.weight": (HIDDEN, 1, 4),
            f"{layer}self_attn.A_log": (1, 1, 4, 1),
            f"{layer}mlp.gate.weight": (EXPERTS, HIDDEN),
        }
        for e in range(EXPERTS):
            expert = f"{layer}mlp.experts.{e}."
            shapes |= {f"{expert}{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
            shapes[f"{expert}down_proj.weight"] = (HIDDEN, INNER)
    shapes |= {f"{prefix}norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def fuse_experts(tensors: dict[str, Tensor], *, interleave: bool = False, transpose: bool = False) -> dict[str, Tensor]:
    """Return the same weights with all experts of a layer in one tensor."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for i in range(LAYERS):
        base = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{base}{e}.{name}_proj.weight"] for e in range(EXPERTS)])
            for name in ("gate", "up", "down")
        )
        gate_up = torch.stack([gate, up], dim=2).flatten(1, 2) if interleave else torch.cat([gate, up], dim=1)
        fused[f"{base}gate_up_proj"] = gate_up.transpose(1, 2).contiguous() if transpose else gate_up
        fused[f"{base}down_proj"] = down.transpose(1, 2).contiguous() if transpose else down
    return fused


def fused_names(*, interleave: bool, transpose: bool) -> NameMap:
    base = "{body}layers.{i}.mlp.experts."
    ours = "layers.{i}.ffn.experts.{e}."
    gate_up, down = f"{base}gate_up_proj", f"{base}down_proj"
    return DECODER.extend(
        {
            f"{ours}gate_proj.weight": Source(
                name=gate_up, expert=True, chunk=(0, 2), interleave=interleave, transpose=transpose
            ),
            f"{ours}up_proj.weight": Source(
                name=gate_up, expert=True, chunk=(1, 2), interleave=interleave, transpose=transpose
            ),
            f"{ours}down_proj.weight": Source(name=down, expert=True, transpose=transpose),
        }
    )


def expected(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return what a parameter of the first layer must be, from the one-tensor-per-expert spelling."""
    layer = "model.layers.0."
    experts = [
        {end: tensors[f"{layer}mlp.experts.{e}.{end}_proj.weight"] for end in ("gate", "up", "down")}
        for e in range(EXPERTS)
    ]
    return {
        "embed.weight": lambda: tensors["model.embed_tokens.weight"],
        "layers.0.mixer.qkv.weight": lambda: torch.cat(
            [tensors[f"{layer}self_attn.{x}_proj.weight"] for x in ("q", "k", "v")]
        ),
        "layers.0.mixer.conv.weight": lambda: tensors[f"{layer}self_attn.conv.weight"][:, 0],
        "layers.0.mixer.A_log": lambda: tensors[f"{layer}self_attn.A_log"][0, 0, :, 0],
        "layers.0.ffn.experts.gate_up": lambda: torch.stack([torch.cat([x["gate"], x["up"]]) for x in experts]),
        "layers.0.ffn.experts.down": lambda: torch.stack([x["down"] for x in experts]),
        "head.weight": lambda: tensors["lm_head.weight"],
    }[name]()


CHECKED = (
    "embed.weight",
    "layers.0.mixer.qkv.weight",
    "layers.0.mixer.conv.weight",
    "layers.0.mixer.A_log",
    "layers.0.ffn.experts.gate_up",
    "layers.0.ffn.experts.down",
    "head.weight",
)


def planned(folder: Path, model: Module, names: NameMap = DECODER) -> tuple[LoadPlan, Checkpoint]:
    checkpoint = Checkpoint.open(folder)
    return resolve(targets(model), names, checkpoint), checkpoint


def loaded(folder: Path, names: NameMap = DECODER) -> Decoder:
    model = Decoder()
    plan, checkpoint = planned(folder, model, names)
    load_into(plan, checkpoint)
    return model


def all_meta(model: nn.Module) -> bool:
    return all(parameter.is_meta for parameter in model.parameters())
