"""The pytest plugin, as its users run it."""

import subprocess
import sys

import pytest

import spmd_compiler  # noqa: F401  (what a run within this process imports is forgotten, and torch can't be twice)

pytest_plugins = ["pytester"]

TESTS = """
import pytest

class Program:
    def __init__(self, size, names="xy"):
        self.size, (self.a, self.b) = size, names

    def text(self, level):
        return (
            'program "p"  mesh(tp=2)\\n'
            f'%{self.a} = input "x"  f32[{self.size}]  {{tp: P(sum)}}\\n'
            f'%{self.b} = all_reduce[tp, sum](%{self.a})  f32[{self.size}]  {{tp: R}}  # net.py:7  8 B wire\\n'
            f'output "out" = %{self.b}  {{tp: R}}\\n'
        )

@pytest.mark.parametrize("case", ["a b", "c"])
def test_plan(spmd_golden, case):
    spmd_golden(Program(SIZE, NAMES))

class TestMore:
    def test_two(self, spmd_golden):
        spmd_golden(Program(4, NAMES), "one")
        spmd_golden(Program(SIZE, NAMES), "two")
"""


@pytest.fixture
def project(pytester):
    def write(size=8, names="xy"):
        pytester.makepyfile(test_it=f"SIZE, NAMES = {size}, {names!r}\n" + TESTS)
        return pytester

    return write


def run(pytester, *args):
    others = [f"-pno:{name}" for name in ("cacheprovider", "hypothesispytest", "anyio")]  # slow to import each time
    return pytester.runpytest_inprocess(*others, *args)


def test_goldens_are_written_compared_and_rewritten(project):
    found = run(project())
    found.assert_outcomes(failed=3)
    found.stdout.fnmatch_lines([
        "there is no golden file golden/test_it/test_plan-a-b.txt; to write it, run",
        '  python -m pytest --spmd-update "test_it.py::test_plan[[]a b]"',
    ])  # fmt: skip
    run(project(), "--spmd-update").assert_outcomes(passed=3)
    folder = project().path / "golden" / "test_it"
    names = ["TestMore-test_two-one.txt", "TestMore-test_two-two.txt", "test_plan-a-b.txt", "test_plan-c.txt"]
    assert sorted(f.name for f in folder.iterdir()) == names
    run(project()).assert_outcomes(passed=3)
    run(project(names="ab")).assert_outcomes(passed=3)  # only names differ

    before = {f.name: f.read_text() for f in folder.iterdir()}
    found = run(project(size=16))
    found.assert_outcomes(failed=3)
    found.stdout.fnmatch_lines([
        "the program differs from golden/test_it/test_plan-a-b.txt:",
        "~ input x: f32[[]8] -> f32[[]16]",
        "~ all_reduce[[]tp, sum] of f32[[]8] at net.py:7, forward: 32 B wire resized to f32[[]16], 64 B wire",
        "  wire    32 B -> 64 B (+100.0%) a device: tp forward 32 B -> 64 B (+100.0%)",
        "to accept it, run",
        '  python -m pytest --spmd-update "test_it.py::test_plan[[]a b]"',
    ])  # fmt: skip
    assert before == {f.name: f.read_text() for f in folder.iterdir()}
    run(project(size=16), "--spmd-update").assert_outcomes(passed=3)
    run(project(size=16)).assert_outcomes(passed=3)
    assert "f32[4]" in (folder / names[0]).read_text() and "f32[16]" in (folder / names[1]).read_text()


def test_a_damaged_golden_and_one_name_twice(project):
    run(project(), "--spmd-update")
    file = project().path / "golden" / "test_it" / "test_plan-c.txt"
    file.write_text("no program")
    found = run(project(), "-k", "test_plan and c")
    found.stdout.fnmatch_lines(["golden/test_it/test_plan-c.txt can't be read: line 1, column 1: expected*"])
    tester = project()
    source = tester.path / "test_it.py"
    source.write_text(source.read_text().replace('"two")', '"one")'))
    found = run(tester, "-k", "two")
    found.stdout.fnmatch_lines(["TestMore-test_two-one.txt is compared twice in one test; tell the programs apart*"])


def test_under_xdist(project):
    run(project(), "-n2", "--spmd-update").assert_outcomes(passed=3)
    assert len(list((project().path / "golden" / "test_it").iterdir())) == 4
    run(project(), "-n2").assert_outcomes(passed=3)


def test_pytest_starts_without_torch(pytester):
    pytester.makepyfile("import sys\ndef test(): assert not {'torch', 'spmd_compiler'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--trace-config"], cwd=pytester.path, capture_output=True, text=True)
    assert done.returncode == 0 and "pytest_spmd" in done.stdout, done.stdout
