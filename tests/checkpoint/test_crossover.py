"""What "auto" keeps of a layer of an 8B model as the sequence grows, and as memory gets short."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autosp_dtensor.checkpoint import Policy, Record, offloading, policy_of, record
from autosp_dtensor.checkpoint import choose as choosing
from autosp_dtensor.checkpoint.kinds import is_attention, is_product
from autosp_dtensor.cost import DEVICES
from autosp_dtensor.explain import explain_program
from autosp_dtensor.lower import Collective, Region
from tests.checkpoint.layers import layer_region

A100 = DEVICES["a100-80gb"]
SHORT, LONG = 2_048, 131_072


@functools.cache
def found(length: int) -> Record:
    """The layer's record, one rank of eight."""
    return record(layer_region(length))


def policy(length: int, share: float) -> Policy:
    """What "auto" does if a region may keep this share of what it would."""
    each = found(length)
    budget = int(share * choosing.whole_bytes(each))
    return policy_of({each.region: 1}, "auto", A100, budget, recorded=lambda r: each)


def again(length: int, share: float) -> Counter[str]:
    """Operations that run again, by kind; "in": the exchange of q, k and v, "out": the other."""
    names: Counter[str] = Counter()
    for choice in policy(length, share).choices.values():
        for k in choice.again:
            node = found(length).nodes[k]
            if isinstance(node.target, Collective) and node.target.sends:
                attention = [k for k, n in enumerate(found(length).nodes)
                             if n.op == "call_function" and is_attention(n)]  # fmt: skip
                names["in" if k < attention[0] else "out"] += 1
            elif is_attention(node):
                names["attention"] += 1
            elif is_product(node):
                names["products"] += 1
    return names


def explained(region: Region, given: Policy) -> list[str]:
    """The last lines of `explain`, of a program of that region alone."""
    program = SimpleNamespace(
        mesh=SimpleNamespace(size=lambda: 8), policy=given, host=None, grad=True,
        root=SimpleNamespace(walk=lambda: [("", region)]),
        nodes=lambda: [(n, 1) for n in region.graph.nodes if n.op == "call_function"],
    )  # fmt: skip
    return explain_program(program).splitlines()  # type: ignore[arg-type]


def forward_seconds(length: int) -> tuple[float, float]:
    """Of the layer's products and of its attention, on one of eight ranks, by hand."""
    width, inner, kv = 4096, 14336, 1024
    products = 2 * length // 8 * width * (2 * width + 2 * kv + 3 * inner)
    attention = 2 * (32 // 8) * (length * length // 2) * 2 * 128
    return (products / 312e12 / 0.6, attention / 312e12 / 0.6)


def said(length: int, share: float) -> float:
    """What `explain` says a step takes more."""
    last = explained(found(length).region, policy(length, share))[-1]
    match = re.search(r"a step takes \+([\d.]+)% \(a100-80gb's figures\)", last)
    assert last.startswith("checkpoint auto: regions keep ") and match, last
    return float(match[1]) / 100


def test_products_are_kept_when_short_and_attention_when_long() -> None:
    """The same share of what a layer would keep, a third: the crossover."""
    short, long = again(SHORT, 0.35), again(LONG, 0.35)
    assert short["attention"] and not short["products"]
    assert long["products"] and not long["attention"]


def test_explain_predicts_what_that_takes() -> None:
    """Arithmetic by hand, of three forwards; norms, copies and exchanges are the rest."""
    products, attention = forward_seconds(LONG)
    step = 3 * (products + attention)
    inner = products * 14336 / (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert again(LONG, 0.35) == {"products": 1}
    assert said(LONG, 0.35) == pytest.approx(inner / step, rel=0.25)
    assert again(LONG, 0.0)["products"] == 6  # all but the last
    assert said(LONG, 0.0) == pytest.approx((products - inner + attention) / step, rel=0.1)


SHARES = [0.9, 0.7, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0]


def test_exchanges_run_again_only_where_the_budget_demands_it_and_before_attention() -> None:
    """At long lengths: none with room; then that of q, k and v; attention itself last."""
    each = [again(LONG, share) for share in SHARES]
    assert not each[0]["in"] and not each[0]["out"] and not each[0]["attention"]
    first = {name: next(k for k, runs in enumerate(each) if runs[name])
             for name in ("in", "attention")}  # fmt: skip
    assert first["in"] < first["attention"]
    for runs, later in itertools.pairwise(each):
        assert runs["in"] <= later["in"] and runs["attention"] <= later["attention"]


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("share", SHARES)
def test_no_exchange_that_runs_again_would_have_found_room(length: int, share: float) -> None:
    record_, given = found(length), policy(length, share)
    for choice in given.choices.values():
        for k in choice.again:
            target = record_.nodes[k].target
            if isinstance(target, Collective) and target.sends:
                more = choosing.choice_of(record_, choice.keep | {k}, A100, choice.stages.cuts)
                assert more.bytes > share * choosing.whole_bytes(record_)


def test_explain_counts_exchanges_that_run_again() -> None:
    region = found(LONG).region
    assert "run again in a step: 2 exchanges" in explained(region, policy(LONG, 0.0))
    assert "run again in a step: 1 exchange" in explained(region, policy(LONG, 0.4))
    assert not [x for x in explained(region, policy(LONG, 0.5)) if x.startswith("run again")]


@pytest.mark.parametrize(("speed", "waits"), [(32e9, False), (1e9, True)])
def test_explain_says_what_a_step_waits_for_copies(speed: float, waits: bool) -> None:
    """All of a slow host's time is in the sum; a fast one's is behind the layer's own."""
    each, device = found(LONG), replace(A100, host=speed)
    given = offloading(
        {each.region: 1}, "sequence", device, None, 1 << 40, {}, recorded=lambda r: each
    )
    (choice,) = given.choices.values()
    assert choice.moved and (given.seconds > choice.seconds) == waits
    lines = explained(each.region, given)
    percents = [float(x) for x in re.findall(r"\+([\d.]+)%", "\n".join(lines))]
    if not waits:
        assert len(percents) == 1 and "waited for" not in "\n".join(lines)
        return
    late, whole = percents
    assert lines[-2].startswith("copies to the host and back that are waited for: +")
    alone = explained(each.region, replace(given, seconds=choice.seconds))[-1]
    assert whole - late == pytest.approx(float(re.findall(r"\+([\d.]+)%", alone)[0]), abs=0.11)
