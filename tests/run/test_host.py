"""How much of a machine's memory a rank takes for values that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosp_dtensor.run import host as hosts
from tests.run.fake_group import fake_mesh


def test_ranks_of_a_machine_share_it_and_the_least_part_counts() -> None:
    rows = [("a", 1000), ("a", 900), ("b", 4000), ("b", 4000)]
    assert hosts.least_part(rows, 1) == int(900 * 0.8 / 2)
    assert hosts.least_part(rows, 2) == int(900 * 0.8 / 4)
    assert hosts.least_part([("a", 1000)] * 8, 1) == 100


def test_what_is_free_is_what_the_machine_and_the_control_group_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_CONTROL_GROUP", tmp_path)
    machine = hosts.free_bytes()
    assert machine > 1 << 20
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert hosts.free_bytes() > 1 << 20
    (tmp_path / "memory.max").write_text("5000\n")
    assert hosts.free_bytes() == 4000


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 2)])
def test_every_rank_of_the_mesh_counts(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "free_bytes", lambda: 10_000)
    with fake_mesh(*sizes, names=("dp", "sp")[-len(sizes) :]) as mesh:
        assert hosts.host_bytes(mesh) == 8_000 // mesh.size()
