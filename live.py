"""Pictures that change while the engine runs: the panel of --watch, a bar while a long prompt is read, the confidence
of each token.

Owns what is shown of a running engine, which it only looks at. Everything but the tokens goes to stderr, and only where
that is a terminal. No torch. Start at `Panel`.
"""
from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from terminal import is_dumb, is_terminal
from view import bars, counted, has_colours, paint, terminal_width

if TYPE_CHECKING:
    from engine import Engine
    from kvcache import Pool
    from scheduler import Request

# ---------------------------------------------------------------------------------------------------------------------
# The panel of --watch

PAGE_KINDS = {"free": ("·", "bright_black"), "cached": ("░", "blue"), "held": ("▓", "yellow"),
              "shared": ("█", "magenta")}  # from the idlest to the busiest
MAP_ROWS = 6
REFRESH_S = 0.12
RATE_S = 2.0  # tokens per second are those of the last so many
ECHO = "^C"  # what terminals show of an interrupt, for which there is room on each line
MAX_RATES = 24  # bars of earlier rates


class Panel:
    """What an engine does, drawn anew as it steps: it is called with the engine and what the step did, as `on_step` of
    any number of engines that take turns."""

    def __init__(self, live, total: int | None):
        self.live, self.total = live, total  # requests that are to be done
        self.num_done = 0
        self.started_s = time.perf_counter()
        self.next_draw_s = 0.0
        self.next_rate_s = self.started_s + RATE_S
        self.counts: deque[tuple[float, int, int]] = deque()  # time, tokens drawn, tokens computed
        self.rates: deque[float] = deque(maxlen=MAX_RATES)
        self.engine: Engine | None = None

    def __call__(self, engine: Engine, step: dict) -> None:
        now = time.perf_counter()
        if engine is not self.engine:
            self.engine = engine
            self.counts.clear()
        if now >= self.next_draw_s:
            self.live.update(self._drawn(step), refresh=True)
            drawn_s = time.perf_counter()
            self.next_draw_s = drawn_s + max(REFRESH_S, 20 * (drawn_s - now))  # of a large cache less often

    def count(self, tally) -> None:
        """Takes note of how many requests are done: `tally.records`."""
        self.num_done = tally.records

    def _drawn(self, step: dict):
        from rich.console import Group
        from rich.panel import Panel as Box
        from rich.text import Text

        width, seconds = self.live.console.width - 4 - len(ECHO), time.perf_counter() - self.started_s
        lines = []
        if self.total is not None:
            left = f", {seconds / self.num_done * (self.total - self.num_done):.0f} s left" if self.num_done else ""
            filled = width * self.num_done // max(self.total, 1)
            lines += [Text(f"{self.num_done} of {counted(self.total, 'request')}{left}"),
                      Text("━" * filled, "green").append("─" * (width - filled), "bright_black")]
        lines += [Text(line, overflow="ellipsis", no_wrap=True) for line in self._facts(step)]
        title = f"{self.engine.name} · {counted(step['step'], 'step')} · {seconds:.0f} s"
        return Box(Group(*lines, *page_map(self.engine.cache.groups[0].pool, width)), title=title, title_align="left",
                   border_style="bright_black", width=width + 4)

    def _facts(self, step: dict) -> Iterator[str]:
        stats = self.engine.stats
        written, read = self._rates(stats.output_tokens, stats.computed_tokens)
        yield f"{len(step['requests'])} running · {len(step['waiting'])} waiting · {stats.preemptions} preempted"
        yield f"{written:,.0f} tok/s written, {read:,.0f} computed {bars(self.rates, max(self.rates, default=1))}"
        hits = f"{stats.cached_tokens / stats.prompt_tokens:.0%}" if stats.prompt_tokens else "-"
        drafts = [request.drafts for request in self.engine.writers]
        num_judged = sum(draft.num_proposed for draft in drafts)
        kept = f"{sum(sum(draft.kept_by_place) for draft in drafts) / num_judged:.0%}" if num_judged else "-"
        yield f"prefix hits {hits} · drafts kept {kept} · {counted(stats.evictions, 'page')} evicted"

    def _rates(self, num_written: int, num_computed: int) -> tuple[float, float]:
        """Tokens per second lately."""
        now = time.perf_counter()
        self.counts.append((now, num_written, num_computed))
        while len(self.counts) > 2 and now - self.counts[0][0] > RATE_S:
            self.counts.popleft()
        then, first_written, first_computed = self.counts[0]
        seconds = max(now - then, 1e-3)
        rates = (num_written - first_written) / seconds, (num_computed - first_computed) / seconds
        if now >= self.next_rate_s:
            self.rates.append(rates[0])
            self.next_rate_s = now + RATE_S
        return rates


def page_map(pool: Pool, width: int):
    """A legend, and a cell for each page, or the busiest of several that share a cell."""
    from rich.text import Text

    kinds = page_kinds(pool)
    names = list(PAGE_KINDS)
    pages_per_cell = max(1, -(-len(kinds) // (width * MAP_ROWS)))
    legend = Text(f"{counted(len(kinds), 'page')}: ", overflow="ellipsis", no_wrap=True)
    for kind, name in reversed(list(enumerate(names))):
        glyph, style = PAGE_KINDS[name]
        legend.append(f"{glyph} ", style).append(f"{kinds.count(kind):,} {name}  ")
    if pages_per_cell > 1:
        legend.append(f"(a cell is {pages_per_cell}, the busiest shows)", "bright_black")
    yield legend
    cells = [max(kinds[i : i + pages_per_cell]) for i in range(0, len(kinds), pages_per_cell)]
    for start in range(0, len(cells), width):
        line = Text()
        for kind in cells[start : start + width]:
            line.append(*PAGE_KINDS[names[kind]])
        yield line


def page_kinds(pool: Pool) -> list[int]:
    """For each page its place in PAGE_KINDS."""
    kinds = [min(num, 2) + 1 if num else 0 for num in pool.holders]
    for page_id in pool.cached:
        kinds[page_id] = 1
    return kinds


@contextlib.contextmanager
def watching(engine: Engine, total: int | None = None) -> Iterator[Panel | None]:
    """A panel on stderr while `engine` runs, besides whatever else looks at its steps; None without a terminal. What
    is printed on a stdout that is the same terminal appears above it."""
    if is_dumb(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    console, before = Console(stderr=True), engine.on_step
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=is_terminal(sys.stdout),
              vertical_overflow="crop") as live:
        panel = Panel(live, total)
        engine.on_step = panel if before is None else both(before, panel)
        try:
            yield panel
        finally:
            engine.on_step = before
            live.update("")  # its end would show all of a panel that is higher than the terminal


def both(first: Callable, second: Callable) -> Callable:
    def call(*args) -> None:
        first(*args)
        second(*args)

    return call


# ---------------------------------------------------------------------------------------------------------------------
# A long prompt

LONG_PROMPT = 1024  # tokens left to read, from which on people wonder


class Reading:
    """A bar while a long prompt is read; nothing for others, and where nobody would see it."""

    def __init__(self, request: Request):
        self.request, self.is_drawn, self.is_seen = request, False, not is_dumb(sys.stderr)
        self.started_s = time.perf_counter()

    def show(self) -> None:
        """To be called after each step."""
        num_read, num_tokens = self.request.num_computed, self.request.num_prompt
        goes_on = num_read < num_tokens and self.request.finish_reason is None
        if self.is_drawn and not goes_on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.is_drawn = False
        elif goes_on and self.is_seen and num_read and (self.is_drawn or num_tokens - num_read >= LONG_PROMPT):
            self.is_drawn = True
            num_new = num_read - self.request.num_cached
            left_s = (time.perf_counter() - self.started_s) * (num_tokens - num_read) / max(num_new, 1)
            text = f" {num_read:,} of {num_tokens:,} tokens read, {left_s:.0f} s left"
            width = min(40, terminal_width(sys.stderr) - len(text) - 1)
            filled = width * num_read // num_tokens
            line = paint([("━" * filled, "32"), ("─" * (width - filled), "2"), (text, "")], has_colours(sys.stderr))
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The confidence of each token

# The least chance of a token that has the style, from the surest.
HEAT = ((0.9, "32"), (0.5, "33"), (0.1, "38;5;208"), (0.0, "1;4;31"))


class Heat:
    """A request's text with each token in the colour of its chance, among all tokens and before any setting. Where a
    character takes several tokens, the least likely counts."""

    def __init__(self):
        self.num_pieces = 0  # shown, of the request's
        self.chance = 1.0  # of the tokens that have not brought a character yet

    def new_text(self, request: Request) -> str:
        """What is not shown yet."""
        text = ""
        for place in range(self.num_pieces, len(request.pieces)):
            if place < len(request.logprobs):  # the last piece is what was held back
                self.chance = min(self.chance, math.exp(request.logprobs[place]["logprob"]))
            if piece := request.pieces[place]:
                text += heated(piece, self.chance)
                self.chance = 1.0
        self.num_pieces = len(request.pieces)
        return text


def heated(text: str, chance: float) -> str:
    style = next(style for least, style in HEAT if chance >= least)
    return f"\x1b[{style}m{text}\x1b[0m"


def heat_legend() -> str:
    parts = [heated(f"{least:.0%}" if least else "less", least) for least, _ in HEAT]
    return f"each token's chance, at least: {' '.join(parts)}"
