"""port new, status and report on the command line: what they print, write, and refuse."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import Run

Tiny = Callable[[str], Path]


@pytest.fixture
def file(tmp_path: Path, tiny: Tiny, run: Run) -> Path:
    """Return a drafted port of the tiny llama."""
    path = tmp_path / "newmodel.py"
    assert run("port", "new", str(tiny("llama")), "-o", str(path)).code == 0
    return path


def test_new_writes_a_port_and_says_what_comes_next(tmp_path: Path, tiny: Tiny, run: Run) -> None:
    path = tmp_path / "newmodel.py"
    result = run("port", "new", str(tiny("llama")), "-o", str(path))
    assert result.code == 0
    assert f"next  firstlight port status {path} {tiny('llama')}" in result.out
    assert "layers 0-3  GQA + GLU" in result.out
    compile(path.read_text(), str(path), "exec")


def test_new_as_json_is_one_document(tmp_path: Path, tiny: Tiny, run: Run) -> None:
    path = tmp_path / "newmodel.py"
    data = run("port", "new", str(tiny("llama")), "-o", str(path), "--json").data()
    assert data["file"] == str(path)
    assert data["text"] == path.read_text()
    assert data["unread_keys"] == []


def test_new_keeps_a_file_that_is_there(file: Path, tiny: Tiny, run: Run) -> None:
    file.write_text("# mine\n")
    result = run("port", "new", str(tiny("llama")), "-o", str(file))
    assert result.code == 2
    assert "the file is there already" in result.refusal()
    assert file.read_text() == "# mine\n"
    assert run("port", "new", str(tiny("llama")), "-o", str(file), "--force").code == 0
    assert "def arch(cfg" in file.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["port", "new", "MODEL"], "--output"),
        (["port", "new", "MODEL", "-o", "DIR/port.txt"], "must end in .py"),
        (["port", "new", "MODEL", "-o", "DIR/none/port.py"], "no folder"),
        (["port", "new", "DIR/nowhere", "-o", "DIR/port.py"], "no model at"),
        (["port", "new", "CONFIG", "-o", "DIR/port.py"], "needs weights"),
        (["port", "new", "kimi-linear-48b-a3b", "-o", "DIR/port.py"], "needs weights"),
        (["port", "status", "DIR/none.py", "MODEL"], "no such port file"),
        (["port", "status", "DIR", "MODEL"], "the port file is a folder"),
        (["port", "status", "FILE"], "MODEL"),
        (["port", "status", "FILE", "MODEL", "--reference", "nobody"], "unknown reference"),
        (["port", "status", "FILE", "DIR/nowhere"], "no model at"),
        (["port", "report", "FILE", "MODEL", "--html", "DIR/none/x.html"], "no folder"),
        (["port", "nonsense"], "nonsense"),
    ],
)
def test_bad_input_is_refused_in_labelled_lines(
    tmp_path: Path, file: Path, tiny: Tiny, run: Run, words: list[str], told: str
) -> None:
    alone = tmp_path / "config.json"
    alone.write_text((tiny("llama") / "config.json").read_text())
    places = {"MODEL": str(tiny("llama")), "CONFIG": str(alone), "FILE": str(file)}
    result = run(*(places.get(word, word.replace("DIR", str(tmp_path))) for word in words))
    assert result.code == 2, result.out + result.err
    assert told.lower() in result.refusal().lower()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_new_into_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, tiny: Tiny, run: Run) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert "no permission" in run("port", "new", str(tiny("llama")), "-o", str(locked / "x.py")).refusal()


def test_status_is_1_until_the_list_is_empty(file: Path, tiny: Tiny, run: Run) -> None:
    whole = run("port", "status", str(file), str(tiny("llama")))
    assert whole.code == 0
    assert whole.out.startswith("complete: ")
    file.write_text(file.read_text().replace('layout="half"', 'layout="interleave"'))
    left = run("port", "status", str(file), str(tiny("llama")))
    assert left.code == 1
    assert "divergence: layers.0.mixer" in left.out
    data = run("port", "status", str(file), str(tiny("llama")), "--json").data()
    assert data["complete"] is False
    assert [item["kind"] for item in data["items"]] == ["divergence"]


def test_status_without_a_comparison_says_unproven(file: Path, tiny: Tiny, run: Run) -> None:
    result = run("port", "status", str(file), str(tiny("llama")), "--reference", "none")
    assert result.code == 0
    assert "unproven" in result.out


def test_report_is_written_as_page_and_as_data(tmp_path: Path, file: Path, tiny: Tiny, run: Run) -> None:
    page, data = tmp_path / "port.html", tmp_path / "port.json"
    result = run("port", "report", str(file), str(tiny("llama")), "--html", str(page), "--output", str(data))
    assert result.code == 0
    found = json.loads(data.read_text())
    assert found["passed"] is True
    assert {part["origin"] for part in found["parts"]} == {"reuse"}
    assert found["lines"]["total"] == file.read_text().count("\n")
    assert found["status"]["proof"]["passed"] is True
    html = page.read_text()
    assert "complete and proven" in html
    assert "https://" not in html


def test_inspect_shows_the_draft_of_an_unknown_model(
    tmp_path: Path, tiny: Tiny, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("inspect", str(tiny("deepseek_v4")), "--json")
    assert result.code == 3
    drafted = result.data()["draft"]
    assert {part["part"]: part["origin"] for part in drafted["parts"]}["hyper-connections(4)"] == "reuse"
    assert sum(part["flops_share"] for part in drafted["parts"]) == pytest.approx(1, abs=0.01)
    assert "new" in {part["origin"] for part in drafted["parts"]}
