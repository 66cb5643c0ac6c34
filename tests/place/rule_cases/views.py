"""Operations that rearrange dims or take parts of them."""

from __future__ import annotations

import operator

import torch

from .case import ONE, Case, c, f, i, same, stored, written

VIEWS: dict[str, list[Case]] = {
    "view": [
        Case(lambda x: x.view(4, 48), ONE, "xxx"),
        Case(lambda x: x.view(4, 6, 8), ONE, "xx."),
        Case(lambda x: x.view(4, 8, 2, 3), ONE, "xxx"),
        Case(lambda x: x.view(-1), ONE, "xxx"),
        Case(lambda x: x.view(torch.int64), ONE, "xxx"),
    ],
    "reshape": [
        Case(lambda x: x.reshape(4, 2, 4, 6), ONE, "xxx"),
        Case(lambda x: x.reshape(32, 6), ONE, "xxx"),
        Case(lambda x: x.transpose(0, 1).reshape(32, 6), ONE, "xxx"),
        Case(lambda x: x.reshape(4, 8, 1, 6), ONE, "xxx"),
    ],
    "flatten": [
        Case(torch.flatten, ONE, "xxx"),
        Case(lambda x: x.flatten(1), ONE, "xxx"),
        Case(lambda x: x.flatten(0, 1), ONE, "xxx"),
    ],
    "unflatten": [
        Case(lambda x: x.unflatten(1, (2, 4)), ONE, "xxx"),
        Case(lambda x: x.unflatten(-1, (-1, 3)), ONE, "xxx"),
    ],
    "squeeze": [
        Case(torch.squeeze, (f(4, 1, 8),), "x.x"),
        Case(lambda x: x.squeeze(1), (f(4, 1, 8),), "x.x"),
        Case(lambda x: x.squeeze(0), (f(4, 1, 8),), "x.x"),
    ],
    "unsqueeze": [
        Case(lambda x: x.unsqueeze(1), ONE, "xxx"),
        Case(lambda x: x.unsqueeze(-1), ONE, "xxx"),
    ],
    "view_as": [Case(lambda x, y: x.view_as(y), (f(4, 8), f(32)), "xx,.")],
    "reshape_as": [Case(lambda x, y: x.reshape_as(y), (f(4, 8), f(2, 2, 8)), "xx,...")],
    "ravel": [Case(torch.ravel, ONE, "xxx")],
    "transpose": [
        *same(lambda x: x.transpose(1, 2)),
        *same(lambda x: torch.transpose(x, dim0=0, dim1=-1)),
    ],
    "permute": [
        *same(lambda x: x.permute(2, 0, 1)),
        *same(lambda x: x.permute((0, -1, 1))),
        *same(lambda x: torch.permute(x, dims=(2, 1, 0))),
    ],
    "swapaxes": [
        *same(lambda x: x.swapaxes(1, 2)),
        *same(lambda x: torch.swapaxes(x, axis0=0, axis1=1)),
    ],
    "swapdims": same(lambda x: x.swapdims(0, -1)),
    "movedim": [
        *same(lambda x: x.movedim(0, 2)),
        *same(lambda x: x.movedim((0, 1), (-1, 0))),
        *same(lambda x: torch.movedim(x, source=2, destination=0)),
    ],
    "moveaxis": same(lambda x: x.moveaxis(2, 0)),
    "t": [*same(lambda x: x.t(), f(4, 8)), *same(lambda x: x.t(), f(4))],
    "T": same(lambda x: x.T, f(4, 8)),
    "mT": same(lambda x: x.mT),
    "adjoint": same(lambda x: x.adjoint(), c(4, 8, 6)),
    "mH": same(lambda x: x.mH, c(4, 8, 6)),
    "H": same(lambda x: x.H, c(8, 6)),
    "expand": [
        Case(lambda x: x.expand(4, 8, 6), (f(1, 8, 6),), ".xx"),
        Case(lambda x: x.expand(2, -1, 8, -1), (f(4, 1, 6),), "x.x"),
        Case(lambda x: x.expand((3, 4, 8)), (f(4, 8),), "xx"),
    ],
    "expand_as": [Case(lambda x, y: x.expand_as(y), (f(1, 8, 6), f(4, 8, 6)), ".xx,xxx")],
    "broadcast_to": [
        Case(lambda x: x.broadcast_to((4, 8, 6)), (f(8, 1),), "x."),
        Case(lambda x: torch.broadcast_to(x, size=(4, 8)), (f(8),), "x"),
    ],
    "view_as_complex": [Case(torch.view_as_complex, (f(4, 8, 2),), "xx.")],
    "view_as_real": [Case(torch.view_as_real, (c(4, 8),), "xx")],
}

_ROWS = torch.tensor([3, 0, 2])

INDEX: dict[str, list[Case]] = {
    "getitem": [
        Case(lambda x: x[1], ONE, "xxx"),
        Case(lambda x: x[:, 1:7:2], ONE, "xxx"),
        Case(lambda x: x[:, -3:], ONE, "xxx"),
        Case(lambda x: x[:, 3:3], ONE, "xxx"),
        Case(lambda x: x[:, :-1], ONE, "xxx"),
        Case(lambda x: x[..., 2:4], ONE, "xxx"),
        Case(lambda x: x[:, None, :, 5], ONE, "xxx"),
        Case(lambda x: x[..., None], ONE, "xxx"),
        Case(lambda x: x[None, 1:3, -1], ONE, "xxx"),
        Case(lambda x: x[1, 3], ONE, "xxx"),
        Case(lambda x: x[3, -1, 2], ONE, "xxx"),
        Case(lambda x: x[-1, :, -1], ONE, "xxx"),
        Case(lambda x: x[:, 2], (i(4, 8, 6),), "x.x"),
        Case(lambda x: x[:, [0, 5]], ONE, "x.x"),
        Case(operator.getitem, (f(4, 8), i(2, 6)), ".x,xx"),
        Case(lambda x, k: x[:, k], (f(4, 8, 6), _ROWS), "x.x,x"),
        Case(lambda x, k: x[:, k, 1:3], (f(4, 8, 6), i(8)), "x.x,x"),
        Case(lambda x, k, j: x[k, j], (f(4, 8, 6), i(8), i(8)), "..x,x,x"),
        Case(lambda x, k, j: x[k, j], (f(4, 8, 6), i(4, 1), i(1, 8)), "..x,x.,.x"),
        Case(lambda x, k, j: x[k, :, j], (f(4, 8, 6), i(4), i(4)), ".x.,x,x"),
        Case(lambda x, k: x[k, None, 2:5], (f(4, 8, 6), i(6)), ".xx,x"),
        Case(lambda x, k: x[0, k], (f(4, 8, 6), i(6)), "...,."),
    ],
    "select": [
        Case(lambda x: x.select(1, 2), ONE, "xxx"),
        Case(lambda x: torch.select(x, dim=-1, index=-1), ONE, "xxx"),
        Case(lambda x: x.select(1, 2), (i(4, 8),), "x."),
    ],
    "narrow": [
        Case(lambda x: x.narrow(1, 2, 5), ONE, "xxx"),
        Case(lambda x: torch.narrow(x, dim=-1, start=1, length=2), ONE, "xxx"),
        Case(lambda x: x.narrow(1, -3, 2), ONE, "xxx"),
    ],
    "narrow_copy": [Case(lambda x: x.narrow_copy(1, 2, 5), ONE, "xxx")],
    "setitem": [
        Case(written(lambda x: stored(x, (slice(None), 2), 0.0)), ONE, "x.x"),
        Case(written(lambda x: stored(x, (..., slice(1, 3)), 1.0)), ONE, "xx."),
        Case(written(lambda x, y: stored(x, (slice(None), 2), y)), (f(4, 8, 6), f(4, 6)), "x.x,xx"),
        Case(
            written(lambda x, y: stored(x, (slice(None), slice(2, 5)), y)),
            (f(4, 8, 6), f(3, 6)),
            "x.x,.x",
        ),
        Case(
            written(lambda x, y: stored(x, (slice(None), slice(2, 5)), y)),
            (f(4, 8, 6), f(4, 1, 1)),
            "x.x,x..",
        ),
        Case(written(lambda x, k: stored(x, (slice(None), k), 0.0)), (f(4, 8, 6), _ROWS), "...,."),
    ],
}
