"""What errors say of a user's value, in short, and of a name that nothing has."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

import torch

MOST = 8  # names in a list


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxlevel = 3

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor):
            return f"a {str(x.dtype).removeprefix('torch.')} tensor of shape {_shape(x)}"
        return super().repr1(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        try:
            text = repr(x)
        except Exception:
            text = "\n"
        long = len(text) > self.maxother or "\n" in text or "tensor(" in text
        return f"an object of type {type(x).__name__}" if long else text


def _shape(x: torch.Tensor) -> str:
    try:
        return str(tuple(x.shape))
    except RuntimeError:  # nested tensors have none
        return "unknown"


def shown(value: Any) -> str:
    """The ``repr`` of a value, short and on one line: of a tensor its dtype and shape, of what is long its type."""
    return _Short().repr(value)


def listed(names: Iterable[Any]) -> str:
    """``a, b, c``, or the first few and how many more there are."""
    found = list(map(str, names))
    more = len(found) - MOST
    return ", ".join(found) if more <= 2 else f"{', '.join(found[:MOST])} and {more} more"


def meant(name: Any, names: Iterable[str]) -> str:
    """What to write instead of ``name``: ``did you mean 'a' or 'b'?``, or else ``there are a, b``."""
    known = list(dict.fromkeys(names))
    lower = {n.lower(): n for n in known}
    near = difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(repr(lower[n]) for n in near)}?"
    return f"there are {listed(known)}" if known else "there are none"
