"""One or more calls for every rule in the table, each with the dims on which it may be split.

`dims` has one term for each tensor that the operation takes, one character for each of its dims:
`x` may be split, `.` must be whole. A new rule brings its cases here, or test_rules.py fails.
"""

from __future__ import annotations

from .along import ALONG
from .case import Case, b, f, i
from .losses import LOSSES
from .pointwise import POINTWISE
from .products import PRODUCTS
from .rows import ROWS
from .views import INDEX, VIEWS

__all__ = ["CASES", "Case", "b", "f", "i"]

CASES: dict[str, list[Case]] = {
    **POINTWISE,
    **PRODUCTS,
    **ALONG,
    **VIEWS,
    **INDEX,
    **ROWS,
    **LOSSES,
}
