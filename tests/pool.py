"""Ranks that live as long as the test session, so that a test pays for its work and not for a
start.

A test calls `run_on_ranks(fn, *args)`: every rank runs `fn(rank, *args)`, and the list of results
comes back. A rank that fails makes the call fail with that rank's traceback. Ranks that do not come
back are asked for the stacks of their threads, then killed, so that a hang is a red test with the
place of the hang in its text.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# The fork server imports these once; a rank is then forked in milliseconds. The package under test
# is not among them, and no thread is started by these imports.
_PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "transformers",
    "einops",
    "pytest",
]

# Once one rank has failed, its peers may wait in a collective that it will never join.
GRACE_AFTER_A_FAILURE_S = 15


class RanksFailedError(AssertionError):
    """At least one rank raised, died or did not come back; the text says which, and where it
    stood."""


@dataclass
class Rank:
    """What a function on a rank is given: who it is, and meshes over all ranks of the pool."""

    rank: int
    world_size: int
    _meshes: dict[tuple[tuple[str, int], ...], Any] = field(default_factory=dict)

    def mesh(self, **axes: int) -> Any:
        """`rank.mesh(dp=2, sp=2)`: the mesh over all ranks. Made once per shape: process groups are
        kept."""
        from torch.distributed.device_mesh import init_device_mesh

        key = tuple(axes.items())
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(
                "cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)
            )
        return self._meshes[key]


def run_on_ranks(fn: Callable[..., Any], *args: Any, n: int = 4, timeout: float = 120) -> list[Any]:
    """Run `fn(rank, *args)` on `n` ranks and return what each returned.

    `fn` is sent by name, so it must stand at the top of a module; arguments and results are
    pickled.
    """
    __tracebackhide__ = True
    pool = _pools.get(n)
    if pool is None:
        pool = _pools[n] = RankPool(n)
    try:
        return pool.run(fn, args, timeout)
    except RanksFailedError:
        # The collectives of a failed test may be half done, so the next test gets new ranks.
        _pools.pop(n).close()
        raise


def close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


_pools: dict[int, RankPool] = {}
atexit.register(close_pools)


class RankPool:
    """`n` processes in one gloo world, each running what is sent to it until the pipe closes."""

    def __init__(self, n: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = Path(tempfile.mkdtemp(prefix="autosp-ranks-"))
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, n, str(self._folder)), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        __tracebackhide__ = True
        task = pickle.dumps((fn.__module__, fn.__qualname__, args))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        replies = self._collect(timeout)
        if all(reply is not None and reply[0] for reply in replies):
            return [reply[1] for reply in replies if reply is not None]
        raise RanksFailedError(self._describe(replies, timeout))

    def _collect(self, timeout: float) -> list[tuple[bool, Any] | None]:
        """One reply for each rank, None for a rank that did not come back in time."""
        replies: list[tuple[bool, Any] | None] = [None] * len(self._pipes)
        waiting = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting.values()), left):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                del waiting[rank]
                try:
                    replies[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    replies[rank] = (False, "the process died")
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_A_FAILURE_S)
        return replies

    def _describe(self, replies: list[tuple[bool, Any] | None], timeout: float) -> str:
        """Every distinct failure once, with the ranks that had it."""
        ranks_of: dict[str, list[int]] = {}
        for rank, reply in enumerate(replies):
            if reply is None:
                failed = any(r is not None and not r[0] for r in replies)
                why = "a failed peer" if failed else f"{timeout:g} s"
                text = f"did not come back (waited for {why}). It stood at\n{self._stacks(rank)}"
            elif reply[0]:
                continue
            else:
                text = reply[1]
            ranks_of.setdefault(text, []).append(rank)
        return "".join(
            f"\n--- rank {', '.join(map(str, ranks))} of {len(replies)} ---\n{text}"
            for text, ranks in ranks_of.items()
        )

    def _stacks(self, rank: int) -> str:
        process = self._processes[rank]
        if process.pid is None or not process.is_alive():
            return "(the process is gone)"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return _stack_file(str(self._folder), rank).read_text()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 2
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}"


def _serve(pipe: Connection, rank: int, n: int, folder: str) -> None:
    """The life of a rank: join the world, then run one task after the other."""
    import torch
    import torch.distributed as dist

    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        # What the package itself does must not warn; what torch and transformers say to each other
        # is not ours.
        warnings.filterwarnings("error", module=r"autosp_dtensor\b")
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(Path(folder) / "store"), n),
            rank=rank,
            world_size=n,
            # Longer than the wait of any test: the pool ends a hang, with the stacks.
            timeout=timedelta(minutes=10),
        )
        me = Rank(rank, n)
        while True:
            try:
                task = pipe.recv_bytes()
            except (EOFError, ConnectionResetError):
                break
            reply = _answer(me, task)
            _forget(torch)
            try:
                pipe.send_bytes(reply)
            except BrokenPipeError:
                break
    os._exit(0)  # Without it torch waits for peers that are already gone.


def _answer(me: Rank, task: bytes) -> bytes:
    try:
        module, name, args = pickle.loads(task)
        fn = reduce(getattr, name.split("."), importlib.import_module(module))
        return pickle.dumps((True, fn(me, *args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _forget(torch: Any) -> None:
    """What one task set must not reach the next."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    gc.collect()
    # What is left is held for good, by modules above all. To go through these hundreds of thousands
    # of objects again after each task takes as long as the task.
    gc.freeze()
