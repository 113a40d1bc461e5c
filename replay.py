"""Capture and replay: a decode step is the same sequence of kernel calls every time, so Python need make it only once.

Owns the recordings, one for each number of requests and tokens. Knows of the model only that `forward` makes the calls,
and of the operations that they can write them down (native.py); with others every step runs through Python. Start at
`Replay`.
"""

from torch import Tensor

from kvcache import Cache
from model import Batch, Model


class Replay:
    """Runs a model's steps on one cache. A step in which each request computes one token, or in all at most MOST_MORE
    more (drafts), is recorded when it first occurs with so many of both; later ones copy their batch over the recorded
    one and make the same calls again."""

    MOST_MORE = 16
    MOST_RECORDED = 256  # then the oldest goes

    def __init__(self, model: Model, cache: Cache):
        self.model, self.cache = model, cache
        self.new_recording = model.ops.new_recorder() if hasattr(model.ops, "new_recorder") else None
        self.pads = getattr(model.ops, "pads", False)
        self.recorded: dict[tuple, tuple] = {}  # (requests, tokens, ...) -> recording, its batch, its result

    def size(self, num_requests: int, num_tokens: int) -> tuple[int, int]:
        """What a step of so many is filled up to, by Batch.pack."""
        pads = self.pads and num_tokens <= num_requests + self.MOST_MORE
        return padded_size(num_requests, num_tokens) if pads else (num_requests, num_tokens)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """What Model.forward gives; it holds until the next step."""
        is_small = batch.num_tokens <= batch.num_requests + self.MOST_MORE and batch.num_exact is None
        if self.new_recording is None or not is_small:
            return self.model.forward(batch, self.cache)
        size = batch.num_requests, batch.num_tokens, batch.has_trees, batch.taps
        if size not in self.recorded:
            recording = self.new_recording()
            with recording:
                result = self.model.forward(batch, self.cache)
            if len(self.recorded) == self.MOST_RECORDED:
                del self.recorded[next(iter(self.recorded))]
            self.recorded[size] = recording, batch, result
            return result
        recording, its_batch, result = self.recorded[size]
        its_batch.copy_(batch)
        recording.replay()
        return result


def padded_size(num_requests: int, num_tokens: int) -> tuple[int, int]:
    """One of the few sizes that steps are filled up to where recording costs much: up to 8 requests powers of two, then
    multiples of 8; and beyond a token each, drafts in fours. What is filled up has a request of its own."""
    num_more = -(-(num_tokens - num_requests) // 4) * 4
    num_requests += num_requests + num_more > num_tokens
    if num_requests > 8:
        num_requests = -(-num_requests // 8) * 8
    else:
        num_requests = 1 << (num_requests - 1).bit_length()
    return num_requests, num_requests + num_more
