"""Models as people write them by hand, each with habits that a library would not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

VOCABULARY = 64
WIDTH = 32
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 8
LAYERS = 2


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q = q.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        k = k.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        v = v.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Learned positions from `arange`, fused qkv, tied head, and the shift of targets by slicing
    inside."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(64, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.h = nn.ModuleList(NanoBlock() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= 64, f"cannot forward a sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if labels is not None:
            shifted = logits[:, :-1, :].contiguous()
            targets = labels[:, 1:].contiguous()
            loss = F.cross_entropy(
                shifted.view(-1, shifted.size(-1)), targets.view(-1), ignore_index=-100
            )
        return logits, loss


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
    angles = torch.outer(torch.arange(end, dtype=torch.float64), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    seqlen = pairs.shape[1]
    table = freqs_cis[0:seqlen]
    assert table.shape == (seqlen, pairs.shape[-1])
    table = table.view(*[d if i in (1, pairs.ndim - 1) else 1 for i, d in enumerate(pairs.shape)])
    return torch.view_as_real(pairs * table).flatten(3).type_as(x)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    bs, slen, n_kv_heads, head_dim = x.shape
    return (
        x[:, :, :, None, :]
        .expand(bs, slen, n_kv_heads, n_rep, head_dim)
        .reshape(bs, slen, n_kv_heads * n_rep, head_dim)
    )


class TitanAttention(nn.Module):
    def __init__(self, groups: str) -> None:
        super().__init__()
        self.groups = groups
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        bs, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        # -1 for the number of heads, as torchtitan has it for tensor parallelism.
        xq = xq.view(bs, seqlen, -1, HEAD_SIZE)
        xk = xk.view(bs, seqlen, -1, HEAD_SIZE)
        xv = xv.view(bs, seqlen, -1, HEAD_SIZE)
        xq, xk = apply_rotary_emb(xq, freqs_cis), apply_rotary_emb(xk, freqs_cis)
        if self.groups == "repeat":
            xk, xv = (repeat_kv(y, HEADS // KV_HEADS) for y in (xk, xv))
        xq, xk, xv = (y.transpose(1, 2) for y in (xq, xk, xv))
        out = F.scaled_dot_product_attention(
            xq, xk, xv, is_causal=True, enable_gqa=self.groups == "enable_gqa"
        )
        return self.wo(out.transpose(1, 2).contiguous().view(bs, seqlen, -1))


class TitanBlock(nn.Module):
    def __init__(self, groups: str) -> None:
        super().__init__()
        self.attention = TitanAttention(groups)
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.w1 = nn.Linear(WIDTH, 64, bias=False)
        self.w2 = nn.Linear(64, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class TitanLlama(nn.Module):
    """As torchtitan: a complex rotary table as a buffer, blocks in a ModuleDict, logits out and the
    loss elsewhere."""

    def __init__(self, groups: str = "enable_gqa") -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("freqs_cis", precompute_freqs_cis(HEAD_SIZE, 64), persistent=False)
        self.layers = nn.ModuleDict({str(i): TitanBlock(groups) for i in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


def titan_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Targets come shifted from the loader."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


class EinopsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, bias=False)
        self.to_out = nn.Linear(HEADS * HEAD_SIZE, WIDTH)
        self.ff = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm(x))
        q, k, v = qkv.split([HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE], dim=-1)
        q = rearrange(q, "b s (h d) -> b h s d", h=HEADS)
        k, v = (
            repeat(y, "b s (h d) -> b (h g) s d", h=KV_HEADS, g=HEADS // KV_HEADS) for y in (k, v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.to_out(rearrange(out, "b h s d -> b s (h d)"))
        return x + self.ff(x)


class EinopsModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(64, WIDTH))
        self.blocks = nn.Sequential(*(EinopsBlock() for _ in range(LAYERS)))
        self.to_logits = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.tokens(x) + rearrange(self.places[: x.shape[1]], "s d -> 1 s d")
        logits = self.to_logits(self.blocks(h))
        loss = F.cross_entropy(
            rearrange(logits[:, :-1], "b s v -> b v s"), labels[:, 1:], ignore_index=-100
        )
        return {"loss": loss, "logits": logits}


class SequenceFirstBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.fc1 = nn.Linear(WIDTH, 64)
        self.fc2 = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        s, b, _ = x.shape
        # Megatron's layout: the three parts stand side by side within each head.
        qkv = self.qkv(self.norm(x)).view(s, b, HEADS, 3 * HEAD_SIZE)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k, v = (y.permute(1, 2, 0, 3) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.permute(2, 0, 1, 3).reshape(s, b, WIDTH))
        return x + self.fc2(F.gelu(self.fc1(x)))


class SequenceFirst(nn.Module):
    """`[S, B, D]` throughout, ids `[S, B]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(SequenceFirstBlock() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(ids.shape[0], device=ids.device)
        x = self.embedding(ids) + self.position(positions)[:, None, :]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(
            logits[:-1].reshape(-1, VOCABULARY), labels[1:].reshape(-1), ignore_index=-100
        )
        return loss, logits
