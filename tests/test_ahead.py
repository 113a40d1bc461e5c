"""Steps launched before the tokens of the one before are read: the same tokens, texts and ends as one step at a time.

The operations are those of kernels.py as a device would offer them: what they draw the host can see only by `fetch`.
"""

import random
import time
from collections import Counter
from itertools import chain, repeat

import pytest
import tiny
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from test_engine import GREEDY, PROMPTS, SAMPLED, Operations, make_engine, run, say

import kernels
from checkpoint import open_checkpoint
from model import load_model
from sampling import SamplingParams
from speculative import Ngram
from vocab import load_tokenizer

HOST = ("cpu", "tolist", "item", "numpy", "__int__", "__bool__", "__index__", "__array__")
HOT = {"temperature": 1.0, "seed": 5}


class OutOfSight(torch.Tensor):
    """Numbers of a device: who looks at them would wait for it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function.__name__ not in HOST, f"{function.__name__} waits for the device"
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result if function.__name__ == "clamp" else unwrapped(result)


def unwrapped(result):
    return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result


class Device:
    """kernels.py as a device's operations; `told` what happens, in order."""

    is_async = True

    def __init__(self):
        self.told, self.events = lambda event: None, []

    def __getattr__(self, name):
        return getattr(kernels, name)

    def tell(self, event: str) -> None:
        self.told(event)
        self.events.append(event)

    def embed(self, weight_VD, token_T):
        self.tell("launch")
        return kernels.embed(weight_VD, unwrapped(token_T))

    def attention(self, *arguments):
        self.told("attention")
        return kernels.attention(*arguments)

    def draw(self, x_LV, rules, keys):
        self.told("draw")
        return kernels.draw(x_LV, rules, keys).as_subclass(OutOfSight)

    def fetch(self, x):
        self.told("fetch")
        here = unwrapped(x).clone()
        was_read = []

        def read():
            if not was_read:
                self.tell("read")
                was_read.append(True)
            return here

        return read


def load(folder, ops):
    with open_checkpoint(folder) as checkpoint:
        return load_model(checkpoint, torch.float64, ops=ops), load_tokenizer(checkpoint)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def folder(request, tmp_path_factory):
    """A llama; and a qwen2 whose upper layer has a window, so that it has two kinds of cache."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        return tiny.tiny_llama(folder)
    return tiny.tiny_qwen2(folder, use_sliding_window=True, sliding_window=8, max_window_layers=1)


@pytest.fixture(scope="module")
def plain(folder):
    """One step at a time."""
    return load(folder, kernels)


@pytest.fixture
def ahead(folder):
    return load(folder, Device())


@pytest.fixture
def llama(tmp_path):
    return load(tiny.tiny_llama(tmp_path), Device())


def assert_idle(engine):
    assert not engine.has_work and not engine.flights and not engine.cache.being_written
    assert all(group.num_available == group.pool.num_pages for group in engine.cache.groups)
    assert len(engine.cache.free_rows) == engine.config.max_requests


def facts(completion):
    logprobs = [(entry["id"], round(entry["logprob"], 9), [top["id"] for top in entry["top"]])
                for entry in completion.logprobs or ()]
    return completion.token_ids, completion.text, completion.finish_reason, logprobs


# ---- equalities


KINDS = {
    "greedy": GREEDY, "sampled": SamplingParams(max_tokens=12, ignore_eos=True, **HOT), "penalties": SAMPLED,
    "min_tokens": SamplingParams(max_tokens=14, min_tokens=5, stop_token_ids=tuple(range(0, 256, 3)), **HOT),
    "ends": SamplingParams(max_tokens=20, stop_token_ids=tuple(range(0, 256, 9)), **HOT),
    "texts": SamplingParams(max_tokens=20, stop=("e", "\x02", "qz"), **HOT),
    "logprobs": SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2, **HOT),
}


CONFIGS = ({}, {"num_pages": 15}, {"max_step_tokens": 7, "num_pages": 24}, {"max_requests": 2},
           {"prefix_cache": False, "max_requests": 5})


@pytest.mark.parametrize("kind, config", [
    pytest.param(kind, config, marks=pytest.mark.slow if (i + j) % 3 else ())
    for i, kind in enumerate(KINDS) for j, config in enumerate(CONFIGS)], ids=str)
def test_answers_are_those_of_one_step_at_a_time(plain, ahead, kind, config):
    expected = [facts(completion) for completion in make_engine(plain, **config).generate(PROMPTS, KINDS[kind])]
    engine = make_engine(ahead, **config)
    for _ in range(2):  # the second time from pages found in the cache
        assert [facts(completion) for completion in engine.generate(PROMPTS, KINDS[kind])] == expected
        assert_idle(engine)
    if config.get("num_pages") == 15 and kind in ("greedy", "sampled", "texts"):
        assert engine.stats.preemptions > 0


@pytest.fixture(scope="module")
def alone(plain):
    """What a prompt is answered alone, computed once for each kind."""
    known = {}

    def answer(index, kind):
        if (index, kind) not in known:
            known[index, kind] = facts(make_engine(plain).generate([PROMPTS[index]], KINDS[kind])[0])
        return known[index, kind]

    return answer


@pytest.mark.parametrize("seed", range(8))
def test_whoever_comes_and_goes(ahead, alone, seed):
    """Requests of any kind submitted and aborted at any time, in caches and budgets of any size."""
    pick = random.Random(seed)
    engine = make_engine(ahead, num_pages=pick.choice((16, 20, 64)), max_step_tokens=pick.choice((7, 20, 512)),
                         max_requests=pick.choice((2, 4, 64)))
    kinds, requests, left = list(KINDS)[: pick.choice((2, len(KINDS)))], [], 14
    aborted = {}
    while engine.has_work or left:
        if left and pick.random() < 0.3:
            left -= 1
            index, kind = pick.randrange(len(PROMPTS)), pick.choice(kinds)
            class_name = pick.choice(("interactive", "batch"))
            requests.append((engine.submit(PROMPTS[index], KINDS[kind], class_name=class_name), index, kind))
        if requests and pick.random() < 0.03:
            request = pick.choice(requests)[0]
            if engine.abort(request):
                aborted[request] = request.num_computed
        engine.step()
    assert_idle(engine)
    for request, index, kind in requests:
        ids, text, reason, logprobs = alone(index, kind)
        if request.finish_reason == "cancelled":
            assert request.output_ids == ids[: request.num_output] and request.num_computed == aborted[request]
        else:
            assert (request.output_ids, request.text, request.finish_reason) == (ids, text, reason)
            assert len(request.logprobs or ()) == len(logprobs)


def test_anything_in_any_order(ahead):
    """Published pages hold what their keys say, too."""
    Operations.loaded = ahead
    run_state_machine_as_test(Operations, settings=settings(max_examples=6, stateful_step_count=15, deadline=None))


def test_a_later_prompt_finds_the_same_pages(plain, ahead):
    engines = [make_engine(loaded, num_pages=128) for loaded in (plain, ahead)]
    turns = [prompt + ids for prompt, ids in zip(PROMPTS, [c.token_ids for c in engines[0].generate(PROMPTS, GREEDY)])]
    engines[1].generate(PROMPTS, GREEDY)
    again = [[(c.token_ids, c.request.num_cached) for c in engine.generate(turns, GREEDY)] for engine in engines]
    assert again[0] == again[1] and all(num_cached == (len(turn) - 1) // 8 * 8
                                        for turn, (_, num_cached) in zip(turns, again[1]))


def test_a_window_may_pass_over_a_prompt_before_its_step_lands(tmp_path):
    """Pages of a prompt are published although the step ahead has dropped them already."""
    folder = tiny.tiny_qwen2(tmp_path, use_sliding_window=True, sliding_window=1, max_window_layers=1)
    engines = [make_engine(load(folder, ops)) for ops in (kernels, Device())]
    for _ in range(2):
        found = [[(c.token_ids, c.request.num_cached) for c in engine.generate(PROMPTS, GREEDY)] for engine in engines]
        assert found[0] == found[1]


# ---- what is launched when


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(llama):
    engine, device = make_engine(llama), llama[0].ops
    engine.generate(PROMPTS[:4], GREEDY)
    assert device.events == ["launch", *["launch", "read"] * 11, "read"]
    assert engine.stats.steps == 12 and engine.stats.computed_tokens == sum(map(len, PROMPTS[:4])) + 4 * 11


def test_chunks_of_a_prompt_are_launched_one_after_the_other(llama):
    engine, device = make_engine(llama, max_step_tokens=16), llama[0].ops
    engine.generate([PROMPTS[8]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert device.events == ["launch", *["launch", "read"] * 7, "read"]  # 7 chunks, and a decoded token


@pytest.mark.parametrize("fields", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1},
                                    {"logprobs": 0}], ids=str)
def test_what_needs_the_token_before_waits_for_it(llama, fields):
    engine, device = make_engine(llama), llama[0].ops
    params = [GREEDY, SamplingParams(max_tokens=6, ignore_eos=True, **fields)]
    requests = [engine.submit(prompt, p) for prompt, p in zip(PROMPTS, params)]
    while requests[1].finish_reason is None:
        engine.step()
        assert not engine.flights and Counter(device.events) == {"launch": requests[0].num_output,
                                                                 "read": requests[0].num_output}
    engine.step()
    assert len(engine.flights) == 1
    while engine.has_work:
        engine.step()


def test_drafts_wait_for_the_text(llama):
    engine, device = make_engine(llama), llama[0].ops
    engine.draft_with(Ngram())
    expected = engine.generate([PROMPTS[5]], GREEDY)[0].token_ids
    assert device.events == ["launch", "read"] * (len(device.events) // 2)
    engine.drafting = None
    assert engine.generate([PROMPTS[5]], GREEDY)[0].token_ids == expected


def test_who_waits_is_looked_at_again(llama):
    """Steps run ahead while there is no place for who waits; a place that is free is taken soon, and so is one that a
    higher class has a right to."""
    engine, device = make_engine(llama, max_requests=2), llama[0].ops
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    running = [engine.submit(PROMPTS[i], long, class_name="batch") for i in (0, 1)]
    waits = engine.submit(PROMPTS[2], long, class_name="batch")
    for _ in range(30):
        engine.step()
    assert waits.admitted_s is None and [request.num_output for request in running] == [30, 30]
    num_ahead = sum(pair == ("launch", "launch") for pair in zip(device.events, device.events[1:]))
    assert num_ahead >= 2 and device.events.count("launch") == 30 + len(engine.flights)
    urgent = engine.submit(PROMPTS[3], GREEDY)
    for _ in range(3):
        engine.step()
    assert urgent.num_output >= 1 and running[1].num_preemptions == 1
    engine.abort(running[0])
    for _ in range(3):
        engine.step()
    assert (running[1].num_output if waits.admitted_s is None else waits.num_output) >= 1
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def test_a_prompt_that_comes_waits_for_one_step_at_most(llama):
    engine = make_engine(llama)
    first = engine.submit(PROMPTS[0], GREEDY)
    engine.step(), engine.step()
    assert (first.num_output, len(engine.flights)) == (2, 1)
    late = engine.submit(PROMPTS[1], GREEDY)
    engine.step(), engine.step()
    assert (first.num_output, late.num_output) == (4, 1)


# ---- ends in the air


def test_a_row_that_is_not_finite_fails_its_request_alone(tmp_path, monkeypatch):
    """Its next step, launched before that is known, computes some token."""
    tensors = tiny.tiny_tensors(tiny.tiny_config("llama"))
    tensors["model.embed_tokens.weight"][200] = float("nan")
    folder = tiny.tiny_llama(tmp_path)
    tiny.write_safetensors(folder, tensors=tensors)
    device = Device()
    engine = make_engine(load(folder, device))
    params = SamplingParams(max_tokens=3)
    bad, good = engine.submit([5, 200, 6], params), engine.submit([5, 6], params)
    engine.step()
    assert (bad.finish_reason, bad.output_ids, len(engine.flights)) == ("error", [], 1) and "non-finite" in bad.error
    while engine.has_work:
        engine.step()
    assert good.output_ids == make_engine(load(folder, kernels)).generate([[5, 6]], params)[0].token_ids
    assert_idle(engine)


def test_who_ends_leaves_nothing_in_the_air(llama):
    """By a token, an abort, a deadline, a stream that is left: the engine is idle then, and computes as ever."""
    engine, device = make_engine(llama), llama[0].ops
    expected = engine.logits(PROMPTS[5])
    ids = engine.generate([PROMPTS[4]], KINDS["sampled"])[0].token_ids
    device.events.clear()
    ended = engine.generate([PROMPTS[4]], SamplingParams(stop_token_ids=(ids[3],), **HOT))[0]
    assert ids[3] not in ids[:3] and (ended.token_ids, ended.finish_reason) == (ids[:4], "stop")
    assert Counter(device.events) == {"launch": 5, "read": 4}  # one in vain
    assert_idle(engine)
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    for end in ("abort", "deadline", "stream"):
        if end == "stream":
            outputs = engine.stream(PROMPTS[4], endless)
            next(outputs), next(outputs)
            assert engine.flights
            outputs.close()
        else:
            request = engine.submit(PROMPTS[4], endless, deadline_s=60.0)
            engine.step(), engine.step()
            assert engine.flights
            if end == "abort":
                assert engine.abort(request).finished
            else:
                request.deadline_s = time.perf_counter()
                assert [output.request for output in engine.step()] == [request]
        assert_idle(engine)
        assert torch.equal(engine.logits(PROMPTS[5]), expected)


def test_times_and_traces_tell_every_step_once(llama, monkeypatch):
    engine, traces, paces = make_engine(llama), [], []
    engine.on_step = lambda engine, step: traces.append(step)
    monkeypatch.setattr(engine.scheduler, "observe", lambda chunks, ms: paces.append((len(chunks), ms)))
    start_s = time.perf_counter()
    engine.generate(PROMPTS[:2], GREEDY)
    wall_ms = 1000 * (time.perf_counter() - start_s)
    assert [step["step"] for step in traces] == list(range(1, 13))
    assert [[request["done"] for request in step["requests"]] for step in traces] == [[i + 1, i + 2] for i in range(12)]
    assert 0.8 * wall_ms < sum(step["ms"] for step in traces) <= wall_ms
    assert [num for num, _ in paces] == [2] * 12 and 0.8 * wall_ms < sum(ms for _, ms in paces) <= wall_ms


# ---- interrupts


@pytest.mark.parametrize("num_before", range(0, 60, 4))
def test_an_interrupt_loses_nothing(ahead, alone, num_before):
    """At every kind of moment: while a step is launched, while it is waited for; the next call goes on."""
    device, engine = ahead[0].ops, make_engine(ahead, max_step_tokens=64)
    count = iter(range(1000))

    def interrupt(event):
        assert len(engine.flights) <= 2
        if next(count) == num_before:
            raise KeyboardInterrupt

    device.told = interrupt
    requests = [(engine.submit(PROMPTS[i], KINDS["sampled"]), i) for i in (2, 4, 8)]
    num_interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    for request, i in requests:
        assert (request.output_ids, request.text) == alone(i, "sampled")[:2]
    assert_idle(engine)


def test_what_a_plan_threw_out_is_computed_again_although_its_launch_was_interrupted(plain, ahead, monkeypatch):
    engine = make_engine(ahead, max_step_tokens=16, prefix_cache=False)
    plan = engine.scheduler.plan
    request = engine.submit(PROMPTS[8], GREEDY)
    engine.step()
    assert [(chunk.start, chunk.end) for flight in engine.flights for chunk in flight.chunks] == [(16, 32)]

    def throw_out(budget):
        engine.scheduler._preempt(request)
        return plan(budget)

    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler, "plan", throw_out)
        patched.setattr(engine.replay, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_work:
        engine.step()
    assert [request.output_ids] == run(plain, [PROMPTS[8]], GREEDY)
    assert_idle(engine)


def interrupted(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("num_before", [1, 5, 9])
def test_an_interrupt_between_two_tokens_of_a_step(ahead, alone, monkeypatch, num_before):
    engine = make_engine(ahead)
    calls = chain([engine._extend] * num_before, [interrupted], repeat(engine._extend))
    monkeypatch.setattr(engine, "_extend", lambda *given: next(calls)(*given))
    requests = [engine.submit(PROMPTS[i], GREEDY) for i in (2, 4, 8)]
    with pytest.raises(KeyboardInterrupt):
        while engine.has_work:
            engine.step()
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == [alone(i, "greedy")[0] for i in (2, 4, 8)]
    assert_idle(engine)


def test_an_interrupted_generate_leaves_an_idle_engine(llama):
    engine, device = make_engine(llama), llama[0].ops
    expected = engine.generate(PROMPTS[:3], GREEDY)
    for event in ("launch", "attention", "draw", "fetch", "read"):
        left = iter([False] * 3 + [True])

        def interrupt(told, event=event, left=left):
            if told == event and next(left, False):
                raise KeyboardInterrupt

        device.told = interrupt
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:3], GREEDY)
        assert_idle(engine)
        assert list(map(facts, engine.generate(PROMPTS[:3], GREEDY))) == list(map(facts, expected))


def test_stop_strings_are_cut_as_ever(tmp_path):
    loaded = load(tiny.scripted(tmp_path, list(b"abcdefghijklmnopqrstuvwxyz")), Device())
    assert [say(loaded, stop=stop).text for stop in (("def",), ("cde", "d"), ("xyz",))] == ["bc", "bc", "bcdefghijk"]
