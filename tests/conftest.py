import pytest
from gloo import Pool


@pytest.fixture(scope="session")
def gloo4():
    """Four gloo ranks that live for the whole session: ``gloo4(function, *args)``."""
    pool = Pool(4)
    yield pool
    pool.close()
