"""The command line: `run.py generate`, `chat`, `batch`, `bench`, `perplexity`, `tokenize`, `info`, `trace`, `models`.

Owns exit statuses, and what goes to stdout and what to stderr. How flags become an engine is loading.py's. A command
imports what it needs when it needs it, so that help, `tokenize` and `info` answer without torch. Start at `main`, then
`generate`; the table of commands is at the end, flags they share in flags.py.
"""
from __future__ import annotations

import argparse
import errno
import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flags import (COUNT, DTYPE_NBYTES, IDS, SAMPLING_FIELDS, SCALE, Command, UsageError, flag, make_parser,
                   normalized, switch, value)
from loading import arithmetic, find_model, load_engine, models_folder, open_checkpoint, open_tokenizer, sampling_params
from terminal import (Download, abandon, decode_utf8, dim, forget_given_size, held_signals, is_dumb, is_terminal,
                      open_closed_streams, warn)

if TYPE_CHECKING:
    from checkpoint import Checkpoint
    from engine import Engine, Output
    from families import LayerConfig
    from scheduler import Request
    from tokenizer import Tokenizer

SAME_TOKENS = {"float64": "yes", "float32": "but for near-ties"}  # of torch, whatever the batch; others: not promised
MAX_SAMPLES = 4096  # in the engine together
LINE_END = re.compile(r"\r?\n\Z")
WIDTH = value(int, lambda n: n >= 40, "is not a whole number of at least 40")  # less has no room for a picture


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. An error becomes one line on stderr."""
    open_closed_streams()
    forget_given_size()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a script in the background ignored it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds, so that `finally` has its say
    # A thread of torch that waits for another spins for a moment and then sleeps. By default it spins on, and where
    # other programs want the cores too, it takes them from the thread it waits for: ten times slower was measured.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            status = run(words)
        except SystemExit as end:  # argparse's, after help, or SIGTERM's
            status = end.code
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        abandon(sys.stdout, sys.stderr)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if "--debug" in words:
            raise
        print(f"run.py: error: {one_line(error)}", file=sys.stderr)
        try:
            print(end="", flush=True)
        except OSError:  # a full disk, most likely the error itself
            abandon(sys.stdout)
        return 2 if isinstance(error, UsageError) else 1


def run(words: Sequence[str]) -> int:
    words = with_command(decoded(words))
    parser = make_parser(COMMANDS, in_full="--help-all" in words)
    args, unknown = parser.parse_known_args(list(normalized(words)))
    if unknown:
        raise UsageError(f"unknown: {' '.join(unknown)}; run.py {args.command} --help lists the flags")
    args.sampling = {name: value for name, value in vars(args).items() if name in SAMPLING_FIELDS}
    return args.run(args)


REMEDIES = {errno.ENOENT: "check the path", errno.ENOTDIR: "check the path", errno.EISDIR: "name a file",
            errno.EACCES: "check its permissions, or name another place", errno.EPERM: "name another place",
            errno.EROFS: "name another place", errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
            errno.ENOSPC: "free some, or name another place (batch goes on with --resume)"}


def one_line(error: Exception) -> str:
    """What went wrong, for the user: value, limit, remedy. A bug of ours is told by its type too."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # Python's, torch's
        return "out of memory: lower --cache-memory or --context, or take a smaller model or --dtype"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed here: `make run` sets up .venv once, then run .venv/bin/python run.py"
    if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
        place = "stdout" if error.filename is None else error.filename  # other files are named where they fail
        return f"{place}: {error.strerror}" + (f": {REMEDIES[error.errno]}" if error.errno in REMEDIES else "")
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError | RuntimeError) else f"{type(error).__name__}: {text}"


# ---------------------------------------------------------------------------------------------------------------------
# Words of the command line


def decoded(words: Iterable[str]) -> list[str]:
    """The command line as UTF-8, whatever the locale made of its bytes."""
    return [decode_utf8(os.fsencode(word), f"argument {i} of the command line", UsageError)
            for i, word in enumerate(words, 1)]


def with_command(words: list[str]) -> list[str]:
    """`run.py -p hi` and `run.py "some prompt"` are short for generate, `run.py` alone in a terminal for chat."""
    if not words:
        return ["chat"] if is_terminal(sys.stdin) else ["generate"]
    known = (*COMMANDS, "-h", "--help", "--version", "--completions")
    return words if words[0].partition("=")[0] in known else ["generate", *words]


# ---------------------------------------------------------------------------------------------------------------------
# Answering prompts


def generate(args: argparse.Namespace) -> int:
    prompt = read_prompt(args, drop_line_end=not args.raw)
    if not prompt:
        raise UsageError("the prompt is empty: give some text")
    params = sampling_params(args)
    if params.num_samples > MAX_SAMPLES:
        raise UsageError(f"num_samples is {params.num_samples} but generate draws at most {MAX_SAMPLES}: use batch")
    if params.num_samples == 1 and args.max_requests is None:
        args.max_requests = 1  # a cache for one context is enough
    if args.show_tokens:
        if args.json or is_dumb(sys.stdout) or "NO_COLOR" in os.environ:
            raise UsageError("--show-tokens needs a terminal with colours: --json --logprobs N gives the numbers")
        args.sampling.setdefault("logprobs", 0)
        params = sampling_params(args)
    start_s = time.perf_counter()
    engine = load_engine(args)
    load_s = time.perf_counter() - start_s
    ids = encode(engine.tokenizer, prompt, args)
    requests = [engine.submit(ids, sample, deadline_s=args.deadline, show_special=args.show_special)
                for sample in params.samples()]
    echo = prompt if args.echo else ""
    with held_signals() as signals:
        answer(engine, requests, None if args.json else SampleWriter(requests, echo, args.show_tokens), signals)
        if args.json:
            for i, request in enumerate(requests):
                fields = as_json(request, load_s) | {"text": echo + request.text, "sample": i, "model": engine.name}
                print(json.dumps(fields, ensure_ascii=False))
        report(requests, args)
    for request in requests:
        if request.error is not None:
            raise RuntimeError(request.error)
    return 0


def read_prompt(args: argparse.Namespace, drop_line_end: bool = False) -> str:
    """The prompt, from the one place that gives it. `drop_line_end`: without the one at the end of a file or stdin."""
    texts, files = args.prompt + [text for text in [args.text] if text is not None], args.file
    if not texts and not files and sys.stdin is not None and not sys.stdin.isatty():
        files = ["-"]
    if len(texts) + len(files) != 1:
        raise UsageError(f"{len(texts) + len(files) or 'no'} prompts: give one, as -p TEXT, -f FILE or through stdin")
    if texts:
        return texts[0]
    if files[0] == "-":
        data, source = b"" if sys.stdin is None else sys.stdin.buffer.read(), "stdin"
    else:
        data, source = Path(files[0]).read_bytes(), files[0]
    text = decode_utf8(data, source).removeprefix("\ufeff")
    return LINE_END.sub("", text) if drop_line_end else text


def encode(tokenizer: Tokenizer, prompt: str, args: argparse.Namespace) -> list[int]:
    """The prompt as one user turn; with --raw, or for a model without a chat template, as it stands."""
    num_notes = len(tokenizer.notes)
    if args.raw or tokenizer.chat_template is None:
        if args.system is not None:
            lacks = "leave out --raw" if args.raw else "this model has none"
            raise UsageError(f"--system needs a chat template: {lacks}")
        ids = tokenizer.encode(prompt, special=not args.no_special)
    else:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        ids = tokenizer.chat([*system, {"role": "user", "content": prompt}])
    warn(tokenizer.notes[num_notes:])
    return ids


class SampleWriter:
    """Writes answers one after the other while they come all at once: the first streams, the others wait their turn."""

    def __init__(self, requests: Sequence[Request], echo: str, with_heat: bool = False):
        self.waiting, self.echo, self.with_heat, self.heat = list(requests), echo, with_heat, None
        print(echo, end="", flush=True)

    def write(self, outputs: Iterable[Output]) -> None:
        """Writes what a step brought to the sample whose turn it is, and what those behind it have meanwhile."""
        for output in outputs:
            if self.waiting and output.request is self.waiting[0]:
                print(self._new_text(output.text), end="", flush=True)
        while self.waiting and self.waiting[0].finish_reason is not None:
            self.waiting.pop(0)
            self.heat = None
            more = f"---\n{self.echo}{self._new_text(self.waiting[0].text)}" if self.waiting else ""
            print(f"\n{more}", end="", flush=True)

    def _new_text(self, text: str) -> str:
        """`text`, which the sample whose turn it is has more than before, as it is shown."""
        if not self.with_heat:
            return text
        from live import Heat

        self.heat = self.heat or Heat()
        return self.heat.new_text(self.waiting[0])


def answer(engine: Engine, requests: Sequence[Request], writer: SampleWriter | None, signals: list[int]) -> None:
    """Runs the requests to their end, or cancels them after the step in which a signal came."""
    show_reading = None
    if requests[0].num_prompt > engine.config.max_step_tokens and not is_dumb(sys.stderr):
        from live import Reading

        show_reading = Reading(requests[0]).show
    while engine.has_work:
        outputs = engine.step()
        if signals:
            outputs += [output for request in requests if (output := engine.abort(request))]
        if show_reading is not None:
            show_reading()
        if writer is not None:
            writer.write(outputs)


def as_json(request: Request, load_s: float) -> dict:
    """An answer's fields. Times and rates are null where nothing was computed, or too little to take time."""
    def rate(num_tokens: int, seconds: float | None) -> float | None:
        return num_tokens / seconds if seconds and num_tokens > 0 else None

    prefill_s = ttft_s = decode_s = None
    if request.first_token_s is not None:
        prefill_s = request.first_token_s - request.admitted_s
        ttft_s = request.first_token_s - request.submitted_s
        decode_s = request.finished_s - request.first_token_s
    return {
        "text": request.text, "token_ids": request.output_ids, "finish_reason": request.finish_reason,
        "prompt_tokens": request.num_prompt, "cached_tokens": request.num_cached,
        "completion_tokens": request.num_output, "preemptions": request.num_preemptions,
        "logprobs": request.logprobs, "seed": request.params.seed,
        "timings": {
            "load_s": load_s, "prefill_s": prefill_s, "ttft_s": ttft_s, "decode_s": decode_s,
            "prefill_tokens_per_s": rate(request.num_prompt - request.num_cached, prefill_s),
            "decode_tokens_per_s": rate(request.num_output - 1, decode_s)},
        "draft": request.draft_report,
    }


def report(requests: Sequence[Request], args: argparse.Namespace) -> None:
    """On stderr: statistics where they are wanted, and always what the user would miss otherwise."""
    params, seconds = requests[0].params, args.deadline
    if seconds is not None and any(r.finish_reason == "cancelled" and r.finished_s > r.deadline_s for r in requests):
        warn([f"cancelled after --deadline {seconds:g} s"])
    seed = [f"seed {params.seed}"] if params.temperature > 0 else []
    if args.show_tokens and is_terminal(sys.stderr):
        from live import heat_legend

        print(heat_legend(), file=sys.stderr)
    if args.stats or is_terminal(sys.stderr):
        cut = ["cut at its longest"] if any(request.finish_reason == "length" for request in requests) else []
        print(dim(" · ".join([statistics(requests), *seed, f"{peak_memory_gb():.1f} GB", *cut])), file=sys.stderr)
    elif seed and "seed" not in args.sampling and not args.json:
        print(seed[0], file=sys.stderr)


def statistics(requests: Sequence[Request]) -> str:
    """For instance: 24 tokens · 61.3 tok/s · prompt 812 (800 cached)."""
    num_tokens = sum(request.num_output for request in requests)
    parts = [f"{num_tokens} token{'s' * (num_tokens != 1)}"]
    started = [request for request in requests if request.first_token_s is not None]
    if num_tokens > len(started) > 0:
        seconds = max(r.finished_s for r in started) - min(r.first_token_s for r in started)
        parts.append(f"{(num_tokens - len(started)) / seconds:.1f} tok/s")
    cached = f" ({requests[0].num_cached} cached)" if requests[0].num_cached else ""
    parts.append(f"prompt {requests[0].num_prompt}{cached}")
    if num_proposed := sum(request.drafts.num_proposed for request in requests):
        parts.append(f"draft {sum(sum(request.drafts.kept_by_place) for request in requests) / num_proposed:.0%}")
    return " · ".join(parts)


def peak_memory_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def run_chat(args: argparse.Namespace) -> int:
    import chat

    for name in chat.NOT_IN_CHAT:
        if name in args.sampling:
            raise UsageError(f"--{name.replace('_', '-')} has no use in a chat: leave it out")
    sampling_params(args)
    args.max_requests = args.max_requests or 1
    return chat.main(args, load_engine)


def run_batch(args: argparse.Namespace) -> int:
    import batch

    if args.resume and args.overwrite:
        raise UsageError("--resume keeps what OUT holds and --overwrite does not: leave out one of them")
    if (args.resume or args.overwrite) and args.output in batch.STDOUT:
        raise UsageError("--resume and --overwrite are for an output file: name it with -o OUT")
    sampling_params(args)
    return batch.main(args, load_engine)


def run_bench(args: argparse.Namespace) -> int:
    import bench

    def load(args: argparse.Namespace) -> Engine:
        args.model = str(find_model(args))  # the same file for this engine and its peers
        return load_engine(args)

    return bench.main(args, load)


def run_perplexity(args: argparse.Namespace) -> int:
    import bench

    if (args.file is None) == (args.ids is None):
        raise UsageError("perplexity takes a FILE of text or --ids FILE, one of them")
    return bench.perplexity_main(load_engine(args), args)


# ---------------------------------------------------------------------------------------------------------------------
# Looking, without torch


def tokenize(args: argparse.Namespace) -> int:
    if args.decode is not None:
        if args.prompt or args.file or args.text is not None:
            raise UsageError("--decode takes ids and no text: leave out one of them")
        tokenizer = open_tokenizer(open_checkpoint(args), args)
        print(decode(tokenizer, args.decode), end="")
        return 0
    text = read_prompt(args)
    tokenizer = open_tokenizer(open_checkpoint(args), args)
    num_notes = len(tokenizer.notes)
    ids = tokenizer.encode(text, special=not args.no_special, bos=False if args.no_bos else None)
    warn(tokenizer.notes[num_notes:])
    if args.show:
        for id in ids:
            print(f"{id}\t{json.dumps(tokenizer.piece(id), ensure_ascii=False)}")
    else:
        print(*ids)
    return 0


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text that `tokenize` makes these ids of: what the model puts before a text is no part of it."""
    for id in ids:
        if not 0 <= id < tokenizer.vocab_size:
            raise UsageError(f"--decode names id {id} but the vocabulary has ids 0 to {tokenizer.vocab_size - 1}")
    start = list(tokenizer.start_ids) if tokenizer.add_bos else []
    return tokenizer.decode(ids[len(start) :] if ids[: len(start)] == start else ids, show_special=True)


def info(args: argparse.Namespace) -> int:
    checkpoint, tokenizer = open_checkpoint(args), None
    try:
        tokenizer = open_tokenizer(checkpoint, args)
    except ValueError as error:
        warn([str(error)])
    fields = describe(checkpoint, tokenizer, args)
    if args.json:
        print(json.dumps(fields, ensure_ascii=False))
    else:
        for name, value in fields.items():
            print(f"{name.replace('_', ' '):<24}{shown(value)}")
    return 0


def describe(checkpoint: Checkpoint, tokenizer: Tokenizer | None, args: argparse.Namespace) -> dict:
    """Formats have shares of the tensors' bytes. `same_tokens`: whether the tokens are the same whatever the batch."""
    config, tensors = checkpoint.config, checkpoint.tensors.values()
    nbytes = Counter()
    for tensor in tensors:
        nbytes[tensor.format] += tensor.nbytes
    dtype, cache_dtype, is_native = arithmetic(config, args)
    eos_ids = {*config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}
    return {
        "model": checkpoint.path.name, "container": checkpoint.container, "architecture": config.family,
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors), "tensor_bytes": nbytes.total(),
        "formats": {name: count / nbytes.total() for name, count in nbytes.most_common()},
        "layers": len(config.layers), "layer_kinds": dict(Counter(layer_kind(layer) for layer in config.layers)),
        "hidden": config.hidden, "heads": config.heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim,
        "vocab": config.vocab, "context": config.context, "max_context": config.max_context,
        "rope_scaling": config.rope.kind, "tokenizer": tokenizer.kind if tokenizer else None,
        "chat_template": tokenizer is not None and tokenizer.chat_template is not None, "eos_ids": sorted(eos_ids),
        "dtype": dtype, "cache_dtype": cache_dtype,
        "cache_bytes_per_token": 2 * len(config.layers) * config.kv_heads * cached_nbytes(config.head_dim, cache_dtype),
        "same_tokens": "bit for bit" if is_native else SAME_TOKENS.get(dtype, "not promised"),
    }


def cached_nbytes(width: int, cache_dtype: str) -> int:
    """Of a head's key or value; int8 comes with a float32 scale."""
    return width + 4 if cache_dtype == "int8" else width * DTYPE_NBYTES[cache_dtype]


def layer_kind(layer: LayerConfig) -> str:
    mixer = f"window of {layer.window}" if layer.mixer == "window" else layer.mixer
    return f"{mixer} attention, {layer.ffn} feed-forward"


def shown(value) -> str:
    """A field of `describe` for people; its floats are shares."""
    if isinstance(value, dict):
        return "; ".join(f"{name} {shown(share)}" for name, share in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return {float: "{:.1%}", int: "{:,}"}.get(type(value), "{}").format(value)


def models(args: argparse.Namespace) -> int:
    import hub

    folder = models_folder()
    if args.fetch is not None:
        with Download() as progress:
            {"default": hub.fetch_default, "pair": hub.fetch_pair}[args.fetch](folder, progress)
        return 0
    for model in hub.list_models(folder):
        print(f"{model.name}\t{model.kind}\t{model.nbytes / 1e6:.1f} MB")
    return 0


def trace(args: argparse.Namespace) -> int:
    import view

    if args.last is not None and args.last < args.first:
        raise UsageError(f"--from is {args.first} and --to is {args.last}: no step lies between them, raise --to")
    return view.trace_main(args)


# ---------------------------------------------------------------------------------------------------------------------
# The commands

NO_REQUEST_FLAGS = {"deadline": None, "classes": [], "trace": None}  # of commands whose requests are their own
COMMANDS = {
    "generate": Command(generate, "answer one prompt", "[TEXT | -p TEXT | -f FILE] [flags]", [
        flag("-S", "--system", metavar="TEXT", help="the system turn"),
        switch("--raw", "continue the text, without chat template"),
        switch("--no-special", "with --raw: no control tokens in the text"),
        switch("--show-special", "show control tokens in the answer"),
        switch("--echo", "repeat the prompt before the answer"),
        switch("--json", "one JSON object a sample"),
        switch("--show-tokens", "colour each token by its chance (terminal)"),
        switch("--stats", "statistics on stderr, as in a terminal"),
    ], ("prompt", "model", "sampling", "engine", "requests")),
    "chat": Command(run_chat, "talk in the terminal, or line by line from a pipe", "[flags]", [
        flag("-S", "--system", metavar="TEXT", help="the system turn"),
        switch("--stats", "statistics on stderr, as in a terminal"),
    ], ("model", "sampling", "engine", "requests")),
    "batch": Command(run_batch, "answer a file of prompts", "IN [-o OUT] [flags]", [
        flag("input", metavar="IN", help="JSON lines, or a .txt with a prompt a line; - is stdin"),
        flag("-o", "--output", metavar="OUT", help="default: stdout"),
        switch("--ordered", "answers in the order of the prompts"),
        switch("--raw", "continue the texts, without chat template"),
        switch("--resume", "do what OUT lacks, or holds as failed"),
        switch("--stats", "what the engine and its cache did, on stderr"),
        switch("--overwrite", "replace an existing OUT"),
        switch("--watch", "a live panel of the engine (terminal)"),
    ], ("model", "sampling", "engine", "requests")),
    "bench": Command(run_bench, "measure speed against this machine's limits", "[NAME ...] [flags]", [
        flag("names", nargs="*", metavar="NAME",
             help="prefill, decode, depth, batch, prefix, stall, startup, mixed; default: all but mixed"),
        flag("--peer", action="append", default=[], metavar="NAME",
             help="also llama.cpp, transformers or openvino, at prefill, decode, depth, batch, startup (repeatable)"),
        flag("--svg", metavar="FILE", help="save the roofline picture"),
        switch("--watch", "a live panel of the engine (terminal; takes some time of it)"),
        flag("--scale", type=SCALE, default=1.0, metavar="X", help="of mixed's 256 requests, this part (1)"),
        switch("--json", "one JSON document as the last line"),
    ], ("model", "engine"), NO_REQUEST_FLAGS),
    "perplexity": Command(run_perplexity, "tell how well a model predicts a text (-c 512)", "FILE [flags]", [
        flag("file", nargs="?", metavar="FILE", help="UTF-8 text"),
        flag("--ids", metavar="FILE", help="a JSON list of token ids instead of text"),
        switch("--json", "one JSON object"),
    ], ("model", "engine"), {"context": 512, **NO_REQUEST_FLAGS}),
    "tokenize": Command(tokenize, "turn text into token ids, or back", "[-p TEXT | -f FILE | --decode IDS] [flags]", [
        switch("--show", "a line a token: id, tab, text as a JSON string"),
        switch("--no-bos", "without the token that begins a text"),
        switch("--no-special", "no control tokens in the text"),
        flag("--decode", type=IDS, metavar="IDS", help='the text of "1 2 3" or "1,2,3"'),
    ], ("prompt", "model")),
    "info": Command(info, "tell what a model file holds", "[-m MODEL] [--json]", [
        switch("--json", "one JSON object"),
    ], ("model", "arithmetic")),
    "trace": Command(trace, "draw what each step did, from the file that --trace wrote", "FILE [flags]", [
        flag("file", metavar="FILE", help="the lines that --trace wrote"),
        flag("--rows", type=COUNT, default=40, metavar="N", help="requests shown, the first (40)"),
        flag("--width", type=WIDTH, metavar="N", help="default: the terminal's, 80 without one"),
        flag("--from", type=COUNT, default=1, dest="first", metavar="STEP", help="the first step shown (1)"),
        flag("--to", type=COUNT, dest="last", metavar="STEP", help="the last step shown"),
    ], ()),
    "models": Command(models, "list the model folder", "[--fetch default|pair]", [
        flag("--fetch", choices=("default", "pair"), help="fetch the default model, or a pair for tests"),
    ], ()),
}

if __name__ == "__main__":
    sys.exit(main())
