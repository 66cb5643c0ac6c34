"""From a name, a file or a dict to a function that makes the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import nn

from ..errors import UsageError

__all__ = ["model_maker", "presets", "shallow_maker"]


def presets() -> dict[str, dict[str, Any]]:
    """Sizes of public models, by name; from their published config.json."""
    return json.loads((Path(__file__).parent / "presets.json").read_text())


def model_maker(model: Any) -> tuple[str, Callable[[], nn.Module]]:
    """(what to call it, a function that makes it), from:

    the name of a preset, the path of a transformers config.json, a dict of the same content, or a
    function without arguments. Files are read as data; no code that comes with a model is run.
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
    key = _depth_key(config)
    layers = config.get(key)
    if not isinstance(layers, int) or "layer_types" in config:
        return None, 0
    return lambda count: lambda: _from_config({**config, key: count}), layers


def _depth_key(config: dict[str, Any]) -> str:
    """What a config calls the number of its layers: older ones have names of their own."""
    key = "num_hidden_layers"
    if key in config or "model_type" not in config:
        return key
    kind = type(_transformers().AutoConfig.for_model(config["model_type"]))
    return kind.attribute_map.get(key, key)


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
        return path.parent.name or path.stem, json.loads(path.read_text())
    raise UsageError(
        f"there is no model {model!r} to plan for.",
        where="autosp.plan",
        have=f"presets {', '.join(sorted(known))}",
        why="a plan runs the model itself, on tensors without data",
        fix="name a preset, or give the path of a transformers config.json, a dict, or a function "
        "that makes the model",
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


def _from_config(config: dict[str, Any]) -> nn.Module:
    transformers = _transformers()
    sizes = {
        k: v for k, v in config.items() if k not in ("architectures", "auto_map", "_name_or_path")
    }
    kind = sizes.pop("model_type")
    known = transformers.AutoConfig.for_model(kind, **{**sizes, "use_cache": False})
    return transformers.AutoModelForCausalLM.from_config(known)
