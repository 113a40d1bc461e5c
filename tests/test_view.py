"""view.py: pictures of small traces made by hand, what fits the width, and files that are no traces."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import run
import tiny
import view

ROOT = Path(__file__).resolve().parent.parent
FREE = {"free": 8, "cached": 0, "held": 0, "shared": 0}


def request(id: str, computed: int = 0, done: int = 0, prompt: int = 8, **others) -> dict:
    return {"id": id, "class": "batch", "computed": computed, "done": done, "prompt": prompt, "cached": 0, "drafted": 0,
            "preemptions": 0} | others


def step(number: int, ran: list[dict] = (), waiting: list[dict] = (), ms: float = 10, pages: dict = FREE) -> dict:
    return {"step": number, "ms": ms, "requests": list(ran), "waiting": list(waiting), "pages": pages}


def decodes(num_steps: int, id: str = "a") -> list[dict]:
    return [step(i, [request(id, 1, 8 + i)]) for i in range(1, num_steps + 1)]


@pytest.fixture
def draw(tmp_path, capsys):
    """draw(steps or bytes, word, ...) -> exit status, lines on stdout, stderr."""
    def draw(trace: list[dict] | bytes, *words: str) -> tuple[int, list[str], str]:
        path = tmp_path / "trace.jsonl"
        path.write_bytes(trace if isinstance(trace, bytes) else b"".join(json.dumps(s).encode() + b"\n" for s in trace))
        status = run.main(["trace", str(path), *words])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return draw


# ---- The picture ------------------------------------------------------------------------------------------------


def test_everything_that_happens_to_requests_has_its_mark(draw):
    pages = [dict(zip(("free", "cached", "held", "shared"), counts)) for counts in
             ((6, 0, 2, 0), (3, 0, 5, 0), (1, 1, 6, 0), (0, 0, 8, 1), (2, 2, 4, 1), (0, 0, 8, 1))]
    again = {"prompt": 20, "preemptions": 1}
    status, lines, err = draw([
        step(1, [request("a", 8, 8)], [request("b", prompt=20), request("c")], 40, pages[0]),
        step(2, [request("a", 1, 9), request("b", 12, 12, 20)], [request("c")], 60, pages[1]),
        step(3, [request("a", 1, 10), request("b", 8, 20, 20)], [request("c")], 50, pages[2]),
        step(4, [request("a", 5, 12, drafted=4), request("c", 4, 8, cached=4)], [request("b", **again)], 20, pages[3]),
        step(5, [request("c", 1, 9, cached=4)], [request("b", **again)], 5, pages[4]),
        step(6, [request("b", 3, 19, **again), request("c", 1, 10, cached=4)], (), 5, pages[5]),
        step(7, [request("b", 2, 21, **again)], (), 5, pages[5]),
    ])
    assert (status, err) == (0, "")
    assert lines == [
        "7 steps · 3 requests · 46 tokens · 0.2 s · a column is 1 step",
        "request  prompt cached 1",
        "a             8        ▓──═",
        "b            20        ·█▓××◆░",
        "c             8      4 ···◆──",
        "tokens a step     0-13 ▅█▆▆▁▃▂",
        "ms a step         0-60 ▆█▇▃▁▁▁",
        "pages held         0-8 ▂▅▆█▄██",
        "pages shared       0-8    ▁▁▁▁",
        "pages cached       0-8   ▁ ▂",
        "pages free         0-8 ▆▃▁ ▂",
        "· waits   ◆ admitted, prefix cached   ░▒▓█ prompt, up to 12 tokens a step",
        "─ answer, a token a step   ═ answer, with drafts   × preempted, waits again",
    ]


def test_classes_are_named_where_there_are_several(draw):
    _, lines, _ = draw([step(1, [request("a", 1, 9), request("b", 1, 9, **{"class": "long"})])])
    assert lines[1:4] == ["request  class prompt cached 1",
                          "a        batch      8        ◆",
                          "b        long       8        ◆"]


def test_rejected_drafts_do_not_make_an_answer_look_like_a_prompt(draw):
    _, lines, _ = draw([step(1, [request("a", 8, 8)]), step(2, [request("a", 5, 9, drafted=4)])])
    assert lines[2].endswith(" █═")


def test_steps_share_columns_where_there_are_too_many(draw):
    steps = decodes(100)
    steps[42]["waiting"] = [request("b")]
    steps[43] = step(44, [request("a", 1, 52), request("b", 8, 8)], ms=20)
    steps[44]["requests"] += [request("b", 1, 9)]
    _, lines, _ = draw(steps, "--width", "40")
    assert lines == [
        "100 steps · 2 requests · 109 tokens",
        "1.0 s · a column is 6 steps",
        "bars show their mean",
        "request  prompt cached 1         61",
        "a             8        ◆────────────────",
        "b             8               █",
        "tokens a step    0-2.5 ▄▄▄▄▄▄▄█▄▄▄▄▄▄▄▄▄",
        "ms a step         0-12 ▇▇▇▇▇▇▇█▇▇▇▇▇▇▇▇▇",
        "pages held         0-8",
        "pages shared       0-8",
        "pages cached       0-8",
        "pages free         0-8 " + 17 * "█",
        "◆ admitted, prefix cached",
        "░▒▓█ prompt, up to 8 tokens a step",
        "─ answer, a token a step",
    ]


def test_what_is_rare_wins_a_shared_column():
    def together(*cells: tuple[view.Kind, int]) -> view.Cell:
        return view.join([view.Column(1, 1, Counter(), {"a": view.Cell(*cell)}) for cell in cells]).cells["a"]

    kinds = view.Kind
    assert together((kinds.DECODE, 1), (kinds.PREEMPTED, 0), (kinds.PREFILL, 7)) == (kinds.PREEMPTED, 7)
    assert together((kinds.WAITS, 0), (kinds.PREFILL, 7), (kinds.PREFILL, 3)) == (kinds.PREFILL, 7)


def test_requests_beyond_the_rows_are_counted(draw):
    steps = [step(i, [request(f"r{j}", 1, 8 + i) for j in range(45)]) for i in range(1, 4)]
    _, lines, _ = draw(steps)
    assert lines[41].startswith("r39 ") and lines[42] == "5 more requests: --rows N shows N, --from STEP later ones"
    assert lines[43] == "tokens a step     0-45 ███"
    _, lines, _ = draw(steps, "--rows", "1")
    assert lines[2].startswith("r0 ") and lines[3].startswith("44 more requests")
    _, lines, _ = draw(steps, "--rows", "45")
    assert "more" not in "".join(lines)


def test_a_part_of_the_steps(draw):
    steps = decodes(30)
    steps[9]["waiting"] = [request("b")]
    _, lines, _ = draw(steps, "--from", "11", "--to", "20")
    assert lines[0].startswith("10 steps · 1 request · 10 tokens")
    assert lines[2] == "a             8        " + 10 * "─"  # admitted before, so no hit


def test_a_trace_of_any_length_takes_the_same_memory():
    trace = view.Trace(num_rows=2)
    for number in range(1, 10_001):
        trace.add(step(number, [request(f"r{number // 100}", 1, 9)]), shown=True)
    assert len(trace.columns) <= view.MAX_COLUMNS and trace.steps_per_column == 8
    assert [column.first_step for column in trace.columns] == list(range(1, 10_001, 8))
    assert sum(column.num_steps for column in trace.columns) == view.join(trace.columns).sums["tokens"] == 10_000
    assert list(trace.rows) == ["r0", "r1"] and len(trace.ids) == 101
    assert all(set(column.cells) <= {"r0", "r1"} for column in trace.columns)


ENTRIES = st.builds(request, st.text(max_size=30), st.integers(0, 999), st.integers(0, 999), st.integers(0, 10**6),
                    cached=st.integers(0, 10**6), drafted=st.integers(0, 4), preemptions=st.integers(0, 2))
STEPS = st.builds(step, st.integers(1, 10**6), st.lists(ENTRIES, max_size=3), st.lists(ENTRIES, max_size=3),
                  st.floats(0, 1e5), st.fixed_dictionaries({name: st.integers(0, 10**4) for name in FREE}))


@given(st.lists(STEPS, min_size=1, max_size=8), st.integers(1, 30), st.integers(40, 90), st.booleans())
def test_any_picture_fits_its_width(steps, num_times, width, colours):
    trace = view.Trace(num_rows=5)
    for one in steps * num_times:
        trace.add(view.parse_step(json.dumps(one)), shown=True)
    for line in view.draw_trace(trace, width, colours):
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        assert cell_len(line) <= width and line.isprintable(), line


def test_names_are_cut_inside_and_cannot_harm_the_terminal():
    assert view.shortened("request-123456789", 10) == "requ…56789"
    assert view.shortened("request-12", 10) == "request-12"
    assert view.shortened("\x1b[31m\n", 9) == "?[31m?"
    assert cell_len(view.shortened("鯨" * 20, 11)) == 11


# ---- The terminal -----------------------------------------------------------------------------------------------


def test_colours_only_in_a_terminal_that_wants_them(draw, monkeypatch):
    steps = decodes(3)
    _, plain, _ = draw(steps)
    assert "\x1b" not in "".join(plain)
    monkeypatch.setattr(view, "is_dumb", lambda stream: False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, coloured, _ = draw(steps)
    assert "\x1b[32m──\x1b[0m" in coloured[2]
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in coloured] == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert draw(steps)[1] == plain


def test_the_width_is_the_terminals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "99")
    assert view.terminal_width() == 80
    child, parent = pty.openpty()
    with os.fdopen(child, "w") as terminal, os.fdopen(parent):
        termios.tcsetwinsize(child, (24, 123))
        assert view.terminal_width(terminal) == 123


def test_pictures_need_no_torch():
    code = "import sys, view; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# ---- Files ------------------------------------------------------------------------------------------------------

GOOD = json.dumps(step(1, [request("a", 1, 9)])).encode()


@pytest.mark.parametrize("data, words, parts", [
    (b"", "", ["trace.jsonl holds no steps: give a file that --trace wrote"]),
    (b"\n\n", "", ["holds no steps"]),
    (GOOD, "--from 2", ["holds no step from 2 on: give"]),
    (json.dumps(step(5)).encode(), "--from 2 --to 4", ["holds no step from 2 on to 4"]),
    (b"hello\n", "", ["line 1 is not a step of a trace (Expecting value"]),
    (GOOD + b"\n\n[]\n", "", ["line 3 is not a step", "it is not an object"]),
    (GOOD + b"\n{}\n", "", ["line 2 is not a step", "it has no 'step' that is a whole number"]),
    (GOOD.replace(b'"ms": 10', b'"ms": NaN') + b"\n", "", ["it has no 'ms' that is a number"]),
    (GOOD.replace(b'"free": 8', b'"free": -8') + b"\n", "", ["pages has no 'free' that is a whole number"]),
    (GOOD.replace(b'"id": "a"', b'"id": 7') + b"\n", "", ["an entry of requests has no 'id' that is text"]),
    (GOOD.replace(b'"a"', b'"\xff"') + b"\n", "", ["line 1 is not a step", "is not UTF-8: byte 0xff"]),
    (b"[" * 10**5 + b"\n", "", ["line 1 is not a step of a trace"]),
])
def test_what_is_no_trace_is_refused_in_a_line(draw, data, words, parts):
    status, lines, err = draw(data, *words.split())
    assert (status, lines, err.count("\n")) == (1, [], 1) and err.startswith("run.py: error: "), err
    for part in parts:
        assert part in err


def test_a_missing_file_and_bad_flags_are_refused(capsys):
    for words, status, part in (("no/such.jsonl", 1, "no/such.jsonl: No such file or directory"), ("", 2, "FILE"),
                                ("x --width 39", 2, "at least 40"), ("x --rows 0", 2, "at least 1"),
                                ("x --from 5 --to 4", 2, "--from is 5 and --to is 4")):
        assert run.main(["trace", *words.split()]) == status
        err = capsys.readouterr().err
        assert part in err and err.count("\n") == 1, err


def test_a_torn_last_line_is_left_out(draw):
    whole = b"\xef\xbb\xbf" + GOOD + b"\n"
    status, lines, err = draw(whole + GOOD[:50])
    assert (status, lines[0].split(" · ")[0]) == (0, "1 step")
    assert "trace.jsonl, line 2 is torn: left out" in err
    assert draw(whole + GOOD)[1][0].startswith("2 steps")


def test_the_picture_of_a_real_run(draw, tmp_path, capsys):
    """What --trace writes is what the picture reads: prompts that share pages, under too few of them."""
    model = tiny.tiny_llama(tmp_path / "llama")
    prompts = tmp_path / "in.txt"
    prompts.write_text("".join(f"{'the same beginning of all, ' * 2}{i}\n" for i in range(4)))
    words = "--raw --page-size 8 --num-pages 24 --max-step-tokens 16 -n 30 --ignore-eos --dtype float64".split()
    path = tmp_path / "run.jsonl"
    assert run.main(["batch", str(prompts), "-m", str(model), "-o", str(tmp_path / "out"), "--trace", str(path),
                     *words]) == 0
    capsys.readouterr()
    status, lines, err = draw(path.read_bytes())
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert (status, err) == (0, "") and lines[0].startswith(f"{len(steps)} steps · 4 requests")
    marks = "".join(lines[2:6])
    assert all(mark in marks for mark in "·█─◆"), marks
    assert ("×" in marks) == any(r["preemptions"] for one in steps for r in one["waiting"])


# ---- The roofline -------------------------------------------------------------------------------------------------


def roofline(**given) -> view.Roofline:
    points = [view.Point("prefill", "quire", 500, 300), view.Point("prefill", "a<b", 500, 100),
              view.Point("decode", "quire", 2, 20), view.Point("decode", "a<b", 2, 5)]
    return view.Roofline(**({"memory_gb_per_s": 20.0, "matmul_gops": 1000.0, "points": points} | given))


def places(lines: list[str]) -> dict[str, tuple[int, int]]:
    """Column and row (from above) of each letter of the picture."""
    body = [line[9:] for line in lines if "│" in line]
    return {char: (line.index(char), row) for row, line in enumerate(body) for char in line if char.isalpha()}


def test_each_workload_is_a_point_under_the_ceilings():
    lines = list(view.draw_roofline(roofline(), 80, False))
    at = places(lines)
    assert at["A"][0] == at["a"][0] > at["B"][0] == at["b"][0]  # more operations a byte lie farther right
    assert at["A"][1] < at["a"][1] < at["B"][1] < at["b"][1]  # higher rates lie higher
    body = [line[9:] for line in lines if "│" in line]
    for column, row in at.values():
        assert any(line[column : column + 1] in ("─", "╱") for line in body[:row])
    assert sum("─" in line for line in body) == 1  # arithmetic's is flat, and memory's rises to it
    assert lines[-1] == "A prefill 30%, a a<b 10%   B decode 50%, b a<b 12%"
    assert [label for label in ("10", "100", "1,000") if f"{label:>7} │" in "\n".join(lines)] == ["10", "100", "1,000"]


def test_a_point_on_the_ceiling_hides_it():
    at = places(list(view.draw_roofline(roofline(points=[view.Point("x", "quire", 2, 40)]), 80, False)))
    assert set(at) == {"A"}


@given(st.integers(40, 200), st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)), max_size=60))
def test_any_roofline_fits_the_width(width, given_points):
    points = [view.Point(f"w{i // 2}", f"e{i % 5}", *numbers) for i, numbers in enumerate(given_points)]
    lines = list(view.draw_roofline(roofline(points=points), width, False))
    assert all(cell_len(line) <= max(width, 14) for line in lines)
    assert bool(lines) == bool(points)
    ElementTree.fromstring(view.roofline_svg(roofline(points=points), "title"))


def test_the_roofline_as_svg():
    svg = ElementTree.fromstring(view.roofline_svg(roofline(), "made by <me> & others"))
    words = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"made by <me> & others", "a<b", "A prefill", "B decode", "20 GB/s, 1,000 Gop/s"} <= set(words)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 4
