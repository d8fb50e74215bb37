"""The to-do list of a port: each kind of fault is one item of its kind, and nothing else is on the list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from port.made import folder
from safetensors.torch import load_file, save_file

from firstlight.errors import FirstlightError
from firstlight.models import registry
from firstlight.models.deadline import deadline
from firstlight.port.draft import draft
from firstlight.port.status import Item, status, todos
from firstlight.weights.source import locate

Tiny = Callable[[str], Path]


@pytest.fixture
def port(tmp_path: Path, tiny: Tiny) -> Path:
    """Return a complete port of the tiny llama, drafted."""
    file = tmp_path / "newmodel.py"
    file.write_text(draft(locate(str(tiny("llama")))).text)
    return file


def edited(file: Path, old: str, new: str) -> Path:
    """Replace a text that must be there."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return file


def only(model: Path, file: Path, reference: str = "none") -> Item:
    """Return the one item of a port."""
    (item,) = status(str(model), file, reference=reference).items
    return item


def test_a_complete_port_has_an_empty_list_and_a_proof(tiny: Tiny, port: Path) -> None:
    found = status(str(tiny("llama")), port)
    assert found.complete
    assert found.proof is not None
    assert found.proof.passed
    assert found.proof.independent
    assert found.to_dict()["complete"] is True


def test_a_mark_is_an_item_with_its_line_and_all_its_words(tiny: Tiny, port: Path) -> None:
    edited(port, "def arch(", "# todo: decide whether the second\n#    line belongs to it\n# it does not\ndef arch(")
    item = only(tiny("llama"), port)
    assert (item.kind, item.what) == ("todo", "decide whether the second line belongs to it")
    line = int(item.where.rpartition(":")[2])
    assert port.read_text().splitlines()[line - 1].startswith("# todo: decide")


def test_a_mark_in_a_string_is_none(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text('text = "# todo: no"\nx = 1  # todo: yes\n')
    assert [item.what for item in todos(file)] == ["yes"]


def test_a_key_that_nothing_reads_is_an_item(tiny: Tiny, port: Path) -> None:
    edited(port, 'cfg.expect("hidden_act", "silu")', "pass")
    item = only(tiny("llama"), port)
    assert item.kind == "config key"
    assert item.what.startswith("hidden_act = silu")


def test_a_nested_key_that_nothing_reads_is_an_item(tmp_path: Path) -> None:
    where = folder(tmp_path / "m", extra={"a": 1, "b": 2})
    file = tmp_path / "newmodel.py"
    file.write_text(draft(locate(str(where))).text)
    edited(file, "    norm = Norm(", '    cfg.section("extra").expect("a", 1)\n    norm = Norm(')
    assert only(where, file).what == "extra.b = 2 is not read"


NOUN = """
from dataclasses import dataclass
from firstlight.spec.noun import NewNoun

@dataclass(frozen=True)
class Squeeze(NewNoun):
    label = "squeeze"

    def operators(self):
        return ("linear", "squeeze")

    def weights(self, hidden_size):
        return ()

    def forward(self, x_TH, weights, ctx):
        return ctx.ops.squeeze(x_TH)


def arch("""


def test_an_operator_that_nobody_has_is_an_item(tiny: Tiny, port: Path) -> None:
    edited(edited(port, "def arch(", NOUN.lstrip()), "(mlp(cfg),)", "(Squeeze(),)")
    operators = [item for item in status(str(tiny("llama")), port).items if item.kind == "operator"]
    assert [item.what for item in operators] == ["no operator squeeze"]
    assert "register" in operators[0].fix


def test_tensors_and_parameters_without_each_other_are_items_by_pattern(tiny: Tiny, port: Path) -> None:
    edited(port, "NAMES = DECODER", 'NAMES = DECODER.extend({"layers.{i}.mixer.o_proj": "{body}layers.{i}.wo"})')
    found = status(str(tiny("llama")), port, reference="none").items
    assert [item.kind for item in found] == ["parameter", "tensor"]
    assert found[0].what == "no tensor fills layers.{n}.mixer.o_proj.weight"
    assert "model.layers.0.wo.weight" in found[0].fix
    assert found[1].what.startswith("model.layers.{n}.self_attn.o_proj.weight [")
    assert found[0].where == found[1].where == "layers 0-3"


def test_a_wrong_size_is_an_item_with_both_shapes(tiny: Tiny, port: Path) -> None:
    edited(port, 'intermediate_size=cfg.positive("intermediate_size")', "intermediate_size=100")
    found = status(str(tiny("llama")), port, reference="none").items
    assert {item.kind for item in found} >= {"shape"}
    assert any("[64, 128], the declaration needs [64, 100]" in item.what for item in found)


def test_the_first_divergence_is_an_item_with_the_command_that_repeats_it(tiny: Tiny, port: Path) -> None:
    edited(port, 'layout="half"', 'layout="interleave"')
    item = only(tiny("llama"), port, "transformers")
    assert item.kind == "divergence"
    assert item.what.startswith("layers.0.mixer: relative error")
    assert item.fix.startswith(f"firstlight verify {tiny('llama')} --layers 0 ")
    assert f"--port {port}" in item.fix


def test_without_an_independent_reference_a_notice_says_so(tmp_path: Path) -> None:
    where = folder(tmp_path / "m")
    file = tmp_path / "newmodel.py"
    file.write_text(draft(locate(str(where))).text)
    found = status(str(where), file)
    assert found.complete
    assert found.proof is None
    assert any("nothing was compared" in notice for notice in found.notices)
    ours = status(str(where), file, reference="ref")
    assert ours.complete
    assert any("stays unproven" in notice for notice in ours.notices)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def arch(cfg:\n", "SyntaxError"),
        ("import no_such_module_here\n", "ModuleNotFoundError"),
        ("NAMES = 1\n\n\ndef arch(cfg):\n    return None\n", "NAMES"),
        ("x = 1\n", "lacks"),
        ("raise SystemExit(0)\n", "SystemExit"),
        ("while True:\n    pass\n", "does not come to an end"),
        ("while True:\n    try:\n        pass\n    except Exception:\n        pass\n", "does not come to an end"),
    ],
)
def test_a_file_that_is_no_port_is_one_item(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, what: str
) -> None:
    monkeypatch.setattr(registry, "deadline", lambda seconds: deadline(0.5))
    file = tmp_path / "newmodel.py"
    file.write_text(text)
    item = only(tiny("llama"), file)
    assert item.kind == "file"
    assert what in f"{item.what} {item.fix}"


def test_arch_that_raises_or_loops_is_one_item(tiny: Tiny, port: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "deadline", lambda seconds: deadline(0.5))
    text = port.read_text()
    edited(port, "    norm = Norm(", "    1 / 0\n    norm = Norm(")
    assert "ZeroDivisionError" in only(tiny("llama"), port).what
    port.write_text(text.replace("    norm = Norm(", "    while True:\n        pass\n    norm = Norm(", 1))
    assert "does not come to an end" in only(tiny("llama"), port).what


def test_a_model_that_cannot_be_read_is_an_error_and_no_item(tmp_path: Path, port: Path, tiny: Tiny) -> None:
    with pytest.raises(FirstlightError, match="no model at"):
        status(str(tmp_path / "nowhere"), port)
    alone = tmp_path / "config.json"
    alone.write_text((tiny("llama") / "config.json").read_text())
    with pytest.raises(FirstlightError, match="needs weights"):
        status(str(alone), port)


def test_a_tensor_of_the_checkpoint_that_is_new_is_an_item(tmp_path: Path) -> None:
    where = folder(tmp_path / "m")
    file = tmp_path / "newmodel.py"
    file.write_text(draft(locate(str(where))).text)
    tensors = load_file(where / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.bias"] = tensors["model.norm.weight"].clone()
    save_file(tensors, where / "model.safetensors")
    item = only(where, file)
    assert (item.kind, item.where) == ("tensor", "layer 1")
    assert item.what == "model.layers.{n}.self_attn.q_proj.bias [32] has no place"
