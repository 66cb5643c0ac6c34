"""Model T of FIELD-CASES.md: a small decoder with fixed weights, so that its losses are known
numbers.

Vocabulary 64, width 32, 2 layers, Hq=4, Hkv=2, head size 8, MLP 32-64-32 (silu, no gate), RMSNorm
without weight, rotary base 10000 (halves rotated), untied head, fp64, weights 0.3*randn. Loss
4.252752 and gradient norm 5.585010 on the ids of `ids_of_t()`. The options are the variants that
the cases speak of; each leaves the base weights as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 64
WIDTH = 32
IGNORED = -100
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class TConfig:
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    tied: bool = False
    attention: tuple[str, ...] = ("sdpa",)  # per layer, repeated: sdpa, matmul, einsum, tril
    window: int | None = None
    qk_norm: str | None = None  # "head": over one head's values, "hidden": over all heads at once
    positions: str = (
        "rotary"  # rotary, learned (a table, no rotation), ntk (base grows with the length), mrope
    )
    max_position: int = 8  # for ntk only
    table_rows: int = 32  # for learned only
    checkpointed: tuple[int, ...] = ()
    graph_break: bool = False
    lora_rank: int = 0


@dataclass
class TOutput:
    loss: Tensor | None
    logits: Tensor


# torch 2.11's FSDP2 finds the tensors of a dataclass only where torch knows the class.
torch.export.register_dataclass(TOutput)


def ids_of_t(batch: int = 1, length: int = 16) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def labels_with_targets(ids: Tensor, slots: Any) -> Tensor:
    """Labels (not shifted) of which only the given target slots count: slot i is the target of
    token i, ids[i + 1].

    `slots` is one collection of slots for all rows, or a list with one for each row.
    """
    per_row = slots if isinstance(slots, list) else [slots] * ids.shape[0]
    labels = torch.full_like(ids, IGNORED)
    for row, chosen in enumerate(per_row):
        for slot in chosen:
            if slot + 1 < ids.shape[1]:
                labels[row, slot + 1] = ids[row, slot + 1]
    return labels


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _NORM_EPS)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos = torch.cat([angles.cos()] * 2, -1).to(x.dtype)
    sin = torch.cat([angles.sin()] * 2, -1).to(x.dtype)
    return x * cos + torch.cat([-second, first], -1) * sin


@torch.compiler.disable
def not_compiled(x: Tensor) -> Tensor:
    """torch.compile breaks its graph here."""
    return x * 1.0


class Lora(nn.Module):
    """A frozen linear map plus B @ A. B does not start at zero: with zero the gradient of A would
    be zero too."""

    def __init__(self, base: nn.Linear, rank: int, draw: Any) -> None:
        super().__init__()
        self.base = base
        self.base.weight.requires_grad_(False)
        self.A = nn.Parameter(draw(rank, base.in_features))
        self.B = nn.Parameter(draw(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.A), self.B)


class Attention(nn.Module):
    def __init__(self, config: TConfig, kind: str) -> None:
        super().__init__()
        self.config = config
        self.kind = kind
        q_size = config.heads * config.head_size
        kv_size = config.kv_heads * config.head_size
        self.q = nn.Linear(WIDTH, q_size, bias=False)
        self.k = nn.Linear(WIDTH, kv_size, bias=False)
        self.v = nn.Linear(WIDTH, kv_size, bias=False)
        self.o = nn.Linear(q_size, WIDTH, bias=False)
        if config.qk_norm is not None:
            hidden = config.qk_norm == "hidden"
            self.q_norm = nn.Parameter(torch.empty(q_size if hidden else config.head_size))
            self.k_norm = nn.Parameter(torch.empty(kv_size if hidden else config.head_size))

    def forward(self, x: Tensor, angles: Tensor | None, keep: Tensor | None) -> Tensor:
        q, k, v = self.heads_of(x)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        out = self.mix(q, k, v, keep)
        return self.o(out.transpose(1, 2).flatten(2))

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.config.qk_norm == "hidden":
            q, k = rms_norm(q) * self.q_norm, rms_norm(k) * self.k_norm
        q, k, v = (
            y.view(*y.shape[:2], -1, self.config.head_size).transpose(1, 2) for y in (q, k, v)
        )
        if self.config.qk_norm == "head":
            q, k = rms_norm(q) * self.q_norm, rms_norm(k) * self.k_norm
        return q, k, v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        if self.kind == "sdpa":
            causal = keep is None
            return F.scaled_dot_product_attention(q, k, v, keep, is_causal=causal, enable_gqa=True)
        length = q.shape[2]
        if keep is None:
            keep = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if self.kind == "tril":
            return F.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if self.kind == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
            return torch.einsum("bhqk,bhkd->bhqd", weights, v)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, config: TConfig, kind: str) -> None:
        super().__init__()
        self.attention = Attention(config, kind)
        self.up = nn.Linear(WIDTH, 64, bias=False)
        self.down = nn.Linear(64, WIDTH, bias=False)
        self.graph_break = config.graph_break

    def forward(self, x: Tensor, angles: Tensor | None, keep: Tensor | None) -> Tensor:
        if self.graph_break:
            x = not_compiled(x)
        x = x + self.attention(rms_norm(x), angles, keep)
        return x + self.down(F.silu(self.up(rms_norm(x))))


class ModelT(nn.Module):
    def __init__(self, config: TConfig = TConfig()) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        kinds = config.attention
        self.blocks = nn.ModuleList(
            Block(config, kinds[layer % len(kinds)]) for layer in range(config.layers)
        )
        if config.positions == "learned":
            self.table = nn.Embedding(config.table_rows, WIDTH)
        self.double()
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """The weights of FIELD-CASES.md, in its order; those of a variant are drawn after them."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)

        drawn = [self.embedding.weight, self.head.weight]
        norms = []
        for block in self.blocks:
            a = block.attention
            drawn += [linear.weight for linear in (a.q, a.k, a.v, a.o, block.up, block.down)]
            norms += [a.q_norm, a.k_norm] if self.config.qk_norm is not None else []
        if self.config.positions == "learned":
            drawn.append(self.table.weight)
        for weight in drawn:
            weight.copy_(draw(*weight.shape))
        for weight in norms:
            weight.copy_(1 + draw(*weight.shape))
        if self.config.tied:
            self.head.weight = self.embedding.weight
        if self.config.lora_rank:
            self.adapt(draw)

    def adapt(self, draw: Any) -> None:
        """Freeze everything and add adapters on q, v, o and the MLP."""
        self.requires_grad_(False)
        for block in self.blocks:
            for owner, names in ((block.attention, "qvo"), (block, ("up", "down"))):
                for name in names:
                    setattr(owner, name, Lora(getattr(owner, name), self.config.lora_rank, draw))

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> TOutput:
        x = self.embedding(ids)
        hidden = self.hidden(x, position_ids, attention_mask)
        logits = self.head(hidden)
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if shift_labels is None:
            return TOutput(None, logits)
        loss = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=IGNORED)
        return TOutput(loss, logits)

    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        length = x.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=x.device)[None]
        angles = None
        if self.config.positions == "learned":
            x = x + self.table(position_ids)
        else:
            angles = self.angles(position_ids, length).unsqueeze(-3)
        keep = self.keep(length, mask, x.device)
        for layer, block in enumerate(self.blocks):
            if layer in self.config.checkpointed:
                x = checkpoint(block, x, angles, keep, use_reentrant=False)
            else:
                x = block(x, angles, keep)
        return rms_norm(x)

    def angles(self, position_ids: Tensor, length: int) -> Tensor:
        size = self.config.head_size
        base = 10000.0
        if self.config.positions == "ntk" and length > self.config.max_position:
            factor = 2.0
            grown = factor * length / self.config.max_position - (factor - 1)
            base *= grown ** (size / (size - 2))
        frequencies = base ** (
            -torch.arange(0, size, 2, dtype=torch.float64, device=position_ids.device) / size
        )
        angles = position_ids[..., None].double() * frequencies
        if self.config.positions == "mrope":
            # Frequencies 0 and 1 turn with the first axis of positions [3, B, S], 2 with the
            # second, 3 with the third.
            angles = torch.cat([angles[0, ..., :2], angles[1, ..., 2:3], angles[2, ..., 3:]], -1)
        return angles

    def keep(self, length: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        if mask is None and self.config.window is None:
            return None
        query = torch.arange(length, device=device)[:, None]
        key = torch.arange(length, device=device)[None, :]
        keep = key <= query
        if self.config.window is not None:
            keep = keep & (query - key < self.config.window)
        keep = keep[None, None]
        if mask is not None:
            # A padded query keeps itself, else its softmax would have nothing to sum over.
            keep = (keep & mask.bool()[:, None, None, :]) | (query == key)
        return keep
