"""Which line of the user's code is running."""

from __future__ import annotations

import sys

__all__ = ["call_site", "user_line"]

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
    return _user_frame()[0]


def call_site(name: str = "") -> str:
    """`parallelize (train.py:12)`: what the user called, and where.

    name: by default that of this package's function which the user's line called.
    """
    line, called = _user_frame()
    name = name or called
    return f"{name} ({line})" if line else name


def _user_frame() -> tuple[str, str]:
    """(user's line, the function of this package or of torch that it called)."""
    called, frame = "", sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _HIDDEN):
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}", called
        called, frame = frame.f_code.co_name, frame.f_back
    return "", called
