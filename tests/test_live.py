"""live.py: what is shown of a running engine is what the engine says of itself, and changes nothing of what it does."""

import json
import math
import re

import pytest
from rich.console import Console
from rich.live import Live

import batches
import live
import tiny
from sampling import SamplingParams
from speculative import Ngram
from terminals import Terminal, speaking

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def drawn(renderables, width: int = 80) -> str:
    console = Console(width=width, force_terminal=True)
    with console.capture() as capture:
        console.print(*renderables, sep="\n")
    return ESCAPES.sub("", capture.get())


# ---------------------------------------------------------------------------------------------------------------------
# The panel


def test_the_map_shows_every_page_as_the_engine_counts_them(engine):
    """In each of many steps: requests that share prefixes, end, and are preempted."""
    kinds_seen = set()

    def look(engine, step):
        kinds = live.page_kinds(engine.cache.groups[0].pool)
        free, cached, held, shared = (kinds.count(kind) for kind in range(4))
        stats = engine.stats
        assert (free, cached, held + shared, shared) == (stats.free_pages, stats.cached_pages, stats.held_pages,
                                                         stats.shared_pages)
        kinds_seen.update(kinds)
        legend, *rows = drawn(live.page_map(engine.cache.groups[0].pool, 40), 120).splitlines()
        assert f"{free} free" in legend and f"{shared} shared" in legend and len("".join(rows)) == len(kinds)
        assert all("·░▓█".index(glyph) == kind for glyph, kind in zip("".join(rows), kinds))

    engine.on_step = look
    prompts = ["The same beginning of several pages, and then " + end for end in ("this", "that", "something else")]
    engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    engine.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
    assert kinds_seen == {0, 1, 2, 3}


def test_a_cell_shows_the_busiest_of_its_pages(engine):
    pool = engine.cache.groups[0].pool
    pool.holders[7] = 1
    legend, *rows = drawn(live.page_map(pool, 10), 120).splitlines()
    assert len(rows) == live.MAP_ROWS - 1 or len(rows) == live.MAP_ROWS
    assert "".join(rows).count("▓") == 1 and f"a cell is {-(-pool.num_pages // 60)}" in legend


@pytest.mark.parametrize("width", [40, 80])
def test_the_panel_fits_and_tells_what_goes_on(engine, width):
    console = Console(width=width, height=30, force_terminal=True, record=True, file=open("/dev/null", "w"))
    with Live(console=console, auto_refresh=False) as shown:
        panel = live.Panel(shown, 7)
        panel.num_done = 2
        engine.on_step = panel
        engine.draft_with(Ngram())
        engine.generate(["ab " * 20] * 4, SamplingParams(max_tokens=30, ignore_eos=True))
        panel.next_draw_s = 0
        engine.generate(["ab " * 20] * 2, SamplingParams(max_tokens=3, ignore_eos=True))
        lines = drawn([shown.renderable], width).splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= 15
    assert re.match(r"│ \d running", lines[3]), "it has no line of its own"
    text = " ".join(lines)
    for part in ("2 of 7 requests", "running", "waiting", "tok/s written", "prefix hits", "drafts kept", "pages"):
        assert part in text, text


@pytest.mark.slow
def test_watching_a_batch_changes_no_answer(engine, tmp_path):
    source = batches.write(tmp_path / "in", batches.records(60))
    model = tiny.tiny_llama(tmp_path / "model", max_position_embeddings=256)
    words = ("batch", source, "-m", model, "--dtype", "float64", "--ignore-eos", "--max-requests", 3, "-n", 30)
    watched = Terminal(*words, "-o", tmp_path / "watched", "--watch", "--trace", tmp_path / "trace", rows=30)
    watched.wait_for("prefix hits")
    watched.wait_for("60 requests · 0 failed")
    assert watched.end() == 0
    assert watched.screen.all_lines[0].startswith("60 requests"), "the panel is still there"
    plain = Terminal(*words, "-o", tmp_path / "plain")
    assert plain.end() == 0
    assert batches.by_id(tmp_path / "watched") == batches.by_id(tmp_path / "plain")
    assert len((tmp_path / "trace").read_text().splitlines()) > 20, "the trace was lost to the panel"


@pytest.mark.slow
def test_a_panel_higher_than_the_terminal_leaves_nothing_when_it_is_stopped(tmp_path):
    source = batches.write(tmp_path / "in", [{"prompt": "x" * 40}] * 2000)
    model = tiny.tiny_llama(tmp_path / "model", max_position_embeddings=256)
    watched = Terminal("batch", source, "-m", model, "--ignore-eos", "-o", tmp_path / "out", "--watch", rows=8)
    watched.wait_for("tok/s written")
    watched.type("\x03")
    assert watched.end() == 130
    assert not [line for line in watched.screen.all_lines if line[0] in "╭│╰"], watched.screen.all_lines


@pytest.mark.slow
def test_watching_a_benchmark(tmp_path):
    """Its table is what is left."""
    model = tiny.tiny_llama(tmp_path / "model", max_position_embeddings=256)
    terminal = Terminal("bench", "decode", "draft", "-m", model, "--watch", columns=110, rows=50)
    terminal.wait_for("tok/s written")
    terminal.wait_for("operations per byte")
    assert terminal.end() == 0
    rows = [line.split()[0] for line in terminal.screen.all_lines]
    assert rows[:7] == ["memory", "name", "decode", "draft", "draft", "draft", "draft"]
    assert not any("running" in line for line in terminal.screen.all_lines)


def test_without_a_terminal_nothing_is_drawn(engine, tmp_path, capsys):
    batches.run(engine, batches.write(tmp_path / "in", batches.records(3)), tmp_path / "out", watch=True)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "\x1b" not in captured.err


# ---------------------------------------------------------------------------------------------------------------------
# A long prompt


@pytest.mark.slow
def test_a_long_prompt_has_a_bar_while_it_is_read(tmp_path):
    model = speaking(tmp_path / "model", ["the ", "answer"])
    (tmp_path / "prompt").write_text("x" * 6000)
    words = ("-m", model, "-f", tmp_path / "prompt", "--max-step-tokens", 256)
    terminal = Terminal(*words)
    terminal.wait_for(" of 6,019 tokens read")
    terminal.wait_for("s left")
    assert terminal.end() == 0
    assert [line for line in terminal.screen.all_lines if "tok/s" not in line] == ["the answer"]


# ---------------------------------------------------------------------------------------------------------------------
# Confidence


def styles_of(text: str) -> list[tuple[str, str]]:
    """Texts, and the styles they have."""
    return re.findall(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", text, re.DOTALL)


@pytest.mark.parametrize("drafts", [False, True])
def test_each_token_has_the_colour_of_its_chance(engine, drafts):
    if drafts:
        engine.draft_with(Ngram())
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1, seed=3, logprobs=0)
    request, heat, shown = engine.submit("abc abc abc abc", params), live.Heat(), ""
    while request.finish_reason is None:
        engine.step()
        shown += heat.new_text(request)
    assert ESCAPES.sub("", shown) == request.text
    coloured = styles_of(shown)
    assert "".join(text for _, text in coloured) == request.text and len(coloured) > 10
    wanted, chance = [], 1.0
    for piece, entry in zip(request.pieces, request.logprobs):
        chance = min(chance, math.exp(entry["logprob"]))
        if piece:
            wanted.append((next(style for least, style in live.HEAT if chance >= least), piece))
            chance = 1.0
    assert coloured[: len(wanted)] == wanted
    assert live.Heat().new_text(request) == shown


@pytest.mark.parametrize("chance, style", [(1, "32"), (0.9, "32"), (0.89, "33"), (0.1, "38;5;208"), (0.01, "1;4;31")])
def test_the_colours(chance, style):
    assert live.heated("x", chance) == f"\x1b[{style}mx\x1b[0m"


@pytest.mark.slow
def test_tokens_are_shown_in_a_terminal(tmp_path):
    """A model that is in no doubt, then in some."""
    chain = {None: ord("a"), ord("a"): ord("b"), ord("b"): {ord("c"): 0.6, ord("d"): 0.4}, ord("c"): tiny.EOS}
    model = tiny.scripted(tmp_path / "model", chain, eos_ids=(tiny.EOS,))
    terminal = Terminal("-m", model, "-p", "x", "--show-tokens", "--num-samples", 2)
    assert terminal.end() == 0
    written = terminal.child.before
    assert written.count("\x1b[32ma\x1b[0m\x1b[32mb\x1b[0m\x1b[33mc\x1b[0m") == 2 and "each token's chance" in written
    assert terminal.screen.all_lines[:3] == ["abc", "---", "abc"]


def test_json_has_the_chances_that_colours_stand_for(engine):
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0)
    [completion] = engine.generate(["abc"], params)
    assert json.dumps(completion.logprobs) and all(entry["top"] == [] for entry in completion.logprobs)
