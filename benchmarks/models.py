"""Models whose best placements are not those of a Llama, as ordinary single-device code; each returns a loss."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    """A mixture-of-experts block: the best two experts of each token, with room for ``capacity`` tokens of a group.

    ``forward(x)`` takes groups of tokens [groups, tokens, dim]; what an expert has no room for passes by (GShard,
    https://arxiv.org/abs/2006.16668).
    """

    def __init__(self, dim: int, hidden: int, experts: int, capacity: int, chosen: int = 2) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, dim, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))
        self.capacity, self.chosen = capacity, chosen
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        shares = self.router(h).float().softmax(-1)
        best, which = shares.topk(self.chosen, -1)
        experts = torch.arange(shares.shape[-1], device=x.device)
        wanted = (which[..., None] == experts).flatten(1, 2)  # [groups, tokens * chosen, experts]
        place = wanted.int().cumsum(1) - 1
        rooms = torch.arange(self.capacity, device=x.device)
        slots = (wanted[..., None] & (place[..., None] == rooms)).unflatten(1, (-1, self.chosen)).to(x.dtype)
        weights = (best / best.sum(-1, keepdim=True)).to(x.dtype)
        combine = (slots * weights[..., None, None]).sum(2)  # [groups, tokens, experts, capacity]
        sent = torch.einsum("gtec,gtd->egcd", slots.sum(2), h)
        out = torch.einsum("egch,ehd->egcd", F.silu(torch.einsum("egcd,edh->egch", sent, self.up)), self.down)
        return (x + torch.einsum("gtec,egcd->gtd", combine, out)).float().square().mean()


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inside, width, 1, bias=False)
        self.b = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.c = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, 4 * width))
        self.shortcut = None
        if stride != 1 or inside != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norms[0](self.a(x)))
        h = F.relu(self.norms[1](self.b(h)))
        return F.relu(self.norms[2](self.c(h)) + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """A ResNet of bottlenecks (50 layers with ``blocks`` 3, 4, 6, 3); ``forward(images, labels)``."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        inside = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(Bottleneck(inside, width << stage, 2 if stage and not i else 1))
                inside = 4 * (width << stage)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inside, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        return F.cross_entropy(self.head(self.layers(x).mean((2, 3))), labels)


def perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Deep learning recommendation (https://arxiv.org/abs/1906.00091): tables of categories, a network for numbers, and
    one for the products of all pairs; ``forward(dense, categories, clicked)``."""

    def __init__(self, rows: tuple[int, ...], dim: int, dense: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, dim) for n in rows)
        self.bottom = perceptron(dense, hidden, dim)
        pairs = (len(rows) + 1) ** 2
        self.top = perceptron(dim + pairs, 2 * hidden, hidden, 1)

    def forward(self, dense: torch.Tensor, categories: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        all_ = torch.stack([x, *found], 1)
        products = (all_ @ all_.transpose(1, 2)).flatten(1)
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products], 1))[:, 0], clicked)
