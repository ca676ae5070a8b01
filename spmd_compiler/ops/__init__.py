"""The rules, by family.  Importing this package registers all of them."""

from . import (
    attention,
    create,
    diagonal,
    grouped,
    higher_order,
    index,
    linalg,
    matmul,
    pointwise,
    pool,
    ranges,
    reduce,
    sort,
    view,
    window,
)

__all__ = [
    "attention", "create", "diagonal", "grouped", "higher_order", "index", "linalg", "matmul", "pointwise", "pool",
    "ranges", "reduce", "sort", "view", "window",
]  # fmt: skip
