"""The kernels of csrc/cuda/ under the names and signatures of kernels.py, and how they are compiled.

Owns the calls: their arguments are read off csrc/cuda/kernels.cuh, so that the header is the only list of them. Knows
nothing of layers or requests. `load` gives the operations on a device; through the emulator (csrc/emu/) the same class
computes on CPU tensors, which is how machines without a device test it.

Activations are float32, keys and values bfloat16. Quantized weights stay as they are stored; each row of a result has
the same bits alone or among others. So do up to 16 rows on plain weights in bfloat16; more, and other types, go through
torch's matmul, whose bits depend on how many rows there are.
"""

import ctypes
import math
import re
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
import native
from kernels import KV, DrawRules, sent
from quant import FORMATS

SOURCES = native.SOURCES / "cuda"
FLAGS = ("-O3", "-std=c++17", "-fmad=false", "--expt-relaxed-constexpr")  # fused only where a kernel says so
NAME = "quire_cuda"


def load(on_build: Callable[[], None] = lambda: None) -> "Cuda":
    """The operations on the current device, compiled for it if they never were, which `on_build` is told. ValueError in
    one line where there is none, or it cannot be compiled for."""
    check_device()
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise ValueError(f"the GPU has capability {major}.{minor} but the CUDA kernels need 8.0: use --kernels torch "
                         "or --device cpu")

    def start() -> None:
        check_compiler()
        on_build()

    try:
        path = native.built(build_folder(f"sm_{major}{minor}"), NAME, partial(compile_into, f"{major}.{minor}"), start)
        library = ctypes.CDLL(str(path))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"the CUDA kernels cannot be compiled ({error}): use --device cpu") from None
    return Cuda(library, "cuda")


def check_device() -> None:
    """ValueError, in one line, if torch has no device."""
    if not torch.cuda.is_available():
        why = "torch is built for CPUs" if torch.version.cuda is None else "torch finds no device"
        raise ValueError(f"--device cuda needs an NVIDIA GPU and a torch for CUDA, but {why}: use --device cpu")


def check_compiler() -> None:
    """ValueError, in one line, if there is no compiler of torch's CUDA: what another makes loads beside torch's own
    runtime, and fails later."""
    wanted, toolkit = torch.version.cuda, native.cuda_toolkit()
    if toolkit is None:
        raise ValueError("--device cuda compiles its kernels but there is no nvcc on the PATH or in CUDA_HOME: install "
                         f"the CUDA toolkit {wanted}, or use --device cpu")
    said = subprocess.run([toolkit / "bin/nvcc", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found and found[1] != wanted.partition(".")[0]:
        raise ValueError(f"{toolkit}/bin/nvcc is of CUDA {found[1]}.{found[2]} but torch is built for {wanted}: "
                         f"install one of CUDA {wanted.partition('.')[0]}, name its folder by CUDA_HOME, or use "
                         "--device cpu")


def build_folder(target: str) -> Path:
    """Where the kernels compiled for `target` lie."""
    key = blake2b(f"{torch.__version__} {FLAGS}".encode(), digest_size=8)
    for path in sources():
        key.update(path.name.encode() + path.read_bytes())
    return native.build_root() / f"cuda-{target}-{key.hexdigest()}"


def sources() -> list[Path]:
    """All that the kernels are made of."""
    patterns = ("kernels.h", "cpu/*.h", "cuda/*", "emu/*")
    return sorted(path for pattern in patterns for path in native.SOURCES.glob(pattern))


def compile_into(capability: str, folder: Path) -> None:
    """By torch.utils.cpp_extension, for devices of that capability, for instance 9.0."""
    native.compile_extension({"CUDA_HOME": str(native.cuda_toolkit()), "TORCH_CUDA_ARCH_LIST": capability}, name=NAME,
                             sources=[str(path) for path in SOURCES.glob("*.cu")], extra_cuda_cflags=list(FLAGS),
                             build_directory=str(folder))


# Calls ---------------------------------------------------------------------------------------------------------------

POINTERS = {"float": torch.float32, "double": torch.float64, "int32_t": torch.int32, "int64_t": torch.int64,
            "void": None, "DrawRules": None}
NUMBERS = {"int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float,
           "double": ctypes.c_double}
REASONS = {1: "a format it does not serve", 2: "sizes it does not serve", 4: "no memory left",
           6: "the device refused it"}


@dataclass(frozen=True)
class Kernel:
    """A function of the library, and what it wants: for each parameter its name and the type of a number, or of what a
    tensor holds (None: anything)."""

    function: Callable
    parameters: list[tuple[str, str | None, torch.dtype | None]]


def read_kernels(library: ctypes.CDLL) -> dict[str, Kernel]:
    """The functions that kernels.cuh declares, by their names without _cuda."""
    text = re.sub(r"//.*", "", (SOURCES / "kernels.cuh").read_text("utf-8"))
    found = {}
    for returned, name, parameters in re.findall(r"\b(int|int64_t) (\w+)_cuda\(([^)]*)\);", text):
        function = getattr(library, f"{name}_cuda")
        function.restype = NUMBERS[returned]
        wanted = []
        for parameter in parameters.split(","):
            type, star, label = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) ?(\w*)\s*", parameter).groups()
            is_pointer = bool(star) or type == "Stream"
            wanted.append((label, None if is_pointer else type, POINTERS.get(type) if star else None))
        function.argtypes = [ctypes.c_void_p if type is None else NUMBERS[type] for _, type, _ in wanted]
        found[name] = Kernel(function, wanted)
    return found


@dataclass(frozen=True)
class Part:
    """Some rows of a matrix (O, I): packed blocks of a format, or plain numbers (None)."""

    format: int | None
    rows: int
    memory: Tensor


@dataclass(frozen=True)
class Packed:
    """Matrices that read the same input, side by side."""

    parts: tuple[Part, ...]
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        return sum(part.memory.nbytes for part in self.parts)


class Recording:
    """Every call between `with` and its end; replay() makes them again, on the same memory. Where there is no device:
    on one, a graph does so."""

    def __init__(self, ops: "Cuda"):
        self.ops, self.calls = ops, []

    def __enter__(self):
        self.ops.recording = self

    def __exit__(self, *_):
        self.ops.recording = None

    @torch.inference_mode()
    def replay(self) -> None:
        for call in self.calls:
            call()


class Graph:
    """The same as a CUDA graph: one launch for the whole step. Graphs of a `pool` share the memory of their results."""

    def __init__(self, pool: tuple[int, int]):
        self.graph = torch.cuda.CUDAGraph()
        self.capture = torch.cuda.graph(self.graph, pool=pool)

    def __enter__(self):
        self.capture.__enter__()

    def __exit__(self, *error):
        self.capture.__exit__(*error)
        if error[0] is None:
            self.graph.replay()  # capturing computed nothing

    def replay(self) -> None:
        self.graph.replay()


class Cuda:
    """The operations of kernels.py on CUDA kernels."""

    pads = True  # a step's sizes, before it is recorded: a graph is costly, and wants fixed sizes
    is_async = True  # calls return before their work is done: the next step may be launched before this one's ids come

    def __init__(self, library: ctypes.CDLL, device: str):
        self.device = torch.device(device)
        self.kernels = read_kernels(library)
        self.recording: Recording | None = None
        self.is_emulated = self.device.type == "cpu"
        self.block_bytes = WIDE_BLOCK_BYTES  # memory that a block may share
        if not self.is_emulated:
            self.block_bytes = torch.cuda.get_device_properties(self.device).shared_memory_per_block_optin

    def new_recorder(self) -> Callable[[], Recording | Graph]:
        if self.is_emulated:
            return partial(Recording, self)
        torch.cuda.current_blas_handle()  # made now: inside a graph that is captured it could not be
        return partial(Graph, torch.cuda.graph_pool_handle())

    def call(self, name: str, *arguments) -> None:
        """Launches a kernel on the current stream. Tensors must be what kernels.cuh says, without gaps."""
        kernel = self.kernels[name]
        values = []
        for (label, _, dtype), value in zip(kernel.parameters, arguments):
            if isinstance(value, Tensor):
                is_here = value.device.type == self.device.type
                if not is_here or not value.is_contiguous() or dtype not in (None, value.dtype):
                    raise ValueError(f"{name}: {label} must be a contiguous tensor of {dtype} on {self.device}")
                value = value.data_ptr()
            values.append(value)
        stream = None if self.is_emulated else torch.cuda.current_stream().cuda_stream
        self.run(lambda: check(name, kernel.function(*values, stream)), arguments)

    def run(self, work: Callable[[], object], kept: object = None) -> None:
        """Does it now, and again with each replay; what it reads and writes is kept for that."""
        work()
        if self.recording is not None:
            self.recording.calls.append(lambda kept=kept: work())

    def size(self, name: str, *arguments: int) -> int:
        return self.kernels[name].function(*arguments)

    def fresh(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=self.device)

    # Matrices --------------------------------------------------------------------------------------------------------

    def pack(self, tensors: Sequence[tuple[str, tuple[int, int], Tensor]]) -> Packed:
        """Matrices (O, I) that read the same input, as (format, shape, bytes of the file): those of one format become
        one part."""
        columns = tensors[0][1][1]
        joined: list[tuple[str, int, list[Tensor]]] = []
        for name, (rows, _), raw in tensors:
            if joined and joined[-1][0] == name:
                joined[-1] = name, joined[-1][1] + rows, [*joined[-1][2], raw]
            else:
                joined.append((name, rows, [raw]))
        parts = tuple(self.pack_part(name, rows, columns, torch.cat([raw.flatten() for raw in raws]))
                      for name, rows, raws in joined)
        return Packed(parts, sum(part.rows for part in parts), columns)

    def pack_part(self, name: str, rows: int, columns: int, raw: Tensor) -> Part:
        raw = raw.view(torch.uint8).to(self.device)
        if name in ("f32", "bf16"):
            return Part(None, rows, raw.view(FORMATS_PLAIN[name]).view(rows, columns))
        format = FORMATS[name].ggml_id
        num_bytes = self.size("pack_bytes", format, rows, columns)
        if not num_bytes:
            raise ValueError(f"the CUDA kernels do not serve a matrix {rows} x {columns} of {name}: use --device cpu")
        memory = self.fresh(num_bytes, dtype=torch.uint8)
        self.call("pack", memory, raw, format, rows, columns)
        return Part(format, rows, memory)

    def first_outputs(self, weights: Packed, num: int) -> Packed:
        """The matrix of the first `num` outputs alone, a multiple of 16, on the same memory."""
        part, = weights.parts
        memory = part.memory[:num]
        if part.format is not None:
            memory = part.memory[: self.size("pack_bytes", part.format, num, weights.columns)]
        return Packed((Part(part.format, num, memory),), num, weights.columns)

    def linear(self, x_TI: Tensor, weights: Packed, bias_O: Tensor | None = None,
               num_exact: int | None = None) -> Tensor:
        """Rows from `num_exact` on are computed as the others: what could be rounded for speed is exact here."""
        y_TO = self.fresh(len(x_TI), weights.rows)
        self.multiply(y_TO, x_TI, weights, bias_O, accumulate=False)
        return y_TO

    def linear_add_(self, y_TO: Tensor, x_TI: Tensor, weights: Packed, bias_O: Tensor | None = None,
                    num_exact: int | None = None) -> None:
        self.multiply(y_TO, x_TI, weights, bias_O, accumulate=True)

    def multiply(self, y_TO: Tensor, x_TI: Tensor, weights: Packed, bias_O: Tensor | None, accumulate: bool) -> None:
        T, columns = x_TI.shape
        if columns != weights.columns or y_TO.shape != (T, weights.rows):
            raise ValueError(f"linear: x is {tuple(x_TI.shape)} and y {tuple(y_TO.shape)} but the weights are "
                             f"({weights.rows}, {weights.columns})")
        quantized = None
        if any(part.format is not None for part in weights.parts):
            quantized = self.fresh(self.size("quantized_bytes", T, columns), dtype=torch.uint8)
            self.call("quantize", quantized, x_TI, T, columns)
        column = 0
        for part in weights.parts:
            bias = None if bias_O is None else bias_O[column : column + part.rows]
            if part.format is None and part.memory.dtype == torch.bfloat16 and T <= FEW_ROWS and columns % 8 == 0:
                self.call("dense", y_TO, x_TI, part.memory, bias, T, part.rows, columns, column, weights.rows,
                          int(accumulate))
            elif part.format is None:
                self.run(lambda part=part, bias=bias, y_TO=y_TO[:, column : column + part.rows]:
                         multiply_plain(y_TO, x_TI, part.memory, bias, accumulate))
            else:
                self.call("matmul", y_TO, quantized, part.memory, bias, part.format, T, part.rows, columns, column,
                          weights.rows, int(accumulate))
            column += part.rows

    def embed(self, table: Packed, token_T: Tensor) -> Tensor:
        part, = table.parts
        x_TD = self.fresh(len(token_T), table.columns)
        if part.format is None:
            self.run(lambda: x_TD.copy_(F.embedding(token_T, part.memory)))
        else:
            self.call("embed", x_TD, part.memory, token_T, part.format, len(token_T), part.rows, table.columns)
        return x_TD

    # Rows ------------------------------------------------------------------------------------------------------------

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        if x_TD.dim() != 2 or x_TD.shape[1:] != weight_D.shape:
            raise ValueError(f"rms_norm: x is {tuple(x_TD.shape)} but the weights are {tuple(weight_D.shape)}")
        out_TD = self.fresh(*x_TD.shape)
        self.call("rms_norm", out_TD, x_TD, weight_D, *x_TD.shape, eps)
        return out_TD

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        T, width = x_T2F.shape
        act_TF = self.fresh(T, width // 2)
        self.call("silu_mul", act_TF, x_T2F, T, width // 2)
        return act_TF

    def copy(self, x_TD: Tensor) -> Tensor:
        out_TD = self.fresh(*x_TD.shape)
        self.run(lambda: out_TD.copy_(x_TD))
        return out_TD

    def group_by_expert(self, expert_T: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Places of tokens sorted by their expert, in the order of the tokens within one, and where each begins."""
        order_T = self.fresh(len(expert_T), dtype=torch.int64)
        starts = self.fresh(num_experts + 1, dtype=torch.int64)
        self.call("group_by_expert", order_T, starts, expert_T, len(expert_T), num_experts)
        return order_T, starts

    # Attention -------------------------------------------------------------------------------------------------------

    def new_kv(self, num_pages: int, page_size: int, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype,
               device: str | torch.device, group: int) -> KV:
        if dtype != torch.bfloat16:
            raise ValueError(f"--cache-dtype is {str(dtype).removeprefix('torch.')} but the CUDA kernels keep keys and "
                             "values in bfloat16: leave it out")
        widths = [self.size("kv_width", dim) for dim in (k_dim, v_dim)]
        if not all(widths):
            raise ValueError(f"heads are {k_dim} and {v_dim} wide but the CUDA kernels serve even widths up to 256: "
                             "use --device cpu")
        if max(widths) > 128 and self.block_bytes < WIDE_BLOCK_BYTES:
            raise ValueError(f"heads are {k_dim} wide and more than 128 take {WIDE_BLOCK_BYTES >> 10} KB a block, but "
                             f"the GPU has {self.block_bytes >> 10}: use --kernels torch or --device cpu")
        return KV(*(self.fresh(num_pages, heads, page_size, width, dtype=dtype) for width in widths), page_size, group)

    def rope_angles(self, position_T: Tensor, inv_freq: Tensor, scale: float,
                    dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = (self.fresh(len(position_T), len(inv_freq)) for _ in range(2))
        self.call("rope_angles", cos, sin, position_T, inv_freq, len(position_T), len(inv_freq), scale)
        return cos, sin  # float32, as all activations

    def rope_store_(self, kv: KV, qkv_TX: Tensor, angles: tuple[Tensor, Tensor], slot_T: Tensor,
                    head_dim: int) -> Tensor:
        T, kv_heads, half = len(qkv_TX), kv.k.shape[1], angles[0].shape[1]
        heads = qkv_TX.shape[1] // head_dim - 2 * kv_heads
        q_THA = self.fresh(T, heads, head_dim)
        self.call("rope_store", q_THA, kv.k, kv.v, qkv_TX, *angles, slot_T, T, heads, kv_heads, head_dim, half,
                  kv.page_size)
        return q_THA

    def move_kv_(self, kv: KV, from_T: Tensor, to_T: Tensor) -> None:
        self.call("move_kv", kv.k, kv.v, from_T, to_T, len(from_T), *kv.k.shape[1:2], kv.k.shape[3], kv.page_size)

    def attention(self, q_THA: Tensor, kv: KV, batch, scale: float, window: int = 0) -> Tensor:
        (T, heads, head_dim), num_requests, table = q_THA.shape, len(batch.lease_S), batch.tables[kv.group]
        out_THA = self.fresh(*q_THA.shape)
        workspace = self.fresh(self.size("attention_bytes", T, num_requests, heads, kv.k.shape[1], head_dim,
                                         table.shape[1] * kv.page_size), dtype=torch.uint8)
        self.call("attention", out_THA, q_THA, kv.k, kv.v, table, batch.lease_S, batch.starts_S1, batch.lengths_S,
                  batch.ancestors_T, workspace, T, num_requests, heads, kv.k.shape[1], head_dim, kv.page_size,
                  table.shape[1], scale, window)
        return out_THA

    # The draw --------------------------------------------------------------------------------------------------------

    def argmax(self, x_LV: Tensor) -> Tensor:
        id_L = self.fresh(len(x_LV), dtype=torch.int64)
        self.call("argmax", id_L, x_LV, *x_LV.shape)
        return id_L

    def draw(self, x_LV: Tensor, rules: Sequence[DrawRules], keys: Sequence[int]) -> Tensor:
        """On the device: `fetch` brings them. What is sent for it may be dropped on return, since torch gives memory of
        the device only to work that comes after the draw."""
        L, V = x_LV.shape
        id_L = self.fresh(L, dtype=torch.int64)
        kept: list[Tensor] = []
        rows = b"".join(self.rules_row(row, key, kept) for row, key in zip(rules, keys, strict=True))
        if len(rows) != L * RULES.size or any(row.vocab > V for row in rules):
            raise ValueError(f"draw: {L} rows of {V} logits need as many rules, of no more ids")
        rules_L = sent(torch.frombuffer(bytearray(rows or bytes(1)), dtype=torch.uint8), self.device)
        workspace = self.fresh(self.size("draw_bytes", L, V), dtype=torch.uint8)
        self.call("draw", id_L, x_LV, rules_L, workspace, L, V)
        return id_L

    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        """Waits for what was launched before, and for nothing that is launched after: the copy is under way by then."""
        if self.is_emulated:
            return x.cpu
        here, done = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
        here.copy_(x, non_blocking=True)
        done.record()

        def read() -> Tensor:
            done.synchronize()
            return here

        return read

    def rules_row(self, rules: DrawRules, key: int, kept: list[Tensor]) -> bytes:
        """kernels.h's DrawRules in device memory; the tensors that it points to are `kept`."""
        def pointer(tensor: Tensor | None) -> int:
            if tensor is None:
                return 0
            kept.append(sent(tensor, self.device))
            return kept[-1].data_ptr()

        if rules.bias_ids is not None and not all(0 <= id < rules.vocab for id in rules.bias_ids.tolist()):
            raise ValueError("draw: a bias for an id out of range")
        return RULES.pack(rules.vocab, rules.temperature, rules.top_k, rules.top_p,
                          math.log(rules.min_p) if rules.min_p > 0 else -math.inf, rules.repetition_penalty,
                          rules.presence_penalty, rules.frequency_penalty, pointer(rules.seen_V),
                          pointer(rules.count_V), pointer(rules.bias_ids), pointer(rules.biases),
                          0 if rules.bias_ids is None else len(rules.bias_ids), key)

    def distribution(self, x_LV: Tensor, rules: Sequence[DrawRules]) -> Tensor:
        """On the host, where those who judge drafts by it compute."""
        return kernels.distribution(x_LV.cpu(), rules)


WIDE_BLOCK_BYTES = 163 << 10  # what attention may take at most: a block of sm_80 has so much, of sm_86 and 89 only 99
FEW_ROWS = 16  # up to here one reading of the weights is what a product costs; cuBLAS does better with more
FORMATS_PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16}
RULES = struct.Struct("qdqddddd4QqQ")


def multiply_plain(y_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, accumulate: bool) -> None:
    product_TO = F.linear(x_TI.to(weight_OI.dtype), weight_OI).float()
    if bias_O is not None:
        product_TO += bias_O
    if accumulate:
        y_TO += product_TO
    else:
        y_TO.copy_(product_TO)


def check(name: str, status: int) -> None:
    if status:
        raise ValueError(f"{name}: {REASONS.get(status, f'status {status}')}")
