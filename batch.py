"""Files of prompts in, files of answers out.

Owns the two line formats (OpenAI's batch lines and our short ones), and an output file that survives being killed.
Drives the engine by submit, step and abort; knows nothing of scheduling, pages or tensors.
Start at `main`. In call order: the run, the input, the output, our short lines, OpenAI's lines.

A record's `request_id` is a digest of its id and its line. By it `--resume` knows what is answered, and whether the
input is still the same.
"""

import codecs
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from engine import Engine
from sampling import SamplingParams
from scheduler import Request
from tokenizer import Tokenizer

FED_AHEAD = 2  # requests in the engine, as a multiple of those it runs at once: enough to keep it busy
MAX_ANSWERS = 4096  # of one record, which is in the engine as a whole
HELD_BACK = 16  # answers that --ordered may hold back for one that comes late, as a multiple of the same


@dataclass(frozen=True)
class Record:
    """One line of the input that is not blank. `fields` is None, and `error` says why, if it cannot be read."""

    line: int  # from 1, blank lines counted
    id: str | int | None  # None: a line in OpenAI's form whose custom_id cannot be read
    content: bytes
    fields: Mapping | None
    error: str | None

    @property
    def keys(self) -> set[bytes]:
        """Two names for it: of its id and content, by which this command's answers are known, and of its id alone, by
        which an answer without request_id is."""
        return {self.key, digest(self.id)}

    @property
    def key(self) -> bytes:
        return digest([self.line if self.id is None else self.id, self.content.hex()])

    @property
    def request_id(self) -> str:
        return f"req_{self.key.hex()}"


def digest(value) -> bytes:
    return blake2b(json.dumps(value).encode(), digest_size=10).digest()


@dataclass
class Job:
    """A record in the engine: one request for each sample of each prompt, samples of a prompt side by side."""

    record: Record
    index: int  # among the records of this run
    num_samples: int = 1
    requests: list[Request] = field(default_factory=list)
    num_done: int = 0

    @property
    def error(self) -> str | None:
        return next((request.error for request in self.requests if request.error), None)


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

    def summary(self) -> str:
        return (f"{self.records} requests · {self.failed} failed · {self.tokens} tokens · {self.tokens_per_s:.1f} "
                f"tok/s · hit rate {self.hit_rate:.0%} · {self.preemptions} preemptions · {self.seconds:.1f} s")


# ---------------------------------------------------------------------------------------------------------------------
# The run


def main(engine: Engine, args) -> int:
    """Answers the records of `args.input`. Returns 0, or 1 if one failed. ValueError or OSError before anything ran:
    the input holds an id twice, or the output may not be written."""
    path = None if args.output in (None, "-") else Path(args.output)
    num_notes = len(engine.tokenizer.notes)  # shown when the model was loaded
    with open_input(args.input) as file:
        source = Source(file, is_text=args.input.lower().endswith(".txt"))
        if args.raw and source.dialect is OPENAI:
            raise ValueError("--raw is for short lines: in OpenAI's form /v1/completions continues the text as it is")
        answered = check_output(path, file, args)
        num_todo = source.survey(answered)
        if path and args.resume and path.is_file():
            repair(path)
        max_held = HELD_BACK * engine.config.max_requests
        with held_signals() as signals:
            with open_output(path, args, max_held) as output, progress(num_todo, output) as show:
                tally = run(engine, args, source, answered, output, show, signals)
                output.finish(source)
            for note in engine.tokenizer.notes[num_notes:]:
                print(f"warning: {note}", file=sys.stderr)
            print(tally.summary() + (f" · {len(answered)} answered before" if answered else ""), file=sys.stderr)
    return 1 if tally.failed else 0


def run(engine: Engine, args, source: "Source", answered: set[bytes], output: "Output", show: Callable[[Tally], None],
        signals: list[int]) -> Tally:
    """Answers the records that are not in `answered`, with a few more in the engine than it can run at once. A signal
    ends it between two steps."""
    todo = enumerate(record for record in source.records() if not record.keys & answered)
    tally, in_flight = Tally(), {}
    max_in_flight = FED_AHEAD * engine.config.max_requests
    while not signals:
        while len(in_flight) < max_in_flight and output.has_room and not signals and (item := next(todo, None)):
            index, record = item
            try:
                job = submit(engine, args, source.dialect, record, index)
                in_flight |= dict.fromkeys(job.requests, job)
            except ValueError as error:
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


@contextlib.contextmanager
def held_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM only enter the list, and take effect at the end: in the middle of a step they would leave the
    engine torn, in the middle of a write an answer. Whoever works meanwhile looks at the list between steps."""
    held: list[int] = []
    kinds = [kind for kind in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(kind))]
    handlers = {kind: signal.signal(kind, lambda number, frame: held.append(number)) for kind in kinds}
    try:
        yield held
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
    for number in held:
        handlers[number](number, None)


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
                job.requests.append(engine.submit(prompt_ids, sample, deadline_s=args.deadline))
    except ValueError:
        for request in job.requests:
            engine.abort(request)
        raise
    return job


@contextlib.contextmanager
def progress(num_todo: int, output: "Output") -> Iterator[Callable[[Tally], None]]:
    """A bar on stderr, where stderr is a terminal that does not show the answers already; else nothing."""
    if not sys.stderr.isatty() or output.file.isatty():
        yield lambda tally: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_todo, rates="")
        yield lambda tally: bar.update(task, completed=tally.records,
                                       rates=f"{tally.tokens_per_s:.1f} tok/s · hit rate {tally.hit_rate:.0%}")


# ---------------------------------------------------------------------------------------------------------------------
# The input


@contextlib.contextmanager
def open_input(name: str) -> Iterator[BinaryIO]:
    """The input, to be read several times: what cannot be (`-`, a pipe) is copied to a temporary file first."""
    with contextlib.ExitStack() as stack:
        file = sys.stdin.buffer if name == "-" else stack.enter_context(open(name, "rb"))
        if name == "-" or not file.seekable():
            spool = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(file, spool)
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
            num_answered += bool(record.keys & answered)
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
            fields = self.dialect.fields(decode(content, offset))
            id = self.dialect.id(fields, line)
        except ValueError as problem:
            error = str(problem)
        return Record(line, id, content, fields, error)


def decode(content: bytes, offset: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {offset + error.start} of the input is not UTF-8 (0x{content[error.start]:02x}): "
                         "save it as UTF-8") from None


def json_object(text: str) -> Mapping:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object: a record is written {…} on one line")
    if re.search(r"\\u[dD][89a-fA-F]", text):  # the only way in for half a character: UTF-8 cannot hold one
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(f"{half} is half of a surrogate pair: the text was cut inside a character") from None
    return value


# ---------------------------------------------------------------------------------------------------------------------
# The output


class Output:
    """Where answers go: whole lines, flushed one by one, so that being killed loses no answer that was finished.

    --ordered into a file: answers are written as they come, for the same reason, and `finish` puts the file in order.
    --ordered into a pipe: answers wait for those before them; `has_room` is False while too many do.
    """

    def __init__(self, file: BinaryIO, path: Path | None, max_held: int | None):
        self.file = file
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
        self.file.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        self.file.flush()


@contextlib.contextmanager
def open_output(path: Path | None, args, max_held: int) -> Iterator[Output]:
    is_file = path is not None and (path.is_file() or not path.exists())  # not a pipe, nor /dev/null
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "ab" if args.resume else "wb")) if path else sys.stdout.buffer
        in_order, waits = args.ordered and is_file, args.ordered and not is_file
        yield Output(file, path if in_order else None, max_held if waits else None)


def check_output(path: Path | None, file: BinaryIO, args) -> set[bytes]:
    """The keys of what the output already answers, if that counts. ValueError if it must not be written."""
    if path is None and (args.resume or args.overwrite):
        raise ValueError("--resume and --overwrite are for an output file: name it with -o OUT")
    if path is None or not path.is_file():
        return set()
    if os.path.samestat(path.stat(), os.fstat(file.fileno())):
        raise ValueError(f"{path} is the input too: name another output")
    if args.resume:
        return {answer_key(answer) for _, _, answer in answers(path) if answer["error"] is None}
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


def answer_key(answer: Mapping) -> bytes:
    """The one of a record's `keys` by which its answer can be known."""
    request_id = answer.get("request_id") or (answer.get("response") or {}).get("request_id")
    known = re.fullmatch("req_([0-9a-f]{20})", str(request_id))
    return bytes.fromhex(known[1]) if known else digest(answer.get("custom_id", answer.get("id")))


def repair(path: Path) -> None:
    """Cuts failed records, which will be done again, and a torn last line."""
    with replacing(path) as file:
        file.writelines(line for _, line, answer in answers(path) if answer["error"] is None)


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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is complete: at any moment there is the old one or the new one."""
    path = path.resolve()  # a link stays a link
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            shutil.copymode(path, file.name)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


# ---------------------------------------------------------------------------------------------------------------------
# Dialects


@dataclass(frozen=True)
class Dialect:
    """How records are read and answers are written."""

    fields: Callable[[str], Mapping]  # of a line
    id: Callable[[Mapping, int], str | int]  # of fields, or of the line number
    default_id: Callable[[int], int | None]  # of a line that cannot be read
    plan: Callable[[Mapping, Tokenizer, object], tuple[Sequence[list[int]], SamplingParams]]  # prompts' ids
    answer: Callable[[Job, Engine], dict]
    failure: Callable[[Record, str], dict]


def read_messages(messages) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {shown(messages)} but must be a list of at least one message")
    return [read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def read_message(name: str, message) -> dict[str, str]:
    """Role and text of a message; a list of text parts is joined."""
    if not isinstance(message, dict):
        raise ValueError(f'{name} is {shown(message)} but must be {{"role": …, "content": …}}')
    unknown = {key for key, value in message.items() if value is not None} - {"role", "content"}
    if unknown:
        raise ValueError(f"{name} has the field '{min(unknown)}': only role and content are understood")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{name} has the role {shown(role)}: known are {', '.join(ROLES)}")
    if isinstance(content, list):
        is_text = [isinstance(part, dict) and part.get("type") == "text" for part in content]
        texts = [part.get("text") for part in content] if all(is_text) else [None]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    if not isinstance(content, str):
        raise ValueError(f"{name} has the content {shown(content)} but it must be text")
    return {"role": ROLES[role], "content": content}


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def shown(value) -> str:
    """As JSON, cut where it would fill the screen."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


# ---------------------------------------------------------------------------------------------------------------------
# Short lines, and text files: a prompt a line


def short_id(fields: Mapping, line: int) -> str | int:
    id = fields.get("id")
    if id is not None and not isinstance(id, str) and type(id) is not int:
        raise ValueError(f"id is {shown(id)} but must be a string or a whole number")
    return line if id is None else id


def short_plan(fields: Mapping, tokenizer: Tokenizer, args) -> tuple[Sequence[list[int]], SamplingParams]:
    given = {name: value for name, value in fields.items() if value is not None}
    given.pop("id", None)
    prompt, messages, raw = given.pop("prompt", None), given.pop("messages", None), given.pop("raw", None)
    if "class" in given:
        raise ValueError(f"class is {shown(given['class'])} but this build has no admission classes: leave it out")
    if raw is not None and not isinstance(raw, bool):
        raise ValueError(f"raw is {shown(raw)} but must be true or false")
    if (prompt is None) == (messages is None):
        raise ValueError("a record needs either prompt or messages" + ("" if prompt is None else ", not both"))
    if messages is not None and raw:
        raise ValueError("raw is true, but only a prompt can be continued as it stands: leave out raw or the messages")
    params = SamplingParams.from_fields(given, SamplingParams.from_fields(args.sampling))
    if messages is not None:
        messages = read_messages(messages)
        continues = messages[-1]["role"] == "assistant"
        return [tokenizer.chat(messages, add_generation_prompt=not continues, continue_final=continues)], params
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"prompt is {shown(prompt)} but must be a text that is not empty")
    if tokenizer.chat_template is None or (args.raw if raw is None else raw):
        return [tokenizer.encode(prompt)], params
    return [tokenizer.chat([{"role": "user", "content": prompt}])], params


def short_answer(job: Job, engine: Engine) -> dict:
    samples = [short_sample(request) for request in job.requests]
    several = {"samples": samples} if len(samples) > 1 else {}
    return {"id": job.record.id} | samples[0] | {"request_id": job.record.request_id, "error": None} | several


def short_sample(request: Request) -> dict:
    return {"text": request.text, "token_ids": request.output_ids, "finish_reason": request.finish_reason,
            "prompt_tokens": request.num_prompt, "cached_tokens": request.num_cached,
            "completion_tokens": request.num_output, "preemptions": request.num_preemptions,
            "seed": request.params.seed, "logprobs": request.logprobs, "draft": None}


def short_failure(record: Record, message: str) -> dict:
    return {"id": record.id, "request_id": record.request_id, "error": {"line": record.line, "message": message}}


# ---------------------------------------------------------------------------------------------------------------------
# OpenAI's lines (platform.openai.com/docs/api-reference: batch, chat, completions)

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
NO_EFFECT = ("model", "user", "metadata")
ONLY_DEFAULT = {"stream": [False], "tools": [[]], "tool_choice": ["none", "auto"], "functions": [[]],
                "function_call": ["none", "auto"], "parallel_tool_calls": [True], "response_format": [{"type": "text"}],
                "suffix": [""], "best_of": [1], "store": [False], "service_tier": ["auto", "default"],
                "modalities": [["text"]]}
OWN_NAMES = {"n": "num_samples", "max_completion_tokens": "max_tokens"}
OWN_FIELDS = {CHAT_URL: ("messages", "logprobs", "top_logprobs"), TEXT_URL: ("prompt", "echo")}


def openai_id(fields: Mapping, line: int) -> str:
    id = fields.get("custom_id")
    if not isinstance(id, str):
        raise ValueError(f"custom_id is {shown(id)} but must be a string")
    return id


def openai_plan(fields: Mapping, tokenizer: Tokenizer, args) -> tuple[Sequence[list[int]], SamplingParams]:
    unknown = fields.keys() - {"custom_id", "method", "url", "body"}
    url, body = fields.get("url"), fields.get("body")
    if unknown:
        raise ValueError(f"unknown field '{min(unknown)}': known are custom_id, method, url and body")
    if fields.get("method") not in (None, "POST"):
        raise ValueError(f"method is {shown(fields['method'])} but must be POST")
    if not isinstance(url, str) or url not in OWN_FIELDS:
        raise ValueError(f"url is {shown(url)} but must be {CHAT_URL} or {TEXT_URL}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {shown(body)} but must be an object")
    body = {name: value for name, value in body.items() if value is not None}
    params = openai_params(url, body, args)
    if url == CHAT_URL:
        return [tokenizer.chat(read_messages(body.get("messages")))], params
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in text_prompts(body)], params


def openai_params(url: str, body: Mapping, args) -> SamplingParams:
    given = {}
    for name, value in body.items():
        if name in ONLY_DEFAULT and value not in ONLY_DEFAULT[name]:
            raise ValueError(f"{name} is {shown(value)}: only {shown(ONLY_DEFAULT[name][0])} can be honoured")
        if name in NO_EFFECT or name in ONLY_DEFAULT or name in OWN_FIELDS[url]:
            continue
        ours = OWN_NAMES.get(name, name)
        if ours in given:
            raise ValueError(f"{name} sets {ours} a second time: give it once")
        given[ours] = value
    if url == CHAT_URL:
        if not isinstance(body.get("logprobs", False), bool):
            raise ValueError(f"logprobs is {shown(body['logprobs'])} but must be true or false in a chat")
        if body.get("logprobs"):
            given["logprobs"] = body.get("top_logprobs", 0)
        elif body.get("top_logprobs"):
            raise ValueError(f"top_logprobs is {shown(body['top_logprobs'])}: it needs logprobs to be true")
    elif not isinstance(body.get("echo", False), bool):
        raise ValueError(f"echo is {shown(body['echo'])} but must be true or false")
    elif body.get("echo") and "logprobs" in body:
        raise ValueError("echo with logprobs needs those of the prompt, which are not computed: ask for one of them")
    base = SamplingParams(temperature=1.0, max_tokens=None if url == CHAT_URL else 16)
    return SamplingParams.from_fields(given, SamplingParams.from_fields(args.sampling, base))


def text_prompts(body: Mapping) -> list[str | list[int]]:
    """OpenAI's `prompt`: a string, token ids, or a list of either."""
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else [prompt]
    for one in prompts:
        is_ids = isinstance(one, list) and all(type(id) is int for id in one)
        if not one or not (isinstance(one, str) or is_ids):
            raise ValueError(f"prompt is {shown(prompt)} but must be a text, ids, or a list of either, none empty")
    return prompts


def openai_answer(job: Job, engine: Engine) -> dict:
    url, body = job.record.fields["url"], job.record.fields["body"]
    if url == CHAT_URL:
        kind, prefix = "chat.completion", "chatcmpl"
        choices = [chat_choice(request, engine.tokenizer) for request in job.requests]
    else:
        prompts = text_prompts(body) if body.get("echo") else [""] * len(job.requests)
        kind, prefix = "text_completion", "cmpl"
        choices = [text_choice(request, prompts[i // job.num_samples], engine.tokenizer)
                   for i, request in enumerate(job.requests)]
    ends = [{"index": i, "finish_reason": request.finish_reason, "seed": request.params.seed}
            for i, request in enumerate(job.requests)]
    answer = {"id": f"{prefix}-{job.record.request_id}", "object": kind, "created": int(time.time()),
              "model": body.get("model") or engine.name, "system_fingerprint": None,
              "choices": [choice | end for choice, end in zip(choices, ends)],
              "usage": openai_usage(job.requests, job.num_samples)}
    return openai_record(job.record, 200, answer, None)


def openai_usage(requests: Sequence[Request], num_samples: int) -> dict:
    """A prompt counts once, however many samples it has."""
    num_prompt = sum(request.num_prompt for request in requests[::num_samples])
    num_cached = sum(request.num_cached for request in requests[::num_samples])
    num_output = sum(request.num_output for request in requests)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached}}


def chat_choice(request: Request, tokenizer: Tokenizer) -> dict:
    def shape(entry: Mapping) -> dict:
        return {"token": entry["token"], "logprob": entry["logprob"], "bytes": list(token_bytes(entry, tokenizer))}

    logprobs = None
    if request.logprobs is not None:
        content = [shape(entry) | {"top_logprobs": [shape(top) for top in entry["top"]]} for entry in request.logprobs]
        logprobs = {"content": content, "refusal": None}
    return {"message": {"role": "assistant", "content": request.text, "refusal": None}, "logprobs": logprobs}


def text_choice(request: Request, prompt: str | list[int], tokenizer: Tokenizer) -> dict:
    """`prompt` is what echo repeats."""
    def name(entry: Mapping) -> str:
        """Its text; of a part of a character the bytes, or several parts would share one name."""
        data = token_bytes(entry, tokenizer)
        return entry["token"] if entry["token"].encode() == data else f"bytes:{str(data)[2:-1]}"

    echoed = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, show_special=True)
    logprobs = None
    if request.logprobs is not None:
        offsets = itertools.accumulate((len(entry["token"]) for entry in request.logprobs), initial=0)
        logprobs = {"tokens": [name(entry) for entry in request.logprobs],
                    "token_logprobs": [entry["logprob"] for entry in request.logprobs],
                    # The drawn token is listed even where it is not among the best.
                    "top_logprobs": [{name(top): top["logprob"] for top in [*entry["top"], entry]}
                                     for entry in request.logprobs],
                    "text_offset": list(offsets)[:-1]}
    return {"text": echoed + request.text, "logprobs": logprobs}


def token_bytes(entry: Mapping, tokenizer: Tokenizer) -> bytes:
    id = entry["id"]
    return tokenizer.vocabulary.data(id, show_special=True) if id < tokenizer.vocab_size else b""


def openai_failure(record: Record, message: str) -> dict:
    message = f"line {record.line}: {message}"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return openai_record(record, 400, {"error": error}, {"code": "invalid_request", "message": message})


def openai_record(record: Record, status: int, body: Mapping, error: Mapping | None) -> dict:
    return {"id": f"batch_{record.request_id}", "custom_id": record.id,
            "response": {"status_code": status, "request_id": record.request_id, "body": body}, "error": error}


SHORT = Dialect(json_object, short_id, lambda line: line, short_plan, short_answer, short_failure)
TEXT = Dialect(lambda text: {"prompt": text}, short_id, lambda line: line, short_plan, short_answer, short_failure)
OPENAI = Dialect(json_object, openai_id, lambda line: None, openai_plan, openai_answer, openai_failure)
