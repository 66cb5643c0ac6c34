"""Ranks of one sp group compare each call's key: a difference is an error, not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch import all_gather_single
from ..errors import RankMismatchError
from ..graph import describe, meta_of
from ..source import call_site

__all__ = ["Agreement", "side_group"]


@dataclass(frozen=True)
class _Difference:
    """What ranks may differ in, and what they are told of it."""

    what: str
    why: str
    fix: str


_BATCH = "an sp group works on one batch together: each rank passes the same whole batch"
_SAMPLER = (
    "read data by autosp.data_shard(mesh), and seed random augmentation alike on all ranks of an "
    "sp group"
)
_CALLS = _Difference(
    "were called with different shapes, dtypes, arguments or modes",
    _BATCH,
    f"{_SAMPLER}; enter torch.no_grad() and autocast alike",
)
_DATA = _Difference("were called with different data", _BATCH, _SAMPLER)
_STATES = _Difference(
    "were called with models in different modes or states",
    "the ranks run one program together, and it depends on train and eval mode, on the modules, "
    "and on the Python values that forward reads from them",
    "call train() or eval(), freeze, swap and wrap modules, and set their attributes, alike on all "
    "ranks of an sp group",
)
_PROGRAMS = _Difference(
    "traced different programs",
    "the ranks run one program together, and forward's Python took another way on some of them",
    "look for what differs between the ranks outside of the call: the rank itself, the "
    "environment, a file, Python's random numbers; make it equal, or pass it to forward",
)
_OUTSIDE = _Difference(
    "use different tensors from outside of the model",
    "each computes a part of the sequence with its own copy of what forward takes from globals, "
    "closures or containers",
    "seed all ranks alike before they are made, or send the first rank's to all: "
    "torch.distributed.broadcast",
)


class Agreement:
    """Compares small integers over the sp group, on a gloo group, so that no device waits."""

    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        self.name = name  # of what is called, for errors
        self.size = mesh.size()
        self.group: Any = None
        if self.size == 1:
            return
        self.ranks = dist.get_process_group_ranks(mesh.get_group())
        self.group = side_group(mesh.get_group(), self.ranks)

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64)
        out = torch.empty((self.size, len(numbers)), dtype=torch.int64)
        all_gather_single(out, mine.unsqueeze(0), group=self.group)
        return out.tolist()

    def on_call(self, description: str, state: str) -> None:
        """Check that all ranks make the same call; one exchange of 8 bytes.

        Args:
            description: the call's tensors and arguments, as text.
            state: all else that its program depends on: modules, parameters, modes.

        Raises:
            RankMismatchError: on every rank, when any differs.
        """
        if self.size == 1:
            return
        rows = self._gather([_digest(f"{description}; {state}")])
        if any(row != rows[0] for row in rows):
            texts = self._texts((description, state))
            same = all(text[0] == description for text in texts)
            self._tell(rows, ["; ".join(text) for text in texts], _STATES if same else _CALLS)

    def seed(self, proposed: int) -> int:
        """The first rank's random seed, on all ranks."""
        return proposed if self.size == 1 else self._gather([proposed])[0][0]

    def on_data(self, tensors: list[torch.Tensor], description: str) -> None:
        """Check that all ranks hold the same values in whole inputs."""
        if self.size == 1 or not tensors:
            return
        rows = self._gather([_content(t) for t in tensors])
        if any(row != rows[0] for row in rows):
            wrong = ", ".join(str(k) for k in _differing(rows))
            self._tell(rows, [f"{description}; differs: tensor {wrong}"] * self.size, _DATA)

    def on_outside(self, tensors: list[torch.Tensor]) -> None:
        """Check that all ranks hold the same values in what forward takes from elsewhere."""
        if self.size == 1 or not tensors:
            return
        rows = self._gather([_content(t) for t in tensors])
        if any(row != rows[0] for row in rows):
            shapes = [describe(meta_of(tensors[k])) for k in _differing(rows)]
            self._tell(rows, [", ".join(shapes)] * self.size, _OUTSIDE)

    def on_parameters(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Check that all ranks hold the same values in whole parameters and buffers."""
        if self.size == 1:
            return
        pairs = list(named)
        if not pairs:
            return
        rows = self._gather([_content(tensor) for _, tensor in pairs])
        wrong = [pairs[k][0] for k in _differing(rows)]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise RankMismatchError(
                "ranks of one sp group hold different parameters or buffers.",
                where=call_site(self.name),
                have=", ".join(wrong[:3]) + more,
                why="each computes a part of the sequence with its own copy",
                fix="seed all ranks alike before the model is built, or load the same weights; "
                "after to_empty() fill buffers as well, also those that are in no state_dict",
            )

    def on_text(self, text: str, what: str) -> None:
        """Check that all ranks have built the same program, and that none has failed."""
        if self.size == 1:
            return
        rows = self._gather([0, _digest(text)])
        if any(row[0] for row in rows):
            self._tell_failure(rows, None)
        if any(row != rows[0] for row in rows):
            self._tell([row[1:] for row in rows], self._texts(what), _PROGRAMS)

    def on_failure(self, error: Exception) -> None:
        """Instead of `on_text`, on a rank that could not build its program."""
        if self.size > 1:
            self._tell_failure(self._gather([1, _digest(str(error))]), error)

    def _tell_failure(self, rows: list[list[int]], error: Exception | None) -> None:
        """Every rank learns what failed where; one that failed itself goes on to raise its own."""
        texts = self._texts(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            return
        failed = [f"rank {r}: {text}" for r, text in zip(self.ranks, texts, strict=True) if text]
        raise RankMismatchError(
            "tracing failed on other ranks of the sp group, not on this one.",
            where=call_site(self.name),
            have=failed,
            why="the ranks run one program together",
            fix="what fails there depends on the rank: its data, its modules or its environment",
        )

    def _texts(self, own: Any) -> list[Any]:
        """Every rank's own text."""
        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, own, group=self.group)
        return texts

    def _tell(
        self, rows: list[list[int]], texts: Sequence[str], difference: _Difference
    ) -> NoReturn:
        """texts: what each rank has."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, row in zip(self.ranks, rows, strict=True):
            groups.setdefault(tuple(row), []).append(rank)
        have = [
            f"ranks {', '.join(map(str, members))}: {texts[self.ranks.index(members[0])]}"
            for members in groups.values()
        ]
        raise RankMismatchError(
            f"ranks of one sp group {difference.what}.",
            where=call_site(self.name),
            have=have,
            why=difference.why,
            fix=difference.fix,
        )


def _differing(rows: list[list[int]]) -> list[int]:
    """Which of the compared numbers differ between ranks."""
    return [k for k in range(len(rows[0])) if any(row[k] != rows[0][k] for row in rows)]


_CHUNK = 1 << 22


_SIDE_GROUPS: dict[tuple[int, ...], tuple[Any, Any]] = {}


def side_group(group: Any, ranks: list[int]) -> Any:
    """A gloo group of the same ranks for these comparisons alone, made once: what the user's own
    collectives do meanwhile cannot cross them.
    """
    if dist.get_backend(group) in ("fake", "threaded"):
        return group
    world, side = _SIDE_GROUPS.get(tuple(ranks), (None, None))
    if world is not dist.group.WORLD:
        side = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _SIDE_GROUPS[tuple(ranks)] = dist.group.WORLD, side
    return side


def _digest(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True
    )


def _content(tensor: torch.Tensor) -> int:
    """A hash of all values in order, made on the tensor's own device; integer arithmetic wraps."""
    with torch.no_grad():
        raw = tensor.detach().contiguous().reshape(-1)
        if raw.is_complex():
            raw = torch.view_as_real(raw).reshape(-1)
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.element_size()]
        words, total = raw.view(width), 0
        for start in range(0, words.numel(), _CHUNK):  # 64-bit copies of a part at a time
            part = words[start : start + _CHUNK].to(torch.int64)
            places = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
            mixed = (part + places * 0x9E3779B97F4A7C) * 0x2545F4914F6CDD1D
            total += int((mixed ^ (mixed >> 29)).sum())
        return (total + 2**63) % 2**64 - 2**63
