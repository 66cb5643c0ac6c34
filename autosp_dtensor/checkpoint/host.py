"""Values that wait for backward in host memory: copies there and back, beside the computation.

What moves is the memory of a tensor, once, whatever looks at it. A copy starts when its value is
there; the device's memory is given up at the start of a later region, when the copy had a region's
time to finish. In backward the values of a region are fetched while the region after it computes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import UsageError
from .transport import Transport, transport_of
from .view import View

__all__ = ["Host", "Moved", "Seen", "changed", "version_of"]


class User(Protocol):
    """A run of a region: what it has moved, and the run before it."""

    moved: list[weakref.ref[Moved]]
    previous: weakref.ref[Any] | None


class Host:
    """Host memory that one rank's values may take, and what is in it.

    Args:
        limit: bytes that may be taken at any time, free buffers included; what finds no room stays
            on the device.
        kind: type of the device whose tensors move.

    now, peak: bytes of values in it. out, back: bytes moved so far. ahead, late: how many were
    fetched before, and only when, backward came to their region. stayed: how many found no room.
    """

    def __init__(self, limit: int, kind: str) -> None:
        self.limit, self.kind = limit, kind
        self.now = self.peak = self.taken = 0
        self.out = self.back = 0
        self.ahead = self.late = self.stayed = 0
        self._free: dict[tuple[str, int], list[Any]] = {}
        self._transports: dict[str, Transport] = {}
        self._known: dict[int, weakref.ref[Moved]] = {}
        self._soon: list[weakref.ref[Moved]] = []
        self._later: list[weakref.ref[Moved]] = []
        self._last: weakref.ref[Any] | None = None
        self._current: weakref.ref[Any] | None = None
        self._next: weakref.ref[Any] | None = None
        self._lock = threading.RLock()  # values die in whichever thread drops them last

    # -- forward --------------------------------------------------------------------------------

    def enter(self) -> None:
        """A region's forward starts: give up what had time to be copied."""
        for moved in _alive(self._soon):
            moved.leave()
        self._soon, self._later = self._later, []

    def passed(self, user: User) -> bool:
        """A region's forward is over. Gives whether backward is to tell when it comes to it: it has
        moved something, or the region before it has.
        """
        before = self._last() if self._last is not None else None
        user.previous, self._last = self._last, weakref.ref(user)
        return bool(user.moved) or (before is not None and bool(before.moved))

    def find(self, tensor: torch.Tensor) -> Moved | None:
        """Where the memory of a tensor has gone or is going, if it is."""
        known = self._known.get(_key(tensor))
        moved = known() if known is not None else None
        if moved is None or moved.storage.expired() or moved.version != version_of(tensor):
            return None
        return moved

    def move(self, tensor: torch.Tensor, *, soon: bool) -> Moved | None:
        """Start to copy the memory of a tensor; None where it has to stay.

        soon: it may leave when the next region starts (what the region was given), else one later
        (what the region makes, perhaps at its end).
        """
        found = self.find(tensor)
        size = tensor.untyped_storage().nbytes()
        if found is not None or not size or tensor.device.type != self.kind:
            return found
        transport = self._transport(tensor)
        with self._lock:
            buffer = self._take(transport, size)
            if buffer is None:
                self.stayed += 1
                return None
            self.now += size
            self.peak = max(self.peak, self.now)
        self.out += size
        moved = Moved(self, transport, tensor, buffer[0])
        ref = weakref.ref(moved)
        self._known[moved.key] = ref
        (self._soon if soon else self._later).append(ref)
        return moved

    def _transport(self, tensor: torch.Tensor) -> Transport:
        made = transport_of(tensor)
        return self._transports.setdefault(made.name, made)

    # -- backward -------------------------------------------------------------------------------

    def returned(self, user: User) -> None:
        """Backward comes to a region: it needs its values now."""
        last = self._current() if self._current is not None else None
        own = list(_alive(user.moved))
        for moved in _alive(last.moved) if last is not None else ():
            if moved not in own:
                moved.drop()
        self._current = weakref.ref(user)
        for moved in own:
            self.late += moved.fetch()
        self._next = user.previous

    def fetch_next(self, user: User) -> None:
        """Fetch what the region before it needs, while the rest of this one's backward runs."""
        if self._next is None or self._current is None or self._current() is not user:
            return
        before, self._next = self._next(), None
        for moved in _alive(before.moved) if before is not None else ():
            self.ahead += moved.fetch()

    # -- memory ---------------------------------------------------------------------------------

    def _take(self, transport: Transport, size: int) -> tuple[Any] | None:
        """A buffer, one of an earlier step if there is one; None above the limit."""
        free = self._free.get((transport.name, size))
        if free:
            return (free.pop(),)
        for (name, other), buffers in self._free.items():
            while buffers and self.taken + size > self.limit:
                self._transports[name].release(buffers.pop())
                self.taken -= other
        if self.taken + size > self.limit:
            return None
        self.taken += size
        return (transport.allocate(size),)

    def give_back(self, moved: Moved) -> None:
        """Its value is no longer asked for."""
        with self._lock:
            self.now -= moved.size
            self._free.setdefault((moved.transport.name, moved.size), []).append(moved.buffer)
            known = self._known.get(moved.key)
            if known is not None and known() in (None, moved):
                del self._known[moved.key]

    def __del__(self) -> None:
        for (name, _), buffers in self._free.items():
            for buffer in buffers:
                self._transports[name].release(buffer)


class Moved:
    """Memory of one tensor: on the device still, on the host, or on the device again."""

    def __init__(self, host: Host, transport: Transport, tensor: torch.Tensor, buffer: Any) -> None:
        self.host, self.transport, self.buffer = host, transport, buffer
        storage = tensor.untyped_storage()
        self.key = _key(tensor)
        self.storage = StorageWeakRef(storage)  # while this lives, no other memory has that key
        self.size, self.version = storage.nbytes(), version_of(tensor)
        whole = self.size % tensor.dtype.itemsize == 0
        self.dtype, self.device = tensor.dtype if whole else torch.uint8, tensor.device
        self.source: torch.Tensor | None = tensor.detach()
        self.here: torch.Tensor | None = None
        self._changes = 0
        self._arriving: Any = None
        self._leaving = transport.out(storage, buffer)

    def leave(self) -> None:
        """Give up the device's memory, after the copy."""
        if self.source is not None:
            self._changes = version_of(self.source) - self.version  # perhaps while it was copied
            self.transport.wait(self._leaving)
            self.source = None

    def fetch(self) -> bool:
        """Start to copy it to the device; whether that was needed."""
        if self.source is not None or self.here is not None:
            return False
        count = self.size // self.dtype.itemsize
        self.here = torch.empty(count, dtype=self.dtype, device=self.device)
        self._arriving = self.transport.back(self.buffer, self.here.untyped_storage())
        self.host.back += self.size
        return True

    def base(self) -> torch.Tensor:
        """Its memory, flat, on the device."""
        changes = self._changes
        if self.source is not None:
            changes = version_of(self.source) - self.version
        if changes:
            raise changed(f"{self.dtype}, {self.size} bytes", changes)
        if self.source is not None:
            count = self.size // self.dtype.itemsize
            if self.dtype == self.source.dtype:
                # Not by `set_`: the cache of fake tensors' operations would keep the storage.
                return self.source.as_strided((count,), (1,), 0)
            flat = torch.empty(0, dtype=self.dtype, device=self.device)
            return flat.set_(self.source.untyped_storage(), 0, (count,), (1,))
        self.host.late += self.fetch()
        assert self.here is not None
        self.transport.wait(self._arriving)
        self._arriving = None
        return self.here

    def drop(self) -> None:
        """The device's copy is not needed any more: the host has it."""
        if self.here is not None:
            self.transport.wait(self._arriving)  # the next owner of this memory comes after it
            self._arriving = self.here = None

    def __del__(self) -> None:
        if self.source is not None:
            self.transport.wait(self._leaving)
        self.drop()
        self.host.give_back(self)


@dataclass(frozen=True)
class Seen:
    """A view of memory that has moved."""

    moved: Moved
    view: View
    requires_grad: bool

    @staticmethod
    def of(moved: Moved, tensor: torch.Tensor) -> Seen:
        return Seen(moved, View.of(tensor), tensor.requires_grad)

    def tensor(self) -> torch.Tensor:
        return self.view.seen(self.moved.base())


def _alive(refs: list[weakref.ref[Moved]]) -> Iterator[Moved]:
    for ref in refs:
        moved = ref()
        if moved is not None:
            yield moved


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place, as autograd counts."""
    return 0 if tensor.is_inference() else tensor._version


def changed(what: str, times: int) -> UsageError:
    """Autograd leaves it to hooks to notice that what they saved was changed."""
    return UsageError(
        "a tensor that backward needs was changed after forward.",
        where="backward of a region that is in part computed again or kept on the host",
        have=f"{what}, changed in place {times} times",
        why="gradients would be those of other values",
        fix="change parameters, buffers and results after backward, or change a copy",
    )
