"""With its port hidden, a model is taken apart, drafted, completed and proven from its folder alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from port.hidden import PATCHES, completed, drafted, hide

from firstlight.engine.assemble import declare
from firstlight.models.known import known_ports
from firstlight.ops.registry import operator_table
from firstlight.port.status import status
from firstlight.spec.evidence import recognise
from firstlight.spec.parts import fold_layers
from firstlight.verify.run import VerifyOptions, verify
from firstlight.weights.checkpoint import Checkpoint

Tiny = Callable[[str], Path]
MODELS = ["qwen3_moe", "deepseek_v32", "kimi_linear", "glm_moe_dsa", "glm5_next", "qwen3_next", "nemotron_h"]
MAX_ITEMS = 10
TOLERANCE = 2e-5

# what the names alone must betray: a word of each part's meaning
PARTS = {
    "qwen3_moe": ["grouped-query", "norm on queries", "mixture of experts", "rotary"],
    "deepseek_v32": ["latent attention", "index branch", "mixture of experts", "shared expert", "groups", "rotary"],
    "kimi_linear": ["per channel (KDA)", "latent attention", "mixture of experts", "shared expert", "selection bias"],
    "glm_moe_dsa": ["latent attention", "index branch", "selection shared", "mixture of experts"],
    "glm5_next": ["per channel (KDA)", "index keys pooled", "hyper-connections", "clamped", "other modalities"],
    "qwen3_next": [
        "per head (gated DeltaNet)",
        "grouped per key head",
        "gate on the shared expert",
        "part of the head",
    ],
    "nemotron_h": ["state-space", "one operation", "squared ReLU", "latent width", "selection bias", "grouped-query"],
}


@pytest.mark.parametrize("name", MODELS)
def test_the_names_of_a_hidden_model_betray_its_parts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    hide(monkeypatch, name)
    from firstlight.weights.source import locate

    source = locate(str(tiny(name)))
    with Checkpoint.open(tiny(name)) as checkpoint:
        names = checkpoint.names()
    known = known_ports()
    assert name not in known
    found = recognise(source.raw, names, known=known, operators=operator_table().names())
    meanings = " | ".join(finding.meaning for finding in found.findings)
    assert [part for part in PARTS[name] if part not in meanings] == []
    assert found.lacking_operators == ()
    assert all(finding.sources for finding in found.findings)


@pytest.mark.parametrize("evidence", ["class", "names"])
@pytest.mark.parametrize("name", MODELS)
def test_a_hidden_model_is_drafted_completed_and_proven(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, evidence: str
) -> None:
    built_in = declare(str(tiny(name))).arch
    file = tmp_path / "newmodel.py"
    made = drafted(monkeypatch, tiny(name), name=name, evidence=evidence, file=file)
    assert made.arch is not None
    # the same parts in the same layers
    assert fold_layers(made.arch) == fold_layers(built_in)
    found = status(str(tiny(name)), file)
    assert len(found.items) <= MAX_ITEMS
    patch = PATCHES / f"{name}.{evidence}.patch"
    assert found.complete == (not patch.exists()), [item.what for item in found.items]
    completed(file, patch)
    declared = declare(str(tiny(name)), port_file=file)
    proof = verify(declared, declared.plan(), VerifyOptions(tolerance=TOLERANCE))
    assert proof.independent
    assert proof.passed, proof.first_divergence
    if patch.exists():
        # the list is empty exactly when the port is complete
        assert status(str(tiny(name)), file).complete
