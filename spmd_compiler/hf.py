"""A training step of a causal language model of `transformers`, from its configuration alone."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import torch

from .placements import SpmdError

LENGTH = 2048  # tokens of a sequence, where nothing says how many


class Loss(torch.nn.Module):
    """The loss of a causal language model on its own input; parameters go by the model's names."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        object.__setattr__(self, "whole", model)  # not a submodule: the names stay

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.whole(input_ids=ids, labels=ids).loss


def training_step(kind: str, config: str | None, batch: int, length: int | None) -> dict[str, Any]:
    """What `export` takes for a step of the model ``kind`` (``"llama"``) on the meta device.

    ``config`` is a JSON file of its configuration (None: the default one).  The batch is [batch, length];
    without a ``length`` of as many tokens as the model has positions, at most `LENGTH`.  Raises `SpmdError` for more.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise SpmdError("hf:KIND needs transformers: pip install transformers") from None
    try:
        given = json.loads(Path(config).read_text()) if config is not None else {}
    except (OSError, ValueError) as error:
        raise SpmdError(f"{config}: {error}") from None
    if not isinstance(given, dict) or given.get("model_type", kind) != kind:
        raise SpmdError(f"{config} is no configuration of {kind!r}")
    if kind not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, transformers.CONFIG_MAPPING, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise SpmdError(f"hf:{kind}: transformers has no model {kind!r}{hint}")
    try:
        made = transformers.AutoConfig.for_model(kind, **{k: v for k, v in given.items() if k != "model_type"})
        made.use_cache = False
        most = getattr(made.get_text_config(), "max_position_embeddings", None)
        if most and length is not None and length > most:  # meta tensors would be looked up beyond their end
            raise SpmdError(f"{length} tokens a sequence, and the model has max_position_embeddings={most}")
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=made.dtype or torch.bfloat16)
            ids = torch.empty(batch, min(LENGTH, most or LENGTH) if length is None else length, dtype=torch.int64)
    except (ValueError, TypeError, KeyError) as error:
        raise SpmdError(f"hf:{kind}: {str(error).partition('Model type should be')[0].strip()}") from None
    return {"model_or_fn": Loss(model), "args": (ids,), "backward": True, "name": kind}
