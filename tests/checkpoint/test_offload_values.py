"""Whatever a region saves comes back from the host as it was, and not before its copy is over."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

import autosp_dtensor as autosp
from autosp_dtensor.api import forward_of
from autosp_dtensor.checkpoint import host as hosts
from autosp_dtensor.errors import UsageError
from tests.checkpoint.test_offload import (
    IDS,
    LABELS,
    LARGE,
    MODES,
    assert_equal,
    gradients,
    made,
    plain,
)
from tests.run.one_rank import mesh  # noqa: F401


class Body(nn.Module):
    """Blocks whose first and last operations save the values that pass between them."""

    def __init__(self, block: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(16, 8, dtype=torch.float64))
        self.blocks = nn.ModuleList(Block(block) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        for each in self.blocks:
            x = each(x)
        return x


class Block(nn.Module):
    def __init__(self, block: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.block = nn.Linear(8, 8, dtype=torch.float64), [block]

    def forward(self, x: Tensor) -> Tensor:
        return self.block[0](self.linear(x.exp()))


def complex_parts(x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(turned.conj() * turned.sin()).flatten(-2).tanh()


BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "softmax of a part": lambda x: torch.cat([x[..., 1:].softmax(-1), x[..., :1].tanh()], -1),
    "complex": complex_parts,
    "bytes": lambda x: x.tanh() * (x > 0),
}


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", BLOCKS)
def test_whatever_a_region_saves_comes_back(
    name: str,
    mode: str,
    mesh: DeviceMesh,  # noqa: F811
) -> None:
    reference = Body(BLOCKS[name])
    ids = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(1))
    model = autosp.parallelize(copy.deepcopy(reference), mesh, checkpoint=mode, offload=LARGE)
    plain_ = autosp.parallelize(copy.deepcopy(reference), mesh, checkpoint=mode)
    for each in (model, plain_):
        each(ids).to_local().sin().sum().backward()
    assert_equal(gradients(model), gradients(plain_))
    host = forward_of(model).host  # type: ignore[union-attr]
    assert host is not None and host.out > 0 and host.now == 0


def test_what_is_changed_while_it_may_be_copied_is_told(mesh: DeviceMesh) -> None:  # noqa: F811
    model = autosp.parallelize(Body(torch.tanh), mesh, checkpoint="none", offload=LARGE)
    result = model(torch.randint(16, (2, 12)))
    with torch.no_grad():
        result.to_local().mul_(2)
    with pytest.raises(UsageError, match="was changed after forward"):
        result.to_local().sum().backward()


class Lazy:
    """As a stream that is as late as it may be: a copy is made when it is waited for, and those
    before it. Memory that comes back holds NaN until then; memory that leaves must still be there.
    """

    name = "lazy"

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.made = 0

    def allocate(self, size: int) -> Any:
        return ctypes.create_string_buffer(size)

    def release(self, buffer: Any) -> None:
        self.wait(len(self.queue))

    def out(self, storage: torch.UntypedStorage, buffer: Any) -> int:
        ref, pointer = StorageWeakRef(storage), storage.data_ptr()

        def copy_() -> None:
            assert not ref.expired()
            ctypes.memmove(buffer, pointer, len(buffer))

        self.queue.append(copy_)
        return len(self.queue)

    def back(self, buffer: Any, storage: torch.UntypedStorage) -> int:
        ref, pointer = StorageWeakRef(storage), storage.data_ptr()
        ctypes.memset(pointer, 0xFF, len(buffer))  # NaN in every floating dtype

        def copy_() -> None:
            assert not ref.expired()
            ctypes.memmove(pointer, buffer, len(buffer))

        self.queue.append(copy_)
        return len(self.queue)

    def wait(self, copied: int | None) -> None:
        while copied is not None and self.made < copied:
            self.made += 1
            self.queue[self.made - 1]()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_read_or_given_up_before_its_copy_is_over(
    mode: str,
    mesh: DeviceMesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Lazy()
    monkeypatch.setattr(hosts, "transport_of", lambda tensor: stream)
    model, host = made(mesh, checkpoint=MODES[mode], offload=LARGE)
    for _ in range(2):
        model.zero_grad()
        loss = model(IDS, LABELS).loss
        loss.backward(retain_graph=True)
        loss.backward()
        assert_equal(gradients(model), plain(mesh, mode, 2))
    model(IDS, LABELS)  # its graph is dropped while copies are under way
    assert host.now == 0 and stream.made > 0
