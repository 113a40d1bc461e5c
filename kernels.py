"""Every numeric operation of the forward pass, as a plain torch body.

These bodies are the reference: a native kernel will take the same name and signature and be tested against its body
here. Nothing in this file knows of requests, pages' owners or layers. The letters are model.py's dimension key.
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


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in at least float32 inside (Zhang and Sennrich 2019)."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(gate) * up, where the row holds gate, then up: act_TF."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


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
    """One layer's cached keys and values, and the group of page tables they are found by. The layout is the business
    of store_kv_ and attention alone."""

    k_PBGA: Tensor
    v_PBGA: Tensor
    group: int


def store_kv_(kv: KV, k_TGA: Tensor, v_TGA: Tensor, slot_T: Tensor) -> None:
    """Writes each token's keys and values into its slot (page id * page size + place in the page).

    Where a key is not finite, NaN is written as the value: softmax may lose such a key, but no sum loses the value.
    """
    k_TGA, v_TGA = k_TGA.to(kv.k_PBGA.dtype), v_TGA.to(kv.v_PBGA.dtype)
    if not _finite(k_TGA):
        v_TGA = v_TGA.masked_fill(~k_TGA.isfinite().all(-1, keepdim=True), math.nan)
    kv.k_PBGA.flatten(0, 1).index_copy_(0, slot_T, k_TGA)
    kv.v_PBGA.flatten(0, 1).index_copy_(0, slot_T, v_TGA)


def attention(q_THA: Tensor, kv: KV, batch, scale: float, window: int = 0) -> Tensor:
    """Causal attention of each request's new tokens over its pages: out_THA.

    The new tokens' keys and values must be stored already. `batch` is a model.Batch: request s owns rows starts_S1[s]
    to starts_S1[s+1], the last of its lengths_S[s] tokens. `window` > 0: a token sees itself and the window - 1 tokens
    before it. A row whose query, or any key or value that it sees, is not finite is NaN; the others are as without it.
    """
    out_THA = torch.empty_like(q_THA)

    def attend(function: Callable) -> None:
        for s, (start, end) in enumerate(pairwise(batch.starts_S1)):
            k_GLA, v_GLA, first = _cached(kv, batch, s, window, q_THA.dtype)
            past = batch.lengths_S[s] - (end - start) - first
            out_HTA = function(q_THA[start:end].transpose(0, 1), k_GLA, v_GLA, past, scale, window)
            out_THA[start:end] = out_HTA.transpose(0, 1)

    attend(_attend)
    if not (_finite(q_THA) and _finite(out_THA)):
        attend(_attend_damaged)
    return out_THA


def _cached(kv: KV, batch, s: int, window: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Keys and values of request s from the first page that its new tokens see, and the place where that begins."""
    length, page_size = batch.lengths_S[s], kv.k_PBGA.shape[1]
    past = length - (batch.starts_S1[s + 1] - batch.starts_S1[s])
    first_page = max(0, past + 1 - window) // page_size if window else 0
    first, page_M = first_page * page_size, batch.tables_SM[kv.group][s, first_page : -(-length // page_size)]
    k_GLA, v_GLA = (cached[page_M].flatten(0, 1)[: length - first].transpose(0, 1).to(dtype)
                    for cached in (kv.k_PBGA, kv.v_PBGA))
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
