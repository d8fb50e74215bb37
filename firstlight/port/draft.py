"""Drafts a port: a declaration from the tensors, the config keys and the reference of a model nobody has ported.

It is written in two rounds: the first is run to learn which config keys it reads and which parameters it has; the
second adds what becomes of the other keys, and the names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from firstlight.engine.assemble import Declared
from firstlight.errors import FirstlightError
from firstlight.layers.decoder import Decoder
from firstlight.layers.parameter import targets
from firstlight.models.registry import Port, find_port
from firstlight.port import feedforwards, mixers, names
from firstlight.port.compose import Parts, compose
from firstlight.port.leftover import leftovers
from firstlight.port.mixers import Skeleton
from firstlight.port.observe import Observation, observe
from firstlight.port.text import GUESS, Call
from firstlight.port.values import epsilon, needed, norm, size
from firstlight.spec.arch import ArchSpec
from firstlight.spec.names import Rule
from firstlight.spec.parts import fold_layers, ranges
from firstlight.spec.read import read_config
from firstlight.weights.source import ModelSource

NONE = "NOTHING"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A drafted port. why: what keeps it from declaring anything, "" if it runs. unread: config keys left open."""

    seen: Observation
    text: str
    arch: ArchSpec | None
    port: Port | None
    unread: tuple[str, ...]
    why: str = ""

    def patterns(self) -> list[tuple[str, str]]:
        """Return (what layers are, which layers) of the declaration, folded."""
        return [(pattern, ranges(layers)) for pattern, layers in fold_layers(self.arch)] if self.arch else []

    def guesses(self) -> list[str]:
        """Return what was guessed and by which evidence, in the order of the file."""
        lines = self.text.splitlines()
        found = []
        for number, line in enumerate(lines):
            if line.strip().startswith(GUESS):
                said = [line.strip().removeprefix(GUESS)]
                while lines[number + len(said)].strip().startswith("#"):
                    said.append(lines[number + len(said)].strip().removeprefix("#").strip())
                found.append(f"{lines[number + len(said)].strip().rstrip(',')}: {' '.join(said)}")
        return found

    def declared(self, source: ModelSource) -> Declared:
        """Return the model as the draft declares it. Raises: FirstlightError if it declares nothing."""
        if self.arch is None or self.port is None:
            raise FirstlightError("the draft declares nothing yet", where=source.where, why=self.why)
        return Declared(source=source, port=self.port, arch=self.arch, table=self.port.operators())

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        layers = [{"pattern": pattern, "layers": where} for pattern, where in self.patterns()]
        return {
            "text": self.text,
            "layers": layers,
            "guesses": self.guesses(),
            "unread_keys": list(self.unread),
            "why": self.why,
        }


def draft(source: ModelSource) -> Draft:
    """Return the draft of a model's port. Raises: FirstlightError if there are no tensors in layers."""
    seen = observe(source)
    parts = Parts(
        seen=seen,
        mixers=variants([mixers.draft_mixer(seen, i) for i in range(len(seen.layers))]),
        ffns=variants([feedforwards.draft_ffn(seen, i) for i in range(len(seen.layers))]),
        norm=layer_norm(seen),
        final_norm=final_norm(seen),
        residual=residual(seen),
        sizes=sizes(seen),
    )
    try:
        arch, port, unread = run(compose(parts), source)
    except FirstlightError as error:
        return Draft(seen=seen, text=compose(parts), arch=None, port=None, unread=(), why=error.what)
    complete = not any(isinstance(one, Skeleton) for made, _ in (parts.mixers, parts.ffns) for one in made.values())
    statements, rest = leftovers(seen, unread, port.operators().names(), complete=complete)
    pairing = names.pair(targets(Decoder.build(arch, torch.float32)), seen)
    made: Mapping[str, Rule] = names.rules(pairing.pairs)
    parts = replace(parts, statements=tuple(statements), unread=tuple(rest), rules=made, pairing=pairing)
    text = compose(parts)
    arch, port, unread = run(text, source)
    return Draft(seen=seen, text=text, arch=arch, port=port, unread=tuple(unread))


def run(text: str, source: ModelSource) -> tuple[ArchSpec, Port, list[str]]:
    """Return what a port's text declares for a model, and the keys it leaves unread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "draft.py"
        path.write_text(text, encoding="utf-8")
        port = find_port(source.model_type, port_file=path, where=source.where)
        cfg = read_config(source.raw, where=source.where)
        arch = port.arch(cfg)
    return arch, port, list(cfg.unknown())


def variants(found: Sequence[Call | Skeleton | None]) -> tuple[Mapping[str, Call | Skeleton], tuple[str, ...]]:
    """Return (the different declarations by label, the label of each layer)."""
    made: dict[str, Call | Skeleton] = {}
    layers = []
    for one in found:
        if one is None:
            layers.append(NONE)
            continue
        label = next((label for label, other in made.items() if other == one), None)
        if label is None:
            base = label_of(one)
            label = base if base not in made else f"{base}_{sum(key.startswith(base) for key in made) + 1}"
            made[label] = one
        layers.append(label)
    return made, tuple(layers)


def label_of(one: Call | Skeleton) -> str:
    """Return the name of the function that declares a noun."""
    if isinstance(one, Skeleton):
        return one.operator
    if one.noun == "MLAttention" and "indexer" in one.args:
        index = one.args["indexer"].code
        return "shared_sparse_mla" if isinstance(index, Call) and "mode" in index.args else "sparse_mla"
    if one.noun == "DeltaRule":
        decay = one.args["decay"].code
        return "kda" if isinstance(decay, Call) and decay.args["granularity"].code == '"channel"' else "gated_delta_net"
    plain = {"GQAttention": "attention", "MLAttention": "mla", "Mamba2": "mamba2", "MoE": "experts", "GLU": "mlp"}
    return plain[one.noun]


def layer_norm(seen: Observation) -> Call:
    """Return the norm of the layers: that of the first one."""
    names = [name for name in seen.layers[0].norms if name.endswith(".weight")]
    path = names[0].removesuffix(".weight") if names else "input_layernorm"
    return norm(seen, 0, path, biased=f"{path}.bias" in seen.layers[0].norms)


def final_norm(seen: Observation) -> Call:
    """Return the norm after the layers."""
    named = [name for name in seen.outside if "norm" in name or "ln_f" in name]
    path = named[0].rpartition(".")[0].rpartition(".")[2] if named else "norm"
    biased = any(name.endswith(f"{path}.bias") for name in named)
    return norm(seen, None, path, biased=biased)


def residual(seen: Observation) -> Call:
    """Return the residual topology."""
    fn = seen.layers[0].rest.get("hc_attn_fn")
    if fn is None:
        return Call("PreNorm")
    call = Call("HyperConnections")
    call.set("mult", size(seen, fn[1] // seen.hidden, "hc_mult", shape=f"hc_attn_fn has {fn[1]} columns"))
    call.set("sinkhorn_iters", needed(seen, "hc_sinkhorn_iters", what="Sinkhorn iterations"))
    call.set("eps", 'cfg.require("hc_eps", float)' if seen.value("hc_eps") is not None else "1e-6")
    return call.set("norm_eps", epsilon(seen, 0, "hc_attn"))


def sizes(seen: Observation) -> Call:
    """Return the fields of the ArchSpec that are plain sizes."""
    embedding = next((shape for name, shape in seen.outside.items() if "emb" in name and len(shape) == 2), (0, 0))
    call = Call("ArchSpec").set("model_type", f'"{seen.source.model_type}"')
    call.set("vocab_size", size(seen, embedding[0], "vocab_size", shape=f"the embedding has {embedding[0]} rows"))
    call.set("hidden_size", size(seen, seen.hidden, "hidden_size", shape="width of the embedding"))
    return call.set("max_position_embeddings", needed(seen, "max_position_embeddings", what="the longest context"))
