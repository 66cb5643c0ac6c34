"""Operations that are local on every dim, and the losses of two tensors of one shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, b, c, drawn, f, i, same, u, written


def _loss(name: str, first: Tensor, second: Tensor, *more: Tensor) -> list[Case]:
    call = getattr(F, name)
    terms = ",".join("x" * t.dim() for t in (first, second, *more))
    whole = terms.replace("x", ".")
    return [
        Case(lambda *t: call(*t, reduction="none"), (first, second, *more), terms),
        Case(lambda *t: call(*t, reduction="mean"), (first, second, *more), whole),
        Case(lambda *t: call(*t, reduction="sum"), (first, second, *more), whole),
    ]


POINTWISE: dict[str, list[Case]] = {
    "where": [
        *same(torch.where, b(4, 8, 6), f(4, 8, 6), f(4, 8, 6)),
        Case(lambda m, x: torch.where(m, x, 0.0), (b(8, 6), f(4, 8, 6)), "xx,xxx"),
        Case(lambda m, x: torch.where(m, x, 0.0), (b(8, 1), f(4, 8, 6)), "x.,xxx"),
    ],
    "masked_fill": [
        *same(lambda x, m: x.masked_fill(m, -1.0), f(4, 8, 6), b(4, 8, 6)),
        Case(lambda x, m: x.masked_fill(m, -1.0), (f(4, 8, 6), b(6)), "xxx,x"),
        Case(written(lambda x, m: x.masked_fill_(m, -1.0)), (f(4, 8), b(4, 1)), "xx,x."),
    ],
    "clamp": [
        *same(lambda x: x.clamp(-0.5, 0.5)),
        *same(lambda x, m: x.clamp(min=m), f(4, 8), f(4, 8)),
    ],
    "clip": same(lambda x: x.clip(-0.5, 0.5)),
    "copy": same(written(lambda x, y: x.copy_(y)), f(4, 8), f(4, 8)),
    "fill": same(written(lambda x: x.fill_(2.0))),
    "zero": same(written(lambda x: x.zero_())),
    "to": same(lambda x: x.to(torch.float32)),
    "type_as": [
        *same(lambda x, y: x.type_as(y), f(4, 8), i(4, 8)),
        Case(lambda x, y: x.type_as(y), (f(4, 8), i(8)), "xx,x"),
    ],
    "float": same(lambda x: x.float()),
    "double": same(lambda x: x.double(), i(4, 8)),
    "half": same(lambda x: x.half()),
    "bfloat16": same(lambda x: x.bfloat16()),
    "bool": same(lambda x: x.bool(), i(4, 8)),
    "int": same(lambda x: x.int()),
    "long": same(lambda x: x.long()),
    "type": same(lambda x: x.type(torch.float32)),
    "contiguous": same(lambda x: x.transpose(0, 1).contiguous()),
    "clone": same(lambda x: x.clone()),
    "detach": same(lambda x: x.detach()),
    "zeros_like": same(torch.zeros_like),
    "ones_like": same(torch.ones_like),
    "full_like": same(lambda x: torch.full_like(x, 3.0)),
    "empty_like": drawn(torch.empty_like, f(4, 8), dims="xx"),
    "rand_like": drawn(torch.rand_like, f(4, 8), dims="xx"),
    "randn_like": drawn(torch.randn_like, f(4, 8), dims="xx"),
    "randint_like": drawn(lambda x: torch.randint_like(x, 9), f(4, 8), dims="xx"),
    "dropout": [
        *drawn(lambda x: F.dropout(x, 0.5), f(4, 8), dims="xx"),
        *same(lambda x: F.dropout(x, 1.0), f(4, 8)),
    ],
    "alpha_dropout": drawn(lambda x: F.alpha_dropout(x, 0.5, True), f(4, 8), dims="xx"),
    "bernoulli": drawn(torch.bernoulli, u(4, 8), dims="xx"),
    "normal": drawn(written(lambda x: x.normal_()), f(4, 8), dims="xx"),
    "uniform": drawn(written(lambda x: x.uniform_()), f(4, 8), dims="xx"),
    "exponential": drawn(written(lambda x: x.exponential_()), f(4, 8), dims="xx"),
    "lerp": [
        *same(lambda x, y: torch.lerp(x, y, 0.3), f(4, 8), f(4, 8)),
        *same(torch.lerp, f(4, 8), f(4, 8), u(4, 8)),
    ],
    "addcmul": same(torch.addcmul, f(4, 8), f(4, 8), f(4, 8)),
    "addcdiv": same(torch.addcdiv, f(4, 8), f(4, 8), u(4, 8) + 1),
    "nan_to_num": same(torch.nan_to_num, torch.where(b(4, 8), f(4, 8), torch.nan)),
    "hardswish": same(F.hardswish),
    "log_sigmoid": same(F.logsigmoid),
    "mish": [*same(F.mish), *same(written(lambda x: F.mish(x, inplace=True)))],
    "floor_divide": [
        *same(torch.floor_divide, i(4, 8, high=90), i(4, 8) + 1),
    ],
    "floordiv": same(lambda x: x // 2, i(4, 8)),
    "rfloordiv": same(lambda x: 7 // x, i(4, 8) + 1),
    "complex": [
        *same(torch.complex, f(4, 8), f(4, 8)),
        Case(torch.complex, (f(4, 8), f(8)), "xx,x"),
    ],
    "conj": [*same(torch.conj, c(4, 8)), *same(torch.Tensor.conj, c(4, 8))],
    "conj_physical": same(torch.conj_physical, c(4, 8)),
    "resolve_conj": same(lambda x: x.conj().resolve_conj(), c(4, 8)),
    "resolve_neg": same(lambda x: x.conj().imag.resolve_neg(), c(4, 8)),
    "real": [*same(lambda x: x.real, c(4, 8)), *same(torch.real, c(4, 8))],
    "imag": same(lambda x: x.imag, c(4, 8)),
    "polar": same(torch.polar, u(4, 8), f(4, 8)),
    "mse_loss": _loss("mse_loss", f(4, 8), f(4, 8)),
    "l1_loss": _loss("l1_loss", f(4, 8), f(4, 8)),
    "smooth_l1_loss": _loss("smooth_l1_loss", f(4, 8), f(4, 8)),
    "huber_loss": _loss("huber_loss", f(4, 8), f(4, 8)),
    "binary_cross_entropy": _loss("binary_cross_entropy", u(4, 8), u(4, 8)),
    "binary_cross_entropy_with_logits": [
        *_loss("binary_cross_entropy_with_logits", f(4, 8), u(4, 8)),
        Case(
            lambda x, y, p: F.binary_cross_entropy_with_logits(
                x, y, pos_weight=p, reduction="none"
            ),
            (f(4, 8), u(4, 8), u(8)),
            "xx,xx,x",
        ),
    ],
    "kl_div": [
        *_loss("kl_div", f(4, 8), u(4, 8)),
        Case(lambda x, y: F.kl_div(x, y, reduction="batchmean"), (f(4, 8), u(4, 8)), "..,.."),
    ],
    "soft_margin_loss": _loss("soft_margin_loss", f(4, 8), f(4, 8).sign()),
    "poisson_nll_loss": _loss("poisson_nll_loss", f(4, 8), u(4, 8)),
}
