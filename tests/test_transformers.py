"""One training step of models from `transformers`, as their users have them, on a simulated 2 x 2 mesh.

The batch is sharded on one axis, every matrix on the other; loss, all gradients and what the step leaves in buffers
are those of one device.  Configurations are tiny, weights random: nothing is downloaded.
"""

import copy

import pytest
import torch
import transformers as hf
from torch.distributed.tensor import Shard

from spmd_compiler import export

TEXT = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
DECODER = dict(**TEXT, num_key_value_heads=2, use_cache=False)
VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_labels=4)
T5 = dict(dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
DROPS = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def words():
    ids = torch.randint(2, 64, (4, 16))
    return dict(input_ids=ids, labels=ids)


def padded_words():
    given = words()
    mask = (torch.arange(16) < torch.tensor([[16], [9], [12], [5]])).long()
    return dict(given, attention_mask=mask, labels=given["labels"].masked_fill(mask == 0, -100))


def images():
    return dict(pixel_values=torch.randn(4, 3, 32, 32), labels=torch.tensor([0, 3, 1, 2]))


MODELS = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), words),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, **DROPS)
        ),
        words,
    ),
    "bert": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
        padded_words,
    ),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION, image_size=32, patch_size=8)), images),
    "resnet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=4, layer_type="basic")
        ),
        images,
    ),
    "mixtral": (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4)), words),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **T5)
        ),
        padded_words,
    ),
}


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs).loss


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step(name):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, given = Loss(make().train()), inputs()
    placements = {n: {"tp": Shard(0)} for n, p in model.named_parameters() if p.dim() >= 2 and p.shape[0] > 1}
    placements |= {key: {"dp": Shard(0)} for key in given}
    reference = copy.deepcopy(model)
    program = export(model, (), given, mesh={"dp": 2, "tp": 2}, placements=placements, backward=True)
    loss, grads = program.simulate(**given)
    left = program.simulate_mutations(**given)
    want = reference(**given)
    want.backward()
    torch.testing.assert_close(loss, want)
    scale = max(p.grad.abs().max() for p in reference.parameters() if p.grad is not None)
    for key, p in reference.named_parameters():
        if p.grad is None:
            assert key not in grads or not grads[key].any(), key
            continue
        torch.testing.assert_close(grads[key], p.grad, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, k=key: f"{k}: {m}")
    changed = {k: b for k, b in reference.named_buffers() if not torch.equal(b, model.get_buffer(k))}
    assert set(changed) <= set(left) and bool(changed) == (name == "resnet")
    for key, buffer in changed.items():
        torch.testing.assert_close(left[key], buffer, msg=lambda m, k=key: f"{k}: {m}")
