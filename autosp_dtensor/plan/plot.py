"""Pictures of plans: memory over a step by kind, and the longest length by configuration."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..errors import UsageError
from .plan import Plan

__all__ = ["draw"]

_POINTS = 2000  # of the step; a picture shows no more


def draw(path: str, shown: Plan, lengths: Mapping[str, int]) -> None:
    """Write a picture to `path` (its ending says which kind).

    Args:
        shown: a plan with `history`, whose step is drawn.
        lengths: tokens by the name of a configuration; empty: only the step is drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(
            "a picture of a plan needs matplotlib.",
            where="autosp.plan",
            have="matplotlib is not installed",
            why="it draws",
            fix="pip install 'autosp-dtensor[plot]', or leave --plot out",
        ) from error
    figure = figures.Figure(figsize=(12 if lengths else 8, 5), layout="constrained")
    columns = figure.subplots(1, 2 if lengths else 1, squeeze=False)[0]
    _draw_step(columns[0], shown)
    if lengths:
        names = list(lengths)
        bars = columns[1].barh(names, [lengths[name] for name in names])
        columns[1].bar_label(bars, [f" {lengths[name]:,}" for name in names])
        columns[1].set(xlabel="tokens", title="longest sequence by configuration")
        columns[1].margins(x=0.2)
        columns[1].invert_yaxis()
    figure.savefig(path)


def _draw_step(axes: Any, shown: Plan) -> None:
    history = shown.step.history
    every = -(-len(history) // _POINTS)
    # Of each stretch the fullest moment, so that the peak is in the picture.
    stretches = [history[k : k + every] for k in range(0, len(history), every)]
    fullest = [max(stretch, key=lambda live: sum(live.values())) for stretch in stretches]
    kinds = {kind: max(live.get(kind, 0) for live in fullest) for kind in shown.step.kinds}
    seen = [kind for kind, most in kinds.items() if most * 200 >= shown.step.peak]
    axes.stackplot(
        [k * every for k in range(len(fullest))],
        *([live.get(kind, 0) / 2**30 for live in fullest] for kind in seen),
        labels=seen,
    )
    axes.axhline(shown.capacity / 2**30, color="black", linestyle="--", linewidth=1)
    axes.set(
        title=f"{shown.model}, {shown.step.length:,} tokens, {shown.gpus} x {shown.gpu}",
        xlabel="operations of a step",
        ylabel="GiB of one GPU",
    )
    axes.legend(loc="upper left", fontsize="small")
