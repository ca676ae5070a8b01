"""What the calibration writes: the links that explain its measurements, in a file that is a profile."""

import math

import pytest

from benchmarks.calibrate import fit, profile_text
from spmd_compiler.collectives import wire_bytes
from spmd_compiler.cost import Link, profile_of
from spmd_compiler.placements import Mesh


def test_links_are_found_again(tmp_path):
    """Prices of a known link, fitted, are the prices of the profile that is written."""
    known, parts = Link(3e-5, 2e9), 4
    mesh = Mesh({"x": parts})
    rows, prices = [], []
    for kind, steps in (("all_reduce", 6), ("all_gather", 3), ("reduce_scatter", 3), ("all_to_all", 1)):
        for size in (2**12, 2**16, 2**24):
            wire = wire_bytes(kind, size, parts)
            seconds = known.alpha * math.sqrt(steps) + wire / known.bandwidth
            rows.append((kind, math.sqrt(steps), wire, seconds))
            prices.append((kind, size, seconds))
    path = tmp_path / "machine.toml"
    own = Link(1e-4, 1e9)
    found = Link(*fit(rows), {"all_to_all": own})
    rates = {2: 1e11, 4: 5e10, 8: 2e10}
    path.write_text(profile_text(rates, {2: 1e10, 4: 2.5e10}, 3e-6, {"x": found, "y": known}, fuses=False))
    profile = profile_of(str(path))
    for kind, size, seconds in prices:
        if kind == "all_to_all":
            seconds = own.alpha + wire_bytes(kind, size, parts) / own.bandwidth
        assert profile.collective(mesh, kind, ("x",), size) == pytest.approx(seconds, rel=1e-2)
    assert not profile.fuses and profile.matmul == rates and (profile.memory, profile.launch) == ({2: 1e10, 4: 2.5e10}, 3e-6)
    assert profile.collective(Mesh({"y": 2}), "permute", ("y",), 1e6) == pytest.approx(known.alpha + 1e6 / 2e9)
    assert profile.collective(Mesh({"z": 2}), "permute", ("z",), 1e6) == pytest.approx(known.alpha + 1e6 / 2e9)


def test_a_link_that_costs_nothing_is_still_a_link():
    alpha, bandwidth = fit([("all_gather", 1.0, float(n), n / 1e9) for n in (1e3, 1e6)])
    assert alpha > 0 and bandwidth == pytest.approx(1e9)
