"""Which line of the user's code is running."""

from __future__ import annotations

import sys

__all__ = ["call_site", "line_of", "user_line"]

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


def line_of(error: BaseException) -> str:
    """`my_model.py:88`: the innermost line outside torch and this package that an error came
    through; else the innermost of all."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    own = [each for each in lines if not any(part in each[0] for part in _HIDDEN)]
    file, number = (own or lines)[-1]
    return f"{file.rsplit('/', 1)[-1]}:{number}"


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
