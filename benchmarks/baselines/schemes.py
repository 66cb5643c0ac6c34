"""Ways to train one of transformers' models by hand: (model, mesh, ids) -> inputs, as
`autosp_dtensor.plan.measure.Setting.scheme` takes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .attention import use_group
from .compiled import compile_blocks

__all__ = ["BASELINES", "Baseline", "split_rows"]


class Baseline:
    """attention: a name of `attention.NAMES`; all but "plain" split the sequence over sp.

    full: every block in torch.utils.checkpoint, as transformers does it. compiled: blocks and loss
    as torch.compile partitions them.
    """

    def __init__(self, attention: str, *, full: bool = False, compiled: bool = False) -> None:
        self.attention, self.full, self.compiled = attention, full, compiled

    @property
    def splits(self) -> bool:
        return self.attention != "plain"

    def __call__(
        self, model: nn.Module, mesh: DeviceMesh, ids: torch.Tensor, labels: Any = None
    ) -> dict[str, torch.Tensor]:
        whole: Any = model
        whole.config._attn_implementation = self.attention
        labels = ids if labels is None else labels
        group = mesh["sp"].get_group()
        use_group(group)
        if self.compiled:
            compile_blocks(whole, self.full)
        elif self.full:
            whole.train()
            whole.gradient_checkpointing_enable({"use_reentrant": False})
        if not self.splits:
            return {"input_ids": ids, "labels": labels}
        return split_rows(ids, labels, mesh["sp"].get_local_rank(), mesh["sp"].size())


def split_rows(
    ids: torch.Tensor, labels: torch.Tensor, rank: int, n: int
) -> dict[str, torch.Tensor]:
    """What rank `rank` of n is called with: its part of the sequence, labels shifted before the
    cut, positions of the whole, and the count of all targets: gradients are to be summed over ranks
    (FSDP2: `set_gradient_divide_factor`).
    """
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    part = slice(rank * (ids.shape[1] // n), (rank + 1) * (ids.shape[1] // n))
    return {
        "input_ids": ids[:, part].clone(),
        "labels": labels[:, part].clone(),
        "shift_labels": shifted[:, part].clone(),
        "position_ids": positions[:, part].clone(),
        "num_items_in_batch": (shifted != -100).sum(),
    }


def _twice(name: str, attention: str, full: bool) -> dict[str, Baseline]:
    return {
        name: Baseline(attention, full=full),
        f"{name}, compiled": Baseline(attention, full=full, compiled=True),
    }


BASELINES: dict[str, Baseline] = {
    **_twice("FSDP2", "plain", False),
    **_twice("FSDP2 + full checkpointing", "plain", True),
    **_twice("Ulysses by hand", "ulysses", False),
    **_twice("Ulysses by hand + full checkpointing", "ulysses", True),
    **_twice("gathered keys and values", "gathered", False),
    **_twice("gathered keys and values + full checkpointing", "gathered", True),
}
