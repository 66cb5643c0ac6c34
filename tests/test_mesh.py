"""Which axis is the sequence, which mesh FSDP2 gets, and which rows a rank reads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autosp_dtensor as autosp
from autosp_dtensor.errors import MeshError, UsageError
from autosp_dtensor.mesh import sp_mesh
from tests.run.fake_group import fake_mesh


def text_of(error: Any) -> str:
    return re.sub(r"\.py:\d+", ".py:LINE", str(error.value))


def _sizes(mesh: Any) -> tuple[int, ...]:
    return tuple(mesh.shape)


def test_sequence_mesh_is_the_axis_of_that_name() -> None:
    with fake_mesh(2, 3, names=("dp", "sp")) as mesh:
        assert _sizes(sp_mesh(mesh, "sp")) == (3,)
        assert _sizes(sp_mesh(mesh, "dp")) == (2,)
    with fake_mesh(4, names=("sp",)) as mesh:
        assert sp_mesh(mesh, "sp") is mesh


def test_mesh_without_the_axis_is_refused_with_this_text() -> None:
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh, pytest.raises(MeshError) as error:
        autosp.parallelize(nn.Linear(2, 2), mesh)
    assert text_of(error) == (
        "the mesh has no axis 'sp'.\n"
        "  where parallelize (test_mesh.py:LINE)\n"
        "  have  axes ('dp', 'cp') of sizes (2, 2)\n"
        "  why   sequences are split over that axis\n"
        '  fix   init_device_mesh(..., mesh_dim_names=("dp", "sp")), or pass sp_axis='
    )


def test_something_else_than_a_mesh_is_refused_with_this_text() -> None:
    with pytest.raises(MeshError) as error:
        autosp.parallelize(nn.Linear(2, 2), 4)  # type: ignore[arg-type]
    assert text_of(error) == (
        "parallelize needs a DeviceMesh, got int.\n"
        "  where parallelize (test_mesh.py:LINE)\n"
        "  have  4\n"
        "  why   it tells which ranks share a sequence\n"
        '  fix   mesh = init_device_mesh("cuda", (dp, sp), mesh_dim_names=("dp", "sp"))'
    )


@pytest.mark.parametrize(
    ("sizes", "names", "want"),
    [
        ((4,), ("sp",), (4,)),
        ((2, 3), ("dp", "sp"), (6,)),
        ((3, 2), ("sp", "dp"), (6,)),
        ((1, 4), ("dp", "sp"), (4,)),
        ((4, 1), ("dp", "sp"), (4,)),
        ((2, 2, 2), ("dp_replicate", "dp", "sp"), (2, 4)),
        ((2, 3), ("dp_replicate", "sp"), (2, 3)),
        ((2, 2, 2), ("pp", "dp", "sp"), (4,)),
        ((2, 2, 2), ("dp", "sp", "tp"), (4,)),
        ((2, 3), ("pp", "sp"), (3,)),
        ((2, 3), ("dp_shard", "sp"), (6,)),
        ((2, 3), ("data", "sp"), (6,)),
        ((3, 2), ("sp", "fsdp"), (6,)),
        ((2, 2, 2), ("data", "sp", "tp"), (4,)),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "sp"), (2, 4)),
    ],
)
def test_fsdp_mesh_joins_data_and_sequence(
    sizes: tuple[int, ...], names: tuple[str, ...], want: tuple[int, ...]
) -> None:
    with fake_mesh(*sizes, names=names) as mesh:
        assert _sizes(autosp.fsdp_mesh(mesh)) == want


def test_fsdp_mesh_is_the_same_when_asked_for_again() -> None:
    with fake_mesh(2, 2, names=("dp", "sp")) as mesh:
        first, second = autosp.fsdp_mesh(mesh), autosp.fsdp_mesh(mesh)
        assert first == second
        assert sorted(first.mesh.flatten().tolist()) == [0, 1, 2, 3]


def test_axes_may_have_other_names() -> None:
    with fake_mesh(2, 3, names=("data", "seq")) as mesh:
        joined = autosp.fsdp_mesh(mesh, sp_axis="seq", dp_axis="data")
        assert _sizes(joined) == (6,)
        with pytest.raises(MeshError, match="no axis 'sp'"):
            autosp.fsdp_mesh(mesh)


@pytest.mark.parametrize("rank", range(6))
def test_ranks_of_one_sequence_read_the_same_rows(rank: int) -> None:
    with fake_mesh(2, 3, names=("dp", "sp"), rank=rank) as mesh:
        assert autosp.data_shard(mesh) == (2, rank // 3)


@pytest.mark.parametrize(
    ("names", "have"),
    [
        (("rows", "sp"), "axes ('rows', 'sp')"),
        (("data", "dp_shard", "sp"), "axes ('data', 'dp_shard', 'sp')"),
    ],
)
def test_data_axis_that_cannot_be_told_is_refused_with_this_text(
    names: tuple[str, ...], have: str
) -> None:
    """Silently leaving it out would average gradients over sp alone."""
    for use in (autosp.fsdp_mesh, autosp.data_shard, _parallelized):
        with fake_mesh(*(2 for _ in names), names=names) as mesh:
            with pytest.raises(MeshError) as error:
                use(mesh)
        name = "parallelize" if use is _parallelized else use.__name__
        assert text_of(error) == (
            "the mesh has no axis 'dp'.\n"
            f"  where {name} (test_mesh.py:LINE)\n"
            f"  have  {have}\n"
            "  why   gradients are averaged over sp and the data axis together\n"
            "  fix   name the data axis: dp_axis="
        )


def _parallelized(mesh: Any) -> None:
    autosp.parallelize(nn.Linear(2, 2), mesh)


@pytest.mark.parametrize("rank", range(8))
def test_both_data_axes_divide_rows(rank: int) -> None:
    with fake_mesh(2, 2, 2, names=("dp_replicate", "sp", "dp"), rank=rank) as mesh:
        assert autosp.data_shard(mesh) == (4, (rank // 4) * 2 + rank % 2)


@pytest.mark.parametrize("model_axis", ["tp", "pp", "ep", "cp"])
@pytest.mark.parametrize("rank", range(8))
def test_ranks_of_a_model_axis_read_the_same_rows(rank: int, model_axis: str) -> None:
    with fake_mesh(2, 2, 2, names=("dp", "sp", model_axis), rank=rank) as mesh:
        assert autosp.data_shard(mesh) == (2, rank // 4)
    with fake_mesh(4, 2, names=("sp", model_axis), rank=rank) as mesh:
        assert autosp.data_shard(mesh) == (1, 0)


@pytest.mark.parametrize("rank", range(4))
def test_data_axis_of_another_name_divides_rows(rank: int) -> None:
    with fake_mesh(2, 2, names=("data", "sp"), rank=rank) as mesh:
        assert autosp.data_shard(mesh) == (2, rank // 2)
    with fake_mesh(2, 2, names=("rows", "sp"), rank=rank) as mesh:
        assert autosp.data_shard(mesh, dp_axis="rows") == (2, rank // 2)


def test_sequence_alone_reads_all_rows() -> None:
    with fake_mesh(3, names=("sp",), rank=2) as mesh:
        assert autosp.data_shard(mesh) == (1, 0)


def _refused(*args: Any, **kwargs: Any) -> str:
    with fake_mesh(2, 2, names=("dp", "sp")) as mesh, pytest.raises(UsageError) as error:
        autosp.parallelize(*args, mesh, **kwargs)
    return text_of(error)


def test_arguments_are_checked_with_these_texts() -> None:
    assert _refused(3) == (
        "parallelize takes a module or a callable, got int.\n"
        "  where parallelize (test_mesh.py:LINE)\n"
        "  have  3\n"
        "  why   there is no forward to trace\n"
        "  fix   pass the model itself, or a function of tensors such as a loss function"
    )
    assert _refused(nn.Linear(2, 2), seq_dim=-1) == (
        "seq_dim is a dim counted from the left, got -1.\n"
        "  where parallelize (test_mesh.py:LINE)\n"
        "  have  seq_dim=-1\n"
        "  why   all inputs have the sequence at the same place from the left\n"
        "  fix   1 for [B, S], 0 for [S, B]"
    )
    assert _refused(nn.Linear(2, 2), dp_axis="sp") == (
        "sp_axis and dp_axis are both 'sp'.\n"
        "  where parallelize (test_mesh.py:LINE)\n"
        "  have  axes ('dp', 'sp') of sizes (2, 2)\n"
        "  why   ranks of the one share a sequence, ranks of the other have rows of their own\n"
        "  fix   name two axes; a mesh without a data axis needs no dp_axis="
    )


@pytest.mark.parametrize("check_ranks", [1, None, "yes"])
def test_check_ranks_is_true_or_false(check_ranks: Any) -> None:
    text = _refused(nn.Linear(2, 2), check_ranks=check_ranks)
    assert text.startswith(
        f"check_ranks is True or False, got {check_ranks!r}.\n  where parallelize ("
    )


@pytest.mark.parametrize("seq_dim", [-1, True, 1.0, "1", None])
def test_seq_dim_is_a_number_from_the_left(seq_dim: Any) -> None:
    text = _refused(nn.Linear(2, 2), seq_dim=seq_dim)
    assert text.startswith(
        f"seq_dim is a dim counted from the left, got {seq_dim!r}.\n  where parallelize ("
    )


def test_module_in_ddp_is_refused_with_this_text() -> None:
    with fake_mesh(2, names=("sp",)) as mesh, pytest.raises(MeshError) as error:
        autosp.parallelize(DistributedDataParallel(nn.Linear(2, 2)), mesh)
    assert text_of(error) == (
        "parallelize got a module that DDP has wrapped.\n"
        "  where parallelize (test_mesh.py:LINE)\n"
        "  have  DistributedDataParallel around a Linear\n"
        "  why   DDP reduces gradients around the module; the sequence is split inside it\n"
        "  fix   parallelize the module first, then wrap it: DDP(autosp.parallelize(model, mesh), "
        "process_group=autosp.fsdp_mesh(mesh).get_group())"
    )


def test_module_is_parallelized_once() -> None:
    with fake_mesh(2, names=("sp",)) as mesh:
        model = nn.Sequential(nn.Linear(2, 2))
        autosp.parallelize(model, mesh)
        with pytest.raises(MeshError) as error:
            autosp.parallelize(model, mesh)
        assert text_of(error) == (
            "the model is parallelized already.\n"
            "  where parallelize (test_mesh.py:LINE)\n"
            "  have  parallelized: the model\n"
            "  why   its sequence would be split twice\n"
            "  fix   call parallelize once, on the outermost module that takes whole sequences"
        )
        with pytest.raises(MeshError, match=r"0 is parallelized already\."):
            inner = nn.Sequential(nn.Linear(2, 2))
            autosp.parallelize(inner[0], mesh)
            autosp.parallelize(inner, mesh)


def test_module_on_the_meta_device_is_refused_with_this_text() -> None:
    with fake_mesh(2, names=("sp",)) as mesh:
        with torch.device("meta"):
            model = nn.Embedding(4, 4)
        autosp.parallelize(model, mesh, check_ranks=False)
        with pytest.raises(MeshError) as error:
            model(torch.zeros(1, 4, dtype=torch.int64))
    assert text_of(error) == (
        "parameter weight is on the meta device.\n"
        "  where Embedding\n"
        "  have  parameter weight on meta, input 0 on cpu\n"
        "  why   it has no data\n"
        '  fix   materialize the model first: model.to_empty(device="cuda"), then initialize it'
    )
