"""Which inputs have a sequence that can be split; the others are refused before all else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosp_dtensor as autosp
from tests.run.fake_group import fake_mesh

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))


class Embedded(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(16, 8)


class Pooled(nn.Module):
    """Images [B, C, H, W] to one vector each."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 4, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images).mean((2, 3))


def test_sequence_shorter_than_the_axis_is_refused_with_this_text() -> None:
    with fake_mesh(4) as mesh:
        model = autosp.parallelize(Embedded(), mesh, check_ranks=False)
        with pytest.raises(autosp.PlacementError) as error:
            model(IDS[:, :3])
        with torch.no_grad():
            assert model(IDS[:, :3]).shape == (2, 3, 8)
    assert str(error.value) == (
        "dim 1 of the inputs has 3 entries, fewer than mesh axis 'sp' has ranks (4).\n"
        "  node  Embedded\n"
        "  have  i64[2, 3]\n"
        "  why   dim 1 is taken as the sequence (seq_dim=1), and every rank holds at least one "
        "entry of it\n"
        "  fix   if it is the sequence, use a smaller sp, or longer (packed) sequences; if it is "
        "not (the channels of images), pass seq_dim=; under torch.no_grad() short calls run "
        "unsharded"
    )


def test_dim_that_is_no_sequence_is_not_called_one() -> None:
    with fake_mesh(4) as mesh, pytest.raises(autosp.PlacementError) as error:
        autosp.parallelize(Pooled(), mesh, check_ranks=False)(torch.ones(2, 3, 16, 16))
    first, node, have, why, fix = str(error.value).split("\n")
    assert first == "dim 1 of the inputs has 3 entries, fewer than mesh axis 'sp' has ranks (4)."
    assert (node, have) == ("  node  Pooled", "  have  f32[2, 3, 16, 16]")
    assert "a sequence of 3" not in str(error.value)
    assert "(seq_dim=1)" in why and "(the channels of images), pass seq_dim=" in fix


@pytest.mark.parametrize(
    ("inputs", "have"),
    [((IDS[0],), "i64[12]"), ((torch.ones(2, 8),), "f32[2, 8]"), ((3,), "3"), ((), "no arguments")],
)
def test_call_without_a_sequence_is_refused_with_this_text(inputs: Any, have: str) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, *args: Tensor) -> Tensor:
            return self.scale * len(args)

    with fake_mesh(2) as mesh, pytest.raises(autosp.PlacementError) as error:
        autosp.parallelize(Takes(), mesh, check_ranks=False)(*inputs)
    assert str(error.value) == (
        "no input has a sequence at dim 1.\n"
        "  node  Takes\n"
        f"  have  {have}\n"
        "  why   there is nothing to split: every rank would compute all of it\n"
        "  fix   pass seq_dim= to parallelize: 1 for [B, S], 0 for [S, B]"
    )
