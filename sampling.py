"""From logits to tokens: sampling parameters, what penalties remember, the keys of randomness, log-probabilities, and
which drafts stand.

Owns which fields there are and what each request's are. The draw itself, kernels.draw, is an operation like others.
Knows nothing of requests, pages, text, or where drafts come from.
Randomness is keyed by (seed, position, purpose), never taken from a stream: whatever else runs, however a prompt is cut
into chunks, the token at a position sees the same noise. Start at `SamplingParams`, then `start_draw` and `accept`.
"""

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import GOLDEN, MIX_A, MIX_B

ALIASES = {"max_new_tokens": "max_tokens", "n_predict": "max_tokens", "temp": "temperature",
           "repeat_penalty": "repetition_penalty"}
RANGES = {  # name: (test, what the user is told)
    "max_tokens": (lambda v: v >= 1, "at least 1"),
    "temperature": (lambda v: 0 <= v < math.inf, "a finite number of at least 0"),
    "top_k": (lambda v: v >= -1, "at least 1, or 0 or -1 for no limit"),
    "top_p": (lambda v: 0 < v <= 1, "more than 0 and at most 1"),
    "min_p": (lambda v: 0 <= v < 1, "at least 0 and less than 1"),
    "repetition_penalty": (lambda v: 0 < v < math.inf, "a finite number above 0"),
    "presence_penalty": (math.isfinite, "a finite number"),
    "frequency_penalty": (math.isfinite, "a finite number"),
    "seed": (lambda v: 0 <= v < 2**63, "from 0 to 2^63 - 1"),
    "min_tokens": (lambda v: v >= 0, "at least 0"),
    "logprobs": (lambda v: v >= 0, "at least 0"),
    "num_samples": (lambda v: v >= 1, "at least 1"),
}
SEED_LIMIT = 2**63


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are drawn and when it ends. The defaults are greedy. Values out of range: ValueError."""

    max_tokens: int | None = 512  # None: until the context is full
    temperature: float = 0.0  # 0: the most likely token, the lowest id on ties
    top_k: int = 0  # 0 or -1: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit); -inf bans the id
    seed: int | None = None  # None: a random one is chosen when the request is submitted
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # how many alternatives to list for each token; None: no log-probabilities
    num_samples: int = 1

    def __post_init__(self):
        for name, (in_range, allowed) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not in_range(value):
                raise ValueError(f"{name} is {value} but must be {allowed}")
        for id, bias in self.logit_bias:
            if math.isnan(bias) or bias == math.inf:
                raise ValueError(f"logit_bias of id {id} is {bias} but must be a number (-inf bans the id)")
        if "" in self.stop:
            raise ValueError("a stop string is empty: every text contains it; leave it out")
        for text in self.stop:
            if half := next((char for char in text if "\ud800" <= char <= "\udfff"), None):
                raise ValueError(f"a stop string has \\u{ord(half):04x}, half of a surrogate pair: no text contains it")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens} but max_tokens only {self.max_tokens}: lower the first")

    @staticmethod
    def from_fields(given: Mapping, base: "SamplingParams | None" = None) -> "SamplingParams":
        """`base` (or the defaults) with the fields of `given`, as JSON or the command line spells them: `-` or `_`,
        aliases allowed, null meaning unset. An unknown name, a wrong type or a value out of range: ValueError."""
        changes = {}
        for spelled, value in given.items():
            name = spelled.replace("-", "_")
            name = ALIASES.get(name, name)
            if name not in PARSERS:
                raise ValueError(f"unknown sampling field '{spelled}': known are {', '.join(sorted(PARSERS))}")
            if name in changes:
                raise ValueError(f"'{spelled}' sets {name} a second time: give it once")
            if value is not None:
                changes[name] = PARSERS[name](spelled, value)
        return replace(base or SamplingParams(), **changes)

    def check_ids(self, vocab: int) -> None:
        """ValueError if a biased or stopping id is not in a vocabulary of `vocab` ids."""
        for name, ids in (("logit_bias", [id for id, _ in self.logit_bias]), ("stop_token_ids", self.stop_token_ids)):
            for id in ids:
                if not 0 <= id < vocab:
                    raise ValueError(f"{name} names id {id} but the vocabulary has ids 0 to {vocab - 1}")

    def samples(self) -> Iterator["SamplingParams"]:
        """One SamplingParams a sample, each with its own seed: sample i has seed + i and is the same alone."""
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        for i in range(self.num_samples):
            yield replace(self, seed=(seed + i) % SEED_LIMIT, num_samples=1)


def _integer(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 != 0:  # NaN and inf: NaN % 1
        raise ValueError(f"{name} is {value!r} but must be a whole number")
    return int(value)


def _number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r} but must be a number")
    try:
        return float(value)
    except OverflowError:  # JSON's whole numbers have no limit
        raise ValueError(f"{name} is beyond the range of numbers: choose a smaller one") from None


def _boolean(name: str, value) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r} but must be true or false")
    return value


def _texts(name: str, value) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is {value!r} but must be a string or a list of strings")
    return tuple(texts)


def _ids(name: str, value) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is {value!r} but must be a list of token ids")
    return tuple(_integer(name, id) for id in value)


def _biases(name: str, value) -> tuple[tuple[int, float], ...]:
    """{"id": bias} as in JSON, where keys are strings, or pairs (id, bias)."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        raise ValueError(f"{name} is {value!r} but must give token ids and their biases")
    biases = {}
    for id, bias in pairs:
        if isinstance(id, str):
            if not id.strip().removeprefix("-").isdecimal():
                raise ValueError(f"{name} names {id!r} but must name token ids")
            id = int(id)
        biases[_integer(f"an id of {name}", id)] = _number(f"{name} of id {id}", bias)
    return tuple(biases.items())


PARSERS = {"max_tokens": _integer, "temperature": _number, "top_k": _integer, "top_p": _number, "min_p": _number,
           "repetition_penalty": _number, "presence_penalty": _number, "frequency_penalty": _number,
           "logit_bias": _biases, "seed": _integer, "stop": _texts, "stop_token_ids": _ids, "include_stop": _boolean,
           "ignore_eos": _boolean, "min_tokens": _integer, "logprobs": _integer, "num_samples": _integer}


# ---------------------------------------------------------------------------------------------------------------------
# The draw

PURPOSES = {"draw": 0, "draft": 1, "coin": 2, "residual": 3}  # what noise is for
MASK_64 = 2**64 - 1


def _mix(z: int) -> int:
    """splitmix64's finalizer, as in kernels.gumbel."""
    z = ((z ^ (z >> 30)) * MIX_A) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_B) & MASK_64
    return z ^ (z >> 31)


def noise_key(seed: int, position: int, purpose: str) -> int:
    """The key of a row's noise: 64 bits that depend on these three and on nothing else."""
    key = _mix((seed + GOLDEN * (1 + PURPOSES[purpose])) & MASK_64)
    return _mix((key + GOLDEN * (1 + position)) & MASK_64)


def draft_key(seed: int, start: int, j: int) -> int:
    """The key of the noise that draws draft j of those that start at position `start`. A later draft of the same
    position has other noise: which drafts stood, and so where it starts, may depend on what this noise drew."""
    return noise_key(noise_key(seed, start, "draft"), j, "draft")


def coin(key: int) -> float:
    """A number in (0, 1), both ends excluded."""
    return ((key >> 12) + 0.5) * 2.0**-52


@dataclass(frozen=True)
class Drawn:
    """One drawn token; `logprob` and `top` (id, logprob), best first, are of the untouched distribution."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Draft:
    """Tokens that may follow a request's own, and the distributions that they were really drawn from: (K, V) float64,
    as wide as the logits. None: taken as certain, which is right of any, but fewer of those that were drawn stand. To
    "rejection" and "block" a distribution that they were not drawn from gives wrong answers; "coupled" looks at none.

    They may be a tree: token j then follows the request's last token if parents[j] is 0, else token parents[j] - 1,
    which stands before it; those that follow the same one differ. None: each follows the one before it.
    """

    ids: tuple[int, ...] = ()
    probs_KV: Tensor | None = None
    parents: tuple[int, ...] | None = None

    def cut(self, num: int) -> "Draft":
        """Its first `num` tokens."""
        if num >= len(self.ids):
            return self
        return Draft(self.ids[:num], None if self.probs_KV is None else self.probs_KV[:num],
                     None if self.parents is None else self.parents[:num])

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Of each of its tokens: the row that predicts it, of the last token (0) and the draft's, and its depth."""
        depths, rows = [0], []
        for j in range(len(self.ids)):
            parent = j if self.parents is None else self.parents[j]
            depths.append(depths[parent] + 1)
            rows.append((parent, depths[-1]))
        return rows

    def path(self, id_after: Callable[[int], int | None]) -> list[int]:
        """The rows that are passed where the token after each is `id_after(row)`, as far as that is the draft's."""
        child = {(parent, id): row for row, (id, (parent, _)) in enumerate(zip(self.ids, self.rows), 1)}
        path = [0]
        while (row := child.get((path[-1], id_after(path[-1])))) is not None:
            path.append(row)
        return path


NO_DRAFT = Draft()


@dataclass
class DraftTally:
    """What became of a request's drafts, counted over the steps that drew from it."""

    num_steps: int = 0
    num_proposed: int = 0
    kept_by_place: list[int] = field(default_factory=list)  # [j]: how many drafts' tokens j stood
    judged_by_place: list[int] = field(default_factory=list)  # [j]: how many were judged, those before them standing
    lengths: Counter = field(default_factory=Counter)  # of drafts; of trees, how deep they were
    chances: list[float] = field(default_factory=list)  # if asked for: of each that was judged, to stand

    def observe(self, draft: Draft, num_kept: int) -> None:
        """A step computed `draft`, of which `num_kept` tokens stood, one after the other."""
        length = max((depth for _, depth in draft.rows), default=0)
        self.num_steps += 1
        self.num_proposed += len(draft.ids)
        self.lengths[length] += 1
        for counts, num in ((self.kept_by_place, num_kept), (self.judged_by_place, min(num_kept + 1, length))):
            counts += [0] * (length - len(counts))
            for place in range(num):
                counts[place] += 1

    def report(self) -> dict:
        """As --json shows it. "acceptance": of the tokens that were judged. "by_place": how many drafts stood at least
        so far. "expected": by the chances that tokens had; where each has the chance a, K drafts bring
        (1 - a^(K + 1)) / (1 - a) tokens a step (Leviathan et al. 2023, equation 1)."""
        num_kept, num_judged = sum(self.kept_by_place), sum(self.judged_by_place)
        report = {"proposed": self.num_proposed, "accepted": num_kept, "steps": self.num_steps,
                  "acceptance": num_kept / num_judged if num_judged else None, "by_place": list(self.kept_by_place),
                  "tokens_per_step": (self.num_steps + num_kept) / max(self.num_steps, 1)}
        if self.chances:
            a = sum(self.chances) / len(self.chances)
            tokens = sum(num * sum(a**j for j in range(length + 1)) for length, num in self.lengths.items())
            report["expected"] = {"acceptance": a, "tokens_per_step": tokens / self.num_steps}
        return report


class Sampler:
    """One request's side of the draw: its parameters and what its penalties have to remember.

    `end_ids` are the ids that would end the answer; `vocab` is the number of ids the tokenizer knows: a head may be
    wider, and the surplus is never drawn. `params.seed` must be set."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], end_ids: Sequence[int], vocab: int):
        self.params, self.num_drawn = params, 0
        # Dense over the vocabulary, so that a step costs the same however long the answer has become.
        self.seen_V = self.count_V = None
        if params.repetition_penalty != 1:
            self.seen_V = torch.zeros(vocab, dtype=torch.bool)
            in_vocab = [id for id in prompt_ids if id < vocab]
            self.seen_V[torch.tensor(in_vocab, dtype=torch.int64)] = True
        if params.presence_penalty or params.frequency_penalty:
            self.count_V = torch.zeros(vocab, dtype=torch.float64)
        self.late_rules = self._rules(params.logit_bias, vocab)
        self.early_rules = self.late_rules
        if params.min_tokens:
            self.early_rules = self._rules((*params.logit_bias, *((id, -math.inf) for id in sorted(end_ids))), vocab)

    def _rules(self, bias: Sequence[tuple[int, float]], vocab: int) -> kernels.DrawRules:
        p = self.params
        return kernels.DrawRules(
            vocab, p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty,
            p.frequency_penalty, self.seen_V, self.count_V,
            torch.tensor([id for id, _ in bias]) if bias else None,
            torch.tensor([value for _, value in bias], dtype=torch.float64) if bias else None)

    def rules_after(self, num: int) -> kernels.DrawRules:
        """Of the token after the next `num`, as far as their number matters."""
        return self.early_rules if self.num_drawn + num < self.params.min_tokens else self.late_rules

    @property
    def remembers(self) -> bool:
        """Whether its rules depend on which tokens were drawn, and not only on how many."""
        return self.seen_V is not None or self.count_V is not None

    def rules_along(self, draft: Draft, num_unseen: int = 0) -> list[kernels.DrawRules]:
        """Of the next token, then of the token after each of the draft's, should it and those before it on its path be
        drawn. Nothing is taken note of. `num_unseen` tokens are drawn before it that nobody has observed yet, which
        only a sampler that does not remember them allows."""
        assert not (num_unseen and self.remembers)
        along = [self.rules_after(num_unseen)]
        for id, (parent, depth) in zip(draft.ids, draft.rows):
            rules, before = self.rules_after(num_unseen + depth), along[parent]
            seen_V, count_V = before.seen_V, before.count_V
            if seen_V is not None:
                seen_V = seen_V.clone()
                seen_V[id : id + 1] = True  # of an id that the tokenizer does not know, nothing: it is never drawn
            if count_V is not None:
                count_V = count_V.clone()
                count_V[id : id + 1] += 1
            along.append(replace(rules, seen_V=seen_V, count_V=count_V) if self.remembers else rules)
        return along

    def observe(self, id: int) -> None:
        """Take note of a token that has become part of the answer."""
        self.num_drawn += 1
        if self.seen_V is not None:
            self.seen_V[id] = True
        if self.count_V is not None:
            self.count_V[id] += 1


def _drawn(id: int, logits_V: Tensor, params: SamplingParams) -> Drawn:
    if params.logprobs is None:
        return Drawn(id)
    logprob_V = torch.log_softmax(logits_V.double(), -1)
    top = ()
    if params.logprobs:
        top_ids, logprobs = kernels.largest(logprob_V, min(params.logprobs, len(logprob_V)))
        top = tuple(zip(top_ids.tolist(), logprobs.tolist()))
    return Drawn(id, float(logprob_V[id]), top)


# ---------------------------------------------------------------------------------------------------------------------
# Which drafts stand


@dataclass(frozen=True, eq=False)
class Draw:
    """Tokens being drawn from rows of logits, one from each: `id_L` where the operations compute, and `read` waits for
    them and gives them on the host; -1 where there is nothing to draw from. Request r owns the next
    len(drafts[r].ids) + 1 rows: its row j predicts the token after draft j (0: the token at positions[r]), given that
    it stands."""

    logits_LV: Tensor
    drafts: Sequence[Draft]
    samplers: Sequence[Sampler]
    positions: Sequence[int]
    rules: Sequence[Sequence[kernels.DrawRules]]
    id_L: Tensor
    read: Callable[[], Tensor]


def start_draw(logits_LV: Tensor, drafts: Sequence[Draft], samplers: Sequence[Sampler], positions: Sequence[int],
               ops=kernels, num_unseen: int = 0) -> Draw:
    """Draws from every row as if its request's drafts before it stood: penalties count them, the samplers stay as they
    are. Rows of different requests do not see each other. `num_unseen`: as in `rules_along`, of each request. `ops` are
    the operations in use, kernels or a native.Native."""
    rules = [sampler.rules_along(draft, num_unseen) for sampler, draft in zip(samplers, drafts, strict=True)]
    keys = [noise_key(sampler.params.seed, position + depth, "draw")
            for sampler, position, draft in zip(samplers, positions, drafts, strict=True)
            for depth in (0, *(depth for _, depth in draft.rows))]
    id_L = ops.draw(logits_LV, list(chain.from_iterable(rules)), keys)
    return Draw(logits_LV, drafts, samplers, positions, rules, id_L, ops.fetch(id_L))


def accept(draw: Draw, method: str = "coupled", ops=kernels) -> list[list[Drawn | None]]:
    """Each request's drafts that stand, and one more token: in place of the first that falls, or after the last. That
    one is None where there is nothing to draw from: a row that is not finite, or has every token banned.

    coupled    A draft stands if it is the token that `draw` draws. So the tokens are those drawn without drafts.
    rejection  A draft stands with the chance min(1, p / q), where p is what `draw` draws from and q what the draft was
               drawn from; else a token is drawn from max(p - q, 0) in its place (Leviathan et al. 2023, Chen et al.
               2023). The distribution is that without drafts; which tokens, depends on how many drafts there were.
    block      The same with drafts judged together, so that more of them stand (Sun et al. 2024).

    Of a tree the path stands that `draw` draws, whatever the method: which of several tokens chosen beforehand is drawn
    is all that there is to judge (each with its own chance, as "rejection" would have it of certain drafts).
    """
    counts = [len(draft.ids) + 1 for draft in draw.drafts]
    answers = []
    for r, (rows_LV, id_L, draft) in enumerate(zip(draw.logits_LV.split(counts), draw.read().split(counts),
                                                   draw.drafts)):
        ids, params = id_L.tolist(), draw.samplers[r].params
        # What is certain all methods judge alike.
        if method == "coupled" or params.temperature == 0 or draft.parents is not None:
            kept = [(row, ids[row]) for row in draft.path(ids.__getitem__)]
        else:
            num_kept, last = _judged(method, rows_LV, draw.rules[r], ids, draft, params.seed, draw.positions[r], ops)
            kept = list(enumerate((*draft.ids[:num_kept], last)))
        answers.append([_drawn(id, rows_LV[row], params) if id >= 0 else None for row, id in kept])
    return answers


def chances(logits_LV: Tensor, drafts: Sequence[Draft], samplers: Sequence[Sampler],
            ops=kernels) -> list[list[float]]:
    """For each request's rows as in `Draw`: the chance that "rejection" gives the draft that follows, or one of those
    that do, to stand; nan for a row that none follows. It is the sum of min(p, q), or 1 - TV(p, q), for a draft drawn
    from q (Leviathan et al. 2023, theorem 3.5), and p of those that are taken as certain."""
    found = []
    for rows_LV, draft, sampler in zip(logits_LV.split([len(draft.ids) + 1 for draft in drafts]), drafts, samplers):
        p_LV = ops.distribution(rows_LV, sampler.rules_along(draft))
        of_row = [math.nan] * len(rows_LV)
        for j, (id, (row, _)) in enumerate(zip(draft.ids, draft.rows)):
            chance = p_LV[row, id] if draft.probs_KV is None else torch.minimum(p_LV[row], draft.probs_KV[j]).sum()
            of_row[row] = float(chance) + (0.0 if math.isnan(of_row[row]) else of_row[row])
        found.append(of_row)
    return found


def _judged(method: str, rows_LV: Tensor, rules: Sequence[kernels.DrawRules], ids: Sequence[int], draft: Draft,
            seed: int, position: int, ops) -> tuple[int, int]:
    """How many of one request's drafts stand, and the id that follows. `ids` are what `draw` draws from its rows."""
    K = ids.index(-1) if -1 in ids else len(draft.ids)  # a row that has no distribution ends the draft
    if K == 0:
        return 0, ids[0]
    p_KV = ops.distribution(rows_LV[:K], rules[:K])
    draft_K = torch.tensor(draft.ids[:K])
    q_KV = F.one_hot(draft_K, p_KV.shape[1]).double() if draft.probs_KV is None else draft.probs_KV[:K]
    chance_K, weight_K = ODDS[method](p_KV, q_KV, draft_K)
    # One coin for all: of coins for each position "block" would look at some whose positions come again, next round.
    num_kept = int((coin(noise_key(seed, position, "coin")) < chance_K).sum())
    if num_kept == K:
        return K, ids[K]
    left_V = residual(p_KV[num_kept], q_KV[num_kept], float(weight_K[num_kept]))
    id_C = left_V.nonzero().flatten()
    noise_C = kernels.gumbel(noise_key(seed, position + num_kept, "residual"), id_C)
    return num_kept, int(id_C[(left_V[id_C].log() + noise_C).argmax()])


def rejection_odds(p_KV: Tensor, q_KV: Tensor, draft_K: Tensor) -> tuple[Tensor, Tensor]:
    """chance_K: that more than j drafts stand; weight_K: of p in what is left to draw from where exactly j do."""
    chance_K = _ratio(p_KV, q_KV, draft_K).clamp(max=1).cumprod(0)
    return chance_K, torch.ones_like(chance_K)


def block_odds(p_KV: Tensor, q_KV: Tensor, draft_K: Tensor) -> tuple[Tensor, Tensor]:
    """The same in block verification. The weight of j drafts is the chance to keep them that their own p and q allow:
    a ratio above 1 makes up for smaller ones before it, as far as 1. How many stand is decided from the last draft
    backwards: j of them if no more do and with the chance excess / (excess + 1 - weight)."""
    weights = list(accumulate(_ratio(p_KV, q_KV, draft_K).tolist(), lambda weight, ratio: min(1.0, weight * ratio),
                              initial=1.0))
    weight_K, last = torch.tensor(weights[:-1], dtype=torch.float64), weights[-1]
    excess_K = (weight_K[:, None] * p_KV - q_KV).clamp(min=0).sum(-1)
    denominator_K = excess_K + (1 - weight_K)  # where the weight is 1, exactly the excess
    stop_K = torch.where(denominator_K > 0, excess_K / denominator_K, 1.0)
    stop_K = torch.cat((stop_K[1:], torch.tensor([last], dtype=torch.float64)))  # after 1, 2, ..., K drafts
    return 1 - (1 - stop_K).flip(0).cumprod(0).flip(0), weight_K


ODDS = {"rejection": rejection_odds, "block": block_odds}


def _ratio(p_KV: Tensor, q_KV: Tensor, draft_K: Tensor) -> Tensor:
    p_K, q_K = (x_KV.gather(1, draft_K[:, None])[:, 0] for x_KV in (p_KV, q_KV))
    assert (q_K > 0).all(), "a draft cannot have been drawn from the distribution that was given for it"
    return p_K / q_K


def residual(p_V: Tensor, q_V: Tensor, weight: float) -> Tensor:
    """What is drawn from where a draft fell: weight * p - q where that is positive, normalised."""
    left_V = (weight * p_V - q_V).clamp(min=0)
    total = left_V.sum()
    return left_V / total if total > 0 else p_V  # nothing is left where p = q; there only rounding makes a draft fall
