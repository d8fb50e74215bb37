"""The operator table, rows and cache views."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from firstlight.errors import FirstlightError
from firstlight.ops.paged.cache import Paged
from firstlight.ops.registry import Impl, OperatorTable
from firstlight.ops.rows import Rows
from firstlight.spec.bind import BindContext


def test_the_table_is_made_without_importing_torch() -> None:
    make = "from firstlight.ops.registry import operator_table; operator_table()"
    code = f"import sys; {make}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_absorbed_mla_is_preferred_for_decode_and_says_why_not_otherwise(table: OperatorTable) -> None:
    absorbed = table["mla"].impls[0]
    assert absorbed.name == "absorbed"
    assert absorbed.rejects(BindContext(stage="decode", dtype="bfloat16", device="cpu")) is None
    assert "decode" in (absorbed.rejects(BindContext(stage="prefill", dtype="bfloat16", device="cpu")) or "")


def test_bodies_are_ordered_by_rank_and_replaced_by_name() -> None:
    table = OperatorTable()
    table.register("op", "text", Impl("ref", "m:f"), Impl("eager", "m:g", rank=10))
    table.register("op", "", Impl("fast", "m:h", rank=20), Impl("eager", "m:k", rank=10))
    assert [impl.target for impl in table["op"].impls] == ["m:h", "m:k", "m:f"]
    assert table["op"].summary == "text"


def test_an_operator_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference lands first"):
        OperatorTable().register("op", "text", Impl("eager", "m:f"))


def test_unknown_names_list_the_choices_and_the_nearest(table: OperatorTable) -> None:
    with pytest.raises(FirstlightError) as failure:
        table["rms_nrom"]
    assert "rms_norm" in str(failure.value)
    with pytest.raises(FirstlightError, match="no implementation") as failure:
        table["mla"].impl("absorb")
    assert "absorbed" in str(failure.value)


def test_rows_flatten_tokens_and_keep_empty_rows() -> None:
    rows = Rows.of([(3, 2), (7, 0), (0, 1)])
    assert rows.num_tokens == 3
    assert not rows.is_decode
    assert rows.positions_T.tolist() == [3, 4, 0]
    assert rows.row_T.tolist() == [0, 0, 2]
    assert rows.offsets.tolist() == [0, 2, 2, 3]
    assert list(rows.spans()) == [(0, 3, 2, slice(0, 2)), (1, 7, 0, slice(2, 2)), (2, 0, 1, slice(2, 3))]
    assert Rows.of([(3, 1), (0, 0)]).is_decode
    with pytest.raises(ValueError, match="n >= 0"):
        Rows.of([(0, -1)])


def test_a_paged_cache_reads_entries_in_the_order_of_its_table() -> None:
    cache = Paged(torch.arange(8.0).view(4, 2, 1), torch.tensor([[3, 1], [2, 0]], dtype=torch.int32))
    assert cache.slots(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0])).tolist() == [7, 2, 4]
    assert cache.read(0, 3)[:, 0].tolist() == [6.0, 7.0, 2.0]
    assert cache.read(1, 0).shape == (0, 1)


def test_uninitialised_memory_is_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert torch.empty(3, dtype=dtype).float().isnan().all()
        assert torch.empty_like(torch.ones(3, dtype=dtype)).float().isnan().all()
    assert torch.empty(3, device="meta").device.type == "meta"
