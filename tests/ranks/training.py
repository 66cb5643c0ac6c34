"""What the tests of training share: FSDP2 around a split model, and one-device steps to compare
with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests import models
from tests.compare import dp_index
from tests.model_t import ids_of_t, labels_with_targets


def split(model: Any, mesh: Any, **options: Any) -> Any:
    """`autosp.parallelize`, imported where it is used: the package is loaded on the ranks only."""
    import autosp_dtensor as autosp

    return autosp.parallelize(model, mesh, **options)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, by the names that the families of the zoo give them."""
    for path in ("blocks", "layers", "h", "model.layers", "transformer.h", "gpt_neox.layers"):
        found: Any = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return list(found.values() if isinstance(found, nn.ModuleDict) else found)
    raise AssertionError(f"no blocks in {type(model).__name__}")


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """`fully_shard` on every block and on the root, over dp and sp together."""
    import autosp_dtensor as autosp

    over = autosp.fsdp_mesh(mesh)
    for block in blocks_of(model):
        fully_shard(block, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def parallelize_then_shard(model: nn.Module, mesh: Any) -> nn.Module:
    import autosp_dtensor as autosp

    return shard(autosp.parallelize(model, mesh), mesh)


def shard_then_parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    import autosp_dtensor as autosp

    return autosp.parallelize(shard(model, mesh), mesh)


def batches_of_t(count: int = 2, length: int = 16) -> list[dict[str, Tensor]]:
    """One batch of two rows for each dp index; rows and the number of their targets differ."""
    ids = ids_of_t(2 * count, length)
    slots = [(0, 7, 8, 9, 10, 11), (2, 9, 11), range(length - 1), (5,)]
    labels = labels_with_targets(ids, [slots[row % 4] for row in range(2 * count)])
    return [{"ids": ids[i : i + 2], "labels": labels[i : i + 2]} for i in range(0, 2 * count, 2)]


def batches_of_llama(count: int = 2) -> list[dict[str, Tensor]]:
    ids = models.random_ids(2 * count)
    return [
        {"input_ids": ids[i : i + 2], "labels": models.uneven_labels(ids[i : i + 2])}
        for i in range(0, 2 * count, 2)
    ]


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter in full, on every rank."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train_one_device(
    build: Callable[[], nn.Module], batches: list[dict[str, Tensor]], steps: int
) -> tuple[nn.Module, list[list[float]]]:
    """AdamW on the mean of the losses of all batches; returns the model and, by step, the loss of
    each batch."""
    model = build()
    optimizer = adamw(model)
    losses = []
    for _ in range(steps):
        each = [model(**batch).loss for batch in batches]
        torch.stack(each).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return model, losses


def train_on_ranks(
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    mesh: Any,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """The same loop on the ranks; returns the loss of this rank's batch by step."""
    batch = batches[dp_index(mesh) % len(batches)]
    optimizer = optimizer or adamw(model)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def equal_on_all_ranks(state: dict[str, Tensor]) -> None:
    """Bit for bit: what rank 0 has is what this rank has."""
    for name, value in state.items():
        first = value.clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(first, value), name


def assert_state_close(
    model: nn.Module, reference: nn.Module, rtol: float = 1e-9, atol: float = 1e-12
) -> None:
    want = dict(reference.named_parameters())
    for name, value in whole_state(model).items():
        torch.testing.assert_close(value, want[name].detach(), rtol=rtol, atol=atol, msg=name)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the package logs meanwhile, one entry a record."""
    logger, handler = logging.getLogger("autosp_dtensor"), _Lines()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
