"""From logits to a token: sampling parameters, logit transforms, and the draw.

Owns what `temperature`, `top_p` and their kin mean, and the random numbers. Knows nothing of requests, pages or text.
Randomness is keyed by (seed, position, purpose), never taken from a stream: whatever else runs, however a prompt is cut
into chunks, the token at a position sees the same noise. Start at `SamplingParams`, then `draw`.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import kernels

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
# Noise: a counter-based generator. splitmix64's finalizer (Steele, Lea and Flood 2014) over a key and a counter.

PURPOSES = {"draw": 0}  # what the noise is for; drafts, coins and residuals will have numbers of their own
GOLDEN = 0x9E3779B97F4A7C15
MIX_A, MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK_64 = 2**64 - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * MIX_A) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_B) & MASK_64
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z


def _mix_tensor(z: Tensor) -> Tensor:
    """`_mix` on int64: products wrap as in C; the shifts are made logical by masking off the copied sign."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(MIX_A)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(MIX_B)
    return z ^ ((z >> 31) & (2**33 - 1))


def gumbel(seed: int, position: int, purpose: str, id_C: Tensor) -> Tensor:
    """Gumbel(0, 1) noise (C,) float64 for the token ids `id_C` (C,) int64: each value depends on its own id, the seed,
    the position in the sequence and the purpose, and on nothing else."""
    key = _mix((seed + GOLDEN * (1 + PURPOSES[purpose])) & MASK_64)
    key = _mix((key + GOLDEN * (1 + position)) & MASK_64)
    bits_C = _mix_tensor(id_C * _signed(GOLDEN) + _signed(key))
    uniform_C = (((bits_C >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52  # in (0, 1), both ends excluded
    return -torch.log(-torch.log(uniform_C))


# ---------------------------------------------------------------------------------------------------------------------
# The draw


@dataclass(frozen=True)
class Drawn:
    """One drawn token; `logprob` and `top` (id, logprob), best first, are of the untouched distribution."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """One request's side of the draw: its parameters and what its penalties have to remember.

    `end_ids` are the ids that would end the answer; `vocab` is the number of ids the tokenizer knows: a head may be
    wider, and the surplus is never drawn. `params.seed` must be set."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], end_ids: Sequence[int], vocab: int):
        self.params, self.vocab, self.num_drawn = params, vocab, 0
        self.end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64)
        self.bias_ids = torch.tensor([id for id, _ in params.logit_bias], dtype=torch.int64)
        self.biases = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float64)
        # Dense over the vocabulary, so that a step costs the same however long the answer has become.
        self.seen_V = self.count_V = None
        if params.repetition_penalty != 1:
            self.seen_V = torch.zeros(vocab, dtype=torch.bool)
            in_vocab = [id for id in prompt_ids if id < vocab]
            self.seen_V[torch.tensor(in_vocab, dtype=torch.int64)] = True
        if params.presence_penalty or params.frequency_penalty:
            self.count_V = torch.zeros(vocab, dtype=torch.float64)

    def observe(self, id: int) -> None:
        """Take note of a token that has become part of the answer."""
        self.num_drawn += 1
        if self.seen_V is not None:
            self.seen_V[id] = True
        if self.count_V is not None:
            self.count_V[id] += 1

    @property
    def is_plain_argmax(self) -> bool:
        """True where the token is the argmax of the logits as they are."""
        p = self.params
        return (p.temperature == 0 and self.seen_V is None and self.count_V is None and not p.logit_bias
                and self.num_drawn >= p.min_tokens)

    def adjusted(self, logits_V: Tensor) -> Tensor:
        """Logits after penalties, bias and the ban on early ends, float64 (vocab,)."""
        p = self.params
        x_V = logits_V[: self.vocab].double()
        if self.seen_V is not None:
            penalized_V = torch.where(x_V > 0, x_V / p.repetition_penalty, x_V * p.repetition_penalty)
            x_V = torch.where(self.seen_V, penalized_V, x_V)
        if self.count_V is not None:
            x_V = x_V - p.frequency_penalty * self.count_V - p.presence_penalty * (self.count_V > 0)
        x_V = x_V.index_add(0, self.bias_ids, self.biases)
        if self.num_drawn < p.min_tokens:
            x_V[self.end_ids] = -math.inf
        return x_V


def draw(logits_LV: Tensor, samplers: Sequence[Sampler], positions: Sequence[int],
         argmax: Callable[[Tensor], Tensor] = kernels.argmax) -> list[Drawn | None]:
    """One token for each row of `logits_LV`; row l's token will stand at `positions[l]` of its sequence. `argmax` is
    that of the operations in use.

    None for a row whose logits are not finite, or of which nothing is left to draw from. Rows do not see each other.
    """
    best_L = argmax(logits_LV).tolist()
    return [None if best < 0 else _draw_row(logits_LV[l], best, sampler, position)
            for l, (best, sampler, position) in enumerate(zip(best_L, samplers, positions))]


def _draw_row(logits_V: Tensor, best: int, sampler: Sampler, position: int) -> Drawn | None:
    """`best`: the row's argmax, over the whole head."""
    if sampler.is_plain_argmax and best < sampler.vocab:
        return _with_logprobs(best, logits_V, sampler.params)
    x_V = sampler.adjusted(logits_V)
    if x_V.max() == -math.inf:
        return None
    return _with_logprobs(_pick(x_V, sampler.params, position), logits_V, sampler.params)


def _pick(x_V: Tensor, params: SamplingParams, position: int) -> int:
    """Gumbel-max: the argmax of logits plus Gumbel noise is a draw from their softmax."""
    if params.temperature == 0:
        return int(x_V.argmax())
    # The largest becomes 0 before the division: a tiny temperature then sends the others to -inf, never to +inf.
    scaled_V = (x_V - x_V.max()) / params.temperature
    id_C, scaled_C = candidates(scaled_V, params)
    return int(id_C[(scaled_C + gumbel(params.seed, position, "draw", id_C)).argmax()])


def candidates(scaled_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids (C,) and logits (C,) that min-p, then top-k, then top-p (of what is left, renormalised) leave to draw from.

    In the order (logit descending, id ascending) each of the three keeps a prefix, so the set is well defined on ties.
    `scaled_V` are logits after temperature.
    """
    num_kept = vocab = len(scaled_V)
    if params.min_p > 0:
        num_kept = int((scaled_V >= scaled_V.max() + math.log(params.min_p)).sum())
    if params.top_k > 0:
        num_kept = min(num_kept, params.top_k)
    if params.top_p == 1:
        return _best(scaled_V, num_kept) if num_kept < vocab else (torch.arange(vocab), scaled_V)
    kept_C = _best(scaled_V, num_kept)[1] if num_kept < vocab else scaled_V
    log_total = torch.logsumexp(kept_C, 0)
    num_best = min(num_kept, 256)
    while True:  # the nucleus is usually small: sort a few, more only where they do not suffice
        id_C, best_C = _best(scaled_V, num_best)
        mass_C = (best_C - log_total).exp().cumsum(0)
        if num_best == num_kept or mass_C[-1] >= params.top_p:
            break
        num_best = min(num_kept, num_best * 8)
    num_nucleus = min(int((mass_C < params.top_p).sum()) + 1, num_best)
    return id_C[:num_nucleus], best_C[:num_nucleus]


def _best(x_V: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest of `x_V`, largest first, the lower id first on ties: (ids, values)."""
    smallest = x_V.topk(num, sorted=False).values.min()
    id_C = (x_V >= smallest).nonzero().flatten()  # topk alone would choose freely among equals at the border
    value_C, order_C = x_V[id_C].sort(descending=True, stable=True)
    return id_C[order_C[:num]], value_C[:num]


def _with_logprobs(id: int, logits_V: Tensor, params: SamplingParams) -> Drawn:
    if params.logprobs is None:
        return Drawn(id)
    logprob_V = torch.log_softmax(logits_V.double(), -1)
    if params.logprobs == 0:
        return Drawn(id, float(logprob_V[id]))
    top_ids, top = _best(logprob_V, min(params.logprobs, len(logprob_V)))
    return Drawn(id, float(logprob_V[id]), tuple(zip(top_ids.tolist(), top.tolist())))
