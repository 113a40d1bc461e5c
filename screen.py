"""A person's terminal in a conversation: the line editor, what is typed while an answer streams, how answers appear.

Owns all that is particular to a terminal; knows nothing of models or of what is said. `Terminal` is for people,
`Plain` for pipes; `show` of either takes an answer's text as it streams. Start at `Terminal`.
"""
from __future__ import annotations

import contextlib
import os
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from terminal import dim, is_dumb

if TYPE_CHECKING:
    from scheduler import Request

REFRESH_S = 0.08
TAIL_LINES = 3  # of a folded thought, while it grows
# What is drawn between these appears at once, where a terminal knows them; others ignore them.
BEGIN_DRAWING, END_DRAWING = "\x1b[?2026h", "\x1b[?2026l"
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"  # a paste comes between marks, so that it is known for one
THOUGHTS = {"<think>": "</think>", "<thinking>": "</thinking>", "<reasoning>": "</reasoning>", "[THINK]": "[/THINK]"}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Plain:
    """Text as it comes, followed by a blank line."""

    stoppable = False  # whether Ctrl-C ends the answer, not the program

    def __init__(self, statistics: bool):
        self.statistics = statistics

    def reading(self, request: Request) -> Callable[[], None]:
        """Gives the function that is called after each step, to show how a long prompt is read."""
        return lambda: None

    @contextlib.contextmanager
    def show(self, prompt_end: str = "", fold: bool = True) -> Iterator[Callable[[str], None]]:
        """Gives the function that takes an answer's text."""
        yield lambda text: print(text, end="", flush=True)
        print("\n", flush=True)


class Terminal:
    """Lines from a person, and answers for them.

    From entering to leaving it, the terminal shows nothing by itself: what is typed or pasted while an answer streams
    waits, unseen and whole, for the next line that is read.
    """

    stoppable = statistics = True

    def __init__(self, complete: Callable[[str], tuple[int, list[str]]]):
        """`complete`: of what is typed, where the words that go on from it begin, counted back, and these words."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.styles import Style

        class Words(Completer):
            def get_completions(self, document, event):
                start, words = complete(document.text_before_cursor)
                return [Completion(word, start_position=start) for word in words]

        keys = KeyBindings()
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        self.status = ""  # under the line that is typed
        self.is_dumb = is_dumb(sys.stdout)
        sys.stdin.reconfigure(encoding="utf-8")
        self.session = PromptSession(
            history=open_history(), completer=Words(), complete_while_typing=False, key_bindings=keys,
            prompt_continuation=lambda _, __, is_wrapped: "" if is_wrapped else "... ",
            bottom_toolbar=lambda: self.status or None,
            reserve_space_for_menu=4, style=Style.from_dict({"bottom-toolbar": "noreverse ansibrightblack"}))

    def __enter__(self) -> Terminal:
        self.mode = termios.tcgetattr(sys.stdin.fileno())
        self._keep_silent()
        return self

    def __exit__(self, *_) -> None:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self.mode)
        if not self.is_dumb:
            print(PASTE_OFF, end="", flush=True)

    def read_line(self, mark: str) -> str:
        """A line that a person edits, or several that were pasted; EOFError after Ctrl-D, KeyboardInterrupt after
        Ctrl-C."""
        text = self.session.prompt(mark)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("what was typed is not UTF-8: set the terminal to it") from None
        return text

    def reading(self, request: Request) -> Callable[[], None]:
        from live import Reading

        return Reading(request).show

    @contextlib.contextmanager
    def show(self, prompt_end: str = "", fold: bool = True) -> Iterator[Callable[[str], None]]:
        """Gives the function that takes an answer's text, which goes on from `prompt_end`. With `fold`, what the model
        thinks before it answers is shown while it grows, and then as one line."""
        from prompt_toolkit.input.typeahead import store_typeahead

        self._keep_silent()
        writer = Dumb() if self.is_dumb else Answer(prompt_end, fold)

        def write(text: str) -> None:
            keys = self.session.input
            store_typeahead(keys, keys.read_keys())
            writer.write(text)

        try:
            yield write
        finally:
            writer.close()

    def _keep_silent(self) -> None:
        """Without echo, without lines; the key of an interrupt stays one, and discards nothing."""
        iflag, oflag, cflag, lflag, *rest = self.mode
        lflag = lflag & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, [iflag & ~termios.ICRNL, oflag, cflag, lflag, *rest])
        if not self.is_dumb:
            print(PASTE_ON, end="", flush=True)


def open_history():
    """Lines of earlier conversations, kept in the user's state folder."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk: the conversation goes on
                super().store_string(string.encode(errors="replace").decode())

    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "quire", "chat_history")
    try:
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("rb").close()  # a folder can be touched
    except (OSError, RuntimeError) as error:  # the second: nobody's home is known by that name
        say(dim(f"no history is kept: {path}: {getattr(error, 'strerror', error)}"))
        return InMemoryHistory()
    return History(path)


# ---------------------------------------------------------------------------------------------------------------------
# Answers


class Dumb:
    """An answer in a terminal that cannot move its cursor."""

    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def close(self) -> None:
        print("\n", flush=True)


class Answer:
    """An answer as Markdown. Blocks are printed once they are complete; only the last, which may still change, is drawn
    again and again, in place. So nothing flickers and all stays in the terminal's scroll-back."""

    def __init__(self, prompt_end: str, fold: bool, console=None):
        from rich.console import Console

        self.console = console or Console()
        self.region = Region(self.console)
        self.thoughts, self.fold = Thoughts(prompt_end), fold
        self.thought = ""  # of a folded one all, of one that is shown what is not printed yet
        self.rest = ""  # of the answer, what is not printed yet
        self.num_printed = 0  # blocks
        self.started_s = time.perf_counter()
        self.next_draw_s = 0.0

    def write(self, text: str) -> None:
        self._add(*self.thoughts.push(text))
        started_s = time.perf_counter()
        if started_s >= self.next_draw_s:
            self.region.draw(self._thinking() if self.thoughts.goes_on else rendered(self.rest))
            drawn_s = time.perf_counter()
            self.next_draw_s = drawn_s + max(REFRESH_S, 10 * (drawn_s - started_s))  # a long block is drawn less often

    def close(self) -> None:
        self._add(*self.thoughts.close())
        self._end_thought()
        self._print(self.rest)
        self.region.print()

    def _add(self, thought: str, said: str) -> None:
        self.thought += thought
        if not self.fold and "\n" in self.thought:
            lines, _, self.thought = self.thought.rpartition("\n")
            self.region.print(faint(lines))
        if said:
            self._end_thought()
        self.rest += said
        if "\n" in said:
            complete, self.rest = split_blocks(self.rest)
            self._print(complete)

    def _thinking(self):
        """A thought that goes on: its last lines."""
        from rich.console import Group

        if not self.fold:
            return faint(self.thought)
        return Group(faint("thinking …"), Tail(faint(self.thought.strip()), TAIL_LINES))

    def _end_thought(self) -> None:
        if self.thought.strip() and self.fold:
            seconds = time.perf_counter() - self.started_s
            self.region.print(faint(f"▸ thought for {seconds:.1f} s, {counted(self.thought)} · /think shows them\n"))
        elif self.thought.strip():
            self.region.print(faint(self.thought))
        self.thought = ""

    def _print(self, text: str) -> None:
        if text.strip():
            self.region.print(*[""] * (self.num_printed > 0), rendered(text))
            self.num_printed += 1


def counted(text: str) -> str:
    num_words = len(text.split())
    return f"{num_words} word{'s' * (num_words != 1)}"


class Region:
    """The lines at the end of what is printed that are drawn again and again."""

    def __init__(self, console):
        self.console = console
        self.num_lines = 0
        self.size = console.size

    def draw(self, renderable) -> None:
        """Shows as much of its end as the screen has room for, in place of what was drawn before."""
        text = self._captured(Tail(renderable, max(self.console.height - 2, 1)))
        self._write(text, text.count("\n"))

    def print(self, *renderables) -> None:
        """Prints above: it stays."""
        self._write(self._captured(*renderables), 0)

    def _captured(self, *renderables) -> str:
        with self.console.capture() as capture:
            self.console.print(*renderables, sep="\n")
        return capture.get()

    def _write(self, text: str, num_lines: int) -> None:
        if self.size != self.console.size:  # nobody knows where the lines are now: they stay, the next stand below
            self.num_lines, self.size = 0, self.console.size
        back = f"\x1b[{self.num_lines}A\r\x1b[J" if self.num_lines else ""
        self.console.file.write(f"{BEGIN_DRAWING}{back}{text}{END_DRAWING}")
        self.console.file.flush()
        self.num_lines = num_lines


class Tail:
    """The last lines of something."""

    def __init__(self, renderable, num_lines: int):
        self.renderable, self.num_lines = renderable, num_lines

    def __rich_console__(self, console, options):
        from rich.segment import Segment

        for line in console.render_lines(self.renderable, options, pad=False)[-self.num_lines :]:
            yield from (*line, Segment.line())


def faint(text: str):
    from rich.text import Text

    return Text(text, style="dim")


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


class Thoughts:
    """Tells what a model thinks, at the beginning of its answer, from what it says. A tag may come in pieces; where the
    prompt ends with one, the answer begins inside."""

    def __init__(self, prompt_end: str = ""):
        self.end = next((end for tag, end in THOUGHTS.items() if prompt_end.rstrip().endswith(tag)), None)
        self.begins = self.end is None  # it may still turn out to be a thought
        self.held = ""

    @property
    def goes_on(self) -> bool:
        return self.end is not None

    def push(self, text: str) -> tuple[str, str]:
        """What `text` adds to the thought, and to the answer."""
        self.held += text
        if self.begins:
            start = self.held.lstrip()
            tag = next((tag for tag in THOUGHTS if start.startswith(tag)), None)
            if tag is None and any(tag.startswith(start) for tag in THOUGHTS):
                return "", ""
            self.begins = False
            if tag is not None:
                self.held, self.end = start.removeprefix(tag), THOUGHTS[tag]
        if self.end is None:
            said, self.held = self.held, ""
            return "", said
        thought, tag, said = self.held.partition(self.end)
        if tag:
            self.held, self.end = "", None
            return thought, said.lstrip()
        num_held = next((n for n in range(len(self.end) - 1, 0, -1) if self.held.endswith(self.end[:n])), 0)
        thought, self.held = self.held[: len(self.held) - num_held], self.held[len(self.held) - num_held :]
        return thought, ""

    def close(self) -> tuple[str, str]:
        """What was held back, once no more comes."""
        held, self.held = self.held, ""
        return (held, "") if self.goes_on else ("", held)


def split_thought(text: str, prompt_end: str = "") -> tuple[str, str]:
    """The thought at the beginning of an answer, without its tags, and the rest."""
    thoughts = Thoughts(prompt_end)
    pieces = [thoughts.push(text), thoughts.close()]
    return "".join(thought for thought, _ in pieces).strip(), "".join(said for _, said in pieces)
