"""The errors a user can meet, and the one layout of all: what, where, have, why, fix."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AutoSPError",
    "CaptureError",
    "MeshError",
    "PlacementError",
    "RankMismatchError",
    "UsageError",
]


class AutoSPError(Exception):
    """Base of all errors raised on purpose: on all ranks alike, before the first collective.

    No part may be left out, so that no error leaves its reader without one.

    Args:
        what: one sentence that says what cannot be done.
        where: the module, the operation and the source line; for arguments, the user's call.
        have: shapes, placements or values at hand, one entry a line.
        why: the reason, in terms of the user's program.
        fix: what to change.
    """

    _place = "where"  # what the line of `where` is called

    def __init__(
        self, what: str, *, where: str, have: str | Sequence[str], why: str, fix: str
    ) -> None:
        self.what, self.where, self.have, self.why, self.fix = what, where, have, why, fix
        parts = {self._place: where, "have": have, "why": why, "fix": fix}
        text = _layout(what, parts)
        missing = [name for name, part in parts.items() if not part]
        assert not missing, f"an error without {', '.join(missing)}: {text}"
        super().__init__(text)

    def __reduce__(self):  # keyword-only arguments do not survive the default pickling
        return _rebuild, (type(self), self.what, self.where, self.have, self.why, self.fix)


class CaptureError(AutoSPError):
    """The model's Python cannot be traced: it reads a tensor's value, or changes hidden state."""

    _place = "node"


class PlacementError(AutoSPError):
    """An operation has no rule for the placement its inputs have."""

    _place = "node"


class MeshError(AutoSPError):
    """The mesh does not fit: no sp axis, another device, a module on a mesh of its own."""


class RankMismatchError(AutoSPError):
    """Ranks of one sp group called with different shapes, arguments or data."""


class UsageError(AutoSPError, ValueError):
    """An argument of this library's own functions is wrong."""


def _rebuild(cls, what, where, have, why, fix):
    return cls(what, where=where, have=have, why=why, fix=fix)


def _layout(what: str, parts: dict[str, str | Sequence[str]]) -> str:
    lines = [what]
    for name, part in parts.items():
        for row, text in enumerate([part] if isinstance(part, str) else part):
            lines.append(f"  {name if row == 0 else '':<5} {text}")
    return "\n".join(lines)
