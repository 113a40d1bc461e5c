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
from array import array
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, chain

import torch
from torch import Tensor

import kernels
from checkpoint import Checkpoint
from families import ModelConfig, RopeConfig
from kernels import KV
from kvcache import Cache, KVSpec
from weights import Weights


class Batch:
    """One step's tokens. Request s owns rows starts_S1[s] to starts_S1[s+1], the last of its lengths_S[s] tokens.

    For each group of the cache `slots_T` says where each token's keys and values go, and `tables` holds the page tables
    of all leases; that of request s is row lease_S[s]. `row_L` are the rows whose logits are wanted. Rows from
    `num_exact` on (None: none) multiply in bfloat16. starts_S1, lengths_S and lease_S are read by the host.

    `ancestors_T` (None: no trees) has bit j set where a row sees its request's j-th new token, itself included: those
    of a request, 64 at most, may form a tree of drafts, parents before children. Others see all before them: all bits.
    `taps` are layers whose input is wanted.

    All numbers lie side by side, so many (`sizes`) of each: token_T, position_T, lease_S, starts_S1, lengths_S, slots_T
    of each group, ancestors_T if there are trees, row_L. Tensors are made of them when somebody asks: who repeats a
    recorded step copies numbers.
    """

    def __init__(self, numbers: array | Tensor, sizes: Sequence[int], tables: tuple[Tensor, ...],
                 num_exact: int | None = None, taps: tuple[int, ...] = ()):
        self.numbers, self.sizes, self.tables, self.num_exact, self.taps = numbers, sizes, tables, num_exact, taps
        self.num_tokens, self.num_requests, self.num_rows = sizes[0], sizes[2], sizes[-1]
        self.has_trees = len(sizes) > 6 + len(tables)

    @staticmethod
    def pack(cache: Cache, leases: Sequence[int], tokens: Sequence[Sequence[int]], pasts: Sequence[int],
             row_L: Sequence[int], num_exact: int | None = None, taps: tuple[int, ...] = (),
             parents: Sequence[Sequence[int] | None] = (), size: tuple[int, int] | None = None) -> "Batch":
        """Request s computes `tokens[s]` after `pasts[s]` tokens; its page tables are in row `leases[s]`. If its tokens
        are a tree, parents[s][j] is the one that its token j + 1 follows; else it is None.

        It is filled up to `size`, so many requests and tokens, with requests that count for nothing: of length 0, with
        a token each, and what is left of the tokens the last. Those have slot -1, "none"."""
        ends = [past + len(new) for past, new in zip(pasts, tokens)]
        ids = list(chain.from_iterable(tokens))
        positions = [place for past, end in zip(pasts, ends) for place in range(past, end)]
        slots = [[slot for lease, past, end in zip(leases, pasts, ends) for slot in group.slots(lease, past, end)]
                 for group in cache.groups]
        starts = list(accumulate(map(len, tokens), initial=0))
        ancestors: list[list[int]] = []
        if any(of is not None for of in parents):
            ancestors = [[-1] * len(ids)]
            for start, past, of in zip(starts, pasts, parents):
                if of is not None:
                    depths, masks = tree_rows(of)
                    positions[start : start + len(depths)] = [past + depth for depth in depths]
                    ancestors[0][start : start + len(masks)] = masks
        if size is not None and size != (len(leases), len(ids)):
            more_requests, more_tokens = size[0] - len(leases), size[1] - len(ids)
            assert 0 < more_requests <= more_tokens
            starts += [*range(len(ids) + 1, len(ids) + more_requests), size[1]]
            leases, ends = [*leases, *[0] * more_requests], [*ends, *[0] * more_requests]
            for number_T, number in ((ids, 0), (positions, 0), *((of_group, -1) for of_group in (*slots, *ancestors))):
                number_T += [number] * more_tokens
        parts = ids, positions, leases, starts, ends, *slots, *ancestors, row_L
        batch = Batch(array("q", chain.from_iterable(parts)), list(map(len, parts)),
                      tuple(group.table for group in cache.groups), num_exact, taps)
        return batch if cache.device.type == "cpu" else batch.to(cache.device, max(map(cache.pages_for, ends)))

    @cached_property
    def _tensors(self) -> tuple[Tensor, ...]:
        is_here = isinstance(self.numbers, array)
        number_N = torch.frombuffer(self.numbers, dtype=torch.int64) if is_here else self.numbers
        return torch.split_with_sizes(number_N, self.sizes)

    token_T = property(lambda self: self._tensors[0])
    position_T = property(lambda self: self._tensors[1])
    lease_S = property(lambda self: self._tensors[2])
    starts_S1 = property(lambda self: self._tensors[3])
    lengths_S = property(lambda self: self._tensors[4])
    slots_T = property(lambda self: self._tensors[5 : 5 + len(self.tables)])
    ancestors_T = property(lambda self: self._tensors[-2] if self.has_trees else None)
    row_L = property(lambda self: self._tensors[-1])

    def to(self, device: torch.device, most_pages: int) -> "Batch":
        """The same on a device, in one copy and one for each group's tables: of these only the rows of its requests,
        as far as somebody has pages."""
        tables, first = [], self.sizes[0] + self.sizes[1]
        for table in self.tables:
            tables.append(torch.zeros(self.num_requests, table.shape[1], dtype=table.dtype, device=device))
            tables[-1][:, :most_pages] = kernels.sent(table[self.lease_S, :most_pages], device)
        numbers = self.numbers[:]
        numbers[first : first + self.num_requests] = array("q", range(self.num_requests))
        number_N = kernels.sent(torch.frombuffer(numbers, dtype=torch.int64), device)
        return Batch(number_N, self.sizes, tuple(tables), self.num_exact, self.taps)

    def copy_(self, other: "Batch") -> None:
        """Makes this batch the other one, which has as many tokens and requests: all but `row_L`, which no layer
        reads."""
        num = sum(self.sizes[:-1])
        if isinstance(self.numbers, array):
            self.numbers[:num] = other.numbers[:num]
        else:
            self.numbers[:num].copy_(other.numbers[:num])
        for ours, theirs in zip(self.tables, other.tables, strict=True):
            if ours is not theirs:  # on a CPU all batches share the cache's own tables
                ours.copy_(theirs)


MOST_ROWS = 64  # of a tree: as many as a mask has bits


def tree_rows(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """How deep each row of a tree lies, and its bits of Batch.ancestors_T, signed. Row 0 is the root; row j + 1 follows
    row parents[j] <= j."""
    assert len(parents) < MOST_ROWS and all(0 <= parent <= j for j, parent in enumerate(parents))
    depths, masks = [0], [1]
    for row, parent in enumerate(parents, 1):
        depths.append(depths[parent] + 1)
        masks.append(masks[parent] | 1 << row)
    return depths, [mask - (mask >> 63 << 64) for mask in masks]


def id_tensor(numbers: Iterable[int]) -> Tensor:
    """Whole numbers as int64."""
    numbers = array("q", numbers)  # five times faster than torch.tensor
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


class Linear:
    """A matmul's weights; several of the checkpoint's tensors side by side where they read the same input.

    The config says whether there is a `bias`: what else a file holds is not the model's.
    """

    def __init__(self, ops, weights: Weights, *names: str, bias: bool = False):
        self.ops = ops
        self.weight = weights.matrix(*(f"{name}.weight" for name in names))
        self.bias_O = torch.cat([weights.take(f"{name}.bias") for name in names]) if bias else None
        self.num_weights = sum(math.prod(weights.info(f"{name}.weight").shape) for name in names)

    def first(self, num: int) -> "Linear":
        """Its first `num` outputs alone, a multiple of 16; for a matrix without bias."""
        part = copy(self)
        part.weight = self.ops.first_outputs(self.weight, num)
        return part

    def __call__(self, x_TI: Tensor, num_exact: int | None = None) -> Tensor:
        return self.ops.linear(x_TI, self.weight, self.bias_O, num_exact)

    def add_(self, y_TO: Tensor, x_TI: Tensor, num_exact: int | None = None) -> None:
        """Adds the product to y."""
        self.ops.linear_add_(y_TO, x_TI, self.weight, self.bias_O, num_exact)


class Attention:
    """One layer's attention, without the norm before it."""

    def __init__(self, ops, weights: Weights, config: ModelConfig, window: int, name: str):
        self.ops, self.head_dim, self.window = ops, config.head_dim, window
        self.qkv = Linear(ops, weights, f"{name}.attn_q", f"{name}.attn_k", f"{name}.attn_v", bias=config.qkv_bias)
        self.output = Linear(ops, weights, f"{name}.attn_output", bias=config.o_bias)

    def add_(self, h_TD: Tensor, x_TI: Tensor, batch: Batch, kv: KV, angles: tuple[Tensor, Tensor]) -> None:
        """Stores the keys and values of x and adds to h what its queries find."""
        qkv_TX = self.qkv(x_TI, batch.num_exact)
        q_THA = self.ops.rope_store_(kv, qkv_TX, angles, batch.slots_T[kv.group], self.head_dim)
        out_THA = self.ops.attention(q_THA, kv, batch, self.head_dim**-0.5, self.window)
        self.output.add_(h_TD, out_THA.flatten(1), batch.num_exact)


class FeedForward:
    """One layer's gated network, with the norm before it."""

    def __init__(self, ops, weights: Weights, config: ModelConfig, name: str):
        self.ops, self.eps = ops, config.norm_eps
        self.norm_D = weights.take(f"{name}.ffn_norm.weight")
        self.gate_up = Linear(ops, weights, f"{name}.ffn_gate", f"{name}.ffn_up", bias=config.mlp_bias)
        self.down = Linear(ops, weights, f"{name}.ffn_down", bias=config.mlp_bias)

    def add_(self, h_TD: Tensor, num_exact: int | None = None) -> None:
        gate_up_T2F = self.gate_up(self.ops.rms_norm(h_TD, self.norm_D, self.eps), num_exact)
        self.down.add_(h_TD, self.ops.silu_mul(gate_up_T2F), num_exact)


class Layer:
    """One decoder layer: attention, then the feed-forward network, each on a normalised input and added back."""

    def __init__(self, ops, weights: Weights, config: ModelConfig, window: int, name: str):
        self.ops, self.eps = ops, config.norm_eps
        self.norm_D = weights.take(f"{name}.attn_norm.weight")
        self.attention = Attention(ops, weights, config, window, name)
        self.ffn = FeedForward(ops, weights, config, name)

    def forward_(self, h_TD: Tensor, batch: Batch, kv: KV, angles: tuple[Tensor, Tensor]) -> None:
        self.attention.add_(h_TD, self.ops.rms_norm(h_TD, self.norm_D, self.eps), batch, kv, angles)
        self.ffn.add_(h_TD, batch.num_exact)


class Model:
    """A decoder for one context length: rope factors that depend on the length are settled when it is made.

    `ops` are the operations it computes with: kernels, or a native.Native.
    """

    def __init__(self, config: ModelConfig, weights: Weights, context: int, ops=kernels):
        shapes = tensor_shapes(config)
        if has_divisors := weights.has("rope_freqs.weight"):  # a GGUF states Llama 3.1's rule so
            shapes["rope_freqs.weight"] = (config.rope.dim // 2,)
        weights.require(shapes)
        self.config, self.context, self.ops = config, context, ops
        self.dtype, self.device = weights.dtype, torch.device(weights.device)  # of activations
        self.matrix_dtype = weights.matrix_dtype  # None: quantized
        self.cache_dtype = self.matrix_dtype or torch.bfloat16  # the default
        self.token_embd = Linear(ops, weights, "token_embd")
        self.layers = [Layer(ops, weights, config, layer.window, f"blk.{i}") for i, layer in enumerate(config.layers)]
        self.output_norm_D = weights.take("output_norm.weight")
        self.output = self.token_embd if config.tied else Linear(ops, weights, "output")
        inv_freq, self.rope_scale = rope_tables(config.rope, config.context, context)
        self.inv_freq = inv_freq.to(self.device)
        if has_divisors:
            self.inv_freq = self.inv_freq / weights.take("rope_freqs.weight").double()
        self.notes = weights.notes  # what the user should know of the file's tensors

    def kv_specs(self) -> list[KVSpec]:
        """What each layer keeps of a token."""
        return kv_specs(self.config)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: Cache) -> tuple[Tensor, list[Tensor]]:
        """Runs the step's tokens through all layers, storing their keys and values: normalised hidden rows h_TD, and
        the rows that entered each of the layers `batch.taps`."""
        h_TD = self.embed(batch)
        angles = self.angles(batch)
        taps = []
        for i, (layer, kv) in enumerate(zip(self.layers, cache.layers)):
            if i in batch.taps:
                taps.append(self.ops.copy(h_TD))
            layer.forward_(h_TD, batch, kv, angles)
        return self.ops.rms_norm(h_TD, self.output_norm_D, self.config.norm_eps), taps

    def embed(self, batch: Batch) -> Tensor:
        """The tokens' rows of the embedding: x_TD."""
        return self.ops.embed(self.token_embd.weight, batch.token_T)

    def angles(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cosines and sines by which rope turns at the tokens' positions."""
        return self.ops.rope_angles(batch.position_T, self.inv_freq, self.rope_scale, self.dtype)

    @torch.inference_mode()
    def move_(self, cache: Cache, from_T: Sequence[Tensor], to_T: Sequence[Tensor]) -> None:
        """Moves keys and values of all layers between slots; of each group of the cache its own."""
        for kv in cache.layers:
            self.ops.move_kv_(kv, from_T[kv.group], to_T[kv.group])

    def logits(self, h_LD: Tensor) -> Tensor:
        """Scores of the next token for hidden rows: logits_LV, in at least float32."""
        return wide(self.output(h_LD))


def kv_specs(config: ModelConfig) -> list[KVSpec]:
    return [KVSpec(config.kv_heads, config.head_dim, config.head_dim, layer.window) for layer in config.layers]


def wide(x_LV: Tensor) -> Tensor:
    """The same numbers in at least float32."""
    return x_LV if x_LV.dtype in (torch.float32, torch.float64) else x_LV.float()


def load_model(checkpoint: Checkpoint, dtype: torch.dtype | None, device: str | torch.device | None = None,
               context: int | None = None, ops=kernels) -> Model:
    """The checkpoint's model, its weights dequantized to `dtype`; for native operations None means as they are stored.
    `device` by default is the operations' own, or the CPU. `context` (None: the trained one) is the longest sequence
    it will see; ValueError if no rope scaling of the model covers it."""
    config = checkpoint.config
    context = config.context if context is None else context
    if not 1 <= context <= config.max_context:
        raise ValueError(
            f"context is {context} but the model covers 1 to {config.max_context} tokens: change --context")
    device = getattr(ops, "device", "cpu") if device is None else device
    return Model(config, Weights(checkpoint, dtype, device, getattr(ops, "pack", None)), context, ops)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model needs, by canonical name, with its shape."""
    shapes = {"token_embd.weight": (config.vocab, config.hidden), "output_norm.weight": (config.hidden,)}
    if not config.tied:
        shapes["output.weight"] = (config.vocab, config.hidden)
    for i in range(len(config.layers)):
        shapes |= layer_shapes(config, f"blk.{i}")
    return shapes


def layer_shapes(config: ModelConfig, name: str, attention_width: int | None = None) -> dict[str, tuple[int, ...]]:
    """Those of one layer, whose attention reads rows of `attention_width` (None: as wide as the model)."""
    D, F, A = config.hidden, config.ffn, config.head_dim
    X, q_width, kv_width = attention_width or D, config.heads * A, config.kv_heads * A
    shapes = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,),
              "attn_q.weight": (q_width, X), "attn_k.weight": (kv_width, X), "attn_v.weight": (kv_width, X),
              "attn_output.weight": (D, q_width),
              "ffn_gate.weight": (F, D), "ffn_up.weight": (F, D), "ffn_down.weight": (D, F)}
    if config.qkv_bias:
        shapes |= {"attn_q.bias": (q_width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
    if config.o_bias:
        shapes |= {"attn_output.bias": (D,)}
    if config.mlp_bias:
        shapes |= {"ffn_gate.bias": (F,), "ffn_up.bias": (F,), "ffn_down.bias": (D,)}
    return {f"{name}.{part}": shape for part, shape in shapes.items()}


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
