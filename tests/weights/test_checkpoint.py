"""Parts of tensors: which values, and from which bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firstlight.errors import FirstlightError
from firstlight.spec.names import Candidate, Source
from firstlight.weights.checkpoint import Checkpoint, part_shape

FUSED = torch.arange(3 * 4 * 6, dtype=torch.float32).reshape(3, 4, 6)

# (source, expert) -> the part of FUSED
PARTS = [
    (Source(name="x"), None, FUSED),
    (Source(name="x", expert=True), 2, FUSED[2]),
    (Source(name="x", expert=True, chunk=(0, 2)), 1, FUSED[1, :2]),
    (Source(name="x", expert=True, chunk=(1, 2)), 1, FUSED[1, 2:]),
    (Source(name="x", expert=True, chunk=(1, 2), interleave=True), 1, FUSED[1, 1::2]),
    (Source(name="x", expert=True, transpose=True), 0, FUSED[0].T),
    (Source(name="x", expert=True, transpose=True, chunk=(2, 3)), 0, FUSED[0].T[4:]),
    (Source(name="x", expert=True, transpose=True, chunk=(1, 2), interleave=True), 2, FUSED[2].T[1::2]),
    (Source(name="x", chunk=(1, 3)), None, FUSED[1:2]),
    (Source(name="x", transpose=True), None, FUSED.transpose(1, 2)),
]


def mappings(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


@pytest.mark.parametrize(("source", "expert", "expected"), PARTS)
def test_part_has_the_values_and_the_shape_announced(
    save: Callable[..., Path], source: Source, expert: int | None, expected: torch.Tensor
) -> None:
    candidate = Candidate(name="x", source=source, expert=expert)
    with Checkpoint.open(save({"x": FUSED})) as checkpoint:
        part = checkpoint.read(candidate)
        assert torch.equal(part, expected)
        assert part_shape(checkpoint.shape("x"), candidate) == tuple(expected.shape)


@pytest.mark.parametrize(
    ("source", "expert", "shape"),
    [
        (Source(name="x", expert=True), 3, (3, 4, 6)),
        (Source(name="x", expert=True), 0, ()),
        (Source(name="x", chunk=(0, 2)), None, (3, 4, 6)),
        (Source(name="x", chunk=(0, 2)), None, ()),
        (Source(name="x", transpose=True), None, (3,)),
    ],
)
def test_part_that_a_tensor_lacks_has_no_shape(source: Source, expert: int | None, shape: tuple[int, ...]) -> None:
    assert part_shape(shape, Candidate(name="x", source=source, expert=expert)) is None


def test_part_that_a_tensor_lacks_is_not_read(save: Callable[..., Path]) -> None:
    checkpoint = Checkpoint.open(save({"x": FUSED}))
    with pytest.raises(ValueError, match="no part"):
        checkpoint.read(Candidate(name="x", source=Source(name="x", expert=True), expert=3))


@pytest.mark.parametrize("num_shards", [0, 1, 3])
def test_names_shapes_and_values_do_not_depend_on_the_number_of_files(
    save: Callable[..., Path], num_shards: int
) -> None:
    tensors = {f"t{i}": torch.full((i + 1, 2), float(i)) for i in range(5)} | {"scalar": torch.tensor(7.0)}
    checkpoint = Checkpoint.open(save(tensors, num_shards=num_shards))
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        whole = checkpoint.read(Candidate(name=name, source=Source(name=name), expert=None))
        assert torch.equal(whole, tensor)


@pytest.mark.parametrize(
    ("dtype", "spelling"), [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")]
)
def test_accepted_format_is_read_as_it_is(save: Callable[..., Path], dtype: torch.dtype, spelling: str) -> None:
    tensor = torch.tensor([1.0, -2.5, 3.0]).to(dtype)
    checkpoint = Checkpoint.open(save({"x": tensor}))
    assert checkpoint.dtype("x") == spelling
    read = checkpoint.read(Candidate(name="x", source=Source(name="x"), expert=None))
    assert read.dtype == dtype and torch.equal(read, tensor)


@pytest.mark.parametrize(
    ("dtype", "spelling"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.uint8, "U8"), (torch.float64, "F64")]
)
def test_other_format_is_refused_with_the_tensor_named(
    save: Callable[..., Path], dtype: torch.dtype, spelling: str
) -> None:
    checkpoint = Checkpoint.open(save({"layer.x": torch.ones(4).to(dtype), "y": torch.ones(4)}))
    assert checkpoint.dtype("layer.x") == spelling
    with pytest.raises(FirstlightError) as caught:
        checkpoint.read(Candidate(name="layer.x", source=Source(name="layer.x"), expert=None))
    assert spelling in caught.value.what and "layer.x" in caught.value.where
    assert torch.equal(checkpoint.read(Candidate(name="y", source=Source(name="y"), expert=None)), torch.ones(4))


def test_open_maps_nothing_and_close_unmaps(save: Callable[..., Path]) -> None:
    folder = save({"x": FUSED})
    whole = Candidate(name="x", source=Source(name="x"), expert=None)
    with Checkpoint.open(folder) as checkpoint:
        assert mappings(folder) == 0
        assert torch.equal(checkpoint.read(whole), FUSED)
        assert mappings(folder) > 0
    assert mappings(folder) == 0


def test_tensor_outlives_the_checkpoint_it_was_read_from(save: Callable[..., Path]) -> None:
    folder = save({"x": FUSED})
    with Checkpoint.open(folder) as checkpoint:
        part = checkpoint.read(Candidate(name="x", source=Source(name="x", expert=True), expert=1))
    assert torch.equal(part, FUSED[1]) and mappings(folder) > 0
    del part
    assert mappings(folder) == 0


def test_closed_checkpoint_can_be_read_again(save: Callable[..., Path]) -> None:
    checkpoint = Checkpoint.open(save({"x": FUSED}))
    whole = Candidate(name="x", source=Source(name="x"), expert=None)
    checkpoint.read(whole)
    checkpoint.close()
    assert torch.equal(checkpoint.read(whole), FUSED)


def test_expert_is_a_view_of_the_file_and_not_a_copy(save: Callable[..., Path]) -> None:
    with Checkpoint.open(save({"x": FUSED})) as checkpoint:
        whole = checkpoint.read(Candidate(name="x", source=Source(name="x"), expert=None))
        part = checkpoint.read(Candidate(name="x", source=Source(name="x", expert=True, chunk=(1, 2)), expert=2))
        assert part.data_ptr() - whole.data_ptr() == (2 * 24 + 12) * 4


def test_shard_deleted_after_open_is_an_error_that_names_it(save: Callable[..., Path]) -> None:
    folder = save({"x": FUSED})
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FirstlightError, match="cannot read") as caught:
        checkpoint.read(Candidate(name="x", source=Source(name="x"), expert=None))
    assert caught.value.where == str(folder / "model.safetensors")
