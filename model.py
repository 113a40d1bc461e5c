"""The model: layers, the forward pass, and the dimension key that every tensor name follows.

Owns the structure of a decoder and how a checkpoint's weights fill it. Knows nothing of requests, text or sampling.
Start at `Model.forward`; `load_model` builds one.

Tensor names end in their shape. The letters:
    T tokens of all requests of a step, concatenated   S requests in the step (S1 = S + 1 offsets)
    L rows whose logits are wanted   D model width   F feed-forward width   V vocabulary
    H query heads   G key/value heads   A head width   I, O a matmul's input and output width
    P pages   B tokens per page   M pages per request   C candidates of a draw
There is no batch dimension, and prefill and decode are not told apart: a step is T tokens with offsets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from checkpoint import Checkpoint
from families import LayerConfig, ModelConfig, RopeConfig
from kernels import KV
from kvcache import Cache, KVSpec
from weights import Weights


@dataclass(frozen=True)
class Batch:
    """One step's tokens. Request s owns rows starts_S1[s] to starts_S1[s+1], the last of its lengths_S[s] tokens.

    `slots_T` and `tables_SM` have one tensor for each group of the cache: where each token's keys and values go, and
    where each request's pages lie. `row_L` are the rows whose logits are wanted.
    """

    token_T: Tensor
    position_T: Tensor
    slots_T: tuple[Tensor, ...]
    tables_SM: tuple[Tensor, ...]
    starts_S1: list[int]
    lengths_S: list[int]
    row_L: Tensor

    @staticmethod
    def pack(cache: Cache, rows: Sequence[int], tokens: Sequence[Sequence[int]], pasts: Sequence[int],
             row_L: Sequence[int]) -> "Batch":
        """Request s computes `tokens[s]` after `pasts[s]` tokens; its page tables are in row `rows[s]` of the cache."""
        starts_S1, lengths_S, positions = [0], [], []
        for new, past in zip(tokens, pasts):
            starts_S1.append(starts_S1[-1] + len(new))
            lengths_S.append(past + len(new))
            positions.extend(range(past, past + len(new)))
        position_T = torch.tensor(positions, dtype=torch.int64)
        request_T = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(starts_S1).diff())
        page_T, place_T = position_T // cache.page_size, position_T % cache.page_size
        num_pages = cache.pages_for(max(lengths_S))
        tables_SM = tuple(group.table[list(rows), :num_pages] for group in cache.groups)
        slots_T = tuple(table_SM[request_T, page_T].long() * cache.page_size + place_T for table_SM in tables_SM)
        token_T = torch.tensor([token for new in tokens for token in new], dtype=torch.int64)
        return Batch(token_T, position_T, slots_T, tables_SM, starts_S1, lengths_S,
                     torch.tensor(row_L, dtype=torch.int64))


class Linear:
    """A matmul's weights; several of the checkpoint's tensors side by side where they read the same input.

    The config says whether there is a `bias`: what else a file holds is not the model's.
    """

    def __init__(self, weights: Weights, *names: str, bias: bool):
        self.weight_OI = _joined([weights.take(f"{name}.weight") for name in names])
        self.bias_O = _joined([weights.take(f"{name}.bias") for name in names]) if bias else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return kernels.linear(x_TI, self.weight_OI, self.bias_O)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class Layer:
    """One decoder layer: attention, then the feed-forward network, each on a normalised input and added back."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: LayerConfig, name: str):
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.window, self.eps = layer.window, config.norm_eps
        self.attn_norm_D = weights.take(f"{name}.attn_norm.weight")
        self.attn_qkv = Linear(weights, f"{name}.attn_q", f"{name}.attn_k", f"{name}.attn_v", bias=config.qkv_bias)
        self.attn_output = Linear(weights, f"{name}.attn_output", bias=config.o_bias)
        self.ffn_norm_D = weights.take(f"{name}.ffn_norm.weight")
        self.ffn_gate_up = Linear(weights, f"{name}.ffn_gate", f"{name}.ffn_up", bias=config.mlp_bias)
        self.ffn_down = Linear(weights, f"{name}.ffn_down", bias=config.mlp_bias)

    def __call__(self, h_TD: Tensor, batch: Batch, kv: KV, angles: tuple[Tensor, Tensor]) -> Tensor:
        h_TD = h_TD + self.attend(kernels.rms_norm(h_TD, self.attn_norm_D, self.eps), batch, kv, angles)
        return h_TD + self.feed_forward(kernels.rms_norm(h_TD, self.ffn_norm_D, self.eps))

    def attend(self, x_TD: Tensor, batch: Batch, kv: KV, angles: tuple[Tensor, Tensor]) -> Tensor:
        H, G, A = self.heads, self.kv_heads, self.head_dim
        q_THA, k_TGA, v_TGA = self.attn_qkv(x_TD).view(-1, H + 2 * G, A).split((H, G, G), dim=1)
        kernels.store_kv_(kv, kernels.rope(k_TGA, *angles), v_TGA, batch.slots_T[kv.group])
        out_THA = kernels.attention(kernels.rope(q_THA, *angles), kv, batch, A**-0.5, self.window)
        return self.attn_output(out_THA.flatten(1))

    def feed_forward(self, x_TD: Tensor) -> Tensor:
        return self.ffn_down(kernels.silu_mul(self.ffn_gate_up(x_TD)))


class Model:
    """A decoder for one context length: rope factors that depend on the length are settled when it is made."""

    def __init__(self, config: ModelConfig, weights: Weights, context: int):
        shapes = tensor_shapes(config)
        if has_divisors := weights.has("rope_freqs.weight"):  # a GGUF states Llama 3.1's rule so
            shapes["rope_freqs.weight"] = (config.rope.dim // 2,)
        weights.require(shapes)
        self.config, self.context = config, context
        self.token_embd_VD = weights.take("token_embd.weight")
        self.layers = [Layer(weights, config, layer, f"blk.{i}") for i, layer in enumerate(config.layers)]
        self.output_norm_D = weights.take("output_norm.weight")
        self.output_VD = self.token_embd_VD if config.tied else weights.take("output.weight")
        self.inv_freq, self.rope_scale = rope_tables(config.rope, config.context, context)
        if has_divisors:
            self.inv_freq = self.inv_freq / weights.take("rope_freqs.weight").double()
        self.notes = weights.notes  # what the user should know of the file's tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embd_VD.dtype

    @property
    def device(self) -> torch.device:
        return self.token_embd_VD.device

    def kv_specs(self) -> list[KVSpec]:
        """What each layer keeps of a token."""
        c = self.config
        return [KVSpec(c.kv_heads, c.head_dim, c.head_dim, layer.window) for layer in c.layers]

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Runs the step's tokens through all layers, storing their keys and values: normalised hidden rows h_TD."""
        h_TD = kernels.embed(self.token_embd_VD, batch.token_T)
        angles = kernels.rope_angles(batch.position_T, self.inv_freq, self.rope_scale, self.dtype)
        for layer, kv in zip(self.layers, cache.layers):
            h_TD = layer(h_TD, batch, kv, angles)
        return kernels.rms_norm(h_TD, self.output_norm_D, self.config.norm_eps)

    @torch.inference_mode()
    def logits(self, h_LD: Tensor) -> Tensor:
        """Scores of the next token for hidden rows: logits_LV, in at least float32."""
        logits_LV = kernels.linear(h_LD, self.output_VD)
        return logits_LV if self.dtype == torch.float64 else logits_LV.float()


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: str = "cpu", context: int | None = None) -> Model:
    """The checkpoint's model, its weights dequantized to `dtype`. `context` (None: the trained one) is the longest
    sequence it will see; ValueError if no rope scaling of the model covers it."""
    config = checkpoint.config
    context = config.context if context is None else context
    if not 1 <= context <= config.max_context:
        raise ValueError(
            f"context is {context} but the model covers 1 to {config.max_context} tokens: change --context")
    return Model(config, Weights(checkpoint, dtype, device), context)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model needs, by canonical name, with its shape."""
    D, F, A = config.hidden, config.ffn, config.head_dim
    q_width, kv_width = config.heads * A, config.kv_heads * A
    shapes = {"token_embd.weight": (config.vocab, D), "output_norm.weight": (D,)}
    if not config.tied:
        shapes["output.weight"] = (config.vocab, D)
    for i in range(len(config.layers)):
        layer = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,),
                 "attn_q.weight": (q_width, D), "attn_k.weight": (kv_width, D), "attn_v.weight": (kv_width, D),
                 "attn_output.weight": (D, q_width),
                 "ffn_gate.weight": (F, D), "ffn_up.weight": (F, D), "ffn_down.weight": (D, F)}
        if config.qkv_bias:
            layer |= {"attn_q.bias": (q_width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
        if config.o_bias:
            layer |= {"attn_output.bias": (D,)}
        if config.mlp_bias:
            layer |= {"ffn_gate.bias": (F,), "ffn_up.bias": (F,), "ffn_down.bias": (D,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def rope_tables(rope: RopeConfig, trained: int, context: int) -> tuple[Tensor, float]:
    """Rotary frequencies (dim/2,) in float64, and the factor on cos and sin, for sequences up to `context`.

    linear: positions divided by `factor` (Chen et al. 2023). dynamic: a larger base beyond the trained length ("NTK").
    llama3: long wavelengths divided by `factor`. yarn: the same by a ramp over turns (Peng et al. 2023). longrope:
    searched divisors, one list up to the original context and one beyond (Ding et al. 2024).
    """
    theta, dim, factor = rope.theta, rope.dim, rope.factor
    original = rope.original_context or trained
    scale = 1.0
    if rope.kind == "dynamic":
        stretch = factor * max(context, trained) / trained - (factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    inv_freq = kernels.rope_frequencies(theta, dim)
    if rope.kind == "linear":
        inv_freq = inv_freq / factor
    elif rope.kind == "llama3":
        ramp = kernels.llama3_ramp(inv_freq, original, rope.low_freq_factor, rope.high_freq_factor)
        inv_freq = inv_freq * (1 - ramp) + inv_freq / factor * ramp
    elif rope.kind == "yarn":
        ramp = kernels.yarn_ramp(theta, dim, original, rope.beta_fast, rope.beta_slow, rope.truncate)
        inv_freq = inv_freq * (1 - ramp) + inv_freq / factor * ramp
        scale = _yarn_scale(rope)
    elif rope.kind == "longrope":
        divisors = rope.long_factor if context > original else rope.short_factor
        inv_freq = inv_freq / torch.tensor(divisors, dtype=torch.float64)
        scale = rope.attention_factor
        if scale is None:
            scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inv_freq, scale


def _yarn_scale(rope: RopeConfig) -> float:
    """YaRN's temperature on attention, applied to cos and sin."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1)
