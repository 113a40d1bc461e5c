"""`make screens`: what the README shows of the terminal, from real runs of the default model in a pseudo-terminal.

Each screen stands in README.md between <!-- screen NAME --> and <!-- end of screen -->. Start at `main`.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from terminals import Terminal  # noqa: E402 (it needs the path above)


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for name, draw in SCREENS.items():
            text = with_screen(text, name, draw(Path(folder)))
    readme.write_text(text, "utf-8")


def with_screen(text: str, name: str, lines: list[str]) -> str:
    """The README with a new screen in its place."""
    begin, end = f"<!-- screen {name} -->\n", "<!-- end of screen -->"
    found = re.search(re.escape(begin) + ".*?" + re.escape(end), text, re.DOTALL)
    if not found:
        raise ValueError(f"README.md has no place for the screen '{name}': add {begin.strip()} and {end}")
    block = "".join([begin, "```text\n", *(f"{line}\n" for line in lines), "```\n", end])
    return text[: found.start()] + block + text[found.end() :]


def chat(folder: Path) -> list[str]:
    terminal = Terminal("chat", "-t", "0", "--threads", "2", columns=96, rows=40, cwd=folder,
                        XDG_STATE_HOME=str(folder))
    for typed in ("Show me how to sort a list in Python, in one line.", "And backwards?", "/set max-tokens 20",
                  "Why?", "/save talk.json"):
        terminal.wait_for(">>>")
        terminal.type(f"{typed}\r")
    terminal.wait_until_shown("saved in")
    terminal.wait_until_shown(" tokens (")
    lines = shown(terminal)
    terminal.child.close(force=True)
    return lines


def watch(folder: Path) -> list[str]:
    """A panel in the middle of a run whose prompts share a beginning."""
    task = "You are given a word. Write a sentence that uses it, then a second one that means the opposite. " * 2
    with open(folder / "in.jsonl", "w", encoding="utf-8") as file:
        for i in range(120):
            file.write(json.dumps({"prompt": f"{task}The word: number {i}", "max_tokens": 40 + i % 50}) + "\n")
    terminal = Terminal("batch", "in.jsonl", "-o", "out.jsonl", "--watch", "--num-pages", "360", "--max-requests", "24",
                        "--threads", "2", columns=96, rows=24, cwd=folder)
    terminal.wait_until_shown(" 60 of 120")
    while len(lines := shown(terminal)) < 10 or "╯" not in lines[-1]:  # it is being drawn
        terminal.wait_for("╯")
    terminal.wait_for("120 requests")
    assert terminal.end() == 0
    return lines


def shown(terminal: Terminal) -> list[str]:
    """What stands on the screen, less blank lines at its ends and most of those in between."""
    text = "\n".join(line.rstrip() for line in terminal.screen.display).strip("\n")
    return re.sub(r"\n{4,}", "\n\n\n", text).split("\n")


SCREENS = {"chat": chat, "watch": watch}

if __name__ == "__main__":
    main()
