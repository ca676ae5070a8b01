"""Real processes: a pool of gloo ranks that serves many cases (`Pool`), and what runs on them (`measure`)."""

from gloo.pool import Pool

__all__ = ["Pool"]
