"""Capture and replay: a decode step is the same sequence of kernel calls every time, so Python need make it only once.

Owns the recordings, one for each number of requests. Knows of the model only that `forward` makes the calls, and of the
operations that they can write them down (native.py); with others every step runs through Python. Start at `Replay`.
"""

import torch
from torch import Tensor

from kvcache import Cache
from model import Batch, Model


class Replay:
    """Runs a model's steps on one cache. A step in which each request computes one token is recorded when it first
    occurs with so many requests; later ones copy their batch over the recorded one and make the same calls again."""

    def __init__(self, model: Model, cache: Cache):
        self.model, self.cache = model, cache
        self.new_recording = model.ops.new_recorder() if hasattr(model.ops, "new_recorder") else None
        self.recorded: dict[int, tuple] = {}  # number of requests -> recording, its batch, its result

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Normalised hidden rows h_TD, as Model.forward gives them; they hold until the next step."""
        num_requests = len(batch.lease_S)
        if self.new_recording is None or len(batch.token_T) > num_requests:
            return self.model.forward(batch, self.cache)
        if num_requests not in self.recorded:
            recording = self.new_recording()
            with recording:
                h_TD = self.model.forward(batch, self.cache)
            self.recorded[num_requests] = recording, batch, h_TD
            return h_TD
        recording, its_batch, h_TD = self.recorded[num_requests]
        its_batch.copy_(batch)
        recording.replay()
        return h_TD
