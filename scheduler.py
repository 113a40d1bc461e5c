"""Which tokens run in the next step: requests, the waiting line, the plan and its commit, preemption.

Owns requests' progress and the decision who gets tokens and pages. Knows nothing of tensors, text or models.
A request is two numbers, computed and wanted; `plan` closes the gap within the step's budget, whether it is a prompt
of thousands or one decoded token. Start at `Request`, then `Scheduler.plan`.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from kvcache import Cache, Lease
from sampling import Sampler, SamplingParams


@dataclass(eq=False)
class Request:
    """One sample of one prompt, from submission to its last token. Times are time.perf_counter() seconds.

    tokens:  0 -- from the prefix cache -- num_cached -- num_computed -- to compute -- len(tokens)
             0 -- prompt -- num_prompt -- drawn so far -- len(tokens)
    """

    id: str
    params: SamplingParams
    tokens: list[int]  # prompt, then answer
    sampler: Sampler
    submitted_s: float
    deadline_s: float | None = None
    num_prompt: int = 0
    num_computed: int = 0  # tokens whose keys and values lie in the cache
    num_cached: int = 0  # of the prompt, found in the cache at first admission
    num_preemptions: int = 0
    lease: Lease = field(default_factory=Lease)
    pieces: list[str] = field(default_factory=list)  # of the answer's text
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    error: str | None = None
    logprobs: list[dict] | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def __post_init__(self):
        self.num_prompt = len(self.tokens)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def prompt_ids(self) -> list[int]:
        return self.tokens[: self.num_prompt]

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def want(self) -> int:
        """Tokens that have to be computed before the next one can be drawn."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a request, to be computed in one step."""

    request: Request
    start: int
    end: int

    @property
    def draws(self) -> bool:
        """Whether the request's next token can be drawn after this chunk."""
        return self.end == len(self.request.tokens)


class Scheduler:
    """First come, first served over one cache, at most `max_requests` running at a time."""

    def __init__(self, cache: Cache, max_requests: int):
        self.cache, self.max_requests = cache, max_requests
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def plan(self, budget_tokens: int) -> list[Chunk]:
        """The next step's chunks, at most `budget_tokens` tokens in all; pages for them are held when it returns."""
        num_preempted = self._hold_pages()
        # A token for everyone who runs comes before a second one for anybody: a long prompt never stalls the decodes.
        granted = {request: 1 for request in self.running[:budget_tokens]}
        left = budget_tokens - len(granted)
        for request in granted:
            extra = min(request.want - 1, left)
            granted[request] += extra
            left -= extra
        while left and not num_preempted and self._admit():
            request = self.running[-1]
            granted[request] = min(request.want, left)
            left -= granted[request]
        return [Chunk(request, request.num_computed, request.num_computed + n) for request, n in granted.items()]

    def commit(self, chunk: Chunk) -> None:
        """Notes that a chunk has been computed, and publishes the pages it filled."""
        request = chunk.request
        request.num_computed = chunk.end
        self.cache.publish(request.lease, request.tokens, request.num_computed)

    def remove(self, request: Request) -> None:
        """Takes a request out of the line or out of the running, with all it holds."""
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request.lease)
        else:
            self.waiting.remove(request)

    def _hold_pages(self) -> int:
        """Pages for every token of those who run, the oldest first; the youngest give theirs up where there are too
        few. Returns how many were preempted."""
        num_preempted = 0
        for request in list(self.running):
            while request in self.running and not self.cache.grow(request.lease, len(request.tokens)):
                self._preempt(self.running[-1])
                num_preempted += 1
        return num_preempted

    def _preempt(self, request: Request) -> None:
        """Back to the head of the line. Its tokens stay; what it computed is computed again, less what is still cached
        when its turn comes."""
        self.running.remove(request)
        self.cache.release(request.lease)
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self) -> bool:
        """Admits the head of the line if pages for all its tokens, and one more for each who runs, can be had: one
        admitted with less would soon be thrown out again."""
        if not self.waiting or len(self.running) == self.max_requests:
            return False
        request = self.waiting[0]
        self.cache.open(request.lease)
        num_cached = self.cache.match(request.lease, request.tokens)
        num_pages = self.cache.pages_for(len(request.tokens)) - self.cache.pages_for(num_cached)
        spare = len(self.running)
        if num_pages + spare > self.cache.num_available or not self.cache.grow(request.lease, len(request.tokens)):
            self.cache.release(request.lease)
            return False
        self.running.append(self.waiting.popleft())
        request.num_computed = num_cached
        if request.admitted_s is None:
            request.admitted_s = time.perf_counter()
            request.num_cached = num_cached
        return True
