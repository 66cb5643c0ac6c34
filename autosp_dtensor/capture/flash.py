"""Entry points of flash-attn (2, 3, 4), of torch's varlen_attn and of transformers around them:
each one call in the trace.

The model's own kernel runs, on the heads of a rank. What stands here are the names of arguments and
the shapes of results, of flash-attn 2.8, its hopper and cute interfaces, torch 2.11 to 2.14, and
transformers 5. An argument that is not known here is refused unless it is a plain value: a tensor
may differ by head, and a function may ask for a head's number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CaptureError
from ..graph import given
from ..tree import flatten

if TYPE_CHECKING:
    from .trace import Recorder

__all__ = ["ENTRIES", "FlashCall", "handlers"]


@dataclass(frozen=True)
class FlashCall:
    """How an entry point names and lays out its tensors.

    dims: of each tensor argument, "b m h d" and its like: b batch, m queries, t keys, h query
    heads, g key heads, n other. out: of the result. drops: arguments beyond its signature that it
    does not know, as transformers' does.
    """

    dims: dict[str, str]
    out: str
    dropout: str = "dropout_p"
    drops: bool = False


_PADDED = FlashCall(
    {"q": "b m h d", "k": "b t g d", "v": "b t g e", "alibi_slopes": "b h", "learnable_sink": "h"},
    "b m h e",
)
_QKV = FlashCall({"qkv": "b m n h d", "alibi_slopes": "b h"}, "b m h d")
_KV = FlashCall({"q": "b m h d", "kv": "b t n g d", "alibi_slopes": "b h"}, "b m h d")
_VARLEN = FlashCall(
    {"q": "m h d", "k": "t g d", "v": "t g e", "alibi_slopes": "b h", "learnable_sink": "h"},
    "m h e",
)
_VARLEN_QKV = FlashCall({"qkv": "m n h d", "alibi_slopes": "b h"}, "m h d")
_VARLEN_KV = FlashCall({"q": "m h d", "kv": "t n g d", "alibi_slopes": "b h"}, "m h d")
_TRANSFORMERS = FlashCall(
    {"query_states": "b m h d", "key_states": "b t g d", "value_states": "b t g e", "s_aux": "h"},
    "b m h e",
    dropout="dropout",
    drops=True,
)
_TORCH = FlashCall({"query": "m h d", "key": "t g d", "value": "t g e"}, "m h e")
_NAMES = {
    "flash_attn_func": _PADDED,
    "flash_attn_qkvpacked_func": _QKV,
    "flash_attn_kvpacked_func": _KV,
    "flash_attn_varlen_func": _VARLEN,
    "flash_attn_varlen_qkvpacked_func": _VARLEN_QKV,
    "flash_attn_varlen_kvpacked_func": _VARLEN_KV,
}
_MODULES = (
    "flash_attn.flash_attn_interface",
    "flash_attn",
    "flash_attn_interface",
    "flash_attn_3.flash_attn_interface",
    "flash_attn.cute.interface",
    "flash_attn.cute",
)
ENTRIES: dict[str, FlashCall] = {
    f"{module}.{name}": call for module in _MODULES for name, call in _NAMES.items()
}
_AROUND = "transformers.modeling_flash_attention_utils._flash_attention_forward"
ENTRIES[_AROUND] = _TRANSFORMERS
ENTRIES["torch.nn.attention.varlen.varlen_attn"] = _TORCH

# Tensors that count tokens or rows of the whole: every rank reads them whole.
_WHOLE = frozenset(
    "cu_seqlens cu_seqlens_q cu_seqlens_k max_seqlen max_seqlen_q max_seqlen_k min_seqlen_k "
    "seqused_q seqused_k cu_seq_q cu_seq_k max_q max_k "
    "attention_mask position_ids cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k".split()
)
_PAGED = frozenset("block_table page_table k_cache v_cache cache_seqlens".split())


def handlers() -> dict[str, Callable[..., Any]]:
    """A handler for each dotted path."""
    made: dict[str, Callable[..., Any]] = {path: _handler(path) for path in ENTRIES}
    made["transformers.masking_utils.flash_attention_mask"] = _keep_padding
    made["transformers.masking_utils.fast_all"] = _not_looked_at
    return made


def _keep_padding(recorder: Recorder, function: Any, bound: inspect.BoundArguments) -> Any:
    """transformers drops a mask whose values are all True; a mask says the same without a look."""
    given = bound.arguments
    mask = given.get("attention_mask")
    return None if mask is None else mask[:, -given["kv_length"] :]


def _not_looked_at(recorder: Recorder, function: Any, bound: inspect.BoundArguments) -> bool:
    """The same for flex_attention: not known to be all True."""
    return False


def _handler(path: str) -> Callable[..., Any]:
    def handle(recorder: Recorder, function: Any, bound: inspect.BoundArguments) -> Any:
        call = ENTRIES[path]
        named = _by_name(bound)
        if named.get("return_attn_probs") or named.get("return_softmax"):
            raise CaptureError(
                f"{function.__name__} is asked for its attention probabilities.",
                where=recorder.where(),
                have="return_attn_probs=True",
                why="they are S x S, and meant for tests of the kernel",
                fix="leave return_attn_probs out",
            )
        for name, value in named.items():
            dropped = call.drops and name not in bound.signature.parameters
            if dropped and name not in call.dims and name not in _PAGED:
                continue
            why = _why_refused(call, name, value)
            if why:
                dims = call.dims.get(name)
                raise CaptureError(
                    f"{function.__name__} is given {name}.",
                    where=recorder.where(),
                    have=_told(name, value),
                    why=why,
                    fix=f"pass it with the dims ({dims}), and q, k and v apart"
                    if dims
                    else f"leave {name} out, or wrap the call in a function of your own and "
                    "register it: autosp.register_rule(fn, ...)",
                )
        if "enable_gqa" in bound.signature.parameters and not named.get("enable_gqa"):
            _refuse_shared_heads(recorder, function, named)
        fake = _fake(call, _gives_lse(path, bound.signature, named))
        return recorder.opaque(
            function,
            fake,
            (),
            named,
            function.__name__,
            fake,
            form=path,
            random=bool(named.get(call.dropout)),
        )

    return handle


def _why_refused(call: FlashCall, name: str, value: Any) -> str:
    """Why an argument might mean something else on the heads of a rank; empty where it does not."""
    if isinstance(value, torch.Tensor):
        if name in _PAGED:
            return "keys and values in pages are for inference"
        if name in _WHOLE:
            return ""
        if name not in call.dims:
            return "it is not known whether it differs by head, and a rank has some heads only"
        dims = call.dims[name].split()
        fits = len(dims) - value.dim() in ((0, 1) if name == "alibi_slopes" else (0,))
        return "" if fits else f"heads are split where its dims are ({call.dims[name]})"
    if callable(value) and not isinstance(value, type):
        return "it may ask for a head's number, and on a rank heads are counted from 0 again"
    leaves = flatten(value)[0]
    if all(leaf is None or isinstance(leaf, _PLAIN) for leaf in leaves):
        return ""
    return "it holds more than plain values, and it is not known whether that differs by head"


def _refuse_shared_heads(recorder: Recorder, function: Any, named: dict[str, Any]) -> None:
    """On one device the function refuses it; on a rank's heads it might not."""
    queries, keys = (named[name].shape[-2] for name in ("query", "key"))
    if queries != keys:
        raise CaptureError(
            f"{function.__name__} is given {queries} heads of queries and {keys} of keys.",
            where=recorder.where(),
            have=_told("query", [named["query"], named["key"]]),
            why="it shares key heads only where it is told to",
            fix="pass enable_gqa=True",
        )


_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


def _told(name: str, value: Any) -> list[str]:
    tensors = [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return given(tensors) if tensors else [f"{name}: {type(value).__name__}"]


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """All arguments by name, in the order of the signature."""
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named


def _gives_lse(path: str, signature: inspect.Signature, named: dict[str, Any]) -> bool:
    """flash-attn 4 gives (out, lse); flash-attn 3 does where it cannot be asked not to; torch's
    where it is asked."""
    if getattr(named.get("return_aux"), "lse", False):
        return True
    if path.startswith("flash_attn.cute"):
        return True
    hopper = path.startswith(("flash_attn_interface", "flash_attn_3"))
    return hopper and "return_attn_probs" not in signature.parameters


def _fake(call: FlashCall, with_lse: bool) -> Callable[..., Any]:
    """Results of the right shape from tensors without data; zeros where there is data."""

    def fake(**named: Any) -> Any:
        tensors = [named[name] for name in call.dims if isinstance(named.get(name), torch.Tensor)]
        sizes: dict[str, int] = {}
        for name, text in call.dims.items():
            value = named.get(name)
            if isinstance(value, torch.Tensor) and value.dim() == len(text.split()):
                for letter, size in zip(text.split(), value.shape, strict=True):
                    sizes.setdefault(letter, size)
        first = tensors[0]
        dtype = first.dtype
        if named.get("target_dtype") is not None and dtype == torch.float32:
            dtype = named["target_dtype"]  # what transformers casts to
        shape = [sizes[letter] for letter in call.out.split()]
        out = first.new_zeros(shape, dtype=dtype)
        for each in tensors[:3]:
            out = out + each.sum().to(dtype) * 0
        if not with_lse:
            return out
        rest = [letter for letter in call.out.split() if letter not in "he"]
        at = 1 if rest[0] == "b" else 0  # [b, h, m] or [h, m]
        rest.insert(at, "h")
        return out, first.new_zeros([sizes[x] for x in rest], dtype=torch.float32)

    return fake
