"""Measurements: perplexity, and what the engine does in a second next to what this machine could do at most.

Owns the rules of measuring and the printing of results. It drives the engine from outside as any caller would, and
knows of the model only how many bytes and operations a token costs. A workload is a row of WORKLOADS.
Start at `main`; `perplexity` stands alone at the end.
"""

import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from engine import Engine
from model import Linear, Model
from sampling import SamplingParams
from scheduler import Request
from terminal import decode_utf8

REPEATS = 5
SECONDS_PER_WORKLOAD = 45   # then no further repeat: all workloads together take under ten minutes
GIB = 2**30
MATMUL_WIDTH = {"cpu": 1024, "cuda": 8192}
LOGIT_ROWS = 64   # rows as wide as the vocabulary that perplexity works on at once


@dataclass(frozen=True)
class Workload:
    """`requests` requests at once, each of `prompt_tokens` random ids answered with `generated_tokens`.

    The first `shared_tokens` of the prompts are the same. `variant` tells rows of one name apart. With `spread`, the
    numbers of tokens are means: each request draws its own, up to that much more or less."""

    name: str
    prompt_tokens: int
    generated_tokens: int
    interval: Callable[[Sequence[Request]], tuple[int, float]]   # the tokens that count, and the seconds they took
    requests: int = 1
    shared_tokens: int = 0
    variant: str | None = None
    spread: int = 0

    @property
    def decodes(self) -> bool:
        return self.interval in (decode_interval, answered_interval)


def prefill_interval(requests: Sequence[Request]) -> tuple[int, float]:
    """Prompt tokens, from submission to the first token."""
    return (sum(len(request.prompt_ids) for request in requests),
            max(request.first_token_s for request in requests) - min(request.submitted_s for request in requests))


def decode_interval(requests: Sequence[Request]) -> tuple[int, float]:
    """Tokens after the first, which the prompt's last step gives, from it to the end."""
    return (sum(len(request.output_ids) - 1 for request in requests),
            max(request.finished_s for request in requests) - min(request.first_token_s for request in requests))


def served_interval(requests: Sequence[Request]) -> tuple[int, float]:
    """Prompt tokens, computed or found in the cache, from the first submission to the last answer's end."""
    return (sum(request.num_prompt for request in requests),
            max(request.finished_s for request in requests) - min(request.submitted_s for request in requests))


def answered_interval(requests: Sequence[Request]) -> tuple[int, float]:
    """Tokens of the answers, from the first submission to the last answer's end."""
    return sum(request.num_output for request in requests), served_interval(requests)[1]


WORKLOADS = (
    Workload("prefill", 512, 1, prefill_interval),
    Workload("decode", 16, 128, decode_interval),
    Workload("depth", 2048, 128, decode_interval),
    *(Workload("batch", 128, 128, decode_interval, requests) for requests in (1, 4, 8, 16, 32)),
    Workload("prefix", 1056, 8, served_interval, 32, shared_tokens=1024, variant="cached"),
    Workload("prefix", 1056, 8, served_interval, 32, shared_tokens=1024, variant="uncached"),
    Workload("mixed", 562, 562, answered_interval, 256, spread=462),
)
STALL = "stall"   # a workload that is measured by itself
NOT_BY_DEFAULT = ("mixed",)   # takes longer than all the others
PLANNED = ("draft", "startup")
PLANNED_PEERS = ("llama.cpp", "transformers", "openvino")


# ---------------------------------------------------------------------------------------------------------------------
# The command


def main(args, load_engine: Callable[..., Engine]) -> int:
    """`bench`: a table on stdout, with `args.json` one JSON document after it. Returns the exit status."""
    problem = name_problem(args.names, args.peer or ())
    if problem:
        print(f"run.py: error: {problem}", file=sys.stderr)
        return 2
    engine = load_engine(args)
    limits = machine_limits(engine.model)
    print(f"memory {limits['memory_gb_per_s']:.1f} GB/s, {limits['memory_gb_per_s_at_model_size']:.1f} at the model's "
          f"size · matmul {limits['matmul_gflops']:.0f} GFLOP/s · {torch.get_num_threads()} threads")
    print(f"{'name':<10}{'variant':<10}{'engine':<8}{'batch':>6}{'prompt':>8}{'answer':>8}{'tokens/s':>12}{'stdev':>9}"
          f"{'of limit':>10}")
    results = []
    names = args.names or [*(w.name for w in WORKLOADS if w.name not in NOT_BY_DEFAULT), STALL]
    for workload in WORKLOADS:
        if workload.name in names:
            if workload.spread:
                workload = replace(workload, requests=max(1, round(args.scale * workload.requests)))
            results.append(measure(engine, workload, limits))
            print(table_row(results[-1]), flush=True)
    if STALL in names:
        results.append(measure_stall(engine))
        print(table_row(results[-1]), flush=True)
    if args.json:
        print(json.dumps({"machine": machine(engine.model), "limits": limits, "model": engine.name,
                          "results": results}, ensure_ascii=False, allow_nan=False))
    return 1 if any("error" in result and not result["repeats"] for result in results) else 0


def name_problem(names: Sequence[str], peers: Sequence[str]) -> str | None:
    """Why these workloads or peers cannot be measured, in one line, or None."""
    built = [*dict.fromkeys(workload.name for workload in WORKLOADS), STALL]
    for kind, given, known, planned in (("workload", names, built, PLANNED), ("peer", peers, [], PLANNED_PEERS)):
        for name in given:
            if name in planned:
                return f"{kind} '{name}' is not built yet: there is {', '.join(known) or 'none'} so far"
            if name not in known:
                return f"unknown {kind} '{name}': there is {', '.join([*known, *planned])}"
    return None


def table_row(result: dict) -> str:
    head = (f"{result['name']:<10}{result.get('variant', ''):<10}{result['engine']:<8}{result['batch']:>6}"
            f"{result['prompt_tokens']:>8}{result['generated_tokens']:>8}")
    if not result["repeats"]:
        return f"{head}  failed: {result['error']}"
    fraction = "-" if result["limit_fraction"] is None else f"{result['limit_fraction']:.0%}"
    failed = f"  {result['failed']} runs failed: {result['error']}" if result["failed"] else ""
    stall = (f"  95 % of steps within {result['p95_ms']:.0f} ms, without the prompt {result['p95_ms_without']:.0f}"
             if "p95_ms" in result else "")
    return f"{head}{result['tokens_per_s']:>12.1f}{result['stdev']:>9.1f}{fraction:>10}{stall}{failed}"


# ---------------------------------------------------------------------------------------------------------------------
# A workload


def measure(engine: Engine, workload: Workload, limits: dict) -> dict:
    """One row of `results`: the median rate over repeats, after a run that warms up. A run that fails is counted in
    `failed` and takes no part in the rate; where none succeeds, `tokens_per_s` is None and `error` says why."""
    if workload.variant == "uncached":
        engine = Engine(engine.model, replace(engine.config, prefix_cache=False), engine.tokenizer)
    rates, errors = [], []
    deadline_s = time.perf_counter() + SECONDS_PER_WORKLOAD
    for repeat in range(REPEATS + 1):
        try:
            tokens, seconds = run_once(engine, workload, repeat)
            rates.append(tokens / seconds)
        except ValueError as error:
            errors.append(str(error))
        if time.perf_counter() > deadline_s:
            break
    rates = rates[1:] or rates
    at_once = replace(workload, requests=min(workload.requests, engine.config.max_requests))
    num_bytes, flops = token_cost(engine.model, at_once, engine.config.max_step_tokens)
    rate = statistics.median(rates) if rates else None
    result = {"name": workload.name, "engine": "quire", "threads": torch.get_num_threads(), "batch": workload.requests,
              "prompt_tokens": workload.prompt_tokens, "generated_tokens": workload.generated_tokens,
              "tokens_per_s": rate, "stdev": statistics.pstdev(rates) if rates else None, "repeats": len(rates),
              "failed": len(errors), "bytes_per_token": round(num_bytes), "flops_per_token": round(flops),
              "limit_fraction": rate * least_seconds(num_bytes, flops, limits) if rate else None}
    variant = {"variant": workload.variant} if workload.variant else {}
    return result | variant | ({"error": errors[0]} if errors else {})


def run_once(engine: Engine, workload: Workload, repeat: int) -> tuple[int, float]:
    """Runs the workload to its end: tokens that count, and seconds. ValueError if a request fails or falls short."""
    ids = random.Random(f"{workload.name} {repeat}")   # new in each repeat: a cached prefix would not be measured

    def about(num_tokens: int) -> int:
        return num_tokens + ids.randint(-workload.spread, workload.spread)

    shared = random_ids(ids, engine.vocab, workload.shared_tokens)
    requests = []
    for _ in range(workload.requests):
        own = random_ids(ids, engine.vocab, about(workload.prompt_tokens - workload.shared_tokens))
        params = SamplingParams(max_tokens=about(workload.generated_tokens), ignore_eos=True)
        requests.append(engine.submit(shared + own, params))
    while engine.has_work:
        engine.step()
    for request in requests:
        if request.error:
            raise ValueError(request.error)
        if request.num_output != request.params.max_tokens:
            raise ValueError(f"a request ended ({request.finish_reason}) after {request.num_output} of "
                             f"{request.params.max_tokens} tokens: raise --context")
    tokens, seconds = workload.interval(requests)
    if not tokens or seconds <= 0:
        raise ValueError(f"{workload.generated_tokens} generated tokens leave nothing to time: use more")
    return tokens, seconds


def random_ids(ids: random.Random, vocab: int, num_tokens: int) -> list[int]:
    return [ids.randrange(vocab) for _ in range(num_tokens)]


def measure_stall(engine: Engine, num_decoding: int = 16, prompt_tokens: int = 2048) -> dict:
    """How long those that decode wait for their next token while a prompt is read beside them, and without it: a row
    of `results` whose rate is the prompt's."""
    row = {"name": STALL, "engine": "quire", "threads": torch.get_num_threads(), "batch": num_decoding,
           "prompt_tokens": prompt_tokens, "generated_tokens": 1, "bytes_per_token": None, "flops_per_token": None,
           "limit_fraction": None}
    ids, decoding, rates, without, beside = random.Random(STALL), [], [], [], []

    def submit(num_tokens: int, max_tokens: int | None) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return engine.submit(random_ids(ids, engine.vocab, num_tokens), params)

    def step_ms() -> float:
        start_s = time.perf_counter()
        engine.step()
        return 1000 * (time.perf_counter() - start_s)

    try:
        decoding += [submit(128, None) for _ in range(num_decoding)]
        while any(request.num_output < 2 for request in decoding):
            engine.step()
        for _ in range(REPEATS):
            without += [step_ms() for _ in range(20)]
            prompt = submit(prompt_tokens, 1)
            while prompt.finish_reason is None:
                beside.append(step_ms())
            rates.append(prompt_tokens / (prompt.finished_s - prompt.submitted_s))
    except ValueError as error:
        return row | {"tokens_per_s": None, "stdev": None, "repeats": 0, "failed": 1, "error": str(error)}
    finally:
        for request in decoding:
            engine.abort(request)
    p95_ms, p95_ms_without = (sorted(times)[int(0.95 * len(times))] for times in (beside, without))
    return row | {"tokens_per_s": statistics.median(rates), "stdev": statistics.pstdev(rates), "repeats": len(rates),
                  "failed": 0, "p95_ms": p95_ms, "p95_ms_without": p95_ms_without}


def token_cost(model: Model, workload: Workload, step_tokens: int) -> tuple[float, float]:
    """Bytes of memory read and floating-point operations for one token of the workload, counted from the model.

    A step reads every matrix once for all its tokens, and each request's keys and values up to there. The head works
    on rows that draw a token: each one in decode, the last one in prefill. A prompt token found in the cache costs
    nothing.
    """
    if workload.decodes:
        step_rows, head_share = workload.requests, 1.0
        context = workload.prompt_tokens + workload.generated_tokens / 2
    else:
        step_rows, head_share = min(step_tokens, workload.requests * workload.prompt_tokens), 1 / workload.prompt_tokens
        context = workload.prompt_tokens / 2
    seen = [min(context, spec.window or context) for spec in model.kv_specs()]
    kv_bytes = sum(n * spec.values_per_token() for n, spec in zip(seen, model.kv_specs())) * model.cache_dtype.itemsize
    if workload.variant == "cached":
        num_found = workload.shared_tokens * (workload.requests - 1)
        computed_share = 1 - num_found / (workload.requests * workload.prompt_tokens)
    else:
        computed_share = 1.0
    num_bytes = sum(matrix.weight.nbytes for matrix in matrices(model)) + workload.requests * kv_bytes
    flops = 2 * sum(matrix.num_weights for matrix in matrices(model)) - 2 * (1 - head_share) * model.output.num_weights
    flops += 4 * model.config.heads * model.config.head_dim * sum(seen)
    if workload.interval is answered_interval:   # each token of an answer stands for its share of the prompt
        flops *= 1 + workload.prompt_tokens / workload.generated_tokens
    return computed_share * num_bytes / step_rows, computed_share * flops


def matrices(model: Model) -> list[Linear]:
    """Every matrix that a step multiplies by; the embedding table counts as the head where the two are tied."""
    return [linear for layer in model.layers
            for linear in (layer.attn_qkv, layer.attn_output, layer.ffn_gate_up, layer.ffn_down)] + [model.output]


def least_seconds(num_bytes: float, flops: float, limits: dict) -> float:
    """The least time a token can take: memory and arithmetic overlap at best (Williams et al. 2009, the roofline)."""
    return max(num_bytes / limits["memory_gb_per_s_at_model_size"], flops / limits["matmul_gflops"]) / 1e9


# ---------------------------------------------------------------------------------------------------------------------
# The machine


def machine(model: Model) -> dict:
    """What the numbers were measured on and with."""
    device = model.device.type
    return {"cpu": cpu_name(), "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "cores": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.platform(),
            "python": platform.python_version(), "torch": torch.__version__, "device": device,
            "dtype": str(model.dtype).removeprefix("torch.")}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine_limits(model: Model) -> dict:
    """What this machine does at best with the threads and the dtype in use: memory read in GB/s over a gibibyte and
    over as much as the model's matrices (caches may hold a small model), dense matmul in GFLOP/s."""
    size_bytes = sum(matrix.weight.nbytes for matrix in matrices(model))
    return {"memory_gb_per_s": read_rate(GIB, model.device),
            "memory_gb_per_s_at_model_size": read_rate(size_bytes, model.device),
            "matmul_gflops": matmul_rate(model.dtype, model.device)}


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


# ---------------------------------------------------------------------------------------------------------------------
# Perplexity


@dataclass(frozen=True)
class Perplexity:
    """`ppl` with its standard error, over `scored` ids in `windows` windows of a text of `tokens` ids."""

    ppl: float
    stderr: float
    tokens: int
    windows: int
    scored: int


def perplexity_main(engine: Engine, args) -> int:
    """`perplexity FILE`: `ppl ± error`, or with `args.json` one JSON object."""
    ids = read_ids(engine, args)
    context = args.context or 512
    result = perplexity(engine, ids, context)
    if args.json:
        print(json.dumps(asdict(result) | {"context": context, "model": engine.name}, ensure_ascii=False))
    else:
        print(f"{result.ppl:.4f} ± {result.stderr:.4f}")
    return 0


def read_ids(engine: Engine, args) -> list[int]:
    """The ids to score, from a text or, with `args.ids`, from a JSON list of ids."""
    path = args.ids or args.file
    text = decode_utf8(Path(path).read_bytes(), path).removeprefix("\ufeff")
    if not args.ids:
        return engine.tokenizer.encode(text, special=False)
    try:
        ids = json.loads(text)
    except json.JSONDecodeError:
        ids = None
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise ValueError(f"{args.ids} does not hold a JSON list of token ids")
    return ids


def perplexity(engine: Engine, ids: Sequence[int], context: int = 512) -> Perplexity:
    """exp of the mean negative log-likelihood, llama.cpp's way: of each whole window of `context` ids the logits at
    context // 2 ... context - 2 are scored on the ids that follow them; the incomplete last window is left out, and
    BOS replaces a window's first id where the model adds it. `stderr` is that of the mean loss, times the perplexity.
    The engine must be idle. ValueError if there is no whole window, or an id is unknown."""
    if context < 4:
        raise ValueError(f"a window of {context} tokens has too little to score: raise --context to 4 or more")
    first, windows = context // 2, len(ids) // context
    if not windows:
        raise ValueError(f"the text has {len(ids)} tokens but a window takes {context}: use a longer text or a "
                         "smaller --context")
    vocab, tokenizer = engine.model.config.vocab, engine.tokenizer
    unknown = next((id for id in ids if not 0 <= id < vocab), None)
    if unknown is not None:
        raise ValueError(f"the text holds id {unknown} but the model has ids 0 to {vocab - 1}: use ids of this model")
    scored, total, squares = windows * (context - 1 - first), 0.0, 0.0
    for start in range(0, windows * context, context):
        window = list(ids[start : start + context])
        if tokenizer is not None and tokenizer.add_bos:
            window[0] = tokenizer.bos_id
        loss_L = losses(engine.logits(window[:-1], first), window[first + 1 :])
        total += loss_L.sum().item()
        squares += loss_L.square().sum().item()
    mean = total / scored
    variance = max(0.0, squares / scored - mean**2) / max(1, scored - 1)   # of the mean
    if not mean < math.log(sys.float_info.max):
        raise ValueError(f"the mean loss is {mean}, which has no finite perplexity: try --dtype float32")
    return Perplexity(math.exp(mean), math.exp(mean) * math.sqrt(variance), len(ids), windows, scored)


def losses(logits_LV: torch.Tensor, target_ids: Sequence[int]) -> torch.Tensor:
    """-log p of each row's target, float64 (L,); some rows at a time, since a softmax over all would double memory."""
    target_L = torch.tensor(target_ids, device=logits_LV.device)
    return torch.cat([torch.nn.functional.cross_entropy(rows, targets, reduction="none").double()
                      for rows, targets in zip(logits_LV.split(LOGIT_ROWS), target_L.split(LOGIT_ROWS))])
