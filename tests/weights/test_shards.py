"""Every way in which a folder is not a checkpoint ends in an error that says what to do."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from firstlight.errors import FirstlightError
from firstlight.weights.checkpoint import Checkpoint

TENSORS = {f"t{i}": torch.full((4, 4), float(i)) for i in range(6)}
INDEX = "model.safetensors.index.json"


def refused(folder: Path) -> FirstlightError:
    with pytest.raises(FirstlightError) as caught:
        Checkpoint.open(folder)
    assert caught.value.where and caught.value.fix
    return caught.value


def test_absent_folder_is_named(tmp_path: Path) -> None:
    fault = refused(tmp_path / "nowhere")
    assert "no such" in fault.what and "nowhere" in fault.where


def test_file_instead_of_folder_points_to_its_folder(save: Callable[..., Path]) -> None:
    folder = save(TENSORS)
    assert str(folder) in refused(folder / "model.safetensors").fix


def test_empty_folder_asks_for_safetensors(tmp_path: Path) -> None:
    fault = refused(tmp_path)
    assert "no safetensors" in fault.what and INDEX in fault.why


def test_pickled_weights_are_named_and_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    fault = refused(tmp_path)
    assert "pytorch_model.bin" in fault.why and "pickles are not loaded" in fault.why and "convert" in fault.fix


def test_shards_without_their_index_ask_for_it(save: Callable[..., Path]) -> None:
    folder = save(TENSORS, num_shards=2)
    (folder / INDEX).unlink()
    fault = refused(folder)
    assert "model-00001-of-00002.safetensors" in fault.why and INDEX in fault.fix


def test_absent_shards_are_all_listed(save: Callable[..., Path]) -> None:
    folder = save(TENSORS, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").unlink()
    fault = refused(folder)
    assert fault.what.startswith("2 of 3")
    assert "model-00002-of-00003" in fault.what and "model-00003-of-00003" in fault.what
    assert "model-00001-of-00003" not in fault.what


def test_link_to_nowhere_is_an_absent_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    fault = refused(tmp_path)
    assert "absent: model.safetensors" in fault.what and "link" in fault.why


def test_single_file_may_be_a_link(save: Callable[..., Path], tmp_path: Path) -> None:
    blob = save(TENSORS) / "model.safetensors"
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(blob.rename(tmp_path / "blob"))
    assert sorted(Checkpoint.open(folder).names()) == sorted(TENSORS)


def test_tensor_absent_from_its_shard_is_named_with_the_shard(save: Callable[..., Path]) -> None:
    folder = save(TENSORS, num_shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert refused(folder).why == "ghost (model-00002-of-00002.safetensors)"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../a.safetensors"}}',
        '{"weight_map": {"a": "/a.safetensors"}}',
    ],
)
def test_broken_index_is_an_error_even_beside_a_single_file(save: Callable[..., Path], text: str) -> None:
    folder = save(TENSORS)
    (folder / INDEX).write_text(text)
    fault = refused(folder)
    assert "index" in fault.what and fault.where == str(folder / INDEX)


def test_index_that_is_not_text_is_broken(save: Callable[..., Path]) -> None:
    folder = save(TENSORS)
    (folder / INDEX).write_bytes(b"\xff\xfe\x00")
    assert "index" in refused(folder).what


@pytest.mark.parametrize("keep", [0, 7, 20, -1])
def test_truncated_file_is_an_error_at_open(save: Callable[..., Path], keep: int) -> None:
    file = save(TENSORS) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    fault = refused(file.parent)
    assert "damaged or cut off" in fault.what and fault.where == str(file)


def test_truncated_shard_is_an_error_at_open(save: Callable[..., Path]) -> None:
    folder = save(TENSORS, num_shards=3)
    file = folder / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert refused(folder).where == str(file)


def test_git_lfs_pointer_is_recognised(save: Callable[..., Path]) -> None:
    file = save(TENSORS) / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")
    assert "git lfs pull" in refused(file.parent).fix


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything; step down for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("locked", ["file", "index", "folder"])
def test_no_read_permission_is_named(locked: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        save_file(TENSORS, folder / "model.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}))
        path = {"file": folder / "model.safetensors", "index": folder / INDEX, "folder": folder}[locked]
        path.chmod(0o000)
        with as_nobody():
            fault = refused(folder)
        path.chmod(0o755)
    assert "no permission" in fault.what and path.name in fault.what


def test_index_decides_over_a_stray_file_of_the_same_names(save: Callable[..., Path]) -> None:
    folder = save(TENSORS, num_shards=2)
    save_file({name: torch.ones(3, dtype=torch.int32) for name in TENSORS}, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert {checkpoint.shape(name) for name in checkpoint.names()} == {(4, 4)}
    assert {checkpoint.dtype(name) for name in checkpoint.names()} == {"F32"}
    assert checkpoint.notices == ("model.safetensors is not used: the index does not name it",)


def test_stray_file_beside_a_single_file_is_noticed(save: Callable[..., Path]) -> None:
    folder = save(TENSORS)
    save_file({"x": torch.ones(3)}, folder / "consolidated.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert "x" not in checkpoint and "consolidated.safetensors" in checkpoint.notices[0]


def test_tensors_the_index_does_not_name_are_noticed(save: Callable[..., Path]) -> None:
    folder = save(TENSORS, num_shards=2)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["t4"]
    (folder / INDEX).write_text(json.dumps(index))
    checkpoint = Checkpoint.open(folder)
    assert "t4" not in checkpoint and "t4" in checkpoint.notices[0]


def test_nothing_to_notice_gives_no_notice(save: Callable[..., Path]) -> None:
    assert Checkpoint.open(save(TENSORS)).notices == ()
    assert Checkpoint.open(save(TENSORS, num_shards=2, folder="other")).notices == ()
