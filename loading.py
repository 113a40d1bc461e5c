"""What the flags describe: the model's files, its tokenizer, how it computes, and an engine of them.

Owns how a command line becomes objects, and what is checked before anything large is read. Knows nothing of prompts or
answers. Each part imports torch where it needs it: `open_checkpoint` and `open_tokenizer` do not. Start at
`load_engine`.
"""
from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flags import DTYPE_NBYTES, UsageError
from terminal import Download, warn

if TYPE_CHECKING:
    import torch

    from checkpoint import Checkpoint
    from engine import Engine, EngineConfig
    from families import ModelConfig
    from gpu import Cuda
    from model import Model
    from native import Native
    from sampling import SamplingParams
    from scheduler import AdmissionClass
    from speculative import Drafter
    from tokenizer import Tokenizer

DEFAULT_MODELS_FOLDER = "~/.cache/quire"
NATIVE_DTYPES = ("quantized", "bfloat16", "float32")  # of weights; activations are float32
CUDA_DTYPES = ("quantized", "bfloat16")
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def load_engine(args: argparse.Namespace) -> Engine:
    """The engine that the flags describe. What is wrong with them is found before anything large is read."""
    import torch

    import kernels
    from engine import Engine
    from model import load_model

    gc.freeze()  # what torch brought stays: collections that look through it take 0.1 s of reading a vocabulary
    check_trace(args)
    settle_device(args)
    on_step = None if args.trace is None else trace_writer(args.trace)
    engine_config = make_engine_config(args)
    checkpoint = open_checkpoint(args)
    config = checkpoint.config
    if args.context is not None and args.context > config.max_context:
        raise UsageError(f"--context is {args.context} but the model covers {config.max_context} tokens: lower it")
    tokenizer = open_tokenizer(checkpoint, args)
    sampling_params(args, vocab=min(config.vocab, tokenizer.vocab_size))
    draft = open_draft(args, tokenizer)
    if args.threads is not None or "OMP_NUM_THREADS" not in os.environ:  # which torch has heeded already
        torch.set_num_threads(args.threads or usable_cores())
    keep_large_blocks_apart()
    is_native = arithmetic(config, args)[-1]
    if is_native and args.device == "cuda":
        check_cuda_flags(args)
    ops = (load_native(args) if is_native else None) or kernels
    checkpoints = [checkpoint] if draft is None else [checkpoint, draft]
    dtypes = [matrix_dtype(each.config, ops, args) for each in checkpoints]
    if draft is not None:
        c, cached = draft.config, dtypes[1] or torch.bfloat16
        token_bytes = 2 * len(c.layers) * c.kv_heads * c.head_dim * cached.itemsize
        engine_config = replace(engine_config, drafter_token_bytes=token_bytes)
    check_memory(checkpoints, dtypes, engine_config, args)
    model = load_model(checkpoint, dtypes[0], args.device, args.context, ops)
    warn(model.notes)
    engine = Engine(model, engine_config, tokenizer, name=checkpoint.path.name, generation=checkpoint.generation)
    if (drafter := make_drafter(engine, checkpoint, draft, dtypes[-1], args)) is not None:
        engine.draft_with(drafter)
    engine.on_step = on_step
    return engine


def matrix_dtype(config: ModelConfig, ops: ModuleType | Native | Cuda, args: argparse.Namespace) -> torch.dtype | None:
    """What a model's matrices are held in for these operations; None: blocks as they are stored."""
    import torch

    dtype, _, is_served = arithmetic(config, args)
    if not hasattr(ops, "pack"):
        return getattr(torch, "bfloat16" if dtype == "quantized" else dtype)
    if not serves_heads(config, args):
        raise UsageError(f"--draft has heads {config.head_dim} wide but the model's kernels serve even ones of at most "
                         f"{widest_head(args)}: take another draft model, or --kernels torch")
    return None if dtype == "quantized" else getattr(torch, dtype if is_served else "float32")


def check_memory(checkpoints: Sequence[Checkpoint], dtypes: Sequence[torch.dtype | None], engine_config: EngineConfig,
                 args: argparse.Namespace) -> None:
    """ValueError, with what would fit, if memory has no room for the weights of a model, and of its draft model if
    there is one, in `dtypes` (None: as they are stored), and the cache beside them."""
    import torch

    from engine import count_pages
    from kvcache import free_memory_bytes
    from model import kv_specs

    config, free_bytes = checkpoints[0].config, free_memory_bytes(args.device)
    counts = [sum(math.prod(tensor.shape) for tensor in each.tensors.values()) for each in checkpoints]
    stored = [sum(tensor.nbytes for tensor in each.tensors.values()) for each in checkpoints]
    num_bytes = sum(nbytes if dtype is None else count * dtype.itemsize
                    for nbytes, count, dtype in zip(stored, counts, dtypes))
    if num_bytes > free_bytes:
        smaller = {f"--dtype {name}": sum(counts) * nbytes for name, nbytes in DTYPE_NBYTES.items()}
        if all(each.config.dtype == "quantized" for each in checkpoints):
            smaller["--dtype auto"] = sum(stored)
        fitting = [f"{flag} takes {nbytes / 1e9:.1f}" for flag, nbytes in smaller.items() if nbytes <= free_bytes]
        name = "as they are stored" if dtypes[0] is None else f"in {str(dtypes[0]).removeprefix('torch.')}"
        whose = " of the model and of --draft" if len(checkpoints) > 1 else ""
        raise ValueError(f"the weights{whose} {name} take {num_bytes / 1e9:.1f} GB but {free_bytes / 1e9:.1f} are "
                         f"free: {fitting[-1] if fitting else 'free some, or take a smaller model'}")
    cache_dtype = engine_config.cache_dtype or dtypes[0] or torch.bfloat16
    context = args.context or config.context
    count_pages(engine_config, kv_specs(config), cache_dtype, context, args.device, num_bytes)


def open_draft(args: argparse.Namespace, tokenizer: Tokenizer) -> Checkpoint | None:
    """The file of the draft model that --draft names, if it names one; ValueError if its tokens are others."""
    from vocab import load_tokenizer

    method = (args.draft or "").partition(":")[0]
    if args.draft is None and (args.verify != "coupled" or args.draft_chances):
        raise UsageError("--verify and --draft-chances need --draft: name a drafter or leave them out")
    if args.draft_tree and method not in WITH_TREES:
        raise UsageError(f"--draft-tree needs --draft {', '.join(WITH_TREES)}: leave it out")
    if args.draft_tree and args.draft_tokens >= 64:
        raise UsageError(f"--draft-tokens is {args.draft_tokens} but a tree has at most 63: lower it")
    if args.draft is None or method in ("ngram", *WITH_TREES):
        return None
    checkpoint = open_checkpoint(argparse.Namespace(**vars(args) | {"model": args.draft}))
    theirs = load_tokenizer(checkpoint)
    for id in range(max(theirs.vocab_size, tokenizer.vocab_size)):  # one may be padded further than the other
        pieces = [by.piece(id) if id < by.vocab_size else "" for by in (theirs, tokenizer)]
        if pieces[0] != pieces[1]:
            raise ValueError(f"--draft {args.draft} has token {id} as {pieces[0]!r} but the model as {pieces[1]!r}: "
                             "both must have the same tokens")
    return checkpoint


WITH_TREES = ("mtp", "medusa", "eagle")


def make_drafter(engine: Engine, checkpoint: Checkpoint, draft: Checkpoint | None, draft_dtype: torch.dtype | None,
                 args: argparse.Namespace) -> Drafter | None:
    """The drafter that --draft names, for a model of that checkpoint. A draft model is loaded when the first draft is
    wanted, its matrices in `draft_dtype`."""
    import heads
    from lookahead import Follower, Medusa, TreeShape
    from model import load_model
    from speculative import DraftModel, Manner, Ngram

    model, is_coupled = engine.model, args.verify == "coupled"
    manner = Manner(is_coupled, keeps_probs=not is_coupled or args.draft_chances)
    method, _, folder = (args.draft or "").partition(":")
    shape = TreeShape(*args.draft_tree) if args.draft_tree else None
    if draft is not None:
        context = min(model.context, draft.config.max_context)

        def load() -> Model:
            return load_model(draft, draft_dtype, model.device, context, model.ops)

        return DraftModel(draft.path.name, load, model.config.vocab, engine.cache.num_pages, engine.config.page_size,
                          engine.config.max_requests, manner)
    if method == "medusa":
        return Medusa(heads.open_medusa(folder, model), model, shape, manner)
    if method in ("eagle", "mtp"):
        network = (heads.open_eagle(folder, model) if method == "eagle"
                   else heads.open_mtp(checkpoint, model))
        return Follower(network, model, shape, manner)
    return Ngram() if method == "ngram" else None


def trace_writer(path: str) -> Callable[[Engine, dict], None]:
    file = open(path, "w", encoding="utf-8", buffering=1)

    def write(engine: Engine, step: dict) -> None:
        try:
            file.write(json.dumps(step, ensure_ascii=False) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None

    return write


def check_trace(args: argparse.Namespace) -> None:
    """UsageError if --trace would write over what the command reads or writes."""
    files = args.file if isinstance(getattr(args, "file", None), list) else [getattr(args, "file", None)]
    for path in (*files, getattr(args, "input", None), getattr(args, "output", None)):
        if args.trace is not None and path not in (None, "-") and Path(path).resolve() == Path(args.trace).resolve():
            raise UsageError(f"--trace would overwrite {path}: name another file")


def keep_large_blocks_apart() -> None:
    """Has glibc map blocks of 4 MB and more one by one. By itself it stops doing so once such a block was freed, and
    weights then lie between gaps that nothing fills: 1.1 GB more for a model of 3.6."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other systems have none
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 4 << 20)


def settle_device(args: argparse.Namespace) -> None:
    """Makes of "auto" what there is. UsageError if what was named is not there."""
    import torch

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda":
        import gpu
        try:
            gpu.check_device()
        except ValueError as error:
            raise UsageError(str(error)) from None


def check_cuda_flags(args: argparse.Namespace) -> None:
    """UsageError for what the CUDA kernels would have to leave without effect."""
    only = {"--prefill": (args.prefill, "exact"), "--cache-dtype": (args.cache_dtype, "bfloat16")}
    for flag, (given, served) in only.items():
        if given not in (served, "auto"):
            raise UsageError(f"{flag} is {given} but the CUDA kernels serve {served} alone: leave it out, or use "
                             "--kernels torch or --device cpu")


def make_engine_config(args: argparse.Namespace) -> EngineConfig:
    import torch

    from engine import EngineConfig

    max_step_tokens, max_requests = (2048, 256) if args.device == "cuda" else (512, 64)
    try:
        return EngineConfig(
            page_size=args.page_size, num_pages=args.num_pages, cache_memory_gb=args.cache_memory,
            cache_dtype=None if args.cache_dtype == "auto" else getattr(torch, args.cache_dtype),
            max_step_tokens=args.max_step_tokens or max_step_tokens, max_requests=args.max_requests or max_requests,
            prefix_cache=not args.no_prefix_cache, prefill=args.prefill,
            draft_tokens=args.draft_tokens, verify=args.verify, draft_chances=args.draft_chances,
            classes=admission_classes(args.classes),
            usual_class="batch" if args.command == "batch" else "interactive")
    except ValueError as error:
        raise UsageError(str(error)) from None


def admission_classes(given: Sequence[tuple[str, dict]]) -> tuple[AdmissionClass, ...]:
    """The default classes with the settings that --class gives, and the classes that it adds."""
    from scheduler import DEFAULT_CLASSES, AdmissionClass

    classes = {cls.name: cls for cls in DEFAULT_CLASSES}
    for name, settings in given:
        classes[name] = replace(classes.get(name, AdmissionClass(name)), **settings)
    return tuple(classes.values())


def sampling_params(args: argparse.Namespace, vocab: int | None = None) -> SamplingParams:
    """What the sampling flags say: checked before a model is loaded, ids once the size of its vocabulary is known.

    chat and batch lay the same flags over defaults of their own."""
    from sampling import SamplingParams

    base = SamplingParams() if args.command == "generate" else SamplingParams(max_tokens=None)
    try:
        params = SamplingParams.from_fields(args.sampling, base)
        if vocab is not None:
            params.check_ids(vocab)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return params


def find_model(args: argparse.Namespace) -> Path:
    import hub

    name = os.environ.get("QUIRE_MODEL") or None if args.model is None else args.model
    with Download() as progress:
        return hub.resolve(name, models_folder(), progress)


def open_checkpoint(args: argparse.Namespace) -> Checkpoint:
    import checkpoint

    opened = checkpoint.open_checkpoint(find_model(args))
    warn(opened.notes)
    return opened


def open_tokenizer(checkpoint: Checkpoint, args: argparse.Namespace) -> Tokenizer:
    from vocab import load_tokenizer

    tokenizer = load_tokenizer(checkpoint, Path(args.tokenizer) if args.tokenizer is not None else None)
    warn(tokenizer.notes)
    return tokenizer


def models_folder() -> Path:
    return Path(os.environ.get("QUIRE_MODELS") or DEFAULT_MODELS_FOLDER).expanduser()


def arithmetic(config: ModelConfig, args: argparse.Namespace) -> tuple[str, str, bool]:
    """What it computes with: the type of the weights ("quantized": blocks as they are stored) and of the cache, and
    whether native kernels do it. Through torch a quantized file is computed in bfloat16."""
    dtype = config.dtype if args.dtype == "auto" else args.dtype
    dtypes = CUDA_DTYPES if is_on_cuda(args) else NATIVE_DTYPES
    native = args.kernels != "torch" and dtype in dtypes and serves_heads(config, args)
    if args.kernels == "native" and not native:
        raise UsageError(f"--kernels native does not serve weights in {dtype} and heads {config.head_dim} wide: it "
                         f"needs {', '.join(dtypes)}, and even heads of at most {widest_head(args)}; leave it out")
    if dtype == "quantized" and not native:
        dtype = "bfloat16"
    cache_dtype = {"quantized": "bfloat16"}.get(dtype, dtype) if args.cache_dtype == "auto" else args.cache_dtype
    return dtype, cache_dtype, native


def is_on_cuda(args: argparse.Namespace) -> bool:
    return getattr(args, "device", "cpu") == "cuda"


def serves_heads(config: ModelConfig, args: argparse.Namespace) -> bool:
    """Whether native kernels do."""
    return config.head_dim % 2 == 0 and config.head_dim <= widest_head(args)


def widest_head(args: argparse.Namespace) -> int:
    return 256 if is_on_cuda(args) else 512


def load_native(args: argparse.Namespace) -> Native | Cuda | None:
    """The native kernels, compiled if need be; None, and a line that says so, if they cannot be."""
    import torch

    import native

    def tell() -> None:
        warn(["compiling the kernels, once (a minute)"])

    if args.device == "cuda":
        import gpu
        return gpu.load(tell)
    try:
        ops = native.load(tell)
        ops.set_threads(torch.get_num_threads())
        return ops
    except (OSError, RuntimeError, ImportError) as error:
        reason = str(error) or type(error).__name__
        if args.kernels == "native":
            raise ValueError(f"the native kernels cannot be compiled ({reason}): install a C++ compiler, or leave out "
                             "--kernels") from error
        warn([f"the native kernels cannot be compiled ({reason}): torch computes, much slower"])
        return None


def usable_cores() -> int:
    """Physical cores that this process may use: hyperthreads count once, and a container's quota is kept."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    siblings = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus]
    num_cores = len({path.read_text() for path in siblings}) if all(p.exists() for p in siblings) else len(cpus)
    return max(1, min(num_cores, int(min(cpu_quota(), len(cpus)))))


def cpu_quota() -> float:
    """CPUs whose time the control group may use up; infinite without a limit."""
    cgroup = Path("/sys/fs/cgroup")
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / f"cpu/cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf
