"""Block formats of stored weights, and the exact numbers they stand for.

Owns the table FORMATS (name, id in GGUF files, weights a block, bytes a block, how to read them). Knows nothing of
files, tensor names or models, and imports torch only once there are bytes to turn into numbers. Start at `dequantize`.

Each function does the floating-point operations of ggml's reference in the same order, so that results agree bit for
bit: `(d * scale) * q - (dmin * min)`, never a fused multiply-add, never another association. Fields are little-endian;
their layouts are the structs `block_q4_0` and so on of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
Dimension letters, here only: `N` blocks, `B` weights a block, `J` sub-blocks with a scale of their own.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from torch import Tensor, dtype as DType

PIECE_WEIGHTS = 1 << 18   # weights read at a time by one thread: 1 MB of float32, about what an L2 cache holds


@dataclass(frozen=True)
class Format:
    """One way to store weights: `nbytes` bytes hold `block` of them.

    `dequantize` maps uint8 (N, nbytes) to floating (N, block): float32, or for plain types the stored type itself.
    `ggml_id` is None where GGUF has no such type; `block` and `nbytes` are None where each file chooses its group.
    """
    name: str
    ggml_id: int | None
    block: int | None
    nbytes: int | None
    dequantize: Callable[[Tensor], Tensor]


def dequantize(raw: Tensor, format: str, shape: tuple[int, ...], dtype: DType) -> Tensor:
    """The tensor of `shape` and floating `dtype` that `raw` (uint8, 1-D, the right number of bytes) holds in `format`.

    Values are the format's exact ones, rounded once to dtype; float64 holds them unchanged. Big tensors are read in
    pieces, so that beside the result only a few megabytes are allocated and every pass but the last stays in cache.
    """
    import torch
    row = FORMATS[format]
    out = torch.empty(shape, dtype=dtype)
    raw_NB = raw.view(-1, row.nbytes) if row.nbytes else group_rows(raw, out.numel())
    out_NB = out.view(len(raw_NB), -1)
    num_blocks = max(1, PIECE_WEIGHTS // out_NB.shape[1])

    def read(start: int) -> None:
        piece = slice(start, start + num_blocks)
        out_NB[piece] = row.dequantize(raw_NB[piece])

    each_piece(read, range(0, len(raw_NB), num_blocks))
    return out


def each_piece(read: Callable[[int], None], starts: range) -> None:
    """Calls `read` for every start, from as many threads as torch may use, each taking every so-manyth piece.

    Torch would share out each of the dozen operations on a piece instead and wait for the slowest core after every one:
    where other programs want the cores too, that made loading fifty times slower.
    """
    import torch
    from concurrent.futures import ThreadPoolExecutor
    num_threads = torch.get_num_threads()
    num_workers = min(num_threads, len(starts))

    @torch.inference_mode()
    def work(first: int) -> None:
        torch.set_num_threads(1)    # for operations that this thread starts
        for start in starts[first::num_workers]:
            read(start)

    try:
        if num_workers == 1:
            return work(0)
        with ThreadPoolExecutor(num_workers) as pool:
            list(pool.map(work, range(num_workers)))
    finally:
        torch.set_num_threads(num_threads)      # of this thread, and the default of threads to come


def group_rows(raw: Tensor, num_weights: int) -> Tensor:
    """llama2.c keeps all int8 values first and then a float32 scale for each group: one row (B + 4 bytes) a group."""
    import torch
    num_groups = (len(raw) - num_weights) // 4
    values, scales = raw.split((num_weights, 4 * num_groups))
    return torch.cat((values.view(num_groups, -1), scales.view(num_groups, 4)), 1)


# Fields of a block -----------------------------------------------------------------------------------------------

def half(raw_N2: Tensor) -> Tensor:
    """A float16 field as float32 (N, 1)."""
    import torch
    return raw_N2.view(torch.float16).float()


def signed(raw_NB: Tensor) -> Tensor:
    """A field of int8 as float32, same shape."""
    import torch
    return raw_NB.view(torch.int8).float()


def fields(raw: Tensor, width: int) -> Tensor:
    """The `width`-bit fields of each byte, lowest first, in a new dimension: (..., b) -> (..., 8 / width, b)."""
    import torch
    raw, mask = raw.contiguous(), (1 << width) - 1
    return torch.stack([raw >> shift & mask for shift in range(0, 8, width)], -2)


def bits(raw_N4: Tensor) -> Tensor:
    """A field of 32 bits, lowest first: (N, 4) -> (N, 32). A table spreads each byte over the 8 bytes of an int64."""
    import torch
    spread = (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1).to(torch.uint8).view(torch.int64).flatten()
    return spread.index_select(0, raw_N4.flatten().int()).view(torch.uint8).view(-1, 32)


# Blocks of 32 weights, one scale: byte i holds weights i (low nibble) and i + 16 -----------------------------------

def dequantize_q4_0(raw: Tensor) -> Tensor:
    d, q = raw.split((2, 16), 1)
    return fields(q, 4).flatten(1).float().sub_(8).mul_(half(d))


def dequantize_q4_1(raw: Tensor) -> Tensor:
    d, m, q = raw.split((2, 2, 16), 1)
    return fields(q, 4).flatten(1).float().mul_(half(d)).add_(half(m))


def dequantize_q5_0(raw: Tensor) -> Tensor:
    d, high, low = raw.split((2, 4, 16), 1)
    q_NB = fields(low, 4).flatten(1) | bits(high) << 4
    return q_NB.float().sub_(16).mul_(half(d))


def dequantize_q5_1(raw: Tensor) -> Tensor:
    d, m, high, low = raw.split((2, 2, 4, 16), 1)
    q_NB = fields(low, 4).flatten(1) | bits(high) << 4
    return q_NB.float().mul_(half(d)).add_(half(m))


def dequantize_q8_0(raw: Tensor) -> Tensor:
    d, q = raw.split((2, 32), 1)
    return signed(q).mul_(half(d))


def quantize_q8_0(x_OI: Tensor) -> Tensor:
    """A float32 matrix in q8_0, as uint8 (O, bytes): in each block 127 steps are the greatest magnitude."""
    import torch
    x_NB = x_OI.reshape(-1, 32)
    d_N1 = (x_NB.abs().amax(1, keepdim=True) / 127).half()
    q_NB = (x_NB / d_N1.float()).nan_to_num(0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((d_N1.view(torch.uint8), q_NB.view(torch.uint8)), 1).view(len(x_OI), -1)


def dequantize_q8_llama2c(raw: Tensor) -> Tensor:
    import torch
    q, d = raw.split((raw.shape[1] - 4, 4), 1)
    return signed(q).mul_(d.contiguous().view(torch.float32))


# K-quants: blocks of 256 weights in 16 sub-blocks of 16, or 8 of 32, whose own small scales are quantized too --------

def dequantize_q2_k(raw: Tensor) -> Tensor:
    scales, q, d, dmin = raw.split((16, 64, 2, 2), 1)
    scale_NJ, min_NJ = half(d) * (scales & 15).float(), half(dmin) * (scales >> 4).float()
    q_NJB = fields(q.unflatten(1, (2, 32)), 2).view(-1, 16, 16)
    return scaled(q_NJB.float(), scale_NJ, min_NJ)


def dequantize_q3_k(raw: Tensor) -> Tensor:
    high, low, scales, d = raw.split((32, 64, 12, 2), 1)
    low_scales, high_scales = scales.split((8, 4), 1)
    scale_NJ = fields(low_scales, 4).flatten(1) | fields(high_scales, 2).flatten(1) << 4
    q_NJB = (fields(low.unflatten(1, (2, 32)), 2).flatten(1) | fields(high, 1).flatten(1) << 2).view(-1, 16, 16)
    return scaled(q_NJB.float().sub_(4), half(d) * scale_NJ.float().sub_(32))


def dequantize_q4_k(raw: Tensor) -> Tensor:
    d, dmin, packed, q = raw.split((2, 2, 12, 128), 1)
    scale_NJ, min_NJ = scales_and_mins(packed)
    q_NJB = fields(q.unflatten(1, (4, 32)), 4).view(-1, 8, 32)
    return scaled(q_NJB.float(), half(d) * scale_NJ, half(dmin) * min_NJ)


def dequantize_q5_k(raw: Tensor) -> Tensor:
    d, dmin, packed, high, low = raw.split((2, 2, 12, 32, 128), 1)
    scale_NJ, min_NJ = scales_and_mins(packed)
    q_NJB = fields(low.unflatten(1, (4, 32)), 4).view(-1, 8, 32) | fields(high, 1) << 4
    return scaled(q_NJB.float(), half(d) * scale_NJ, half(dmin) * min_NJ)


def dequantize_q6_k(raw: Tensor) -> Tensor:
    low, high, scales, d = raw.split((128, 64, 16, 2), 1)
    q_NB = fields(low.unflatten(1, (2, 64)), 4).flatten(1) | fields(high.unflatten(1, (2, 32)), 2).flatten(1) << 4
    return scaled(q_NB.view(-1, 16, 16).float().sub_(32), half(d) * signed(scales))


def scales_and_mins(packed_N12: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minima as float32 (N, 8) each.

    The first four of each are the low 6 bits of bytes 0 to 3 and 4 to 7; of the last four, the low 4 bits are nibbles
    of bytes 8 to 11 and the high 2 bits are what the first eight bytes have left.
    """
    import torch
    scale, low, rest = packed_N12.split(4, 1)
    scales = torch.cat((scale & 63, rest & 15 | scale >> 2 & 48), 1)
    mins = torch.cat((low & 63, rest >> 4 | low >> 2 & 48), 1)
    return scales.float(), mins.float()


def scaled(q_NJB: Tensor, scale_NJ: Tensor, min_NJ: Tensor | None = None) -> Tensor:
    """q * scale - min in q's memory, flattened to (N, 256)."""
    q_NJB.mul_(scale_NJ.unsqueeze(2))
    if min_NJ is not None:
        q_NJB.sub_(min_NJ.unsqueeze(2))
    return q_NJB.flatten(1)


# The table ---------------------------------------------------------------------------------------------------------

def stored(dtype_name: str) -> Callable[[Tensor], Tensor]:
    """A reader of plain numbers: the same bytes, seen as `dtype_name`."""
    def view(raw: Tensor) -> Tensor:
        import torch
        return raw.view(getattr(torch, dtype_name))
    return view


FORMATS = {row.name: row for row in (
    Format("f32", 0, 1, 4, stored("float32")),
    Format("f16", 1, 1, 2, stored("float16")),
    Format("bf16", 30, 1, 2, stored("bfloat16")),
    Format("f64", 28, 1, 8, stored("float64")),
    Format("i64", 27, 1, 8, stored("int64")),
    Format("bool", None, 1, 1, stored("bool")),
    Format("q4_0", 2, 32, 18, dequantize_q4_0),
    Format("q4_1", 3, 32, 20, dequantize_q4_1),
    Format("q5_0", 6, 32, 22, dequantize_q5_0),
    Format("q5_1", 7, 32, 24, dequantize_q5_1),
    Format("q8_0", 8, 32, 34, dequantize_q8_0),
    Format("q2_k", 10, 256, 84, dequantize_q2_k),
    Format("q3_k", 11, 256, 110, dequantize_q3_k),
    Format("q4_k", 12, 256, 144, dequantize_q4_k),
    Format("q5_k", 13, 256, 176, dequantize_q5_k),
    Format("q6_k", 14, 256, 210, dequantize_q6_k),
    Format("q8_llama2c", None, None, None, dequantize_q8_llama2c),
)}
