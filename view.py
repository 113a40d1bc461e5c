"""Pictures in the terminal: what each step of a run did (`run.py trace`), and the roofline of `run.py bench`.

Owns how numbers become characters: marks, bars, colours, and what fits the width. Knows nothing of engines: it reads
the lines that `--trace` writes, and is given points. No torch. Start at `trace_main` or `draw_roofline`; what any
picture is made of stands at the end.
"""
from __future__ import annotations

import argparse
import html
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple, TextIO

from rich.cells import cell_len, set_cell_size

from terminal import decode_utf8, is_dumb, is_terminal, warn

Piece = tuple[str, str]  # a text and its style: the parameters of an SGR escape sequence, "" for none

# ---------------------------------------------------------------------------------------------------------------------
# The step trace: a row a request, a column a step


class Kind(IntEnum):
    """What a step did for a request. Where several steps share a column, the first of these that occurs is shown."""

    PREEMPTED = 0
    HIT = 1
    PREFILL = 2
    DRAFTS = 3
    DECODE = 4
    WAITS = 5


class Mark(NamedTuple):
    glyphs: str  # if several, by the number of tokens
    style: str
    meaning: str


MARKS = {
    Kind.WAITS: Mark("·", "2", "waits"),
    Kind.HIT: Mark("◆", "1;35", "admitted, prefix cached"),
    Kind.PREFILL: Mark("░▒▓█", "36", "prompt, up to {most_tokens} tokens a step"),
    Kind.DECODE: Mark("─", "32", "answer, a token a step"),
    Kind.DRAFTS: Mark("═", "32", "answer, with drafts"),
    Kind.PREEMPTED: Mark("×", "1;31", "preempted, waits again"),
}
# The rows under the requests: which of a column's sums, what it is called, its style.
BARS = [("tokens", "tokens a step", "36"), ("ms", "ms a step", ""), ("held", "pages held", "33"),
        ("shared", "pages shared", "35"), ("cached", "pages cached", "34"), ("free", "pages free", "2")]
MAX_COLUMNS = 2048  # kept while a trace is read, however long; to draw them, several are joined
MAX_NAME = 16  # characters shown of a request's id

# The fields of a step's line, and of the objects in it.
STEP = {"step": int, "ms": int | float, "requests": list, "waiting": list, "pages": dict}
REQUEST = {"id": str, "class": str} | dict.fromkeys(
    ("computed", "done", "prompt", "cached", "drafted", "preemptions"), int)
PAGES = dict.fromkeys(("free", "cached", "held", "shared"), int)
IN_WORDS = {int: "a whole number", int | float: "a number", str: "text", list: "a list", dict: "an object"}


def trace_main(args: argparse.Namespace) -> int:
    trace = Trace(args.rows)
    for step in read_steps(args.file, args.last):
        trace.add(step, shown=step["step"] >= args.first)
    if not trace.columns:
        span = "steps" if args.first == 1 else f"step from {args.first} on"
        raise ValueError(f"{args.file} holds no {span}{f' to {args.last}' if args.last else ''}: give a file that "
                         "--trace wrote, and --from and --to within it")
    for line in draw_trace(trace, args.width or terminal_width(), has_colours()):
        print(line)
    return 0


def read_steps(path: str, last: int | None = None) -> Iterator[dict]:
    """The steps of a trace up to the `last`, one at a time. A last line that is torn, as of a run that was killed or
    still goes on, is left out."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                step = parse_step(decode_utf8(line.removeprefix(b"\xef\xbb\xbf"), "the text"))
            except (ValueError, RecursionError) as error:
                if number > 1 and not line.endswith(b"\n"):
                    warn([f"{path}, line {number} is torn: left out"])
                    return
                raise ValueError(f"{path}, line {number} is not a step of a trace ({error}): give a file that --trace "
                                 "wrote, or take the line out") from None
            if last is not None and step["step"] > last:
                return
            yield step


def parse_step(text: str) -> dict:
    step = json.loads(text)
    check(step, STEP, "it")
    check(step["pages"], PAGES, "pages")
    for name in ("requests", "waiting"):
        for request in step[name]:
            check(request, REQUEST, f"an entry of {name}")
    return step


def check(found: object, fields: dict, what: str) -> None:
    """ValueError unless `found` has all `fields`, each of its type and no number negative or beyond reason."""
    if not isinstance(found, dict):
        raise ValueError(f"{what} is not an object")
    for name, kind in fields.items():
        value = found.get(name)
        if not isinstance(value, kind) or isinstance(value, int | float) and not 0 <= value < 2**53:
            raise ValueError(f"{what} has no '{name}' that is {IN_WORDS[kind]}")


class Cell(NamedTuple):
    """What is known of one request in one column."""

    kind: Kind
    num_tokens: int  # computed in one step, at most


@dataclass
class Column:
    """One step, or several that follow each other: sums over them, and a cell for each request that is shown."""

    first_step: int
    num_steps: int
    sums: Counter
    cells: dict[str, Cell]


def joined(columns: Sequence[Column], num_together: int) -> list[Column]:
    """Neighbours made one, `num_together` at a time."""
    return [join(columns[i : i + num_together]) for i in range(0, len(columns), num_together)]


def join(columns: Sequence[Column]) -> Column:
    cells: dict[str, Cell] = {}
    for id, cell in (item for column in columns for item in column.cells.items()):
        other = cells.get(id, cell)
        cells[id] = Cell(min(cell.kind, other.kind), max(cell.num_tokens, other.num_tokens))
    return Column(columns[0].first_step, sum(column.num_steps for column in columns),
                  sum((column.sums for column in columns), Counter()), cells)


@dataclass
class Trace:
    """A run, as far as it is shown: `num_rows` requests, at most MAX_COLUMNS columns, however many steps it has."""

    num_rows: int
    rows: dict[str, dict] = field(default_factory=dict)  # the first requests, each as a step described it last
    ids: set[str] = field(default_factory=set)  # of all requests
    columns: list[Column] = field(default_factory=list)
    steps_per_column: int = 1
    most_tokens: int = 1  # of a prompt read in one step
    admitted: set[str] = field(default_factory=set)  # who has computed something since they last waited

    def add(self, step: dict, shown: bool) -> None:
        """Adds a step, or if it is not `shown` only notes who was admitted by it."""
        if shown:
            self._append(Column(step["step"], 1, sums(step), self._cells(step)))
        self.admitted |= {request["id"] for request in step["requests"]}
        self.admitted -= {request["id"] for request in step["waiting"]}

    def _cells(self, step: dict) -> dict[str, Cell]:
        cells = {}
        for request in [*step["requests"], *step["waiting"]]:
            id = request["id"]
            self.ids.add(id)
            if id in self.rows or len(self.rows) < self.num_rows:
                self.rows[id] = request
                kind = kind_of(request, id in self.admitted)
                cells[id] = Cell(kind, request["computed"])
                if kind == Kind.PREFILL:
                    self.most_tokens = max(self.most_tokens, request["computed"])
        return cells

    def _append(self, column: Column) -> None:
        if self.columns and self.columns[-1].num_steps < self.steps_per_column:
            self.columns[-1] = join([self.columns[-1], column])
            return
        self.columns.append(column)
        if len(self.columns) > MAX_COLUMNS:
            self.columns = joined(self.columns, 2)
            self.steps_per_column *= 2


def sums(step: dict) -> Counter:
    tokens = sum(request["computed"] for request in step["requests"])
    return Counter({name: step["pages"][name] for name in PAGES}, ms=step["ms"], tokens=tokens)


def kind_of(request: dict, was_admitted: bool) -> Kind:
    """What a step did for a request, given whether an earlier one had admitted it."""
    num_tokens, start = request["computed"], request["done"] - request["computed"]
    if num_tokens == 0:
        return Kind.PREEMPTED if request["preemptions"] else Kind.WAITS
    if start > 0 and not was_admitted:
        return Kind.HIT
    if request["drafted"]:
        return Kind.DRAFTS
    # After a preemption the answer is read like a prompt.
    return Kind.PREFILL if start < request["prompt"] or num_tokens > 1 else Kind.DECODE


def draw_trace(trace: Trace, width: int, colours: bool) -> Iterator[str]:
    """Lines of at most `width` characters."""
    head, *labels = table(list(trace.rows.values()), width)
    num_together = math.ceil(len(trace.columns) / max(1, width - cell_len(head) - 1))
    columns, whole = joined(trace.columns, num_together), join(trace.columns)
    num_shared = trace.steps_per_column * num_together
    facts = [counted(whole.num_steps, "step"), counted(len(trace.ids), "request"),
             counted(whole.sums["tokens"], "token"), f"{whole.sums['ms'] / 1000:.1f} s",
             f"a column is {counted(num_shared, 'step')}", *["bars show their mean"] * (num_shared > 1)]
    yield from flow(([(fact, "")] for fact in facts), " · ", width, colours)
    ticks = "".join(f"{column.first_step:<10}" for column in columns[::10])
    yield paint([(f"{head} {ticks}".rstrip()[:width], "2")], colours)
    for id, label in zip(trace.rows, labels):
        yield paint([(f"{label} ", ""), *(marked(column.cells.get(id), trace.most_tokens) for column in columns)],
                    colours)
    if len(trace.ids) > len(trace.rows):
        more = f"{counted(len(trace.ids) - len(trace.rows), 'more request')}: --rows N shows N"
        yield from flow([[(more, "")], [("--from STEP later ones", "")]], ", ", width, colours)
    num_pages = sum(whole.sums[name] for name in ("free", "cached", "held")) / whole.num_steps
    for name, label, style in BARS:
        values = [column.sums[name] / column.num_steps for column in columns]
        top = num_pages if name in PAGES else max(values)
        scale = f"0-{top:,.0f}" if top >= 10 else f"0-{top:.3g}"
        yield paint([(f"{label:<{cell_len(head) - len(scale)}}{scale} ", ""), (bars(values, top), style)], colours)
    used = {cell.kind for column in columns for cell in column.cells.values()}
    yield from flow(([(mark.glyphs, mark.style), (" " + mark.meaning.format(most_tokens=trace.most_tokens), "")]
                     for kind, mark in MARKS.items() if kind in used), "   ", width, colours)


def table(requests: Sequence[dict], width: int) -> list[str]:
    """What stands left of the columns, all of one width: a header, then a line for each request."""
    has_classes = len({request["class"] for request in requests}) > 1
    max_name = min(MAX_NAME, width // 5)
    rows = [["request ", *["class"] * has_classes, "prompt", "cached"]]
    for request in requests:
        rows.append([shortened(request["id"], max_name), *[shortened(request["class"], max_name)] * has_classes,
                     str(request["prompt"]), str(request["cached"] or "")])
    widths = [max(map(cell_len, column)) for column in zip(*rows)]
    *text_widths, prompt_width, cached_width = widths
    return [" ".join([*map(set_cell_size, texts, text_widths), num_prompt.rjust(prompt_width),
                      num_cached.rjust(cached_width)]) for *texts, num_prompt, num_cached in rows]


def marked(cell: Cell | None, most_tokens: int) -> Piece:
    if cell is None:
        return " ", ""
    mark = MARKS[cell.kind]
    return mark.glyphs[max(1, level(cell.num_tokens, most_tokens, len(mark.glyphs))) - 1], mark.style


# ---------------------------------------------------------------------------------------------------------------------
# The roofline: operations per byte against rate, both on log scales, under the two ceilings


class Point(NamedTuple):
    """What an engine reached at a workload."""

    workload: str
    engine: str
    intensity: float  # operations a byte
    rate: float  # 10^9 operations a second


@dataclass(frozen=True)
class Roofline:
    """Points, and the most that memory and arithmetic allow."""

    memory_gb_per_s: float
    matmul_gops: float
    points: Sequence[Point]

    @property
    def engines(self) -> list[str]:
        return list(dict.fromkeys(point.engine for point in self.points))

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(point.workload for point in self.points))

    def ceiling(self, intensity: float) -> float:
        return min(self.memory_gb_per_s * intensity, self.matmul_gops)

    def spans(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The logarithms to the base 10 that the axes span: every point, the ridge between the ceilings, some room."""
        ridge = Point("", "", self.matmul_gops / self.memory_gb_per_s, self.matmul_gops)
        x, y = zip(*((math.log10(point.intensity), math.log10(point.rate)) for point in [*self.points, ridge]))
        return (min(x) - 0.3, max(x) + 0.5), (min(y) - 0.2, max(y) + 0.2)


ROOFLINE_ROWS = 16
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ENGINE_STYLES = [("1;32", "#1a7f37"), ("33", "#b35900"), ("36", "#0969da"), ("35", "#8250df")]  # terminal, SVG


def draw_roofline(roofline: Roofline, width: int, colours: bool) -> Iterator[str]:
    """Lines of at most `width` characters. A workload has a letter; the first engine's are capitals."""
    if not roofline.points:
        return
    labels_width = 8
    grid = roofline_grid(roofline, width - labels_width - 1)
    (low_x, high_x), (low_y, high_y) = roofline.spans()
    title = "Gop/s, by operations per byte of memory; above: what memory and arithmetic allow"
    yield paint([(title[:width], "2")], colours)
    labels = ticks(low_y, high_y, ROOFLINE_ROWS)
    for row in reversed(range(ROOFLINE_ROWS)):
        yield paint([(f"{labels.get(row, ''):>{labels_width - 1}} │", "2"), *grid[row]], colours)
    line = [" "] * len(grid[0])
    for place, label in ticks(low_x, high_x, len(line)).items():
        if place + len(label) <= len(line):
            line[place : place + len(label)] = label
    yield paint([(" " * labels_width + "└" + "─" * len(line), "2")], colours)
    yield paint([(" " * (labels_width + 1) + "".join(line), "2")], colours)
    yield from flow((legend_entry(roofline, workload) for workload in roofline.workloads), "   ", width, colours)


def roofline_grid(roofline: Roofline, num_columns: int) -> list[list[Piece]]:
    """Rows from the lowest, of a piece a column: ceilings, and points over them, the first engine's uppermost."""
    (low_x, high_x), (low_y, high_y) = roofline.spans()
    grid = [[(" ", "")] * num_columns for _ in range(ROOFLINE_ROWS)]

    def row_of(rate: float) -> int:
        return place_of(math.log10(rate), low_y, high_y, ROOFLINE_ROWS)

    for column in range(num_columns):
        intensity = 10 ** (low_x + (column + 0.5) / num_columns * (high_x - low_x))
        if roofline.ceiling(intensity) >= 10**low_y:
            flat = roofline.ceiling(intensity) == roofline.matmul_gops
            grid[row_of(roofline.ceiling(intensity))][column] = ("─" if flat else "╱", "2")
    for point in reversed(roofline.points):
        column = place_of(math.log10(point.intensity), low_x, high_x, num_columns)
        grid[row_of(point.rate)][column] = (letter(roofline, point), ENGINE_STYLES[engine_index(roofline, point)][0])
    return grid


def place_of(value: float, low: float, high: float, num_places: int) -> int:
    return min(num_places - 1, int((value - low) / (high - low) * num_places))


def ticks(low: float, high: float, num_places: int) -> dict[int, str]:
    """Powers of ten between two logarithms, by their places."""
    return {place_of(power, low, high, num_places): f"{10.0**power:,.{max(0, -power)}f}"
            for power in range(math.ceil(low), math.floor(high) + 1)}


def engine_index(roofline: Roofline, point: Point) -> int:
    return roofline.engines.index(point.engine) % len(ENGINE_STYLES)


def letter(roofline: Roofline, point: Point) -> str:
    found = LETTERS[roofline.workloads.index(point.workload) % len(LETTERS)]
    return found if point.engine == roofline.engines[0] else found.lower()


def legend_entry(roofline: Roofline, workload: str) -> list[Piece]:
    """A workload's letter, its name, and what each engine reached of what is allowed."""
    entry: list[Piece] = []
    for point in (point for point in roofline.points if point.workload == workload):
        style = ENGINE_STYLES[engine_index(roofline, point)][0]
        name = f"{letter(roofline, point)} {workload}" if not entry else f", {letter(roofline, point)} {point.engine}"
        entry += [(name, style), (f" {point.rate / roofline.ceiling(point.intensity):.0%}", "")]
    return entry


SVG_WIDTH, SVG_HEIGHT, SVG_MARGIN, SVG_LEGEND = 860, 460, 60, 130


def roofline_svg(roofline: Roofline, title: str) -> str:
    """The same as a picture of its own."""
    (low_x, high_x), (low_y, high_y) = roofline.spans()
    left, right, top, bottom = SVG_MARGIN, SVG_WIDTH - SVG_LEGEND, SVG_MARGIN, SVG_HEIGHT - SVG_MARGIN

    def x_of(log: float) -> float:
        return left + (log - low_x) / (high_x - low_x) * (right - left)

    def y_of(log: float) -> float:
        return bottom - (log - low_y) / (high_y - low_y) * (bottom - top)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(words)}</text>'

    body = [f'<rect width="{SVG_WIDTH}" height="{SVG_HEIGHT}" fill="white"/>', text(left, 24, title),
            text(left, top - 10, "Gop/s"), text(right, bottom + 36, "operations per byte", 'text-anchor="end"')]
    for power in range(math.ceil(low_x), math.floor(high_x) + 1):
        x = x_of(power)
        body += [f'<path d="M{x:.1f} {top}V{bottom}" stroke="#ddd"/>',
                 text(x, bottom + 18, f"{10.0**power:g}", 'text-anchor="middle"')]
    for power in range(math.ceil(low_y), math.floor(high_y) + 1):
        y = y_of(power)
        body += [f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>',
                 text(left - 8, y + 4, f"{10.0**power:g}", 'text-anchor="end"')]
    ridge_x, ridge_y = math.log10(roofline.matmul_gops / roofline.memory_gb_per_s), math.log10(roofline.matmul_gops)
    start_x = max(low_x, low_y - math.log10(roofline.memory_gb_per_s))
    start_y = start_x + math.log10(roofline.memory_gb_per_s)
    body += [f'<path d="M{x_of(start_x):.1f} {y_of(start_y):.1f}L{x_of(ridge_x):.1f} {y_of(ridge_y):.1f}H{right}" '
             'fill="none" stroke="black" stroke-width="1.5"/>',
             text(right, y_of(ridge_y) - 8, f"{roofline.memory_gb_per_s:.0f} GB/s, {roofline.matmul_gops:,.0f} Gop/s",
                  'text-anchor="end"')]
    for point in reversed(roofline.points):
        x, y = x_of(math.log10(point.intensity)), y_of(math.log10(point.rate))
        colour = ENGINE_STYLES[engine_index(roofline, point)][1]
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>',
                 text(x + 7, y + 4, letter(roofline, point), f'fill="{colour}"')]
    legend = [(engine, ENGINE_STYLES[i % len(ENGINE_STYLES)][1]) for i, engine in enumerate(roofline.engines)]
    legend += [(f"{LETTERS[i % len(LETTERS)]} {name}", "black") for i, name in enumerate(roofline.workloads)]
    for i, (words, colour) in enumerate(legend):
        body.append(text(right + 12, top + 16 * i, words, f'fill="{colour}"'))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SVG_WIDTH} {SVG_HEIGHT}" font-family="sans-serif" '
            'font-size="12">\n' + "\n".join(body) + "\n</svg>\n")


# ---------------------------------------------------------------------------------------------------------------------
# What pictures are made of


def level(value: float, top: float, num_levels: int) -> int:
    """0 for nothing, else 1 to `num_levels`, which stands for `top`."""
    if value >= top:
        return num_levels if value > 0 else 0
    return math.ceil(num_levels * value / top)


def bars(values: Iterable[float], top: float) -> str:
    """Bars that stand side by side, one line high."""
    return "".join(" ▁▂▃▄▅▆▇█"[level(value, top, 8)] for value in values)


def flow(items: Iterable[list[Piece]], between: str, width: int, colours: bool) -> Iterator[str]:
    """Lines of items, as many on each as fit."""
    line, left = [], width
    for item in items:
        num_cells = sum(cell_len(text) for text, _ in item)
        if line and num_cells > left:
            yield paint(line[:-1], colours)
            line, left = [], width
        line += [*item, (between, "")]
        left -= num_cells + len(between)
    yield paint(line[:-1], colours)


def paint(pieces: Iterable[Piece], colours: bool) -> str:
    """A line of texts, each in its style."""
    line = ""
    for style, group in groupby(pieces, key=lambda piece: piece[1]):
        text = "".join(text for text, _ in group)
        line += f"\x1b[{style}m{text}\x1b[0m" if colours and style else text
    return line.rstrip()


def shortened(text: str, num_cells: int) -> str:
    """Text that takes at most `num_cells` and leaves the terminal as it is; what is left out is left out inside."""
    text = "".join(char if char.isprintable() else "?" for char in text)
    if cell_len(text) <= num_cells:
        return text
    tail = text[-(num_cells // 2) :]
    while cell_len(tail) > num_cells // 2:
        tail = tail[1:]
    return set_cell_size(text, num_cells - 1 - cell_len(tail)) + "…" + tail


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def terminal_width(stream: TextIO | None = None) -> int:
    """Of the terminal that `stream` (None: stdout) is; 80 for anything else."""
    stream = stream or sys.stdout
    return os.get_terminal_size(stream.fileno()).columns or 80 if is_terminal(stream) else 80


def has_colours(stream: TextIO | None = None) -> bool:
    return not is_dumb(stream or sys.stdout) and "NO_COLOR" not in os.environ
