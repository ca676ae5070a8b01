"""Measurements, run from the repository's root as ``python -m benchmarks.NAME``.  They print; they assert nothing."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
