"""On a CUDA device: memory is given up, copies run beside the computation, gradients are equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import DeviceType, ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import autosp_dtensor as autosp
from autosp_dtensor.api import forward_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS, WIDTH, LENGTH = 12, 2048, 8192
TINY = 1 << 20  # so that all inputs have to leave
INPUT = LENGTH * WIDTH * 2  # bytes of a layer's input, bf16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.to("cuda", torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield init_device_mesh("cuda", (1,), mesh_dim_names=("sp",))
    finally:
        dist.destroy_process_group()


def stepped(mesh: DeviceMesh, **options: Any) -> tuple[list[Tensor], int, Any]:
    """(gradients, most bytes allocated in a step beyond those at its start, the model)."""
    model = autosp.parallelize(Stack(), mesh, **options)
    x = torch.randn(1, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).backward()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], peak, model


def test_inputs_leave_the_device_and_gradients_are_equal(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain, most, _ = stepped(mesh, checkpoint="full")
    torch.manual_seed(1)
    moved, least, model = stepped(
        mesh, checkpoint="full", memory_budget=TINY, offload=LAYERS * INPUT
    )
    host = forward_of(model).host  # type: ignore[union-attr]
    assert host is not None and host.peak == LAYERS * INPUT and host.now == 0 and host.late == 0
    assert most - least >= (LAYERS - 4) * INPUT
    for a, b in zip(moved, plain, strict=True):
        assert torch.equal(a, b)


def test_copies_run_beside_kernels(mesh: DeviceMesh) -> None:
    """Most of the copies' time, some kernel runs as well."""
    _, _, model = stepped(mesh, checkpoint="full", memory_budget=TINY, offload=LAYERS * INPUT)
    x = torch.randn(1, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        model(x).backward()
        torch.cuda.synchronize()
    spans = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in seen.events()
        if e.device_type == DeviceType.CUDA
    ]
    copies = [s for s in spans if "Memcpy" in s[0] and ("DtoH" in s[0] or "HtoD" in s[0])]
    kernels = [s for s in spans if "Memcpy" not in s[0] and "Memset" not in s[0]]
    assert len(copies) >= 2 * (LAYERS - 1)
    total = sum(end - start for _, start, end in copies)
    hidden = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for _, start, end in copies
        for _, other_start, other_end in kernels
    )
    assert hidden >= 0.7 * total
