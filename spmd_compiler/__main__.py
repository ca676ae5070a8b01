"""``python -m spmd_compiler``: the command line."""

from .cli import main

main(prog_name="python -m spmd_compiler")
