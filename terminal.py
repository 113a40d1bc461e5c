"""What all commands share about the world outside: streams, signals (the engine's own loops hold them as well), text
from bytes, files that take another's place, a download that shows itself.

Knows nothing of models or requests. No torch.
"""
from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO


def is_terminal(stream) -> bool:
    return stream is not None and stream.isatty()


def is_dumb(stream) -> bool:
    """No terminal, or one that cannot move its cursor."""
    return not is_terminal(stream) or os.environ.get("TERM", "dumb") == "dumb"


def forget_given_size() -> None:
    """Where there is a terminal, it knows its size better than variables that an earlier moment left."""
    if is_terminal(sys.stdout) or is_terminal(sys.stderr):
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)


def dim(text: str) -> str:
    """For stderr: less bright, where that is wanted."""
    return text if is_dumb(sys.stderr) or "NO_COLOR" in os.environ else f"\x1b[2m{text}\x1b[0m"


def warn(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"run.py: warning: {note}", file=sys.stderr)


def open_closed_streams() -> None:
    """A standard stream that the caller closed is empty, or swallows what is written: nothing lands in another one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def abandon(*streams) -> None:
    """What is still buffered goes nowhere: the interpreter would complain of it at its end."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def decode_utf8(data: bytes, source: str, error_class: type[ValueError] = ValueError, offset: int = 0) -> str:
    """Text of bytes that begin at `offset` of `source`; what is not UTF-8 is named by its place there."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise error_class(f"{source} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start}; "
                          "convert it to UTF-8") from None


@contextlib.contextmanager
def held_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM only enter the list, and take effect at the end: in the middle of a step they would leave the
    engine torn, in the middle of a write an answer. Whoever works meanwhile looks at the list between steps. Threads
    but the main one get no signals."""
    held: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    kinds = [kind for kind in (signal.SIGINT, signal.SIGTERM) if is_main and callable(signal.getsignal(kind))]
    handlers = {kind: signal.signal(kind, lambda number, frame: held.append(number)) for kind in kinds}
    try:
        yield held
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
    for number in held:
        handlers[number](number, None)


@contextlib.contextmanager
def named_errors(name: str) -> Iterator[None]:
    """An error of reading or writing says where it was: the system knows only that it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path`, where there may be none, once it is complete: at any moment there is the
    old one or the new one. What a killed run left of it is overwritten by the next."""
    path = Path(os.path.realpath(path))  # a link stays a link
    unfinished = path.with_name(f".{path.name}.part")
    try:
        with named_errors(str(path)), open(unfinished, "wb") as file:
            if path.exists():
                shutil.copymode(path, unfinished)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


class Download:
    """Shows how a download goes on: a bar in a terminal, elsewhere a line for each thing that begins."""

    def __init__(self):
        self.bar = self.what = None

    def __enter__(self) -> Download:
        if is_dumb(sys.stderr):  # the hub's client has bars of its own
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return self

    def __call__(self, what: str, num_bytes: int, total: int | None) -> None:
        if not is_dumb(sys.stderr):
            if self.bar is None:
                self.bar = download_bar()
                self.task = self.bar.add_task(what)
                self.bar.start()
            self.bar.update(self.task, description=what, completed=num_bytes, total=total)
        elif what != self.what:
            print(what, file=sys.stderr)
        self.what = what

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()


def download_bar():
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
                    console=Console(stderr=True), transient=True)
