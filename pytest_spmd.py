"""A pytest plugin: programs compared with golden files, in words.

    def test_plan(spmd_golden):
        spmd_golden(spmd.export(model, args, mesh={"dp": 64, "tp": 8}, placements=..., backward=True))

The golden lies beside the test, in ``golden/MODULE/TEST.txt``; ``pytest --spmd-update`` writes it.  Names of values and
line numbers may differ: what counts is what `spmd_compiler.diff` finds.

A module of its own, which imports nothing heavy: pytest loads it at every start.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("spmd", "programs of spmd_compiler")
    group.addoption("--spmd-update", action="store_true", help="write the golden files of `spmd_golden` anew")


@pytest.fixture
def spmd_golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``spmd_golden(program, name=None, level="collectives")``: fails where ``program`` differs from its golden file.

    ``name`` tells several programs of one test apart.  ``level`` is that of `Program.text`: "full" holds every value.
    """
    used: set[Path] = set()

    def check(program: Any, name: str | None = None, level: str = "collectives") -> None:
        __tracebackhide__ = True
        if not callable(getattr(program, "text", None)):
            pytest.fail(f"spmd_golden takes a Program, not {type(program).__name__}", pytrace=False)
        file = golden_file(request.node, name)
        if file in used:
            pytest.fail(f"{file.name} is compared twice in one test; tell the programs apart by `name`", pytrace=False)
        used.add(file)
        shown = file.relative_to(root) if file.is_relative_to(root := request.config.rootpath) else file
        text = program.text(level)
        if request.config.getoption("--spmd-update"):
            if not file.exists() or file.read_text() != text:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            return
        command = f'python -m pytest --spmd-update "{request.node.nodeid}"'
        if not file.exists():
            pytest.fail(f"there is no golden file {shown}; to write it, run\n  {command}", pytrace=False)
        golden = file.read_text()
        if golden == text:
            return
        from spmd_compiler import SpmdError, diff

        try:
            change, problem = diff(golden, text), None
        except SpmdError as error:
            change, problem = None, error
        if change is None:
            pytest.fail(f"{shown} can't be read: {problem}; to write it anew, run\n  {command}", pytrace=False)
        if not change.same:
            words = "\n".join(change.lines())
            pytest.fail(f"the program differs from {shown}:\n{words}\nto accept it, run\n  {command}", pytrace=False)

    return check


def golden_file(node: pytest.Item, name: str | None = None) -> Path:
    """``golden/MODULE/TEST.txt`` beside the test, ``TEST-NAME.txt`` with a name."""
    inside = node.nodeid.partition("::")[2]
    stem = re.sub(r"[^\w.=]+", "-", inside if name is None else f"{inside}-{name}").strip("-")
    return node.path.parent / "golden" / node.path.stem / f"{stem}.txt"
