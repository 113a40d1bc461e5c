"""Which tokens run in the next step: requests, admission classes, the plan and its commit, preemption.

Owns requests' progress and the decision who gets tokens and pages. Knows nothing of tensors, text or models.
A request is two numbers, computed and wanted; `plan` closes the gap within the step's budget, whether it is a prompt
of thousands or one decoded token. Start at `Request`, then `Scheduler.plan`.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvcache import Cache, Lease
from pace import Pace
from sampling import NO_DRAFT, Draft, DraftTally, Sampler, SamplingParams

LONG_TOKENS = 8192  # a request with more to compute is long, unless its class was named
LENT_SHARE = 8  # beside a higher class that decodes, a step reads at most its budget / this of a lower one
READ_TIME = 0.6  # beside requests that decode, a prompt is read for at most this part of the time those take alone,
LEAST_READ = 64  # but at least for the budget / this
MOST_PASSED = 4  # of a share of the admissions: a class of a fifth waits while 20 requests pass it
LOOK_AHEAD = 256  # requests of a line that are looked at: those in front may wait for pages being written
MOST_AHEAD = 8  # steps that are planned without a look at the lines, while somebody waits there
PATIENCE = 16  # steps' worth of its share that a class lets those above it have before it takes its share back


@dataclass(frozen=True)
class AdmissionClass:
    """Requests that are treated alike. `share` of the step's tokens and `reserved_pages` (less than 1: as a share of
    the cache) are the class's own while it has work; what it leaves is lent to others, and taken back."""

    name: str
    priority: int = 0  # the higher is served first
    share: float = 0.0
    reserved_pages: float = 0
    max_waiting: int | None = None  # requests
    max_tokens: int | None = None  # of one request, prompt and answer

    def __post_init__(self):
        for name, allowed, ok in (
                ("share", "from 0 to 1", 0 <= self.share <= 1),
                ("reserved_pages", "from 0 to less than 1, or a whole number",
                 self.reserved_pages >= 0 and (self.reserved_pages < 1 or float(self.reserved_pages).is_integer())),
                ("max_waiting", "at least 1", self.max_waiting is None or self.max_waiting >= 1),
                ("max_tokens", "at least 2", self.max_tokens is None or self.max_tokens >= 2)):
            if not ok:
                raise ValueError(f"class {self.name}: {name} is {getattr(self, name)} but must be {allowed}")


DEFAULT_CLASSES = (AdmissionClass("interactive", priority=2, share=0.5), AdmissionClass("batch", priority=1, share=0.3),
                   AdmissionClass("long", priority=0, share=0.2))


@dataclass(eq=False)
class Request:
    """One sample of one prompt, from submission to its last token. Times are time.perf_counter() seconds.

    tokens:  0 -- from the prefix cache -- num_cached -- num_computed -- to compute -- len(tokens) -- draft
             0 -- prompt -- num_prompt -- drawn so far -- len(tokens)
    """

    id: str
    params: SamplingParams
    tokens: list[int]  # prompt, then answer
    sampler: Sampler
    submitted_s: float
    class_name: str = "interactive"
    deadline_s: float | None = None
    num_prompt: int = 0
    num_computed: int = 0  # tokens whose keys and values lie in the cache
    num_cached: int = 0  # of the prompt, found in the cache at first admission
    num_preemptions: int = 0
    draft_method: str | None = None
    draft: Draft = NO_DRAFT  # tokens that may follow
    drafts: DraftTally = field(default_factory=DraftTally)
    headroom: int = 1  # pages left over for each who runs, without which it is not admitted; doubled when pages lacked
    awaited: bytes | None = None  # key of a page that it would rather find than compute
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
    def draft_report(self) -> dict | None:
        """What became of its drafts; None without a drafter."""
        return None if self.draft_method is None else {"method": self.draft_method} | self.drafts.report()

    @property
    def want(self) -> int:
        """Tokens that have to be computed before the next one can be drawn."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a request, to be computed in one step, and as many of its draft."""

    request: Request
    start: int
    end: int
    num_drafted: int = 0

    @property
    def draft(self) -> Draft:
        """What is computed of the request's draft."""
        return self.request.draft.cut(self.num_drafted)

    @property
    def draws(self) -> bool:
        """Whether the request's next token can be drawn after this chunk. One that was planned ahead ends with a token
        that the request does not have yet."""
        return self.end >= len(self.request.tokens)


class LineFull(ValueError):
    """As many requests of the class wait as may: one that is refused now may be served later."""


@dataclass
class Line:
    """One admission class at work: who waits, who runs, and the tokens it was passed over for."""

    cls: AdmissionClass
    share: float
    num_reserved: int  # pages
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)  # in the order of admission
    debt: float = 0.0  # tokens of its share that went to higher classes since it was last served
    num_passed: int = 0  # requests of higher classes admitted while it had one waiting, since its own last
    blocked: tuple | None = None  # the request that did not fit, and what must change before it is tried again

    @property
    def num_held(self) -> int:
        return sum(request.lease.num_pages for request in self.running)

    @property
    def is_overdue(self) -> bool:
        """Whether higher classes have admitted so much while it waited that it comes first now."""
        return bool(self.waiting) and self.share * self.num_passed >= MOST_PASSED


class Scheduler:
    """Classes by priority, within a class first come, first served; at most `max_requests` run at a time."""

    def __init__(self, cache: Cache, max_requests: int, classes: Iterable[AdmissionClass] = DEFAULT_CLASSES):
        self.cache, self.max_requests = cache, max_requests
        self.pace = Pace()
        self.most_running = max_requests
        self.num_moves = 0  # requests admitted, preempted or gone
        self.num_preemptions = 0
        self.most_ahead = 0  # steps that may be planned ahead although somebody waits
        ranked = sorted(classes, key=lambda cls: -cls.priority)
        scale = max(1.0, sum(cls.share for cls in ranked))  # shares that add up to more than 1 are scaled down
        self.lines = {cls.name: Line(cls, cls.share / scale, self._pages(cls.reserved_pages)) for cls in ranked}
        if sum(line.num_reserved for line in self.lines.values()) > cache.num_pages:
            raise ValueError(f"the classes reserve {sum(line.num_reserved for line in self.lines.values())} pages but "
                             f"the cache has {cache.num_pages}: lower some")

    def _pages(self, reserved: float) -> int:
        return int(reserved * self.cache.num_pages) if reserved < 1 else int(reserved)

    # ---- in and out ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Puts a request at the end of its class's line; ValueError if that is full or the request too long for it."""
        line = self.lines.get(request.class_name)
        if line is None:
            raise ValueError(f"class {request.class_name!r} is unknown: known are {', '.join(self.lines)}")
        cls = line.cls
        if cls.max_waiting is not None and len(line.waiting) >= cls.max_waiting:
            raise LineFull(f"{len(line.waiting)} requests of class {cls.name} are waiting, its limit is "
                             f"{cls.max_waiting}: try again later or raise max-waiting")
        if cls.max_tokens is not None and request.num_prompt >= cls.max_tokens:
            raise ValueError(f"the prompt has {request.num_prompt} tokens but a request of class {cls.name} has at "
                             f"most {cls.max_tokens}, one of them for the answer: shorten it or name another class")
        line.waiting.append(request)
        self.most_ahead = 0

    def class_of(self, tokens: Sequence[int], usual: str) -> str:
        """The class of a request that names none: long if much of it has to be computed, else the `usual` one."""
        is_long = len(tokens) > LONG_TOKENS and len(tokens) - self.cache.count_cached(tokens) > LONG_TOKENS
        return "long" if is_long and "long" in self.lines else usual

    @property
    def running(self) -> list[Request]:
        return [request for line in self.lines.values() for request in line.running]

    def remove(self, request: Request) -> None:
        """Takes a request out of the line or out of the running, with all it holds."""
        line = self.lines[request.class_name]
        self.num_moves += 1
        self.most_ahead = 0
        if request in line.running:
            line.running.remove(request)
            self.cache.release(request.lease)
        else:
            line.waiting.remove(request)

    # ---- the plan -----------------------------------------------------------------------------------------------

    def plan(self, budget_tokens: int) -> list[Chunk]:
        """The next step's chunks, at most `budget_tokens` tokens in all; pages for them are held when it returns.

        A token for everyone who runs comes before a second one for anybody, and beside those that decode no prompt
        takes more time than they do: a long one never stalls them. The classes read in the order of priority, as far
        as what the lower ones are owed allows.
        """
        self.most_running, num_moves = min(self.max_requests, budget_tokens), self.num_moves
        can_admit = self._hold_pages() == 0
        granted = {request: 1 for request in self.running[:budget_tokens]}
        left = budget_tokens - len(granted)
        most_each = self._most_each(sum(request.want == 1 for request in granted), budget_tokens)
        drafted = self._grant_drafts(granted, left)
        left -= sum(drafted.values())
        owed = {name: self._owed(line, budget_tokens) for name, line in self.lines.items()}
        num_used = budget_tokens - left
        above_reads = above_runs = False
        for name, line in self.lines.items():
            taken_back = owed.pop(name)
            limit = left - min(sum(owed.values()), left)  # what is owed to the classes below is theirs
            if above_reads:
                limit = taken_back
            elif above_runs:
                limit = max(taken_back, budget_tokens // LENT_SHARE)
            is_next = not any(self.lines[below].is_overdue for below in owed)
            num_read = self._read(line, granted, min(limit, left), most_each, can_admit and is_next)
            left -= num_read
            num_used += num_read
            self._settle(line, num_read, num_used, above_reads)
            above_reads = above_reads or num_read > 0
            above_runs = above_runs or bool(line.running)
        chunks = [Chunk(request, request.num_computed, request.num_computed + n, drafted.get(request, 0))
                  for request, n in granted.items()]
        # Who was not let in although nobody moved, or read what others wait for or in their time: no second look helps.
        has_settled = self.num_moves == num_moves and all(n == 1 for n in granted.values())
        self.most_ahead = MOST_AHEAD if has_settled else 0
        for chunk in chunks:
            self.cache.reach(chunk.request.lease, chunk.start, chunk.end + chunk.num_drafted)
        return chunks

    def plan_ahead(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """What comes after `chunks`, which are committed, before the tokens are known that they draw: these tokens.
        Nothing where the next step may be another: somebody reads a prompt, may be let in, or has no page."""
        if len(chunks) < len(self.running) or not all(chunk.draws for chunk in chunks):
            return []
        if any(line.waiting for line in self.lines.values()):
            if not self.most_ahead:
                return []
            self.most_ahead -= 1
        if not all(self.cache.grow(chunk.request.lease, chunk.end + 1) for chunk in chunks):
            return []
        for chunk in chunks:
            self.cache.reach(chunk.request.lease, chunk.end, chunk.end + 1)
        return [Chunk(chunk.request, chunk.end, chunk.end + 1) for chunk in chunks]

    def _grant_drafts(self, granted: Iterable[Request], left: int) -> dict[Request, int]:
        """As much of the drafts as half of the step's rest holds, the other half being for prompts, and as there are
        pages for: nobody gives up any for a draft."""
        drafted, left = {}, left // 2
        for request in granted:
            num = min(len(request.draft.ids), left) if request.want == 1 else 0
            if num and self.cache.grow(request.lease, len(request.tokens) + num):
                drafted[request] = num
                left -= num
        return drafted

    def _owed(self, line: Line, budget_tokens: int) -> int:
        """Tokens that a class takes back now from those above it: its share of the step, once they have read as much of
        its share as PATIENCE steps hold without a pause, or have passed it by too often."""
        is_due = line.is_overdue or line.debt >= PATIENCE * budget_tokens
        return max(1, int(line.share * budget_tokens)) if is_due and line.share else 0

    def _settle(self, line: Line, num_read: int, num_used: int, passed_over: bool) -> None:
        wants = bool(line.waiting) or any(request.want > 1 for request in line.running)
        if not wants or not passed_over:
            line.debt = 0.0
        else:
            line.debt += line.share * num_used - num_read

    def _most_each(self, num_decoding: int, budget_tokens: int) -> int:
        """Tokens that one prompt may read beside so many that decode. Several prompts read as much each: where they
        come faster than they are read, more and more are read at once."""
        if not num_decoding:
            return budget_tokens
        in_time = READ_TIME * self.pace.tokens_beside(num_decoding)
        return int(min(budget_tokens, max(in_time, budget_tokens // LEAST_READ, 1)))

    def _read(self, line: Line, granted: dict[Request, int], limit: int, most_each: int, can_admit: bool) -> int:
        """Grants tokens of prompts, in order of arrival: how many, at most `limit`."""
        left = limit
        for request in line.running:
            if request in granted:
                extra = min(min(request.want, most_each) - granted[request], left)
                granted[request] += extra
                left -= extra
        while left > 0 and can_admit and (request := self._admit(line)):
            granted[request] = min(request.want, most_each, left)
            left -= granted[request]
        return limit - left

    def commit(self, chunk: Chunk) -> None:
        """Notes that a chunk has been computed, or will be before anything else, and publishes the pages it filled."""
        request = chunk.request
        request.num_computed = chunk.end
        self.cache.publish(request.lease, request.tokens, request.num_computed)

    def keep(self, request: Request) -> None:
        """Notes that a draft's token has become the request's: it was computed with the chunk."""
        request.num_computed += 1
        if request.num_computed % self.cache.page_size == 0:
            self.cache.publish(request.lease, request.tokens, request.num_computed)

    def observe(self, chunks: Sequence[Chunk], ms: float) -> None:
        """Notes how long a step took."""
        sizes = [chunk.end - chunk.start for chunk in chunks]
        num_decoding = sizes.count(1)
        self.pace.observe(num_decoding, sum(sizes) - num_decoding, sum(chunk.num_drafted for chunk in chunks), ms)

    # ---- admission and preemption -------------------------------------------------------------------------------

    def _admit(self, line: Line, takes_back: bool = False) -> Request | None:
        """Admits the first of the line that need not wait for pages which a running request is about to publish, if
        there is a place and room for it; with `takes_back`, room is made by preempting who holds what is the class's
        own."""
        if len(self.running) >= self.most_running:
            return None
        request = self._first_ready(line)
        if request is None:
            return None
        while not self._fits(line, request):
            lender = self._lender(line) if takes_back else None
            if lender is None:
                self.cache.release(request.lease)
                line.blocked = request, self.num_moves, self.cache.num_available
                return None
            self._preempt(lender)
        line.waiting.remove(request)
        line.running.append(request)
        self.num_moves += 1
        line.num_passed = 0
        for other in self.lines.values():
            other.num_passed += bool(other.waiting) and other.cls.priority < line.cls.priority
        if request.admitted_s is None:
            request.admitted_s = time.perf_counter()
            request.num_cached = request.num_computed
        return request

    def _first_ready(self, line: Line) -> Request | None:
        """The first that need not wait, its lease opened and what the cache has of its prefix in it. It is not looked
        for again while nothing has changed since it did not fit."""
        for request in islice(line.waiting, LOOK_AHEAD):
            if request.awaited in self.cache.being_written:
                continue
            if line.blocked is not None:
                blocked, num_moves, num_available = line.blocked
                if blocked is request and num_moves == self.num_moves and num_available >= self.cache.num_available:
                    return None
            self.cache.open(request.lease)
            request.num_computed = self.cache.match(request.lease, request.tokens)
            awaited = self.cache.awaited(request.lease, request.tokens)
            if awaited is None or self._is_below(line, self.cache.being_written[awaited]):
                return request
            request.awaited = awaited
            self.cache.release(request.lease)
            request.num_computed = 0
        return None

    def _is_below(self, line: Line, writer: Lease) -> bool:
        """Whether a lower class than the line's holds the lease: a prompt that is read in its own time."""
        return any(request.lease is writer for other in self.lines.values() if other.cls.priority < line.cls.priority
                   for request in other.running)

    def _fits(self, line: Line, request: Request) -> bool:
        """Takes pages for all tokens of a request with an open lease, if there are so many. What goes beyond its
        class's reserve leaves what other classes wait to have of theirs, and headroom for those who run: with less it
        would soon be thrown out again. Where nobody runs there is nothing to wait for."""
        spare = 0
        if self.running and not self._in_reserve(line, request):
            spare = len(self.running) * request.headroom
            spare += sum(max(0, other.num_reserved - other.num_held) for other in self.lines.values()
                         if other is not line and other.num_reserved and other.waiting)
        return self.cache.grow(request.lease, len(request.tokens), spare, request.num_prompt)

    def _in_reserve(self, line: Line, request: Request) -> bool:
        num_wanted = self.cache.pages_for(len(request.tokens))
        return bool(line.num_reserved) and line.num_held + num_wanted <= line.num_reserved

    def _take_back(self, line: Line) -> int:
        """Admits, at others' cost, what fits the class's own reserve of pages, and what fits its share of the places
        that lower classes have: how many were preempted for it."""
        num_before = self.num_preemptions
        while line.waiting and self._in_reserve(line, line.waiting[0]) and self._admit(line, takes_back=True):
            pass
        while line.waiting and len(self.running) >= self.most_running and (lender := self._place_lender(line)):
            self._preempt(lender)
            self._admit(line)
        return self.num_preemptions - num_before

    def _place_lender(self, line: Line) -> Request | None:
        """The youngest of the lowest class below the line's that has more than its share of places (and than one), if
        the line has less than its own and pages for its first."""
        def places(of: Line) -> float:
            return max(1, of.share * self.most_running)

        num_wanted = self.cache.pages_for(len(line.waiting[0].tokens)) + len(self.running) * line.waiting[0].headroom
        if len(line.running) >= places(line) or num_wanted > self.cache.num_available_full:
            return None
        return next((other.running[-1] for other in reversed(self.lines.values())
                     if other.cls.priority < line.cls.priority and len(other.running) > places(other)), None)

    def _hold_pages(self) -> int:
        """Pages for every token of those who run, higher classes and older requests first; where there are too few,
        somebody gives theirs up. Returns how many were preempted."""
        num_preempted = sum(self._take_back(line) for line in self.lines.values())
        for request in self.running:
            line = self.lines[request.class_name]
            while request in line.running and not self.cache.grow(request.lease, len(request.tokens)):
                victim = self._lender(line) or line.running[-1]
                victim.headroom *= 2
                self._preempt(victim)
                num_preempted += 1
        return num_preempted

    def _lender(self, asker: Line) -> Request | None:
        """Whose pages a class may have: the youngest of the lowest other class that holds more than its reserve and is
        not above the asker's, or any, if the asker's holds less than its own."""
        below_reserve = asker.num_held < asker.num_reserved
        return next((other.running[-1] for other in reversed(self.lines.values())
                     if other is not asker and other.running and other.num_held > other.num_reserved
                     and (other.cls.priority <= asker.cls.priority or below_reserve)), None)

    def _preempt(self, request: Request) -> None:
        """Back to the head of its line. Its tokens stay; what it computed is computed again, less what is still cached
        when its turn comes."""
        line = self.lines[request.class_name]
        line.running.remove(request)
        self.cache.release(request.lease)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.num_moves += 1
        line.waiting.appendleft(request)
