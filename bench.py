"""Measurements: perplexity, and what the engine does in a second, next to other engines and the machine's limits.

Owns the rules of measuring and the printing of results. It drives the engine from outside as any caller would, and
knows of the model only how many bytes and operations a token costs. A workload is a row of WORKLOADS. Other engines
take turns with this one: what disturbs the machine for a while disturbs both, and pairs of runs are compared.
Start at `main`; `perplexity` stands alone at the end.
"""

import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

import live
import view
from engine import Engine
from limits import machine, machine_limits, matrices
from model import Model
from peer import ADAPTERS, Peer, Run
from sampling import SamplingParams
from scheduler import Request
from speculative import Ngram
from terminal import decode_utf8

REPEATS = 5
SECONDS_PER_WORKLOAD = 45   # an engine; then no further repeat: all workloads together take under ten minutes
LOGIT_ROWS = 64   # rows as wide as the vocabulary that perplexity works on at once


@dataclass(frozen=True)
class Workload:
    """`requests` requests at once, each of `prompt_tokens` random ids answered with `generated_tokens`.

    The first `shared_tokens` of the prompts are the same. `variant` tells rows of one name apart. With `spread`, the
    numbers of tokens are means: each request draws its own, up to that much more or less."""

    name: str
    prompt_tokens: int
    generated_tokens: int
    interval: Callable[[Run], tuple[int, float]]   # the tokens that count, and the seconds they took
    requests: int = 1
    shared_tokens: int = 0
    variant: str | None = None
    spread: int = 0

    @property
    def decodes(self) -> bool:
        return self.interval in (decode_interval, answered_interval)

    @property
    def for_peers(self) -> bool:
        """Whether other engines run it: where all requests are alike, no policy decides how fast they are."""
        return not self.shared_tokens and not self.spread


def prefill_interval(run: Run) -> tuple[int, float]:
    """Prompt tokens, from submission until each request has its first token."""
    return run.prompt_tokens, run.first_token_s


def decode_interval(run: Run) -> tuple[int, float]:
    """Tokens drawn after each request has its first one."""
    return run.decoded_tokens, run.finished_s - run.first_token_s


def served_interval(run: Run) -> tuple[int, float]:
    """Prompt tokens, computed or found in the cache, from submission to the last answer's end."""
    return run.prompt_tokens, run.finished_s


def answered_interval(run: Run) -> tuple[int, float]:
    """Tokens of the answers, from submission to the last answer's end."""
    return run.answer_tokens, run.finished_s


WORKLOADS = (
    Workload("prefill", 512, 1, prefill_interval),
    Workload("decode", 16, 128, decode_interval),
    Workload("depth", 2048, 128, decode_interval),
    *(Workload("batch", 128, 128, decode_interval, requests) for requests in (1, 4, 8, 16, 32)),
    Workload("prefix", 1056, 8, served_interval, 32, shared_tokens=1024, variant="cached"),
    Workload("prefix", 1056, 8, served_interval, 32, shared_tokens=1024, variant="uncached"),
    Workload("mixed", 562, 562, answered_interval, 256, spread=462),
)
STALL, STARTUP, DRAFT = "stall", "startup", "draft"   # workloads that are measured by themselves
DRAFT_TOKENS = 128
NOT_BY_DEFAULT = ("mixed",)   # takes longer than all the others
HEADER = (f"{'name':<8}{'variant':<13}{'engine':<13}{'batch':>6}{'prompt':>7}{'answer':>7}{'tokens/s':>10}{'stdev':>7}"
          f"{'of limit':>9}")  # 80 columns; what more there is to say of a row stands below it


# ---------------------------------------------------------------------------------------------------------------------
# The command


def main(args, load_engine: Callable[..., Engine]) -> int:
    """`bench`: a table and a picture on stdout, with `args.json` one JSON document after them. Returns the exit
    status. `load_engine` leaves the model's path in `args.model`."""
    problem = name_problem(args.names, args.peer)
    if problem:
        print(f"run.py: error: {problem}", file=sys.stderr)
        return 2
    engine, results = load_engine(args), []
    limits = machine_limits(engine.model)   # measurements() raises them
    about = machine(engine.model)
    print(f"memory {limits['memory_gb_per_s']:.1f} GB/s, {limits['memory_gb_per_s_at_model_size']:.1f} at the model's "
          f"size · {about['arithmetic']} {limits['matmul_gflops']:.0f} Gop/s · {about['threads']} threads")
    print(HEADER)
    with ExitStack() as stack:
        svg = stack.enter_context(open(args.svg, "w", encoding="utf-8")) if args.svg else None
        peers = [stack.enter_context(closing(Peer(name, args.model))) for name in dict.fromkeys(args.peer)]
        watch = stack.enter_context(ExitStack())
        if args.watch:
            watch.enter_context(live.watching(engine))
        for rows in measurements(args, engine, limits, peers):
            results += rows
            print("\n".join(map(table_row, rows)), flush=True)
        watch.close()
        results = [row | limit_fraction(row, limits) for row in results]
        roofline = view.Roofline(limits["memory_gb_per_s_at_model_size"], limits["matmul_gflops"], points(results))
        for line in view.draw_roofline(roofline, view.terminal_width(), view.has_colours()):
            print(line)
        if svg:
            svg.write(view.roofline_svg(roofline, f"{engine.name} · {about['cpu']} · {about['threads']} threads"))
    if args.json:
        print(json.dumps({"machine": about, "limits": limits, "model": engine.name, "results": results},
                         ensure_ascii=False, allow_nan=False))
    return 1 if any("error" in result and not result["repeats"] for result in results) else 0


def name_problem(names: Sequence[str], peers: Sequence[str]) -> str | None:
    """Why these workloads or peers cannot be measured, in one line, or None."""
    built = [*dict.fromkeys(workload.name for workload in WORKLOADS), STALL, STARTUP, DRAFT]
    for kind, given, known in (("workload", names, built), ("peer", peers, list(ADAPTERS))):
        for name in given:
            if name not in known:
                return f"unknown {kind} '{name}': there is {', '.join(known)}"
    return None


def measurements(args, engine: Engine, limits: dict, peers: Sequence[Peer]) -> Iterator[list[dict]]:
    """The rows of each workload that was asked for, once they are measured. The limits are measured again beside each:
    what disturbs the machine for a while must not pass for its limit."""
    names = args.names or [*(w.name for w in WORKLOADS if w.name not in NOT_BY_DEFAULT), DRAFT, STALL, STARTUP]
    for workload in WORKLOADS:
        if workload.name in names:
            if workload.spread:
                workload = replace(workload, requests=max(1, round(args.scale * workload.requests)))
            limits |= {name: max(limits[name], limit) for name, limit in machine_limits(engine.model).items()}
            yield measure(engine, workload, limits, peers if workload.for_peers else ())
    if DRAFT in names:
        yield measure_draft(engine)
    if STALL in names:
        yield [measure_stall(engine)]
    if STARTUP in names:
        yield measure_startup(args, engine.vocab, [peer.name for peer in peers])


def table_row(result: dict) -> str:
    head = (f"{result['name']:<8}{result.get('variant', ''):<13}{result['engine']:<13}{result['batch']:>6}"
            f"{result['prompt_tokens']:>7}{result['generated_tokens']:>7}")
    if not result["repeats"]:
        return f"{head}\n    failed: {result['error']}"
    if "seconds" in result:
        rate, stdev, verb = f"{result['seconds']:.2f} s", f"{result['stdev']:.2f}", "takes"
    else:
        rate, stdev, verb = f"{result['tokens_per_s']:.1f}", f"{result['stdev']:.1f}", "does"
    fraction = "-" if result["limit_fraction"] is None else f"{result['limit_fraction']:.0%}"
    notes = []
    if "quire_ratio" in result:
        notes.append(f"quire {verb} {result['quire_ratio']:.2f} x as much")
    if "p95_ms" in result:
        notes.append(f"95 % of steps within {result['p95_ms']:.0f} ms, without the prompt "
                     f"{result['p95_ms_without']:.0f}")
    if result["failed"]:
        notes.append(f"{result['failed']} runs failed: {result['error']}")
    return "\n    ".join([f"{head}{rate:>10}{stdev:>7}{fraction:>9}", *notes])


def points(results: Sequence[dict]) -> list[view.Point]:
    """What has a place in the roofline picture: rates of work whose bytes and operations are counted."""
    return [view.Point(" ".join(filter(None, (row["name"], row.get("variant"),
                                              str(row["batch"]) if row["batch"] > 1 else ""))), row["engine"],
                       row["flops_per_token"] / row["bytes_per_token"],
                       row["flops_per_token"] * row["tokens_per_s"] / 1e9)
            for row in results if row["tokens_per_s"] and row["bytes_per_token"]]


# ---------------------------------------------------------------------------------------------------------------------
# A workload


def measure(engine: Engine, workload: Workload, limits: dict, peers: Sequence[Peer] = ()) -> list[dict]:
    """A row of `results` for this engine and for each peer, which take turns on the same ids."""
    if workload.variant == "uncached":
        uncached = replace(engine.config, prefix_cache=False)
        engine = same_watched(engine, Engine(engine.model, uncached, engine.tokenizer))
    runners = {"quire": partial(run_once, engine)} | {peer.name: partial(run_peer, peer, engine.vocab)
                                                      for peer in peers}
    tallies = take_turns(
        {name: lambda repeat, run=run: rate(run(workload, repeat), workload) for name, run in runners.items()})
    at_once = replace(workload, requests=min(workload.requests, engine.config.max_requests))
    num_bytes, flops = token_cost(engine.model, at_once, engine.config.max_step_tokens, engine.cache_dtype)
    rows = []
    for name, tally in tallies.items():
        row = row_of(name, workload.name, workload.variant, workload.requests, workload.prompt_tokens,
                     workload.generated_tokens) | tally.summary()
        row |= {"bytes_per_token": round(num_bytes), "flops_per_token": round(flops), "tokens_per_s": tally.median}
        row |= limit_fraction(row, limits)
        if name != "quire":
            row |= tallies["quire"].compared_with(tally)
        rows.append(row)
    return rows


def same_watched(engine: Engine, other: Engine) -> Engine:
    """The other engine, at which looks who looks at the first."""
    other.name, other.on_step = engine.name, engine.on_step
    return other


def measure_draft(engine: Engine) -> list[dict]:
    """Decoding without and with drafts, in turns: those of --draft, or n-grams; on a text that invites to repeat it, a
    module of this engine and its beginning again, and on one that goes on to something new."""
    source, prose = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("pace.py", "README.md"))
    texts = {"edit": f"{source}\n\n# The same module again:\n\n{source[:400]}", "new": prose[:1500]}
    drafter = engine.drafting.drafter if engine.drafting else Ngram()
    engines = {by: same_watched(engine, Engine(engine.model, engine.config, engine.tokenizer, drafter=made))
               for by, made in (("plain", None), (drafter.name, drafter))}
    most = max(1, int(engine.capacity) - DRAFT_TOKENS - 1)
    prompts = {text: engine.tokenizer.encode(texts[text])[-most:] for text in texts}
    reports = {}

    def decode(text: str, by: str) -> float:
        params = SamplingParams(max_tokens=DRAFT_TOKENS, ignore_eos=True)
        [completion] = engines[by].generate([prompts[text]], params)
        request = completion.request
        reports[text, by] = request.draft_report
        return (request.num_output - 1) / (request.finished_s - request.first_token_s)

    tallies = take_turns({(text, by): lambda _, case=(text, by): decode(*case) for text in texts for by in engines})
    return [row_of("quire", DRAFT, f"{text}, {by}", 1, len(prompts[text]), DRAFT_TOKENS) | tally.summary()
            | {"tokens_per_s": tally.median, "draft": reports[text, by]} for (text, by), tally in tallies.items()]


def row_of(engine: str, name: str, variant: str | None, requests: int, prompt_tokens: int, generated: int) -> dict:
    """A row of `results` with what is known before anything is measured."""
    row = {"name": name, "engine": engine, "threads": torch.get_num_threads(), "batch": requests,
           "prompt_tokens": prompt_tokens, "generated_tokens": generated, "tokens_per_s": None, "stdev": None,
           "repeats": 0, "failed": 0, "bytes_per_token": None, "flops_per_token": None, "limit_fraction": None}
    return row | ({"variant": variant} if variant else {})


@dataclass
class Tally:
    """What one engine gave in each repeat, None where it failed, and why. The first repeat warms up."""

    values: list[float | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def kept(self) -> list[float]:
        """What counts: all but the first, or where there is no other, that one."""
        return known(self.values[1:]) or known(self.values)

    @property
    def median(self) -> float | None:
        return statistics.median(self.kept) if self.kept else None

    def summary(self) -> dict:
        return {"stdev": statistics.pstdev(self.kept) if self.kept else None, "repeats": len(self.kept),
                "failed": len(self.errors)} | ({"error": self.errors[0]} if self.errors else {})

    def compared_with(self, other: "Tally") -> dict:
        """The median of this engine's values, each divided by the other's of the same repeat."""
        pairs = Tally([a / b if a and b else None for a, b in zip(self.values, other.values)])
        return {"quire_ratio": pairs.median} if pairs.kept else {}


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def take_turns(runners: dict[str, Callable[[int], float]]) -> dict[str, Tally]:
    """Has each runner do each repeat, one after the other, until there are enough or they took too long."""
    tallies = {name: Tally() for name in runners}
    deadline_s = time.perf_counter() + SECONDS_PER_WORKLOAD * len(runners)
    for repeat in range(REPEATS + 1):
        for name, run in runners.items():
            try:
                tallies[name].values.append(run(repeat))
            except ValueError as error:
                tallies[name].values.append(None)
                tallies[name].errors.append(str(error))
        if time.perf_counter() > deadline_s:
            break
    return tallies


def rate(run: Run, workload: Workload) -> float:
    tokens, seconds = workload.interval(run)
    if not tokens or seconds <= 0:
        raise ValueError(f"{workload.generated_tokens} generated tokens leave nothing to time: use more")
    return tokens / seconds


def run_once(engine: Engine, workload: Workload, repeat: int) -> Run:
    """Runs the workload to its end. ValueError if a request fails or falls short."""
    requests = [engine.submit(ids, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
                for ids, num_tokens in work(workload, engine.vocab, repeat)]
    num_early = None   # tokens drawn until each request had its first one
    while engine.has_work:
        engine.step()
        if num_early is None and all(request.num_output for request in requests):
            num_early = sum(request.num_output for request in requests)
    for request in requests:
        if request.error:
            raise ValueError(request.error)
        if request.num_output != request.params.max_tokens:
            raise ValueError(f"a request ended ({request.finish_reason}) after {request.num_output} of "
                             f"{request.params.max_tokens} tokens: raise --context")
    start_s, num_output = requests[0].submitted_s, sum(request.num_output for request in requests)
    return Run(sum(request.num_prompt for request in requests), num_output, num_output - num_early,
               max(request.first_token_s for request in requests) - start_s,
               max(request.finished_s for request in requests) - start_s)


def run_peer(peer: Peer, vocab: int, workload: Workload, repeat: int) -> Run:
    """The same for another engine."""
    return peer.run([ids for ids, _ in work(workload, vocab, repeat)], workload.generated_tokens,
                    torch.get_num_threads())


def work(workload: Workload, vocab: int, repeat: int) -> list[tuple[list[int], int]]:
    """Each request's prompt and the number of tokens to answer: the same for all engines, new in each repeat, since a
    cached prefix would not be measured."""
    ids = random.Random(f"{workload.name} {workload.requests} {repeat}")

    def about(num_tokens: int) -> int:
        return num_tokens + ids.randint(-workload.spread, workload.spread)

    shared = random_ids(ids, vocab, workload.shared_tokens)
    return [(shared + random_ids(ids, vocab, about(workload.prompt_tokens - workload.shared_tokens)),
             about(workload.generated_tokens)) for _ in range(workload.requests)]


def random_ids(ids: random.Random, vocab: int, num_tokens: int) -> list[int]:
    return [ids.randrange(vocab) for _ in range(num_tokens)]


def measure_stall(engine: Engine, num_decoding: int = 16, prompt_tokens: int = 2048) -> dict:
    """How long those that decode wait for their next token while a prompt is read beside them, and without it: a row
    of `results` whose rate is the prompt's."""
    row = row_of("quire", STALL, None, num_decoding, prompt_tokens, 1)
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
        return row | {"failed": 1, "error": str(error)}
    finally:
        for request in decoding:
            engine.abort(request)
    p95_ms, p95_ms_without = (sorted(times)[int(0.95 * len(times))] for times in (beside, without))
    return row | {"tokens_per_s": statistics.median(rates), "stdev": statistics.pstdev(rates), "repeats": len(rates),
                  "p95_ms": p95_ms, "p95_ms_without": p95_ms_without}


def measure_startup(args, vocab: int, peers: Sequence[str]) -> list[dict]:
    """Rows whose `seconds` tell how long a new process takes to the first token of an answer; and to import torch, the
    part of it that is not this engine's."""
    generate = [sys.executable, Path(__file__).with_name("run.py"), "generate", "-m", args.model, "-p", "Hello",
                "-n", "1", "--threads", str(torch.get_num_threads())]
    for name in ("tokenizer", "dtype", "kernels"):
        if getattr(args, name) is not None:
            generate += [f"--{name}", getattr(args, name)]
    runners = {("quire", "first token"): lambda _: seconds_to_output(generate),
               ("quire", "import torch"): lambda _: seconds_to_output([sys.executable, "-c", "import torch; print()"])}
    for name in peers:
        runners[name, "first token"] = lambda repeat, name=name: peer_startup(name, args.model, vocab)
    rows = []
    for (engine, variant), tally in (tallies := take_turns(runners)).items():
        row = row_of(engine, STARTUP, variant, 1, 1, 1) | tally.summary()
        if tally.median:
            row["seconds"] = tally.median
        if engine != "quire":
            row |= tallies["quire", "first token"].compared_with(tally)
        rows.append(row)
    return rows


def seconds_to_output(command: Sequence) -> float:
    """From the start of a process to the first it writes on stdout."""
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start_s
        _, complaints = process.communicate()
    if process.returncode or not first:
        last_words = complaints.decode(errors="replace").strip().splitlines()[-1:]
        raise ValueError(": ".join([f"the process ended with status {process.returncode}", *last_words]))
    return seconds


def peer_startup(name: str, model: str, vocab: int) -> float:
    """From the start of another engine's process to its answer of one token."""
    start_s = time.perf_counter()
    with closing(Peer(name, model)) as peer:
        peer.run([[vocab // 2]], 1, torch.get_num_threads())
        return time.perf_counter() - start_s


def token_cost(model: Model, workload: Workload, step_tokens: int, cache_dtype: torch.dtype) -> tuple[float, float]:
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
    kv_bytes = sum(n * spec.bytes_per_token(cache_dtype) for n, spec in zip(seen, model.kv_specs()))
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


def limit_fraction(row: dict, limits: dict) -> dict:
    """What part of the possible the rate of this row of `results` is, where that is known."""
    if not row["tokens_per_s"] or not row["bytes_per_token"]:
        return {}
    seconds = least_seconds(row["bytes_per_token"], row["flops_per_token"], limits)
    return {"limit_fraction": row["tokens_per_s"] * seconds}


def least_seconds(num_bytes: float, flops: float, limits: dict) -> float:
    """The least time a token can take: memory and arithmetic overlap at best (Williams et al. 2009, the roofline)."""
    return max(num_bytes / limits["memory_gb_per_s_at_model_size"], flops / limits["matmul_gflops"]) / 1e9


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
