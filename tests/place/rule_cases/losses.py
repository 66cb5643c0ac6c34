"""Losses over classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, f, i, u


def _tokens(call: Callable[..., Tensor], **options: Any) -> list[Case]:
    flat = (call(f(8, 5)), i(8, high=5))
    rows = (call(f(4, 5, 8)), i(4, 8, high=5))
    return [
        Case(_reduced(**options, reduction="sum"), flat, "x.,x"),
        Case(_reduced(**options, reduction="none"), flat, "x.,x"),
        Case(_reduced(**options, reduction="mean"), flat, "..,."),
        Case(_reduced(**options, reduction="sum", ignore_index=1), rows, "x.x,xx"),
        Case(_reduced(**options, reduction="none", ignore_index=1), rows, "x.x,xx"),
    ]


def _reduced(name: str, **options: Any) -> Callable[..., Tensor]:
    return lambda *t: getattr(F, name)(*t, **options)


LOSSES: dict[str, list[Case]] = {
    "cross_entropy": [
        *_tokens(lambda x: x, name="cross_entropy"),
        Case(_reduced("cross_entropy", reduction="sum"), (f(8, 5), i(8), u(5)), "x.,x,."),
        Case(
            _reduced("cross_entropy", reduction="sum", label_smoothing=0.1), (f(8, 5), i(8)), "x.,x"
        ),
        Case(_reduced("cross_entropy", reduction="sum"), (f(8, 5), u(8, 5)), "x.,x."),
        Case(_reduced("cross_entropy", reduction="none"), (f(4, 5, 8), u(4, 5, 8)), "x.x,x.x"),
        Case(_reduced("cross_entropy", reduction="sum"), (f(5), torch.tensor(2)), ".,"),
    ],
    "nll_loss": _tokens(lambda x: x.log_softmax(1), name="nll_loss"),
    "target_weight": [
        Case(
            lambda x, y: F.cross_entropy(x, y, ignore_index=1),
            (f(4, 5, 8), i(4, 8)),
            "xx",
            canonical=True,
        ),
        Case(
            lambda x, y, w: F.cross_entropy(x, y, w, ignore_index=1),
            (f(8, 5), i(8), u(5)),
            "x,.",
            canonical=True,
        ),
    ],
}
