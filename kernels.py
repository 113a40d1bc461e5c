"""Every numeric operation of the forward pass, as a plain torch body.

These bodies are the reference: native.py has the same names and signatures on compiled kernels and is tested against
them. A model is given one of the two. Nothing in this file knows of requests, pages' owners or layers. The letters are
model.py's dimension key.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(weight_VD: Tensor, token_T: Tensor) -> Tensor:
    """Rows of the embedding table: x_TD."""
    return F.embedding(token_T, weight_VD)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, num_exact: int | None = None) -> Tensor:
    """y_TO = x W^T + b. In bfloat16 this reaches torch's oneDNN matmul, which uses AMX where the CPU has it. Rows from
    `num_exact` on (None: none) are computed so whatever the type: `--prefill bfloat16`."""
    if num_exact is None or num_exact == len(x_TI):
        return F.linear(x_TI, weight_OI, bias_O)
    rounded_TO = F.linear(x_TI[num_exact:].bfloat16(), weight_OI.bfloat16()).to(x_TI.dtype)
    y_TO = torch.cat([F.linear(x_TI[:num_exact], weight_OI), rounded_TO])
    return y_TO if bias_O is None else y_TO + bias_O


def linear_add_(y_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None,
                num_exact: int | None = None) -> None:
    """y += x W^T + b."""
    y_TO += linear(x_TI, weight_OI, bias_O, num_exact)


def first_outputs(weight_OI: Tensor, num: int) -> Tensor:
    """The matrix of the first `num` outputs alone, a multiple of 16, on the same memory."""
    return weight_OI[:num]


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in at least float32 inside (Zhang and Sennrich 2019)."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(gate) * up, where the row holds gate, then up: act_TF."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def copy(x_TD: Tensor) -> Tensor:
    """The same rows in memory of their own."""
    return x_TD.clone()


def sent(x: Tensor, device: torch.device) -> Tensor:
    """The same numbers on a device, without waiting for what it does. They come from a copy in pinned memory, which
    torch gives to nobody else before they have arrived: the caller may change or drop its own at once."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def fetch(x: Tensor) -> Callable[[], Tensor]:
    """Starts to bring numbers to the host: called, the result waits for them and gives them there."""
    return x.cpu if x.device.type != "cpu" else lambda: x


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
    by. How numbers lie in a page is the business of the operations that made it alone; here it is (P, B, G, A), and in
    int8 a number is its cell times the scale (P, B, G) of its head."""

    k: Tensor
    v: Tensor
    page_size: int
    group: int
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def new_kv(num_pages: int, page_size: int, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype,
           device: str | torch.device, group: int) -> KV:
    """Memory for a layer's keys and values. What it holds is anything."""
    k_PBGA, v_PBGA = (torch.empty(num_pages, page_size, heads, dim, dtype=dtype, device=device)
                      for dim in (k_dim, v_dim))
    if dtype != torch.int8:
        return KV(k_PBGA, v_PBGA, page_size, group)
    k_scale_PBG, v_scale_PBG = (torch.empty(num_pages, page_size, heads, device=device) for _ in range(2))
    return KV(k_PBGA, v_PBGA, page_size, group, k_scale_PBG, v_scale_PBG)


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
    is_int8 = kv.k.dtype == torch.int8
    k_TGA, v_TGA = (x_TGA.to(torch.float32 if is_int8 else kv.k.dtype) for x_TGA in (k_TGA, v_TGA))
    if not _finite(k_TGA):
        v_TGA = v_TGA.masked_fill(~k_TGA.isfinite().all(-1, keepdim=True), math.nan)
    if is_int8:
        (k_TGA, k_scale_TG), (v_TGA, v_scale_TG) = _quantized(k_TGA), _quantized(v_TGA)
        kv.k_scale.flatten(0, 1).index_copy_(0, slot_T, k_scale_TG)
        kv.v_scale.flatten(0, 1).index_copy_(0, slot_T, v_scale_TG)
    kv.k.flatten(0, 1).index_copy_(0, slot_T, k_TGA)
    kv.v.flatten(0, 1).index_copy_(0, slot_T, v_TGA)


def move_kv_(kv: KV, from_T: Tensor, to_T: Tensor) -> None:
    """Copies the keys and values of slots `from_T` into slots `to_T`, all their bits. No slot may be written before it
    is read, should they be copied one after the other."""
    for memory in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        if memory is not None:
            slots = memory.flatten(0, 1)
            slots.index_copy_(0, to_T, slots.index_select(0, from_T))


def _quantized(x_TGA: Tensor) -> tuple[Tensor, Tensor]:
    """Cells in int8 and a float32 scale for each head: 127 cells are its greatest magnitude. Where a number is not
    finite the scale is NaN, and where it would be subnormal 0."""
    scale_TG = x_TGA.abs().amax(-1) / 127
    scale_TG = scale_TG.masked_fill(~scale_TG.isfinite(), math.nan)
    scale_TG = scale_TG.masked_fill(scale_TG < torch.finfo(torch.float32).tiny, 0)
    cell_TGA = (x_TGA / scale_TG[..., None]).round().nan_to_num(0, 0, 0)
    return cell_TGA.to(torch.int8), scale_TG


def attention(q_THA: Tensor, kv: KV, batch, scale: float, window: int = 0) -> Tensor:
    """Causal attention of each request's new tokens over its pages: out_THA.

    The new tokens' keys and values must be stored already. `batch` is a model.Batch: request s owns rows starts_S1[s]
    to starts_S1[s+1], the last of its lengths_S[s] tokens. `window` > 0: a token sees itself and the window - 1 tokens
    before it; in a tree (batch.ancestors_T) the tokens of its own path, as if they stood side by side. A row whose
    query, or any key or value that it sees, is not finite is NaN; the others are as without it.
    """
    out_THA = torch.empty_like(q_THA)
    lengths_S = batch.lengths_S.tolist()

    def attend(function: Callable) -> None:
        for s, (start, end) in enumerate(pairwise(batch.starts_S1.tolist())):
            page_M = batch.tables[kv.group][batch.lease_S[s]]
            tree_T = None if batch.ancestors_T is None else batch.ancestors_T[start:end]
            past = lengths_S[s] - (end - start)
            k_GLA, v_GLA, first = _cached(kv, page_M, past, lengths_S[s], window, q_THA.dtype)
            past -= first
            out_HTA = function(q_THA[start:end].transpose(0, 1), k_GLA, v_GLA, past, scale, window, tree_T)
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
    k_PBGA, v_PBGA = kv.k[seen_M], kv.v[seen_M]
    if kv.k_scale is not None:
        k_PBGA, v_PBGA = k_PBGA * kv.k_scale[seen_M, ..., None], v_PBGA * kv.v_scale[seen_M, ..., None]
    k_GLA, v_GLA = (seen_PBGA.flatten(0, 1)[: length - first].transpose(0, 1).to(dtype)
                    for seen_PBGA in (k_PBGA, v_PBGA))
    return k_GLA, v_GLA, first


def _attend(q_HTA: Tensor, k_GLA: Tensor, v_GLA: Tensor, past: int, scale: float, window: int,
            tree_T: Tensor | None) -> Tensor:
    """One request: the key of row i of the queries stands at place past + i of the L keys."""
    num_new, length = q_HTA.shape[1], k_GLA.shape[1]
    needs_mask = num_new > 1 and (past or tree_T is not None) or 0 < window < length
    mask_TL = _in_sight(past, length, window, tree_T, q_HTA.device) if needs_mask else None
    out = F.scaled_dot_product_attention(
        q_HTA[None], k_GLA[None], v_GLA[None], attn_mask=mask_TL, is_causal=mask_TL is None and num_new > 1,
        scale=scale, enable_gqa=q_HTA.shape[0] != k_GLA.shape[0])
    return out[0]


def _attend_damaged(q_HTA: Tensor, k_GLA: Tensor, v_GLA: Tensor, past: int, scale: float, window: int,
                    tree_T: Tensor | None) -> Tensor:
    """`_attend` by its meaning where numbers may not be finite: torch's own loses NaN in a query, and spreads NaN in a
    value even to rows before it, whose keys and values would reach other requests through the prefix cache."""
    bad_T, bad_L = (~x.isfinite().all(-1).all(0) for x in (q_HTA, v_GLA))
    bad_T |= (_in_sight(past, k_GLA.shape[1], window, tree_T, q_HTA.device) & bad_L).any(-1)
    q_HTA, k_GLA, v_GLA = (x.nan_to_num(0, 0, 0) for x in (q_HTA, k_GLA, v_GLA))
    return _attend(q_HTA, k_GLA, v_GLA, past, scale, window, tree_T).masked_fill(bad_T[:, None], math.nan)


def _finite(x: Tensor) -> bool:
    """Whether all numbers are finite. No, too, where their sum overflows; in float16 that of ordinary ones would."""
    return math.isfinite(x.sum(dtype=torch.float32 if x.dtype == torch.float16 else x.dtype))


def _in_sight(past: int, length: int, window: int, tree_T: Tensor | None, device: torch.device) -> Tensor:
    """Which of `length` places each row from place `past` on sees: mask_TL. Those of a tree's rows hold its new tokens;
    the window is measured by where these stand in the text of their own path."""
    place_L = torch.arange(length, device=device)
    mask_TL = place_L <= place_L[past:, None]
    if tree_T is not None:
        num_bits = min(len(tree_T), 64)
        sees_TT = tree_T[:, None] >> torch.arange(num_bits, device=device) & 1 == 1
        mask_TL[:, past : past + num_bits] &= sees_TT
        place_L[past:] = mask_TL.sum(1) - 1
    if window:
        mask_TL &= place_L > place_L[past:, None] - window
    return mask_TL


# ---------------------------------------------------------------------------------------------------------------------
# The draw. In float64, and in operations that IEEE 754 fixes to the bit or in whole numbers: neither the order of sums
# nor a library's logarithm has a say, so compiled kernels and other machines draw the same tokens.


@dataclass(frozen=True, eq=False)
class DrawRules:
    """How a token is drawn from a row of logits. The defaults do nothing. Tensors may change between draws."""

    vocab: int  # ids from here on are never drawn: a head may be wider than the tokenizer
    temperature: float = 0.0  # 0: the greatest logit, the lowest id on ties
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seen_V: Tensor | None = None  # bool: whom the repetition penalty is for
    count_V: Tensor | None = None  # float64: occurrences that the other two count
    bias_ids: Tensor | None = None  # int64
    biases: Tensor | None = None  # float64, added to the logits of these ids; -inf bans one

    @property
    def leave_logits_alone(self) -> bool:
        return self.seen_V is None and self.count_V is None and self.bias_ids is None


def draw(x_LV: Tensor, rules: Sequence[DrawRules], keys: Sequence[int]) -> Tensor:
    """A token for each row of logits, by its rules and the noise of its key (64 bits): id_L int64; -1 for a row with a
    number that is not finite, or of which nothing finite is left to draw from."""
    x_LV = x_LV.cpu()
    drawn = [_draw_row(*row) for row in zip(x_LV, argmax(x_LV).tolist(), rules, keys, strict=True)]
    return torch.tensor(drawn, dtype=torch.int64)


def distribution(x_LV: Tensor, rules: Sequence[DrawRules]) -> Tensor:
    """What `draw` draws from, row by row: p_LV float64; a row of zeros where `draw` has nothing to draw from."""
    x_LV = x_LV.cpu()
    p_LV = torch.zeros(x_LV.shape, dtype=torch.float64)
    for p_V, x_V, best, row_rules in zip(p_LV, x_LV, argmax(x_LV).tolist(), rules, strict=True):
        if best >= 0:
            id_C, scaled_C = _weighed(x_V, row_rules)
            p_V[id_C] = torch.softmax(scaled_C, 0)
    return p_LV


def _draw_row(x_V: Tensor, best: int, rules: DrawRules, key: int) -> int:
    """Gumbel-max: the argmax of logits plus Gumbel noise is a draw from their softmax. `best`: the row's argmax."""
    is_plain_argmax = rules.temperature == 0 and rules.leave_logits_alone and best < rules.vocab
    if best < 0 or is_plain_argmax:
        return best
    id_C, scaled_C = _weighed(x_V, rules)
    if len(id_C) < 2:
        return int(id_C) if len(id_C) else -1
    return int(id_C[(scaled_C + gumbel(key, id_C)).argmax()])


def _weighed(x_V: Tensor, rules: DrawRules) -> tuple[Tensor, Tensor]:
    """The ids to draw from, ascending, and the numbers whose softmax are their probabilities: none where no logit is
    finite, and at temperature 0 one."""
    x_V = adjusted(x_V, rules)
    top = x_V.max()
    if not top.isfinite():
        return torch.empty(0, dtype=torch.int64), x_V[:0]
    if rules.temperature == 0:
        return x_V.argmax()[None], top[None]
    # The largest becomes 0 before the division: a tiny temperature then sends the others to -inf, never to +inf.
    scaled_V = (x_V - top) / rules.temperature
    id_C = candidates(scaled_V, rules)
    return id_C, scaled_V[id_C]


def adjusted(x_V: Tensor, rules: DrawRules) -> Tensor:
    """Logits after penalties and biases, float64 (vocab,)."""
    x_V = x_V[: rules.vocab].double()
    if rules.seen_V is not None:
        penalty = rules.repetition_penalty
        x_V = torch.where(rules.seen_V, torch.where(x_V > 0, x_V / penalty, x_V * penalty), x_V)
    if rules.count_V is not None:
        x_V = x_V - rules.frequency_penalty * rules.count_V - rules.presence_penalty * (rules.count_V > 0).double()
    if rules.bias_ids is not None:
        x_V = x_V.index_add(0, rules.bias_ids, rules.biases)
    return x_V


def candidates(scaled_V: Tensor, rules: DrawRules) -> Tensor:
    """Ids (C,), ascending, that min-p, then top-k, then top-p (of what is left, renormalised) leave to draw from.

    In the order (logit descending, id ascending) each of the three keeps a prefix, so the set is well defined on ties.
    `scaled_V` are logits after temperature, the greatest of them 0.
    """
    num_kept = vocab = len(scaled_V)
    if rules.min_p > 0:
        num_kept = int((scaled_V >= math.log(rules.min_p)).sum())
    if rules.top_k > 0:
        num_kept = min(num_kept, rules.top_k)
    if rules.top_p == 1:
        return largest(scaled_V, num_kept)[0].sort().values if num_kept < vocab else torch.arange(vocab)
    total = int(shares(largest(scaled_V, num_kept)[1] if num_kept < vocab else scaled_V).sum())
    needed = max(1, min(total, int(rules.top_p * total)))
    num_best = min(num_kept, 256)
    while True:  # the nucleus is usually small: sort a few, more only where they do not suffice
        id_C, best_C = largest(scaled_V, num_best)
        mass_C = shares(best_C).cumsum(0)
        if mass_C[-1] >= needed:
            return id_C[: int((mass_C < needed).sum()) + 1].sort().values
        num_best = min(num_kept, num_best * 8)


def largest(x_V: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest of `x_V`, largest first, the lower id first on ties: (ids, values)."""
    smallest = x_V.topk(num, sorted=False).values.min()
    id_C = (x_V >= smallest).nonzero().flatten()  # topk alone would choose freely among equals at the border
    value_C, order_C = x_V[id_C].sort(descending=True, stable=True)
    return id_C[order_C[:num]], value_C[:num]


# splitmix64's finalizer (Steele, Lea and Flood 2014) over a key and a counter.
GOLDEN = 0x9E3779B97F4A7C15
MIX_A, MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gumbel(key: int, id_C: Tensor) -> Tensor:
    """Gumbel(0, 1) noise (C,) float64 for the token ids `id_C` (C,) int64: each value depends on its own id and the
    key, and on nothing else."""
    # int64 products wrap as in C; the shifts are made logical by masking off the copied sign.
    z_C = (id_C * _signed(GOLDEN)).add_(_signed(key))
    z_C.bitwise_xor_((z_C >> 30).bitwise_and_(2**34 - 1)).mul_(_signed(MIX_A))
    z_C.bitwise_xor_((z_C >> 27).bitwise_and_(2**37 - 1)).mul_(_signed(MIX_B))
    z_C.bitwise_xor_((z_C >> 31).bitwise_and_(2**33 - 1))
    uniform_C = (((z_C >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52  # in (0, 1), both ends excluded
    return -log(-log(uniform_C))


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z


# ln 2 as a sum whose first part is short: its product with a small whole number is exact.
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62E42FEFA3800p-1"), float.fromhex("0x1.EF35793C76730p-45")
SHARE_BITS = 40
ROOT_HALF_BITS = 0x3FE6A09E667F3BCD  # of sqrt(1/2) as a float64


def log(x_C: Tensor) -> Tensor:
    """ln x of positive normal numbers, float64, within two units in the last place: x = 2^n (1 + f) where
    1/2 <= (1 + f)^2 < 2, and ln(1 + f) = 2 artanh(f / (2 + f)), of which ten terms."""
    bits_C = x_C.view(torch.int64)
    n_C = (bits_C - ROOT_HALF_BITS) >> 52
    f_C = (bits_C - (n_C << 52)).view(torch.float64) - 1
    s_C = f_C / (f_C + 2)
    square_C, n_C = s_C * s_C, n_C.double()
    series_C = torch.zeros_like(s_C)
    for k in reversed(range(10)):
        series_C.mul_(square_C).add_(2 / (2 * k + 1))
    return n_C * LN2_HIGH + (n_C * LN2_LOW + s_C * series_C)


def shares(x_C: Tensor) -> Tensor:
    """e^x for x <= 0 in units of 2^-40, rounded: int64, whose sums are the same in any order. e^x = 2^n e^r, where
    |r| <= ln(2) / 2 and e^r is a series of twelve terms."""
    x_C = x_C.clamp(min=-40)  # e^-40 rounds to 0
    n_C = (x_C * (1 / math.log(2))).round()
    r_C = x_C - n_C * LN2_HIGH - n_C * LN2_LOW
    terms = [1 / math.factorial(k) for k in range(12)]
    for _ in range(2):  # pairs, then pairs of pairs (Estrin 1960): far fewer operations that wait for each other
        terms = [(r_C * odd).add_(even) for even, odd in zip(terms[::2], terms[1::2])]
        r_C = r_C * r_C
    series_C = terms[0] + (terms[1] + terms[2] * r_C) * r_C
    power_C = (n_C.long() + (1023 + SHARE_BITS) << 52).view(torch.float64)
    return (series_C * power_C).round().long()


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
