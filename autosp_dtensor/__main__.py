"""python -m autosp_dtensor plan --model NAME --gpus 8 --gpu a100-80gb [--plot out.png]"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from .checkpoint import MODES
from .cost import DEVICES
from .errors import AutoSPError
from .plan import Plan, plan
from .plan.configs import presets, query_heads
from .plan.plot import draw

_WIDTH = 21  # of a bar


class _Progress:
    """Steps that were measured: a bar on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        # Six of models with few layers and one of the whole; a search may take more.
        self.count, self.usual = 0, 7

    def __call__(self, text: str) -> None:
        self.count += 1
        if not sys.stderr.isatty():
            sys.stderr.write(f"{text}\n")
            return
        full = _WIDTH * min(self.count, self.usual) // self.usual
        bar = "#" * full + "." * (_WIDTH - full)
        sys.stderr.write(f"\r\033[K[{bar}] {text.strip()}")
        sys.stderr.flush()

    def done(self) -> None:
        if self.count and sys.stderr.isatty():
            sys.stderr.write("\n")


def _bytes(text: str) -> int:
    """`1.2TiB`, `900GiB`: a size in bytes."""
    units = {"TiB": 40, "GiB": 30, "MiB": 20}
    unit = next((u for u in units if text.endswith(u)), None)
    try:
        size = int(float(text.removesuffix(unit or "")) * (1 << units.get(unit or "", 0)))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; for example 1.2TiB or 900GiB")
    return size


def _tile(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _shared_by(gpus: int, model: str) -> int:
    """The most ranks, of those that divide the GPUs, that have a query head each. Above that every
    rank computes all heads. All GPUs where a config says no heads."""
    most = min(gpus, query_heads(model) or gpus)
    return next(sp for sp in range(most, 0, -1) if gpus % sp == 0)


_PICTURES = (".png", ".pdf", ".svg", ".eps", ".ps", ".jpg", ".jpeg", ".tif", ".tiff", ".webp")


def _configurations(tile: str | int, host: int | None) -> dict[str, dict[str, Any]]:
    """What lengths are compared for, by name: each way to checkpoint, with tiles and without, and
    with host memory where there is some."""
    tiled = "auto" if tile == "none" else tile
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        found[f"{mode}, no tiles"] = {"checkpoint": mode, "tile": "none", "host_memory": None}
        found[mode] = {"checkpoint": mode, "tile": tiled, "host_memory": None}
        if host:
            found[f"{mode}, offload"] = {"checkpoint": mode, "tile": tiled, "host_memory": host}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m autosp_dtensor")
    commands = parser.add_subparsers(dest="command", required=True)
    planned = commands.add_parser(
        "plan", help="memory of a step, or the longest sequence that fits"
    )
    planned.add_argument("--model", required=True,
                         help="a config.json or its directory, a model_type of transformers, or "
                              "one of "
                              f"{', '.join(presets())}")  # fmt: skip
    planned.add_argument("--gpus", type=int, default=8)
    planned.add_argument("--sp", type=int,
                         help="ranks that share a sequence; by default the largest divisor of "
                              "--gpus that is at most the model's query heads (all GPUs where "
                              "its config says none)")  # fmt: skip
    planned.add_argument("--gpu", default="a100-80gb", type=str.lower, choices=list(DEVICES))
    planned.add_argument("--seq", type=int, help="a length; without it the longest is looked for")
    planned.add_argument("--checkpoint", default="auto", choices=list(MODES))
    planned.add_argument("--tile", default="auto", type=_tile,
                         help="auto, none, or tokens of MLPs and losses at a time")  # fmt: skip
    planned.add_argument("--batch", type=int, default=1)
    planned.add_argument("--offload", action="store_true",
                         help="values that wait for backward may go to host memory")  # fmt: skip
    planned.add_argument("--host-memory", type=_bytes, metavar="SIZE",
                         help="of one machine, for --offload: 900GiB; 1TiB by default")  # fmt: skip
    planned.add_argument("--machine", type=int, default=8, help="GPUs that share it")
    planned.add_argument("--plot", metavar="FILE",
                         help="a picture of memory over the step; without --seq, also of the "
                              "longest length by configuration, each searched for")  # fmt: skip
    given = parser.parse_args(arguments)
    asked_sp = 1 if given.sp is None else given.sp
    if given.gpus < 1 or asked_sp < 1 or given.gpus % asked_sp:
        parser.error(f"--gpus {given.gpus} is not a multiple of --sp {asked_sp}, both at least 1")
    if given.host_memory is not None and not given.offload:
        parser.error("--host-memory goes with --offload")
    if given.plot and not Path(given.plot).absolute().parent.is_dir():
        parser.error(f"--plot {given.plot}: there is no such folder")
    if given.plot and Path(given.plot).suffix.lower() not in _PICTURES:
        parser.error(f"--plot {given.plot}: a picture is one of {', '.join(_PICTURES)}")
    host = (given.host_memory or 1 << 40) if given.offload else None
    logging.getLogger("autosp_dtensor").setLevel(logging.ERROR)
    progress = _Progress()

    def planned_for(configuration: dict[str, Any], history: bool = False) -> Plan:
        sp = given.sp or _shared_by(given.gpus, given.model)
        return plan(
            given.model, (given.gpus // sp, sp), gpu=given.gpu, seq=given.seq, batch=given.batch,
            machine=given.machine, history=history, progress=progress, **configuration,
        )  # fmt: skip

    asked = {"checkpoint": given.checkpoint, "tile": given.tile, "host_memory": host}
    compared = _configurations(given.tile, host) if given.plot and given.seq is None else {}
    progress.usual *= len(compared) or 1
    try:
        found = planned_for(asked, bool(given.plot))
        plans = {n: found if each == asked else planned_for(each) for n, each in compared.items()}
        lengths = {name: each.step.length if each.fits else 0 for name, each in plans.items()}
        if given.plot:
            draw(given.plot, found, lengths)
    except AutoSPError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    finally:
        progress.done()
    sys.stdout.write(f"{found}\n")
    return 0 if found.fits else 1


if __name__ == "__main__":
    raise SystemExit(main())
