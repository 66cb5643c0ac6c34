"""On a CUDA device: hashes are made and copied without waiting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autosp_dtensor.run.content import OneCallLate, content, reader_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def inputs(seed: int) -> list[tuple[str, Tensor]]:
    torch.manual_seed(seed)
    ids = torch.randint(1000, (2, 3000), device="cuda")
    x = torch.randn(3, (1 << 20) + 7, device="cuda")  # more than one part
    return [("ids", ids), ("x", x), ("mask", ids > 500), ("count", torch.tensor(seed))]


def test_nothing_waits_for_the_device_before_the_next_call() -> None:
    reader = reader_for("cuda")
    assert isinstance(reader, OneCallLate)
    first, second = inputs(0), inputs(1)
    reader.of_call("warm", first)  # tables and pinned memory are made once
    assert reader.pending() is not None
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * 10**9)
    asleep = torch.cuda.Event()
    asleep.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert reader.of_call("first", first) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not asleep.query()
    seen = reader.of_call("second", second)
    assert asleep.query() and seen is not None and seen.late
    assert seen.hashes == [int(content(t)) for _, t in first]
    now = reader.pending()
    assert now is not None and now.hashes == [int(content(t)) for _, t in second]
    assert now.hashes[:3] != seen.hashes[:3]


def test_every_place_counts_and_equal_copies_agree() -> None:
    for name, tensor in inputs(0)[:3]:
        other = tensor.clone()
        assert int(content(other)) == int(content(tensor)), name
        other[-1, -1] = ~other[-1, -1] if other.dtype == torch.bool else other[-1, -1] + 1
        assert int(content(other)) != int(content(tensor)), name


def test_inputs_may_change_once_the_call_has_begun() -> None:
    reader, given = reader_for("cuda"), inputs(0)
    before = [int(content(t)) for _, t in given]
    reader.of_call("first", given)
    for _, tensor in given:
        tensor.zero_()
    seen = reader.pending()
    assert seen is not None and seen.hashes == before
