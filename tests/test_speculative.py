"""Drafters: the n-gram drafter against a search of the whole text, and what it costs; any of them in the engine against
plain decoding."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sampling import randn, sampler
from test_verify import decode, decode_with_drafts

import speculative
import tiny
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from model import load_model
from sampling import Draft, SamplingParams
from scheduler import Request
from speculative import LENGTHS, DraftModel, Manner, Ngram, Odds, Trial
from vocab import load_tokenizer


def request(tokens, answer=()):
    made = Request("r", SamplingParams(), list(tokens), None, 0.0)
    made.tokens += answer
    return made


def propose(drafter, of, limit=8):
    draft, = drafter.propose([of], [limit])
    assert draft.probs_KV is None
    return list(draft.ids)


def searched(tokens, limit, reach=1, answers=()):
    """What Ngram proposes, by its meaning: looks at every place of the text, then at every answer, the last first."""
    for n in (n for n in LENGTHS if n <= len(tokens)):
        for place in reversed(range(n, len(tokens))):
            if tokens[place - n : place] == tokens[-n:]:
                text = tokens[place:]
                while len(text) < limit:
                    text.append(text[place - len(tokens)])
                return text[: min(limit, reach * n)]
        for answer in reversed(answers):
            for place in reversed(range(n, len(answer))):
                if answer[place - n : place] == tokens[-n:]:
                    return answer[place : place + min(limit, reach * n)]
    return []


texts = st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), max_size=12))


@given(st.lists(texts, min_size=1, max_size=12), st.integers(0, 20), st.integers(1, 3))
def test_a_draft_is_what_followed_the_longest_ngram_last(pieces, limit, reach):
    """While the text grows by several tokens at a time, or by none."""
    drafter, grown = Ngram(reach), request(pieces[0])
    for piece in pieces:
        grown.tokens += piece
        assert propose(drafter, grown, limit) == searched(grown.tokens, limit, reach)


@given(st.lists(texts, max_size=8), st.lists(texts, min_size=1, max_size=5), st.integers(1, 20))
def test_answers_of_others_are_looked_up_too(answers, pieces, limit):
    drafter, grown = Ngram(shared_tokens=2000), request(pieces[0])
    for i, piece in enumerate(pieces):
        grown.tokens += piece
        ended = answers[: 2 * i]
        for answer in ended[2 * i - 2 :] if i else ():
            drafter.forget(request([0, 1, 2, 3], answer))  # the prompts do not count
        assert propose(drafter, grown, limit) == searched(grown.tokens, limit, answers=ended)


@pytest.mark.parametrize("tokens, draft", [
    ([], []), ([1], []), ([1, 1], []), ([1, 1, 1], [1, 1]), ([1, 2, 3, 4], []), ([1, 2, 3, 9, 1, 2], [3, 9]),
    ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1]), ([5, 1, 2, 3, 4, 7, 8, 9, 9, 1, 2, 3, 4], [7, 8, 9, 9]),
    ([1, 2, 3, 4, 7, 9, 3, 4, 8, 1, 2, 3, 4], [7, 9, 3, 4]), ([1, 2] * 4, [1, 2, 1, 2])])
def test_drafts_by_hand(tokens, draft):
    assert propose(Ngram(), request(tokens)) == draft


def test_a_longer_match_reaches_further():
    text = list(range(100, 130))
    tokens = [*text, 1, *text[:9]]
    assert propose(Ngram(), request(tokens), 99) == text[9:17]
    assert propose(Ngram(reach=2), request(tokens), 99) == text[9:25]
    assert propose(Ngram(reach=2), request(tokens), 3) == text[9:12]
    assert propose(Ngram(), request(tokens), 0) == []


def test_requests_know_nothing_of_each_other_unless_it_is_shared():
    for shared_tokens, draft in ((0, []), (100, [3, 4])):
        drafter = Ngram(shared_tokens=shared_tokens)
        propose(drafter, request([1, 2, 3, 4]))
        drafter.forget(request([8, 9, 7], [1, 2, 3, 4]))
        assert propose(drafter, request([1, 2])) == draft
        assert propose(drafter, request([8, 9])) == []  # a prompt


def test_no_draft_goes_on_into_another_answer():
    drafter = Ngram(shared_tokens=100)
    drafter.forget(request([0], [1, 2, 3]))
    drafter.forget(request([0], [4, 5, 6]))
    assert propose(drafter, request([1, 2])) == [3] and propose(drafter, request([2, 3])) == []
    assert propose(drafter, request([3, 4])) == []


def test_what_is_shared_is_bounded_and_the_latest():
    drafter, most = Ngram(shared_tokens=200), 0
    for i in range(100):
        drafter.forget(request([0], range(1000 * i, 1000 * i + 10 + i)))
        shared = (drafter.young, drafter.old)
        most = max(most, sum(len(index.tokens) for index in shared))
        assert sum(len(index.place_after) for index in shared) <= len(LENGTHS) * 200
        assert propose(drafter, request([1000 * i, 1000 * i + 1])) == [1000 * i + 2, 1000 * i + 3]
    assert 100 < most <= 200
    assert propose(drafter, request([0, 1])) == []
    drafter.forget(request([0], range(500)))  # longer than there is room for: its beginning
    assert propose(drafter, request([0, 1])) == [2, 3] and len(drafter.young.tokens) <= 100


def test_a_request_that_ended_leaves_nothing_behind():
    drafter, ended = Ngram(), request([1, 2, 3, 1, 2])
    propose(drafter, ended)
    assert drafter.own
    drafter.forget(ended), drafter.forget(ended)
    assert not drafter.own and not drafter.young.tokens


def test_ngrams_of_one_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(speculative, "hash", lambda ngram: 0, raising=False)
    assert propose(Ngram(), request([1, 2, 3, 4, 5])) == []
    assert propose(Ngram(), request([1, 2, 1, 2])) == []  # the place is overwritten: no draft, not a wrong one
    assert propose(Ngram(), request([1, 1, 1])) == [1, 1]


class Counted(list):
    """Counts the tokens that are looked at."""

    num_read = 0

    def __getitem__(self, which):
        found = super().__getitem__(which)
        self.num_read += len(found) if isinstance(which, slice) else 1
        return found


@pytest.mark.parametrize("alphabet", [1, 4, 1000])
def test_a_tokens_cost_does_not_grow_with_the_text(alphabet):
    text = torch.randint(0, alphabet, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    read = {}
    for length in (100, 3900):
        drafter, grown = Ngram(), request([])
        grown.tokens = Counted(text[:length])
        propose(drafter, grown)
        grown.tokens.num_read = 0
        for token in text[length : length + 100]:
            grown.tokens.append(token)
            propose(drafter, grown)
        read[length] = grown.tokens.num_read
        # to file one token, to look it up, to see that what was found is the same, to propose
        assert read[length] <= 100 * (sum(LENGTHS) + 1 + sum(LENGTHS) + max(LENGTHS) + 8)
        assert len(drafter.own[grown].place_after) <= len(LENGTHS) * len(grown.tokens)
    assert read[3900] <= 1.5 * read[100]


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.3}, {"repetition_penalty": 1.05}])
def test_tokens_with_ngram_drafts_are_those_without(fields):
    """50 prompts, some of them repetitions, of a model that remembers two tokens, and so repeats itself."""
    model = lambda tokens: randn(hash(tuple(tokens[-2:])) % 2**62, 6) * 2
    prompts = [[1] * 3, [1, 2, 3] * 4, *([i % 5, i % 3, i % 7 % 5] for i in range(48))]

    def samplers():
        return [sampler(prompt=prompt, vocab=6, seed=i, **fields) for i, prompt in enumerate(prompts)]

    plain = [decode(model, prompt, own, 30) for prompt, own in zip(prompts, samplers())]
    drafter, requests, rounds = Ngram(), [request(prompt) for prompt in prompts], []

    def draft(r, tokens, round):
        requests[r].tokens += tokens[len(requests[r].tokens) :]
        rounds.append(r)
        return drafter.propose([requests[r]], [round % 6])[0]

    class Model:
        def rows_of(self, tokens, draft):
            return [model([*tokens, *draft.ids[:j]]) for j in range(len(draft.ids) + 1)]

    assert decode_with_drafts(Model(), prompts, samplers(), 30, draft) == plain
    assert len(rounds) < 0.8 * 50 * 30


# ---- in the engine


class Prophet:
    """Proposes the known answer, with a wrong token here and there: any number of tokens may stand."""

    name, is_free, taps = "prophet", True, None

    def __init__(self, answers, every):
        self.answers, self.every = answers, every

    def propose(self, requests, limits):
        return [self.draft(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def draft(self, request, limit):
        start = request.num_output
        ids = self.answers[tuple(request.prompt_ids)][start : start + limit]
        return Draft(tuple((id + ((start + j) % self.every == 0)) % 256 for j, id in enumerate(ids)))

    def forget(self, request):
        pass


PROMPTS = [[(7 * i + 3 * j * j) % 256 for j in range(n)] for i, n in enumerate((1, 7, 8, 30, 64))]
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.9, top_p=0.9, seed=3, repetition_penalty=1.2,
                         frequency_penalty=0.3, min_tokens=4, logprobs=1)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    path = tiny.tiny_llama(folder) if request.param == "llama" else tiny.tiny_qwen2(
        folder, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with open_checkpoint(path) as checkpoint:
        return load_model(checkpoint, torch.float64), load_tokenizer(checkpoint)


def generate(loaded, prompts, params, drafter=None, **config):
    model, tokenizer = loaded
    engine = Engine(model, EngineConfig(**({"num_pages": 64, "page_size": 8} | config)), tokenizer, drafter=drafter)
    completions = engine.generate(prompts, params)
    assert engine.cache.num_available == engine.cache.num_pages
    if drafter is not None:
        assert not engine.drafting.odds and not engine.drafting.proposed
    return completions


def draft_model(loaded, **options):
    """The model drafting for itself, or with other weights drafting badly."""
    model, _ = loaded
    sizes = {"num_pages": 64, "page_size": 8, "max_requests": 64}
    drafter = DraftModel("itself", lambda: model, model.config.vocab, **(sizes | options))
    drafter.sure = 0  # of random weights' tokens nobody is
    return drafter


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", [
    {"draft_tokens": 1}, {"draft_tokens": 3}, {"draft_tokens": 8}, {"draft_tokens": 4, "max_step_tokens": 7},
    {"draft_tokens": 5, "num_pages": 14, "max_requests": 3}, {"draft_tokens": 8, "prefix_cache": False}], ids=str)
def test_drafts_change_no_token(loaded, params, config):
    plain = {tuple(c.request.prompt_ids): c for c in generate(loaded, PROMPTS, params)}
    answers = {prompt: c.token_ids for prompt, c in plain.items()}
    small = {"num_pages": config.get("num_pages", 64)}
    drafters = [Ngram(), *(Prophet(answers, every) for every in (1, 2, 3, 5, 99)), draft_model(loaded, **small)]
    for drafter in drafters:
        for completion in generate(loaded, PROMPTS, params, drafter, **config):
            expected = plain[tuple(completion.request.prompt_ids)]
            assert completion.token_ids == expected.token_ids and completion.text == expected.text, drafter.name
            if params.logprobs is not None:
                ours, theirs = ([entry["logprob"] for entry in c.logprobs] for c in (completion, expected))
                assert ours == pytest.approx(theirs, abs=1e-9)


def test_right_drafts_all_stand(loaded):
    """14 tokens: three in plain steps, which tell what one takes, then 5, 5 and the last."""
    answers = {tuple(PROMPTS[3]): generate(loaded, [PROMPTS[3]], GREEDY)[0].token_ids}
    prophet = Prophet(answers, 99)
    for drafter in (prophet, draft_model(loaded)):
        [completion] = generate(loaded, [PROMPTS[3]], GREEDY, drafter)
        right = answers[tuple(PROMPTS[3])]
        assert completion.token_ids == right
        if drafter is not prophet:
            assert completion.request.draft_report == {
                "method": "itself", "proposed": 8, "accepted": 8, "steps": 6, "acceptance": 1.0,
                "by_place": [2, 2, 2, 2], "tokens_per_step": 14 / 6}


@pytest.mark.parametrize("every", [2, 99])
def test_an_answer_stops_within_a_draft_as_without(loaded, every):
    [whole] = generate(loaded, [PROMPTS[3]], GREEDY)
    prophet = Prophet({tuple(PROMPTS[3]): whole.token_ids + [0] * 9}, every)
    for place in range(len(whole.token_ids)):
        for fields in ({"stop_token_ids": (whole.token_ids[place],)}, {"max_tokens": place + 1},
                       {"stop_token_ids": (whole.token_ids[place],), "min_tokens": place + 1}):
            params = replace(GREEDY, **fields)
            [plain] = generate(loaded, [PROMPTS[3]], params)
            [ours] = generate(loaded, [PROMPTS[3]], params, prophet, draft_tokens=6)
            assert (ours.token_ids, ours.text, ours.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
            report = ours.request.draft_report  # what the answer does not have any more does not count
            assert report["steps"] + report["accepted"] == len(ours.token_ids)


def test_pages_of_drafts_that_stood_are_found_again(loaded):
    model, tokenizer = loaded
    [plain] = generate(loaded, [PROMPTS[3]], GREEDY)
    prophet = Prophet({tuple(PROMPTS[3]): plain.token_ids}, 3)
    engine = Engine(model, EngineConfig(num_pages=64, page_size=8), tokenizer, drafter=prophet)
    [first] = engine.generate([PROMPTS[3]], GREEDY)
    longer = [*PROMPTS[3], *first.token_ids]
    prophet.answers[tuple(longer)] = []
    [again] = engine.generate([longer], GREEDY)
    assert again.request.num_cached == 40  # of 44, whose last was never computed
    assert again.token_ids == generate(loaded, [longer], GREEDY)[0].token_ids


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_other_ways_to_verify_finish_and_draw_what_the_rules_allow(loaded, verify):
    params = replace(SAMPLED, max_tokens=30, logprobs=None)
    for drafter in (Ngram(), draft_model(loaded, manner=Manner(False, keeps_probs=True))):
        completions = generate(loaded, PROMPTS, params, drafter, verify=verify)
        assert all(len(completion.token_ids) == 30 for completion in completions)
        again = generate(loaded, PROMPTS, params, type(drafter)() if isinstance(drafter, Ngram) else
                         draft_model(loaded, manner=Manner(False, keeps_probs=True)), verify=verify)
        assert [c.token_ids for c in again] == [c.token_ids for c in completions]
    assert sum(c.request.draft_report["accepted"] for c in completions) > 50  # it drafts for itself


def test_odds_choose_what_pays():
    odds = Odds()
    assert odds.best_length(4, 0, 0) == 4  # nothing is known
    for _ in range(30):
        odds.observe((1, 2, 3, 4), 0, [9])
    assert odds.best_length(4, 10, 1) == 0 and odds.best_length(2, 10, 1) == 2  # of other lengths nothing is known
    for _ in range(30):
        odds.observe((1, 2, 3, 4), 0, [1])
    assert odds.best_length(4, 10, 1) == 4 and odds.best_length(4, 10, 9) == 1 and odds.best_length(4, 10, 11) == 0


def steps_with_drafts(trial, ms_with, ms_without, tokens_with, num_steps=1000):
    drafted = []
    for step in range(num_steps):
        drafted.append(trial.drafts)
        tokens = tokens_with(step) if trial.drafts else 1
        trial.observe(trial.drafts, ms_with if drafted[-1] else ms_without, tokens)
    return drafted


def test_a_drafter_that_does_not_pay_costs_next_to_nothing():
    drafted = steps_with_drafts(Trial(), 30, 10, lambda step: 1)
    assert drafted[:4] == [False, False, False, True]  # a plain step's time is known first
    assert 20 * sum(drafted[:128]) - 20 <= 0.03 * 1280 + 20  # the first loads a model; one more overdraws
    assert 20 * sum(drafted) <= 0.03 * 10000


def test_a_drafter_that_pays_is_used():
    drafted = steps_with_drafts(Trial(), 30, 10, lambda step: 4)
    assert sum(drafted) == 967 and not any(drafted[3 + 32 :: 33])  # now and then a plain step tells what one takes


def test_a_drafter_that_begins_to_pay_is_noticed():
    drafted = steps_with_drafts(Trial(), 30, 10, lambda step: 1 if step < 300 else 8, 3000)
    assert sum(drafted[:300]) < 12 and sum(drafted[1500:]) > 1400
