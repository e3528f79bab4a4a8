"""A small GPT over bytes, of ``nn.TransformerEncoder`` layers; and its decoding from a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_ext

VOCABULARY = 256
EMBED_DIM, NUM_HEADS, NUM_LAYERS = 128, 4, 2
NUM_SPLITS = 4  # so few keys would not be split by choice; here it is to be seen that splits merge exactly


class GPT(nn.Module):
    """Causal language model over bytes (Radford et al. 2019): tokens (batch, seqlen) -> logits (batch, seqlen, 256)."""

    def __init__(self, max_seqlen: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            EMBED_DIM, NUM_HEADS, 4 * EMBED_DIM, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.max_seqlen = max_seqlen
        self.token = nn.Embedding(VOCABULARY, EMBED_DIM)
        self.position = nn.Embedding(max_seqlen, EMBED_DIM)
        self.encoder = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(EMBED_DIM)
        self.head = nn.Linear(EMBED_DIM, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        seqlen = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:seqlen]
        mask = nn.Transformer.generate_square_subsequent_mask(seqlen, device=tokens.device)
        return self.logits(self.encoder(x, mask=mask, is_causal=True))

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    # nn.TransformerEncoder clones one layer, so without this all layers would begin alike.
    if isinstance(module, nn.MultiheadAttention):
        nn.init.normal_(module.in_proj_weight, std=0.02)
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


@dataclass
class KVCache:
    """Keys and values of every layer, (1, max_seqlen, heads, head_dim), and how many of them are filled, int32 (1)."""

    keys: list[Tensor]
    values: list[Tensor]
    seqlens: Tensor

    @classmethod
    def empty(cls, model: GPT) -> KVCache:
        weight = model.head.weight
        shape = (1, model.max_seqlen, NUM_HEADS, EMBED_DIM // NUM_HEADS)
        keys, values = ([torch.empty(shape, device=weight.device) for _ in range(NUM_LAYERS)] for _ in range(2))
        return cls(keys, values, torch.zeros(1, dtype=torch.int32, device=weight.device))


def decode(model: GPT, tokens: Tensor, start: int, cache: KVCache) -> Tensor:
    """Logits (1, n, 256) of n tokens at positions start, start + 1, ..., whose keys and values join the cache."""
    x = model.token(tokens) + model.position.weight[start : start + tokens.shape[1]]
    for layer, keys, values in zip(model.encoder.layers, cache.keys, cache.values, strict=True):
        attn = layer.self_attn
        projected = F.linear(layer.norm1(x), attn.in_proj_weight, attn.in_proj_bias)
        q, k, v = torch.unflatten(projected, -1, (3, NUM_HEADS, attn.head_dim)).unbind(dim=2)
        attended = flash_ext.flash_attn_with_kvcache(
            q, keys, values, k, v, cache_seqlens=cache.seqlens, causal=True, num_splits=NUM_SPLITS
        )
        assert isinstance(attended, Tensor)
        x = x + attn.out_proj(attended.flatten(-2))
        x = x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))
    cache.seqlens += tokens.shape[1]
    return model.logits(x)


@torch.inference_mode()
def generate(model: GPT, prompt: Tensor, length: int, temperature: float, seed: int) -> tuple[Tensor, Tensor]:
    """Continues prompt, (n), token by token to ``length``: the tokens (1, length), and the logits they came from."""
    generator = torch.Generator().manual_seed(seed)
    tokens, cache = prompt[None], KVCache.empty(model)
    logits = [decode(model, tokens, 0, cache)]
    while tokens.shape[1] < length:
        likelihood = torch.softmax(logits[-1][:, -1].float().cpu() / temperature, dim=-1)
        token = torch.multinomial(likelihood, 1, generator=generator).to(tokens.device)
        logits.append(decode(model, token, tokens.shape[1], cache))
        tokens = torch.cat([tokens, token], dim=1)
    return tokens, torch.cat(logits, dim=1)
