"""The conversation: what is said, what commands do.

Owns the messages; how they are typed and shown is screen.py's. Every turn renders the whole conversation anew; that
this is cheap is the prefix cache's doing, and nothing here knows about it.
Start at `main`, then `take_turn`. Commands are rows of COMMANDS. Only answers go to stdout.
"""

import contextlib
import json
import signal
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from dialects import read_messages, shown
from engine import Engine
from sampling import ALIASES, SamplingParams
from scheduler import Request
from screen import Plain, Terminal, say, split_thought
from terminal import decode_utf8, dim, held_signals, named_errors, replacing

RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # what a generation config may set
NOT_IN_CHAT = ("num_samples", "logprobs")  # a conversation goes on with one answer, and shows only its text
UNLIMITED = SamplingParams(max_tokens=None)
QUOTES = '"""'
NEARLY_FULL = 0.8  # of the context
MAX_FILE_BYTES = 64 << 20  # of what /read, /save and /load look at

Messages = list[dict[str, str]]
Screen = Plain | Terminal


@dataclass
class Conversation:
    """What has been said, and how to go on. Lists of messages are replaced by other ones, never changed in place."""

    engine: Engine
    settings: SamplingParams
    defaults: SamplingParams  # what `/set NAME default` goes back to
    deadline_s: float | None = None
    system: str | None = None
    messages: Messages = field(default_factory=list)
    unanswered: Messages = field(default_factory=list)  # these and a message that the context had no room for
    attached: list[str] = field(default_factory=list)  # texts to go in front of the next message
    fold: bool = True  # what the model thinks becomes one line
    requests: list[Request] = field(default_factory=list)  # of the answers so far
    num_notes: int = 0  # of the tokenizer's, shown already

    def prompt_ids(self, messages: Messages) -> list[int]:
        """`messages` after the system turn, as the chat template has them. ValueError: it refuses them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.engine.tokenizer.chat(system + messages)

    def prompt_end(self, prompt_ids: list[int]) -> str:
        """The end of a prompt's text, where a template may let the model begin with a thought."""
        return self.engine.tokenizer.decode(prompt_ids[-8:], show_special=True)


def main(args, load_engine: Callable[..., Engine]) -> int:
    """Talks until the input ends. Returns 0, or 1 if a turn failed and nobody was there to see it."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with Terminal(completions) as terminal:  # what is typed while the model is loaded waits too
            return talk(begin(load_engine(args), args), terminal)
    return read_pipe(begin(load_engine(args), args), Plain(statistics=args.stats or sys.stderr.isatty()))


def begin(engine: Engine, args) -> Conversation:
    if engine.tokenizer.chat_template is None:
        raise ValueError("the model has no chat template, so it was not made for conversations: use generate --raw")
    settings = default_settings(engine, args.sampling)
    chat = Conversation(engine, settings, settings, args.deadline, num_notes=len(engine.tokenizer.notes))
    if args.system is not None:
        begin_with(chat, args.system)
    return chat


def default_settings(engine: Engine, given: Mapping) -> SamplingParams:
    """What the model's makers recommend, else temperature 0.7 and top-p 0.95; what the user gave wins."""
    recommended = {name: engine.generation[name] for name in RECOMMENDED if engine.generation.get(name) is not None}
    if engine.generation.get("do_sample") is False:
        recommended["temperature"] = 0.0
    elif recommended.keys() & {"temperature", "top_k", "top_p"}:
        recommended = {"temperature": 1.0} | recommended  # what a generation config means by leaving it out
    else:
        recommended |= {"temperature": 0.7, "top_p": 0.95}
    return checked(engine, SamplingParams.from_fields(given, SamplingParams.from_fields(recommended, UNLIMITED)))


def checked(engine: Engine, settings: SamplingParams) -> SamplingParams:
    settings.check_ids(engine.vocab)
    for name in NOT_IN_CHAT:
        if getattr(settings, name) != getattr(UNLIMITED, name):
            raise ValueError(f"{name} is {getattr(settings, name)} but a chat has no use for it: leave it out, or use "
                             "generate or batch")
    return settings


# ---------------------------------------------------------------------------------------------------------------------
# Turns


def handle(chat: Conversation, text: str, quoted: bool, screen: Screen) -> None:
    """Does what one input says: a command, or a message to be answered. ValueError: it was not answered."""
    name, *argument = text.split(None, 1) or [""]
    command = None if quoted else command_named(name)
    if command:
        try:
            messages = command.run(chat, argument[0].strip() if argument else "")
        except (ValueError, OSError, RecursionError) as error:
            say(f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else str(error))
            return
        if messages:
            take_turn(chat, messages, screen)
    elif name.startswith("/") and not quoted and "\n" not in text:
        say(f"unknown command {name}: /help lists them; put {QUOTES} around a message that begins with /")
    elif text.strip() or chat.attached:
        send(chat, text, screen)


def send(chat: Conversation, text: str, screen: Screen) -> None:
    """Has a message answered, with what was read in front of it. ValueError: it was not."""
    content = "\n\n".join([*chat.attached, text] if text.strip() else chat.attached)
    messages = [*chat.messages, message_of("user", content)]
    try:
        take_turn(chat, messages, screen)
    except ValueError as error:
        if chat.attached and chat.unanswered is not messages:
            raise ValueError(f"{error}; what was read goes with the next message still, /undo drops it") from None
        chat.attached = []
        raise
    chat.attached = []


def take_turn(chat: Conversation, messages: Messages, screen: Screen) -> None:
    """Answers `messages`, and makes them and the answer the conversation. ValueError: it stays as it was; a message
    that the context has no room for is kept apart."""
    engine, prompt_ids = chat.engine, chat.prompt_ids(messages)
    if len(prompt_ids) >= engine.capacity:
        forget_unanswered(chat, messages)
        chat.unanswered = messages
        raise ValueError(f"the conversation would have {len(prompt_ids)} tokens but the context holds "
                         f"{engine.capacity}: /compact drops the oldest turns and answers, /undo forgets the message, "
                         "/clear begins anew; or start with a larger --context")
    request = engine.submit(prompt_ids, chat.settings, deadline_s=chat.deadline_s)
    show_reading = screen.reading(request)
    with held_signals() as signals, screen.show(chat.prompt_end(prompt_ids), chat.fold) as write:
        while request.finish_reason is None:
            outputs = engine.step()
            if signals and (output := engine.abort(request)):
                outputs.append(output)
            show_reading()
            write("".join(output.text for output in outputs))
        if screen.stoppable:
            signals[:] = [number for number in signals if number != signal.SIGINT]  # it wanted no more than this
    if request.error:
        raise ValueError(request.error)
    if request.finish_reason == "cancelled" and not request.text:
        raise ValueError("stopped before the first word: the message is not part of the conversation")
    forget_unanswered(chat, messages)
    chat.messages = [*messages, message_of("assistant", request.text)]
    chat.requests.append(request)
    remark(chat, request, screen)


def forget_unanswered(chat: Conversation, messages: Messages) -> None:
    """Says so, unless it is in `messages`, which take its place."""
    if chat.unanswered not in ([], messages):
        say("the earlier message that had no room is forgotten")
    chat.unanswered = []


def message_of(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def remark(chat: Conversation, request: Request, screen: Screen) -> None:
    """Says what the answer does not show: that it was cut, what the vocabulary lacks, statistics."""
    if request.finish_reason == "length" and len(request.tokens) == chat.engine.capacity:
        say(f"the answer is cut: the context of {chat.engine.capacity} tokens is full; /compact drops the oldest "
            "turns, /undo the last, /clear all")
    elif request.finish_reason == "length":
        say(f"the answer is cut after max_tokens {request.params.max_tokens}")
    elif request.finish_reason == "cancelled":
        say("the answer was stopped; what was said is kept")
    notes = chat.engine.tokenizer.notes
    for note in notes[chat.num_notes :]:
        say(f"warning: {note}")
    chat.num_notes = len(notes)
    if screen.statistics:
        say(dim(statistics(chat, request)))
    elif request.params.temperature > 0 and chat.settings.seed is None:
        say(f"seed {request.params.seed}")  # without it nobody could have this answer again


def statistics(chat: Conversation, request: Request) -> str:
    decode_s = request.finished_s - (request.first_token_s or request.finished_s)
    rate = f" · {(request.num_output - 1) / decode_s:.1f} tok/s" if decode_s and request.num_output > 1 else ""
    return (f"{request.num_output} tokens{rate} · prompt {request.num_prompt} ({request.num_cached} cached) · "
            f"context {len(request.tokens)}/{chat.engine.capacity}"
            + (f" · seed {request.params.seed}" if request.params.temperature > 0 else ""))


def context_use(chat: Conversation) -> str:
    """How full the context is, once something is said; in 40 columns."""
    num_tokens = tokens_used(chat)
    used = num_tokens / chat.engine.capacity
    if used > NEARLY_FULL:
        return f"context {used:.0%} full · /compact makes room"
    return f"context {num_tokens} of {chat.engine.capacity} tokens ({used:.0%})" if num_tokens else ""


def tokens_used(chat: Conversation) -> int:
    """Of the context. What a next turn would begin with is counted too, as far as there is room for it."""
    try:
        num_tokens = len(chat.prompt_ids(chat.messages)) if chat.messages else 0
    except ValueError:  # the template has something against messages without a new one
        return 0
    return min(num_tokens, chat.engine.capacity)


# ---------------------------------------------------------------------------------------------------------------------
# Input: a pipe, or a person


def read_pipe(chat: Conversation, screen: Screen) -> int:
    """A message a line. What fails does not stop what follows."""
    read_line, failed, ended = line_reader(sys.stdin.buffer), False, False
    while not ended:
        try:
            text, quoted = read_input(read_line)
            if text.strip():
                handle(chat, text, quoted, screen)
        except EOFError:
            ended = True
        except ValueError as error:
            say(f"error: {error}")
            failed = True
    if chat.attached:  # what was read last is a message too
        try:
            handle(chat, "", False, screen)
        except ValueError as error:
            say(f"error: {error}")
            failed = True
    return 1 if failed else 0


def line_reader(file) -> Callable[[str], str]:
    """A function that gives the next line, or raises EOFError; ValueError if the line is not UTF-8."""
    offset = 0

    def read_line(mark: str) -> str:
        nonlocal offset
        raw = file.readline()
        if not raw:
            raise EOFError
        offset += len(raw)
        text = decode_utf8(raw, "stdin", offset=offset - len(raw)).removesuffix("\n").removesuffix("\r")
        return text.removeprefix("\ufeff") if offset == len(raw) else text

    return read_line


def read_input(read_line: Callable[[str], str]) -> tuple[str, bool]:
    '''One line, or the lines from """ to """, and whether it is a message as it stands. `read_line` is given what to
    show before it.'''
    text = read_line(">>> ")
    if "\n" in text.strip():  # a paste, or typed so: all of it is here, whatever it begins with
        return text, not text.startswith("/system ")
    if not text.lstrip().startswith(QUOTES):
        return text, False
    text = text.lstrip().removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        try:
            text += "\n" + read_line("... ")
        except EOFError:
            raise ValueError(f"the input ended inside a message that began with {QUOTES}: end it with them") from None
    return text.rstrip().removesuffix(QUOTES).removeprefix("\n").removesuffix("\n"), True


def talk(chat: Conversation, terminal: Terminal) -> int:
    """Reads from a terminal. A paste is one message, as the terminal brackets it."""
    say(dim(f"{chat.engine.name} · /help lists the commands · Ctrl-D leaves"))
    while True:
        try:
            terminal.status = context_use(chat)
            handle(chat, *read_input(terminal.read_line), terminal)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return 0
        except ValueError as error:
            say(str(error))


def completions(typed: str) -> tuple[int, list[str]]:
    """What the Tab key offers after `typed`, and where it goes, counted back from the end."""
    command, blank, argument = typed.partition(" ")
    if not typed.startswith("/"):
        return 0, []
    if not blank:
        return -len(typed), [name for row in COMMANDS for name in row.names if name.startswith(typed)]
    if command == "/set":
        return -len(argument), [f.name for f in fields(SamplingParams) if f.name.startswith(argument)]
    if command == "/think":
        return -len(argument), [word for word in ("open", "fold") if word.startswith(argument)]
    if command in ("/read", "/save", "/load"):
        folder, _, name = argument.rpartition("/")
        with contextlib.suppress(OSError, ValueError):
            place = path_of(folder + "/" if "/" in argument else ".")
            found = sorted(path.name + "/" * path.is_dir() for path in place.iterdir() if path.name.startswith(name))
            return -len(name), found
    return 0, []


# ---------------------------------------------------------------------------------------------------------------------
# Commands. Each gets what follows its name, and returns the messages to be answered, if any. ValueError or OSError: it
# did nothing.


@dataclass(frozen=True)
class Command:
    names: tuple[str, ...]
    argument: str
    help: str
    run: Callable[[Conversation, str], Messages | None]


def command_named(name: str) -> Command | None:
    return next((command for command in COMMANDS if name in command.names), None)


def show_help(chat: Conversation, argument: str) -> None:
    for command in COMMANDS:
        say(f"{f'{command.names[0]} {command.argument}':18} {command.help}"
            + (f" (also {', '.join(command.names[1:])})" if command.names[1:] else ""))
    say(f"{QUOTES} begins and ends a message of several lines; a paste is one message anyway. Ctrl-C stops an answer.")


def leave(chat: Conversation, argument: str) -> None:
    chat.attached = []
    raise EOFError


def clear(chat: Conversation, argument: str) -> None:
    chat.messages, chat.unanswered, chat.attached = [], [], []
    say("a new conversation; the system turn and the settings stay")


def regenerate(chat: Conversation, argument: str) -> Messages:
    messages = chat.unanswered or chat.messages
    messages = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not messages:
        raise ValueError("there is no answer yet")
    if chat.settings.temperature == 0 or chat.settings.seed is not None:
        say("with temperature 0 or a fixed seed the answer will be the same: change it with /set")
    return messages


def undo(chat: Conversation, argument: str) -> None:
    if chat.attached:
        chat.attached = []
        return say("forgotten: what was read for the next message")
    messages = chat.unanswered or chat.messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not turns:
        raise ValueError("there is nothing to undo")
    say(f"forgotten: {messages[turns[-1]]['content']}")
    chat.messages, chat.unanswered = messages[: turns[-1]], []


def compact(chat: Conversation, argument: str) -> Messages | None:
    """Drops the oldest turns, as few as leave half of the context free. What had no room is answered then."""
    messages, half = chat.unanswered or chat.messages, chat.engine.capacity // 2
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not starts:
        raise ValueError("there is nothing to drop")
    num_before = len(chat.prompt_ids(messages))
    # The more turns are dropped, the fewer tokens are left. The last turn stays.
    first = bisect_left(starts[:-1], True, key=lambda start: len(chat.prompt_ids(messages[start:])) <= half)
    kept = messages[starts[first] :] if first else messages
    num_tokens = len(chat.prompt_ids(kept))
    if num_tokens >= chat.engine.capacity:
        raise ValueError(f"the last message alone takes {num_tokens} tokens but the context holds "
                         f"{chat.engine.capacity}: /undo forgets it; shorten it, or start with a larger --context")
    say(f"the oldest {first} of {len(starts)} turns are dropped: {num_before} tokens before, {num_tokens} now")
    if not chat.unanswered:
        chat.messages = kept
        return None
    chat.messages, chat.unanswered = kept[:-1], []
    return kept


def set_system(chat: Conversation, argument: str) -> None:
    if not argument:
        say("no system turn" if chat.system is None else chat.system or "the system turn is empty")
        return
    begin_with(chat, None if argument == '""' else argument)


def begin_with(chat: Conversation, system: str | None) -> None:
    """Makes it the system turn. ValueError: the template refuses it."""
    before, chat.system = chat.system, system
    try:
        chat.prompt_ids(chat.messages or [{"role": "user", "content": "?"}])
    except ValueError:
        chat.system = before
        raise


def set_value(chat: Conversation, argument: str) -> None:
    name, _, text = argument.partition(" ")
    name = name.replace("-", "_")
    name, text = ALIASES.get(name, name), text.strip()
    given = {"default": chat.defaults, "none": UNLIMITED, "off": UNLIMITED}.get(text)
    if given and name in asdict(given):
        settings = replace(chat.settings, **{name: getattr(given, name)})
    else:
        settings = SamplingParams.from_fields({name: parsed_value(name, text)}, chat.settings)
    chat.settings = checked(chat.engine, settings)
    say(f"{name} = {getattr(chat.settings, name)}")


def parsed_value(name: str, text: str):
    """A value as the command line has it."""
    if not text:
        raise ValueError("/set needs a name and a value: /show lists the names")
    try:
        if name == "stop":
            return json.loads(text) if text[0] in '["' else text
        if name == "stop_token_ids":
            return [int(id) for id in text.replace(",", " ").split()]
        if name == "logit_bias":
            return [(int(id), float(bias)) for id, bias in (pair.split("=") for pair in text.replace(",", " ").split())]
        return True if text == "on" else json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} cannot be {shown(text)}") from None


def show_settings(chat: Conversation, argument: str) -> None:
    say(f"model {chat.engine.name}\nsystem {chat.system}\nmessages {len(chat.messages)}, "
        f"{tokens_used(chat)} of {chat.engine.capacity} tokens\nthoughts {'folded' if chat.fold else 'open'}")
    for name, value in asdict(chat.settings).items():
        if name not in NOT_IN_CHAT:
            say(f"{name} {value}")


def read_file(chat: Conversation, argument: str) -> None:
    text = decode_utf8(file_bytes(argument), argument).removeprefix("\ufeff").removesuffix("\n")
    chat.attached.append(text.removesuffix("\r"))
    say(f"{len(text)} characters of {argument} go in front of the next message")


def file_bytes(argument: str) -> bytes:
    """What a file holds, if it is one and of a size that a conversation can have."""
    path = path_of(argument)
    if not argument or path.exists() and not path.is_file():
        raise ValueError(f"{argument or 'nothing'} is not a file: name one")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{argument} has {path.stat().st_size} bytes but at most {MAX_FILE_BYTES} are read: name "
                         "another file")
    with named_errors(argument):
        return path.read_bytes()


def path_of(argument: str) -> Path:
    """`~` is a home, as in shells."""
    if "\0" in argument:
        raise ValueError(f"{argument!r} holds a NUL, which no file's name does: leave it out")
    try:
        return Path(argument).expanduser()
    except RuntimeError:
        raise ValueError(f"{argument}: there is no such user; if it names a file, write ./{argument}") from None


def save(chat: Conversation, argument: str) -> None:
    path = path_of(argument)
    if path.exists() or not argument:
        saved_conversation(argument)  # anything else is not ours to replace
    settings = {name: value for name, value in asdict(chat.settings).items() if name not in NOT_IN_CHAT}
    saved = {"model": chat.engine.name, "system": chat.system, "settings": settings, "messages": chat.messages}
    content = json.dumps(saved, ensure_ascii=False, indent=1).encode() + b"\n"
    with replacing(path) as file:
        file.write(content)
    say(f"saved in {argument}" + ", without the message that had no room" * bool(chat.unanswered))


def load(chat: Conversation, argument: str) -> None:
    saved = saved_conversation(argument)
    messages = read_messages(saved["messages"]) if saved["messages"] else []
    settings = checked(chat.engine, SamplingParams.from_fields(saved.get("settings") or {}, UNLIMITED))
    system = saved.get("system")
    if messages and messages[0]["role"] == "system" and system is None:
        system, *messages = messages[0]["content"], *messages[1:]
    begin_with(replace(chat, messages=messages), system)  # a copy finds out whether the template takes it
    chat.system, chat.messages, chat.settings = system, messages, settings
    chat.unanswered, chat.attached = [], []
    other = f", which was had with {saved['model']}" if saved.get("model") not in (None, chat.engine.name) else ""
    say(f"{len(messages)} messages from {argument}{other}")


def saved_conversation(path: str) -> Mapping:
    content = file_bytes(path)
    try:
        saved = json.loads(content.decode())
    except (ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict) or not isinstance(saved.get("messages"), list):
        raise ValueError(f"{path} is not a saved conversation: name another file")
    if not isinstance(saved.get("system"), str | None) or not isinstance(saved.get("settings"), dict | None):
        raise ValueError(f"{path} has a system that is no text, or settings that are no object: correct it")
    return saved


def think(chat: Conversation, argument: str) -> None:
    if argument not in ("", "open", "fold"):
        raise ValueError(f"/think takes open or fold, not {argument}: alone it shows what was thought last")
    if argument:
        chat.fold = argument == "fold"
        return say("thoughts are " + ("folded into a line" if chat.fold else "shown in full"))
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("there is no answer yet")
    prompt_end = chat.prompt_end(chat.prompt_ids(chat.messages[: answers[-1]]))
    thought, _ = split_thought(chat.messages[answers[-1]]["content"], prompt_end)
    say(dim(thought) if thought else "the last answer begins without a thought")


def show_statistics(chat: Conversation, argument: str) -> None:
    if not chat.requests:
        raise ValueError("there is no answer yet")
    prompts, cached = (sum(getattr(r, name) for r in chat.requests) for name in ("num_prompt", "num_cached"))
    say(f"last: {statistics(chat, chat.requests[-1])}\nall {len(chat.requests)} answers: "
        f"{sum(r.num_output for r in chat.requests)} tokens · prompts {prompts} ({cached / prompts:.0%} cached)")


COMMANDS = (
    Command(("/help", "/?"), "", "this list", show_help),
    Command(("/exit", "/bye", "/quit"), "", "leave", leave),
    Command(("/clear", "/new", "/reset"), "", "start a new conversation", clear),
    Command(("/regen", "/r"), "", "answer the last message again", regenerate),
    Command(("/undo",), "", "forget the last message and its answer", undo),
    Command(("/compact",), "", "drop the oldest turns, to half of the context", compact),
    Command(("/system",), "TEXT", 'set the system turn; "" removes it', set_system),
    Command(("/set",), "NAME VALUE", "set how answers are drawn; `off` and `default` are values too", set_value),
    Command(("/show",), "", "settings, and how full the context is", show_settings),
    Command(("/read",), "FILE", "put a file's text in front of the next message", read_file),
    Command(("/save",), "FILE", "write the conversation as JSON", save),
    Command(("/load",), "FILE", "go on with a saved conversation", load),
    Command(("/think",), "open|fold", "how thoughts appear; alone: the last ones in full", think),
    Command(("/stats",), "", "tokens, speed and cache hits", show_statistics),
)
