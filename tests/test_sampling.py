"""sampling.py and the draw of kernels.py: each transform against a hand-made answer, the draw against the distribution
it must have; and the native draw, which must be the same to the last id."""

import math

import pytest
import torch
from draws import accept
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import DrawRules, adjusted, candidates, gumbel
from sampling import NO_DRAFT, Sampler, SamplingParams, noise_key

QUARTET = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sampler(prompt=(), end_ids=(), vocab=4, **fields):
    return Sampler(SamplingParams(**({"seed": 0} | fields)), prompt, end_ids, vocab)


def draw(logits_LV, samplers, positions, ops=kernels):
    """One token for each row: without drafts."""
    return [drawn for drawn, in accept(logits_LV, [NO_DRAFT] * len(samplers), samplers, positions, ops=ops)]


def draw_one(logits_V, position=0, **fields):
    return draw(logits_V[None], [sampler(vocab=len(logits_V), **fields)], [position])[0].id


def frequencies(logits_V, num_draws=2000, **fields):
    s = sampler(vocab=len(logits_V), **fields)
    logits_LV = logits_V.expand(num_draws, -1)
    ids = [d.id for d in draw(logits_LV, [s] * num_draws, range(num_draws))]
    return torch.bincount(torch.tensor(ids), minlength=len(logits_V)) / num_draws


# ---- parameters


@pytest.mark.parametrize("fields", [
    {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -5}, {"top_p": 0},
    {"top_p": 1.5}, {"top_p": -0.1}, {"min_p": 1}, {"min_p": -0.1}, {"repetition_penalty": 0}, {"seed": -1},
    {"max_tokens": 0}, {"max_tokens": -1}, {"min_tokens": -1}, {"min_tokens": 5, "max_tokens": 4}, {"stop": ("",)},
    {"stop": ("", "x")}, {"stop": ("a\ud800",)}, {"logprobs": -1}, {"num_samples": 0}, {"presence_penalty": math.inf},
    {"logit_bias": ((0, math.nan),)}, {"logit_bias": ((0, math.inf),)}])
def test_values_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=list(fields)[0].replace("stop", "stop string").split("_")[0]):
        SamplingParams(**fields)


def test_fields_by_any_spelling():
    params = SamplingParams.from_fields({"max-new-tokens": 7, "temp": 0.5, "repeat_penalty": 1.1, "stop": "x",
                                         "logit_bias": {"3": -1}, "top_p": None, "stop-token-ids": [1, 2.0]})
    assert params == SamplingParams(max_tokens=7, temperature=0.5, repetition_penalty=1.1, stop=("x",),
                                    logit_bias=((3, -1.0),), stop_token_ids=(1, 2))


@pytest.mark.parametrize("fields, message", [
    ({"topk": 1}, "unknown sampling field 'topk'"), ({"top_k": 1.5}, "whole number"), ({"top_k": True}, "whole number"),
    ({"temperature": "hot"}, "must be a number"), ({"stop": 5}, "string"), ({"logit_bias": {"x": 1}}, "'x'"),
    ({"logit_bias": {"0": "inf"}}, "number"), ({"ignore_eos": 1}, "true or false"), ({"stop_token_ids": 1}, "list"),
    ({"max_tokens": 1, "n_predict": 2}, "second time"), ({"top_k": math.nan}, "whole number"),
    ({"max_tokens": math.inf}, "whole number"), ({"temperature": 10**400}, "range"), ({"logit_bias": 5}, "biases"),
    ({"logit_bias": [1]}, "biases"), ({"logit_bias": [[1.5, 2]]}, "whole number"),
    ({"logit_bias": {"1": 10**400}}, "range"), ({"seed": 10**400}, "seed")])
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_fields(fields)


@pytest.mark.parametrize("fields", [{"logit_bias": ((5, 1.0),)}, {"logit_bias": ((-1, 1.0),)},
                                    {"stop_token_ids": (50,)}])
def test_ids_outside_the_vocabulary_are_refused(fields):
    with pytest.raises(ValueError, match="0 to 4"):
        SamplingParams(**fields).check_ids(5)


def test_samples_have_seeds_of_their_own():
    assert [p.seed for p in SamplingParams(seed=7, num_samples=3).samples()] == [7, 8, 9]
    first, second = (next(SamplingParams().samples()).seed for _ in range(2))
    assert first != second


# ---- noise


def test_noise_is_gumbel_and_depends_on_every_part_of_its_key():
    ids = torch.arange(100_000)
    noise = gumbel(noise_key(1, 2, "draw"), ids)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.03)
    assert torch.equal(gumbel(noise_key(1, 2, "draw"), ids[500:600]), noise[500:600])
    for seed, position in ((2, 2), (1, 3), (2**63 - 1, 2)):
        other = gumbel(noise_key(seed, position, "draw"), ids)
        assert abs(torch.corrcoef(torch.stack((noise, other)))[0, 1]) < 0.02


def test_logarithm():
    """Of what noise takes it: numbers from 2^-53 to 1 - 2^-53, and their logarithms' opposites."""
    x = torch.cat((torch.logspace(-16, 1.5, 10_000, dtype=torch.float64), 1 - torch.logspace(-16, -1, 1000).double()))
    exact = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    assert ((kernels.log(x) - exact).abs() <= exact.abs() * 2.0**-51).all()


def test_shares_are_exponentials_in_whole_numbers():
    x = torch.cat((-torch.logspace(-18, 2.5, 10_000, dtype=torch.float64), torch.tensor([0, -math.inf])))
    exact = torch.tensor([math.exp(value) * 2**40 for value in x.tolist()], dtype=torch.float64)
    assert ((kernels.shares(x) - exact).abs() <= 0.52).all() and kernels.shares(x)[-2:].tolist() == [2**40, 0]


# ---- transforms


@pytest.mark.parametrize("temperature", [1e-2, 1e-5, 1e-10, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_temperatures_tend_to_the_argmax(temperature, dtype):
    logits_V = torch.tensor([60, -60, 60.5, 0], dtype=dtype)
    assert {draw_one(logits_V, position=i, temperature=temperature) for i in range(20)} == {2}


def test_argmax_takes_the_lowest_id_on_ties():
    assert draw_one(torch.tensor([0.0, 5, 5, 1])) == 1
    assert draw_one(torch.tensor([0.0, 5, 5, 1]), logit_bias=((0, 5.0),)) == 0


@pytest.mark.parametrize("fields, kept", [
    ({"top_k": 2, "top_p": 0.5}, {3}), ({"top_k": 1, "top_p": 0.8}, {3}), ({"min_p": 0.7}, {2, 3}),
    ({"top_p": 1e-8}, {3}), ({"top_p": 1e-3}, {3}), ({"top_p": 0.7}, {2, 3}), ({"top_p": 0.71}, {1, 2, 3}),
    ({"top_k": 0}, {0, 1, 2, 3}), ({"top_k": -1}, {0, 1, 2, 3}), ({"top_k": 10**6}, {0, 1, 2, 3}),
    ({"top_k": 3, "min_p": 0.7}, {2, 3}), ({"min_p": 0.4, "top_p": 0.6}, {2, 3}), ({}, {0, 1, 2, 3})])
def test_filters_keep_what_they_should(fields, kept):
    # QUARTET sums in the order .4 .3 .2 .1; a nucleus of .7 needs .4 + .3, which rounds to just under .7 in float32
    scaled_V = QUARTET.double() - QUARTET.max().double()
    assert set(candidates(scaled_V, DrawRules(4, temperature=1, **fields)).tolist()) == kept


def test_filters_on_ties_keep_the_lowest_ids():
    equal_V = torch.zeros(1000, dtype=torch.float64)
    assert candidates(equal_V, DrawRules(1000, top_k=3)).tolist() == [0, 1, 2]
    assert candidates(equal_V, DrawRules(1000, top_p=0.005)).tolist() == [0, 1, 2, 3, 4]


@given(st.integers(0, 2**32), st.floats(0.05, 1), st.integers(0, 700), st.floats(0, 0.5), st.floats(0.2, 30))
def test_filters_equal_a_plain_sort(seed, top_p, top_k, min_p, spread):
    """The nucleus is found by sorting only what is needed; here the same set by sorting everything, with a loop."""
    x_V = torch.randn(600, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    x_V = (x_V * 4).round() / 4  # many ties
    x_V -= x_V.max()
    order = sorted(range(600), key=lambda id: (-x_V[id], id))
    order = [id for id in order if min_p == 0 or x_V[id] >= math.log(min_p)][: top_k or None]
    share = torch.softmax(x_V[order], 0).tolist()
    kept, mass = [], 0.0
    for id, p in zip(order, share):
        kept.append(id)
        mass += p
        if mass >= top_p:
            break
    got = candidates(x_V, DrawRules(600, top_p=top_p, top_k=top_k, min_p=min_p)).tolist()
    if top_p == 1:
        kept = order
    boundary = abs(mass - top_p) < 1e-9 or abs(mass - share[len(kept) - 1] - top_p) < 1e-9  # rounding decides
    assert got == sorted(kept) or boundary


@pytest.mark.slow
def test_draws_follow_the_distribution():
    expected = {"temperature": 1}, QUARTET.exp()
    for fields, share in (expected, ({"temperature": 0.5}, QUARTET.exp() ** 2 / 0.30),
                          ({"temperature": 1, "min_p": 0.7}, torch.tensor([0, 0, 3 / 7, 4 / 7])),
                          ({"temperature": 1, "top_k": 2}, torch.tensor([0, 0, 3 / 7, 4 / 7]))):
        assert frequencies(QUARTET, **fields) == pytest.approx(share, abs=0.03)


def test_penalties():
    logits_V = torch.tensor([2.0, -1.0, 1.9])
    penalized = sampler(prompt=[0, 1, 1], vocab=3, repetition_penalty=1.3)
    assert adjusted(logits_V, penalized.rules_after(0)).tolist() == pytest.approx([2 / 1.3, -1.3, 1.9])
    assert draw(logits_V[None], [penalized], [3])[0].id == 2
    counted = sampler(prompt=[0, 0], vocab=3, presence_penalty=5, frequency_penalty=0.5)
    # The prompt does not count.
    assert adjusted(logits_V, counted.rules_after(0)).tolist() == pytest.approx([2.0, -1.0, 1.9])
    counted.observe(0), counted.observe(0), counted.observe(2)
    assert adjusted(logits_V, counted.rules_after(0)).tolist() == pytest.approx([2 - 5 - 1, -1, 1.9 - 5 - 0.5])
    penalized.observe(2)
    assert adjusted(logits_V, penalized.rules_after(0)).tolist() == pytest.approx([2 / 1.3, -1.3, 1.9 / 1.3])


def test_min_tokens_bans_every_end_until_then():
    s = sampler(end_ids=[1, 3], min_tokens=2)
    logits_LV = torch.tensor([[0.0, 9, 1, 9]])
    drawn = []
    for position in range(3):
        drawn.append(draw(logits_LV, [s], [position])[0].id)
        s.observe(drawn[-1])
    assert drawn == [2, 2, 1]


def test_a_banned_row_beside_a_sampled_one():
    logits_LV = torch.tensor([[5.0, 4, 3, 1], [1, 2, 3, 4]])
    banned = sampler(logit_bias=((0, -math.inf), (1, -math.inf), (2, -math.inf)))
    sampled = sampler(temperature=1, top_p=0.9, seed=5)
    for position in range(30):
        together = [d.id for d in draw(logits_LV, [banned, sampled], [position] * 2)]
        assert together == [3, draw(logits_LV[1:], [sampled], [position])[0].id]


def test_nothing_left_to_draw_is_no_token():
    assert draw(torch.zeros(1, 2), [sampler(vocab=2, end_ids=[0, 1], min_tokens=1)], [0]) == [None]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_that_are_not_finite_draw_nothing_and_harm_nobody(bad, temperature):
    logits_LV = torch.tensor([[0.0, bad, 1, 2], [0, 1, 2, 30]])
    drawn = draw(logits_LV, [sampler(temperature=temperature)] * 2, [0, 0])
    assert drawn[0] is None and drawn[1].id == 3


def test_ids_beyond_the_tokenizer_are_never_drawn():
    logits_V = torch.tensor([0.0, 1, 2, 50])
    assert draw(logits_V[None], [sampler(vocab=3)], [0])[0].id == 2
    assert draw(logits_V[None], [sampler(vocab=3, temperature=1)], [0])[0].id < 3


# ---- log-probabilities


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5}, {"temperature": 2, "top_p": 0.1},
                                    {"repetition_penalty": 1.5}, {"temperature": 1, "logit_bias": ((0, 9.0),)}])
def test_logprobs_are_of_the_untouched_distribution(fields):
    drawn = draw(QUARTET[None], [sampler(prompt=[3], logprobs=3, **fields)], [0])[0]
    assert [id for id, _ in drawn.top] == [3, 2, 1]
    assert [p for _, p in drawn.top] == pytest.approx([math.log(0.4), math.log(0.3), math.log(0.2)], abs=1e-6)
    assert drawn.logprob == pytest.approx(QUARTET[drawn.id].item(), abs=1e-6)


def test_logprobs_none_zero_and_more_than_there_are():
    assert draw(QUARTET[None], [sampler()], [0])[0].logprob is None
    zero = draw(QUARTET[None], [sampler(logprobs=0)], [0])[0]
    assert zero.logprob is not None and zero.top == ()
    assert len(draw(QUARTET[None], [sampler(logprobs=9)], [0])[0].top) == 4


@settings(max_examples=20)
@given(st.integers(0, 2**40), st.permutations(range(5)))
def test_rows_do_not_see_each_other(seed, order):
    """The same rows in another order draw the same tokens."""
    logits_LV = randn(seed, 5, 50)
    kinds = [{"temperature": 0}, {"temperature": 1}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 3, "temperature": 2},
             {"temperature": 0, "logprobs": 2}]
    samplers = [sampler(vocab=50, seed=seed + i, **kind) for i, kind in enumerate(kinds)]
    straight = draw(logits_LV, samplers, range(5))
    shuffled = draw(logits_LV[list(order)], [samplers[i] for i in order], list(order))
    assert [straight[i] for i in order] == shuffled


# ---- the native draw


def by_all_instructions(native_ops, call):
    """What `call` gives with every set of instructions that this CPU has: the same bits."""
    from instructions import BEST, LEVELS

    results = []
    try:
        for level in LEVELS:
            native_ops.set_isa(level)
            results.append(call())
    finally:
        native_ops.set_isa(BEST)
    assert all(torch.equal(other, results[0]) for other in results)
    return results[0]


def native_ids(native_ops, logits_LV, rules, keys):
    """What it draws."""
    return by_all_instructions(native_ops, lambda: native_ops.draw(logits_LV, rules, keys)).tolist()


def assert_native_distribution(native_ops, logits_LV, rules):
    """It is the reference's as far as doubles go, over just the ids that the reference draws from."""
    ours_LV = by_all_instructions(native_ops, lambda: native_ops.distribution(logits_LV, rules))
    p_LV = kernels.distribution(logits_LV, rules)
    assert ours_LV.dtype == torch.float64 and torch.allclose(ours_LV, p_LV, rtol=1e-12, atol=1e-300)
    assert torch.equal(ours_LV > 1e-300, p_LV > 1e-300)
    assert ((ours_LV.sum(-1) - (p_LV > 0).any(-1).double()).abs() < 1e-12).all()
    for l in range(len(rules)):
        assert torch.equal(native_ops.distribution(logits_LV[l : l + 1], rules[l : l + 1])[0], ours_LV[l])


@st.composite
def rows_of_logits(draw_, V):
    """Of very different spreads, with ties, with outliers, now and then damaged."""
    x_V = randn(draw_(st.integers(0, 2**40)), V) * 10 ** draw_(st.floats(-12, 12))
    kind = draw_(st.sampled_from(["as they are", "few values", "equal", "outlier", "usual", "quarters"]))
    if kind == "few values":
        x_V = (x_V / x_V.abs().max() * draw_(st.sampled_from([1, 3, 40]))).round()
    if kind == "equal":
        x_V = torch.zeros(V)
    if kind == "outlier":
        x_V[draw_(st.integers(0, V - 1))] = draw_(st.sampled_from([1e30, -1e30, 3e38, -3e38, 50]))
    if kind == "usual":
        x_V = randn(draw_(st.integers(0, 2**40)), V) * 2.5
    if kind == "quarters":
        x_V = (randn(draw_(st.integers(0, 2**40)), V) * 10).round() / 4
    if draw_(st.integers(0, 19)) == 0:
        x_V[draw_(st.integers(0, V - 1))] = draw_(st.sampled_from([math.nan, math.inf, -math.inf]))
    return x_V


@st.composite
def rules_of_all_kinds(draw_, V):
    vocab = draw_(st.sampled_from([V, V, V, (V + 1) // 2]))
    fields = {"temperature": draw_(st.sampled_from([0, 1, 0.7, 1e-6, 1e4, 1e-320, 1e308]) | st.floats(0.01, 10)),
              "top_k": draw_(st.sampled_from([0, 0, -1, 1, 2, 40, V, V + 5])),
              "top_p": draw_(st.sampled_from([1, 1, 0.5, 0.95, 0.999999, 1e-30, 1 - 2**-53]) | st.floats(0.01, 1)),
              "min_p": draw_(st.sampled_from([0, 0, 0.05, 1e-9, 1e-300, 0.999]) | st.floats(0, 0.999))}
    ids = torch.randint(0, vocab, (draw_(st.sampled_from([0, 0, 1, 5])),), generator=torch.Generator().manual_seed(V))
    if draw_(st.integers(0, 3)) == 0:
        fields |= {"repetition_penalty": draw_(st.sampled_from([1.1, 0.5, 1e300, 1e-300])),
                   "seen_V": torch.arange(vocab) % 3 == 0}
    if draw_(st.integers(0, 3)) == 0:
        fields |= {"presence_penalty": draw_(st.floats(-2, 2)), "count_V": torch.arange(vocab).double() % 4,
                   "frequency_penalty": draw_(st.sampled_from([0, 0.3, 1e308, -1e308]))}
    if len(ids):
        values = draw_(st.lists(st.sampled_from([1, -0.3, 1e5, -math.inf]), min_size=len(ids), max_size=len(ids)))
        fields |= {"bias_ids": ids, "biases": torch.tensor(values, dtype=torch.float64)}
    return DrawRules(vocab, **fields)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data(), st.sampled_from([1, 2, 7, 33, 600, 3000]), st.integers(1, 4))
def test_native_draws_are_those_of_the_reference(native_ops, data, V, L):
    logits_LV = torch.stack([data.draw(rows_of_logits(V)) for _ in range(L)])
    rules = [data.draw(rules_of_all_kinds(V)) for _ in range(L)]
    keys = [data.draw(st.integers(0, 2**64 - 1)) for _ in range(L)]
    assert native_ids(native_ops, logits_LV, rules, keys) == kernels.draw(logits_LV, rules, keys).tolist()


@settings(max_examples=100)
@given(st.data(), st.sampled_from([1, 2, 7, 33, 600, 3000]), st.integers(1, 4))
def test_native_distributions_are_those_of_the_reference(native_ops, data, V, L):
    logits_LV = torch.stack([data.draw(rows_of_logits(V)) for _ in range(L)])
    assert_native_distribution(native_ops, logits_LV, [data.draw(rules_of_all_kinds(V)) for _ in range(L)])


@pytest.mark.parametrize("temperature", [0.1, 0.7, 2, 1e4])
def test_native_draws_from_a_whole_vocabulary_are_those_of_the_reference(native_ops, temperature):
    """Rows large enough for every shortcut: nuclei of a few ids and of nearly all."""
    fields = [{}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.999999}, {"top_k": 40}, {"top_k": 5000, "top_p": 0.9},
              {"min_p": 0.05}, {"min_p": 1e-4, "top_p": 0.95}]
    rules = [DrawRules(49_000, temperature, **kind) for kind in fields]
    logits_LV = randn(1, len(rules), 49_152) * 2.5
    for first_key in range(0, 30, 10):
        keys = [noise_key(first_key, l, "draw") for l in range(len(rules))]
        assert native_ids(native_ops, logits_LV, rules, keys) == kernels.draw(logits_LV, rules, keys).tolist()
    assert_native_distribution(native_ops, logits_LV, rules)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2},
                                    {"temperature": 100}])
def test_native_draws_follow_the_distribution(native_ops, fields):
    """Chi-square over ids: beyond the 99.99 % quantile (Wilson and Hilferty 1931) once in 10,000 right programs."""
    num_draws, x_V = 20_000, randn(3, 12)
    rules = DrawRules(12, **({"temperature": 1} | fields))
    keys = [noise_key(7, position, "draw") for position in range(num_draws)]
    ids = native_ops.draw(x_V.expand(num_draws, -1).contiguous(), [rules] * num_draws, keys)
    scaled_V = (x_V.double() - x_V.max()) / rules.temperature
    kept = candidates(scaled_V, rules)
    expected = torch.softmax(scaled_V[kept], 0) * num_draws
    counts = torch.bincount(ids, minlength=12).double()
    assert counts[kept].sum() == num_draws
    chi_square, freedom = float(((counts[kept] - expected) ** 2 / expected).sum()), len(kept) - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def test_the_native_draw_refuses_what_it_cannot_serve(native_ops):
    x_LV = torch.zeros(1, 4)
    one = torch.tensor([1.0], dtype=torch.float64)
    for rules, message in ((DrawRules(5), "sizes"), (DrawRules(0), "sizes"),
                           (DrawRules(4, seen_V=torch.ones(3).bool()), "seen_V"),
                           (DrawRules(4, bias_ids=torch.tensor([4]), biases=one), "out of range"),
                           (DrawRules(4, bias_ids=torch.tensor([1, 2]), biases=one), "biases")):
        with pytest.raises(ValueError, match=message):
            native_ops.draw(x_LV, [rules], [0])
        with pytest.raises(ValueError, match=message):
            native_ops.distribution(x_LV, [rules])
    with pytest.raises(ValueError, match="its rules"):
        native_ops.distribution(x_LV, [])
    with pytest.raises(ValueError, match="its key"):
        native_ops.draw(x_LV, [DrawRules(4)], [])


def test_sampling_draws_the_same_on_both(native_ops):
    """Penalties that remember, bans that end, log-probabilities: through sampling.draw, step by step."""
    kinds = [{}, {"temperature": 1, "top_p": 0.9}, {"repetition_penalty": 1.3},
             {"temperature": 1, "frequency_penalty": 2.0}, {"min_tokens": 3, "logit_bias": ((3, 9.0),)},
             {"temperature": 0.7, "logprobs": 2, "presence_penalty": 1.0}]
    drawn = []
    for ops in (kernels, native_ops):
        samplers = [sampler(prompt=[1, 2, 3], end_ids=[3, 5], vocab=40, **kind) for kind in kinds]
        drawn.append([])
        for position in range(8):
            drawn[-1].append(draw(randn(position, len(kinds), 50), samplers, [position] * len(kinds), ops))
            for each, token in zip(samplers, drawn[-1][-1]):
                each.observe(token.id)
    assert drawn[0] == drawn[1]
