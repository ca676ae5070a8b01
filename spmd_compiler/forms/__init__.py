"""Local forms: how a rank computes what "the same op on local pieces" would not give.

The rules of `spmd_compiler.ops` say which placements an op may have, and name the form that makes them true.
"""
