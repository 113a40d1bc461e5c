"""An answer's ids to its text: what of it is certain already, and where a stop string or an id ends it.

Owns what is held back of one request's text. Knows nothing of requests or steps. Start at `Writer`.
"""

from sampling import SamplingParams
from tokenizer import TextStream


class Writer:
    """One request's ids to text: held back while it may be the start of a stop string, cut where one is complete.

    The stop string that is complete first ends the answer, the longest if several are; so the answer does not depend
    on how the text is cut into tokens. Tokens before `min_tokens` are not searched.
    """

    def __init__(self, stream: TextStream | None, params: SamplingParams, end_ids: set[int]):
        self.stream, self.params, self.end_ids = stream, params, end_ids
        self.held = ""  # searched, not given out

    def write(self, id: int, num_output: int) -> tuple[str, bool]:
        """Takes the answer's `num_output`th token: the text that is now certain, and whether the answer ends here."""
        ends = id in self.end_ids
        if self.stream is None or ends and not self.params.include_stop:
            return "", ends
        text = self.stream.push(id)
        if num_output <= self.params.min_tokens or not self.params.stop:
            return text, ends
        text, stopped = self._search(text)
        return text, stopped or ends

    def _search(self, new: str) -> tuple[str, bool]:
        text = self.held + new
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self.params.stop if stop in text]
        if ends:
            end, minus_length = min(ends)
            self.held, self.stream = "", None
            return text[: end if self.params.include_stop else end + minus_length], True
        num_held = max(_overlap(text, stop) for stop in self.params.stop)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def close(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stream is None:
            return ""
        text, stopped = self._search(self.stream.finish()) if self.params.stop else (self.stream.finish(), False)
        return text if stopped else text + self.held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, and is not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
