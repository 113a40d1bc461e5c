"""What this machine does at best: memory read, arithmetic; and what it is.

Owns how limits are measured. Knows of the model which matrices a step reads and in what arithmetic it multiplies by
them. Start at `machine_limits`.
"""

import math
import os
import platform
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch

from model import Linear, Model
from native import Native
from quant import FORMATS

GIB = 2**30
MATMUL_WIDTH = {"cpu": 1024, "cuda": 8192}
PEAK_SECONDS = 0.05


def machine(model: Model) -> dict:
    """What the numbers were measured on and with."""
    device = model.device.type
    return {"cpu": cpu_name(), "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "cores": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.platform(),
            "python": platform.python_version(), "torch": torch.__version__, "device": device,
            "dtype": str(model.dtype).removeprefix("torch."), "arithmetic": arithmetic(model)}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def matrices(model: Model) -> list[Linear]:
    """Every matrix that a step multiplies by; the embedding table counts as the head where the two are tied."""
    parts = [(layer.attention, layer.ffn) for layer in model.layers]
    linears = [(attention.qkv, attention.output, ffn.gate_up, ffn.down) for attention, ffn in parts]
    return [*chain.from_iterable(linears), model.output]


def arithmetic(model: Model) -> str:
    """What matrices are multiplied in: native kernels round activations to 8 bits where the weights are quantized,
    which is less than two bytes a weight, and compute in float32 otherwise."""
    if not isinstance(model.ops, Native):
        return str(model.dtype).removeprefix("torch.")
    num_bytes, num_weights = (sum(numbers) for numbers in
                              zip(*((matrix.weight.nbytes, matrix.num_weights) for matrix in matrices(model))))
    return "int8" if num_bytes < 2 * num_weights else "float32"


def machine_limits(model: Model) -> dict:
    """What this machine does at best with the threads and the arithmetic in use: memory read in GB/s over a gibibyte
    and over as much as the model's matrices (caches may hold a small model), operations in 10^9 a second: those that
    the kernels' instructions do on registers, or torch in a large product."""
    size_bytes = sum(matrix.weight.nbytes for matrix in matrices(model))
    is_native = isinstance(model.ops, Native)
    return {"memory_gb_per_s": read_rate(GIB, model.device),
            "memory_gb_per_s_at_model_size": read_rate(size_bytes, model.device),
            "matmul_gflops": peak_rate(model) if is_native else matmul_rate(model.dtype, model.device)}


def peak_rate(model: Model) -> float:
    format = FORMATS["q8_0" if arithmetic(model) == "int8" else "f32"]
    return max(model.ops.module.peak(format.ggml_id, PEAK_SECONDS) for _ in range(7)) / 1e9


def read_rate(size_bytes: int, device: torch.device) -> float:
    """GB/s of a dot product over two halves: of torch's reductions the one that waits for memory alone. No cache holds
    a gibibyte, so more would read no slower."""
    half = torch.ones(max(1, min(size_bytes, GIB) // 8), device=device)
    other = torch.ones_like(half)
    return (half.nbytes + other.nbytes) / best_seconds(lambda: torch.dot(half, other), device) / 1e9


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    width = MATMUL_WIDTH[device.type]
    square = torch.randn(width, width, device=device).to(dtype)
    return 2 * width**3 / best_seconds(lambda: square @ square, device) / 1e9


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """The shortest of several runs: a limit is what nothing disturbed. Synchronised with the device."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = math.inf
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - start_s)
    return max(best, 1e-9)
