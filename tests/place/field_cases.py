"""Model T of FIELD-CASES.md in one process: all ranks simulated, loss, logits and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosp_dtensor.graph import facts
from autosp_dtensor.tree import flatten
from tests.model_t import Attention, ModelT, TConfig, ids_of_t, labels_with_targets
from tests.pieces import glue
from tests.simulate import Lowered, Ranks, assert_program_equals_whole

ALL = range(15)


def checked(value: float) -> Any:
    """A figure of the file, as far as it is written out there."""
    return pytest.approx(value, abs=5.1e-4)


def batch_with(slots: Any = ALL, rows: int = 1, length: int = 16, **more: Any) -> dict[str, Any]:
    """Ids, and labels of which the targets in `slots` count."""
    ids = ids_of_t(rows, length)
    return {"ids": ids, "labels": labels_with_targets(ids, slots), **more}


def t_with(kind: type[Attention], config: TConfig | None = None) -> ModelT:
    """Model T whose attention is of another kind; its weights are the same."""
    model = ModelT(config or TConfig())
    for block in model.blocks:
        block.attention.__class__ = kind
    return model


def loss_of(model: nn.Module | TConfig, n: int, batch: dict[str, Any]) -> float:
    """The loss of one device, once the program of n ranks was found equal to it."""
    model = ModelT(model) if isinstance(model, TConfig) else model
    assert_program_equals_whole(model, (), n, **batch)
    return model(**batch).loss.item()


def results(program: Lowered, *tensors: Tensor) -> list[Tensor]:
    """What a program gives on other tensors of the same shapes."""
    parts = Ranks(program.n, program.state).run(program.root, [[x] * program.n for x in tensors])
    output = next(node for node in program.flat.nodes if node.op == "output")
    return [glue(each, p) for each, p in zip(parts, facts(output).placements, strict=True)]


def assert_reach_only(
    program: Lowered, call: dict[str, Any], ids: Tensor, unchanged: Sequence[tuple[int, slice]]
) -> None:
    """Other ids leave these (row, positions) of the logits as they were, bit for bit, and not all
    of the rest."""
    before = logits_of(program, call)
    after = logits_of(program, {k: ids if x is call["ids"] else x for k, x in call.items()})
    for row, positions in unchanged:
        assert torch.equal(before[row, positions], after[row, positions]), (row, positions)
    assert not torch.equal(before, after)


def logits_of(program: Lowered, call: dict[str, Any]) -> Tensor:
    """The whole logits that a split program gives for a call, by keywords, of its shapes."""
    given: list[Tensor] = []
    for leaf in flatten(((), call))[0]:
        if isinstance(leaf, Tensor) and not any(leaf is each for each in given):
            given.append(leaf)
    return next(value for value in results(program, *given) if value.ndim == 3)
