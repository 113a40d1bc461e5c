"""The terminal conversation: what is typed, what commands do, how answers appear.

Owns the messages of the conversation and all that is particular to a terminal. Every turn renders the whole
conversation anew; that this is cheap is the prefix cache's doing, and nothing here knows about it.
Start at `main`, then `take_turn`. Commands are rows of COMMANDS. Only answers go to stdout.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from dialects import read_messages
from engine import Engine
from sampling import ALIASES, SamplingParams
from scheduler import Request
from terminal import decode_utf8, dim, held_signals, is_dumb

RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # what a generation config may set
NOT_IN_CHAT = ("num_samples", "logprobs")  # a conversation goes on with one answer, and shows only its text
UNLIMITED = SamplingParams(max_tokens=None)
QUOTES = '"""'
REFRESH_S = 0.08
MAX_FILE_BYTES = 64 << 20  # of what /read, /save and /load look at

Messages = list[dict[str, str]]


@dataclass
class Conversation:
    """What has been said, and how to go on. `messages` is replaced by a longer list, never changed in place."""

    engine: Engine
    settings: SamplingParams
    defaults: SamplingParams  # what `/set NAME default` goes back to
    deadline_s: float | None = None
    system: str | None = None
    messages: Messages = field(default_factory=list)
    attached: list[str] = field(default_factory=list)  # texts to go in front of the next message
    requests: list[Request] = field(default_factory=list)  # of the answers so far
    num_notes: int = 0  # of the tokenizer's, shown already

    def prompt_ids(self, messages: Messages) -> list[int]:
        """`messages` after the system turn, as the chat template has them. ValueError: it refuses them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.engine.tokenizer.chat(system + messages)


@dataclass(frozen=True)
class Screen:
    """How answers appear. `show()` is entered for each of them and gives the function that takes its text."""

    show: Callable[[], contextlib.AbstractContextManager[Callable[[str], None]]]
    stoppable: bool  # Ctrl-C ends the answer, not the program
    statistics: bool


def main(engine: Engine, args) -> int:
    """Talks until the input ends. Returns 0, or 1 if a turn failed and nobody was there to see it."""
    if engine.tokenizer.chat_template is None:
        raise ValueError("the model has no chat template, so it was not made for conversations: use generate --raw")
    settings = default_settings(engine, args.sampling)
    chat = Conversation(engine, settings, settings, args.deadline, num_notes=len(engine.tokenizer.notes))
    if args.system is not None:
        set_system(chat, args.system)
    if sys.stdin.isatty() and sys.stdout.isatty():
        return talk(chat)
    return read_pipe(chat, Screen(plain_text, stoppable=False, statistics=args.stats or sys.stderr.isatty()))


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
        except (ValueError, OSError) as error:
            say(f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else str(error))
            return
        if messages:
            take_turn(chat, messages, screen)
    elif name.startswith("/") and not quoted and "\n" not in text:
        say(f"unknown command {name}: /help lists them; put {QUOTES} around a message that begins with /")
    elif text.strip() or chat.attached:
        content = "\n\n".join([*chat.attached, text] if text.strip() else chat.attached)
        take_turn(chat, [*chat.messages, {"role": "user", "content": content}], screen)
        chat.attached = []


def take_turn(chat: Conversation, messages: Messages, screen: Screen) -> None:
    """Answers `messages`, and makes them and the answer the conversation. ValueError: it stays as it was."""
    engine, prompt_ids = chat.engine, chat.prompt_ids(messages)
    if len(prompt_ids) >= engine.capacity:
        raise ValueError(f"the conversation has grown to {len(prompt_ids)} tokens but the context holds "
                         f"{engine.capacity}: make room with /undo or /clear, or start with a larger --context")
    request = engine.submit(prompt_ids, chat.settings, deadline_s=chat.deadline_s)
    with held_signals() as signals, screen.show() as write:
        while request.finish_reason is None:
            for output in engine.step():
                write(output.text)
            if signals and (output := engine.abort(request)):
                write(output.text)
        if screen.stoppable:
            signals[:] = [number for number in signals if number != signal.SIGINT]  # it wanted no more than this
    if request.error:
        raise ValueError(request.error)
    if request.finish_reason == "cancelled" and not request.text:
        raise ValueError("stopped before the first word: the message is not part of the conversation")
    chat.messages = [*messages, {"role": "assistant", "content": request.text}]
    chat.requests.append(request)
    remark(chat, request, screen)


def remark(chat: Conversation, request: Request, screen: Screen) -> None:
    """Says what the answer does not show: that it was cut, what the vocabulary lacks, statistics."""
    if request.finish_reason == "length" and len(request.tokens) == chat.engine.capacity:
        say(f"the answer is cut: the context of {chat.engine.capacity} tokens is full; make room with /undo or /clear")
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
    '''One line, or the lines from """ to """, and whether it was these. `read_line` is given what to show before it.'''
    text = read_line(">>> ")
    if not text.lstrip().startswith(QUOTES):
        return text, False
    text = text.lstrip().removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        try:
            text += "\n" + read_line("... ")
        except EOFError:
            raise ValueError(f"the input ended inside a message that began with {QUOTES}: end it with them") from None
    return text.rstrip().removesuffix(QUOTES).removeprefix("\n").removesuffix("\n"), True


def talk(chat: Conversation) -> int:
    """Reads from a terminal. A paste is one message, as the terminal brackets it."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion

    class Words(Completer):
        def get_completions(self, document, event):
            start, words = completions(document.text_before_cursor)
            return [Completion(word, start_position=start) for word in words]

    session = PromptSession(history=history(), completer=Words(), complete_while_typing=False,
                            prompt_continuation=lambda *_: "... ")
    screen = Screen(plain_text if is_dumb(sys.stdout) else markdown, stoppable=True, statistics=True)
    say(dim(f"{chat.engine.name} · /help lists the commands · Ctrl-D leaves"))
    while True:
        try:
            handle(chat, *read_input(session.prompt), screen)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return 0
        except ValueError as error:
            say(str(error))


def history():
    """Lines of earlier conversations, kept in the user's state folder."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "quire" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as error:
        say(dim(f"no history is kept: {path}: {error.strerror}"))
        return InMemoryHistory()
    return FileHistory(path)


def completions(typed: str) -> tuple[int, list[str]]:
    """What the Tab key offers after `typed`, and where it goes, counted back from the end."""
    command, blank, argument = typed.partition(" ")
    if not typed.startswith("/"):
        return 0, []
    if not blank:
        return -len(typed), [name for row in COMMANDS for name in row.names if name.startswith(typed)]
    if command == "/set":
        return -len(argument), [f.name for f in fields(SamplingParams) if f.name.startswith(argument)]
    if command in ("/read", "/save", "/load"):
        folder, _, name = argument.rpartition("/")
        with contextlib.suppress(OSError):
            place = Path(folder + "/" if "/" in argument else ".").expanduser()
            found = sorted(path.name + "/" * path.is_dir() for path in place.iterdir() if path.name.startswith(name))
            return -len(name), found
    return 0, []


# ---------------------------------------------------------------------------------------------------------------------
# What appears


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def plain_text() -> Iterator[Callable[[str], None]]:
    yield lambda text: print(text, end="", flush=True)
    print("\n", flush=True)


@contextlib.contextmanager
def markdown() -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        writer = MarkdownWriter(console, live)
        try:
            yield writer.write
        finally:
            writer.close()
    console.print()


class MarkdownWriter:
    """Blocks of Markdown are printed once they are complete; only the last, which may still change, is drawn again and
    again, in place. So nothing flickers and all stays in the terminal's scroll-back."""

    def __init__(self, console, live):
        self.console, self.live = console, live
        self.rest = ""  # what is not printed yet
        self.num_printed = 0
        self.next_draw_s = 0.0

    def write(self, text: str) -> None:
        self.rest += text
        if "\n" in text:
            complete, self.rest = split_blocks(self.rest)
            self._print(complete)
        started_s = time.perf_counter()
        if started_s >= self.next_draw_s:
            self.live.update(Tail(rendered(self.rest)), refresh=True)
            drawn_s = time.perf_counter()
            self.next_draw_s = drawn_s + max(REFRESH_S, 5 * (drawn_s - started_s))  # a long block is drawn less often

    def close(self) -> None:
        self._print(self.rest)

    def _print(self, text: str) -> None:
        if text.strip():
            self.live.update("")
            self.console.print(*["\n"] * (self.num_printed > 0), rendered(text), sep="")
            self.num_printed += 1


class Tail:
    """As much of the end of something as the screen has room for."""

    def __init__(self, renderable):
        self.renderable = renderable

    def __rich_console__(self, console, options):
        from rich.segment import Segment

        lines = console.render_lines(self.renderable, options, pad=False)
        for line in lines[-max(console.height - 2, 1) :]:
            yield from (*line, Segment.line())


def rendered(text: str):
    from rich.markdown import Markdown

    made = Markdown(text)
    for token in made.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"  # a model that ends a line means it
    return made


def split_blocks(text: str) -> tuple[str, str]:
    """Cuts before the last block at the top level: those before it are complete."""
    from markdown_it import MarkdownIt

    blocks = MarkdownIt().enable("table").parse(text)
    first_lines = [block.map[0] for block in blocks if block.level == 0 and block.map]
    lines = text.split("\n")
    num_complete = first_lines[-1] if first_lines else 0
    return "\n".join(lines[:num_complete]), "\n".join(lines[num_complete:])


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
    chat.messages, chat.attached = [], []
    say("a new conversation; the system turn and the settings stay")


def regenerate(chat: Conversation, argument: str) -> Messages:
    messages = chat.messages[:-1] if chat.messages and chat.messages[-1]["role"] == "assistant" else chat.messages
    if not messages:
        raise ValueError("there is no answer yet")
    if chat.settings.temperature == 0 or chat.settings.seed is not None:
        say("with temperature 0 or a fixed seed the answer will be the same: change it with /set")
    return messages


def undo(chat: Conversation, argument: str) -> None:
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "user"]
    if not turns:
        raise ValueError("there is nothing to undo")
    say(f"forgotten: {chat.messages[turns[-1]]['content']}")
    chat.messages = chat.messages[: turns[-1]]


def set_system(chat: Conversation, argument: str) -> None:
    if not argument:
        say("no system turn" if chat.system is None else chat.system)
        return
    before, chat.system = chat.system, None if argument == '""' else argument
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
    except ValueError:
        raise ValueError(f"{name} cannot be {text}") from None


def show_settings(chat: Conversation, argument: str) -> None:
    num_tokens = len(chat.prompt_ids(chat.messages)) if chat.messages else 0
    say(f"model {chat.engine.name}\nsystem {chat.system}\nmessages {len(chat.messages)}, "
        f"{num_tokens} of {chat.engine.capacity} tokens")
    for name, value in asdict(chat.settings).items():
        if name not in NOT_IN_CHAT:
            say(f"{name} {value}")


def read_file(chat: Conversation, argument: str) -> None:
    text = decode_utf8(file_bytes(argument), argument).removeprefix("\ufeff").removesuffix("\n")
    chat.attached.append(text.removesuffix("\r"))
    say(f"{len(text)} characters of {argument} go in front of the next message")


def file_bytes(argument: str) -> bytes:
    """What a file holds, if it is one and of a size that a conversation can have."""
    path = Path(argument).expanduser()
    if not argument or path.exists() and not path.is_file():
        raise ValueError(f"{argument or 'nothing'} is not a file: name one")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{argument} has {path.stat().st_size} bytes but at most {MAX_FILE_BYTES} are read: name "
                         "another file")
    return path.read_bytes()


def save(chat: Conversation, argument: str) -> None:
    path = Path(argument).expanduser()
    if path.exists() or not argument:
        saved_conversation(argument)  # anything else is not ours to replace
    settings = {name: value for name, value in asdict(chat.settings).items() if name not in NOT_IN_CHAT}
    saved = {"model": chat.engine.name, "system": chat.system, "settings": settings, "messages": chat.messages}
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(saved, ensure_ascii=False, indent=1) + "\n", "utf-8")
    os.replace(unfinished, path)
    say(f"saved in {argument}")


def load(chat: Conversation, argument: str) -> None:
    saved = saved_conversation(argument)
    messages = read_messages(saved["messages"]) if saved["messages"] else []
    settings = checked(chat.engine, SamplingParams.from_fields(saved.get("settings") or {}, UNLIMITED))
    system = saved.get("system")
    if messages and messages[0]["role"] == "system" and system is None:
        system, *messages = messages[0]["content"], *messages[1:]
    loaded = replace(chat, system=system, messages=messages, settings=settings, attached=[])
    if messages:
        loaded.prompt_ids(messages)
    chat.system, chat.messages, chat.settings, chat.attached = system, messages, settings, []
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
    Command(("/system",), "TEXT", 'set the system turn; "" removes it', set_system),
    Command(("/set",), "NAME VALUE", "set how answers are drawn; `off` and `default` are values too", set_value),
    Command(("/show",), "", "settings, and how full the context is", show_settings),
    Command(("/read",), "FILE", "put a file's text in front of the next message", read_file),
    Command(("/save",), "FILE", "write the conversation as JSON", save),
    Command(("/load",), "FILE", "go on with a saved conversation", load),
    Command(("/stats",), "", "tokens, speed and cache hits", show_statistics),
)
