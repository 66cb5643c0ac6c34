"""DTensors in and out of a program, on a fake group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import autosp_dtensor as autosp
from autosp_dtensor.errors import MeshError
from autosp_dtensor.graph import Meta
from autosp_dtensor.placement import Replicate, Shard
from autosp_dtensor.run.border import as_dtensor, placement_on, to_local
from tests.run.fake_group import fake_mesh


def _given(mesh, placement, shape=(2, 7, 4), local=(2, 3, 4)) -> DTensor:
    return DTensor.from_local(
        torch.zeros(local), mesh, [placement], run_check=False, shape=torch.Size(shape),
        stride=torch.zeros(shape).stride(),
    )  # fmt: skip


def test_placement_of_an_input_is_the_chunks_that_dtensor_means() -> None:
    with fake_mesh(3) as mesh:
        assert placement_on(mesh, _given(mesh, TorchShard(1))) == Shard(1, (3, 3, 1))
        assert placement_on(mesh, _given(mesh, TorchShard(-2))) == Shard(1, (3, 3, 1))
        whole = _given(mesh, TorchReplicate(), local=(2, 7, 4))
        assert placement_on(mesh, whole) == Replicate()


def test_input_that_is_a_sum_still_owed_is_refused_with_this_text() -> None:
    with fake_mesh(3) as mesh:
        owed = _given(mesh, TorchPartial(), local=(2, 7, 4))
        with pytest.raises(MeshError) as error:
            placement_on(mesh, owed)
    line = error.traceback[0].lineno + 1
    assert str(error.value) == (
        f"an input is a DTensor with placement {owed.placements[0]}.\n"
        f"  where the call (test_border.py:{line})\n"
        f"  have  (2, 7, 4) {owed.placements}\n"
        "  why   a program takes whole values and values sharded on one dim\n"
        "  fix   redistribute it to Shard or Replicate first"
    )


def test_input_on_another_mesh_is_refused() -> None:
    with fake_mesh(2, 2, names=("dp", "sp")) as mesh:
        other = _given(mesh["dp"], TorchShard(0), local=(1, 7, 4))
        with pytest.raises(MeshError) as error:
            placement_on(mesh["sp"], other)
    first, *_, fix = str(error.value).split("\n")
    assert first == "an input is a DTensor on another mesh than the sp axis."
    assert fix == '  fix   pass the whole tensor (x.full_tensor()), or a DTensor on mesh["sp"]'


@pytest.mark.parametrize("shape", [(2, 7, 4), (1, 7, 4), (2, 7, 0)])
def test_result_has_the_shape_and_strides_of_one_device(shape: tuple[int, ...]) -> None:
    with fake_mesh(3, rank=2) as mesh:
        meta = Meta(shape, torch.float32, torch.device("cpu"))
        local = torch.zeros(shape[0], 1, shape[2])
        result = as_dtensor(local, mesh, meta, Shard(1, (3, 3, 1)))
    assert tuple(result.shape) == shape
    assert result.stride() == torch.zeros(shape).stride()
    assert result.placements == (TorchShard(1),)
    assert result.to_local().shape == local.shape


def test_plain_tensor_is_its_own_local_part() -> None:
    x = torch.ones(2)
    assert to_local(x) is x


def test_split_result_is_given_back_as_a_dtensor_on_the_sequence_axis() -> None:
    with fake_mesh(2, 2, names=("dp", "sp")) as mesh:
        split = autosp.parallelize(lambda x: (x * 2, x.sum()), mesh, check_ranks=False)
        doubled, total = split(torch.ones(2, 5, 3))
        assert isinstance(doubled, DTensor) and doubled.device_mesh == mesh["sp"]
        assert tuple(doubled.shape) == (2, 5, 3) and doubled.placements == (TorchShard(1),)
        assert type(total) is Tensor


def test_split_input_goes_in_without_being_made_whole() -> None:
    with fake_mesh(2) as mesh:
        split = autosp.parallelize(lambda x: x * 2, mesh, check_ranks=False)
        given = _given(mesh, TorchShard(1), shape=(2, 6, 4))
        result = split(given)
        assert isinstance(result, DTensor) and result.to_local().shape == (2, 3, 4)
