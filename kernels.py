"""Every numeric operation of the forward pass, as a plain torch body.

These bodies are the reference: native.py has the same names and signatures on compiled kernels and is tested against
them. A model is given one of the two. Nothing in this file knows of requests, pages' owners or layers. The letters are
model.py's dimension key.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(weight_VD: Tensor, token_T: Tensor) -> Tensor:
    """Rows of the embedding table: x_TD."""
    return F.embedding(token_T, weight_VD)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """y_TO = x W^T + b. In bfloat16 this reaches torch's oneDNN matmul, which uses AMX where the CPU has it."""
    return F.linear(x_TI, weight_OI, bias_O)


def linear_add_(y_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
    """y += x W^T + b."""
    y_TO += linear(x_TI, weight_OI, bias_O)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in at least float32 inside (Zhang and Sennrich 2019)."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(gate) * up, where the row holds gate, then up: act_TF."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def argmax(x_LV: Tensor) -> Tensor:
    """The lowest id of the greatest number in each row: id_L int64; -1 for a row with a number that is not finite."""
    return torch.where(torch.isfinite(x_LV).all(-1), x_LV.argmax(-1), -1)


def rope_angles(position_T: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, rotated width / 2) of position * frequency, times `scale`. The product is float64: in float32
    the angle at position 100,000 is off by 0.004."""
    angle = (position_T[:, None].double() * inv_freq).unsqueeze(1)
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def rope(x_THA: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each head's pairs (i, i + half) of its first 2 * half entries (Su et al. 2021); the rest passes."""
    half = cos.shape[-1]
    a, b, rest = x_THA[..., :half], x_THA[..., half : 2 * half], x_THA[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


@dataclass(frozen=True)
class KV:
    """One layer's cached keys and values, in pages of `page_size` tokens, and the group of page tables they are found
    by. How numbers lie in a page is the business of the operations that made it alone; here it is (P, B, G, A)."""

    k: Tensor
    v: Tensor
    page_size: int
    group: int


def new_kv(num_pages: int, page_size: int, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype,
           device: str | torch.device, group: int) -> KV:
    """Memory for a layer's keys and values. What it holds is anything."""
    k_PBGA, v_PBGA = (torch.empty(num_pages, page_size, heads, dim, dtype=dtype, device=device)
                      for dim in (k_dim, v_dim))
    return KV(k_PBGA, v_PBGA, page_size, group)


def rope_store_(kv: KV, qkv_TX: Tensor, angles: tuple[Tensor, Tensor], slot_T: Tensor, head_dim: int) -> Tensor:
    """Rows of queries, keys and values, head by head: rotates queries and keys, stores keys and values: q_THA."""
    kv_heads = kv.k.shape[2]
    qkv_THA = qkv_TX.unflatten(1, (-1, head_dim))
    q_THA, k_TGA, v_TGA = qkv_THA.split((qkv_THA.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    store_kv_(kv, rope(k_TGA, *angles), v_TGA, slot_T)
    return rope(q_THA, *angles)


def store_kv_(kv: KV, k_TGA: Tensor, v_TGA: Tensor, slot_T: Tensor) -> None:
    """Writes each token's keys and values into its slot (page id * page size + place in the page).

    Where a key is not finite, NaN is written as the value: softmax may lose such a key, but no sum loses the value.
    """
    k_TGA, v_TGA = k_TGA.to(kv.k.dtype), v_TGA.to(kv.v.dtype)
    if not _finite(k_TGA):
        v_TGA = v_TGA.masked_fill(~k_TGA.isfinite().all(-1, keepdim=True), math.nan)
    kv.k.flatten(0, 1).index_copy_(0, slot_T, k_TGA)
    kv.v.flatten(0, 1).index_copy_(0, slot_T, v_TGA)


def attention(q_THA: Tensor, kv: KV, batch, scale: float, window: int = 0) -> Tensor:
    """Causal attention of each request's new tokens over its pages: out_THA.

    The new tokens' keys and values must be stored already. `batch` is a model.Batch: request s owns rows starts_S1[s]
    to starts_S1[s+1], the last of its lengths_S[s] tokens. `window` > 0: a token sees itself and the window - 1 tokens
    before it. A row whose query, or any key or value that it sees, is not finite is NaN; the others are as without it.
    """
    out_THA = torch.empty_like(q_THA)
    lengths_S = batch.lengths_S.tolist()

    def attend(function: Callable) -> None:
        for s, (start, end) in enumerate(pairwise(batch.starts_S1.tolist())):
            page_M = batch.tables[kv.group][batch.lease_S[s]]
            past = lengths_S[s] - (end - start)
            k_GLA, v_GLA, first = _cached(kv, page_M, past, lengths_S[s], window, q_THA.dtype)
            past -= first
            out_HTA = function(q_THA[start:end].transpose(0, 1), k_GLA, v_GLA, past, scale, window)
            out_THA[start:end] = out_HTA.transpose(0, 1)

    attend(_attend)
    if not (_finite(q_THA) and _finite(out_THA)):
        attend(_attend_damaged)
    return out_THA


def _cached(kv: KV, page_M: Tensor, past: int, length: int, window: int,
            dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Keys and values of a request from the first page that its new tokens see, and the place where that begins."""
    first_page = max(0, past + 1 - window) // kv.page_size if window else 0
    first = first_page * kv.page_size
    seen_M = page_M[first_page : -(-length // kv.page_size)]
    k_GLA, v_GLA = (cached[seen_M].flatten(0, 1)[: length - first].transpose(0, 1).to(dtype)
                    for cached in (kv.k, kv.v))
    return k_GLA, v_GLA, first


def _attend(q_HTA: Tensor, k_GLA: Tensor, v_GLA: Tensor, past: int, scale: float, window: int) -> Tensor:
    """One request: row i of the queries stands at place past + i of the L keys."""
    num_new, length = q_HTA.shape[1], k_GLA.shape[1]
    mask_TL = _in_sight(past, length, window, q_HTA.device) if num_new > 1 and past or 0 < window < length else None
    out = F.scaled_dot_product_attention(
        q_HTA[None], k_GLA[None], v_GLA[None], attn_mask=mask_TL, is_causal=mask_TL is None and num_new > 1,
        scale=scale, enable_gqa=q_HTA.shape[0] != k_GLA.shape[0])
    return out[0]


def _attend_damaged(q_HTA: Tensor, k_GLA: Tensor, v_GLA: Tensor, past: int, scale: float, window: int) -> Tensor:
    """`_attend` by its meaning where numbers may not be finite: torch's own loses NaN in a query, and spreads NaN in a
    value even to rows before it, whose keys and values would reach other requests through the prefix cache."""
    bad_T, bad_L = (~x.isfinite().all(-1).all(0) for x in (q_HTA, v_GLA))
    bad_T |= (_in_sight(past, k_GLA.shape[1], window, q_HTA.device) & bad_L).any(-1)
    q_HTA, k_GLA, v_GLA = (x.nan_to_num(0, 0, 0) for x in (q_HTA, k_GLA, v_GLA))
    return _attend(q_HTA, k_GLA, v_GLA, past, scale, window).masked_fill(bad_T[:, None], math.nan)


def _finite(x: Tensor) -> bool:
    """Whether all numbers are finite. No, too, where their sum overflows; in float16 that of ordinary ones would."""
    return math.isfinite(x.sum(dtype=torch.float32 if x.dtype == torch.float16 else x.dtype))


def _in_sight(past: int, length: int, window: int, device: torch.device) -> Tensor:
    """Which of `length` places each row from place `past` on sees: mask_TL."""
    place_T1 = torch.arange(past, length, device=device)[:, None]
    place_L = torch.arange(length, device=device)
    mask_TL = place_L <= place_T1
    if window:
        mask_TL &= place_L > place_T1 - window
    return mask_TL


# ---------------------------------------------------------------------------------------------------------------------
# Rotary frequencies, computed once at load


def rope_frequencies(theta: float, dim: int) -> Tensor:
    """theta^(-2i/dim) for i < dim/2, float64 (dim/2,)."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_ramp(theta: float, dim: int, context: int, beta_fast: float, beta_slow: float, truncate: bool) -> Tensor:
    """How far each frequency is interpolated, 0 (not) to 1 (fully), by how often it turns within the original context
    (Peng et al. 2023, section 3.2): float64 (dim/2,)."""
    low, high = (dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
                 for turns in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return ((torch.arange(dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)).clamp(0, 1)


def llama3_ramp(inv_freq: Tensor, context: int, low_freq_factor: float, high_freq_factor: float) -> Tensor:
    """How far each frequency is interpolated, 0 to 1, in Llama 3.1's rule: wavelengths beyond context / low fully,
    those under context / high not at all, between them smoothly."""
    turns = context * inv_freq / (2 * math.pi)
    return 1 - ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
