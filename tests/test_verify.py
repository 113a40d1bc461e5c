"""Which drafts stand (sampling.accept): coupled verification against plain decoding, token for token; the other two
against the distribution, by summing over all that can happen and by counting what does."""

import math
from collections import Counter
from functools import cache
from itertools import accumulate, product

import pytest
import torch
from draws import accept
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import QUARTET, draw, randn, rows_of_logits, rules_of_all_kinds, sampler
from torch.nn.functional import one_hot

import kernels
from kernels import distribution, gumbel
from sampling import (ODDS, PURPOSES, Draft, Drawn, block_odds, chances, coin, draft_key, noise_key, rejection_odds,
                      residual)

SAMPLED = ("rejection", "block")


# ---- a model whose logits are a function of the tokens so far, and how it is decoded


class Scripted:
    """`width` logits after each sequence of tokens; not a number after as many tokens as `broken_at`."""

    def __init__(self, width, seed=0, spread=2.0, broken_at=None):
        self.width, self.seed, self.spread, self.broken_at, self.known = width, seed, spread, broken_at, {}

    def __call__(self, tokens):
        tokens = tuple(tokens)
        if tokens not in self.known:
            logits_V = randn(hash((self.seed, *tokens)) % 2**62, self.width) * self.spread
            self.known[tokens] = logits_V * math.nan if len(tokens) == self.broken_at else logits_V
        return self.known[tokens]

    def rows(self, tokens, ids):
        """Of the next token, and of the one after each of `ids`."""
        return self.rows_of(tokens, Draft(tuple(ids)))

    def rows_of(self, tokens, draft):
        paths = [tuple(tokens)]
        for id, (row, _) in zip(draft.ids, draft.rows):
            paths.append((*paths[row], id))
        return [self(path) for path in paths]


def decode(model, prompt, own, length, ops=kernels):
    """`length` tokens without drafts, or as many as there are and None."""
    answer, tokens = [], list(prompt)
    while len(answer) < length:
        answer += draw(model(tokens)[None], [own], [len(tokens)], ops)
        if answer[-1] is None:
            break
        own.observe(answer[-1].id)
        tokens.append(answer[-1].id)
    return answer


def decode_with_drafts(model, prompts, samplers, length, drafter, method="coupled", ops=kernels):
    """All of them at once, each round with `drafter(r, tokens, round)`'s drafts. Samplers observe what is accepted."""
    answers, tokens, round = [[] for _ in prompts], [list(prompt) for prompt in prompts], 0
    while running := [r for r, answer in enumerate(answers) if len(answer) < length and None not in answer]:
        drafts = [drafter(r, tokens[r], round) for r in running]
        logits_LV = torch.stack([row for r, draft in zip(running, drafts) for row in model.rows_of(tokens[r], draft)])
        accepted = accept(logits_LV, drafts, [samplers[r] for r in running], [len(tokens[r]) for r in running],
                          method, ops)
        for r, draft, new in zip(running, drafts, accepted):
            assert 1 <= len(new) <= len(draft.ids) + 1
            answers[r] += new
            for drawn in new:
                if drawn is not None:
                    samplers[r].observe(drawn.id)
                    tokens[r].append(drawn.id)
        round += 1
    return [answer[:length] for answer in answers]


# ---- coupled: the tokens of plain decoding

KINDS = [{}, {"temperature": 1}, {"temperature": 0.7, "top_p": 0.9, "logprobs": 2}, {"temperature": 2, "top_k": 5},
         {"repetition_penalty": 1.8}, {"temperature": 1, "repetition_penalty": 0.6, "min_p": 0.05},
         {"presence_penalty": 1.5, "frequency_penalty": 0.7, "logprobs": 0}, {"temperature": 1, "frequency_penalty": 2},
         {"min_tokens": 6, "logit_bias": ((3, 9.0), (4, -math.inf))},
         {"temperature": 1, "min_tokens": 4, "logit_bias": ((5, 4.0),)},
         {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "min_tokens": 6, "logit_bias": ((2, 3.0),)}]


def samplers_of_all_kinds(prompts):
    return [sampler(prompt=prompt, end_ids=[3, 5], vocab=20, seed=i, **kind)
            for i, (prompt, kind) in enumerate(zip(prompts, KINDS))]


@pytest.mark.parametrize("ops_name", ["kernels", "native"])
@pytest.mark.parametrize("seed", range(2))
def test_coupled_tokens_are_those_without_drafts(request, ops_name, seed):
    """Requests of all kinds in one call, each with 0 to 8 drafts that are right as far as chance has it."""
    ops = kernels if ops_name == "kernels" else request.getfixturevalue("native_ops")
    model, length = Scripted(24, seed), 24
    prompts = [[i % 3, 7, 7][: 1 + i % 3] for i in range(len(KINDS))]
    plain = [decode(model, prompt, own, length + 9) for prompt, own in zip(prompts, samplers_of_all_kinds(prompts))]

    def drafter(r, tokens, round):
        dice = torch.Generator().manual_seed(hash((seed, round, r)) % 2**62)
        K, num_right = (int(torch.randint(0, 9, (), generator=dice)) for _ in range(2))
        at = len(tokens) - len(prompts[r])
        ids = [drawn.id for drawn in plain[r][at : at + K]]
        if num_right < K:
            ids[num_right] = (ids[num_right] + 1 + int(torch.randint(0, 22, (), generator=dice))) % 24
        return Draft(tuple(ids))

    got = decode_with_drafts(model, prompts, samplers_of_all_kinds(prompts), length, drafter, ops=ops)
    assert got == [answer[:length] for answer in plain]
    assert got[2][0].top and got[6][0].logprob is not None


@pytest.mark.parametrize("ops_name", ["kernels", "native"])
@pytest.mark.parametrize("method", ["coupled", *(pytest.param(method, marks=pytest.mark.slow) for method in SAMPLED)])
@pytest.mark.parametrize("seed", range(2))
def test_of_a_tree_the_path_stands_that_is_drawn_without_drafts(request, ops_name, method, seed):
    """Under every method; trees of up to 12 tokens, in which the right path ends somewhere, among requests of all
    kinds."""
    ops = kernels if ops_name == "kernels" else request.getfixturevalue("native_ops")
    model, length = Scripted(24, seed), 24
    prompts = [[i % 3, 7, 7][: 1 + i % 3] for i in range(len(KINDS))]
    plain = [decode(model, prompt, own, length + 9) for prompt, own in zip(prompts, samplers_of_all_kinds(prompts))]
    sizes = []

    def drafter(r, tokens, round):
        dice = torch.Generator().manual_seed(hash((seed, round, r)) % 2**62)
        right = [drawn.id for drawn in plain[r][len(tokens) - len(prompts[r]) :]]
        ids, parents, on_path = [], [], [0]  # the rows of the right path
        for row in range(1, 1 + int(torch.randint(0, 13, (), generator=dice))):
            parent = int(torch.randint(0, row, (), generator=dice))
            taken = {id for id, other in zip(ids, parents) if other == parent}
            id = int(torch.randint(0, 24, (), generator=dice))
            if parent == on_path[-1] and id % 2 and len(on_path) <= len(right):
                id = right[len(on_path) - 1]
            if id in taken:
                continue
            if parent == on_path[-1] and len(on_path) <= len(right) and id == right[len(on_path) - 1]:
                on_path.append(len(ids) + 1)
            ids.append(id)
            parents.append(min(parent, len(ids) - 1))
        sizes.append(len(on_path) - 1)
        return Draft(tuple(ids), None, tuple(parents))

    got = decode_with_drafts(model, prompts, samplers_of_all_kinds(prompts), length, drafter, method, ops)
    assert got == [answer[:length] for answer in plain]
    assert max(sizes) >= 3 and min(sizes) == 0


def test_rows_and_paths_of_a_tree():
    draft = Draft((5, 6, 5, 7, 6), None, (0, 0, 2, 3, 1))
    assert draft.rows == [(0, 1), (0, 1), (2, 2), (3, 3), (1, 2)]
    after = {0: 6, 2: 5, 3: 7, 4: 1}
    assert draft.path(after.get) == [0, 2, 3, 4] and draft.path(lambda row: 9) == [0]
    assert draft.cut(2).rows == [(0, 1), (0, 1)] and draft.cut(2).ids == (5, 6)
    assert Draft((4, 4)).rows == [(0, 1), (1, 2)] and Draft((4, 4)).path(lambda row: 4) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("draft", [Draft((1, 2)),
                                   Draft((1, 2), torch.tensor([[0.1, 0.5, 0.4], [0.02, 0.3, 0.68]]).double()),
                                   Draft((1, 2, 2), None, (0, 0, 1))], ids=["certain", "drawn", "tree"])
def test_chances_are_those_that_rejection_gives(draft):
    """Counted over 4,000 rounds of each row that a draft follows."""
    p_LV = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.3, 0.3, 0.4], [0.1, 0.2, 0.7]])
    rows_LV = p_LV[: len(draft.ids) + 1].log()
    given, = chances(rows_LV, [draft], [sampler(vocab=3, temperature=1)])
    stood, judged = Counter(), Counter()
    for seed in range(4000):
        own, drawn_draft = sampler(vocab=3, temperature=1, seed=seed), draft
        if draft.probs_KV is not None:
            keys = [draft_key(seed, 0, j) for j in range(2)]
            ids = kernels.draw(draft.probs_KV.log(), [own.rules_after(0)] * 2, keys).tolist()
            drawn_draft = Draft(tuple(ids), draft.probs_KV)
        accepted, = accept(rows_LV, [drawn_draft], [own], [0], "rejection")
        kept = iter([drawn.id for drawn in accepted[:-1]])
        path = drawn_draft.path(lambda _: next(kept, None))
        judged.update(row for row in path if not math.isnan(given[row]))
        stood.update(path[:-1])
    for row, chance in enumerate(given):
        if math.isnan(chance):
            assert not judged[row]
        else:
            assert judged[row] > 500 and abs(stood[row] / judged[row] - chance) < 4 * (0.25 / judged[row]) ** 0.5


@pytest.mark.parametrize("fields", [{}, {"temperature": 1}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("K", range(9))
def test_all_right_drafts_stand_and_bring_one_more(fields, K):
    model = Scripted(24)
    plain = [drawn.id for drawn in decode(model, [1], sampler(prompt=[1], vocab=24, **fields), 9)]
    for num_right in range(K + 1):
        ids = plain[:num_right] + [(id + 1) % 24 for id in plain[num_right:K]]
        own = sampler(prompt=[1], vocab=24, **fields)
        accepted, = accept(torch.stack(model.rows([1], ids)), [Draft(tuple(ids))], [own], [1])
        assert [drawn.id for drawn in accepted] == plain[: num_right + 1]


@pytest.mark.parametrize("method", ["coupled", *SAMPLED])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_broken_row_ends_the_answer_where_it_would_without_drafts(method, temperature):
    """The tokens before it are kept; what lies after it, or is never reached, does no harm."""
    model, fields = Scripted(6, broken_at=4), {"temperature": temperature, "vocab": 6}
    plain = decode(model, [0], sampler(**fields), 9)
    assert len(plain) == 4 and plain[3] is None
    right = [drawn.id for drawn in plain[:3]]
    for K in range(7):
        ids = (right + [1, 2, 3])[:K]
        got, = decode_with_drafts(model, [[0]], [sampler(**fields)], 9, lambda r, tokens, round: Draft(tuple(ids))
                                  if round == 0 else Draft(), method)
        assert len(got) == 4 and got[3] is None
        if method == "coupled" or temperature == 0:
            assert got == plain
    wrong = ((right[0] + 1) % 6, right[1], right[2], 0)
    got, = accept(torch.stack(model.rows([0], wrong)), [Draft(wrong)], [sampler(**fields)], [1])
    assert got == plain[:1]


@pytest.mark.parametrize("method", ["coupled", *SAMPLED])
def test_nothing_left_to_draw_after_some_drafts(method):
    """Each token may come once; there are three. The ban is a penalty that counts drafts."""
    fields = {"vocab": 3, "temperature": 1, "frequency_penalty": 1e308, "presence_penalty": 1e308}
    got, = accept(torch.zeros(5, 3), [Draft((2, 0, 1, 1))], [sampler(**fields)], [0], method)
    plain = decode(lambda tokens: torch.zeros(3), [], sampler(**fields), 9)
    assert plain[3:] == [None] and sorted(drawn.id for drawn in plain[:3]) == [0, 1, 2]
    assert got == plain[: len(got)] if method == "coupled" else None not in got[:-1]
    stands = [accept(torch.zeros(5, 3), [Draft((2, 0, 1, 1))], [sampler(seed=seed, **fields)], [0], method)[0]
              for seed in range(40)]
    assert max(len(got) for got in stands) == 4 and all((len(got) == 4) == (got[-1] is None) for got in stands)


def test_accepting_changes_no_sampler():
    own = sampler(prompt=[1], vocab=5, repetition_penalty=1.2, frequency_penalty=1, min_tokens=2, end_ids=[0])
    own.observe(2)
    seen, counts = own.seen_V.clone(), own.count_V.clone()
    for method in ("coupled", *SAMPLED):
        accept(torch.zeros(4, 5), [Draft((2, 3, 4))], [own], [2], method)
    assert own.num_drawn == 1 and own.seen_V.equal(seen) and own.count_V.equal(counts)
    assert own.rules_after(0).seen_V is own.seen_V and own.rules_after(0).count_V is own.count_V


def test_rules_along_drafts_are_those_after_them():
    fields = {"prompt": [1], "vocab": 5, "repetition_penalty": 1.2, "frequency_penalty": 1, "min_tokens": 2,
              "end_ids": [0], "temperature": 1}
    ids, logits_V = [2, 2, 4, 0, 6], torch.tensor([1.0, 2, 3, -1, 0])
    along = sampler(**fields).rules_along(Draft(tuple(ids)))
    own = sampler(**fields)
    for id, rules in zip(ids, along[:-1], strict=True):
        assert kernels.adjusted(logits_V, rules).equal(kernels.adjusted(logits_V, own.rules_after(0)))
        if id < 5:
            own.observe(id)
    # 6 counts for nothing.
    assert kernels.adjusted(logits_V, along[-1]).equal(kernels.adjusted(logits_V, own.rules_after(0)))


def test_rules_after_tokens_that_nobody_has_seen_count_them():
    fields = {"vocab": 5, "min_tokens": 3, "end_ids": [0], "temperature": 1}
    ahead, own, logits_V = sampler(**fields), sampler(**fields), torch.tensor([1.0, 2, 3, -1, 0])
    for num in range(5):
        rules, = ahead.rules_along(Draft(), num_unseen=num)
        assert kernels.adjusted(logits_V, rules).equal(kernels.adjusted(logits_V, own.rules_after(0)))
        assert (kernels.adjusted(logits_V, rules)[0] == -math.inf) == (num < 3)
        own.observe(2)


@pytest.mark.parametrize("method", ["coupled", *SAMPLED])
def test_drafts_that_the_tokenizer_does_not_know_never_stand(method):
    """The head is wider than the vocabulary, and a drafter's mass may lie there."""
    logits_LV = torch.tensor([[0.0, 1, 2, 50]]).expand(3, -1)
    q_KV = torch.tensor([[0.1, 0.1, 0.1, 0.7]] * 2, dtype=torch.float64)
    for seed in range(20):
        for draft in (Draft((3, 3)), Draft((3, 3), q_KV)):
            own = sampler(vocab=3, temperature=1, seed=seed, repetition_penalty=1.1, presence_penalty=0.1)
            got, = accept(logits_LV, [draft], [own], [0], method)
            assert len(got) == 1 and got[0].id < 3


# ---- what the draw draws from


@pytest.mark.parametrize("fields, expected", [
    ({"temperature": 1}, [0.1, 0.2, 0.3, 0.4]), ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
    ({}, [0, 0, 0, 1]), ({"temperature": 1, "top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
    ({"temperature": 1, "top_p": 0.71}, [0, 2 / 9, 3 / 9, 4 / 9]),
    ({"temperature": 1, "min_p": 0.7}, [0, 0, 3 / 7, 4 / 7]),
    ({"temperature": 1, "top_k": 3, "top_p": 0.4}, [0, 0, 0, 1]),
    ({"temperature": 1, "vocab": 3}, [1 / 6, 2 / 6, 3 / 6, 0]),
    ({"temperature": 1, "logit_bias": ((3, -math.inf), (0, math.log(2)))}, [2 / 7, 2 / 7, 3 / 7, 0]),
    ({"temperature": 1, "logit_bias": tuple((id, -math.inf) for id in range(4))}, [0, 0, 0, 0]),
    ({"logit_bias": tuple((id, -math.inf) for id in range(4))}, [0, 0, 0, 0])])
def test_distribution_by_hand(fields, expected):
    logits_LV = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    p_LV = distribution(logits_LV, [sampler(**fields).rules_after(0)])
    assert p_LV.dtype == torch.float64 and p_LV[0].tolist() == pytest.approx(expected, abs=1e-15)
    assert [p > 0 for p in p_LV[0].tolist()] == [p > 0 for p in expected]


@settings(max_examples=30)
@given(st.data(), st.sampled_from([1, 2, 7, 300]))
def test_distributions_are_what_is_drawn_from(data, V):
    """A row of zeros where the draw draws nothing; else it sums to 1 and what is drawn has a share."""
    logits_LV = data.draw(rows_of_logits(V))[None]
    rules = data.draw(rules_of_all_kinds(V))
    p_V, = distribution(logits_LV, [rules])
    for id in kernels.draw(logits_LV.expand(5, -1), [rules] * 5, [noise_key(1, i, "draw") for i in range(5)]).tolist():
        assert (p_V == 0).all() if id < 0 else p_V[id] > 0 and abs(p_V.sum() - 1) < 1e-12
    assert not p_V[rules.vocab :].any()


def chi_square_is_usual(counts, expected):
    """Below the 99.99 % quantile (Wilson and Hilferty 1931). Rare outcomes are counted together."""
    assert sum(counts.values()) == pytest.approx(sum(expected.values())) and set(counts) <= set(expected)
    rare = [outcome for outcome in expected if expected[outcome] < 5]
    cells = [(counts[outcome], expected[outcome]) for outcome in expected if expected[outcome] >= 5]
    if sum(expected[outcome] for outcome in rare) >= 5:
        cells.append((sum(counts[outcome] for outcome in rare), sum(expected[outcome] for outcome in rare)))
    freedom = len(cells) - 1
    chi_square = sum((count - mean) ** 2 / mean for count, mean in cells)
    return chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("fields", [
    {}, {"temperature": 0.5, "top_k": 4}, {"top_p": 0.8, "min_p": 0.1}, {"repetition_penalty": 1.5, "top_p": 0.9},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": ((2, 1.0), (5, -2.0))}])
def test_draws_follow_their_distribution(native_ops, fields):
    num_draws, own = 20_000, sampler(prompt=[1, 2], vocab=10, **({"temperature": 1} | fields))
    own.observe(4), own.observe(4), own.observe(7)
    logits_LV = randn(8, 12)[None] * 1.5
    keys = [noise_key(11, position, "draw") for position in range(num_draws)]
    counts = Counter(native_ops.draw(logits_LV.expand(num_draws, -1).contiguous(), [own.rules_after(0)] * num_draws,
                                     keys).tolist())
    p_V = distribution(logits_LV, [own.rules_after(0)])[0].tolist()
    assert chi_square_is_usual(counts, {id: num_draws * p for id, p in enumerate(p_V) if p > 0})


# ---- rejection and block: all that can happen, summed


class Target:
    """What a scripted model, decoded with `fields`, draws from after each sequence."""

    def __init__(self, V, prompt=(), seed=0, spread=1.5, **fields):
        self.model, self.prompt, self.V = Scripted(V, seed, spread), tuple(prompt), V
        self.rows = cache(self.rows)
        self.new_sampler = lambda seed=0: sampler(prompt=prompt, vocab=V, seed=seed, **({"temperature": 1} | fields))

    def rows(self, ids):
        """p_KV of the token after the prompt, and after each of `ids`: by the rules that accept would use."""
        rules = self.new_sampler().rules_along(Draft(tuple(ids)))
        return distribution(torch.stack(self.model.rows(self.prompt, ids)), rules)

    def joint(self, length):
        """The probability of each sequence of `length` tokens, by samplers that observe one token after another."""
        chances = {(): 1.0}
        for _ in range(length):
            longer = {}
            for ids, chance in chances.items():
                own = self.new_sampler()
                for id in ids:
                    own.observe(id)
                p_V = distribution(self.model(self.prompt + ids)[None], [own.rules_after(0)])[0].tolist()
                longer |= {(*ids, id): chance * p for id, p in enumerate(p_V) if p > 0}
            chances = longer
        return chances


def any_q(seed, V):
    return cache(lambda ids: torch.softmax(randn(hash((seed, *ids)) % 2**62, V).double() * 1.5, 0))


def half_q(seed, V):
    """Of some ids only: a drafter with a smaller vocabulary."""
    @cache
    def q(ids):
        x_V = randn(hash((seed, *ids)) % 2**62, V).double()
        return torch.softmax(x_V.masked_fill(x_V < x_V.median(), -math.inf), 0)
    return q


def certain_q(seed, V):
    return cache(lambda ids: one_hot(any_q(seed, V)(ids).argmax(), V).double())


def q_is_p(target):
    return lambda ids: target.rows(ids)[-1]


def exhaust(odds, target, q, K):
    """What comes of K drafts from `q`: the chance of each sequence of K + 1 tokens, where plain decoding goes on after
    the last of them that verification gives; and how many drafts stand on average."""
    chances, mean_kept = Counter(), 0.0

    def go_on(ids, chance):
        if chance and len(ids) == K + 1:
            chances[ids] += chance
        elif chance:
            for id, p in enumerate(target.rows(ids)[-1].tolist()):
                go_on((*ids, id), chance * p)

    for ids in product(range(target.V), repeat=K):
        q_KV = torch.stack([q(ids[:j]) for j in range(K)])
        drafted = math.prod(q_KV[j, id].item() for j, id in enumerate(ids))
        if not drafted:
            continue
        p_LV = target.rows(ids)
        chance_K, weight_K = odds(p_LV[:K], q_KV, torch.tensor(ids))
        at_least = [1.0, *chance_K.tolist(), 0.0]
        assert sorted(at_least, reverse=True) == at_least
        for kept in range(K + 1):
            chance = drafted * (at_least[kept] - at_least[kept + 1])
            mean_kept += chance * kept
            next_V = p_LV[K] if kept == K else residual(p_LV[kept], q_KV[kept], float(weight_K[kept]))
            for id, share in enumerate(next_V.tolist()):
                go_on((*ids[:kept], id), chance * share)
    return chances, mean_kept


TARGETS = {"plain": {}, "top-k": {"top_k": 2}, "top-p": {"top_p": 0.6}, "hot min-p": {"temperature": 2, "min_p": 0.3},
           "penalties": {"repetition_penalty": 2.0, "frequency_penalty": 0.7, "prompt": (1,)},
           "all": {"top_k": 3, "top_p": 0.9, "presence_penalty": 1.0, "logit_bias": ((0, 0.5),), "temperature": 0.8},
           "certain": {"temperature": 0}, "certain but penalised": {"temperature": 0, "presence_penalty": 2.0}}
DRAFTERS = {"any": any_q, "half": half_q, "certain": certain_q}


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize("drafter", [*DRAFTERS, "p"])
@pytest.mark.parametrize("V, K", [(4, 1), (3, 2), (3, 3)])
def test_verification_preserves_the_distribution(target_name, drafter, V, K):
    """To rounding, over whole sequences; and block keeps at least as many drafts as rejection."""
    target = Target(V, seed=5, **TARGETS[target_name])
    q = q_is_p(target) if drafter == "p" else DRAFTERS[drafter](9, V)
    expected, mean_kept = target.joint(K + 1), {}
    for method, odds in ODDS.items():
        chances, mean_kept[method] = exhaust(odds, target, q, K)
        for ids in {*chances, *expected}:
            assert chances[ids] == pytest.approx(expected.get(ids, 0), abs=1e-12)
    assert mean_kept["block"] >= mean_kept["rejection"] - 1e-12
    if K == 1:
        assert mean_kept["rejection"] == pytest.approx(float(torch.minimum(target.rows(())[0], q(())).sum()), abs=1e-12)
    if drafter == "p":
        assert mean_kept["rejection"] == pytest.approx(K)
    if drafter == "certain":
        assert mean_kept["block"] == pytest.approx(mean_kept["rejection"], abs=1e-12)


def test_block_keeps_more():
    target = Target(3, seed=5)
    rejection, block = (exhaust(odds, target, any_q(9, 3), 2)[1] for odds in (rejection_odds, block_odds))
    assert block > rejection + 0.01


def test_what_is_left_of_equal_distributions():
    """Only rounding makes a draft fall there."""
    p_V = torch.tensor([0.5, 0.5, 0], dtype=torch.float64)
    assert residual(p_V, p_V, 1).equal(p_V)
    assert residual(p_V, torch.tensor([1.0, 0, 0]).double(), 1).tolist() == [0, 1, 0]
    assert residual(p_V, torch.tensor([0.1, 0.9, 0]).double(), 0.6).tolist() == pytest.approx([1, 0, 0])


def test_a_draft_that_its_distribution_cannot_give_is_a_bug():
    with pytest.raises(AssertionError, match="cannot have been drawn"):
        rejection_odds(torch.tensor([[0.5, 0.5]]).double(), torch.tensor([[1.0, 0]]).double(), torch.tensor([1]))


@pytest.mark.parametrize("method", SAMPLED)
def test_at_temperature_0_all_methods_judge_alike(method):
    """Sampled drafts too: their distributions do not matter to a target that is certain."""
    model, K = Scripted(8), 4
    own = [sampler(vocab=8, prompt=[1], repetition_penalty=1.3, logprobs=1, seed=seed) for seed in range(60)]
    q_KV = torch.softmax(randn(3, K, 8).double(), -1)
    plain = [drawn.id for drawn in decode(model, [1], own[0], K)]
    own[0] = sampler(vocab=8, prompt=[1], repetition_penalty=1.3, logprobs=1)
    drafts = [Draft((*plain[: i % (K + 1)], *[(id + 1) % 8 for id in plain[i % (K + 1) :]]), q_KV) for i in range(60)]
    rows_LV = torch.stack([row for draft in drafts for row in model.rows([1], draft.ids)])
    got = accept(rows_LV, drafts, own, [1] * 60, method)
    assert got == accept(rows_LV, drafts, own, [1] * 60)
    assert [len(tokens) for tokens in got[: K + 1]] == list(range(1, K + 2))


# ---- rejection and block: what does happen, counted


def drafted(seed, start, q, K):
    """K drafts from `q`: each the first id at which the sum of probabilities passes a number of its own."""
    ids, probs = (), []
    for j in range(K):
        probs.append(q(ids))
        number, sums = coin(draft_key(seed, start, j)), accumulate(probs[-1].tolist())
        ids += (next(id for id, total in enumerate(sums) if total > number),)
    return Draft(ids, torch.stack(probs))


def counts_of_answers(method, target, drafter, length, num_answers, ops):
    samplers = [target.new_sampler(seed) for seed in range(num_answers)]
    answers = decode_with_drafts(target.model, [target.prompt] * num_answers, samplers, length, drafter, method, ops)
    return Counter(tuple(drawn.id for drawn in answer) for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("method, drafts", [("rejection", "certain"), ("rejection", "any"), ("block", "any")])
def test_answers_follow_the_distribution(native_ops, method, drafts):
    """50,000 tokens in 12,500 answers of four, each with its own seed, from rounds of three and two drafts by turns."""
    target, num_answers, q = Target(3, seed=3, spread=1, **TARGETS["all"]), 12_500, DRAFTERS[drafts](2, 3)

    def drafter(r, tokens, round):
        draft = drafted(r, len(tokens), lambda ids: q((*tokens, *ids)), 3 - round % 2)
        return Draft(draft.ids) if drafts == "certain" else draft

    counts = counts_of_answers(method, target, drafter, 4, num_answers, native_ops)
    assert chi_square_is_usual(counts, {ids: num_answers * p for ids, p in target.joint(4).items()})


@pytest.mark.slow
@pytest.mark.parametrize("method", SAMPLED)
def test_rounds_look_at_no_number_twice(native_ops, method):
    """Rounds meet positions again that earlier ones had drafts for. Where p is flat and q steep, "block" with coins or
    drafts keyed by position alone is off by a twentieth of the probability."""
    target, num_answers = Target(2, spread=0.1), 12_500
    q = cache(lambda ids: torch.tensor([0.9, 0.1], dtype=torch.float64))
    counts = counts_of_answers(method, target, lambda r, tokens, round: drafted(r, len(tokens), q, 3), 4, num_answers,
                               native_ops)
    assert chi_square_is_usual(counts, {ids: num_answers * p for ids, p in target.joint(4).items()})


@pytest.mark.parametrize("method", SAMPLED)
def test_first_tokens_follow_the_distribution(native_ops, method):
    """A quick look at what the slow test looks at closely."""
    target, num_answers = Target(3, seed=3, spread=1, top_p=0.9, presence_penalty=1.0), 600
    q = any_q(2, 3)
    counts = counts_of_answers(method, target, lambda r, tokens, round: drafted(r, len(tokens), q, 2), 2, num_answers,
                               native_ops)
    assert chi_square_is_usual(counts, {ids: num_answers * p for ids, p in target.joint(2).items()})


@pytest.mark.parametrize("method", SAMPLED)
def test_drafts_from_the_draws_own_distribution_all_stand(method):
    """Which as certain ones they would not: the distributions that are given are those that are used."""
    target = Target(4, seed=3, spread=1, **TARGETS["penalties"])
    for seed in range(40):
        draft = drafted(seed, 1, q_is_p(target), 4)
        rows_LV = torch.stack(target.model.rows(target.prompt, draft.ids))
        got, = accept(rows_LV, [draft], [target.new_sampler(seed)], [1], method)
        assert [drawn.id for drawn in got[:4]] == list(draft.ids) and len(got) == 5


@pytest.mark.parametrize("method", SAMPLED)
def test_the_coin_decides_and_the_residual_replaces(method):
    """With the numbers of (seed, position, purpose) that the documentation names, and no others."""
    logits_LV, id_C, outcomes = QUARTET.expand(3, -1), torch.tensor([0, 1, 2]), Counter()
    for seed in range(60):
        got, = accept(logits_LV, [Draft((3, 3))], [sampler(temperature=1, seed=seed)], [5], method)
        num_kept = sum(coin(noise_key(seed, 5, "coin")) < chance for chance in (0.4, 0.4 * 0.4))
        if num_kept == 2:
            last = draw(logits_LV[2:], [sampler(temperature=1, seed=seed)], [7])[0].id
        else:
            last = int(id_C[(QUARTET[:3] + gumbel(noise_key(seed, 5 + num_kept, "residual"), id_C)).argmax()])
        assert [drawn.id for drawn in got] == [3] * num_kept + [last]
        outcomes[num_kept, last] += 1
    assert {kept for kept, _ in outcomes} == {0, 1, 2} and len(outcomes) > 6


@pytest.mark.parametrize("method", SAMPLED)
def test_logprobs_of_accepted_tokens_are_of_their_rows(method):
    model, lengths = Scripted(5), set()
    ids = tuple(drawn.id for drawn in decode(model, [0], sampler(vocab=5), 3))
    for seed in range(40):
        own = sampler(vocab=5, temperature=1, top_k=3, logprobs=1, seed=seed)
        got, = accept(torch.stack(model.rows([0], ids)), [Draft(ids)], [own], [1], method)
        lengths.add(len(got))
        for row_V, drawn in zip(model.rows([0], ids), got):
            assert drawn.logprob == pytest.approx(torch.log_softmax(row_V, 0)[drawn.id].item(), abs=1e-6)
            assert drawn.top[0][0] == int(row_V.argmax())
    assert {1, 2, 4} <= lengths


# ---- noise


def test_noises_of_different_purposes_are_independent():
    """Of the same seed and position: each of three ids' numbers, and the coin, against all others."""
    rows = []
    for position in range(10_000):
        keys = [noise_key(7, position, purpose) for purpose in PURPOSES]
        keys += [draft_key(7, position, 0), draft_key(7, position, 1), draft_key(7, position + 1, 0),
                 noise_key(7, position + 1, "draw"), noise_key(8, position, "draw")]
        rows.append(keys)
    key_NK = torch.tensor([[key - 2**64 if key >= 2**63 else key for key in keys] for keys in rows])
    columns = [gumbel(0, key_NK[:, i].contiguous() + j) for i in range(key_NK.shape[1]) for j in range(2)]
    columns += [torch.tensor([coin(keys[i]) for keys in rows], dtype=torch.float64) for i in range(len(rows[0]))]
    correlation = torch.corrcoef(torch.stack(columns)).fill_diagonal_(0)
    assert correlation.abs().max() < 0.05  # five standard deviations


def test_coins_are_uniform():
    coins = torch.tensor([coin(noise_key(3, position, "coin")) for position in range(20_000)], dtype=torch.float64)
    assert 0 < coins.min() and coins.max() < 1
    assert chi_square_is_usual(Counter((coins * 50).long().tolist()), {cell: 400 for cell in range(50)})
    assert coin(0) > 0 and coin(2**64 - 1) < 1


def test_every_purpose_and_draft_has_its_own_key():
    keys = [noise_key(seed, position, purpose) for seed in (0, 1) for position in range(20) for purpose in PURPOSES]
    keys += [draft_key(seed, start, j) for seed in (0, 1) for start in range(20) for j in range(8)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("method", ["coupled", *SAMPLED])
@settings(max_examples=15)
@given(order=st.permutations(range(len(KINDS))), num=st.integers(1, len(KINDS)))
def test_requests_do_not_see_each_other(method, order, num):
    """The same requests, some of them, in any order: the same tokens."""
    model, q = Scripted(20), any_q(4, 20)
    drafts = [drafted(r, 1, q, r % 4) if r % 4 else Draft() for r in range(len(KINDS))]

    def accepted(requests):
        samplers = samplers_of_all_kinds([[r] for r in range(len(KINDS))])
        rows_LV = torch.stack([row for r in requests for row in model.rows([r], drafts[r].ids)])
        return accept(rows_LV, [drafts[r] for r in requests], [samplers[r] for r in requests], [1] * len(requests),
                      method)

    assert accepted(order[:num]) == [accepted([r])[0] for r in order[:num]]


def test_without_drafts_every_method_draws():
    logits_LV = randn(1, len(KINDS), 20)
    for method in ("coupled", *SAMPLED):
        samplers = samplers_of_all_kinds([[r] for r in range(len(KINDS))])
        got = accept(logits_LV, [Draft()] * len(KINDS), samplers, range(len(KINDS)), method)
        assert [tokens[0] for tokens in got] == draw(logits_LV, samplers, range(len(KINDS)))
        assert all(len(tokens) == 1 for tokens in got)


def test_nothing_to_accept():
    assert accept(torch.empty(0, 4), [], [], []) == []
    assert isinstance(draw(QUARTET[None], [sampler()], [0])[0], Drawn)
