"""Random calls on shards: independent draws for different tokens, equal ones where replicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Seeded", "mix"]


class Seeded:
    """A random torch call seeded by its region's seed, its number there and, if sharded, the rank.

    It draws the same numbers whenever it is run again with the same call seed, so recomputation
    replays them; the user's own generators are left as they were.
    """

    def __init__(self, target: Callable[..., Any], number: int, rank: int | None) -> None:
        self.target, self.number, self.rank = target, number, rank
        self.__name__ = f"seeded_{getattr(target, '__name__', 'call')}"

    def __call__(self, seed: int, *args: Any, **kwargs: Any) -> Any:
        mixed = mix(mix(seed, self.number), 0 if self.rank is None else self.rank + 1)
        devices = {
            a.device for a in args if isinstance(a, torch.Tensor) and a.device.type == "cuda"
        }
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            devices.add(torch.device(device))
        with torch.random.fork_rng(devices=sorted({d.index or 0 for d in devices})):
            torch.default_generator.manual_seed(mixed)
            for each in devices:
                torch.cuda.default_generators[each.index or 0].manual_seed(mixed)
            return self.target(*args, **kwargs)


def mix(a: int, b: int) -> int:
    """SplitMix64's finalizer of both (Steele, Lea, Flood, 2014): close seeds, unrelated streams."""
    z = (a * 0x9E3779B97F4A7C15 + b + 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) & (2**63 - 1)
