"""Which line of the user's code is running."""

from __future__ import annotations

import sys

__all__ = ["user_line"]

_HIDDEN = (
    "/torch/",
    "autosp_dtensor/",
    "/einops/",
    "<frozen",
    "/contextlib.py",
    "<string>",
    "<@beartype",
)


def user_line() -> str:
    """`my_model.py:88`: the innermost line outside torch and this package, or ""."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _HIDDEN):
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
