"""From a name, a file or a dict to a function that makes the model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import nn

from ..errors import UsageError

__all__ = ["model_maker", "presets", "query_heads", "shallow_maker"]

# What names code; and the dtype of a file with weights: a plan's parameters are in fp32.
_LEFT_OUT = (
    "architectures", "auto_map", "_name_or_path", "name_or_path", "dtype", "torch_dtype",
)  # fmt: skip


def presets() -> dict[str, dict[str, Any]]:
    """Sizes of public models, by name; from their published config.json."""
    return json.loads((Path(__file__).parent / "presets.json").read_text())


def model_maker(model: Any) -> tuple[str, Callable[[], nn.Module]]:
    """(what to call it, a function that makes it), from:

    the name of a preset, the path of a transformers config.json or of its directory, a model_type
    of transformers (its own default sizes), a dict of a config's content, or a function without
    arguments. Files are read as data; no code that comes with a model, or that a config names, is
    run or fetched.
    """
    if callable(model):
        return getattr(model, "__name__", "model"), cast(Callable[[], nn.Module], model)
    name, config = _named_config(model)
    return name, lambda: _from_config(config)


def shallow_maker(model: Any) -> tuple[Callable[[int], Callable[[], nn.Module]] | None, int]:
    """(what makes the same model with so many layers, how many it has).

    (None, 0) where the config does not say that all layers are alike, or there is no config.
    """
    if callable(model):
        return None, 0
    _, config = _named_config(model)
    key, default = _depth(config)
    layers = config.get(key, default)
    if not isinstance(layers, int) or "layer_types" in config:
        return None, 0
    return lambda count: lambda: _from_config({**config, key: count}), layers


def query_heads(model: Any) -> int | None:
    """How many query heads attention has: the ranks that share a sequence without each computing
    all of them. None of a function, and of a config that does not say one number.
    """
    if callable(model):
        return None
    sizes = _as_data(_named_config(model)[1])
    config = _config_of(sizes.pop("model_type"), sizes)
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    return heads if isinstance(heads, int) and heads > 0 else None


def _depth(config: dict[str, Any]) -> tuple[str, int | None]:
    """What a config calls the number of its layers (older ones have names of their own), and the
    number where it says none; None where those layers are of several types."""
    key = "num_hidden_layers"
    if key in config or "model_type" not in config:
        return key, None
    plain = _config_of(config["model_type"], {})
    alike = len(set(getattr(plain, "layer_types", None) or ())) < 2
    return type(plain).attribute_map.get(key, key), getattr(plain, key, None) if alike else None


def _named_config(model: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(model, dict):
        return str(model.get("model_type", "model")), model
    known = presets()
    if model in known:
        return str(model), known[model]
    path = Path(str(model))
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path.parent.name or path.stem, _read(path)
    if _is_model_type(str(model)):
        return str(model), {"model_type": str(model)}
    raise UsageError(
        f"there is no model {model!r} to plan for.",
        where="autosp.plan",
        have=f"presets {', '.join(sorted(known))}",
        why="a plan runs the model itself, on tensors without data",
        fix="name a preset or a model_type of transformers, or give the path of a transformers "
        "config.json, a dict, or a function that makes the model",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if isinstance(found, dict) and "model_type" in found:
        return found
    raise UsageError(
        f"{path.name} is no config of transformers.",
        where="autosp.plan",
        have=f"{path}, which is no JSON with a model_type",
        why="the model's class and sizes are read from it",
        fix="give the config.json that lies beside a model's weights",
    )


def _is_model_type(name: str) -> bool:
    return importlib.util.find_spec("transformers") is not None and (
        name in _transformers().CONFIG_MAPPING
    )


def _transformers() -> Any:
    try:
        import transformers

        return transformers
    except ImportError as error:
        raise UsageError(
            "a plan from a config needs transformers.",
            where="autosp.plan",
            have="transformers is not installed",
            why="it has the code of the model that the config names",
            fix="pip install transformers, or pass a function that makes the model",
        ) from error


def _config_of(kind: str, sizes: dict[str, Any]) -> Any:
    """transformers' config; what it says of one that it cannot take is told as an error here."""
    try:
        return _transformers().AutoConfig.for_model(kind, **sizes)
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"transformers takes this for no config of a {kind!r}.",
            where="autosp.plan",
            have=" ".join(f"{type(error).__name__}: {error}".split())[:300],
            why="it makes the model that is planned for",
            fix="give the config.json of a model that this version of transformers has",
        ) from error


def _from_config(config: dict[str, Any]) -> nn.Module:
    transformers = _transformers()
    sizes = _as_data(config)
    kind = sizes.pop("model_type")
    known = _config_of(kind, {**sizes, "use_cache": False})
    if type(known) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"a model of type {kind!r} has no loss over tokens.",
            where="autosp.plan",
            have=f"model_type {kind!r}, which is none of AutoModelForCausalLM's",
            why="a step from a config is called with input_ids and labels",
            fix="pass a function that makes the model, if it can be called so",
        )
    return transformers.AutoModelForCausalLM.from_config(known)


def _as_data(value: Any) -> Any:
    """A config, and those inside of it, without what is left out: transformers fetches kernels from
    the Hub by the name that an `attn_implementation` or `experts_implementation` gives."""
    if isinstance(value, dict):
        kept = (k for k in value if k not in _LEFT_OUT and "_implementation" not in str(k))
        return {key: _as_data(value[key]) for key in kept}
    return [_as_data(each) for each in value] if isinstance(value, list) else value
