"""Attention as the placer sees it: a form for each function, strategies for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...placement import Shard
from ..rule import FactorRule, Local, Op, Option, Rule
from . import torch_forms
from .flash_forms import flash_form
from .form import Form
from .heads import Heads, attend, query_heads
from .strategy import AttentionOption, Strategy

__all__ = ["FLASH", "RULES", "STRATEGIES", "AttentionRule"]

# A strategy is one file; the placer takes the option that sends least.
STRATEGIES: tuple[Strategy, ...] = (Heads(),)


class AttentionRule(Rule):
    """Each token reads all others, so that a split sequence needs a strategy.

    What attention is local on (batch rows; queries whose keys are whole) needs none.
    """

    def __init__(self, form: Callable[[Op], Form]) -> None:
        self.form = form
        self.plain = FactorRule(lambda op: form(op).factors)

    def heads(self, op: Op) -> int:
        """Of queries; 0 where a call has none."""
        return query_heads(op, self.form(op))

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        form = self.form(op)
        for strategy in STRATEGIES:
            option = strategy.from_input(op, form, i, shard)
            if option is not None:
                return option
        return self.plain.from_input(op, i, shard, local=local)

    def fresh(self, op: Op) -> Iterable[Option]:
        form = self.form(op)
        for strategy in STRATEGIES:
            yield from strategy.fresh(op, form)
        yield from self.plain.fresh(op)

    def localize(self, op: Op, option: Option) -> Local:
        if isinstance(option, AttentionOption):
            return option.strategy.localize(op, self.form(op), option)
        local, form = super().localize(op, option), self.form(op)
        shards = [p for p in (*option.ins, *option.outs) if isinstance(p, Shard)]
        if form.empty is None or not any(0 in shard.sizes for shard in shards):
            return local
        return Local(attend, (local.target, form.empty, None, (), *local.args), local.kwargs)


RULES: dict[str, Rule] = {name: AttentionRule(form) for name, form in torch_forms.FORMS.items()}
FLASH = AttentionRule(flash_form)
