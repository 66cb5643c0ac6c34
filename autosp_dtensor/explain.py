"""The placed program as text: what runs where, what is sent, what is kept for backward."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from .checkpoint import Choice, Deferred, Tile, record, seconds_of
from .errors import UsageError
from .graph import describe, facts, short_name
from .lower import Call, Collective, Region
from .run.program import Program
from .run.traffic import size_text, traffic_of
from .source import call_site

__all__ = ["explain_program"]


def explain_program(program: Program) -> str:
    """One line per operation, equal regions once with a count, then totals; equal on every rank.

    Columns: operation (`>` marks communication); the global shape of its result, `@sp` marks the
    split dim; bytes that one rank sends, or keeps for backward (`host`: there); the source line.
    """
    n = program.mesh.size()
    lines = [f"sp={n}", ""]
    paths: dict[Region, list[str]] = {}
    for path, region in program.root.walk():
        paths.setdefault(region, []).append(path)
    kept = 0
    for region, places in paths.items():
        found = record(region)
        known, gone = found.kept_bytes(), set()
        whole, choices = sum(known.values()), program.policy.of(region, len(places))
        kept += sum(n * each.bytes for n, each in choices) if choices else whole * len(places)
        if choices:
            (_, choice), *_ = choices
            stays = {found.nodes[k] for k in choice.keep}
            known = {node: size for node, size in known.items() if node in stays}
            gone = {found.nodes[k] for k in choice.moves}
        more = f" and {len(places) - 1} more like it" if len(places) > 1 else ""
        lines.append(f"{places[0] or 'root'}{more}")
        shown = [n for n in region.graph.nodes if n.op == "call_function" and not _silent(n)]
        for node in shown:
            lines.append(_row(node, known, gone))
            lines.extend(_inside(node))
        lines.extend(_kept_lines(choices, region, whole))
        lines.append("")
    lines.extend(_totals(program, kept))
    lines.extend(_again_lines(program, paths))
    lines.extend(_host_lines(program, paths))
    return "\n".join(lines)


def _inside(node: Node) -> list[str]:
    """What a tile runs, or what makes a result when it is read; which kernel runs, and why."""
    if facts(node).note:
        return [f"    by {facts(node).note}"]
    tile = node.target.tile if isinstance(node.target, Deferred) else node.target
    if not isinstance(tile, Tile):
        return []
    names = [short_name(n.target) for n in tile.body.nodes if n.op == "call_function"]
    text = ", ".join(name for name in names if name != "getitem")
    return [f"    of {text}" if len(text) < 90 else f"    of {text[:86]} ..."]


def _kept_lines(choices: list[tuple[int, Choice]], region: Region, whole: int) -> list[str]:
    if not choices:
        return [f"  keeps {size_text(whole)} for backward"]
    (_, first), *last = choices
    lines = _choice_lines(first, region, whole)
    for count, choice in reversed(last):
        which = f"the last {count}" if (count, choice) == last[-1] else f"{count} before those"
        lines.append(f"  {which} keep {_difference(first, choice, region)}:")
        lines += [f"  {line}" for line in _choice_lines(choice, region, whole)]
    return lines


def _difference(first: Choice, other: Choice, region: Region) -> str:
    """What another choice keeps, next to the first one."""
    nodes = list(region.graph.nodes)
    names = [short_name(nodes[k].target) for k in sorted(other.keep - first.keep)]
    if first.keep - other.keep:
        return "other values"
    if not names:
        return "the same elsewhere"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0][:40]}{more} as well"


def _choice_lines(choice: Choice, region: Region, whole: int) -> list[str]:
    runs = _runs_again(choice, region)
    sent = _collectives(Counter({node: runs.count(node) for node in runs}))
    more = f", {sent} of them" if sent else ""
    if twice := len(runs) - len(choice.again):
        more += f"; {twice} of them once more for a later stage"
    lines = [
        f"  keeps {size_text(choice.bytes)} of {size_text(whole)} for backward",
        f"  {len(choice.again)} operations run again{more}",
    ]
    if choice.moves:
        taken = choice.moved - choice.inside
        lines.append(
            f"  moves {size_text(choice.moved)} to the host: {size_text(choice.inside)} of what it "
            f"keeps, {size_text(taken)} of what it is given"
        )
    return lines


def _runs_again(choice: Choice, region: Region) -> list[Node]:
    """Operations, once for each stage that they run again in."""
    nodes = list(region.graph.nodes)
    return [nodes[k] for stage in choice.stages.each for k in stage.again]


def _collectives(times: Mapping[Node, int]) -> str:
    """`2 exchanges, 1 all_reduce`: how many of these operations send, by kind."""
    kinds: Counter[str] = Counter()
    for node, count in times.items():
        if isinstance(node.target, Collective) and node.target.sends:
            kinds[node.target.kind] += count
    exchanges = kinds.pop("all_to_all", 0)
    texts = [f"{exchanges} exchange{'s' * (exchanges > 1)}"] if exchanges else []
    return ", ".join([*texts, *(f"{count} {kind}" for kind, count in sorted(kinds.items()))])


def _again_lines(program: Program, paths: dict[Region, list[str]]) -> list[str]:
    """What running again costs, predicted; a step is three times its forward."""
    choices = [
        (region, count, choice)
        for region, places in paths.items()
        for count, choice in program.policy.of(region, len(places))
    ]
    if not choices:
        return []
    device = program.policy.device
    forward = sum(
        seconds_of(node, device) * len(places)
        for region, places in paths.items()
        for node in region.graph.nodes
        if node.op == "call_function" and not isinstance(node.target, Call)
    )
    again = sum(choice.seconds * count for _, count, choice in choices)
    kept = sum(choice.bytes * count for _, count, choice in choices)
    times: Counter[Node] = Counter()
    for region, count, choice in choices:
        for node in _runs_again(choice, region):
            times[node] += count
    whole = program.policy.seconds
    lines = []
    if sent := _collectives(times):
        lines.append(f"run again in a step: {sent}")
    if whole > again:
        late = (whole - again) / (3 * forward)
        lines.append(f"copies to the host and back that are waited for: +{late:.1%}, in the sum:")
    lines.append(
        f"checkpoint {program.policy.mode}: regions keep {size_text(kept)}, "
        f"a step takes +{whole / (3 * forward):.1%} ({device.name}'s figures)"
    )
    return lines


def _host_lines(program: Program, paths: dict[Region, list[str]]) -> list[str]:
    """What all regions move; what does not find room stays on the device."""
    if program.host is None:
        return []
    moved = sum(
        choice.moved * count
        for region, places in paths.items()
        for count, choice in program.policy.of(region, len(places))
    )
    return [
        f"offload: {size_text(moved)} per rank wait in host memory, "
        f"of {size_text(program.host.limit)} that may"
    ]


def _silent(node: Node) -> bool:
    return (
        node.target is operator.getitem
        and isinstance(node.args[1], int)
        and facts(node).option is None
    )


def _row(node: Node, kept: dict[Node, int], gone: set[Node]) -> str:
    known = facts(node)
    target: Any = node.target
    if isinstance(target, Call):
        return f"  [{target.path}]"
    name = target.kind if isinstance(target, Collective) else short_name(target)
    mark = "> " if isinstance(target, Collective) and target.sends else "  "
    shape = describe(known.meta, known.placement)
    if len(known.outs) > 1:
        shape += f" +{len(known.outs) - 1}"
    note = (
        f"sends {size_text(known.bytes)}"
        if known.bytes
        else f"{'host' if node in gone else 'keeps'} {size_text(kept[node])}"
        if kept.get(node)
        else ""
    )
    where = (
        known.source.rpartition("(")[2].rstrip(")") if not isinstance(target, Collective) else ""
    )
    return f"{mark}{name[:14]:<15}{shape[:29]:<30}{note:<15}{where[-18:]}".rstrip()


def _totals(program: Program, kept: int) -> list[str]:
    forward, backward = traffic_of(program.nodes(), grad=program.grad)
    return [
        f"forward:  {forward}",
        f"backward: {backward}",
        f"kept for backward: {size_text(kept)} per rank",
    ]


def latest(program: Program | None) -> Program:
    if program is None:
        raise UsageError(
            "there is no program to explain yet.",
            where=call_site(),
            have="no call so far",
            why="programs are traced at the first call",
            fix="call the model once",
        )
    return program
