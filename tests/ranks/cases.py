"""What the tests of FIELD-CASES.md share: model T on the ranks, and targets by slot."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests import models
from tests.compare import assert_same_as_one_device
from tests.model_t import IGNORED, TConfig, ids_of_t, labels_with_targets
from tests.pool import Rank


def checked(value: float) -> Any:
    """A figure of the file, as far as it is written out there."""
    return pytest.approx(value, abs=5.1e-4)


def t_on_ranks(rank: Rank, config: TConfig, batch: dict[str, Tensor]) -> float:
    want = assert_same_as_one_device(
        rank, partial(models.build_t, config), batch, rank.mesh(sp=rank.world_size)
    )
    assert want.loss is not None
    return want.loss.item()


def batch_with(slots: Any, rows: int = 1, **more: Tensor) -> dict[str, Tensor]:
    ids = ids_of_t(rows)
    return {"ids": ids, "labels": labels_with_targets(ids, slots), **more}


def shifted(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
