"""Builds the CUDA kernels, checks them against their references and times them on this machine's GPU: one table, and
all of it as JSON. Under five minutes beside the build. Exit status 0 if every check passed and everything was timed.

    gpu_check.py [FILE.json]

A limit is measured in the same run: how fast the device copies (bytes read and written) for what memory bounds, and
torch's bfloat16 matrix product for what arithmetic bounds. Models are made up, with random weights. What fails is told
in its place, and the rest goes on.
"""
from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import gpu  # noqa: E402 (it needs the path above)
from engine import Engine, EngineConfig  # noqa: E402
from families import LayerConfig, ModelConfig, RopeConfig  # noqa: E402
from kernels import DrawRules  # noqa: E402
from model import Model, layer_shapes, tensor_shapes  # noqa: E402
from quant import FORMATS  # noqa: E402
from sampling import SamplingParams  # noqa: E402

QUANTS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
# Where a block has its float16 scale, and its minimum; other formats at 0 and 2.
SCALES = {"q4_0": (0,), "q5_0": (0,), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}
CHECKS = ("-m", "gpu", "tests/test_emu.py", "tests/test_gpu.py")  # for pytest


@dataclass(frozen=True)
class Sizes:
    """Of what is timed; the device's caches should be too small for it."""

    copy_bytes: int = 2 << 30
    square: int = 8192  # a matrix product
    rows: int = 8192  # of numbers, `width` each
    width: int = 4096
    context: int = 32768
    contexts_at_once: tuple[int, ...] = (1, 16)
    vocab: int = 128_256
    page: int = 32
    models: tuple[tuple[int, int, int, int, int], ...] = (  # layers, width, feed-forward, heads, key/value heads
        (16, 2048, 8192, 32, 8), (32, 4096, 14336, 32, 8))
    head_width: int = 128
    batches: tuple[int, ...] = (1, 8, 32, 128)
    prompt: int = 4096
    steps: int = 40


@dataclass(frozen=True)
class Row:
    """One line of the table: what a second brought, and what part of the limit that is (and ought to be); or why that
    is not known."""

    name: str
    seconds: float = math.nan
    rate: float = math.nan
    unit: str = ""
    limit: float = math.nan
    goal: float | None = None
    error: str | None = None

    @property
    def fraction(self) -> float:
        return self.rate / self.limit

    @property
    def fields(self) -> dict:
        """For JSON, which has no NaN."""
        return {name: None if value != value else value
                for name, value in (asdict(self) | {"fraction": self.fraction}).items()}

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.name:<44} failed: {self.error}"
        goal = "" if self.goal is None else f" (goal: {100 * self.goal:.0f} %)"
        return (f"{self.name:<44}{1e6 * self.seconds:>12.1f} us {self.rate:>10.1f} {self.unit:<9}"
                f"{100 * self.fraction:>5.0f} %{goal}")


@dataclass(frozen=True)
class Bench:
    """The operations and the limits of their device."""

    ops: gpu.Cuda
    sizes: Sizes
    copy_gb_per_s: float
    matmul_tflops: float

    def seconds(self, work: Callable[[int], object], times: int) -> float:
        """Of a call: `times` calls recorded and made again, so that Python's own time is not part of it."""
        work(0)
        recording = self.ops.new_recorder()()
        with recording:
            for i in range(times):
                work(i)
        return best_seconds(recording.replay, self.ops) / times

    def memory_row(self, name: str, num_bytes: float, seconds: float, goal: float | None = None) -> Row:
        return Row(name, seconds, num_bytes / seconds / 1e9, "GB/s", self.copy_gb_per_s, goal)

    def matmul_row(self, name: str, flops: float, seconds: float, goal: float | None = None) -> Row:
        return Row(name, seconds, flops / seconds / 1e12, "TFLOP/s", self.matmul_tflops, goal)


# The device ----------------------------------------------------------------------------------------------------------
# The rest of this file runs through the emulator as well.

AT_LEAST_S, REPEATS = 2e-3, 7  # of a measurement: beside it, starting a graph counts for nothing


def elapsed_seconds(work: Callable[[], object], times: int, ops: gpu.Cuda) -> float:
    """Of so many calls one after the other, by the device's own clock."""
    if ops.is_emulated:
        start_s = time.perf_counter()
        for _ in range(times):
            work()
        return max(time.perf_counter() - start_s, 1e-9)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def device_name(ops: gpu.Cuda) -> str:
    return "emulator" if ops.is_emulated else torch.cuda.get_device_name()


# ---------------------------------------------------------------------------------------------------------------------

def best_seconds(work: Callable[[], object], ops: gpu.Cuda) -> float:
    """Of a call, the shortest of several measurements: a limit is what nothing disturbed."""
    work()
    times = max(1, math.ceil(AT_LEAST_S / elapsed_seconds(work, 1, ops)))
    return min(elapsed_seconds(work, times, ops) for _ in range(REPEATS)) / times


def main(path: str = "gpu_check.json", ops: gpu.Cuda | None = None, sizes: Sizes = Sizes()) -> int:
    start_s = time.perf_counter()
    ops = ops or gpu.load(lambda: print("compiling the CUDA kernels (some minutes)", file=sys.stderr))
    build_s = time.perf_counter() - start_s
    checked = subprocess.run([sys.executable, "-m", "pytest", "-q", *CHECKS], cwd=ROOT, capture_output=True, text=True)
    verdict = ((checked.stdout or checked.stderr).strip().splitlines() or ["pytest said nothing"])[-1]
    print(f"{device_name(ops)}, built in {build_s:.0f} s, checks: {verdict}\n", flush=True)
    bench = measured_limits(ops, sizes)
    print(f"limits: copies {bench.copy_gb_per_s:.0f} GB/s, bfloat16 products {bench.matmul_tflops:.0f} TFLOP/s\n")
    document = {"device": device_name(ops), "torch": torch.__version__, "cuda": torch.version.cuda,
                "build_s": build_s, "checks": verdict, "checks_passed": checked.returncode == 0,
                "copy_gb_per_s": bench.copy_gb_per_s, "matmul_tflops": bench.matmul_tflops, "rows": []}
    rows = []
    for row in all_rows(bench):
        rows.append(row)
        print(row, flush=True)
        document["rows"].append(row.fields)
        document["seconds"] = time.perf_counter() - start_s
        Path(path).write_text(json.dumps(document, indent=1) + "\n", "utf-8")  # each time: what comes next may crash
    if checked.returncode:
        print(checked.stdout[-4000:] + checked.stderr[-4000:], file=sys.stderr)
    return int(checked.returncode != 0 or any(row.error is not None for row in rows))


def all_rows(bench: Bench) -> Iterator[Row]:
    parts = {"small kernels": small_kernels, "products": products, "attention": attention, "draw": draws}
    for shape in bench.sizes.models:
        for name in ("bf16", "q4_0"):
            parts[f"model {shape} {name}"] = partial(model_rows, shape=shape, name=name)
    for name, part in (parts | {"transformers": transformers_rows}).items():
        try:
            yield from part(bench)
        except Exception as error:
            yield Row(name, error=(str(error) or type(error).__name__).splitlines()[0])


def measured_limits(ops: gpu.Cuda, sizes: Sizes) -> Bench:
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=ops.device)
    target = torch.empty_like(source)
    copy_s = best_seconds(lambda: target.copy_(source), ops)
    del source, target
    square = torch.randn(sizes.square, sizes.square, device=ops.device).bfloat16()
    matmul_s = best_seconds(lambda: square @ square, ops)
    return Bench(ops, sizes, 2 * sizes.copy_bytes / copy_s / 1e9, 2 * sizes.square**3 / matmul_s / 1e12)


# Kernels -------------------------------------------------------------------------------------------------------------

def random(bench: Bench, *shape: int) -> Tensor:
    return torch.randn(shape, device=bench.ops.device)


def small_kernels(bench: Bench) -> Iterator[Row]:
    ops, T, D, A = bench.ops, bench.sizes.rows, bench.sizes.width, bench.sizes.head_width
    x_TD, weight_D = random(bench, T, D), random(bench, D)
    yield bench.memory_row("rms_norm", 8 * T * D, bench.seconds(lambda i: ops.rms_norm(x_TD, weight_D, 1e-5), 5))
    yield bench.memory_row("silu_mul", 4 * T * D * 1.5, bench.seconds(lambda i: ops.silu_mul(x_TD), 5))
    quantized = ops.fresh(ops.size("quantized_bytes", T, D), dtype=torch.uint8)
    yield bench.memory_row("quantize", 4 * T * D + quantized.nbytes,
                           bench.seconds(lambda i: ops.call("quantize", quantized, x_TD, T, D), 5))
    table = ops.pack([("q8_0", (bench.sizes.vocab, D), random_matrix(ops, "q8_0", bench.sizes.vocab, D))])
    token_T = torch.randint(bench.sizes.vocab, (T,), device=ops.device)
    yield bench.memory_row("embed q8_0", T * D * (4 + table.nbytes / (bench.sizes.vocab * D)),
                           bench.seconds(lambda i: ops.embed(table, token_T), 5))
    heads, kv_heads, page = D // A, max(1, D // A // 4), bench.sizes.page
    kv = ops.new_kv(-(-4 * T // page), page, kv_heads, A, A, torch.bfloat16, ops.device, 0)
    qkv_TX, slot_T = random(bench, T, (heads + 2 * kv_heads) * A), torch.arange(T, device=ops.device)
    angles = ops.rope_angles(slot_T, torch.rand(A // 2, dtype=torch.float64, device=ops.device), 1.0, torch.float32)
    num_bytes = T * (8 * heads * A + 2 * kv_heads * A * 6 + 4 * A)
    yield bench.memory_row("rope_store", num_bytes,
                           bench.seconds(lambda i: ops.rope_store_(kv, qkv_TX, angles, slot_T, A), 5))
    from_T, to_T = torch.arange(4 * T, device=ops.device).split(2 * T)
    yield bench.memory_row("move_kv", 2 * T * 8 * kv_heads * A,
                           bench.seconds(lambda i: ops.move_kv_(kv, from_T, to_T), 5))


def random_matrix(ops: gpu.Cuda, name: str, rows: int, columns: int) -> Tensor:
    """Bytes of a matrix; scales are small numbers, so that nothing overflows."""
    if name == "bf16":
        return (torch.randn(rows, columns, device=ops.device) * columns**-0.5).bfloat16().view(torch.uint8)
    format = FORMATS[name]
    raw = torch.randint(256, (rows * columns // format.block, format.nbytes), dtype=torch.uint8, device=ops.device)
    for offset in SCALES.get(name, (0, 2)):
        raw[:, offset : offset + 2] = torch.tensor([0.003]).half().view(torch.uint8).to(ops.device)
    return raw.view(rows, -1)


def products(bench: Bench) -> Iterator[Row]:
    """Matrices by turns, so that none stays in cache: few rows read weights, many do arithmetic."""
    ops, width = bench.ops, bench.sizes.square
    for name in ("bf16", *QUANTS):
        matrices = [ops.pack([(name, (width, width), random_matrix(ops, name, width, width))]) for _ in range(8)]
        for T in (1, 4, 16):
            x_TI = random(bench, T, width)
            num_bytes = matrices[0].nbytes + 8 * T * width
            seconds = bench.seconds(lambda i: ops.linear(x_TI, matrices[i % 8]), 16)
            yield bench.memory_row(f"linear {name}, {T} rows", num_bytes, seconds)
        x_TI = random(bench, bench.sizes.prompt, width)
        seconds = bench.seconds(lambda i: ops.linear(x_TI, matrices[i % 8]), 2)
        yield bench.matmul_row(f"linear {name}, {len(x_TI)} rows", 2 * len(x_TI) * width**2, seconds)


def attention(bench: Bench) -> Iterator[Row]:
    """Decoding over a long context, where keys and values are what is read; and a prompt, where products count."""
    ops, sizes, heads, kv_heads, A = bench.ops, bench.sizes, 32, 8, bench.sizes.head_width
    for S in sizes.contexts_at_once:
        kv, batch = cached(ops, sizes, S, 1)
        q_THA = random(bench, S, heads, A)
        seconds = bench.seconds(lambda i: ops.attention(q_THA, kv, batch, A**-0.5), 4)
        num_bytes = S * sizes.context * kv_heads * A * 4
        yield bench.memory_row(f"attention, decoding {S} x {sizes.context}", num_bytes, seconds, 0.8)
    kv, batch = cached(ops, sizes, 1, sizes.prompt)
    q_THA = random(bench, sizes.prompt, heads, A)
    past = sizes.context - sizes.prompt
    flops = 4 * heads * A * sizes.prompt * (past + sizes.prompt / 2)
    yield bench.matmul_row(f"attention, {sizes.prompt} after {past}", flops,
                           bench.seconds(lambda i: ops.attention(q_THA, kv, batch, A**-0.5), 2))


def cached(ops: gpu.Cuda, sizes: Sizes, S: int, num_new: int):
    """A cache of S contexts in pages at random, and the batch of their last tokens."""
    pages = -(-sizes.context // sizes.page)
    kv = ops.new_kv(S * pages, sizes.page, 8, sizes.head_width, sizes.head_width, torch.bfloat16, ops.device, 0)
    kv.k.normal_(), kv.v.normal_()
    table = torch.randperm(S * pages, device=ops.device).view(S, pages).int()
    numbers = torch.arange(S + 1, device=ops.device)
    return kv, SimpleNamespace(tables=(table,), lease_S=numbers[:S], starts_S1=numbers * num_new, ancestors_T=None,
                               lengths_S=torch.full((S,), sizes.context, device=ops.device))


def draws(bench: Bench) -> Iterator[Row]:
    L, V = max(bench.sizes.batches), bench.sizes.vocab
    x_LV, rules = 3 * random(bench, 4 * L, V), [DrawRules(V, 0.7, top_p=0.95)] * L
    yield bench.memory_row(f"argmax, {4 * L} x {V}", 16 * L * V, bench.seconds(lambda i: bench.ops.argmax(x_LV), 2))
    few_LV = x_LV[:L]
    seconds = best_seconds(lambda: bench.ops.draw(few_LV, rules, range(L)), bench.ops)
    yield bench.memory_row(f"draw, top-p, {L} x {V}", 4 * L * V, seconds)


# Models --------------------------------------------------------------------------------------------------------------

class RandomWeights:
    """What a Model asks of weights.Weights, made up on the device."""

    def __init__(self, config: ModelConfig, ops: gpu.Cuda, name: str):
        self.ops, self.name, self.device, self.dtype, self.notes = ops, name, ops.device, torch.float32, []
        self.matrix_dtype = torch.bfloat16 if name == "bf16" else None
        self.shapes = tensor_shapes(config)
        for i in range(len(config.layers)):
            self.shapes |= layer_shapes(config, f"blk.{i}")

    def has(self, name: str) -> bool:
        return False

    def require(self, shapes: dict) -> None:
        pass

    def info(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(shape=self.shapes[name])

    def take(self, name: str) -> Tensor:
        return torch.ones(self.shapes[name], device=self.device)

    def matrix(self, *names: str):
        return self.ops.pack([(self.name, self.shapes[name], random_matrix(self.ops, self.name, *self.shapes[name]))
                              for name in names])


def config_of(sizes: Sizes, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> ModelConfig:
    A, context = sizes.head_width, 2 * sizes.prompt
    return ModelConfig("llama", (LayerConfig("full"),) * layers, hidden, ffn, heads, kv_heads, A, sizes.vocab, context,
                       context, 1e-5, RopeConfig(500_000.0, A), False, False, False, False, 0, None, (), "bfloat16")


def model_rows(bench: Bench, shape: Sequence[int], name: str) -> Iterator[Row]:
    """Decoding, whose limit is reading the weights, and a prompt."""
    config = config_of(bench.sizes, *shape)
    model = Model(config, RandomWeights(config, bench.ops, name), config.context, bench.ops)
    linears = [model.output, *(part for layer in model.layers for part in (
        layer.attention.qkv, layer.attention.output, layer.ffn.gate_up, layer.ffn.down))]
    num_weights, weight_bytes = (sum(numbers) for numbers in zip(
        *((linear.num_weights, linear.weight.nbytes) for linear in linears)))
    label = f"{(num_weights + model.token_embd.num_weights) / 1e9:.1f}B {name}"
    sizes, is_largest = bench.sizes, tuple(shape) == bench.sizes.models[-1]
    for S in sizes.batches:
        seconds = decode_seconds(model, sizes, S)
        goal = {"bf16": 0.85, "q4_0": 0.7}[name] if is_largest and S == 1 else None
        yield bench.memory_row(f"{label}, decoding {S} ({S / seconds:.0f} tokens/s)", weight_bytes, seconds, goal)
    seconds = prompt_seconds(model, sizes)
    num_in_layers = num_weights - model.output.num_weights
    yield bench.matmul_row(f"{label}, prompt of {sizes.prompt} ({sizes.prompt / seconds:.0f} tokens/s)",
                           2 * num_in_layers * sizes.prompt, seconds, 0.55 if is_largest else None)


def engine_of(model: Model, sizes: Sizes, S: int) -> Engine:
    num_pages = S * (-(-(64 + sizes.steps) // sizes.page) + 1) + -(-sizes.prompt // sizes.page) + 1
    return Engine(model, EngineConfig(page_size=sizes.page, num_pages=num_pages, max_requests=S,
                                      max_step_tokens=max(sizes.prompt, S), prefix_cache=False))


def decode_seconds(model: Model, sizes: Sizes, S: int) -> float:
    """Of a step of S requests, the draw and Python included: the median of many."""
    engine = engine_of(model, sizes, S)
    for i in range(S):
        engine.submit([(i + j) % 1000 for j in range(32)], SamplingParams(max_tokens=sizes.steps, ignore_eos=True))
    times = []
    while engine.has_work:
        start_s = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start_s)
    return sorted(times)[len(times) // 2]


def prompt_seconds(model: Model, sizes: Sizes) -> float:
    engine = engine_of(model, sizes, 1)
    times = []
    for _ in range(3):
        engine.submit([j % 1000 for j in range(sizes.prompt)], SamplingParams(max_tokens=1, ignore_eos=True))
        start_s = time.perf_counter()
        while engine.has_work:
            engine.step()
        times.append(time.perf_counter() - start_s)
    return min(times)


def transformers_rows(bench: Bench) -> Iterator[Row]:
    """The peer, if it is installed: the smallest of the models in bfloat16, decoding one request."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return
    layers, hidden, ffn, heads, kv_heads = bench.sizes.models[0]
    config = LlamaConfig(vocab_size=bench.sizes.vocab, hidden_size=hidden, intermediate_size=ffn,
                         num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                         head_dim=bench.sizes.head_width)
    with torch.device(bench.ops.device), torch.inference_mode():
        model = LlamaForCausalLM(config).bfloat16().eval()
        ids, steps = torch.arange(32)[None], bench.sizes.steps

        def generate(num: int) -> float:
            return min(elapsed_seconds(
                lambda: model.generate(ids, max_new_tokens=num, min_new_tokens=num, do_sample=False), 1, bench.ops)
                       for _ in range(3))

        seconds = max(generate(1 + steps) - generate(1), 1e-9) / steps
    num_bytes = 2 * (sum(weight.numel() for weight in model.parameters()) - model.get_input_embeddings().weight.numel())
    yield bench.memory_row(f"transformers, bf16, decoding 1 ({1 / seconds:.0f} tokens/s)", num_bytes, seconds)


if __name__ == "__main__":
    try:
        if sys.argv[1:2] and sys.argv[1].startswith("-"):
            raise ValueError("usage: gpu_check.py [FILE.json]")
        sys.exit(main(*sys.argv[1:2]))
    except ValueError as error:
        sys.exit(f"gpu_check.py: error: {error}")
