"""Which torch the tests run on; the golden texts and a few expectations are of one release."""

import torch

TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])
