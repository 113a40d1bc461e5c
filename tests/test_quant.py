"""Block formats against the gguf package: the same bits, from random bytes and from quantized numbers."""
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import quant

ROOT = Path(quant.__file__).parent
GGML = [row for row in quant.FORMATS.values() if row.ggml_id is not None]
QUANTIZED = [row for row in GGML if row.block > 1]
# byte offsets of the float16 fields in a block: random bytes there would often be inf or NaN
HALVES = {"q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q2_k": [80, 82], "q3_k": [108],
          "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208]}


def type_of(row):
    return gguf.GGMLQuantizationType[row.name.upper()]


def random_blocks(row, num_blocks, seed=0):
    """Random bytes (num_blocks, nbytes) in which every float16 field is finite, of either sign, zero now and then."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_blocks, row.nbytes), dtype=np.uint8)
    for offset in HALVES[row.name]:
        halves = rng.standard_normal(num_blocks).astype(np.float16)
        halves[::7] = 0
        raw[:, offset:offset + 2] = halves[:, None].view(np.uint8)
    return raw


def bits(tensor):
    return np.ascontiguousarray(tensor.numpy() if torch.is_tensor(tensor) else tensor).view(np.uint32)


@pytest.mark.parametrize("row", GGML, ids=lambda row: row.name)
def test_table_agrees_with_ggml(row):
    assert row.ggml_id == type_of(row).value
    assert (row.block, row.nbytes) == gguf.GGML_QUANT_SIZES[type_of(row)]


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.name)
def test_random_bytes_give_the_reference_bits(row):
    raw = random_blocks(row, 999)
    want = gguf.quants.dequantize(raw, type_of(row))
    got = quant.dequantize(torch.from_numpy(raw).flatten(), row.name, want.shape, torch.float32)
    assert np.array_equal(bits(got), bits(want))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_quantized_numbers_come_back_close(name):
    numbers = np.random.default_rng(1).standard_normal((48, 96)).astype(np.float32)
    raw = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[name.upper()])
    got = quant.dequantize(torch.from_numpy(raw).flatten(), name, numbers.shape, torch.float32)
    assert np.array_equal(bits(got), bits(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])))
    assert np.abs(got.numpy() - numbers).max() < 8 / 2 ** int(name[1])   # at most one step of a range below 8


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.name)
def test_pieces_join(row, monkeypatch):
    """A tensor read in many pieces, the last one short, equals the same tensor read at once."""
    raw = torch.from_numpy(random_blocks(row, 37)).flatten()
    whole = quant.dequantize(raw, row.name, (37, row.block), torch.float32)
    monkeypatch.setattr(quant, "PIECE_WEIGHTS", 5 * row.block)
    assert torch.equal(whole, quant.dequantize(raw, row.name, (37, row.block), torch.float32))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_share_the_pieces_and_leave_torch_as_it_was(num_threads, monkeypatch):
    raw, before = torch.from_numpy(random_blocks(quant.FORMATS["q4_k"], 64)).flatten(), torch.get_num_threads()
    whole = quant.dequantize(raw, "q4_k", (64, 256), torch.float32)
    monkeypatch.setattr(quant, "PIECE_WEIGHTS", 256)
    try:
        torch.set_num_threads(num_threads)
        with torch.inference_mode():
            assert torch.equal(whole, quant.dequantize(raw, "q4_k", (64, 256), torch.float32))
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_values_are_rounded_once(dtype):
    raw = torch.from_numpy(random_blocks(quant.FORMATS["q6_k"], 64)).flatten()
    exact = quant.dequantize(raw, "q6_k", (128, 128), torch.float32)
    got = quant.dequantize(raw, "q6_k", (128, 128), dtype)
    assert got.dtype == dtype and torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize("name, stored", [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16),
                                          ("f64", torch.float64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_plain_numbers(name, stored, dtype):
    numbers = torch.randn(7, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(stored)
    got = quant.dequantize(numbers.view(torch.uint8).flatten(), name, (7, 33), dtype)
    assert torch.equal(got, numbers.to(dtype))


@pytest.mark.parametrize("group", [32, 6])
def test_llama2c_groups(group):
    """llama2.c version 2: int8 values of the whole tensor, then a float32 scale for each group."""
    rng = np.random.default_rng(3)
    values = rng.integers(-127, 128, (8, 48), dtype=np.int8)
    scales = rng.standard_normal(values.size // group).astype(np.float32)
    raw = torch.frombuffer(bytearray(values.tobytes() + scales.tobytes()), dtype=torch.uint8)
    want = (values.reshape(-1, group).astype(np.float32) * scales[:, None]).reshape(values.shape)
    assert np.array_equal(bits(quant.dequantize(raw, "q8_llama2c", values.shape, torch.float32)), bits(want))


def test_import_needs_no_torch():
    code = "import sys, quant; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_rounding_to_8_bits_errs_by_half_a_step_at_most():
    size_O1 = torch.tensor([[1e-3], [1], [50], [0], [1e-9]])
    x_OI = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)) * size_O1
    raw = quant.quantize_q8_0(x_OI)
    assert raw.shape == (5, 3 * 34) and raw.dtype == torch.uint8
    back_OI = quant.dequantize(raw.flatten(), "q8_0", (5, 96), torch.float32)
    step = x_OI.view(5, 3, 32).abs().amax(-1, keepdim=True) / 127
    assert ((back_OI - x_OI).view(5, 3, 32).abs() <= step * (0.5 + 127 * 2**-11) + 2**-24 * 127).all()
    assert back_OI[3].eq(0).all()
