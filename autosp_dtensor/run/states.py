"""Parameters, buffers and attributes, read on the live module when a program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import UsageError
from ..graph import Origin

__all__ = ["state_reader"]


def state_reader(
    live: nn.Module | None, origin: Origin, consts: dict[str, torch.Tensor]
) -> Callable[[], Any]:
    """Reads a parameter, buffer or attribute on the live module at each call: FSDP2 swaps them."""
    if origin.kind == "const":
        value = consts[origin.name]
        return lambda: value
    assert live is not None
    module, name = live.get_submodule(origin.module), origin.name
    if origin.kind == "attr":
        return lambda: module.__dict__[name]
    if origin.kind == "buffer":
        return lambda: module._buffers[name]
    parameters = module._parameters

    def read() -> Any:
        value = parameters[name]
        if isinstance(value, DTensor):
            raise _not_gathered(origin, value)
        return value

    return read


def _not_gathered(origin: Origin, part: DTensor) -> UsageError:
    path = f"{origin.module}.{origin.name}".lstrip(".")
    return UsageError(
        f"{path} is read where FSDP2 has not gathered it.",
        where=path,
        have=f"a part {tuple(part.to_local().shape)} of {tuple(part.shape)}",
        why="a module with its own fully_shard has whole parameters in its own call alone, and "
        "another module reads this one; or it is under tensor parallelism, which is not supported",
        fix=f"shard the modules that read it as one unit, fully_shard([a, b]), or leave "
        f"{origin.module or 'the root'} to the unit around both",
    )
