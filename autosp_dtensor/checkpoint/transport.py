"""Copies between a device and host memory: CUDA's on a stream of their own; CPU memory, and tensors
without data, as stand-ins with the same steps."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Protocol

import torch

from .._torch import FakeTensor
from ..errors import UsageError

__all__ = ["Transport", "transport_of"]


class Transport(Protocol):
    """`out` and `back` start a copy of a whole storage and give what `wait` waits for."""

    name: str

    def allocate(self, size: int) -> Any: ...
    def release(self, buffer: Any) -> None: ...
    def out(self, storage: torch.UntypedStorage, buffer: Any) -> Any: ...
    def back(self, buffer: Any, storage: torch.UntypedStorage) -> Any: ...
    def wait(self, copied: Any) -> None: ...


def transport_of(tensor: torch.Tensor) -> Transport:
    """What moves the memory of a tensor like this one."""
    if isinstance(tensor, FakeTensor):
        return _NO_DATA
    return _pinned(tensor.device) if tensor.is_cuda else _MEMORY


class _NoData:
    """For plans: only the order of events is real."""

    name = "no data"

    def allocate(self, size: int) -> Any:
        return size

    def release(self, buffer: Any) -> None:
        pass

    def out(self, storage: torch.UntypedStorage, buffer: Any) -> Any:
        return None

    def back(self, buffer: Any, storage: torch.UntypedStorage) -> Any:
        return None

    def wait(self, copied: Any) -> None:
        pass


class _Memory(_NoData):
    """Between two places of the CPU's memory, at once; no torch operation, so that nothing that
    counts tensors takes the host's copy for the device's.
    """

    name = "memory"

    def allocate(self, size: int) -> Any:
        return ctypes.create_string_buffer(size)

    def out(self, storage: torch.UntypedStorage, buffer: Any) -> Any:
        ctypes.memmove(buffer, storage.data_ptr(), len(buffer))

    def back(self, buffer: Any, storage: torch.UntypedStorage) -> Any:
        ctypes.memmove(storage.data_ptr(), buffer, len(buffer))


class _Pinned:
    """Pinned buffers of the exact size (torch's own allocator rounds up to powers of two), and one
    side stream: copies run in the order in which they were asked for, so that a buffer may be used
    again as soon as it is free.
    """

    def __init__(self, device: torch.device) -> None:
        self.name, self.device = f"pinned for {device}", device
        self.stream = torch.cuda.Stream(device)
        self.runtime: Any = torch.cuda.cudart()

    def allocate(self, size: int) -> Any:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        failed = int(self.runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
        if failed:
            raise UsageError(
                "host memory for values that wait for backward could not be pinned.",
                where="parallelize(offload=...)",
                have=f"{size} bytes asked for, CUDA error {failed}",
                why="copies beside the computation need pinned memory",
                fix="give fewer bytes: offload=<bytes of one rank>",
            )
        return buffer

    def release(self, buffer: Any) -> None:
        self.stream.synchronize()
        torch.cuda.check_error(self.runtime.cudaHostUnregister(buffer.data_ptr()))

    def out(self, storage: torch.UntypedStorage, buffer: Any) -> Any:
        return self._copy(buffer, self._bytes(storage))

    def back(self, buffer: Any, storage: torch.UntypedStorage) -> Any:
        return self._copy(self._bytes(storage), buffer)

    def _bytes(self, storage: torch.UntypedStorage) -> torch.Tensor:
        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))

    def _copy(self, to: torch.Tensor, of: torch.Tensor) -> Any:
        """After all that the current stream was given so far: the value, or the memory's last use.
        The memory stays owned by that stream, which waits for the copy before it is given up.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), torch.no_grad():
            to.copy_(of, non_blocking=True)
        return current, self.stream.record_event()

    def wait(self, copied: Any) -> None:
        if copied is not None:
            stream, event = copied
            stream.wait_event(event)


_NO_DATA, _MEMORY = _NoData(), _Memory()
_pinned = functools.cache(_Pinned)
