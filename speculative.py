"""Drafters: who proposes tokens that the model then verifies, several in one step.

Owns what drafters remember. Knows nothing of how drafts are judged (sampling.accept), when there is room for them
(scheduler.py), or what the model computes. A draft never changes what may come out, only how soon: a drafter may be
wrong, but what it says of its chances must be true (sampling.Draft). Start at `Drafter`.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Protocol

from torch import Tensor

from sampling import Draft
from scheduler import Request

NO_DRAFT = Draft()


class Drafter(Protocol):
    """What the engine asks of any drafter; a step is propose, plan, forward, accept, observe.

    Rewinds: a request's tokens are only ever appended to, several at a time, and drafts never become part of them
    before they stand. What a drafter computed for drafts (keys and values, features) it keeps as far as `tokens` agree
    with them when it is asked next. Preemption changes none of this: the tokens stay.

    Chances: a drafter that samples gives the rows it sampled from, after its own temperature and filters. How many it
    proposes may depend on the tokens before and on the drafts it gives, never on one that it leaves out. Against
    "coupled" it does best with the noise of the draw itself (noise_key(seed, position, "draw")): where its logits come
    close to the model's, so do its tokens. Against the others it takes noise of its own, sampling.draft_key.
    """

    layers: tuple[int, ...]  # whose outputs `observe` is given, side by side: EAGLE-3 three, MTP and Medusa the last

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """A draft for each request, at most `limits[i]` tokens, to follow its tokens. Once a step, for all that only
        lack their last token's logits: a draft model runs for all of them at once. The plan may cut what it gets."""

    def observe(self, requests: Sequence[Request], starts: Sequence[int], hidden: Sequence[Tensor]) -> None:
        """After accept: request i's tokens from `starts[i]` on were computed, and its rows of `layers` are `hidden[i]`
        (T, D), of prompts and of drafts that stand, not of those that fell: MTP's and EAGLE's caches need each row."""

    def forget(self, request: Request) -> None:
        """It has ended."""


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

    layers = ()

    def __init__(self, reach: int = 1, shared_tokens: int = 0):
        self.reach, self.half_tokens = reach, shared_tokens // 2
        self.own: dict[Request, Index] = {}
        self.young, self.old = Index([]), Index([])  # answers of others; when the young are full, they become the old

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [self._draft(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def observe(self, requests: Sequence[Request], starts: Sequence[int], hidden: Sequence[Tensor]) -> None:
        pass  # the tokens say it all

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
