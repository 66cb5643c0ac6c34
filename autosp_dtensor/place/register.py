"""Rules of the user's, written like einops patterns."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from .._torch import OpOverload
from ..capture.bypass import active_recorder
from ..errors import UsageError
from ..graph import describe
from ..source import call_site
from .rule import FactorRule, Factors, Op
from .table import USER_RULES

__all__ = ["UserRule", "parse_spec", "register_rule"]

_TOKEN = re.compile(r"\.\.\.|\[[A-Za-z_]\w*\]|[A-Za-z_]\w*|\(\)|1")


class UserRule(FactorRule):
    """A rule of the user's. attention: what they say of its cost; None: nothing."""

    def __init__(self, factors: Callable[[Op], Factors], attention: bool | None) -> None:
        super().__init__(factors)
        self.attention = attention


def register_rule(
    target: Callable[..., Any],
    spec: str,
    *,
    fake: Callable[..., Any] | None = None,
    attention: bool | None = None,
) -> Callable[..., Any]:
    """Say on which dims an operation may be split.

    The spec names the dims of each tensor argument and result, as einops does: `"b s [d], [d] -> b
    s [d]"`. Tensors are split together on equal names. `[d]` is read whole: sp moves to another dim
    first, by an all-to-all. A name without brackets that no result has is summed over, and its
    terms are added over ranks. `...` stands for any leading dims, `()` for a scalar. Arguments that
    are no tensors are not named.

    Args:
        target: a torch function, a custom op (`torch.ops.ns.name` or what `torch.library.custom_op`
            gives), a subclass of torch.autograd.Function, or a Python function of tensors.
        spec: the pattern.
        fake: computes results of the right shape and dtype from tensors without data; needed where
            `target` cannot run on them (a kernel that reads memory).
        attention: whether its time grows with the square of the sequence, so that checkpoints keep
            its result rather than run it again, as they do with attention. None: if it reads two or
            more of its tensors whole along a dim before their last (queries, keys, values).

    Returns:
        `target`; for a Python function a wrapper, which the model must call in its place.

    Raises:
        UsageError: the pattern cannot be read.

    Example:
        >>> histogram = autosp.register_rule(histogram, "b [s] -> b [n]")
    """
    rule = UserRule(functools.partial(_factors, spec, parse_spec(spec)), attention)
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        USER_RULES[target] = rule
        return target
    overload = getattr(target, "_opoverload", None)  # torch.library.custom_op
    if overload is not None:
        target = overload
    if isinstance(target, OpOverload):
        USER_RULES[target] = USER_RULES[target.overloadpacket] = rule
        return target
    if isinstance(target, types.FunctionType) and not target.__module__.split(".")[0] == "torch":
        return _opaque(target, rule, fake)
    USER_RULES[target] = rule
    return target


def _opaque(
    function: types.FunctionType, rule: UserRule, fake: Callable[..., Any] | None
) -> Callable[..., Any]:
    """A function that the tracer records as one call and does not look into."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is None:
            return function(*args, **kwargs)
        run = fake or function
        return recorder.opaque(function, run, args, kwargs, function.__name__, fake)

    USER_RULES[function] = rule
    return call


Term = tuple[str, ...]


def parse_spec(spec: str) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """The names of each input and each result."""
    left, arrow, right = spec.partition("->")
    if not arrow or not right.strip():
        raise UsageError(
            f"the pattern {spec!r} has no '->' with results after it.",
            where=call_site("register_rule"),
            have=repr(spec),
            why="a rule says where the dims of the arguments are in the results",
            fix='for example "b s d, [d] -> b s d"',
        )
    return _terms(left, spec), _terms(right, spec)


def _terms(side: str, spec: str) -> tuple[Term, ...]:
    found = []
    for text in side.split(","):
        names = tuple(_TOKEN.findall(text))
        if "".join(names) != text.replace(" ", ""):
            raise UsageError(
                f"{text.strip()!r} in the pattern {spec!r} cannot be read.",
                where=call_site("register_rule"),
                have=repr(spec),
                why="each dim has a name of its own; names may not be joined or repeated by count",
                fix="names, [names], ... and () separated by spaces",
            )
        found.append(tuple(name for name in names if name != "()"))
    return tuple(found)


def _factors(spec: str, parsed: tuple[tuple[Term, ...], tuple[Term, ...]], op: Op) -> Factors:
    ins, outs = parsed
    if len(ins) != len(op.ins) or len(outs) != len(op.outs):
        raise UsageError(
            f"the pattern {spec!r} of {op.name} has {len(ins)} inputs and {len(outs)} results, "
            f"the call has {len(op.ins)} tensors and gives {len(op.outs)}.",
            where=f"{op.source}, {op.name}",
            have=_shapes(op),
            why="each tensor, weights too, and each result has a term of its own",
            fix="one term for each tensor among the arguments, and one for each result: "
            'register_rule(fn, "b s d, [d] -> b s d")',
        )
    whole = {name[1:-1] for term in (*ins, *outs) for name in term if name.startswith("[")}

    def names(term: Term, rank: int) -> tuple[str | None, ...]:
        plain = [name.strip("[]") for name in term]
        if "..." in plain:
            at = plain.index("...")
            width = rank - len(plain) + 1
            plain[at : at + 1] = [f".{i - width}" for i in range(width)]
        if len(plain) != rank:
            raise UsageError(
                f"{' '.join(term)!r} in the pattern {spec!r} of {op.name} names {len(plain)} dims, "
                f"the tensor has {rank}.",
                where=f"{op.source}, {op.name}",
                have=_shapes(op),
                why="each dim has a name",
                fix="name each dim; '...' stands for any leading dims, '()' for a scalar",
            )
        return tuple(None if name == "1" else name for name in plain)

    named_ins = tuple(names(t, len(m.shape)) for t, m in zip(ins, op.ins, strict=True))
    named_outs = tuple(names(t, len(m.shape)) for t, m in zip(outs, op.outs, strict=True))
    read = {
        n for term in named_ins for n in term if n is not None
    }  # what only results have is whole
    local = frozenset(read - whole)
    sums = frozenset(n for n in local if not any(n in names_ for names_ in named_outs))
    return Factors(named_ins, named_outs, local, sums)


def _shapes(op: Op) -> list[str]:
    args = [f"arg {k} {describe(meta)}" for k, meta in enumerate(op.ins)]
    return [*args, *(f"result {k} {describe(meta)}" for k, meta in enumerate(op.outs))]
