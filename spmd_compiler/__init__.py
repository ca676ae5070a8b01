"""spmd_compiler: one globally optimal SPMD program of a single-device PyTorch program."""
