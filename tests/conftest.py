"""Fixtures of all tests.  One thread each: the tests run side by side, and four ranks at a time."""

import pytest
import torch

from gloo import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gloo4():
    """Four gloo ranks that live for the whole session: ``gloo4(function, *args)``."""
    pool = Pool(4)
    yield pool
    pool.close()
