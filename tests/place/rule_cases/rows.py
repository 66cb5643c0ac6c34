"""Operations on rows, matrices or images that treat each one by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .case import ONE, Case, c, f, i

_IMAGE = (f(4, 6, 4, 4),)
_VOLUME = (f(4, 2, 4, 4, 2),)
_SQUARE = (f(4, 6, 3, 3) + 4 * torch.eye(3, dtype=torch.float64),)
_POSITIVE = (_SQUARE[0] @ _SQUARE[0].mT,)
_BOUNDS = torch.linspace(-2, 2, 5, dtype=torch.float64)
_SORTED = f(4, 8, 5).sort(-1).values


def _pool(name: str, *options: object) -> dict[str, list[Case]]:
    calls = {dims: getattr(F, f"{name}_pool{dims}") for dims in ("1d", "2d", "3d")}
    return {
        f"{name}_pool1d": [
            Case(lambda x: calls["1d"](x, *options), ONE, "xx.", empty=False),
            Case(lambda x: calls["1d"](x, *options), (f(8, 6),), "x.", empty=False),
        ],
        f"{name}_pool2d": [Case(lambda x: calls["2d"](x, *options), _IMAGE, "xx..", empty=False)],
        f"{name}_pool3d": [Case(lambda x: calls["3d"](x, *options), _VOLUME, "xx...", empty=False)],
    }


def _matrices(name: str, call: object = None) -> list[Case]:
    function = call or getattr(torch.linalg, name.removeprefix("linalg_"))
    given = _POSITIVE if "cholesky" in name or "eigvalsh" in name else _SQUARE
    return [Case(lambda x: function(x), given, "xx..", empty=False)]  # type: ignore[operator]


def _transform(name: str) -> list[Case]:
    call = getattr(torch.fft, name)
    given = (c(4, 8, 6),) if not name.startswith(("rfft", "ihfft")) else ONE
    if name.endswith("2"):
        calls = {"x..": call, "..x": lambda x: call(x, dim=(0, 1))}
    elif name.endswith("n"):
        calls = {"...": call, "x.x": lambda x: call(x, dim=1)}
    else:
        calls = {"xx.": call, "x.x": lambda x: call(x, dim=1), ".xx": lambda x: call(x, 6, 0)}
    return [Case(each, given, dims, empty=False) for dims, each in calls.items()]


ROWS: dict[str, list[Case]] = {
    **_pool("avg", 2),
    **_pool("max", 2),
    **_pool("lp", 2, 2),
    **_pool("adaptive_avg", 2),
    **_pool("adaptive_max", 2),
    "conv_transpose1d": [
        Case(F.conv_transpose1d, (f(4, 6, 8), f(6, 4, 3)), "x..,.x.", empty=False),
        Case(F.conv_transpose1d, (f(6, 8), f(6, 4, 3)), "..,.x.", empty=False),
        Case(
            lambda x, w, o: F.conv_transpose1d(x, w, o), (f(4, 6, 8), f(6, 4, 3), f(4)),
            "x..,.x.,x", empty=False,
        ),
        Case(lambda x, w: F.conv_transpose1d(x, w, groups=2), (f(4, 6, 8), f(6, 4, 3)), "x..,..."),
    ],
    "conv_transpose2d": [
        Case(F.conv_transpose2d, (f(4, 6, 4, 4), f(6, 4, 2, 2)), "x...,.x..", empty=False)
    ],
    "conv_transpose3d": [
        Case(F.conv_transpose3d, (f(4, 2, 2, 2, 2), f(2, 4, 2, 2, 2)), "x....,.x...", empty=False)
    ],
    "interpolate": [
        Case(lambda x: F.interpolate(x, scale_factor=2), ONE, "xx.", empty=False),
        Case(lambda x: F.interpolate(x, 5, mode="bilinear"), _IMAGE, "xx..", empty=False),
    ],
    "pixel_shuffle": [Case(lambda x: F.pixel_shuffle(x, 2), (f(2, 4, 8, 2, 2),), "xx...")],
    "pixel_unshuffle": [
        Case(lambda x: F.pixel_unshuffle(x, 2), (f(2, 4, 4, 2, 2),), "xx...", empty=False)
    ],
    **{
        name: _matrices(name)
        for name in (
            "linalg_inv", "linalg_cholesky", "linalg_matrix_exp", "linalg_eigvalsh",
            "linalg_svdvals", "linalg_det", "linalg_slogdet",
        )
    },
    "inverse": _matrices("inverse", torch.inverse),
    "matrix_exp": _matrices("matrix_exp", torch.matrix_exp),
    "det": _matrices("det", torch.det),
    "logdet": [Case(torch.logdet, _POSITIVE, "xx..", empty=False)],
    "matrix_power": _matrices("matrix_power", lambda x: torch.matrix_power(x, 2)),
    "linalg_matrix_power": _matrices("power", lambda x: torch.linalg.matrix_power(x, 2)),
    "linalg_solve": [
        Case(torch.linalg.solve, (*_SQUARE, f(4, 6, 3, 2)), "xx..,xx..", empty=False),
        Case(torch.linalg.solve, (*_SQUARE, f(4, 6, 3)), "....,...", empty=False),
    ],
    "linalg_solve_triangular": [
        Case(
            lambda a, x: torch.linalg.solve_triangular(a, x, upper=True),
            (*_SQUARE, f(4, 6, 3, 2)), "xx..,xx..", empty=False,
        ),
    ],
    **{
        f"fft_{name}": _transform(name)
        for name in (
            "fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2",
            "fftn", "ifftn", "rfftn", "irfftn",
        )
    },
    "linalg_cross": [
        Case(torch.linalg.cross, (f(4, 8, 3), f(4, 8, 3)), "xx.,xx."),
        Case(lambda x, y: torch.linalg.cross(x, y, dim=1), (f(4, 3, 6), f(4, 3, 6)), "x.x,x.x"),
    ],
    "cosine_similarity": [
        Case(F.cosine_similarity, (f(4, 8, 6), f(4, 8, 6) + 1), "x.x,x.x"),
        Case(lambda x, y: F.cosine_similarity(x, y, dim=-1), (f(4, 8, 6), f(8, 6)), "xx.,x."),
        Case(lambda x, y: F.cosine_similarity(x, y, -1), (f(4, 8, 6), f(4, 1, 6)), "xx.,x.."),
    ],
    "linalg_vecdot": [
        Case(torch.linalg.vecdot, (f(4, 8, 6), f(4, 8, 6)), "xx.,xx."),
        Case(lambda x, y: torch.linalg.vecdot(x, y, dim=0), (f(4, 8), f(4, 8)), ".x,.x"),
    ],
    "isin": [
        Case(torch.isin, (i(4, 8, high=9), torch.tensor([1, 5])), "xx,."),
        Case(lambda x: torch.isin(x, 3), (i(4, 8),), "xx"),
        Case(lambda x: torch.isin(3, x), (i(4, 8),), ".."),
        Case(lambda x, y: torch.isin(x, y, invert=True), (i(4, 8), i(4, 8)), "xx,.."),
    ],
    "bucketize": [
        Case(torch.bucketize, (f(4, 8, 6), _BOUNDS), "xxx,."),
        Case(lambda x, y: torch.bucketize(x, y, right=True), (f(4, 8), _BOUNDS), "xx,."),
        Case(lambda y: torch.bucketize(0.3, y), (_BOUNDS,), "."),
    ],
    "searchsorted": [
        Case(torch.searchsorted, (_BOUNDS, f(4, 8, 6)), ".,xxx"),
        Case(torch.searchsorted, (_SORTED, f(4, 8, 6)), "xx.,xxx"),
        Case(lambda s: torch.searchsorted(s, 0.3), (_BOUNDS,), "."),
        Case(
            lambda s, x, k: torch.searchsorted(s, x, sorter=k),
            (_SORTED, f(4, 8, 6), _SORTED.argsort(-1)), "...,...,...",
        ),
    ],
    "prelu": [
        Case(F.prelu, (f(4, 8, 6), torch.tensor([0.3]).double()), "xxx,."),
        Case(F.prelu, (f(4, 8, 6), f(8)), "xxx,x"),
    ],
}  # fmt: skip
