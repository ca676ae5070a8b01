"""Plans on the lower hull of price against memory: those where a byte has a price, and those between two of them."""

from __future__ import annotations

import dataclasses

from .problem import Problem, Solution, Tables
from .solve import _priced, solve


def cheapest_at(problem: Problem, rate: float) -> Solution:
    """The cheapest solution where a byte that a choice holds costs ``rate`` seconds; its price is without those, its
    bound with them."""
    if not rate:
        return solve(problem)
    variables = [
        v if v.memory is None else dataclasses.replace(v, compute=v.compute + rate * v.memory)
        for v in problem.variables
    ]
    found = solve(dataclasses.replace(problem, variables=variables))
    compute = sum(float(v.compute[c]) for v, c in zip(problem.variables, found.choices, strict=True))
    return dataclasses.replace(found, compute=compute, price=found.price - found.compute + compute)


def counted(problem: Problem, solution: Solution) -> float:
    """The bytes that the choices of a solution hold."""
    pairs = zip(problem.variables, solution.choices, strict=True)
    return sum(float(v.memory[c]) for v, c in pairs if v.memory is not None)


def parts(problem: Problem, a: Solution, b: Solution) -> list[list[int]]:
    """The variables that two solutions decide differently, in parts that no hub connects.

    Each part may be as in ``a`` or as in ``b`` whatever the others are, and prices and memory add up over the parts.
    """
    differ = [i for i, (x, y) in enumerate(zip(a.choices, b.choices, strict=True)) if x != y]
    parent = {i: i for i in differ}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for hub in problem.hubs:
        ends = [root(v) for v in (hub.source[0], *(k for k, _ in hub.consumers)) if v in parent]
        for end in ends[1:]:
            parent[max(root(end), root(ends[0]))] = min(root(end), root(ends[0]))
    found: dict[int, list[int]] = {}
    for i in differ:
        found.setdefault(root(i), []).append(i)
    return list(found.values())


def blended(problem: Problem, a: Solution, b: Solution, taken: list[list[int]]) -> Solution:
    """``a`` with the parts ``taken`` as in ``b``."""
    choices = list(a.choices)
    for part in taken:
        for i in part:
            choices[i] = b.choices[i]
    return _priced(problem, Tables(problem), choices, a.columns)
