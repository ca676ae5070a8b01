"""Conformance over the architectures of `transformers`: `python -m tests.library [--model NAME] [--report FILE]`.

Each is built from a tiny configuration with random weights; one training step is planned on a 2 x 2 mesh with the batch
on one axis and every matrix's dim 0 on the other, simulated, and compared with one device: loss, all gradients, and
what the step leaves in buffers.  Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import inspect
import json
import multiprocessing
import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree
from transformers.models.auto import modeling_auto as auto

from spmd_compiler import export
from spmd_compiler.placements import SpmdError

BATCH, LENGTH, IMAGE, SAMPLES, MELS = 4, 16, 32, 1600, 16
WIDE, MANY, HEADS, LAYERS = 32, 64, 4, 1

# what the fields of configurations are called, and what they are here
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "encoder_hidden_size", "decoder_hidden_size", "hidden_dim", "dim", "emb_dim", "model_dim", "d_embed", "projection_dim", "projection_size", "word_embed_proj_dim", "decoder_hidden_dim", "encoder_hidden_dim", "attention_hidden_size", "rnn_hidden_size", "fusion_hidden_size", "mask_feature_size", "feature_size", "lru_width", "max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx", "max_seq_len", "context_length", "max_sequence_length", "encoder_output_dim", "entity_emb_size", "codebook_dim", "shared_dim", "decoder_embed_dim", "text_hidden_size", "d_latents", "out_hidden_size", "image_embed_dim", "qformer_hidden_size"],
        WIDE,
    ),
    **dict.fromkeys(
        ["vocab_size", "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "mlp_dim", "d_inner", "decoder_intermediate_size", "dim_feedforward", "hidden_dim_ff", "encoder_intermediate_size", "shared_expert_intermediate_size", "intermediate_dim", "decoder_ffn_hidden_size"],
        MANY,
    ),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads", "num_self_attention_heads", "num_cross_attention_heads", "linear_num_value_heads"],
        HEADS,
    ),
    **dict.fromkeys(
        ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers", "decoder_num_hidden_layers", "depth", "num_blocks", "encoder_num_hidden_layers", "num_self_attends_per_block", "num_blocks_per_stage"],
        LAYERS,
    ),
    **dict.fromkeys(
        ["num_key_value_heads", "n_kv_heads", "num_kv_heads", "type_vocab_size", "num_experts_per_tok", "linear_num_key_heads", "n_group", "topk_group", "moe_topk", "mamba_n_groups", "num_hidden_groups", "n_shared_experts", "num_block_records"],
        2,
    ),
    **dict.fromkeys(["topk_group", "n_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["head_dim", "d_kv", "attention_head_size", "attn_head_dim", "global_head_dim"], 8),
    **dict.fromkeys(
        ["moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "expert_ffn_hidden_size", "mamba_d_state", "state_size", "index_topk"],
        16,
    ),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8),
    "first_k_dense_replace": 0,
    "layerdrop": 0.0,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_labels": 4,
    "num_mel_bins": MELS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 16, 32],
    "num_frames": 2,
    "apply_spec_augment": False,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "embedding_dim": WIDE,
    "use_cache": False,
    "use_pretrained_backbone": False,
    "use_timm_backbone": False,
}  # fmt: skip

# what one architecture asks for beyond that
_KEYS = dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8, num_key_value_heads=4)
_SERIES = dict(prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1)
OWN: dict[str, dict[str, Any]] = {
    "gptj": dict(rotary_dim=8),
    "codegen": dict(rotary_dim=8),
    "deepseek_v2": _KEYS,
    "deepseek_v3": _KEYS,
    "rwkv": dict(num_hidden_layers=2),
    "jamba": dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0), ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4)),
    "reformer": dict(axial_pos_shape=[4, 4], axial_pos_embds_dim=[16, 16], lsh_attn_chunk_length=4,
                     local_attn_chunk_length=4, attn_layers=["local", "lsh"], num_buckets=2, hash_seed=1),
    "convnext": dict(image_size=64), "convnextv2": dict(image_size=64),
    "time_series_transformer": _SERIES,
    "informer": dict(_SERIES, sampling_factor=1),
    "vit_mae": dict(mask_ratio=0.0),
    **{n: dict(conv_dim=[16, 16], conv_stride=[5, 4], conv_kernel=[10, 8]) for n in ("wav2vec2", "hubert", "wavlm")},
    "t5": dict(d_ff=64, decoder_start_token_id=0),
    "mamba2": dict(expand=1, n_groups=2, num_heads=4, head_dim=8, chunk_size=8),
    "swin": dict(image_size=64, window_size=2, depths=[1, 1], num_heads=[2, 2], patch_size=4),
    "swinv2": dict(image_size=64, window_size=2, depths=[1, 1], num_heads=[2, 2], patch_size=4),
    "levit": dict(image_size=64, hidden_sizes=[16, 24, 32], depths=[1, 1, 1], key_dim=[8, 8, 8], num_attention_heads=[2, 2, 2]),
    "cvt": dict(depth=[1, 1, 1], embed_dim=[8, 16, 16]),
    "decision_transformer": dict(state_dim=17, act_dim=4),
    "detr": dict(backbone_config=dict(model_type="resnet", embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"]), num_queries=4),
    "dpt": dict(neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, backbone_out_indices=[0, 0, 0, 0], is_hybrid=False),
    "perceiver": dict(max_position_embeddings=16, num_latents=8, d_model=32, num_self_attends_per_block=1),
    "speech_to_text": dict(input_feat_per_channel=MELS, conv_channels=MELS),
    "audio-spectrogram-transformer": dict(max_length=64, frequency_stride=8, time_stride=8),
    "sam": dict(vision_config=dict(output_channels=32)),
}
HEADS_OF = ["SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "TIME_SERIES_PREDICTION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "OBJECT_DETECTION"]


_NAMES = (
    "gpt_neox opt bloom falcon mistral qwen2 qwen3 qwen2_moe gemma gemma2 gemma3_text phi phi3 olmo olmo2 "
    "cohere granite stablelm starcoder2 gptj codegen mpt deepseek_v2 deepseek_v3 dbrx jamba mamba mamba2 "
    "falcon_mamba rwkv xlnet t5 bart pegasus mbart marian led longformer big_bird reformer roberta deberta "
    "deberta-v2 albert electra distilbert mobilebert funnel convbert fnet nystromformer modernbert esm deit "
    "beit swin swinv2 convnext convnextv2 mobilenet_v2 mobilevit regnet segformer poolformer pvt cvt levit "
    "dinov2 vit_mae detr yolos sam dpt clip siglip blip wav2vec2 hubert wavlm whisper speech_to_text "
    "audio-spectrogram-transformer time_series_transformer patchtst informer decision_transformer vilt "
    "layoutlm tapas perceiver "
)
TRIED = _NAMES.split()


class Unfit(Exception):
    """The configuration made here is none that the architecture runs with."""


@dataclasses.dataclass
class Row:
    """What was found for one architecture."""

    model: str
    kind: str = ""
    verdict: str = ""  # equal, wrong, refused, error, slow, unfit
    detail: str = ""
    parameters: int = 0
    replicated: tuple[str, ...] = ()
    seconds: float = 0.0
    torch: str = ""  # what torch.export says, where we failed
    mode: str = "train"
    dtype: str = "float32"
    without_loss: str = ""  # the same, of the outputs without labels


def fields_of(kind: Any) -> list[str]:
    return list(inspect.signature(kind.__init__).parameters)


def fitting(name: str, default: Any) -> Any:
    """The small value of a field in the type of its default (a list: one for each stage); ``...``: the default."""
    value = SMALL.get(name, ...)
    if value is ... and re.search("drop|pdrop", name) and isinstance(default, (int, float)):
        value = 0
    if value is ... and re.fullmatch(r"(image|video|audio|speech)_token_(id|index)", name):
        value = 3
    if value is ... or (isinstance(default, (bool, str)) and not isinstance(value, type(default))):
        return ...
    if isinstance(default, (list, tuple)) and default and isinstance(default[0], int):
        if isinstance(value, list):
            value = (value + [value[-1]] * len(default))[: len(default)]
        elif value == WIDE and name not in ("image_size", "patch_size"):
            value = ([8, 16, 16, 32] + [32] * len(default))[: len(default)]
        elif value == HEADS:
            value = [2] * len(default)
        else:
            value = [value] * len(default)
        return type(default)(value)
    if isinstance(default, (list, tuple)):
        return ...
    if isinstance(value, list):
        return value if default is None else ...
    return float(value) if isinstance(default, float) else value


def tiny(kind: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a small configuration of the class ``kind``."""
    names = fields_of(kind)
    try:
        whole = kind()
    except Exception:
        whole = None
    found = {n: fitting(n, getattr(whole, n, None)) for n in names}
    for name, part in getattr(kind, "sub_configs", {}).items():
        if name in names and hasattr(part, "sub_configs") and part.__name__ != "AutoConfig":
            found[name] = tiny(part, own.get(name, {}))
        elif name in names and getattr(whole, name, None) is not None:
            part = type(getattr(whole, name))
            found[name] = {"model_type": part.model_type, **tiny(part, own.get(name, {}))}
    found.setdefault("num_labels", 4)
    found |= {k: v for k, v in own.items() if not isinstance(v, dict) or k not in found}
    return {k: v for k, v in found.items() if v is not ...}


def head(name: str) -> tuple[str, Any]:
    """The task and the class that ``name`` is trained with."""
    for task in HEADS_OF:
        found = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(name)
        if found is not None:
            return task, getattr(hf, found if isinstance(found, str) else found[0])
    found = auto.MODEL_MAPPING_NAMES.get(name)
    if found is None:
        raise Unfit("no model class of its own")
    return "", getattr(hf, found if isinstance(found, str) else found[0])


def inputs(model: Any, task: str) -> dict[str, torch.Tensor]:
    """A batch for ``model``."""
    names = inspect.signature(model.forward).parameters
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    ids = torch.randint(5, min(60, getattr(config, "vocab_size", 60) or 60), (BATCH, LENGTH))
    size = getattr(getattr(model.config, "vision_config", model.config), "image_size", IMAGE) or IMAGE
    size = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(getattr(model.config, "vision_config", model.config), "num_channels", 3)
    frames = getattr(model.config, "num_frames", 2)
    mels = next((getattr(model.config, n) for n in ("num_mel_bins", "feature_size", "input_feat_per_channel") if hasattr(model.config, n)), MELS)
    main = model.main_input_name
    found: dict[str, Any] = {}
    if task == "VIDEO_CLASSIFICATION" and "pixel_values" in names:
        found["pixel_values"] = torch.randn(BATCH, frames, channels, *size)
    elif main == "pixel_values" or (main not in names and "pixel_values" in names) or "CLIP" in type(model).__name__:
        if "pixel_values" in names:
            found["pixel_values"] = torch.randn(BATCH, channels, *size)
    if main == "input_ids" or ("input_ids" in names and names["input_ids"].default is inspect.Parameter.empty) or (
        "input_ids" in names and "pixel_values" in found
    ):
        found["input_ids"] = ids
    if main == "input_values":
        found["input_values"] = torch.randn(BATCH, SAMPLES)
    if main == "input_features":
        found["input_features"] = torch.randn(BATCH, mels, 2 * WIDE)
    if "decoder_input_ids" in names and "labels" not in names:
        found["decoder_input_ids"] = ids
    if "labels" in names:
        if task in ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
            found["labels"] = found.get("input_ids", ids)
        elif task == "CTC":
            found["labels"] = ids[:, :4]
        elif "CLASSIFICATION" in task:
            found["labels"] = torch.tensor([0, 3, 1, 2])
        elif task == "SEMANTIC_SEGMENTATION":
            found["labels"] = torch.randint(0, 4, (BATCH, *size))
    for name, value in OWN_INPUTS.get(model.config.model_type, {}).items():
        found[name] = value()
        if found[name] is None:
            del found[name]
    missing = [
        n for n, p in names.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and n not in found
    ]  # fmt: skip
    if missing:
        raise Unfit(f"inputs not known here: {', '.join(missing)}")
    return found


def _series() -> dict[str, Any]:
    past, coming = 10, 4  # the context and its longest lag; the prediction
    return dict(
        past_values=lambda: torch.randn(BATCH, past),
        past_time_features=lambda: torch.randn(BATCH, past, 1),
        past_observed_mask=lambda: torch.ones(BATCH, past),
        future_values=lambda: torch.randn(BATCH, coming),
        future_time_features=lambda: torch.randn(BATCH, coming, 1),
    )


def _text() -> torch.Tensor:
    return torch.randint(5, 60, (BATCH, LENGTH))


OWN_INPUTS: dict[str, dict[str, Any]] = {
    "time_series_transformer": _series(),
    "informer": _series(),
    "autoformer": _series(),
    "patchtst": dict(past_values=lambda: torch.randn(BATCH, 32, 1)),
    "patchtsmixer": dict(past_values=lambda: torch.randn(BATCH, 32, 1)),
    "speech_to_text": dict(input_features=lambda: torch.randn(BATCH, 2 * WIDE, MELS)),
    "audio-spectrogram-transformer": dict(input_values=lambda: torch.randn(BATCH, 64, MELS)),
    "decision_transformer": dict(
        states=lambda: torch.randn(BATCH, 6, 17),
        actions=lambda: torch.randn(BATCH, 6, 4),
        rewards=lambda: torch.randn(BATCH, 6, 1),
        returns_to_go=lambda: torch.randn(BATCH, 6, 1),
        timesteps=lambda: torch.arange(6).expand(BATCH, 6).clone(),
        attention_mask=lambda: torch.ones(BATCH, 6),
    ),
    "vilt": dict(pixel_values=lambda: torch.randn(BATCH, 3, IMAGE, IMAGE), pixel_mask=lambda: torch.ones(BATCH, IMAGE, IMAGE)),
    "blip": dict(pixel_values=lambda: torch.randn(BATCH, 3, IMAGE, IMAGE), input_ids=_text),
    "perceiver": dict(inputs=_text, attention_mask=lambda: torch.ones(BATCH, LENGTH)),
}  # fmt: skip


class Loss(torch.nn.Module):
    """The loss of a model, or a number of all its outputs."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: torch.Tensor) -> torch.Tensor:
        out = self.model(**given)
        if getattr(out, "loss", None) is not None:
            return out.loss
        leaves = [x for x in pytree.tree_leaves(dict(out)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return torch.stack([x.sin().mean().float() for x in leaves if x.requires_grad]).sum()


def step(model: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict, dict]:
    """Loss, gradients and changed buffers of a copy of ``model`` on one device."""
    own = copy.deepcopy(model)
    loss = own(**given)
    loss.backward()
    grads = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    left = {n: b for n, b in own.named_buffers() if not torch.equal(b, model.get_buffer(n))}
    return loss.detach(), grads, left


def made(name: str, row: Row) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Any]:
    """A model, a batch, and what its step gives; `Unfit` where what is made here does not run."""
    torch.manual_seed(0)
    own = OWN.get(name, {})
    try:
        task, kind = head(name)
        row.kind = kind.__name__
        config = hf.CONFIG_MAPPING[name](**tiny(hf.CONFIG_MAPPING[name], own))
        for attention in ("sdpa", "eager"):
            config._attn_implementation = attention
            try:
                model = kind(config)
                break
            except ValueError:
                if attention == "eager":
                    raise
        given = inputs(model, task)
        row.parameters = sum(p.numel() for p in model.parameters())
        if row.parameters > 5_000_000:
            raise Unfit(f"{row.parameters:,} parameters")
        with torch.no_grad():  # biases and scales that begin as constants would hide what they are multiplied with
            for p in model.parameters():
                if p.is_floating_point():
                    p.add_(0.02 * torch.randn(p.shape))
        whole = Loss(model).train()
        want = step(whole, given)
        again = step(whole, given)
        if not torch.equal(want[0], again[0]):
            row.mode = "eval"
            whole.eval()
            want = step(whole, given)
            if not torch.equal(want[0], step(whole, given)[0]):
                raise Unfit("random")
        if not torch.isfinite(want[0]):
            raise Unfit("loss is not finite")
        return whole, given, want
    except Unfit:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise Unfit(f"{type(error).__name__}: {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})") from error


def differs(got: torch.Tensor, want: torch.Tensor, scale: float) -> str | None:
    try:
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return None


def compare(name: str, model: torch.nn.Module, given: dict[str, torch.Tensor], want: Any, row: Row) -> None:
    placements: dict[str, Any] = {
        n: {"tp": Shard(0)} for n, p in model.named_parameters() if p.dim() >= 2 and p.shape[0] > 1
    }
    placements |= {key: {"dp": Shard(0)} for key in given}
    program = export(model, (), dict(given), mesh={"dp": 2, "tp": 2}, placements=placements, backward=True)
    row.replicated = tuple(sorted({str(r).split("(")[0] for r in program.replicated_ops}))
    loss, grads = program.simulate(**given)
    left = program.simulate_mutations(**given) if want[2] else {}
    wrong = []
    found = differs(loss, want[0], 1.0)
    if found:
        wrong.append(f"loss: {found}")
    scale = float(max([g.abs().max() for g in want[1].values() if g.numel()], default=1.0))
    for key, _p in model.named_parameters():
        w = want[1].get(key)
        if w is None:
            if key in grads and grads[key].any():
                wrong.append(f"{key}: a gradient where there is none")
            continue
        found = differs(grads[key], w, scale) if key in grads else "no gradient"
        if found:
            wrong.append(f"{key}: {found}")
    for key, b in want[2].items():
        found = differs(left[key], b, float(b.abs().max())) if key in left else "not changed"
        if found:
            wrong.append(f"{key}: {found}")
    row.verdict = "wrong" if wrong else "equal"
    row.detail = "; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def attempt(name: str) -> Row:
    """Try one architecture: in float32, where that differs in float64; and without its own loss, if that is refused."""
    row = Row(name)
    begun = time.process_time()
    warnings.simplefilter("ignore")
    try:
        model, given, want = made(name, row)
    except Unfit as error:
        row.verdict, row.detail = "unfit", str(error)
        return row
    _judge(name, model, given, want, row)
    if row.verdict == "wrong":  # of ill-conditioned steps float32 has no digits left
        double = model.double()
        wide = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
        with contextlib.suppress(RuntimeError, TypeError):
            want, row.dtype = step(double, wide), "float64"
            _judge(name, double, wide, want, row)
    if row.verdict in ("refused", "error"):
        try:
            torch.export.export(model, (), dict(given), strict=False)
            row.torch = "exports"
        except Exception as error:
            row.torch = f"{type(error).__name__}: {str(error)[:300]}"
        rest = {k: v for k, v in given.items() if k != "labels"}
        if len(rest) < len(given):
            other = Row(name)
            with contextlib.suppress(Exception):
                _judge(name, model, rest, step(model, rest), other)
                row.without_loss = f"{other.verdict} {other.detail}".strip()
    row.seconds = round(time.process_time() - begun, 1)
    return row


def _judge(name: str, model: torch.nn.Module, given: dict[str, torch.Tensor], want: Any, row: Row) -> None:
    try:
        compare(name, model, given, want, row)
    except Exception as error:
        row.verdict = "refused" if isinstance(error, SpmdError) else "error"
        inner = traceback.extract_tb(error.__traceback__)[-1]
        row.detail = str(error)[:700]
        if row.verdict == "error":
            row.detail = f"{type(error).__name__}: {row.detail} ({Path(inner.filename).name}:{inner.lineno})"


def _attempt_into(name: str, seconds: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds), resource.RLIM_INFINITY))
    pipe.send(attempt(name))


def within(name: str, seconds: float) -> Row:
    """`attempt` in a process of its own, which may take ``seconds`` of processor time."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(False)
    process = fork.Process(target=_attempt_into, args=(name, seconds, theirs))
    process.start()
    theirs.close()
    try:
        row = ours.recv()
    except EOFError:
        process.join()
        late = process.exitcode == -signal.SIGXCPU
        row = Row(name, verdict="slow" if late else "error", detail=f"over {seconds:.0f} s" if late else "it crashed")
    process.join()
    return row


TOTALS = {
    "equal": "equal: loss, all gradients, buffers",
    "wrong": "wrong values",
    "refused": "refused, with the line and what to write instead",
    "error": "other errors",
    "slow": "not done in the time allowed",
}


def report(rows: Sequence[Row]) -> str:
    """The rows as a page: totals, then what is not equal, then names."""
    tried = [r for r in rows if r.verdict != "unfit"]
    lines = [
        "# The architectures of transformers",
        "",
        f"`python -m tests.library`, torch {torch.__version__.split('+')[0]}, transformers {hf.__version__}: "
        "one training step of each on a simulated 2 x 2 mesh, batch on one axis, dim 0 of every matrix on the other.",
        "",
        "| | |",
        "|---|---|",
        f"| architectures tried | {len(tried)} of {len(rows)} |",
        *(f"| {what} | {sum(r.verdict == v for r in tried)} |" for v, what in TOTALS.items()),
        f"| of those refused, equal without labels (what data decide is in the loss) | "
        f"{sum(r.verdict == 'refused' and r.without_loss == 'equal' for r in tried)} |",
        f"| with an op that is replicated for want of a rule | {sum(bool(r.replicated) for r in tried)} |",
        f"| seconds of processor time | {sum(r.seconds for r in tried):.0f} |",
        "",
        "| not equal | class | what | without labels | `torch.export` |",
        "|---|---|---|---|---|",
    ]
    for r in tried:
        if r.verdict != "equal":
            cells = [r.model, r.kind, f"{r.verdict}: {r.detail}", r.without_loss, r.torch]
            lines.append("| " + " | ".join(" ".join(c.replace("|", "/").split())[:240] for c in cells) + " |")
    unfit = ", ".join(r.model for r in rows if r.verdict == "unfit")
    lines += ["", f"Not tried, for want of a small configuration that runs on one device and gives the same twice: {unfit or 'none'}."]
    lines += ["", "Equal: " + ", ".join(f"{r.model} ({r.kind})" for r in tried if r.verdict == "equal") + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", default=None)
    parser.add_argument("--rows", type=Path, help="where each result goes as a line of JSON, as it comes")
    parser.add_argument("--report", type=Path, help="where the page of results goes")
    parser.add_argument("--seconds", type=float, default=240, help="of processor time, for each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in given.model or TRIED:
        rows.append(row := within(name, given.seconds))
        print(f"{row.model:28} {row.verdict:8} {row.seconds:6} {row.kind:36} {row.detail[:200]}", flush=True)
        if given.rows is not None:
            with given.rows.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    if given.report is not None:
        given.report.write_text(report(rows))


if __name__ == "__main__":
    main()
