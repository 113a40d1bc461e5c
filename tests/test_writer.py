"""writer.py: the answer's text, whatever pieces it comes in, against a search of the whole. Engines with stop strings
are in test_engine.py."""

from hypothesis import given
from hypothesis import strategies as st

from sampling import SamplingParams
from writer import Writer

END = -1


class Pieces:
    """A stream of which each id is a piece; the last lags behind until the next comes, as half a character would."""

    def __init__(self, pieces):
        self.pieces, self.late = pieces, ""

    def push(self, id):
        ready, self.late = self.late, "" if id == END else self.pieces[id]
        return ready

    def finish(self):
        return self.late


def searched(text: str, stops: tuple[str, ...], include_stop: bool) -> tuple[str, bool]:
    """The answer that has `text`, up to the first place where a stop string is complete, of several the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if include_stop else end - max(map(len, complete))], True
    return text, False


texts = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(texts, max_size=3).map(tuple), st.booleans(),
       st.integers(0, 4), st.booleans())
def test_any_cut_into_pieces_gives_the_text_up_to_the_stop(pieces, stops, include_stop, min_tokens, ends):
    min_tokens = min(min_tokens, len(pieces))  # which every answer has
    params = SamplingParams(stop=stops, include_stop=include_stop, min_tokens=min_tokens)
    writer = Writer(Pieces(pieces), params, {END})
    # A token brings the piece before it: those of the tokens below min_tokens are out of the search.
    num_free = max(0, min_tokens - 1)
    free, rest = "".join(pieces[:num_free]), "".join(pieces[num_free:])
    found, stopped = searched(rest, stops, include_stop) if stops else (rest, False)
    given_out = ""
    for num, id in enumerate((*range(len(pieces)), *([END] if ends else [])), 1):
        text, is_over = writer.write(id, num)
        given_out += text
        assert (free + found).startswith(given_out)
        if is_over:
            assert stopped or id == END
            break
    assert given_out + writer.close() == free + found


@given(st.text("ab", max_size=12), st.lists(texts, min_size=1, max_size=3).map(tuple))
def test_no_more_is_held_back_than_may_begin_a_stop(text, stops):
    writer = Writer(Pieces([*text, ""]), SamplingParams(stop=stops), set())
    given_out = ""
    for num, id in enumerate(range(len(text) + 1), 1):
        piece, stopped = writer.write(id, num)
        if stopped:
            return
        given_out += piece
        seen = text[:id]
        held = max(n for n in range(len(seen) + 1) if n == 0 or any(stop.startswith(seen[-n:]) for stop in stops))
        assert given_out == seen[: len(seen) - held]


def test_without_a_stream_only_ids_end_an_answer():
    writer = Writer(None, SamplingParams(), {3})
    assert [writer.write(id, 1) for id in (1, 3)] == [("", False), ("", True)] and writer.close() == ""
