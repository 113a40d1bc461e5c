"""engine.py: whatever the batch, chunks, pages, cache hits, preemptions: the same tokens and the same text.

All equalities in float64 on tiny random models; texts and stops on models that follow a script.
"""

import math
import random
import signal
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import tiny
from conftest import ROOT
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from kvcache import Lease
from model import load_model
from sampling import SamplingParams
from vocab import load_tokenizer

PROMPTS = [[(7 * i + 3 * j * j) % 256 for j in range(n)] for i, n in enumerate((1, 2, 7, 8, 9, 30, 33, 64, 100))]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_p=0.9, seed=11, repetition_penalty=1.2,
                         frequency_penalty=0.3)


def load(folder, dtype=torch.float64, context=None):
    with open_checkpoint(folder) as checkpoint:
        return load_model(checkpoint, dtype, context=context), load_tokenizer(checkpoint)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def loaded(request, tmp_path_factory):
    """A llama; and a qwen2 whose upper layer has a window, so that it has two kinds of cache."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        return load(tiny.tiny_llama(folder))
    return load(tiny.tiny_qwen2(folder, use_sliding_window=True, sliding_window=8, max_window_layers=1))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load(tiny.tiny_llama(tmp_path_factory.mktemp("llama")))


def make_engine(loaded, **config):
    model, tokenizer = loaded
    return Engine(model, EngineConfig(**({"num_pages": 64, "page_size": 8} | config)), tokenizer)


def run(loaded, prompts=PROMPTS, params=GREEDY, **config):
    engine = make_engine(loaded, **config)
    completions = engine.generate(prompts, params)
    assert engine.cache.num_available == engine.cache.num_pages  # nothing leaked
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def params(request):
    return request.param


@pytest.fixture(scope="module")
def alone(loaded, params):
    """Every prompt in an engine of its own, in one chunk, without prefix caching."""
    return [run(loaded, [prompt], params, prefix_cache=False)[0] for prompt in PROMPTS]


# ---- equalities


def test_a_batch_of_nine_equals_nine_of_one(loaded, params, alone):
    assert run(loaded, PROMPTS, params) == alone
    assert run(loaded, PROMPTS[::-1], params) == alone[::-1]


@pytest.mark.parametrize("max_step_tokens", [1, 3, 7, 64])
def test_any_chunking_equals_one_pass(loaded, params, alone, max_step_tokens):
    assert run(loaded, PROMPTS, params, max_step_tokens=max_step_tokens) == alone


@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_any_page_size(loaded, params, alone, page_size):
    assert run(loaded, PROMPTS, params, page_size=page_size) == alone


def test_at_most_two_at_a_time(loaded, params, alone):
    assert run(loaded, PROMPTS, params, max_requests=2) == alone


def test_preempted_equals_undisturbed(loaded, params, alone):
    engine = make_engine(loaded, num_pages=15)  # the longest needs 14
    completions = engine.generate(PROMPTS, params)
    assert [completion.token_ids for completion in completions] == alone
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("max_step_tokens", [5, 512])
def test_prefix_hits_equal_a_cold_cache(loaded, params, alone, max_step_tokens):
    engine = make_engine(loaded, max_step_tokens=max_step_tokens, num_pages=128)
    engine.generate(PROMPTS, params)
    again = engine.generate(PROMPTS, params)
    assert [completion.token_ids for completion in again] == alone
    assert [c.request.num_cached for c in again] == [(len(p) - 1) // 8 * 8 for p in PROMPTS]
    # The answer's pages are published too: the next turn of a conversation finds them.
    turn = PROMPTS[6] + alone[6]
    assert engine.generate([turn], params)[0].request.num_cached == (len(turn) - 1) // 8 * 8


def test_a_prefix_shared_half_way(loaded, params):
    other = PROMPTS[8][:50] + [1, 2, 3] * 9
    cold = run(loaded, [other], params, prefix_cache=False)
    engine = make_engine(loaded)
    engine.generate([PROMPTS[8]], params)
    warm = engine.generate([other], params)
    assert warm[0].request.num_cached == 48 and [warm[0].token_ids] == cold


def test_requests_that_come_and_go(loaded, params, alone):
    """Each is submitted in its own step, while others are in the middle of theirs."""
    engine = make_engine(loaded, max_step_tokens=20)
    requests = []
    for prompt in PROMPTS:
        requests.append(engine.submit(prompt, params))
        engine.step()
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == alone


def test_aborting_neighbours_changes_nothing(loaded, params, alone):
    engine = make_engine(loaded, max_step_tokens=20)
    requests = [engine.submit(prompt, params) for prompt in PROMPTS]
    doomed = requests[1::2]
    for request in doomed:
        engine.step()
        assert engine.abort(request).finished and request.finish_reason == "cancelled"
        assert engine.abort(request) is None
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests[::2]] == alone[::2]
    assert engine.cache.num_available == engine.cache.num_pages


@pytest.mark.slow
def test_every_prompt_and_answer_length_at_page_borders(llama):
    longest = run(llama, [list(range(n)) for n in range(1, 20)], SamplingParams(max_tokens=18, ignore_eos=True))
    for max_tokens in range(1, 18):
        for caching in (True, False):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            got = run(llama, [list(range(n)) for n in range(1, 20)], params, prefix_cache=caching)
            assert got == [ids[:max_tokens] for ids in longest]


def test_bfloat16_and_float16_run(llama, tmp_path):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        loaded = load(tiny.tiny_llama(tmp_path / str(dtype)), dtype)
        assert [len(ids) for ids in run(loaded)] == [12] * 9


def test_exact_pages_are_not_those_of_bfloat16(llama):
    roots = [make_engine(llama, prefill=prefill).cache.root for prefill in ("exact", "bfloat16", "exact")]
    assert roots[0] == roots[2] != roots[1]
    with pytest.raises(ValueError, match="prefill is 'fast' but must be one of exact, bfloat16"):
        EngineConfig(prefill="fast")


def test_the_scheduler_learns_how_long_each_step_took(llama, monkeypatch):
    engine, seen = make_engine(llama), []
    monkeypatch.setattr(engine.scheduler, "observe", lambda chunks, ms: seen.append((len(chunks), ms)))
    start_s = time.perf_counter()
    engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert [num_chunks for num_chunks, _ in seen] == [2] * 5 and all(ms > 0 for _, ms in seen)
    assert sum(ms for _, ms in seen) <= 1000 * (time.perf_counter() - start_s)


def test_samples_of_one_prompt(llama):
    engine = make_engine(llama)
    hot = SamplingParams(max_tokens=16, temperature=2, seed=7, num_samples=3, ignore_eos=True)
    three = [c.token_ids for c in engine.generate([PROMPTS[2]], hot)]
    assert len({tuple(ids) for ids in three}) == 3
    assert three == [c.token_ids for c in engine.generate([PROMPTS[2]], hot)]
    alone = SamplingParams(max_tokens=16, temperature=2, seed=8, ignore_eos=True)
    assert engine.generate([PROMPTS[2]], alone)[0].token_ids == three[1]


def test_logprobs_do_not_depend_on_the_batch(llama):
    params = SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True)
    together = make_engine(llama, max_step_tokens=16).generate(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, together):
        alone = make_engine(llama).generate([prompt], params)[0]
        assert len(completion.logprobs) == 5
        for entry, other in zip(completion.logprobs, alone.logprobs):
            assert entry["id"] == entry["top"][0]["id"] == other["id"]
            assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-12)
            assert [top["id"] for top in entry["top"]] == [top["id"] for top in other["top"]]


def test_logits_of_a_whole_sequence(llama):
    engine = make_engine(llama, max_step_tokens=13)
    whole = make_engine(llama).logits(PROMPTS[8])
    assert torch.allclose(engine.logits(PROMPTS[8]), whole, atol=1e-12)
    assert torch.allclose(engine.logits(PROMPTS[8], first=90), whole[90:], atol=1e-12)
    assert engine.cache.num_available == engine.cache.num_pages
    assert whole[-1].argmax() == engine.generate([PROMPTS[8]], GREEDY)[0].token_ids[0]


# ---- text and ends


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A model that says one fixed text: each byte is followed by the next; built from a chain of distinct bytes."""

    def make(chain, eos_ids=(), **options):
        return load(tiny.scripted(tmp_path_factory.mktemp("script"), chain, eos_ids, **options))

    return make


ALPHABET = list(b"abcdefghijklmnopqrstuvwxyz")


def say(loaded, prompt="a", **fields):
    engine = make_engine(loaded)
    request = engine.submit(prompt, SamplingParams(**({"max_tokens": 10} | fields)))
    pieces = []
    while engine.has_work:
        pieces += [output.text for output in engine.step()]
    assert "".join(pieces) == request.text
    return request


def test_stops_at_an_end_of_sequence(script):
    loaded = script(ALPHABET[:4] + [tiny.EOS, ord("x"), ord("y")], eos_ids=(tiny.EOS,))
    request = say(loaded)
    assert (request.text, request.finish_reason) == ("bcd", "stop")
    assert request.output_ids == [*b"bcd", tiny.EOS]
    request = say(loaded, ignore_eos=True, max_tokens=6)
    assert (request.text, request.finish_reason) == ("bcdxy"[:5], "length")
    assert request.output_ids[:6] == [*b"bcd", tiny.EOS, *b"xy"]
    assert say(loaded, ignore_eos=True, stop_token_ids=(ord("y"),)).finish_reason == "stop"


def test_every_eos_id_ends_the_answer(script):
    for end in (tiny.EOS, tiny.IM_END):
        loaded = script(ALPHABET[:3] + [end], eos_ids=(tiny.EOS, tiny.IM_END))
        assert say(loaded).text == "bc" and say(loaded).finish_reason == "stop"


@pytest.mark.parametrize("stop, text", [
    (("def",), "bc"), (("e", "d"), "bc"), (("cde", "d"), "bc"), (("de", "cde"), "b"), (("b",), ""),
    (("xyz",), "bcdefghijk"), (("jkX", "k"), "bcdefghij"), (("bcdefghijkl",), "bcdefghijk"), (("a",), "bcdefghijk")])
def test_stop_strings_are_cut_exactly(script, stop, text):
    request = say(script(ALPHABET), stop=stop)
    assert request.text == text
    assert request.finish_reason == ("length" if text == "bcdefghijk" else "stop")


def test_a_stop_string_may_be_kept(script):
    assert say(script(ALPHABET), stop=("def",), include_stop=True).text == "bcdef"
    assert say(script(ALPHABET), stop_token_ids=(ord("e"),), include_stop=True).text == "bcde"
    assert say(script(ALPHABET), stop_token_ids=(ord("e"),)).text == "bcd"


def test_what_is_held_back_comes_before_the_token_that_ends(script):
    kept = {"include_stop": True, "stop_token_ids": (ord("d"),)}
    assert say(script(ALPHABET), stop=("bcX",), **kept).text == "bcd"
    assert say(script(ALPHABET), stop=("cd",), **kept).text == "bcd"
    assert say(script(ALPHABET), stop=("bcd", "c"), **kept).text == "bc"


def test_nothing_of_a_stop_string_is_ever_given_out(script):
    engine = make_engine(script(ALPHABET))
    request = engine.submit("a", SamplingParams(max_tokens=10, stop=("defgX", "ghi")))
    given = ""
    while engine.has_work:
        for output in engine.step():
            given += output.text
            assert "bcdef".startswith(given)
    assert given == request.text == "bcdef"


def test_min_tokens(script):
    loaded = script(ALPHABET[:3] + [tiny.EOS], eos_ids=(tiny.EOS,))
    for min_tokens in (0, 1, 4):
        biased = say(loaded, logit_bias=((tiny.EOS, 100.0),), min_tokens=min_tokens)
        assert len(biased.output_ids) == min_tokens + 1 and biased.output_ids[-1] == tiny.EOS
    text = say(script(ALPHABET), stop=("d", "i"), min_tokens=5)  # "d" comes too early
    assert (text.text, len(text.output_ids)) == ("bcdefgh", 8)


def test_characters_of_several_tokens_come_whole(script):
    chain = [*"a".encode(), *"世".encode(), *"😀".encode()]
    request = say(script(chain), max_tokens=7)
    assert request.text == "世😀"
    assert say(script(chain), max_tokens=5).text == "世" + "\ufffd"
    assert say(script(chain), max_tokens=7, stop=("😀",)).text == "世"


def test_the_context_ends_the_answer(script):
    for prompt_len, max_tokens, expected in ((30, 1, 1), (30, 10, 2), (31, 10, 1), (8, 30, 24), (8, None, 24)):
        engine = make_engine(script(ALPHABET, context=32))
        completion = engine.generate([[97] * prompt_len], SamplingParams(max_tokens=max_tokens))[0]
        assert (len(completion.token_ids), completion.finish_reason) == (expected, "length")
    for prompt_len in (32, 33):
        with pytest.raises(ValueError, match=f"prompt has {prompt_len} tokens but the context holds 32"):
            engine.submit([97] * prompt_len, GREEDY)


def test_the_cache_ends_the_answer(script):
    engine = make_engine(script(ALPHABET), num_pages=2)
    completion = engine.generate([[97] * 10], SamplingParams(max_tokens=100))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
    with pytest.raises(ValueError, match=r"prompt has 16 tokens \(3 pages\) but the cache of 2 pages holds 16"):
        engine.submit([97] * 16, GREEDY)


@pytest.mark.parametrize("prompt, fields, message", [
    ([], {}, "empty"), ([320], {}, "id 320"), ([-1], {}, "id -1"), ([1], {"logit_bias": ((320, 1.0),)}, "id 320"),
    ([1], {"stop_token_ids": (9999,)}, "id 9999")])
def test_what_cannot_be_served_is_refused_and_harms_nobody(llama, prompt, fields, message):
    engine = make_engine(llama)
    good = engine.submit(PROMPTS[3], GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, SamplingParams(**fields))
    while engine.has_work:
        engine.step()
    assert [good.output_ids] == run(llama, [PROMPTS[3]])


def test_ids_of_live_requests_are_unique(llama):
    engine = make_engine(llama)
    first = engine.submit([1], GREEDY, id="a")
    with pytest.raises(ValueError, match="'a'"):
        engine.submit([2], GREEDY, id="a")
    engine.abort(first)
    again = engine.submit([2], GREEDY, id="a")
    while engine.has_work:
        engine.step()
    assert again.finish_reason == "length" and first.finish_reason == "cancelled"


def test_padded_ids_may_be_prompted_but_are_not_drawn(script):
    loaded = script([97, 310, 98])  # the tokenizer knows 259 ids, the head has 320
    request = say(loaded, max_tokens=3)
    assert all(id < loaded[1].vocab_size for id in request.output_ids)
    assert make_engine(loaded).generate([[319, 97]], GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0, 1])
def test_non_finite_logits_fail_their_request_alone(tmp_path, temperature):
    tensors = tiny.tiny_tensors(tiny.tiny_config("llama"))
    tensors["model.embed_tokens.weight"][200] = math.nan
    folder = tiny.tiny_llama(tmp_path)
    tiny.write_safetensors(folder, tensors=tensors)
    engine = make_engine(load(folder))
    params = SamplingParams(max_tokens=3, temperature=temperature, seed=1)
    bad, good = engine.submit([5, 200, 6], params), engine.submit([5, 6], params)
    while engine.has_work:
        engine.step()
    assert (bad.finish_reason, bad.output_ids) == ("error", []) and "non-finite logits" in bad.error
    assert good.finish_reason == "length" and engine.cache.num_available == engine.cache.num_pages


def test_a_deadline_cancels(llama):
    engine = make_engine(llama)
    request = engine.submit([1], SamplingParams(max_tokens=None, ignore_eos=True), deadline_s=0.0)
    outputs = engine.step()
    assert [output.request for output in outputs] == [request] and request.finish_reason == "cancelled"
    assert not engine.has_work


def test_leaving_a_stream_aborts_it(llama):
    engine = make_engine(llama)
    whole = engine.generate([PROMPTS[4]], GREEDY)[0]
    assert sum((o.token_ids for o in engine.stream(PROMPTS[4], GREEDY)), []) == whole.token_ids
    for output in engine.stream(PROMPTS[4], GREEDY):
        break
    del output
    assert not engine.has_work and engine.cache.num_available == engine.cache.num_pages


def test_streams_beside_each_other_are_whole(llama):
    engine = make_engine(llama)
    alone = [engine.generate([PROMPTS[i]], GREEDY)[0] for i in (4, 5)]
    streams = [engine.stream(PROMPTS[i], GREEDY) for i in (4, 5)]
    given = [[], []]
    for i in (0, 1, 0, 1, 1, 1):
        given[i].append(next(streams[i]))
    engine.generate([PROMPTS[2]], GREEDY)  # ends both meanwhile
    for outputs, stream, whole in zip(given, streams, alone):
        outputs += stream
        assert sum((output.token_ids for output in outputs), []) == whole.token_ids
        assert "".join(output.text for output in outputs) == whole.text


@pytest.mark.parametrize("bad", [[1] * 513, [1.5], ["a"], [None], 7, [], [320]])
def test_generate_is_all_or_nothing(llama, bad):
    engine = make_engine(llama)
    with pytest.raises(ValueError):
        engine.generate([PROMPTS[3], bad], GREEDY)
    assert not engine.has_work and engine.cache.num_available == engine.cache.num_pages
    with pytest.raises(ValueError):
        engine.logits(bad if bad else [], first=0)
    assert engine.cache.num_available == engine.cache.num_pages and len(engine.cache.free_rows) == 64


def test_without_a_tokenizer_prompts_are_ids(llama):
    engine = Engine(llama[0], EngineConfig(num_pages=64))
    assert engine.generate([PROMPTS[3]], GREEDY)[0].token_ids == make_engine(llama).generate(
        [PROMPTS[3]], GREEDY)[0].token_ids
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.submit("text", GREEDY)
    with pytest.raises(ValueError, match="need a tokenizer"):
        engine.submit([1], SamplingParams(stop=("x",)))


@pytest.mark.slow
def test_abort_and_submit_again_many_times(llama):
    engine = make_engine(llama, num_pages=20, max_step_tokens=8)
    for cycle in range(200):
        requests = [engine.submit(PROMPTS[i], GREEDY, id=f"r{i}") for i in (1, 5, 7)]
        for _ in range(cycle % 7):
            engine.step()
        for request in requests:
            engine.abort(request)
    assert engine.cache.num_available == 20 and not engine.has_work
    assert len(engine.cache.free_rows) == engine.config.max_requests


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 14), st.booleans()), min_size=1, max_size=8),
       st.integers(1, 40), st.integers(10, 24), st.booleans())
def test_any_mix_equals_alone(llama, kinds, max_step_tokens, num_pages, prefix_cache):
    """Requests of any length and kind, in any budget and cache: as if alone."""
    prompts = [[(i * i + n) % 256 for i in range(n)] for n, _, _ in kinds]
    params = [SamplingParams(max_tokens=m, temperature=float(hot), seed=m, ignore_eos=True) for _, m, hot in kinds]
    engine = make_engine(llama, max_step_tokens=max_step_tokens, num_pages=num_pages, prefix_cache=prefix_cache)
    requests = [engine.submit(prompt, p) for prompt, p in zip(prompts, params)]
    while engine.has_work:
        engine.step()
    for prompt, p, request in zip(prompts, params, requests):
        assert request.output_ids == make_engine(llama).generate([prompt], p)[0].token_ids


def test_layers_with_windows_need_no_more_than_their_window(tmp_path):
    """A prompt of 40 pages in a cache of 8; and it can be found again as far as the window's pages are still there."""
    folder = tiny.tiny_qwen2(tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    loaded, prompt = load(folder), [i * i % 251 for i in range(317)]
    cold = run(loaded, [prompt], prefix_cache=False)
    engine = make_engine(loaded, num_pages=8, max_step_tokens=16)
    assert engine.capacity == 512
    request = engine.submit(prompt, GREEDY)
    while engine.has_work:
        engine.step()
        assert engine.stats.held_pages <= (8 + 16) // 8 + 2
    again = engine.generate([prompt + cold[0]], GREEDY)[0].request
    assert [request.output_ids] == cold and again.num_cached == 328
    assert [again.output_ids] == run(loaded, [prompt + cold[0]], prefix_cache=False)
    edited = prompt[:200] + [9] * 50  # of its beginning the window's pages are gone
    assert run(loaded, [edited], prefix_cache=False) == [engine.generate([edited], GREEDY)[0].token_ids]


class Operations(RuleBasedStateMachine):
    """Anything done in any order to an engine with a tiny cache: the books agree after every step, a published page
    holds what its prefix computes to, and every finished request has the tokens it has alone."""

    loaded = None  # set below

    def __init__(self):
        super().__init__()
        self.engine = make_engine(self.loaded, num_pages=12, max_requests=4, max_step_tokens=16)
        self.alone = make_engine(self.loaded, prefix_cache=False)
        self.requests = []

    @rule(prefix=st.integers(0, 3), num_own=st.integers(1, 20), max_tokens=st.integers(1, 12), hot=st.booleans(),
          class_name=st.sampled_from(["interactive", "batch", "long"]))
    def submit(self, prefix, num_own, max_tokens, hot, class_name):
        prompt = [7] * 8 * prefix + [num_own] * num_own
        params = SamplingParams(max_tokens=max_tokens, temperature=float(hot), seed=num_own, ignore_eos=True)
        self.requests.append(self.engine.submit(prompt, params, class_name=class_name))

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.engine.step()

    @rule(which=st.integers(0, 50))
    def abort(self, which):
        if self.requests:
            self.engine.abort(self.requests[which % len(self.requests)])

    @invariant()
    def the_books_agree(self):
        cache, running = self.engine.cache, self.engine.scheduler.running
        for group, pool in enumerate(group.pool for group in cache.groups):
            held = [page_id for request in running for page_id in request.lease.pages[group] if page_id is not None]
            assert sorted(pool.free + list(pool.cached) + list(set(held))) == list(range(12))
            assert [held.count(page_id) for page_id in range(12)] == pool.holders
            for request in running:  # what is still written to is nobody else's
                for page_id in request.lease.pages[group][request.num_computed // 8 :]:
                    assert pool.holders[page_id] == 1
            if cache.groups[group].window:  # no more than the window and a chunk of each request
                assert all(len(request.lease.pages[group]) - request.lease.pages[group].count(None) <= (8 + 16) // 8 + 2
                           for request in running)
        assert set(cache.being_written) == {key for request in running for key in request.lease.writes}

    def teardown(self):
        engine, cache = self.engine, self.engine.cache
        while engine.has_work:
            engine.step()
        for request in self.requests:
            if request.finish_reason != "cancelled":
                assert self.alone.generate([request.prompt_ids], request.params)[0].token_ids == request.output_ids
        assert cache.num_available == 12 and len(cache.free_rows) == 4 and not cache.being_written
        for request in self.requests:
            self.assert_pages_hold(request)

    def assert_pages_hold(self, request):
        """The pages that would be found for this sequence, against a computation of it."""
        fresh, (lease, theirs) = make_engine(self.loaded), (Lease(), Lease())
        self.engine.cache.open(lease)
        num_cached = self.engine.cache.match(lease, request.tokens)
        fresh.generate([request.tokens], SamplingParams(max_tokens=1))
        fresh.cache.open(theirs)
        assert fresh.cache.match(theirs, request.tokens) >= num_cached
        for ours, other in zip(self.engine.cache.layers, fresh.cache.layers):
            pairs = zip(lease.pages[ours.group], theirs.pages[other.group])
            for page_id, same in ((a, b) for a, b in pairs if a is not None and b is not None):
                assert torch.allclose(ours.k[page_id], other.k[same], atol=1e-12)
                assert torch.allclose(ours.v[page_id], other.v[same], atol=1e-12)
        self.engine.cache.release(lease)


@pytest.mark.slow
def test_anything_in_any_order(loaded):
    Operations.loaded = loaded
    run_state_machine_as_test(Operations, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))


# ---- interrupts


@pytest.mark.slow
def test_an_interrupt_ends_generate_at_once_and_leaves_the_engine_whole(loaded):
    """At any line of the engine's bookkeeping, as a signal comes: the requests are gone, the pages are not, and those
    that stay cached hold what they are known for."""
    expected, num_lines = run(loaded, PROMPTS[-4:]), 0
    modules = [str(ROOT / name) for name in ("engine.py", "scheduler.py", "kvcache.py", "writer.py", "sampling.py")]

    def trace(frame, event, _):
        nonlocal num_lines
        if event == "line" and frame.f_code.co_filename in modules:
            num_lines += 1
            if num_lines == at_line:
                signal.raise_signal(signal.SIGINT)
        return trace

    def interrupted_run():
        nonlocal num_lines
        num_lines = 0
        sys.settrace(trace)
        try:
            return engine.generate(PROMPTS[-4:], GREEDY)
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)

    engine, at_line = make_engine(loaded), 0
    assert [completion.token_ids for completion in interrupted_run()] == expected
    for at_line in random.Random(1).sample(range(1, num_lines), 60):
        engine = make_engine(loaded)
        assert interrupted_run() is None and not engine.has_work
        assert engine.cache.num_available == engine.cache.num_pages and len(engine.cache.free_rows) == 64
        assert [completion.token_ids for completion in engine.generate(PROMPTS[-4:], GREEDY)] == expected
