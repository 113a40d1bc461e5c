"""The kernels of csrc/ under the names and signatures of kernels.py, and how they are compiled.

Owns the build: sources are compiled once, by torch.utils.cpp_extension, into a folder named after their contents; a
start finds it there. Knows nothing of layers or requests. `load` gives the operations; kernels.py is their reference.

Activations are float32. Weights are `Packed`: quantized blocks, bfloat16 or float32. Each row of a result has the same
bits alone or among others.
"""

import fcntl
import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from kernels import KV, fetch
from quant import FORMATS

SOURCES = Path(__file__).resolve().parent / "csrc"
# Fused multiply-adds only where a kernel says so. The C++ standard is cpp_extension's: what torch's own headers need.
FLAGS = ("-O3", "-ffp-contract=off")
NAME = "quire_native"
UNFINISHED = "unfinished-"  # how folders' names begin while somebody compiles into them


def load(on_build: Callable[[], None] = lambda: None) -> "Native":
    """The operations, compiled if need be as `library` does."""
    path = library(on_build)
    spec = importlib.util.spec_from_loader(NAME, importlib.machinery.ExtensionFileLoader(NAME, str(path)))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Native(module)


def library(on_build: Callable[[], None] = lambda: None) -> Path:
    """The shared library of the kernels; compiled first if these sources never were, which `on_build` is told. OSError
    or RuntimeError if they cannot be."""
    return built(build_folder(), NAME, compile_into, on_build)


def built(folder: Path, name: str, compile_into: Callable[[Path], None], on_build: Callable[[], None]) -> Path:
    """The library `name` in `folder`, which `compile_into` compiles if it is not there yet; `on_build` is told, also if
    another process does it and this one waits."""
    path = folder / f"{name}.so"
    if not path.exists():
        on_build()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its holder, however that ends
            if not path.exists():
                build(folder, compile_into)
    return path


def build_folder() -> Path:
    """Where these sources' compiled form lies."""
    key = blake2b(f"{torch.__version__} {sys.version} {FLAGS}".encode(), digest_size=8)
    for path in source_files():
        key.update(path.name.encode() + path.read_bytes())
    return build_root() / f"native-{key.hexdigest()}"


def build_root() -> Path:
    """Where compiled code lies: beside the sources, or where that cannot be written in the user's cache."""
    root = SOURCES.parent
    if not os.access(root, os.W_OK):
        root = Path("~/.cache/quire").expanduser()
    return root / "build"


def source_files() -> list[Path]:
    return sorted(path for pattern in ("*.h", "binding.cpp", "cpu/*") for path in SOURCES.glob(pattern))


def build(folder: Path, compile_into: Callable[[Path], None]) -> None:
    """Compiles into `folder`, which appears whole or not at all. The caller holds the lock."""
    for left in folder.parent.glob(f"{UNFINISHED}*"):  # by a build that was killed
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        compile_into(temporary)
        for path in temporary.iterdir():
            if path.suffix != ".so":
                path.unlink()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def compile_into(folder: Path) -> None:
    compile_extension(name=NAME, sources=[str(path) for path in source_files() if path.suffix == ".cpp"],
                      extra_cflags=list(FLAGS), build_directory=str(folder))


def compile_extension(settings: Mapping[str, str] = {}, **arguments) -> None:
    """In a process of its own: cpp_extension brings setuptools, which does not suit every program it would be loaded
    into. `settings` are environment variables that it heeds. RuntimeError with what the compiler said. Who is
    interrupted or terminated leaves no compiler behind."""
    code = f"from torch.utils.cpp_extension import load; load(**{arguments}, is_python_module=False)"
    # pip puts ninja beside the interpreter; it is looked for on PATH alone.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"PATH": path} | dict(settings), process_group=0) as process:
        try:
            said = process.communicate()[1]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        lines = said.strip().splitlines() or ["no reason given"]
        raise RuntimeError(next((line for line in lines if TELLING.search(line)), lines[-1]))


# Lines of what compilers and linkers say that tell a person what went wrong.
TELLING = re.compile(r"(?<!collect2: )error *: |fatal *: |not found|cannot find")


def cuda_toolkit() -> Path | None:
    """The folder of the CUDA toolkit: which CUDA_HOME or CUDA_PATH names, else of the nvcc on the PATH, else the usual
    one. cpp_extension looks in the same places, but takes an nvcc that only calls another for the toolkit's own."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = f"{named}/bin" if named else os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    nvcc = shutil.which("nvcc", path=places)
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return Path(top[1] if top else Path(nvcc).parent.parent).resolve()


class Native:
    """The operations of kernels.py on compiled kernels."""

    def __init__(self, module):
        self.module = module
        self.embed, self.rms_norm, self.silu_mul = module.embed, module.rms_norm, module.silu_mul
        self.copy, self.first_outputs = module.copy, module.first_outputs
        self.linear, self.linear_add_ = module.linear, module.linear_add_
        self.draw, self.distribution, self.fetch = module.draw, module.distribution, fetch
        self.set_threads, self.set_isa = module.set_threads, module.set_isa
        self.new_recorder = lambda: partial(module.Recording, module.Buffers())

    def pack(self, tensors: Sequence[tuple[str, tuple[int, int], Tensor]]):
        """Matrices (O, I) that read the same input, as (format, shape, bytes of the file): one Packed."""
        parts = []
        for name, (rows, columns), raw in tensors:
            format = FORMATS[name]
            raw_bytes = rows * columns // format.block * format.nbytes
            parts.append((format.ggml_id, rows, self.module.pack(raw, format.ggml_id, rows, columns, raw_bytes)))
        return self.module.Packed(parts, tensors[0][1][1])

    def new_kv(self, num_pages: int, page_size: int, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype,
               device: str | torch.device, group: int) -> KV:
        nbytes = [self.module.kv_head_bytes(dim, page_size, dtype) for dim in (k_dim, v_dim)]
        return KV(*(torch.empty(num_pages, heads, n // dtype.itemsize, dtype=dtype) for n in nbytes), page_size, group)

    def rope_angles(self, position_T: Tensor, inv_freq: Tensor, scale: float,
                    dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.module.rope_angles(position_T, inv_freq, scale)  # float32, as all activations

    def rope_store_(self, kv: KV, qkv_TX: Tensor, angles: tuple[Tensor, Tensor], slot_T: Tensor,
                    head_dim: int) -> Tensor:
        heads = qkv_TX.shape[1] // head_dim - 2 * kv.k.shape[1]
        return self.module.rope_store_(kv.k, kv.v, qkv_TX, *angles, slot_T, heads, head_dim, kv.page_size)

    def move_kv_(self, kv: KV, from_T: Tensor, to_T: Tensor) -> None:
        self.module.move_kv_(kv.k, kv.v, from_T, to_T, kv.page_size)

    def attention(self, q_THA: Tensor, kv: KV, batch, scale: float, window: int = 0) -> Tensor:
        return self.module.attention(q_THA, kv.k, kv.v, batch.tables[kv.group], batch.lease_S, batch.starts_S1,
                                     batch.lengths_S, batch.ancestors_T, kv.page_size, scale, window)
