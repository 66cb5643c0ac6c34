"""A hash of each whole input of a call: on a CPU there at once, on an accelerator at the next call,
so that no device waits for it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .._torch import FakeTensor, unset_fake_temporarily

__all__ = ["AtOnce", "OneCallLate", "Seen", "content", "digest", "on_its_way", "reader_for"]

Named = Sequence[tuple[str, torch.Tensor]]
Numbers = Callable[[], list[int]]


@dataclass(frozen=True)
class Seen:
    """What a rank was given in one call: a hash of each whole input, under its name."""

    description: str
    names: list[str]
    hashes: list[int]
    late: bool = False

    @property
    def number(self) -> int:
        """All hashes in one."""
        return digest(repr(self.hashes))


class AtOnce:
    """For a CPU: each call's hashes are there before the call goes on."""

    def of_call(self, description: str, inputs: Named) -> Seen | None:
        hashes = [int(content(tensor)) for _, tensor in inputs]
        return Seen(description, [name for name, _ in inputs], hashes)

    def pending(self) -> Seen | None:
        return None

    def forget(self) -> None:
        pass


class OneCallLate:
    """For an accelerator: a call gives the hashes of the call before it.

    Args:
        send: is given a number on the device for each input, and gives what waits for them.
    """

    def __init__(self, send: Callable[[list[torch.Tensor]], Numbers]) -> None:
        self._send = send
        self._waiting: tuple[str, list[str], Numbers] | None = None

    def of_call(self, description: str, inputs: Named) -> Seen | None:
        before = self._read(late=True)
        numbers = self._send([content(tensor) for _, tensor in inputs])
        self._waiting = description, [name for name, _ in inputs], numbers
        return before

    def pending(self) -> Seen | None:
        """The hashes of the latest call, waited for."""
        return self._read(late=False)

    def forget(self) -> None:
        self._waiting = None

    def _read(self, late: bool) -> Seen | None:
        if self._waiting is None:
            return None
        (description, names, numbers), self._waiting = self._waiting, None
        return Seen(description, names, numbers(), late)


def reader_for(device_type: str) -> AtOnce | OneCallLate:
    """How hashes of tensors on such a device are read."""
    return AtOnce() if device_type == "cpu" else OneCallLate(on_its_way)


def on_its_way(numbers: list[torch.Tensor]) -> Numbers:
    """Start a copy of numbers on a device to pinned memory; what waits for it."""
    device = next((n.device for n in numbers if n.device.type != "cpu"), None)
    if device is None:  # no inputs, or such as are on the host
        return lambda: [int(number) for number in numbers]
    module = torch.get_device_module(device)
    with torch.no_grad(), unset_fake_temporarily():
        host = torch.empty(len(numbers), dtype=torch.int64, device="cpu", pin_memory=True)
        together = torch.stack([number.to(device, non_blocking=True) for number in numbers])
        host.copy_(together, non_blocking=True)
    copied = module.Event()
    copied.record(module.current_stream(device))

    def read() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return read


def digest(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True
    )


_STEP = 0x5851F42D4C957F2D  # odd: a part that moves to another place changes the sum


def content(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of all bits in order, an i64[] on the tensor's own device that nothing waits for.

    The sum over 64-bit words of the product of their two halves, after a random number for each
    place was added; after NH, the universal hash of UMAC (RFC 4418). Integer arithmetic wraps. Four
    kernels for each part. What has no data counts as zero.
    """
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    with torch.no_grad(), unset_fake_temporarily():
        words = _words(tensor)
        added = _added(words.device)
        total: torch.Tensor | None = None
        for part in words.split(added.numel()):
            word = part + added[: part.numel()]
            own = (word >> 32).mul_(word).sum()
            total = own if total is None else torch.add(own, total, alpha=_STEP)
        assert total is not None, "split gives one part at least"
        return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as i64[n], the last word filled up with zeros."""
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8 or raw.data_ptr() % 8:
        raw = F.pad(raw, (0, -raw.numel() % 8))
    return raw.view(torch.int64)


@functools.cache
def _added(device: torch.device) -> torch.Tensor:
    """A random number for each place of a part, the same on all ranks. On a CPU a part stays in
    its cache; elsewhere parts are long, so that there are few kernels.
    """
    size = 1 << (16 if device.type == "cpu" else 20)
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (size,), generator=generator, device="cpu")
    return numbers.to(device)
