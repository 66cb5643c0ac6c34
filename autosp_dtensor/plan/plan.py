"""`autosp.plan`: a step's memory at one length, or the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..cost import DEVICES
from ..errors import UsageError
from ..run.traffic import size_text
from .configs import model_maker, query_heads, shallow_maker
from .measure import Setting, Step, fake_group, measure
from .search import find

__all__ = ["Plan", "plan"]

_USABLE = 0.95  # of a GPU's memory: the CUDA context and fragments take the rest


@dataclass(frozen=True)
class Plan:
    """What was found. `str` of it is a table.

    longest: tokens of the longest sequence that fits, None where one length was asked for.
    step: memory at that length. host: bytes of host memory that one rank may take. heads: query
    heads of the model, None where its config does not say them.
    """

    model: str
    gpus: int
    gpu: str
    sp: int
    capacity: int
    step: Step
    longest: int | None
    host: int = 0
    heads: int | None = None

    @property
    def fits(self) -> bool:
        return self.step.peak <= self.capacity

    def __str__(self) -> str:
        head = f"{self.model} on {self.gpus} x {self.gpu}, sp={self.sp}"
        head += f" ({self.heads} query heads)" if self.heads else ""
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
        if self.step.exchange:  # seldom at the peak
            most = size_text(self.step.exchange)
            lines.append(f"  {'most in exchanges':<22}{most:>12}  of exchange buffers")
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
    tile: str | int = "auto",
    batch: int = 1,
    host_memory: int | None = None,
    machine: int = 8,
    history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Memory of one training step, from the very program that would run, on tensors without data.

    FSDP2 on blocks and root over dp x sp, parameters and AdamW in fp32, compute in bf16. It needs
    no GPU, and a process in which torch.distributed is not initialized. What depends on values is
    taken at its fullest: a mask forbids no tile as a whole, one in a buffer is not known to be
    causal. Dropout in attention takes no memory, as in GPUs' kernels.

    Args:
        model: the name of a preset, the path of a transformers config.json or of its directory, a
            model_type of transformers with its default sizes ("qwen3"), a dict of a config's
            content, or a function that makes the model (called with input_ids and labels). Configs
            are data: what they say of code, kernels' names included, is left out.
        mesh_shape: (dp, sp).
        gpu: a name of `autosp_dtensor.cost.DEVICES`, in letters of either case.
        seq: the length to plan for; None: the longest that fits is looked for.
        checkpoint: as in `parallelize`; "auto" plans with this GPU's memory.
        tile: as in `parallelize`.
        batch: rows of each sp group.
        host_memory: bytes of one machine's memory that all its ranks together may put values in
            that wait for backward, as `parallelize(offload=...)`; None: none.
        machine: how many GPUs share it, if there are so many.
        history: keep bytes by kind after each operation in `step.history`: the step runs once more.
        progress: called with a line of text for each step that was measured.

    Returns:
        a Plan: print it.

    Raises:
        UsageError: an unknown model or GPU, torch.distributed is initialized, or the model's
            constructor or a hook reads the value of a tensor.
    """
    gpu = gpu.lower()
    if gpu not in DEVICES:
        raise UsageError(
            f"there are no figures of a GPU {gpu!r}.",
            where="autosp.plan",
            have=f"figures of {', '.join(DEVICES)}",
            why="its memory and speed are planned with",
            fix="name one of those",
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
    setting = Setting(
        make, dp, sp, checkpoint, capacity, batch, device=DEVICES[gpu], host=host, tile=tile
    )
    tell = progress or (lambda text: None)

    def told(step: Step, layers: int = 0) -> None:
        of = f" with {layers} layers" if layers else ""
        tell(f"{step.length:>12,} tokens{of}: {size_text(step.peak)} ({step.seconds:.0f} s)")

    with fake_group(dp * sp):
        found = None if seq else find(setting, capacity, told, *shallow_maker(model))
        step = found
        if step is None or history:
            step = measure(setting, step.length if step else seq or 1, history=history)
            told(step)
    longest = found.length if found else None
    return Plan(name, dp * sp, gpu, sp, capacity, step, longest, host, query_heads(model))
