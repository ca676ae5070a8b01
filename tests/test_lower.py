"""Every collective on real processes, against the global value it stands for."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.fx import Graph, GraphModule
from versions import TORCH

from spmd_compiler import collectives as coll
from spmd_compiler import lower
from spmd_compiler.placements import Mesh, Spec, SpmdError
from spmd_compiler.runtime import Slot
from spmd_compiler.symbolic import chunk, coordinate, piece, table

MESHES = {"line": {"x": 4}, "square": {"x": 2, "y": 2}, "turned": {"x": 2, "y": 2}}
RANKS = {"turned": [[0, 2], [1, 3]]}  # of neighbouring ranks those in a column
_GROUPS = {}


def groups_of(name):
    if name not in _GROUPS:
        sizes = MESHES[name]
        if name in RANKS:
            mesh = DeviceMesh("cpu", RANKS[name], mesh_dim_names=tuple(sizes))
        else:
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _GROUPS[name] = lower.Groups(mesh)
    return _GROUPS[name]


def run(name, target, local, *args, how="eager"):
    """The result of one collective, bound, expanded and run on this rank."""
    groups = groups_of(name)
    with FakeTensorMode() as mode:
        fake = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype)
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = fake
    node = graph.call_function(target, (x, *args))
    with mode:
        node.meta["val"] = fake
    out = graph.output((node,))
    out.meta["val"] = None
    gm = lower.bind(GraphModule({}, graph), Mesh(MESHES[name]), groups.coordinates)
    gm = lower.expand_collectives(gm, groups)
    compiled = lower.compile_graph(gm, how, is_inference=True)
    return compiled([local])[0]


def values(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator).to(dtype)


def cut(x, dim, parts, index):
    begin, size = piece(x.shape[dim], parts, index)
    return x.narrow(dim, begin, size).contiguous()


def check_pieces(name, axis, dtype, n):
    """all_gather, reduce_scatter and all_to_all of a dim of n elements, on dims 0 and 1."""
    groups = groups_of(name)
    parts, mine = groups.sizes[axis], groups.coordinates[axis]
    other = 10 * sum(c for a, c in groups.coordinates.items() if a != axis)
    c = coordinate(axis)
    for dim in (0, 1):
        shape = [3, 3, 2]
        shape[dim] = n
        whole = values(shape, dtype, other)
        got = run(name, coll.all_gather, cut(whole, dim, parts, mine), dim, n, axis, parts)
        torch.testing.assert_close(got, whole, rtol=0, atol=0)

        each = [values(shape, dtype, other + r) for r in range(parts)]
        for op in ("sum", "max") if dtype != torch.bool else ("max",):
            size = chunk(n, parts, c)
            got = run(name, coll.reduce_scatter, each[mine], dim, size, axis, parts, op)
            total = torch.stack(each).sum(0).to(dtype) if op == "sum" else torch.stack(each).amax(0)
            torch.testing.assert_close(got, cut(total, dim, parts, mine), rtol=0, atol=0)

        for split in {0, 1, 2} - {dim}:
            size = chunk(shape[split], parts, c)
            got = run(name, coll.all_to_all, cut(whole, dim, parts, mine), dim, n, split, size, axis, parts)
            torch.testing.assert_close(got, cut(whole, split, parts, mine), rtol=0, atol=0)


def check_all_reduce(name, axis, dtype):
    groups = groups_of(name)
    other = 10 * sum(c for a, c in groups.coordinates.items() if a != axis)
    each = [values((3, 2), dtype, other + r) for r in range(groups.sizes[axis])]
    stacked = torch.stack(each)
    wanted = {"max": stacked.amax(0), "min": stacked.amin(0)}
    if dtype != torch.bool:
        wanted |= {"sum": stacked.sum(0).to(dtype), "product": stacked.prod(0).to(dtype)}
    for op, want in wanted.items():
        mine = each[groups.coordinates[axis]]
        got = run(name, coll.all_reduce, mine.t().contiguous().t(), axis, groups.sizes[axis], op)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def check_permute(name, dtype):
    groups = groups_of(name)
    place = groups.coordinates
    whole = values((2, 8), dtype)
    for order, new in itertools.permutations([("x", "y"), ("y", "x")]):
        mine = cut(whole, 1, 4, 2 * place[order[0]] + place[order[1]])
        got = run(name, coll.permute, mine, 1, 2, order, new, (2, 2))
        torch.testing.assert_close(got, cut(whole, 1, 4, 2 * place[new[0]] + place[new[1]]))


FETCHES = {
    "halos": ([0, 2, 2, 4, 4, 6, 6, 7], [-1, 4, 1, 6, 3, 8, 5, 9]),
    "wide": ([0, 2, 2, 4, 4, 6, 6, 7], [0, 7, 0, 1, 6, 7, 4, 4]),
    "two ranges": ([0, 2, 2, 4, 4, 6, 6, 7], [6, 7, 0, 2, 2, 4, 4, 6, 5, 6, 0, 1, 3, 3, 3, 4]),
    "empty pieces": ([0, 2, 2, 3, 3, 3, 3, 3], [0, 0, 0, 2, 2, 5, 1, 3]),
    "nothing moves": ([0, 1, 1, 2, 2, 3, 3, 4], [0, 1, 1, 2, 5, 6, 3, 4]),
}


def check_fetch(name, axes, dtype, how="eager"):
    groups = groups_of(name)
    sizes = [groups.sizes[a] for a in axes]
    me = 0
    for a, n in zip(axes, sizes, strict=True):
        me = me * n + groups.coordinates[a]
    for have, want in FETCHES.values():
        want = coll.ranges(want, 4)
        whole = torch.full((3, 12, 2), 1, dtype=dtype)  # the element at place i stands at i + 1
        whole[:, 1 : have[-1] + 1] = values((3, have[-1], 2), dtype)
        mine = whole[:, have[2 * me] + 1 : have[2 * me + 1] + 1].transpose(1, 2).contiguous()
        size = table([sum(e - b for b, e in w) for w in want], 2 * coordinate("x") + coordinate("y")
                     if axes == ("x", "y") else 2 * coordinate("y") + coordinate("x") if len(axes) == 2
                     else coordinate("x"))  # fmt: skip
        flat = [i for w in want for r in w for i in r]
        got = run(name, coll.fetch, mine, 2, size, have, flat, 1, list(axes), sizes, how=how)
        expected = torch.cat([whole[:, b + 1 : e + 1] for b, e in want[me]], 1).transpose(1, 2)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def check_inductor():
    groups = groups_of("line")
    mine = groups.coordinates["x"]
    whole = values((3, 7), torch.float32)
    got = run("line", coll.all_gather, cut(whole, 1, 4, mine), 1, 7, "x", 4, how="inductor")
    torch.testing.assert_close(got, whole)
    got = run("line", coll.reduce_scatter, whole, 1, chunk(7, 4, coordinate("x")), "x", 4, "sum", how="inductor")
    torch.testing.assert_close(got, cut(4 * whole, 1, 4, mine))
    check_fetch("line", ("x",), torch.float32, "inductor")


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
keeps_order = pytest.mark.skipif(TORCH == (2, 11), reason="torch 2.11 sorts the ranks of every group")
turned = pytest.param("turned", marks=keeps_order)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, axis", [("line", "x"), ("square", "x"), ("square", "y"), pytest.param("turned", "y", marks=keeps_order)])
def test_pieces(gloo4, name, axis, dtype):
    for n in (8, 7, 5, 3, 1) if dtype == torch.float32 else (7, 1):
        gloo4(check_pieces, name, axis, dtype, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, axis", [("line", "x"), ("square", "x"), ("square", "y")])
def test_all_reduce(gloo4, name, axis, dtype):
    gloo4(check_all_reduce, name, axis, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["square", turned])
def test_permute(gloo4, name, dtype):
    gloo4(check_permute, name, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids=str)
@pytest.mark.parametrize("name", ["square", turned])
def test_fetch_over_two_axes(gloo4, name, axes, dtype):
    gloo4(check_fetch, name, axes, dtype)


def check_descending():
    mesh = DeviceMesh("cpu", [[1, 0], [2, 3]], mesh_dim_names=("x", "y"))
    with pytest.raises(SpmdError, match=r"axis 'y' of DeviceMesh.* runs over ranks \[1, 0\]"):
        lower.Groups(mesh)


def test_ranks_that_descend_are_refused(gloo4):
    """DTensor's own collectives take each rank's piece for another's there."""
    gloo4(check_descending)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fetch(gloo4, dtype):
    gloo4(check_fetch, "line", ("x",), dtype)


def test_inductor(gloo4):
    gloo4(check_inductor)


def check_groups():
    """One thread each (two write the name of what they did last, and free it twice), the mesh's network and timeout."""
    groups = groups_of("square")
    given = groups.mesh.get_group(0)._get_backend(torch.device("cpu"))
    for axes, apart in itertools.product((("x",), ("y",), ("x", "y")), (False, True)):
        group = dist.distributed_c10d._resolve_process_group(groups.name(axes, apart))
        options = group._get_backend(torch.device("cpu")).options
        assert options._threads == 1 and options._timeout == given.options._timeout
        assert options._devices == given.options._devices
        assert options.global_ranks_in_group == dist.get_process_group_ranks(group)
        assert group.size() == math.prod(groups.sizes[a] for a in axes)
        assert (group.group_name == groups.name(axes)) == (not apart)
    assert lower.Groups(groups.mesh).name(("y", "x")) == groups.name(("x", "y"))


def test_groups(gloo4):
    gloo4(check_groups)


def check_placing():
    """A global tensor is cut as DTensor cuts it: uneven pieces, and two axes on one dim in either nesting."""
    mesh, x = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), torch.arange(35.0).view(7, 5)
    outer = {"a": Shard(0), "b": Shard(0)}
    for placements in ([Shard(0), Shard(0)], outer, [Shard(1), Shard(0)], [Replicate(), Shard(1)]):
        spec = Spec.of(Mesh.of(mesh), placements, 2)
        slot = Slot("x", spec, mesh, x.shape, x.stride(), x.dtype, x.device)
        found = slot.place(x)
        wanted = distribute_tensor(x, mesh, slot.placements, src_data_rank=None)
        assert found._spec == wanted._spec and torch.equal(found.to_local(), wanted.to_local())
        x.requires_grad_(True)
        assert slot.place(x).requires_grad
        x = x.detach()


def test_placing(gloo4):
    gloo4(check_placing)
