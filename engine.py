"""The step loop: plan, pack, forward, draw, commit; on a device, a step is launched before the one before has landed.

Owns a request's way from submission to its last piece of text, and the steps in the air. The parts it joins (scheduler,
cache, model, sampling, writer) do not know each other. Start at `Engine.submit` and `Engine.step`.

    engine = Engine(model, EngineConfig(), tokenizer)
    for completion in engine.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(completion.text)
"""

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcache import Cache, KVSpec, Lease, free_memory_bytes
from model import Batch, Model
from replay import Replay
from sampling import Draw, Drawn, Sampler, SamplingParams, accept, chances, start_draw
from scheduler import DEFAULT_CLASSES, AdmissionClass, Chunk, Request, Scheduler
from speculative import Drafter, Drafting, note_chances
from terminal import held_signals
from tokenizer import Tokenizer
from writer import Writer

DEFAULT_CACHE_BYTES = 4 * 10**9
FREE_MEMORY_SHARE = 0.4
# Chunks of at least so many tokens multiply in bfloat16 if `prefill` says so: for fewer, dequantizing costs too much.
LARGE_CHUNK = 64


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine. `num_pages` or `cache_memory_gb` (10^9 bytes) size the cache; by default it takes 4 GB, or
    40 % of the free memory if that is less, or what one context needs if only one request runs."""

    page_size: int = 32  # tokens, a power of two from 8 to 256
    num_pages: int | None = None
    cache_memory_gb: float | None = None
    cache_dtype: torch.dtype | None = None  # None: the model's
    max_step_tokens: int = 512
    max_requests: int = 64
    prefix_cache: bool = True
    draft_tokens: int = 4  # proposed at a time, at most
    drafter_token_bytes: int = 0  # of cache that a drafter has for each of the cache's tokens, of the same memory
    verify: str = "coupled"  # or "rejection" or "block": sampling.accept
    draft_chances: bool = False  # note what chance drafts had to stand, which takes time
    prefill: str = "exact"  # or "bfloat16": large chunks of prompts in bfloat16, whose tokens depend on the chunking
    classes: tuple[AdmissionClass, ...] = DEFAULT_CLASSES
    usual_class: str = "interactive"  # of requests that name none

    def __post_init__(self):
        if self.page_size not in (8, 16, 32, 64, 128, 256):
            raise ValueError(f"page_size is {self.page_size} but must be 8, 16, 32, 64, 128 or 256")
        for name, allowed in (("prefill", ("exact", "bfloat16")), ("verify", ("coupled", "rejection", "block"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is '{getattr(self, name)}' but must be one of {', '.join(allowed)}")
        if self.num_pages is not None and self.cache_memory_gb is not None:
            raise ValueError("num_pages and cache_memory_gb both size the cache: give one of them")
        for name in ("num_pages", "cache_memory_gb", "max_step_tokens", "max_requests", "draft_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value} but must be more than 0")


@dataclass(frozen=True)
class Output:
    """What a step added to one request: new text (it may lag behind the ids) and new token ids."""

    request: Request
    text: str
    token_ids: list[int]

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None


@dataclass(frozen=True)
class Completion:
    """One finished sample."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict] | None
    request: Request


@dataclass(frozen=True)
class Stats:
    """What the engine has done since it was made, and what its cache holds now."""

    steps: int  # that landed: one of which nobody waits for anything any more does not
    computed_tokens: int  # through the model by them, recomputation included
    prompt_tokens: int  # of requests that have ended
    cached_tokens: int  # of those, found in the prefix cache
    output_tokens: int
    preemptions: int
    evictions: int  # cached pages whose memory was wanted
    free_pages: int
    cached_pages: int  # held by nobody, to be found again
    held_pages: int
    shared_pages: int  # of those, by more than one request


@dataclass(eq=False)
class Flight:
    """A step that was launched and has not landed: a device may be computing it still."""

    chunks: list[Chunk]
    drawing: list[Chunk]  # those after which a token is drawn
    draw: Draw | None  # theirs
    wait: Callable[[], object]  # until it is computed
    h_TD: Tensor
    taps: list[Tensor]
    start_s: float
    proposing_s: float  # what drafting took before
    is_committed: bool = False
    drawn: list[list[Drawn | None]] | None = None  # once it is computed, as is
    seconds: float = 0.0  # what it took, from landing to landing where it was launched before


class Engine:
    """Runs requests over one model. Without a tokenizer, prompts are token ids and there is no text.

    `name` and `generation` (sampling defaults the model's makers recommend) are kept for those who show or use them.
    """

    def __init__(self, model: Model, config: EngineConfig | None = None, tokenizer: Tokenizer | None = None, *,
                 drafter: Drafter | None = None, name: str = "", generation: Mapping | None = None):
        self.model, self.tokenizer, self.config = model, tokenizer, config or EngineConfig()
        self.name, self.generation = name, dict(generation or {})
        self.vocab = min(model.config.vocab, tokenizer.vocab_size) if tokenizer else model.config.vocab
        self.eos_ids = set(model.config.eos_ids) | set(tokenizer.eos_ids if tokenizer else ())
        self.cache_dtype = self.config.cache_dtype or model.cache_dtype
        self.cache = self._make_cache()
        self.replay = Replay(model, self.cache)
        self.capacity = int(min(model.context, self.cache.capacity))  # tokens of one request
        self.scheduler = Scheduler(self.cache, self.config.max_requests, self.config.classes)
        self.writers: dict[Request, Writer] = {}  # of every request that is not finished
        self.ids: set[str] = set()  # theirs
        self.drafting: Drafting | None = None
        if drafter is not None:
            self.draft_with(drafter)
        self.is_async = getattr(model.ops, "is_async", False)
        self.flights: list[Flight] = []  # at most two; the tokens of the first are all known
        self.landed_s = 0.0  # when the last one before them did
        self.sums = Counter()
        self.num_submitted = 0
        # Given the engine and what each step did, as `--trace` writes it.
        self.on_step: Callable[[Engine, dict], None] | None = None

    def draft_with(self, drafter: Drafter) -> None:
        """Has requests from now on decode with drafts; before the first request, if the drafter needs hidden rows."""
        if drafter.taps is not None:
            drafter.bind(self.cache)
        self.drafting = Drafting(drafter, self.config.draft_tokens, is_coupled=self.config.verify == "coupled")

    def _make_cache(self) -> Cache:
        config, specs = self.config, self.model.kv_specs()
        num_pages = count_pages(config, specs, self.cache_dtype, self.model.context, self.model.device)
        return Cache(specs, num_pages, config.page_size, self.cache_dtype, self.model.device,
                     max_leases=config.max_requests, max_tokens=self.model.context,
                     max_step_tokens=config.max_step_tokens, prefix=config.prefix_cache,
                     domain=f"{self.name} {self.model.dtype} {self.cache_dtype} {config.prefill}",
                     new_kv=self.model.ops.new_kv)

    # ---- requests in --------------------------------------------------------------------------------------------

    def submit(self, prompt: str | Sequence[int], params: SamplingParams, *, id: str | None = None,
               class_name: str | None = None, deadline_s: float | None = None, show_special: bool = False) -> Request:
        """Queues one sample; its `params` get a random seed if they have none. A prompt given as text is continued as
        it stands. `deadline_s` seconds from now it ends as "cancelled". ValueError if it cannot be served."""
        tokens = self._token_ids(prompt)
        params = next(replace(params, num_samples=1).samples())
        self._check(tokens, params)
        self.num_submitted += 1
        id = f"request-{self.num_submitted}" if id is None else id
        if id in self.ids:
            raise ValueError(f"a request with id '{id}' is running: give each its own")
        now = time.perf_counter()
        end_ids = (set() if params.ignore_eos else self.eos_ids) | set(params.stop_token_ids)
        sampler = Sampler(params, tokens, [end_id for end_id in end_ids if end_id < self.vocab], self.vocab)
        if class_name is None:
            class_name = self.scheduler.class_of(tokens, self.config.usual_class)
        request = Request(id, params, tokens, sampler, submitted_s=now, class_name=class_name,
                          deadline_s=None if deadline_s is None else now + deadline_s,
                          logprobs=None if params.logprobs is None else [],
                          draft_method=self.drafting and self.drafting.drafter.name)
        stream = self.tokenizer.stream(tokens, show_special) if self.tokenizer else None
        self.scheduler.add(request)
        self.writers[request] = Writer(stream, params, end_ids)
        self.ids.add(id)
        return request

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The prompt as a list of ids that the model has; ValueError for anything else."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the prompt is text but the engine has no tokenizer: give token ids")
            prompt = self.tokenizer.encode(prompt)
        try:
            tokens = [operator.index(id) for id in prompt]
        except TypeError:
            raise ValueError(f"the prompt is {prompt!r:.60} but must be text or whole numbers, token ids") from None
        vocab = self.model.config.vocab
        unknown = next((id for id in tokens if not 0 <= id < vocab), None)
        if unknown is not None:
            raise ValueError(f"the prompt holds id {unknown} but the model has ids 0 to {vocab - 1}")
        return tokens

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise ValueError("the prompt is empty: give at least one token")
        if len(tokens) >= self.capacity:
            limit, needed = "context", ""
            more = " or raise --context" * (self.model.context < self.model.config.max_context)
            if self.capacity < self.model.context:
                limit = f"cache of {self.cache.num_pages} page{'s' * (self.cache.num_pages > 1)}"
                more = " or raise --cache-memory or --num-pages"
                needed = f" ({self.cache.pages_for(len(tokens) + 1)} pages)"
            raise ValueError(f"the prompt has {len(tokens)} tokens{needed} but the {limit} holds {self.capacity}, one "
                             f"of them for the answer: shorten it{more}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give stop_token_ids")
        params.check_ids(self.vocab)

    def abort(self, request: Request) -> Output | None:
        """Ends a request as "cancelled" and frees what it holds; None if it has ended already."""
        return self._finish(request, "cancelled") if request in self.writers else None

    @property
    def has_work(self) -> bool:
        return bool(self.writers)

    # ---- the step -----------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Computes one ragged batch; returns what it added to each request that got something. Where the operations
        work on their own, as a device does, the next one is launched before this one's tokens are read, if it can be
        told what it is. Callers hold back signals meanwhile, as `generate` does: there is no telling what an exception
        leaves half done in the midst of it."""
        now = time.perf_counter()
        outputs = [self._finish(request, "cancelled") for request in list(self.writers)
                   if request.deadline_s is not None and now >= request.deadline_s]
        if not self.flights:
            if self.drafting is not None:
                self._propose()
            proposing_s = time.perf_counter() - now
            chunks = self.scheduler.plan(self.config.max_step_tokens)
            if not chunks:
                return outputs
            self.flights.append(self._launch(chunks, now, proposing_s))
        flight = self.flights[0]
        if not flight.is_committed:  # all of its tokens are known, and nothing overtakes what has been launched
            for chunk in flight.chunks:
                if chunk.request in self.writers:
                    self.scheduler.commit(chunk)
            flight.is_committed = True
        if len(self.flights) == 1 and (chunks := self._chunks_after(flight)):
            self.flights.append(self._launch(chunks, now, before=flight.draw))
        return outputs + self._land(flight)

    def _chunks_after(self, flight: Flight) -> list[Chunk]:
        """What to launch while a step is in the air: nothing where that depends on the tokens which it draws."""
        if not self.is_async or self.drafting is not None:
            return []
        if flight.draw is None:
            return self.scheduler.plan(self.config.max_step_tokens)
        # Penalties look at the token before, log-probabilities would be computed behind the next step.
        if all(chunk.request in self.writers and self._room(chunk.request) > 1 and chunk.request.logprobs is None
               and not chunk.request.sampler.remembers for chunk in flight.chunks):
            return self.scheduler.plan_ahead(flight.chunks)
        return []

    def _launch(self, chunks: list[Chunk], start_s: float, proposing_s: float = 0.0,
                before: Draw | None = None) -> Flight:
        """Has a step computed. Tokens that no request has yet are those that are drawn `before`, in the same order."""
        chunks.sort(key=lambda chunk: self._is_rounded(chunk.end - chunk.start))  # those last
        batch, draw = self._pack(chunks), None
        if before is not None:  # where nothing was drawn, -1, the request ends: any token will do
            batch.token_T[: len(chunks)] = before.id_L.clamp(min=0)
        h_TD, taps = self.replay.forward(batch)
        drawing = [chunk for chunk in chunks if chunk.draws]
        if drawing:
            h_LD = h_TD if batch.num_rows == batch.num_tokens else h_TD[batch.row_L]
            draw = start_draw(self.model.logits(h_LD), [chunk.draft for chunk in drawing],
                              [chunk.request.sampler for chunk in drawing], [chunk.end for chunk in drawing],
                              self.model.ops, num_unseen=int(before is not None))
        wait = draw.read if draw else self.model.ops.fetch(batch.row_L)
        return Flight(chunks, drawing, draw, wait, h_TD, taps, start_s, proposing_s)

    def _land(self, flight: Flight) -> list[Output]:
        """Waits for the oldest step and gives its tokens to their requests. An interrupt leaves it in the air, and what
        it kept from being done to the next call."""
        if flight.drawn is None:
            self._judge(flight)
        trace = self.on_step and self._trace(flight)
        outputs = [self._extend(chunk, tokens) for chunk, tokens in zip(flight.drawing, flight.drawn)
                   if chunk.draws and chunk.request in self.writers]  # others have ended since it was launched
        self.flights = [other for other in self.flights if other is not flight]
        if trace:
            self.on_step(self, trace)  # last: whatever comes of it, the step is complete
        return outputs

    def _judge(self, flight: Flight) -> None:
        """Waits for what a step drew, shows it to those who learn from it, and notes how long it took."""
        chunks, drawing, draw, drawn = flight.chunks, flight.drawing, flight.draw, []
        flight.wait()
        if draw is not None:
            drawn = accept(draw, self.config.verify, self.model.ops)
            if self.config.draft_chances:
                note_chances(drawing, drawn, chances(draw.logits_LV, draw.drafts, draw.samplers, self.model.ops))
        if self.drafting is not None:
            moves = self.drafting.follow(chunks, dict(zip(drawing, drawn)), flight.h_TD, flight.taps)
            if moves:
                self.model.move_(self.cache, *self.cache.slots(moves))
        start_s, self.landed_s = max(flight.start_s, self.landed_s), time.perf_counter()
        flight.drawn, flight.seconds = drawn, self.landed_s - start_s
        if self.drafting is not None:
            self.drafting.observe(chunks, 1000 * flight.seconds, sum(map(len, drawn)))
        self.scheduler.observe(chunks, 1000 * (flight.seconds - flight.proposing_s))
        self.sums.update(steps=1, computed_tokens=sum(chunk.end - chunk.start + chunk.num_drafted for chunk in chunks),
                         drafted_tokens=sum(chunk.num_drafted for chunk in chunks))

    @property
    def stats(self) -> Stats:
        pool = self.cache.groups[0].pool
        return Stats(*(self.sums[name] for name in ("steps", "computed_tokens", "prompt_tokens", "cached_tokens",
                                                    "output_tokens")),
                     preemptions=self.scheduler.num_preemptions,
                     evictions=sum(group.pool.num_evictions for group in self.cache.groups), free_pages=len(pool.free),
                     cached_pages=len(pool.cached), held_pages=sum(n > 0 for n in pool.holders),
                     shared_pages=sum(n > 1 for n in pool.holders))

    def _trace(self, flight: Flight) -> dict:
        """One line of a trace. Requests that wait have no tokens; `prompt` and `cached` are theirs in all."""
        def entry(request: Request, num_tokens: int, num_drafted: int = 0) -> dict:
            return {"id": request.id, "class": request.class_name, "computed": num_tokens, "done": request.num_computed,
                    "prompt": request.num_prompt, "cached": request.num_cached, "drafted": num_drafted,
                    "preemptions": request.num_preemptions}

        stats = self.stats
        waiting = [request for line in self.scheduler.lines.values() for request in line.waiting]
        computed = [entry(chunk.request, chunk.end - chunk.start, chunk.num_drafted) for chunk in flight.chunks]
        return {"step": stats.steps, "ms": round(1000 * flight.seconds, 3), "requests": computed,
                "waiting": [entry(request, 0) for request in waiting],
                "pages": {"free": stats.free_pages, "cached": stats.cached_pages, "held": stats.held_pages,
                          "shared": stats.shared_pages}}

    def _is_rounded(self, num_tokens: int) -> bool:
        return self.config.prefill == "bfloat16" and num_tokens >= LARGE_CHUNK

    def _pack(self, chunks: list[Chunk]) -> Batch:
        # In place of a token that the request does not have yet there is 0.
        tokens = [[*(chunk.request.tokens[chunk.start : chunk.end] or [0]), *chunk.draft.ids] for chunk in chunks]
        row_L, end, num_exact = [], 0, None
        for chunk in chunks:
            if num_exact is None and self._is_rounded(chunk.end - chunk.start):
                num_exact = end
            end += chunk.end - chunk.start + chunk.num_drafted
            if chunk.draws:
                row_L += range(end - chunk.num_drafted - 1, end)
        taps = self.drafting.drafter.taps if self.drafting is not None else None
        return Batch.pack(self.cache, [chunk.request.lease.row for chunk in chunks], tokens,
                          [chunk.start for chunk in chunks], row_L, num_exact, taps or (),
                          [chunk.draft.parents for chunk in chunks], self.replay.size(len(chunks), end))

    def _extend(self, chunk: Chunk, drawn: Sequence[Drawn | None]) -> Output:
        """Appends what was drawn after a chunk, token by token, until the request ends with one."""
        request, text, token_ids, reason = chunk.request, "", [], None
        for place, token in enumerate(drawn):
            if token is None:
                request.error = ("non-finite logits: the weights or the arithmetic overflowed, or every token is "
                                 "banned; try --dtype float32 or fewer bans")
                reason = "error"
                break
            if request.first_token_s is None:
                request.first_token_s = time.perf_counter()
            request.tokens.append(token.id)
            request.sampler.observe(token.id)
            token_ids.append(token.id)
            self.sums["output_tokens"] += 1
            if place < len(drawn) - 1:
                self.scheduler.keep(request)
            if request.logprobs is not None:
                request.logprobs.append(self._logprob_entry(token))
            piece, stopped = self.writers[request].write(token.id, request.num_output)
            request.pieces.append(piece)
            text += piece
            reason = "stop" if stopped else None
            if not stopped and self._room(request) < 1:
                reason = "length"
            if reason:
                break
        if self.drafting is not None:  # of what the answer does not have any more nothing is told
            self.drafting.judge(request, chunk.draft, [token and token.id for token in drawn[: place + 1]])
        return self._finish(request, reason, text, token_ids) if reason else Output(request, text, token_ids)

    def _propose(self) -> None:
        """Has drafts proposed for all who decode, of no more tokens than they may still get."""
        decoding = [request for request in self.scheduler.running if request.want == 1]
        rooms = [max(0, self._room(request) - 1) for request in decoding]
        self.drafting.propose(decoding, rooms, self.scheduler.pace)

    def _room(self, request: Request) -> int:
        """Tokens that it may still get."""
        room, limit = self.most_tokens(request) - len(request.tokens), request.params.max_tokens
        return room if limit is None else min(room, limit - request.num_output)

    def most_tokens(self, request: Request) -> int:
        """Prompt and answer together: what its class allows, and what there is room for."""
        return min(self.capacity, self.scheduler.lines[request.class_name].cls.max_tokens or self.capacity)

    def _logprob_entry(self, drawn: Drawn) -> dict:
        def entry(id: int, logprob: float) -> dict:
            known = self.tokenizer is not None and id < self.vocab  # a head may be wider than the vocabulary
            return {"id": id, "token": self.tokenizer.piece(id) if known else "", "logprob": logprob}

        return entry(drawn.id, drawn.logprob) | {"top": [entry(id, logprob) for id, logprob in drawn.top]}

    def _finish(self, request: Request, reason: str, text: str = "", token_ids: Sequence[int] = ()) -> Output:
        self.scheduler.remove(request)
        rest = self.writers.pop(request).close()
        self.ids.remove(request.id)
        if self.drafting is not None:
            self.drafting.forget(request)
        request.pieces.append(rest)
        request.finish_reason = reason
        request.finished_s = time.perf_counter()
        if request.admitted_s is not None:
            self.sums.update(prompt_tokens=request.num_prompt, cached_tokens=request.num_cached)
        # A step of which nobody waits for anything any more need not land.
        self.flights = [flight for flight in self.flights if any(c.request in self.writers for c in flight.chunks)]
        return Output(request, text + rest, list(token_ids))

    # ---- for Python programs ------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> list[Completion]:
        """Every prompt's completions, all together in the engine: in the order of the prompts, `params.num_samples`
        for each. An interrupt ends them all, after the step in which it comes."""
        requests: list[Request] = []
        with held_signals() as signals:
            try:
                for prompt in prompts:
                    requests += [self.submit(prompt, sample) for sample in params.samples()]
                while not signals and any(request.finish_reason is None for request in requests):
                    self.step()
            finally:  # one that is refused takes the others with it
                for request in requests:
                    self.abort(request)
        return [Completion(r.text, r.output_ids, r.finish_reason, r.logprobs, r) for r in requests]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams) -> Iterator[Output]:
        """One sample's outputs as they come, whoever else steps the engine meanwhile. Leaving the iterator early aborts
        the request."""
        request = self.submit(prompt, params)
        num_pieces, num_tokens = 0, request.num_prompt
        try:
            while request.finish_reason is None or num_pieces < len(request.pieces):
                if num_pieces == len(request.pieces):
                    with held_signals():
                        self.step()
                text, token_ids = "".join(request.pieces[num_pieces:]), request.tokens[num_tokens:]
                num_pieces, num_tokens = len(request.pieces), len(request.tokens)
                if text or token_ids or request.finish_reason is not None:
                    yield Output(request, text, token_ids)
        finally:
            self.abort(request)

    def logits(self, ids: Sequence[int], first: int = 0) -> Tensor:
        """Logits (len(ids) - first, V) after each of the tokens from place `first` on, of one sequence computed in
        chunks; nothing is drawn and nothing stays in the cache. The engine must be idle."""
        ids = self._token_ids(ids)
        if self.has_work or not first < len(ids) <= self.capacity:
            raise ValueError(f"scoring {len(ids)} tokens from place {first} on needs an idle engine with room for "
                             f"them; it holds {self.capacity}: raise --context or --cache-memory")
        lease, logits = Lease(), []
        self.cache.open(lease)
        try:
            self.cache.grow(lease, len(ids))
            for start in range(0, len(ids), self.config.max_step_tokens):
                chunk = ids[start : start + self.config.max_step_tokens]
                self.cache.reach(lease, start, start + len(chunk))
                rows = range(max(first - start, 0), len(chunk))
                num_exact = 0 if self._is_rounded(len(chunk)) else None
                batch = Batch.pack(self.cache, [lease.row], [chunk], [start], rows, num_exact)
                logits.append(self.model.logits(self.model.forward(batch, self.cache)[0][batch.row_L]))
        finally:
            self.cache.release(lease)
        return torch.cat(logits)


def count_pages(config: EngineConfig, specs: Sequence[KVSpec], dtype: torch.dtype, context: int,
                device: str | torch.device, taken_bytes: int = 0) -> int:
    """Pages of the cache. ValueError if the device's memory has no room for them, `taken_bytes` of what is free being
    spoken for."""
    token_bytes = sum(spec.bytes_per_token(dtype) for spec in specs) + config.drafter_token_bytes
    page_bytes, free_bytes = config.page_size * token_bytes, max(0, free_memory_bytes(device) - taken_bytes)
    num_pages = config.num_pages
    if num_pages is None:
        num_bytes = min(DEFAULT_CACHE_BYTES, FREE_MEMORY_SHARE * free_bytes)
        if config.cache_memory_gb is not None:
            num_bytes = config.cache_memory_gb * 1e9
        num_pages = int(num_bytes // page_bytes)
        if config.max_requests == 1:
            num_pages = min(num_pages, -(-context // config.page_size))
    if num_pages * page_bytes > free_bytes:
        fitting = int(free_bytes // page_bytes)
        smaller = " or halve it by --cache-dtype int8" * (dtype.itemsize > 1 and str(device) == "cpu")
        raise ValueError(f"a cache of {num_pages} pages needs {num_pages * page_bytes / 1e9:.1f} GB but "
                         f"{free_bytes / 1e9:.1f} are free: lower it to --num-pages {fitting} (--cache-memory "
                         f"{fitting * page_bytes / 1e9:.1f}, {fitting * config.page_size} tokens){smaller}")
    if num_pages < 1:
        raise ValueError(f"the cache has {num_bytes / 1e9:.6f} GB but one page of {config.page_size} tokens needs "
                         f"{page_bytes / 1e9:.6f}: raise --cache-memory or lower --page-size")
    return num_pages
