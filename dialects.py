"""The lines of a batch file: what a record asks for, and how its answer is written.

Owns our short lines and OpenAI's batch lines (platform.openai.com/docs/api-reference: batch, chat, completions). Knows
nothing of files and never runs the engine: batch.py does. Start at `Dialect`; its rows are at the end.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine import Engine
from sampling import SamplingParams
from scheduler import Request
from tokenizer import Tokenizer


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

    def is_in(self, keys: set[bytes]) -> bool:
        return bool(keys) and not keys.isdisjoint(self.keys)

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


@dataclass(frozen=True)
class Dialect:
    """How records are read and answers are written."""

    fields: Callable[[str], Mapping]  # of a line
    id: Callable[[Mapping, int], str | int]  # of fields, or of the line number
    default_id: Callable[[int], int | None]  # of a line that cannot be read
    plan: Callable[[Mapping, Tokenizer, object], tuple[Sequence[list[int]], SamplingParams]]  # prompts' ids
    answer: Callable[[Job, Engine], dict]
    failure: Callable[[Record, str], dict]


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
    class_name = given.pop("class", None)
    if class_name is not None and not isinstance(class_name, str):
        raise ValueError(f"class is {shown(class_name)} but must name an admission class")
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


SAMPLE_FIELDS = ("text", "token_ids", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens",
                 "preemptions", "seed", "logprobs", "draft")


def short_sample(request: Request) -> dict:
    return dict(zip(SAMPLE_FIELDS, (
        request.text, request.output_ids, request.finish_reason, request.num_prompt, request.num_cached,
        request.num_output, request.num_preemptions, request.params.seed, request.logprobs, request.draft_report),
        strict=True))


def short_failure(record: Record, message: str) -> dict:
    return ({"id": record.id} | dict.fromkeys(SAMPLE_FIELDS) | {"request_id": record.request_id}
            | {"error": {"line": record.line, "message": message}})


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
    if not isinstance(body.get("model", ""), str):
        raise ValueError(f"model is {shown(body['model'])} but must be a string")
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
