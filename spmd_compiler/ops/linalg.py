"""Linear algebra on matrices, transforms and distances: batch dims and right-hand sides may be sharded, what one
matrix or one transform needs is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..emit import Emit, Local
from ..ir import argument, operands, results
from ..rules import Dims, Rule, define, dims, fit, rule

aten = torch.ops.aten

# By the last dims of each operand and result: 1 is whole, a letter is a factor, a dot stands for none.  The dims before
# them are the batch.
MATRICES: dict[str, str] = {
    "linalg_inv_ex": "11 -> 11 .",
    "linalg_cholesky_ex": "11 -> 11 .",
    "cholesky": "11 -> 11",
    "cholesky_inverse": "11 -> 11",
    "linalg_matrix_exp": "11 -> 11",
    "linalg_lu_factor_ex": "11 -> 11 1 .",
    "linalg_lu": "11 -> 11 11 11",
    "lu_unpack": "11 1 -> 11 11 11",
    "linalg_ldl_factor_ex": "11 -> 11 1 .",
    "linalg_qr": "11 -> 11 11",
    "geqrf": "11 -> 11 1",
    "linalg_householder_product": "11 1 -> 11",
    "_linalg_svd": "11 -> 11 1 11",
    "_linalg_eigh": "11 -> 1 11",
    "linalg_eig": "11 -> 1 11",
    "_linalg_det": "11 -> . 11 1",
    "_linalg_slogdet": "11 -> . . 11 1",
    "linalg_pinv": "11 . . -> 11",
    "_linalg_check_errors": ". ->",
}
# The same where one operand is a right-hand side, of which the op is linear.
SOLVES: dict[str, tuple[str, int]] = {
    "cholesky_solve": ("1r 11 -> 1r", 0),
    "linalg_solve_triangular": ("11 1r -> 1r", 1),
    "triangular_solve": ("1r 11 -> 1r 11", 0),
    "_linalg_solve_ex": ("11 1r -> 1r 11 1 .", 1),
    "linalg_lu_solve": ("11 1 1r -> 1r", 2),
    "linalg_ldl_solve": ("11 1 1r -> 1r", 2),
    "ormqr": ("11 1 1r -> 1r", 2),
}


def _checked(e: Emit, info: Local, *args: Any, **kwargs: Any) -> Local:
    """The check takes contiguous values alone."""
    return e.same(info.contiguous(), *args, **kwargs)


def batched(node: Node, text: str, linear: Sequence[Sequence[int]] = ()) -> Rule | None:
    """The rule of an entry of `MATRICES`.  What a column of the right-hand side does not tell is whole everywhere."""
    cores = [["" if t == "." else t for t in side.split()] for side in text.split("->")]
    given, made = [o.meta["val"] for o in operands(node)], results(node)
    if [len(given), len(made)] != [len(c) for c in cores]:
        return None
    pairs = list(zip((*given, *made), cores[0] + cores[1], strict=True))
    lead = max(v.dim() - len(core) for v, core in pairs if v is not None)

    def term(v: torch.Tensor | None, core: str) -> Dims:
        if v is None:
            return ()
        n = v.dim() - len(core)
        if n < 0 or v.numel() == 0:
            return ((),) * v.dim()
        batch = dims("b", lead)[lead - n :]
        return (*batch, *(() if c == "1" else (c,) for c in core))

    terms = [term(v, core) for v, core in pairs]
    form = _checked if node.target is aten._linalg_check_errors.default else None
    return fit(node, terms[: len(given)], terms[len(given) :], linear, reduce={"r": "none"}, form=form)


@define(*(getattr(aten, name) for name in (*MATRICES, *SOLVES) if hasattr(aten, name)))
def _(node: Node) -> Rule | None:
    name = node.target._schema.name.split("::")[1]
    if name in MATRICES:
        return batched(node, MATRICES[name])
    text, side = SOLVES[name]
    if argument(node, "left", True) is False:
        text = text.replace("1r", "r1")
    right = node.args[side].meta["val"]
    if name == "_linalg_solve_ex" and right.shape == node.args[0].meta["val"].shape[:-1]:
        text = text.replace("1r", "1")  # vectors
    single = len(text.split("->")[1].split()) == 1  # beside other results nothing is linear
    return batched(node, text, [[side]] if single else [])


# --- transforms ---------------------------------------------------------------------------------------------


@define(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def _(node: Node) -> Rule | None:
    x = node.args[0].meta["val"]
    free = dims("d", x.dim(), [d % x.dim() for d in node.args[1]])
    return fit(node, [free], [free], [[0]], nonempty=True)


# --- distances and products of three -------------------------------------------------------------------------

rule(aten._cdist_forward.default, "... p 1, ... r 1 -> ... p r")
rule(aten._cdist_backward.default, "... p r, ... p 1, ... r 1, ... p r -> ... p 1", linear=[[0]])


@define(aten._trilinear.default)
def _(node: Node) -> Rule | None:
    """Each operand lacks the dims it is expanded in; those summed over are in no result."""
    given: list[Any] = [o.meta["val"] for o in operands(node)]
    every = dims("t", given[0].dim() + len(node.args[3]))
    terms = [tuple(d for i, d in enumerate(every) if i not in node.args[3 + k]) for k in range(3)]
    made = tuple(d for i, d in enumerate(every) if i not in node.args[6])
    return fit(node, terms, [made], [[0], [1], [2]])
