"""Drafters: who proposes tokens that the model then verifies, several in one step.

Owns what drafters remember. Knows nothing of how drafts are judged (sampling.accept), when there is room for them
(scheduler.py), or what the model computes. A draft never changes what may come out, only how soon: a drafter may be
wrong, but what it says of its chances must be true (sampling.Draft). Start at `Drafter`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import sent
from kvcache import Cache, Lease
from model import Batch, Model, id_tensor, wide
from pace import Pace
from replay import Replay
from sampling import NO_DRAFT, Draft, Drawn, draft_key, noise_key
from scheduler import Chunk, Request


class Drafter(Protocol):
    """What the engine asks of any drafter; a step is propose, plan, forward, accept.

    Rewinds: a request's tokens are only ever appended to, several at a time, and drafts never become part of them
    before they stand. What a drafter computed for drafts (keys and values, features) it keeps as far as `tokens` agree
    with them when it is asked next. Preemption changes none of this: the tokens stay.

    Chances: a drafter that samples gives the rows it sampled from, after its own temperature and filters. How many it
    proposes may depend on the tokens before and on the drafts it gives, never on one that it leaves out. Against
    "coupled" it does best with the noise of the draw itself (noise_key(seed, position, "draw")): where its logits come
    close to the model's, so do its tokens. Against the others it takes noise of its own, sampling.draft_key.
    """

    name: str
    is_free: bool  # whether to propose costs nothing beside a step: then what is not computed is proposed all the same
    taps: tuple[int, ...] | None  # None: it needs no hidden rows. Else layers whose inputs it needs besides

    def bind(self, cache: Cache) -> None:
        """Only if it needs hidden rows: from now on they are of an engine with this cache, which is still empty."""

    def observe(self, spans: Sequence[tuple[Request, int, int]], h_TD: Tensor, taps: Sequence[Tensor]) -> None:
        """Only if it needs hidden rows: h_TD holds those of tokens that were computed in this step and stand, for
        each request (start, end) its places start to end, one request after the other; `taps` the inputs of layers
        likewise. They hold until the next step. While drafts rest, those of decoded tokens are left out. The token
        drawn last is not yet among `request.tokens`, nor are drafts that stand."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """A draft for each request, at most `limits[i]` tokens, to follow its tokens. Once a step, for all that only
        lack their last token's logits: a draft model runs for all of them at once. The plan may cut what it gets."""

    def forget(self, request: Request) -> None:
        """It has ended."""


class Odds:
    """How likely the next token of a request's drafts stands, learnt from those before; for drafters that are free.
    A token that was proposed and not computed is compared with the one that came. Drafts of different lengths are told
    apart: where a drafter proposes more it is more certain."""

    KEPT = 0.9  # of a draft's weight, with every draft of its length after it

    def __init__(self):
        self.counts: dict[int, list[float]] = {}  # length proposed -> tokens that stood, tokens that were judged

    def observe(self, proposed: Sequence[int], num_drafted: int, drawn: Sequence[int | None]) -> None:
        """Of `proposed`, `num_drafted` were computed, and `drawn` came of it."""
        num_kept = len(drawn) - 1
        if num_kept == num_drafted < len(proposed):  # of the next one the token drawn last tells
            num_kept += proposed[num_drafted] == drawn[-1]
            num_judged = num_drafted + 1
        else:
            num_judged = min(num_kept + 1, num_drafted)
        counts = self.counts.setdefault(len(proposed), [0.5, 1.0])
        counts[0] = self.KEPT * counts[0] + num_kept
        counts[1] = self.KEPT * counts[1] + num_judged

    def best_length(self, num_proposed: int, step_ms: float, draft_ms: float) -> int:
        """How many of a draft's tokens to compute for the most tokens a second, where a step takes `step_ms` for each
        request and each token of a draft adds `draft_ms` (0: unknown; then all)."""
        kept, judged = self.counts.get(num_proposed, (0.5, 1.0))
        chance = kept / judged
        tokens, ms, length = 1.0, step_ms, 0
        # One more pays if it brings more tokens for its time than all before it for theirs.
        while length < num_proposed and chance ** (length + 1) * ms >= draft_ms * tokens:
            length += 1
            tokens += chance**length
            ms += draft_ms
        return length


class Trial:
    """Whether a drafter that takes time is asked, found out by trying and never at much cost: of what plain steps take
    it may lose LOSS, which it has for HORIZON tokens at first and earns with each step. Steps with drafts that bring
    their tokens faster than plain ones let it go on; now and then a plain one tells anew what that is. For steps in
    which equally many requests decode. The first step of either kind does not count: it is recorded, or loads a model.
    """

    LOSS, HORIZON = 0.02, 128
    NUM_PLAIN = 3  # steps at first, to know what one takes
    MOST_DRAFTED = 32  # steps one after the other
    KEPT = 0.9  # of a plain step's weight, with every one after it

    def __init__(self):
        self.plain_ms = [0.0, 0.0]  # a token's: weighted sum, weights
        self.num_plain = self.num_drafted = self.num_since_plain = 0
        self.credit = 1.0  # of the loss over HORIZON tokens
        self.rests = False  # it went below 0, and is to become 1 again

    @property
    def drafts(self) -> bool:
        """Whether the next step is to have drafts."""
        return self.num_plain >= self.NUM_PLAIN and not self.rests and self.num_since_plain < self.MOST_DRAFTED

    def observe(self, drafted: bool, ms: float, num_tokens: int) -> None:
        """A step took `ms`, the drafter's time included, and brought so many tokens."""
        if drafted:
            self.num_drafted += 1
            self.num_since_plain += 1
            token_ms = self.plain_ms[0] / self.plain_ms[1]
            if self.num_drafted > 1:
                self.credit -= (ms / token_ms - num_tokens) / (self.LOSS * self.HORIZON)
        else:
            self.num_plain += 1
            self.num_since_plain = 0
            if self.num_plain > 1:
                self.plain_ms = [self.KEPT * self.plain_ms[0] + ms / num_tokens, self.KEPT * self.plain_ms[1] + 1]
            self.credit += 1 / self.HORIZON
        self.credit = min(self.credit, 4.0)
        self.rests = self.credit < (1 if self.rests else 0)


class Drafting:
    """A drafter at work in the step loop: how many tokens it is asked for, and what became of them. `is_coupled`:
    tokens do not depend on the drafts, so their length may be left to the clock; else it is always `most_tokens`."""

    def __init__(self, drafter: Drafter, most_tokens: int, is_coupled: bool):
        self.drafter, self.most_tokens, self.is_coupled = drafter, most_tokens, is_coupled
        self.proposed: dict[Request, Draft] = {}  # in this step, before they were cut to what pays
        self.odds: dict[Request, Odds] = {}
        self.trials: dict[int, Trial] = {}  # by the logarithm of how many decode
        self.num_asked = 0  # requests that drafts were asked for in this step
        self.is_wanted = True  # unless drafts rest

    def propose(self, requests: Sequence[Request], rooms: Sequence[int], pace: Pace) -> None:
        """Sets the drafts of all who decode, of at most `rooms[i]` tokens."""
        limits = [min(room, self.most_tokens) for room in rooms]
        self.num_asked = len(requests)
        costs = pace.of_drafts(len(requests)) if requests and self.is_coupled else (0.0, 0.0)
        self.is_wanted = True
        if requests and self._is_tried:
            trial = self._trial(requests)
            self.is_wanted = not trial.rests
            if not trial.drafts:
                limits = [0] * len(limits)
        for request, draft in zip(requests, self.drafter.propose(requests, limits)):
            request.draft = draft
            if self.drafter.is_free:
                self.proposed[request] = draft
                odds = self.odds.setdefault(request, Odds())
                request.draft = draft.cut(odds.best_length(len(draft.ids), *costs))

    def follow(self, chunks: Sequence[Chunk], drawn: Mapping[Chunk, Sequence[Drawn | None]], h_TD: Tensor,
               taps: Sequence[Tensor]) -> list[tuple[int, int, int]]:
        """Shows the drafter the hidden rows of tokens that are the text's now. Returns where keys and values have
        to move, since a tree's path lies among others: (row of the page table, place, the text's place)."""
        rows, spans, moves, first = [], [], [], 0
        for chunk in chunks:
            last = chunk.end - chunk.start - 1
            if last or self.is_wanted:  # while drafts rest, decoded tokens' rows would be for nothing
                path = kept_path(chunk.draft, drawn.get(chunk, ()))
                rows += [*range(first, first + last), *(first + last + row for row in path)]
                spans.append((chunk.request, chunk.start, chunk.end + len(path) - 1))
                moves += [(chunk.request.lease.row, chunk.end - 1 + row, chunk.end - 1 + depth)
                          for depth, row in enumerate(path) if row != depth]
            first += last + 1 + chunk.num_drafted
        if self.drafter.taps is not None and spans:
            if len(rows) < len(h_TD):
                row_T = sent(id_tensor(rows), h_TD.device)
                h_TD, taps = h_TD.index_select(0, row_T), [tap_TD.index_select(0, row_T) for tap_TD in taps]
            self.drafter.observe(spans, h_TD, taps)
        return moves

    def judge(self, request: Request, draft: Draft, drawn: Sequence[int | None]) -> None:
        """Notes what was drawn where `draft` was computed of a request's: what stood, and one more."""
        request.drafts.observe(draft, len(drawn) - 1)
        if (proposed := self.proposed.pop(request, NO_DRAFT)).ids:
            self.odds[request].observe(proposed.ids, len(draft.ids), drawn)
        request.draft = NO_DRAFT

    def observe(self, chunks: Sequence[Chunk], ms: float, num_tokens: int) -> None:
        """A step took `ms`, proposing included, and drew so many tokens."""
        is_like_others = len(chunks) == self.num_asked and all(chunk.end - chunk.start == 1 for chunk in chunks)
        if self._is_tried and is_like_others:  # nobody was preempted, nobody read a prompt
            self._trial(chunks).observe(any(chunk.num_drafted for chunk in chunks), ms, num_tokens)

    def forget(self, request: Request) -> None:
        self.drafter.forget(request)
        self.odds.pop(request, None)
        self.proposed.pop(request, None)

    @property
    def _is_tried(self) -> bool:
        return not self.drafter.is_free and self.is_coupled

    def _trial(self, decoding: Sequence) -> Trial:
        return self.trials.setdefault(len(decoding).bit_length(), Trial())


def kept_path(draft: Draft, drawn: Sequence[Drawn | None]) -> list[int]:
    """Row 0 and those of a draft's tokens that stand; what was drawn last is not the draft's."""
    kept = iter([token.id for token in drawn[:-1]])
    return draft.path(lambda _: next(kept, None))


def note_chances(chunks: Sequence[Chunk], drawn: Sequence[Sequence[Drawn | None]],
                 chances: Sequence[Sequence[float]]) -> None:
    """Notes of the drafts that were judged, those that follow what stood, the chance they had."""
    for chunk, tokens, of_row in zip(chunks, drawn, chances):
        judged = [of_row[row] for row in kept_path(chunk.draft, tokens)]
        chunk.request.drafts.chances += [chance for chance in judged if not math.isnan(chance)]


LENGTHS = (16, 8, 4, 2)  # of n-grams that are looked up, the longest first


class Index:
    """Which place follows each n-gram of a text that grows: of several places the last."""

    def __init__(self, tokens: list):
        self.tokens, self.num_filed = tokens, 0
        self.place_after: dict[int, int] = {}  # by the n-gram's hash: a tuple would be kept alive

    def catch_up(self) -> None:
        """Files what was appended: an n-gram once it is followed by a token, so never the one at the end."""
        tokens, place_after = self.tokens, self.place_after
        for place in range(self.num_filed, len(tokens)):
            for n in LENGTHS if tokens[place] is not None else ():
                if n <= place:
                    place_after[hash(tuple(tokens[place - n : place]))] = place
        self.num_filed = len(tokens)

    def find(self, ngram: list[int], key: int) -> int | None:
        place = self.place_after.get(key)
        return place if place is not None and self.tokens[place - len(ngram) : place] == ngram else None

    def followers(self, place: int, num: int) -> tuple[int, ...]:
        """Up to `num` tokens from `place` on, not beyond an ended answer; at the text's end from `place` again: what
        repeats itself may go on to."""
        ids = self.tokens[place : place + num]
        if None in ids:
            return tuple(ids[: ids.index(None)])
        return tuple(islice(cycle(ids), num)) if ids else ()


class Ngram:
    """Drafts what followed the last time: the longest n-gram at a request's end that stood in it before (prompt or
    answer) is looked up, and what followed its last occurrence is proposed, `reach` times the n-gram's length at most.

    With `shared_tokens`, answers that have ended are looked up too: the last of them, so many tokens at most, where the
    request's own text has no n-gram as long. (What "rejection" and "block" draw then depends on other requests.)
    A token costs the same however long the text is: it ends an n-gram of each length.
    """

    name, is_free, taps = "ngram", True, None

    def __init__(self, reach: int = 1, shared_tokens: int = 0):
        self.reach, self.half_tokens = reach, shared_tokens // 2
        self.own: dict[Request, Index] = {}
        self.young, self.old = Index([]), Index([])  # answers of others; when the young are full, they become the old

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [self._draft(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def forget(self, request: Request) -> None:
        self.own.pop(request, None)
        answer = request.output_ids[: max(0, self.half_tokens - 1)]
        if not answer:
            return
        if len(self.young.tokens) + len(answer) >= self.half_tokens:
            self.young, self.old = Index([]), self.young
        self.young.tokens += [*answer, None]  # no n-gram and no draft goes on into the next answer
        self.young.catch_up()

    def _draft(self, request: Request, limit: int) -> Draft:
        if request not in self.own:
            self.own[request] = Index(request.tokens)
        own = self.own[request]
        own.catch_up()
        indexes = (own, self.young, self.old) if self.half_tokens else (own,)
        for n in LENGTHS:
            ngram = request.tokens[-n:]
            key = hash(tuple(ngram))
            for index in indexes:
                place = index.find(ngram, key)
                if place is not None:
                    return Draft(index.followers(place, min(limit, len(ngram) * self.reach)))
        return NO_DRAFT


@dataclass(eq=False)
class Chain:
    """A request's draft while it grows, token by token."""

    request: Request
    limit: int
    ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @property
    def draft(self) -> Draft:
        return Draft(tuple(self.ids), torch.stack(self.probs) if self.probs else None)


LOWEST = -1e30  # a logit that leaves no chance, and is a number
SURE = 0.5  # a draft ends with a token that its drafter finds less likely: it rarely stands, and the next costs a pass


@dataclass(frozen=True)
class Manner:
    """How tokens of drafts are chosen: with the noise of the draw itself if `is_coupled`, else with a draft's; with the
    distributions they come from if `keeps_probs`, which all but coupled verification needs."""

    is_coupled: bool = True
    keeps_probs: bool = False


def grow(chains: Sequence[Chain], logits_LV: Tensor, ops, manner: Manner, sure: float) -> list[int]:
    """Draws each chain's next token from its row by the request's own rules. Returns which of them are to go on: those
    `sure` of it."""
    rules = [chain.request.sampler.rules_along(Draft(tuple(chain.ids)))[-1] for chain in chains]
    keys = []
    for chain in chains:
        seed, start, j = chain.request.params.seed, len(chain.request.tokens), len(chain.ids)
        keys.append(noise_key(seed, start + j, "draw") if manner.is_coupled else draft_key(seed, start, j))
    drawn_L = ops.draw(logits_LV, rules, keys)
    place_L = drawn_L.clamp(min=0).to(logits_LV.device, non_blocking=True)
    chance_L = torch.softmax(logits_LV, -1).gather(1, place_L[:, None])[:, 0]
    probs_LV = ops.distribution(logits_LV, rules) if manner.keeps_probs else [None] * len(chains)
    going = []
    for i, (chain, id, chance, p_V) in enumerate(zip(chains, drawn_L.tolist(), chance_L.tolist(), probs_LV)):
        if id < 0:  # a row with nothing to draw from
            continue
        chain.ids.append(id)
        if p_V is not None:
            chain.probs.append(p_V)
        if chance >= sure and len(chain.ids) < chain.limit:
            going.append(i)
    return going


@dataclass(eq=False)
class Reading:
    """How far a draft model has read a request: the tokens whose keys and values its own cache holds, of which the
    first `num_sure` at most are the request's, as far as they go, and the others were drafts."""

    lease: Lease = field(default_factory=Lease)
    tokens: list[int] = field(default_factory=list)
    num_sure: int = 0


class DraftModel:
    """A smaller model of the same vocabulary. Its pages are its own: it reads what the request's tokens have gained
    since it was last asked, prompts after a prefix hit in its own cache, and goes back to where its drafts fell.

    `load` makes the model when the first draft is wanted; `num_pages` pages of `page_size` tokens are its cache. What
    finds no room there gets no drafts. `width` is that of the logits it drafts for: of the same tokens two models may
    have more or fewer that stand for nothing. Of its own head only the MOST_TOKENS first rows are read (Zhao et al.
    2025, FR-Spec, 2502.14856): tokenizers number tokens by how soon they were merged, so the rest is rare, and the head
    is a third of a small model.
    """

    MOST_TOKENS = 32768
    is_free, taps, sure = False, None, SURE

    def __init__(self, name: str, load: Callable[[], Model], width: int, num_pages: int, page_size: int,
                 max_requests: int, manner: Manner = Manner(), max_step_tokens: int = 512):
        self.name, self.load, self.width, self.manner = name, load, width, manner
        self.max_step_tokens = max_step_tokens
        self.sizes = {"num_pages": num_pages, "page_size": page_size, "max_leases": max_requests}
        self.readings: dict[Request, Reading] = {}
        self.model = None

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        wanting = [Chain(request, limit) for request, limit in zip(requests, limits, strict=True) if limit > 0]
        if wanting and self.model is None:
            self._start()
        growing = chains = [chain for chain in wanting if self._make_room(chain.request, chain.limit)]
        while growing:
            logits_LV = self._read([(chain.request, [*chain.request.tokens, *chain.ids]) for chain in growing])
            growing = [growing[i] for i in grow(growing, logits_LV, self.model.ops, self.manner, self.sure)]
        drafts = {chain.request: chain.draft for chain in chains}
        return [drafts.get(request, NO_DRAFT) for request in requests]

    def forget(self, request: Request) -> None:
        if (reading := self.readings.pop(request, None)) is not None:
            self.cache.release(reading.lease)

    def _start(self) -> None:
        self.model = self.load()
        self.cache = Cache(self.model.kv_specs(), dtype=self.model.cache_dtype, device=self.model.device,
                           max_tokens=self.model.context, max_step_tokens=self.max_step_tokens,
                           new_kv=self.model.ops.new_kv, **self.sizes)
        self.replay = Replay(self.model, self.cache)
        is_large = self.model.config.vocab > self.MOST_TOKENS
        self.head = self.model.output.first(self.MOST_TOKENS) if is_large else self.model.output

    def _make_room(self, request: Request, limit: int) -> bool:
        """Has pages for a request's tokens and drafts, and goes back to where its tokens and what was read differ."""
        reading, tokens = self.readings.get(request), request.tokens
        if len(tokens) + limit > self.model.context:
            return False
        if reading is None:
            reading = self.readings[request] = Reading()
            self.cache.open(reading.lease)
            reading.tokens = tokens[: self.cache.match(reading.lease, tokens)]
        agreed = min(reading.num_sure, len(reading.tokens))
        while agreed < len(reading.tokens) and agreed < len(tokens) and reading.tokens[agreed] == tokens[agreed]:
            agreed += 1
        del reading.tokens[min(agreed, len(tokens) - 1) :]
        reading.num_sure = len(tokens)
        if self.cache.grow(reading.lease, len(tokens) + limit):
            return True
        self.forget(request)
        return False

    def _read(self, sequences: Sequence[tuple[Request, list[int]]]) -> Tensor:
        """Reads each sequence to its end: logits_LV after its last token."""
        last = {}
        while sequences:
            left, step = self.max_step_tokens, []
            for request, tokens in sequences:
                start = len(self.readings[request].tokens)
                new = tokens[start : start + left]
                left -= len(new)
                if new:
                    step.append((request, start, new))
            for request, start, new in step:
                self.cache.reach(self.readings[request].lease, start, start + len(new))
            ends = list(accumulate(len(new) for _, _, new in step))
            batch = Batch.pack(self.cache, [self.readings[request].lease.row for request, _, _ in step],
                               [new for _, _, new in step], [start for _, start, _ in step], [end - 1 for end in ends])
            h_LD = self.replay.forward(batch)[0][batch.row_L]
            for (request, _, new), h_D in zip(step, h_LD):
                reading = self.readings[request]
                reading.tokens += new
                # No more than the request's own tokens: drafts may fall.
                self.cache.publish(reading.lease, reading.tokens, min(len(reading.tokens), len(request.tokens)))
                last[request] = h_D
            sequences = [(request, tokens) for request, tokens in sequences
                         if len(self.readings[request].tokens) < len(tokens)]
        logits_LV = wide(self.head(torch.stack(list(last.values()))))
        return F.pad(logits_LV, (0, self.width - logits_LV.shape[1]), value=LOWEST)  # by a negative number: cut
