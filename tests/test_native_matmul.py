"""Quantized matrices on the CPU: packing loses nothing, matmul_cpu is right, and its bits depend on the row alone."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch

import quant
from instructions import BEST, PARAMS, PLAIN, Library

# Where each format keeps its float16 fields, which random bytes would make huge or not finite.
HALVES = {"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
          "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
FORMATS = (*HALVES, "bf16", "f32")
BAD_FORMAT, BAD_SIZE, BAD_INDEX, NO_ISA = 1, 2, 3, 5

each_format = pytest.mark.parametrize("format", FORMATS)
each_quantized = pytest.mark.parametrize("format", HALVES)


class Part(ctypes.Structure):
    _fields_ = [("format", ctypes.c_int32), ("O", ctypes.c_int64), ("packed", ctypes.c_void_p)]


def declare(native: ctypes.CDLL) -> None:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    native.pack_bytes_cpu.restype = i64
    native.pack_bytes_cpu.argtypes = (i32, i64, i64)
    native.pack_cpu.argtypes = (pointer, pointer, i32, i64, i64)
    native.matmul_cpu.argtypes = (pointer, pointer, pointer, pointer, i64, i64, i64, i64, ctypes.c_int)
    native.embed_cpu.argtypes = (pointer, pointer, pointer, i64, i64)
    native.set_threads_cpu.argtypes = (i64,)


native = Library(declare)


@pytest.fixture(autouse=True)
def defaults():
    yield
    native.set_threads_cpu(2)
    native.set_isa_cpu(BEST)


def random_raw(format: str, num_outputs: int, num_inputs: int, seed: int = 0) -> np.ndarray:
    """Random quants and small scales: uint8 of a matrix as a file holds it."""
    generator = np.random.default_rng(seed)
    if format in ("f32", "bf16"):
        weight = torch.from_numpy(generator.standard_normal((num_outputs, num_inputs), np.float32))
        return weight.to(torch.bfloat16 if format == "bf16" else torch.float32).view(torch.uint8).numpy().ravel()
    row = quant.FORMATS[format]
    raw = generator.integers(0, 256, (num_outputs * num_inputs // row.block, row.nbytes), dtype=np.uint8)
    for offset in HALVES[format]:
        raw[:, offset : offset + 2] = generator.normal(0, 0.01, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.ravel()


def weights(raw: np.ndarray, format: str, num_outputs: int) -> np.ndarray:
    row = quant.FORMATS[format]
    shape = (num_outputs, raw.size // num_outputs // row.nbytes * row.block)
    return quant.dequantize(torch.from_numpy(raw.copy()), format, shape, torch.float64).numpy()


def aligned(num_bytes: int, fill: int = 0xA5) -> np.ndarray:
    memory = np.full(num_bytes + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


class Matrix:
    """A matrix in its file's form, in packed form and in float64."""

    def __init__(self, format: str, num_outputs: int, num_inputs: int, seed: int = 0, raw: np.ndarray | None = None):
        self.raw = random_raw(format, num_outputs, num_inputs, seed) if raw is None else raw
        self.weight_OI = weights(self.raw, format, num_outputs)
        code = quant.FORMATS[format].ggml_id
        num_bytes = native.pack_bytes_cpu(code, num_outputs, num_inputs)
        room = aligned(num_bytes + 64)
        self.packed = room[:num_bytes]
        assert native.pack_cpu(room.ctypes.data, self.raw.ctypes.data, code, num_outputs, num_inputs) == 0
        assert (room[num_bytes:] == 0xA5).all(), "packing wrote beyond its bytes"
        self.part = Part(code, num_outputs, self.packed.ctypes.data)


def matmul(x_TI: np.ndarray, *matrices: Matrix, bias_O=None, y_TO=None, num_exact=None) -> np.ndarray:
    """The product, or with y_TO that plus the product."""
    x_TI = np.ascontiguousarray(x_TI, np.float32)
    parts = (Part * len(matrices))(*(matrix.part for matrix in matrices))
    num_outputs = sum(part.O for part in parts)
    out = np.full(len(x_TI) * num_outputs + 16, np.nan, np.float32)
    y = out[: len(x_TI) * num_outputs].reshape(len(x_TI), num_outputs)
    if y_TO is not None:
        y[:] = y_TO
    bias = None if bias_O is None else bias_O.ctypes.data
    num_rows, num_inputs = x_TI.shape
    sizes = num_rows, num_rows if num_exact is None else num_exact, num_inputs, len(parts)
    assert native.matmul_cpu(y.ctypes.data, x_TI.ctypes.data, parts, bias, *sizes, y_TO is not None) == 0
    assert np.isnan(out[y.size :]).all(), "matmul wrote beyond its rows"
    return y


def quantized(x_TI: np.ndarray) -> np.ndarray:
    """x as matmul.inc defines its rounding, in float64."""
    x = x_TI.astype(np.float32).reshape(-1, 32)
    largest = np.abs(x).max(1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        q = np.where(largest >= 2.0**-120, np.rint(x * (np.float32(127) / largest)), 0)
        return (q.astype(np.float64) * (largest / np.float32(127))).reshape(x_TI.shape)


def random_x(num_rows: int, num_inputs: int, seed: int = 1) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((num_rows, num_inputs), np.float32) * np.exp(generator.normal(0, 1, (num_rows, 1)))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_close(y_TO: np.ndarray, x_TI: np.ndarray, matrix: Matrix, format: str) -> None:
    """Within what rounding each group's contribution allows, as if all errors had the same sign."""
    x_TI = x_TI.astype(np.float32).astype(np.float64)
    num_steps = 256 + x_TI.shape[1] / 256
    size_OI = np.abs(matrix.weight_OI)
    if format in HALVES:
        x_TI, num_steps = quantized(x_TI), x_TI.shape[1] / 32 * 2
        # A group's dot and minimum may cancel each other: their own sizes bound the rounding.
        groups = size_OI.reshape(len(size_OI), -1, 32)
        size_OI = np.broadcast_to(2 * groups.max(2, keepdims=True), groups.shape).reshape(size_OI.shape)
    bound_TO = (num_steps + 4) * 2.0**-24 * (np.abs(x_TI) @ size_OI.T) + 1e-30
    error_TO = np.abs(y_TO - x_TI @ matrix.weight_OI.T)
    assert (error_TO <= bound_TO).all(), (error_TO / bound_TO).max()


# ---------------------------------------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("num_outputs", (1, 16, 37))
def test_packing_loses_nothing(format, num_outputs):
    matrix = Matrix(format, num_outputs, 768)
    token_T = np.random.default_rng(0).permutation(num_outputs)
    x_TD = np.full((num_outputs + 1, 768), np.nan, np.float32)
    assert native.embed_cpu(x_TD.ctypes.data, ctypes.byref(matrix.part), token_T.ctypes.data, num_outputs, 768) == 0
    row = quant.FORMATS[format]
    expected = quant.dequantize(torch.from_numpy(matrix.raw), format, (num_outputs, 768), torch.float32).numpy()
    assert row.ggml_id == matrix.part.format and same_bits(x_TD[:-1], expected[token_T])
    assert np.isnan(x_TD[-1]).all()


@each_format
@pytest.mark.parametrize("isa", PARAMS)
@pytest.mark.parametrize("num_inputs", (256, 8960))
def test_products_are_right(format, isa, num_inputs):
    native.set_isa_cpu(isa)
    matrix = Matrix(format, 37, num_inputs)
    for num_rows in (1, 2, 3, 7, 70):
        x_TI = random_x(num_rows, num_inputs)
        assert_close(matmul(x_TI, matrix), x_TI, matrix, format)


@each_quantized
def test_quantizing_x_costs_what_eight_bits_cost(format):
    matrix, x_TI = Matrix(format, 64, 1024), random_x(20, 1024)
    exact_TO = x_TI @ matrix.weight_OI.T
    error_T = np.abs(matmul(x_TI, matrix) - exact_TO).max(1) / np.sqrt((exact_TO**2).mean(1))
    assert (error_T < 0.05).all(), error_T


@each_format
@pytest.mark.parametrize("isa", PARAMS)
def test_a_row_has_the_same_bits_in_every_company(format, isa):
    native.set_isa_cpu(isa)
    matrix, x_TI = Matrix(format, 83, 768), random_x(300, 768)
    native.set_threads_cpu(1)
    alone = np.concatenate([matmul(row[None], matrix) for row in x_TI[:70]])
    for num_threads, num_rows in product((1, 2, 3), (2, 3, 4, 5, 8, 9, 11, 32, 70)):
        native.set_threads_cpu(num_threads)
        assert same_bits(matmul(x_TI[:num_rows], matrix), alone[:num_rows]), (num_threads, num_rows)
    assert same_bits(matmul(x_TI, matrix)[:70], alone)
    assert same_bits(matmul(x_TI[::-1], matrix)[::-1][:70], alone)


@each_quantized
@pytest.mark.parametrize("isa", PARAMS[1:])
def test_all_instructions_give_the_same_bits(format, isa):
    matrix, x_TI = Matrix(format, 83, 768), random_x(70, 768)
    bias_O = random_x(1, 83)[0].astype(np.float32)
    for num_rows in (1, 3, 11, 17, 70):
        native.set_isa_cpu(PLAIN)
        plain = matmul(x_TI[:num_rows], matrix, bias_O=bias_O)
        native.set_isa_cpu(isa)
        assert same_bits(matmul(x_TI[:num_rows], matrix, bias_O=bias_O), plain)


@each_format
@pytest.mark.parametrize("isa", PARAMS)
@pytest.mark.parametrize("num_exact", (0, 5, 39))
def test_rows_from_num_exact_on_are_as_exact_as_bfloat16(format, isa, num_exact):
    native.set_isa_cpu(isa)
    matrices, x_TI = [Matrix(format, 37, 768), Matrix(format, 5, 768, seed=1)], random_x(40, 768)
    bias_O, before = (random_x(rows, 42).astype(np.float32) for rows in (1, 40))
    mixed = matmul(x_TI, *matrices, bias_O=bias_O, y_TO=before, num_exact=num_exact)
    assert same_bits(mixed[:num_exact], matmul(x_TI[:num_exact], *matrices, bias_O=bias_O, y_TO=before[:num_exact]))
    weight_OI = np.concatenate([matrix.weight_OI for matrix in matrices])
    exact_TO = before + bias_O + x_TI @ weight_OI.T
    # Both factors are off by at most 2^-9; errors of 768 products mostly cancel.
    tolerance_TO = 2**-8 * np.sqrt(x_TI**2 @ (weight_OI**2).T) * 4
    assert (np.abs(mixed - exact_TO) < tolerance_TO)[num_exact:].all()


@each_quantized
@pytest.mark.parametrize("isa", PARAMS)
def test_the_largest_quants_do_not_saturate(format, isa):
    native.set_isa_cpu(isa)
    for fill in (0x00, 0xFF, 0x80, 0x7F):
        raw = np.full_like(random_raw(format, 16, 512), fill).reshape(-1, quant.FORMATS[format].nbytes)
        for offset in HALVES[format]:
            raw[:, offset : offset + 2] = np.float16([0.01]).view(np.uint8)
        matrix = Matrix(format, 16, 512, raw=raw.ravel())
        for num_rows, value in product((1, 4, 12), (1, -1)):
            x_TI = np.full((num_rows, 512), value, np.float32)
            assert_close(matmul(x_TI, matrix), x_TI, matrix, format)


@pytest.mark.parametrize("isa", PARAMS)
def test_subnormal_scales_count(isa):
    native.set_isa_cpu(isa)
    raw = random_raw("q4_0", 16, 256).reshape(-1, 18)
    raw[:, :2] = np.random.default_rng(0).integers(0, 1024, (len(raw), 1)).astype(np.uint16).view(np.uint8)
    matrix, x_TI = Matrix("q4_0", 16, 256, raw=raw.ravel()), random_x(5, 256)
    assert_close(matmul(x_TI, matrix), x_TI, matrix, "q4_0")


@pytest.mark.parametrize("num_rows", (1, 3, 40))
def test_parts_stand_side_by_side(num_rows):
    matrices = [Matrix(format, num_outputs, 512, seed) for seed, (format, num_outputs) in enumerate(
        (("q4_k", 40), ("q6_k", 5), ("f32", 33), ("q8_0", 64), ("bf16", 1)))]
    x_TI = random_x(num_rows, 512)
    apart = np.concatenate([matmul(x_TI, matrix) for matrix in matrices], 1)
    assert same_bits(matmul(x_TI, *matrices), apart)
    bias_O = random_x(1, apart.shape[1])[0].astype(np.float32)
    assert same_bits(matmul(x_TI, *matrices, bias_O=bias_O), apart + bias_O)
    before = random_x(num_rows, apart.shape[1]).astype(np.float32)
    assert same_bits(matmul(x_TI, *matrices, y_TO=before), before + apart)
    assert same_bits(matmul(x_TI, *matrices, bias_O=bias_O, y_TO=before), before + (apart + bias_O))


@each_format
@pytest.mark.parametrize("isa", PARAMS)
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_numbers_that_are_not_finite_stay_in_their_row(format, isa, bad):
    native.set_isa_cpu(isa)
    matrix, x_TI = Matrix(format, 35, 512), random_x(40, 512)
    clean = matmul(x_TI, matrix)
    for rows in ([0], [7], [0, 13, 39]):
        damaged = x_TI.copy()
        damaged[rows, np.arange(len(rows)) * 200 + 31] = bad
        y_TO = matmul(damaged, matrix)
        assert not np.isfinite(y_TO[rows]).any()
        others = np.setdiff1d(np.arange(40), rows)
        assert same_bits(y_TO[others], clean[others])


@pytest.mark.parametrize("isa", PARAMS)
@pytest.mark.parametrize("size", (0, -0.0, 1e-45, 1e-38, 1e-37, 2.0**-120, 1e-30, 1e30))
def test_tiny_and_huge_inputs(isa, size):
    native.set_isa_cpu(isa)
    matrix = Matrix("q4_1", 16, 256)
    x_TI = (np.random.default_rng(0).uniform(-1, 1, (3, 256)) * size).astype(np.float32)
    assert_close(matmul(x_TI, matrix), x_TI, matrix, "q4_1")


@pytest.mark.parametrize("format", ("f32", "bf16"))
@pytest.mark.parametrize("num_rows", (1, 64))
def test_plain_weights_are_as_exact_as_in_torch(format, num_rows):
    matrix, x_TI = Matrix(format, 128, 4096), random_x(num_rows, 4096).astype(np.float32)
    exact_TO = x_TI.astype(np.float64) @ matrix.weight_OI.T
    torch_TO = torch.nn.functional.linear(torch.from_numpy(x_TI), torch.from_numpy(matrix.weight_OI).float()).numpy()
    ours, theirs = (np.sqrt(((y_TO - exact_TO) ** 2).mean()) for y_TO in (matmul(x_TI, matrix), torch_TO))
    assert ours <= 2 * theirs, ours / theirs


def test_several_callers_and_children_get_their_own_results():
    native.set_threads_cpu(3)
    matrix = Matrix("q4_k", 300, 512)
    inputs = [random_x(num_rows, 512, seed=num_rows) for num_rows in range(1, 20)]
    expected = [matmul(x_TI, matrix) for x_TI in inputs]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(20):
            assert all(map(same_bits, callers.map(lambda x_TI: matmul(x_TI, matrix), inputs), expected))
    child = os.fork()
    if not child:
        os._exit(not all(same_bits(matmul(x_TI, matrix), y_TO) for x_TI, y_TO in zip(inputs, expected)))
    assert os.waitpid(child, 0)[1] == 0
    assert same_bits(matmul(inputs[0], matrix), expected[0])


def test_no_rows_are_fine():
    assert matmul(np.empty((0, 256)), Matrix("q4_1", 16, 256)).shape == (0, 16)


def test_what_cannot_be_served_is_refused():
    q4_k, f16 = quant.FORMATS["q4_k"].ggml_id, quant.FORMATS["f16"].ggml_id
    for code, num_outputs, num_inputs in (
            (q4_k, 16, 128), (q4_k, 0, 256), (q4_k, 16, 0), (f16, 16, 256), (99, 16, 256)):
        assert native.pack_bytes_cpu(code, num_outputs, num_inputs) == 0
        expected = BAD_SIZE if code == q4_k else BAD_FORMAT
        assert native.pack_cpu(None, None, code, num_outputs, num_inputs) == expected
        part = Part(code, num_outputs, None)
        assert native.matmul_cpu(None, None, ctypes.byref(part), None, 1, 1, num_inputs, 1, 0) == expected
        assert native.embed_cpu(None, ctypes.byref(part), None, 1, num_inputs) == expected
    matrix, x_TD = Matrix("q4_k", 16, 256), np.empty((1, 256), np.float32)
    for token in (-1, 16):
        token_T = np.array([token])
        assert native.embed_cpu(x_TD.ctypes.data, ctypes.byref(matrix.part), token_T.ctypes.data, 1, 256) == BAD_INDEX
    assert native.set_isa_cpu(-1) == native.set_isa_cpu(9) == NO_ISA
    assert native.set_threads_cpu(-1) == BAD_SIZE
