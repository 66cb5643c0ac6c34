"""Ranks of one sp group compare each call's key and data: a difference is an error, not a hang."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch import all_gather_single
from ..errors import RankMismatchError
from ..graph import describe, meta_of
from ..source import call_site
from .content import OneCallLate, Seen, content, digest, reader_for

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
_DATA_BEFORE = _Difference(
    "were called with different data in the call before this one",
    f"{_BATCH}; on an accelerator data is compared one call later, so that no device waits",
    f"{_SAMPLER}; what that call computed, and a step made of it, is of mixed-up sequences: go on "
    "from a checkpoint before it",
)
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
        self.inputs = reader_for(mesh.device_type)
        if self.size == 1:
            return
        self.ranks = dist.get_process_group_ranks(mesh.get_group())
        self.group = side_group(mesh.get_group(), self.ranks)

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        out = torch.empty((self.size, len(numbers)), dtype=torch.int64, device="cpu")
        all_gather_single(out, mine.unsqueeze(0), group=self.group)
        return out.tolist()

    def on_call(
        self, description: str, state: str, inputs: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        """Check that all ranks make the same call on the same data; one exchange of 16 bytes.

        Args:
            description: the call's tensors and arguments, as text.
            state: all else that its program depends on: modules, parameters, modes.
            inputs: the tensors that each rank passes whole, by name. On an accelerator those of
                the call before are compared.

        Raises:
            RankMismatchError: on every rank, when any differs.
        """
        if self.size > 1:
            read = functools.partial(self.inputs.of_call, description, inputs)
            self._compare(description, state, read)

    def on_first_call(self) -> None:
        """Check the data of a program's first call at once, where `on_call` has not."""
        if self.size > 1 and isinstance(self.inputs, OneCallLate):
            self._compare("", "", self.inputs.pending)

    def _compare(self, description: str, state: str, read: Callable[[], Seen | None]) -> None:
        """Compare texts, and what is read of inputs. A rank that cannot read tells the others."""
        seen, failure = None, None
        try:
            seen = read()
        except Exception as error:
            failure = error
        told = f"{description}; {state}" if failure is None else _text(failure)
        rows = self._gather([digest(told), seen.number if seen else 0])
        if failure is None and all(row == rows[0] for row in rows):
            return
        self.inputs.forget()  # on all ranks, as all raise
        error = None if failure is None else _text(failure)
        everyone = self._all_of((description, state, error, seen))
        if failure is not None:
            raise failure
        calls, states, errors, data = zip(*everyone, strict=True)
        if any(errors):
            self._tell_failure("reading the inputs", errors)
        before = any(each is not None and each.late for each in data)
        same_data = all(row[1] == rows[0][1] for row in rows)
        if all(row[0] == rows[0][0] for row in rows) or (before and not same_data):
            numbers = [row[1:] for row in rows]
            self._tell(numbers, _unlike(data), _DATA_BEFORE if before else _DATA)
        texts = [f"{call}; {state}" for call, state in zip(calls, states, strict=True)]
        difference = _STATES if len(set(calls)) == 1 else _CALLS
        self._tell([row[:1] for row in rows], texts, difference)

    def seed(self, proposed: int) -> int:
        """The first rank's random seed, on all ranks."""
        return proposed if self.size == 1 else self._gather([proposed])[0][0]

    def on_outside(self, tensors: list[torch.Tensor]) -> None:
        """Check that all ranks hold the same values in what forward takes from elsewhere."""
        if self.size == 1 or not tensors:
            return
        rows = self._gather(_hashes(tensors))
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
        rows = self._gather(_hashes([tensor for _, tensor in pairs]))
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
        rows = self._gather([0, digest(text)])
        if any(row[0] for row in rows):
            self._tell_failure("tracing", self._all_of(None))
        if any(row != rows[0] for row in rows):
            self._tell([row[1:] for row in rows], self._all_of(what), _PROGRAMS)

    def on_failure(self, error: Exception) -> None:
        """Instead of `on_text`, on a rank that could not build its program, and raises its own."""
        if self.size > 1:
            self._gather([1, digest(str(error))])
            self._all_of(_text(error))

    def _tell_failure(self, doing: str, errors: Sequence[str | None]) -> NoReturn:
        """errors: each rank's; those that have one raise it themselves."""
        failed = [
            f"rank {r}: {error}" for r, error in zip(self.ranks, errors, strict=True) if error
        ]
        raise RankMismatchError(
            f"{doing} failed on other ranks of the sp group, not on this one.",
            where=call_site(self.name),
            have=failed,
            why="the ranks run one program together",
            fix="what fails there depends on the rank: its data, its modules or its environment",
        )

    def _all_of(self, own: Any) -> list[Any]:
        """Every rank's own, in order of ranks."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.group)
        return everyone

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


def _hashes(tensors: list[torch.Tensor]) -> list[int]:
    """All are on their way before the first is waited for."""
    return [int(number) for number in [content(tensor) for tensor in tensors]]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _unlike(data: Sequence[Seen | None]) -> list[str]:
    """For each rank what it was given, and which of it differs."""
    hashes = itertools.zip_longest(*(seen.hashes for seen in data if seen is not None))
    differing = {k for k, of_ranks in enumerate(hashes) if len(set(of_ranks)) > 1}
    texts = []
    for seen in data:
        if seen is None:
            texts.append("nothing to compare")
            continue
        names = [name for k, name in enumerate(seen.names) if k in differing]
        texts.append(f"{seen.description}; differs: argument {', '.join(names)}")
    return texts


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
