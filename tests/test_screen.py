"""screen.py: what a terminal shows, line by line, while answers stream and keys are pressed."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import screen
import tiny
from terminals import ROOT, Screen, Terminal, speaking

DOCUMENT = textwrap.dedent("""\
    # Title

    A *paragraph* of
    two lines, with a [link](http://a.b) and 讲 wide 😀 letters, long enough to be wrapped where there is little room.

    1. one

       more of one
    2. two
    - other

    ```python
    def f():

        return 1
    ```
    > quote
    lazily continued

    | a | b |
    |---|---|
    | 1 | 2 |

    Setext
    ======
    end
    """)


# ---------------------------------------------------------------------------------------------------------------------
# Answers


@given(st.integers(0, len(DOCUMENT)), st.integers(0, len(DOCUMENT)))
def test_complete_blocks_do_not_change_any_more(first, second):
    first, second = sorted((first, second))
    complete, rest = screen.split_blocks(DOCUMENT[:first])
    assert complete + ("\n" if complete else "") + rest == DOCUMENT[:first]
    assert screen.split_blocks(DOCUMENT[:second])[0].startswith(complete)


def console(shown: Screen) -> Console:
    """That writes to a screen, through a terminal's driver."""
    class File:
        def write(self, text: str) -> None:
            shown.write(text.replace("\n", "\r\n"))

        def flush(self) -> None:
            pass

    return Console(file=File(), width=shown.columns, height=shown.lines, force_terminal=True)


def streamed(text: str, columns: int, rows: int, *, prompt_end="", fold=True, monkeypatch, cuts=1) -> list[str]:
    monkeypatch.setattr(screen, "REFRESH_S", 0)
    shown = Screen(columns, rows)
    answer = screen.Answer(prompt_end, fold, console(shown))
    for start in range(0, len(text), cuts):
        answer.write(text[start : start + cuts])
        answer.next_draw_s = 0
    answer.close()
    return shown.all_lines


@pytest.mark.parametrize("columns, rows", [(60, 12), (40, 6), (100, 50)])
def test_streamed_markdown_is_the_whole_rendered(monkeypatch, columns, rows):
    """In the scroll-back too, line by line: nothing is lost, doubled or left over from drawing it again and again."""
    whole = Screen(columns, 200)
    console(whole).print(screen.rendered(DOCUMENT))
    assert streamed(DOCUMENT, columns, rows, monkeypatch=monkeypatch) == whole.all_lines
    assert len(whole.all_lines) > 15


def test_a_block_longer_than_the_screen_is_whole_in_the_end(monkeypatch):
    code = "".join(f"line_{i} = {i}\n" for i in range(40))
    rows = "".join(f"| {i} | row {i} |\n" for i in range(30))
    document = f"```python\n{code}```\n\n| n | name |\n|---|---|\n{rows}"
    whole = Screen(50, 200)
    console(whole).print(screen.rendered(document))
    assert streamed(document, 50, 12, monkeypatch=monkeypatch, cuts=9) == whole.all_lines
    assert len(whole.all_lines) > 70


def test_a_terminal_that_changes_its_size_loses_nothing(monkeypatch):
    monkeypatch.setattr(screen, "REFRESH_S", 0)
    shown = Screen(40, 10)
    on = console(shown)
    answer = screen.Answer("", True, on)
    words = [f"word{i}" for i in range(60)]
    answer.write("above\n\n" + " ".join(words[:30]))
    on.size = (60, 12)
    shown.resize(12, 60)
    answer.next_draw_s = 0
    answer.write(" " + " ".join(words[30:]) + "\n\nbelow")
    answer.close()
    text = " ".join(shown.all_lines)
    assert text.startswith("above word0 word1 ") and " ".join(words) in text and text.endswith(" below")


@given(st.integers(1, 40), st.sampled_from(list(screen.THOUGHTS)), st.booleans(), st.text("<>/think a\n", max_size=12))
def test_a_thought_is_told_from_the_answer_however_it_is_cut(cut, tag, opened, thought):
    end = screen.THOUGHTS[tag]
    if end in thought:
        return
    text = ("" if opened else f"\n{tag}") + f"{thought}{end}\n\nyes, {tag} is a tag"
    thoughts = screen.Thoughts(f"assistant\n{tag}\n" if opened else "assistant\n")
    pieces = [thoughts.push(text[i : i + cut]) for i in range(0, len(text), cut)] + [thoughts.close()]
    assert "".join(piece for piece, _ in pieces) == thought
    assert "".join(piece for _, piece in pieces).lstrip() == f"yes, {tag} is a tag"
    assert screen.split_thought(text, tag if opened else "")[0] == thought.strip()


@given(st.text("<>think ab", max_size=12), st.integers(1, 5))
def test_an_answer_without_a_thought_is_all_answer(text, cut):
    if text.lstrip().startswith(("<think>", "<thinking>")):
        return
    thoughts = screen.Thoughts()
    pieces = [thoughts.push(text[i : i + cut]) for i in range(0, len(text), cut)] + [thoughts.close()]
    assert ("".join(thought for thought, _ in pieces), "".join(said for _, said in pieces)) == ("", text)


THOUGHT = "<think>first\n" + "so on and so forth, " * 20 + "\nlast</think>\n\n**Four.** And more."


@pytest.mark.parametrize("opened", [False, True])
def test_a_folded_thought_leaves_one_line(monkeypatch, opened):
    text = THOUGHT.removeprefix("<think>") if opened else THOUGHT
    lines = streamed(text, 40, 12, prompt_end="<think>\n" if opened else "", monkeypatch=monkeypatch, cuts=5)
    assert len(lines) == 3 and "102 words" in " ".join(lines) and re.match(r"▸ thought for [\d.]+ s", lines[0])
    assert lines[-1] == "Four. And more."


def test_a_folded_thought_is_seen_while_it_grows(monkeypatch):
    monkeypatch.setattr(screen, "REFRESH_S", 0)
    shown = Screen(40, 12)
    answer = screen.Answer("", True, console(shown))
    answer.write("<think>one\ntwo\nthree\nfour")
    assert shown.all_lines == ["thinking …", "two", "three", "four"]


def test_a_thought_may_be_shown_in_full(monkeypatch):
    lines = streamed(THOUGHT, 80, 12, fold=False, monkeypatch=monkeypatch)
    assert lines[0] == "first" and lines[-2:] == ["last", "Four. And more."] and len(lines) > 7
    assert streamed("<think>only this", 80, 12, fold=False, monkeypatch=monkeypatch) == ["only this"]


# ---------------------------------------------------------------------------------------------------------------------
# A person


@pytest.mark.parametrize("home", ["{}", "{}/file", "~nobody-of-this-name"])
def test_a_history_that_cannot_be_kept_is_no_reason_to_end(tmp_path, monkeypatch, capsys, home):
    (tmp_path / "quire" / "chat_history").mkdir(parents=True)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", home.format(tmp_path))
    assert list(screen.open_history().load_history_strings()) == []
    said = capsys.readouterr().err
    assert said.startswith("no history is kept: ") and said.count("\n") == 1 and "None" not in said


LINE = "quick fox.\n"
CODE = '"""A docstring."""\n\n/help is no command here\n\tnor is """ the end'


def chat(tmp_path, model, *words, **options) -> Terminal:
    terminal = Terminal("chat", "-m", model, *words, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"), **options)
    terminal.wait_for(">>>")
    return terminal


@pytest.mark.slow
def test_a_conversation(tmp_path):
    """The model says LINE without end; what is typed is answered in turn."""
    model = tiny.scripted(tmp_path / "model", list(LINE.encode()))
    terminal = chat(tmp_path, model, "-n", "22")

    def typed(text: str, shown: str) -> None:
        terminal.type(text)
        terminal.wait_for(shown)
        terminal.wait_for(">>>")

    pasted = "\n".join(f"line {i}" for i in range(30))
    terminal.paste(pasted)
    typed("\r", "22 tokens")
    typed("/set max_tokens none\r", "max_tokens = None")
    terminal.type("go\r")
    terminal.wait_for("quick fox")
    typed("\x03", "was stopped")
    typed("never sent\x03", "never sent")
    terminal.resize(40, 20)
    os.write(terminal.child.child_fd, b"caf\xe9")  # as a terminal that is set to Latin-1 has it
    typed("\r", "not UTF-8")
    typed("/frob\r", "unknown command /frob")
    typed("/set max_tokens 11\r", "max_tokens = 11")
    terminal.paste(CODE)
    typed("\r", "11 tokens")
    typed("讲😀\r", "11 tokens")
    typed("/regen\r", "11 tokens")
    terminal.type('"""one\r')
    terminal.wait_for("...")
    typed('two"""\r', "11 tokens")
    terminal.type("two")
    terminal.type("\x1b\r")
    typed("lines\r", "11 tokens")
    terminal.type("/sav\t")
    terminal.wait_until_shown("/save")
    typed(" talk.json\r", "saved in talk.json")
    typed("/new\r", "a new conversation")
    typed("/set temperature 1\r", "temperature = 1")
    typed("/load talk.json\r", "12 messages")
    typed("/save again.json\r", "saved in again.json")
    terminal.child.sendeof()
    assert terminal.end() == 0
    saved = json.loads((tmp_path / "talk.json").read_text("utf-8"))
    said = saved["messages"]
    assert [message["content"] for message in said[0::2]] == [pasted, "go", CODE, "讲😀", "one\ntwo", "two\nlines"]
    assert said[1]["content"] == LINE * 2 and said[7]["content"] == said[9]["content"] == LINE
    assert (LINE * 400).startswith(said[3]["content"]) and len(said[3]["content"]) > 5
    assert json.loads((tmp_path / "again.json").read_text("utf-8")) == saved
    remembered = (tmp_path / "state" / "quire" / "chat_history").read_text("utf-8")
    assert "+line 29" in remembered and "+讲😀" in remembered and "never" not in remembered


@pytest.mark.slow
def test_what_comes_while_an_answer_streams_waits_for_the_next_prompt(tmp_path):
    """A paste while the model is loaded; then a line, a paste of 30 lines larger than the terminal's buffer, half a
    line: none of it is shown in the midst of the answer, and all of it is there afterwards. A new conversation finds
    the lines in its history."""
    model = speaking(tmp_path / "model", [f"word{i} " for i in range(1000)])
    terminal = Terminal("chat", "-m", model, cwd=tmp_path, LC_ALL="C", XDG_STATE_HOME=str(tmp_path / "state"))
    pasted = "\n".join(f"pasted {i} " + "x" * 200 for i in range(30))
    terminal.wait_for(screen.PASTE_ON)  # it does not have its model yet
    terminal.paste("go\nand on")
    terminal.type("\r")
    terminal.wait_until_shown("word20 ")
    terminal.type("typed é\r")
    terminal.paste(pasted)
    terminal.type("\rhalf")
    terminal.wait_for("1001 tokens")
    first = terminal.screen.all_lines
    for _ in range(2):
        terminal.wait_for("1001 tokens")
    terminal.wait_until_shown(">>> half")
    terminal.type(" a line\x01/save talk.json\x0b\r")
    terminal.wait_for("saved in")
    terminal.child.sendeof()
    assert terminal.end() == 0
    said = [message["content"] for message in json.loads((tmp_path / "talk.json").read_text("utf-8"))["messages"]]
    assert said[0::2] == ["go\nand on", "typed é", pasted]
    answer = " ".join(f"word{i}" for i in range(1000))
    assert {text.strip() for text in said[1::2]} == {answer}
    shown = " ".join(line for line in first[first.index("... and on") + 1 :])
    assert shown.startswith(answer), "what was typed stands in the midst of the answer"
    again = chat(tmp_path, model)
    again.type("\x1b[A")
    again.wait_until_shown(">>> /save talk.json")
    again.type("\x1b[A")
    again.wait_until_shown("pasted 29")
    again.child.kill(signal.SIGTERM)
    assert again.end() == 143


@pytest.mark.slow
def test_markdown_and_thoughts_at_40_columns(tmp_path):
    parts = ["<think>", "wait, 讲 ", "maybe", "</think>"] + textwrap.wrap(DOCUMENT, 7, drop_whitespace=False,
                                                                          replace_whitespace=False)
    pieces = list(dict.fromkeys(parts))
    answer = "".join(pieces[4:])
    terminal = chat(tmp_path, speaking(tmp_path / "model", pieces), columns=40, rows=15)
    terminal.type("hello\r")
    terminal.wait_for("tokens")
    whole = Screen(40, 200)
    console(whole).print(screen.rendered(answer))
    lines = terminal.screen.all_lines
    start = next(i for i, line in enumerate(lines) if line.startswith("▸ thought for"))
    end = next(i for i, line in enumerate(lines) if "cached" in line or "tok/s" in line)
    assert lines[start + 2 : end] == whole.all_lines or lines[start + 1 : end] == whole.all_lines
    terminal.wait_until_shown(">>>")
    terminal.type("/think\r")
    terminal.wait_until_shown("wait, 讲 maybe")
    terminal.child.sendeof()
    assert terminal.end() == 0


@pytest.mark.slow
def test_a_dumb_terminal_and_sigterm(tmp_path):
    model = tiny.scripted(tmp_path / "model", list(LINE.encode()))
    terminal = Terminal("chat", "-m", model, "-n", "22", TERM="dumb", XDG_STATE_HOME="/dev/null")
    terminal.wait_for(">>>")
    terminal.type("hello\r")
    terminal.wait_for(">>>")
    shown = terminal.child.before
    assert shown.replace("\r", "").count(LINE) == 2 and "22 tokens" in shown and "\x1b" not in shown
    terminal.child.kill(signal.SIGTERM)
    assert terminal.end() == 143


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux here; the other tests draw their own screen")
def test_inside_tmux(tmp_path):
    """What its screen and its scroll-back hold, after an answer longer than the screen and a change of its width."""
    model = speaking(tmp_path / "model", [f"word{i} " + "\n\n" * (i % 9 == 8) for i in range(180)])
    environment = ["env", f"XDG_STATE_HOME={tmp_path / 'state'}", "OMP_NUM_THREADS=1"]
    command = [*environment, sys.executable, str(ROOT / "run.py"), "chat", "-m", str(model)]

    def tmux(*words: str) -> str:
        words = ("tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null", *words)
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout

    def wait_for(text: str, count: int = 1) -> list[str]:
        deadline_s = time.monotonic() + 60
        while (shown := tmux("capture-pane", "-p", "-S", "-")).count(text) < count:
            assert time.monotonic() < deadline_s, shown
            time.sleep(0.1)
        return [line.rstrip() for line in shown.splitlines() if line.strip()]

    tmux("new-session", "-d", "-x", "60", "-y", "12", shlex.join(command))
    try:
        wait_for(">>>")
        tmux("send-keys", "go", "Enter")
        lines = wait_for("181 tokens")
        assert " ".join(lines[lines.index(">>> go") + 1 :]).startswith(" ".join(f"word{i}" for i in range(180)))
        tmux("resize-window", "-x", "40", "-y", "12")
        tmux("send-keys", "again", "Enter")
        wait_for("181 tokens", 2)
        tmux("send-keys", "C-d")
    finally:
        tmux("kill-server")
