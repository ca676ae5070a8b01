"""The compiler's pipeline: captured joint graph in, partitioned local graph out.

    annotate -> propagate -> partition -> simplify -> (split: forward and backward)

Each pass is one module with one public function; passes never import each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost import Profile
from ..ir import Captured, Partitioned


@dataclass(frozen=True)
class Options:
    """How to compile.  ``profile`` prices the plan; ``verify`` re-derives and simulates the result."""

    profile: str | Profile | None = None
    verify: bool = False
    lower: str = "inductor"  # or "eager"


def run(captured: Captured, options: Options) -> Partitioned:
    """Partition a captured graph."""
    raise NotImplementedError
