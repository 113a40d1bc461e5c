"""Files of prompts in, files of answers out.

Owns the run over all records, and an output file that survives being killed; what a line means is dialects.py's.
Drives the engine by submit, step and abort; knows nothing of scheduling, pages or tensors.
Start at `main`. In call order: the run, the input, the output.

A record's `request_id` is a digest of its id and its line. By it `--resume` knows what is answered, and whether the
input is still the same.
"""

import codecs
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

from dialects import OPENAI, SHORT, TEXT, Dialect, Job, Record, digest
from engine import Engine, Stats
from scheduler import LineFull
from terminal import decode_utf8, held_signals, is_dumb, named_errors, replacing

FED_AHEAD = 2  # requests in the engine, as a multiple of those it runs at once: enough to keep it busy
MAX_ANSWERS = 4096  # of one record, which is in the engine as a whole
HELD_BACK = 16  # answers that --ordered may hold back for one that comes late, as a multiple of the same
MIN_BAR, MAX_BAR = 8, 40  # characters
STDOUT = (None, "-", "/dev/stdout")  # its names


@dataclass
class Tally:
    """What the run has done so far."""

    started_s: float = field(default_factory=time.perf_counter)
    records: int = 0
    failed: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    cancelled: int = 0  # answers cut by --deadline

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def count(self, job: Job | None, failed: bool) -> None:
        self.records += 1
        self.failed += failed
        for request in job.requests if job else ():
            self.prompt_tokens += request.num_prompt
            self.cached_tokens += request.num_cached
            self.preemptions += request.num_preemptions
            self.cancelled += request.finish_reason == "cancelled"

    def summary(self) -> str:
        cancelled = f" · {self.cancelled} cancelled" if self.cancelled else ""
        return (f"{self.records} requests · {self.failed} failed{cancelled} · {self.tokens} tokens · "
                f"{self.tokens_per_s:.1f} tok/s · hit rate {self.hit_rate:.0%} · {self.preemptions} preemptions · "
                f"{self.seconds:.1f} s")


# ---------------------------------------------------------------------------------------------------------------------
# The run


def main(args, load_engine: Callable[..., Engine]) -> int:
    """Answers the records of `args.input`. Returns 0, or 1 if one failed. ValueError or OSError before a model is
    loaded: the input holds an id twice, or the output may not be written."""
    path = None if args.output in STDOUT else Path(args.output)
    with open_input(args.input) as file, alone(path):
        source = Source(file, is_text=args.input.lower().endswith(".txt"))
        if args.raw and source.dialect is OPENAI:
            raise ValueError("--raw is for short lines: in OpenAI's form /v1/completions continues the text as it is")
        answered = check_output(path, file, args)
        num_todo, num_before = source.survey(answered), len(answered)
        engine = load_engine(args)
        num_notes = len(engine.tokenizer.notes)  # shown when the model was loaded
        if path and args.resume and path.is_file():
            repair(path)
        with held_signals() as signals:
            with (open_output(path, args, HELD_BACK * engine.config.max_requests) as output,
                  progress(num_todo, output, engine if args.watch else None) as show):
                tally = run(engine, args, source, answered, output, show, signals)
                answered.clear()  # its memory is wanted for the order
                output.finish(source)
            for note in engine.tokenizer.notes[num_notes:]:
                print(f"warning: {note}", file=sys.stderr)
            print(tally.summary() + (f" · {num_before} answered before" if num_before else ""), file=sys.stderr)
            if args.stats:
                print(statistics(engine.stats), file=sys.stderr)
    return 1 if tally.failed else 0


def run(engine: Engine, args, source: "Source", answered: set[bytes], output: "Output", show: Callable[[Tally], None],
        signals: list[int]) -> Tally:
    """Answers the records that are not in `answered`, with a few more in the engine than it can run at once. A signal
    ends it between two steps."""
    todo = enumerate(record for record in source.records() if not record.is_in(answered))
    tally, in_flight, held = Tally(), {}, None
    max_in_flight = FED_AHEAD * engine.config.max_requests
    while not signals:
        while len(in_flight) < max_in_flight and output.has_room and not signals and (item := held or next(todo, None)):
            held, (index, record) = None, item
            try:
                job = submit(engine, args, source.dialect, record, index)
                in_flight |= dict.fromkeys(job.requests, job)
            except ValueError as error:
                if isinstance(error, LineFull) and in_flight:
                    held = item  # it comes first when somebody has left
                    break
                tally.count(None, failed=True)
                output.write(index, source.dialect.failure(record, str(error)))
        if not in_flight:
            break
        for out in engine.step():
            tally.tokens += len(out.token_ids)
            if out.finished:
                job = in_flight.pop(out.request)
                job.num_done += 1
                if job.num_done == len(job.requests):
                    tally.count(job, failed=job.error is not None)
                    output.write(job.index, source.dialect.failure(job.record, job.error) if job.error
                                 else source.dialect.answer(job, engine))
        show(tally)
    for request in in_flight:
        engine.abort(request)
    return tally


def statistics(stats: Stats) -> str:
    return (f"{stats.steps} steps · {stats.computed_tokens} tokens computed · pages: {stats.cached_pages} cached, "
            f"{stats.free_pages} free · {stats.evictions} evictions")


def submit(engine: Engine, args, dialect: "Dialect", record: Record, index: int) -> Job:
    """Hands a record to the engine, all of it or, with a ValueError, nothing."""
    if record.error:
        raise ValueError(record.error)
    prompts, params = dialect.plan(record.fields, engine.tokenizer, args)
    num_answers = len(prompts) * params.num_samples
    if num_answers > MAX_ANSWERS:
        raise ValueError(f"the record asks for {num_answers} answers but may have {MAX_ANSWERS}: split it")
    job = Job(record, index, params.num_samples)
    try:
        for prompt_ids in prompts:
            for sample in params.samples():
                number = f"/{len(job.requests)}" if num_answers > 1 else ""
                job.requests.append(engine.submit(prompt_ids, sample, id=f"{record.line}:{record.id}{number}",
                                                  class_name=record.fields.get("class"), deadline_s=args.deadline))
    except ValueError:
        for request in job.requests:
            engine.abort(request)
        raise
    return job


@contextlib.contextmanager
def progress(num_todo: int, output: "Output", watched: Engine | None) -> Iterator[Callable[[Tally], None]]:
    """A bar on stderr, or a panel of the engine that is `watched`, where stderr is a terminal that does not show the
    answers already; else nothing."""
    if is_dumb(sys.stderr) or output.file.isatty():
        yield lambda tally: None
        return
    if watched is not None:
        from live import watching

        with watching(watched, num_todo) as panel:
            yield panel.count
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    with Live(console=console, transient=True) as live:
        yield lambda tally: live.update(progress_line(tally, num_todo, console.width - 2))  # room for ^C


def progress_line(tally: Tally, num_todo: int, width: int):
    """How far the run is: the facts that there is room for, and a bar if there still is."""
    from rich.text import Text

    left_s = tally.seconds / max(tally.records, 1) * (num_todo - tally.records)
    facts = [f"{tally.records}/{num_todo}", f"{tally.tokens_per_s:.1f} tok/s",
             *[f"{timedelta(seconds=round(left_s))} left"] * (tally.records > 0), f"hit rate {tally.hit_rate:.0%}"]
    while len(" · ".join(facts)) > width and len(facts) > 1:
        facts.pop()
    line = " · ".join(facts)
    num_cells = min(MAX_BAR, width - len(line) - 1)
    if num_cells < MIN_BAR:
        return Text(line, no_wrap=True, overflow="crop")
    filled = num_cells * tally.records // max(num_todo, 1)
    rest = "─" * (num_cells - filled)
    return Text.assemble(("━" * filled, "green"), (rest, "bright_black"), f" {line}", no_wrap=True)


# ---------------------------------------------------------------------------------------------------------------------
# The input


@contextlib.contextmanager
def open_input(name: str) -> Iterator[BinaryIO]:
    """The input, to be read several times: what cannot be (`-`, a pipe) is copied to a temporary file first."""
    with contextlib.ExitStack() as stack:
        file = sys.stdin.buffer if name == "-" else stack.enter_context(open(name, "rb"))
        if name == "-" or not file.seekable():
            spool = stack.enter_context(tempfile.TemporaryFile())
            with named_errors(f"{tempfile.gettempdir()} (a copy of {name})"):
                shutil.copyfileobj(file, spool)
                spool.flush()
            file = spool
        yield file


class Source:
    """The records of the input, read line by line as often as wanted and never held together."""

    def __init__(self, file: BinaryIO, is_text: bool):
        self.file = file
        self.dialect = TEXT if is_text else SHORT
        if not is_text:
            # The first line that is an object decides.
            fields = next((record.fields for record in self.records() if record.fields), {})
            self.dialect = OPENAI if fields.keys() & {"custom_id", "url", "body"} else SHORT

    def records(self) -> Iterator[Record]:
        self.file.seek(0)
        offset = 0
        for line, raw in enumerate(self.file, 1):
            offset += len(raw)
            if line == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            content = raw.removesuffix(b"\n").removesuffix(b"\r")
            if content.strip():
                yield self._parse(line, offset - len(raw), content)

    def survey(self, answered: set[bytes]) -> int:
        """How many records are to be done. ValueError if two share an id, or if something in `answered` is not here."""
        seen, num_records, num_answered = set(), 0, 0
        for record in self.records():
            num_records += 1
            num_answered += record.is_in(answered)
            key = digest(record.id)
            if key in seen and record.id is not None:
                first = next(other.line for other in self.records() if other.id == record.id)
                raise ValueError(f"lines {first} and {record.line} both have the id {json.dumps(record.id)}: give each "
                                 "record its own")
            seen.add(key)
        if num_answered < len(answered):
            raise ValueError(f"the output holds {len(answered) - num_answered} answers to records that the input does "
                             "not hold, or no longer in that form: resume with the input it was made from, or start "
                             "again with --overwrite")
        return num_records - num_answered

    def _parse(self, line: int, offset: int, content: bytes) -> Record:
        """`offset`: where in the file `content` starts."""
        fields = error = None
        id = self.dialect.default_id(line)
        try:
            fields = self.dialect.fields(decode_utf8(content, "the input", offset=offset))
            id = self.dialect.id(fields, line)
        except ValueError as problem:
            error = str(problem)
        return Record(line, id, content, fields, error)


# ---------------------------------------------------------------------------------------------------------------------
# The output


class Output:
    """Where answers go: whole lines, flushed one by one, so that being killed loses no answer that was finished.

    --ordered into a file: answers are written as they come, for the same reason, and `finish` puts the file in order.
    --ordered into a pipe: answers wait for those before them; `has_room` is False while too many do.
    """

    def __init__(self, file: BinaryIO, name: str, path: Path | None, max_held: int | None):
        self.file, self.name = file, name
        self.path = path  # to be put in order at the end
        self.max_held = max_held  # None: nothing waits
        self.held: dict[int, Mapping] = {}
        self.next_index = 0

    @property
    def has_room(self) -> bool:
        return self.max_held is None or len(self.held) < self.max_held

    def write(self, index: int, answer: Mapping) -> None:
        """`index`: of the record, among those of this run."""
        if self.max_held is None:
            self._emit(answer)
            return
        self.held[index] = answer
        while self.next_index in self.held:
            self._emit(self.held.pop(self.next_index))
            self.next_index += 1

    def finish(self, source: Source) -> None:
        """Brings what is written, and what an interrupt left waiting, into its final place."""
        for index in sorted(self.held):
            self._emit(self.held.pop(index))
        if self.path:
            put_in_order(self.path, source)

    def _emit(self, answer: Mapping) -> None:
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        with named_errors(self.name):
            while line:  # a full disk takes a part
                line = line[self.file.write(line) :]
            self.file.flush()


@contextlib.contextmanager
def alone(path: Path | None) -> Iterator[None]:
    """Nobody else writes to this output meanwhile, by whatever name: two runs would lose each other's answers. Locks go
    with the process, however it ends; the empty file beside the output goes at the end."""
    if path is None or path.exists() and not path.is_file():
        yield
        return
    real = Path(os.path.realpath(path))
    lock = real.with_name(f".{real.name}.lock")
    with contextlib.ExitStack() as stack:
        with named_errors(str(path)):
            output = stack.enter_context(open(real, "r+b")) if path.exists() else None  # it may have names elsewhere
            file = stack.enter_context(open(lock, "w"))
        held = locked(file) and lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno()))
        if held:
            stack.callback(lock.unlink, missing_ok=True)
        if not held or output and not locked(output):
            raise ValueError(f"another run writes to {path}: wait for its end or name another output")
        yield


def locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def open_output(path: Path | None, args, max_held: int) -> Iterator[Output]:
    is_file = path is not None and (path.is_file() or not path.exists())  # not a pipe, nor /dev/null
    is_new = is_file and not path.exists()
    with contextlib.ExitStack() as stack:
        # Unbuffered: of a line that failed nothing is left to be written again when the file is closed.
        file = stack.enter_context(open(path, "ab" if args.resume else "wb", 0)) if path else sys.stdout.buffer
        if is_new:
            locked(file)  # one that was there is locked already, in `alone`
        in_order, waits = args.ordered and is_file, args.ordered and not is_file
        yield Output(file, str(path or "stdout"), path if in_order else None, max_held if waits else None)


def check_output(path: Path | None, file: BinaryIO, args) -> set[bytes]:
    """The keys of what the output already answers, if that counts. ValueError if it must not be written."""
    if path is None or not path.is_file():
        return set()
    if os.path.samestat(path.stat(), os.fstat(file.fileno())):
        raise ValueError(f"{path} is the input too: name another output")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if args.resume:
        return {answer_key(answer) for _, _, answer in answers(path) if is_final(answer)}
    if not args.overwrite:
        raise ValueError(f"{path} exists: continue it with --resume, replace it with --overwrite, or name another")
    return set()


def answers(path: Path) -> Iterator[tuple[int, bytes, Mapping]]:
    """Of each answer in an output file the offset, the line and its content, less a torn last line. ValueError if
    anything else is in it."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line.startswith(b"{"):
                return
            try:
                answer = json.loads(line)
                if not {"error"} < answer.keys() & {"error", "id", "custom_id"}:
                    raise ValueError
            except (ValueError, AttributeError):
                raise ValueError(f"{path} line {number} is not an answer that this command wrote: name another output, "
                                 "or replace it with --overwrite") from None
            yield offset, line, answer
            offset += len(line)


def is_final(answer: Mapping) -> bool:
    """Whether --resume may leave it as it is: it did not fail, and no deadline cut it."""
    body = (answer.get("response") or {}).get("body") or {}
    ends = [choice.get("finish_reason") for choice in (answer, *answer.get("samples", ()), *body.get("choices", ()))]
    return answer["error"] is None and "cancelled" not in ends


def answer_key(answer: Mapping) -> bytes:
    """The one of a record's `keys` by which its answer can be known."""
    request_id = answer.get("request_id") or (answer.get("response") or {}).get("request_id")
    known = re.fullmatch("req_([0-9a-f]{20})", str(request_id))
    return bytes.fromhex(known[1]) if known else digest(answer.get("custom_id", answer.get("id")))


def repair(path: Path) -> None:
    """Cuts failed records, which will be done again, and a torn last line."""
    with replacing(path) as file:
        file.writelines(line for _, line, answer in answers(path) if is_final(answer))


def put_in_order(path: Path, source: Source) -> None:
    """Brings answers into the order of their records."""
    places = {answer_key(answer): offset for offset, _, answer in answers(path)}
    offsets = [places[key] for record in source.records() for key in record.keys & places.keys()]
    assert len(offsets) == len(places)  # an answer without a record would be lost
    if offsets == sorted(offsets):
        return
    with replacing(path) as file, open(path, "rb") as unordered:
        for offset in offsets:
            unordered.seek(offset)
            file.write(unordered.readline())
