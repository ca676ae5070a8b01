"""Real processes: a pool of gloo ranks that serves many cases (`Pool`)."""

from gloo.pool import Pool

__all__ = ["Pool"]
