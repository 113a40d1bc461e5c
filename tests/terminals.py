"""A terminal for tests: a program in a pseudo-terminal, what it writes drawn on a screen that scrolls, and keys for it.
And models that say what a test wants to see."""

import json
import os
import sys
import time
from pathlib import Path

import pexpect
import pyte

import tiny

ROOT = Path(__file__).resolve().parent.parent


class Screen(pyte.HistoryScreen):
    """As wide and high as the terminal; remembers what scrolled off its top."""

    def __init__(self, columns: int, rows: int):
        super().__init__(columns, rows, history=100_000, ratio=0.5)
        self.stream = pyte.Stream(self)

    def write(self, text: str) -> None:
        self.stream.feed(text)

    def flush(self) -> None:
        pass

    @property
    def all_lines(self) -> list[str]:
        """Everything, from the first line on, less blanks at the ends and blank lines."""
        kept = ["".join(line[i].data for i in range(self.columns)) for line in self.history.top]
        return [line.rstrip() for line in [*kept, *self.display] if line.strip()]


class Terminal:
    """A program run by `run.py`'s words, that a test types at."""

    def __init__(self, *words: str, columns: int = 80, rows: int = 24, cwd=None, **env):
        env = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "COLUMNS": "99"} | env
        self.screen = Screen(columns, rows)
        self.child = pexpect.spawn(sys.executable, [str(ROOT / "run.py"), *map(str, words)], env=env, cwd=cwd,
                                   encoding="utf-8", timeout=60, dimensions=(rows, columns))
        self.child.logfile_read = self.screen
        self.screen.write_process_input = self.child.send  # it tells where the cursor is, as terminals do

    def type(self, text: str) -> None:
        self.child.send(text)

    def paste(self, text: str) -> None:
        """As terminals do where a program asked for it, with the line ends that they send."""
        self.child.send(f"\x1b[200~{text.replace(chr(10), chr(13))}\x1b[201~")

    def wait_for(self, text: str) -> None:
        """Until it was written; what came before is not looked at again."""
        self.child.expect_exact(text)

    def wait_until_shown(self, text: str) -> None:
        """Until it stands on the screen or has scrolled off it, however it came there."""
        deadline_s = time.monotonic() + 60
        while not any(text in line for line in self.screen.all_lines):
            assert time.monotonic() < deadline_s, self.screen.display
            self.child.expect([pexpect.TIMEOUT, r".+"], timeout=0.1)

    def resize(self, columns: int, rows: int) -> None:
        self.child.setwinsize(rows, columns)
        self.screen.resize(rows, columns)

    def end(self) -> int:
        """Its exit status, or what signal ended it, negative."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        return -self.child.signalstatus if self.child.exitstatus is None else self.child.exitstatus


def speaking(folder: Path, pieces: list[str], repeats: bool = False) -> Path:
    """A model whose every answer is these pieces of text, a token each, and no two the same; or the same again and
    again, until the context is full."""
    first = 256 + len(tiny.SPECIALS)
    ids = list(range(first, first + len(pieces)))
    chain = dict(zip(ids, [*ids[1:], ids[0] if repeats else tiny.EOS])) | {None: first}
    tiny.scripted(folder, chain, eos_ids=(tiny.EOS,), vocab=first + len(pieces) + 8, context=16384)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [{"id": id, "content": piece} | plain for id, piece in zip(ids, pieces)]
    path.write_text(json.dumps(tokenizer), "utf-8")
    return folder
