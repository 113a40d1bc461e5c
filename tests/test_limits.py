"""limits.py: the machine's limits are measured in the arithmetic in use."""

import pytest
import torch

import kernels
import limits
import native
from checkpoint import open_checkpoint
from model import load_model
from quant import FORMATS
from tiny import write_gguf


@pytest.fixture(scope="module")
def ops() -> native.Native:
    return native.load()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(limits, "GIB", 2**24)
    monkeypatch.setattr(limits, "MATMUL_WIDTH", {"cpu": 64})
    monkeypatch.setattr(limits, "PEAK_SECONDS", 0.002)


def load(tmp_path, quant: str, dtype: torch.dtype | None, ops):
    with open_checkpoint(write_gguf(tmp_path / "tiny.gguf", quant=quant)) as checkpoint:
        return load_model(checkpoint, dtype, ops=ops)


@pytest.mark.parametrize("quant, dtype, is_native, arithmetic", [
    ("q8_0", None, True, "int8"), ("q4_1", None, True, "int8"), ("f32", torch.float32, True, "float32"),
    ("bf16", torch.bfloat16, True, "float32"), ("q8_0", torch.bfloat16, False, "bfloat16")])
def test_arithmetic_in_use(tmp_path, ops, quant, dtype, is_native, arithmetic):
    model = load(tmp_path, quant, dtype, ops if is_native else kernels)
    assert limits.machine(model)["arithmetic"] == arithmetic
    found = limits.machine_limits(model)
    assert set(found) == {"memory_gb_per_s", "memory_gb_per_s_at_model_size", "matmul_gflops"}
    assert all(value > 0 for value in found.values())


def test_the_peak_is_that_of_the_instructions_in_use(ops):
    """Where there are instructions for bytes they do more than those for floats, and than plain C++ does."""
    def peak(format: int) -> float:
        return max(ops.module.peak(format, 0.01) for _ in range(5))

    floats, ints = peak(FORMATS["f32"].ggml_id), peak(FORMATS["q4_1"].ggml_id)
    assert floats > 1e8 and ints > 1e8 and ops.module.peak(99, 0.01) == 0
    levels = [level for level in range(8) if can_use(ops, level)]
    if len(levels) > 1:
        assert ints > floats
        ops.set_isa(0)
        plain = peak(FORMATS["q4_1"].ggml_id)
        ops.set_isa(levels[-1])
        assert plain < ints


def can_use(ops, level: int) -> bool:
    try:
        ops.set_isa(level)
    except ValueError:
        return False
    return True
