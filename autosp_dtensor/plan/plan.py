"""`autosp.plan`: a step's memory at one length, or the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..checkpoint import DEVICES
from ..errors import UsageError
from ..run.traffic import size_text
from .configs import model_maker
from .measure import Setting, Step, fake_group, measure

__all__ = ["Plan", "plan"]

_USABLE = 0.95  # of a GPU's memory: the CUDA context and fragments take the rest


@dataclass(frozen=True)
class Plan:
    """What was found. `str` of it is a table.

    longest: tokens of the longest sequence that fits, None where one length was asked for.
    step: memory at that length. host: bytes of host memory that one rank may take.
    """

    model: str
    gpus: int
    gpu: str
    sp: int
    capacity: int
    step: Step
    longest: int | None
    host: int = 0

    @property
    def fits(self) -> bool:
        return self.step.peak <= self.capacity

    def __str__(self) -> str:
        head = f"{self.model} on {self.gpus} x {self.gpu}, sp={self.sp}"
        said = f"{self.step.length:,} tokens"
        lines = [f"{head}: longest {said}" if self.longest else f"{head}: {said}"]
        for kind, size in sorted(self.step.kinds.items(), key=lambda pair: -pair[1]):
            if size * 1000 >= self.step.peak:
                lines.append(f"  {kind:<22}{size_text(size):>12}")
        verdict = "fits" if self.fits else "does not fit"
        lines.append(
            f"  {'peak of one GPU':<22}{size_text(self.step.peak):>12}  of "
            f"{size_text(self.capacity)}: {verdict}"
        )
        if self.host:
            lines.append(
                f"  {'host memory of one rank':<22}{size_text(self.step.host):>11}  of "
                f"{size_text(self.host)}"
            )
        lines.append(f"  {self.step.note}")
        return "\n".join(lines)


def plan(
    model: Any,
    mesh_shape: tuple[int, int],
    *,
    gpu: str = "a100-80gb",
    seq: int | None = None,
    checkpoint: Any = "auto",
    batch: int = 1,
    host_memory: int | None = None,
    machine: int = 8,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Memory of one training step, from the very program that would run, on tensors without data.

    FSDP2 on blocks and root over dp x sp, parameters and AdamW in fp32, compute in bf16. It needs
    no GPU, and a process in which torch.distributed is not initialized.

    Args:
        model: the name of a preset, the path of a transformers config.json, a dict of its content,
            or a function that makes the model (called with input_ids and labels).
        mesh_shape: (dp, sp).
        gpu: a name of `autosp_dtensor.checkpoint.DEVICES`.
        seq: the length to plan for; None: the longest that fits is looked for.
        checkpoint: as in `parallelize`; "auto" plans with this GPU's memory.
        batch: rows of each sp group.
        host_memory: bytes of one machine's memory that all its ranks together may put values in
            that wait for backward, as `parallelize(offload=...)`; None: none.
        machine: how many GPUs share it, if there are so many.
        progress: called with a line of text for each length that is tried.

    Returns:
        a Plan: print it.

    Raises:
        UsageError: an unknown model or GPU, or torch.distributed is initialized.
    """
    if gpu not in DEVICES:
        raise UsageError(
            f"there are no figures of a GPU {gpu!r}.",
            where="autosp.plan",
            have=f"figures of {', '.join(DEVICES)}",
            why="its memory and speed are planned with",
            fix="name one of those, in lower case",
        )
    dp, sp = mesh_shape
    sizes = [1 if size is None else size for size in (seq, host_memory)]
    if min(dp, sp, batch, machine, *sizes) < 1:
        raise UsageError(
            "sizes of a plan are positive numbers.",
            where="autosp.plan",
            have=f"mesh_shape={mesh_shape}, batch={batch}, seq={seq}, host_memory={host_memory}, "
            f"machine={machine}",
            why="there would be nothing to run",
            fix="give each of them as 1 or more",
        )
    name, make = model_maker(model)
    capacity = int(DEVICES[gpu].size * _USABLE)
    host = (host_memory or 0) // min(machine, dp * sp)
    setting = Setting(make, dp, sp, checkpoint, capacity, batch, device=DEVICES[gpu], host=host)
    tell = progress or (lambda text: None)
    with fake_group(dp * sp):

        def at(length: int) -> Step:
            step = measure(setting, length)
            tell(f"{length:>12,} tokens: {size_text(step.peak)} ({step.seconds:.0f} s)")
            return step

        if seq is not None:
            return Plan(name, dp * sp, gpu, sp, capacity, at(seq), None, host)
        step = longest(at, capacity, 1024 * sp)
        return Plan(name, dp * sp, gpu, sp, capacity, step, step.length, host)


def longest(at: Callable[[int], Step], capacity: int, unit: int) -> Step:
    """The longest length, in whole units, whose peak stays below the capacity.

    Peaks grow almost linearly with the length, so the line through two lengths finds the next
    guess; what it misses is found by halving. Within 2% of the answer it stops.
    """
    low = at(unit)
    if low.peak > capacity:
        return low
    high: Step | None = None
    guess = 2 * unit
    while high is None or high.length - low.length > max(unit, low.length // 50):
        step = at(guess)
        if step.peak <= capacity:
            slope = max((step.peak - low.peak) / (step.length - low.length), 1e-9)
            low = step
            guess = int(low.length + 0.995 * (capacity - low.peak) / slope)
        else:
            high = step
            slope = max((step.peak - low.peak) / (step.length - low.length), 1e-9)
            guess = int(low.length + 0.995 * (capacity - low.peak) / slope)
        guess = guess // unit * unit
        if high is None:
            guess = min(max(guess, low.length + unit), 8 * low.length)
        elif not low.length < guess < high.length:
            guess = (low.length + high.length) // 2 // unit * unit
            if not low.length < guess < high.length:
                break
    return low
