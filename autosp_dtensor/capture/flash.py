"""Entry points of flash-attn (2, 3, 4) and of transformers around it: each one call in the trace.

The model's own kernel runs, on the heads of a rank. What stands here are the names of arguments and
the shapes of results, of flash-attn 2.8, its hopper and cute interfaces, and transformers 5.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CaptureError

if TYPE_CHECKING:
    from .trace import Recorder

__all__ = ["ENTRIES", "FlashCall", "handlers"]


@dataclass(frozen=True)
class FlashCall:
    """How an entry point names and lays out its tensors.

    dims: of each tensor argument, "b m h d" and its like: b batch, m queries, t keys, h query
    heads, g key heads, n other; arguments that are not named are had whole. out: of the result.
    """

    dims: dict[str, str]
    out: str
    dropout: str = "dropout_p"
    with_lse: bool = False


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
)
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
        named = _by_name(bound)
        if named.get("return_attn_probs") or named.get("return_softmax"):
            raise CaptureError(
                f"{function.__name__} is asked for its attention probabilities.",
                where=recorder.where(),
                have="return_attn_probs=True",
                why="they are S x S, and meant for tests of the kernel",
                fix="leave return_attn_probs out",
            )
        call = ENTRIES[path]
        fake = _fake(call, _gives_lse(path, bound.signature))
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


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """All arguments by name, in the order of the signature."""
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named


def _gives_lse(path: str, signature: inspect.Signature) -> bool:
    """flash-attn 4 gives (out, lse); flash-attn 3 does where it cannot be asked not to."""
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
