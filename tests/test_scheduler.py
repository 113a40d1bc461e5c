"""scheduler.py: who gets tokens and pages, played through without a model; a step "draws" the token 1."""

import random
from collections import deque

import pytest
import torch

from kvcache import Cache, KVSpec
from sampling import Sampler, SamplingParams
from scheduler import DEFAULT_CLASSES, MOST_AHEAD, READ_TIME, AdmissionClass, Request, Scheduler


def make_scheduler(num_pages=32, max_requests=8, prefix=True, classes=DEFAULT_CLASSES, specs=()):
    cache = Cache([KVSpec(1, 8, 8), *specs], num_pages, 8, torch.float32, max_leases=max_requests, prefix=prefix)
    return Scheduler(cache, max_requests, classes)


def add(scheduler, prompt, id="r", class_name="interactive"):
    params = SamplingParams(seed=0)
    request = Request(id, params, list(prompt), Sampler(params, prompt, [], 100), submitted_s=0, class_name=class_name)
    scheduler.add(request)
    return request


def waiting(scheduler):
    return [request for line in scheduler.lines.values() for request in line.waiting]


def step(scheduler, budget, ms_of=None):
    """Plans and commits one step, which takes `ms_of` its tokens; {request: tokens computed}."""
    chunks = scheduler.plan(budget)
    if ms_of and chunks:
        scheduler.observe(chunks, ms_of(sum(chunk.end - chunk.start for chunk in chunks)))
    assert sum(chunk.end - chunk.start for chunk in chunks) <= budget
    for chunk in chunks:
        assert chunk.start == chunk.request.num_computed < chunk.end <= len(chunk.request.tokens)
        assert len(chunk.request.lease.pages[0]) * 8 >= chunk.end
        draws = chunk.draws
        scheduler.commit(chunk)
        if draws:
            chunk.request.tokens.append(1)
    return {chunk.request: chunk.end - chunk.start for chunk in chunks}


def test_a_prompt_longer_than_the_budget_runs_in_chunks_and_draws_once():
    scheduler = make_scheduler()
    request = add(scheduler, range(30))
    sizes = [step(scheduler, 8)[request] for _ in range(5)]
    assert sizes == [8, 8, 8, 6, 1] and request.num_output == 2


def test_prefill_and_decode_share_a_step_and_decodes_never_wait():
    scheduler = make_scheduler(num_pages=200)
    short = [add(scheduler, [i, i], f"short{i}") for i in range(3)]
    step(scheduler, 16)
    long = add(scheduler, range(800), "long")
    late = add(scheduler, [9, 9], "late")
    for _ in range(10):
        computed = step(scheduler, 16)
        assert all(computed[request] == 1 for request in short)
        assert computed[long] == 13
    assert late.num_output == 0  # first come, first served: the long prompt still takes the rest of each step
    steps = 10
    while not late.num_output:
        step(scheduler, 16)
        steps += 1
    assert steps <= 63 and long.num_output >= 1


def test_at_most_so_many_run():
    scheduler = make_scheduler(max_requests=2)
    requests = [add(scheduler, [i], f"r{i}") for i in range(3)]
    assert list(step(scheduler, 100)) == requests[:2]
    scheduler.remove(requests[0])
    assert list(step(scheduler, 100)) == [requests[1], requests[2]]


def test_a_budget_smaller_than_the_running_requests_still_serves_all():
    scheduler = make_scheduler()
    requests = [add(scheduler, [i] * 3, f"r{i}") for i in range(5)]
    for _ in range(60):
        step(scheduler, 2)
        for request in requests:
            if request.num_output == 4 and request in scheduler.running:
                scheduler.remove(request)
    assert all(request.num_output == 4 for request in requests)


def test_the_youngest_gives_up_its_pages_and_comes_back():
    scheduler = make_scheduler(num_pages=6)
    old, young = add(scheduler, range(15), "old"), add(scheduler, range(50, 65), "young")
    while not young.num_preemptions:
        step(scheduler, 64)
    assert young.num_computed == 0 and young.num_output > 0 and waiting(scheduler)[0] is young
    assert old.num_preemptions == 0
    num_drawn = young.num_output
    scheduler.remove(old)
    assert step(scheduler, 64)[young] <= 8 + num_drawn  # most of its pages were still cached
    assert young.num_output == num_drawn + 1
    assert young.num_cached == 0  # counts the hit at first admission only


def test_more_requests_than_memory_all_finish_with_few_preemptions():
    scheduler = make_scheduler(num_pages=6, prefix=False)
    requests = [add(scheduler, [i] * 12, f"r{i}") for i in range(5)]
    for _ in range(1000):
        step(scheduler, 8)
        for request in requests:
            if request.num_output >= 25 and request in scheduler.running:
                scheduler.remove(request)
    assert all(request.num_output == 25 for request in requests)
    assert max(request.num_preemptions for request in requests) <= len(requests)
    assert scheduler.cache.num_available == 6


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_removing_frees_everything(num_steps):
    scheduler = make_scheduler()
    request = add(scheduler, range(20))
    for _ in range(num_steps):
        step(scheduler, 8)
    scheduler.remove(request)
    assert scheduler.cache.num_available == 32 and not scheduler.running and not waiting(scheduler)
    assert len(scheduler.cache.free_rows) == 8


# ---- one prefix, several requests


def test_a_prefix_being_read_is_waited_for_and_not_read_twice():
    scheduler = make_scheduler(num_pages=64)
    prefix = list(range(40))
    first = add(scheduler, prefix + [1, 2], "first")
    second = add(scheduler, prefix + [3, 4], "second")
    other = add(scheduler, [77] * 10, "other")  # need not wait for anybody
    assert set(step(scheduler, 100)) == {first, other}
    assert step(scheduler, 100)[second] == 2 and second.num_cached == 40
    assert first.lease.pages[0][:5] == second.lease.pages[0][:5]


def test_who_waits_for_a_prefix_goes_on_when_its_reader_is_gone():
    scheduler = make_scheduler(num_pages=64)
    first, second = (add(scheduler, list(range(40)) + [i], f"r{i}") for i in range(2))
    step(scheduler, 16)
    assert second in waiting(scheduler)
    scheduler.remove(first)
    assert step(scheduler, 100)[second] == 41 - 16
    assert scheduler.cache.being_written.keys() <= set(second.lease.keys)


def test_many_with_one_prefix_compute_it_once():
    scheduler = make_scheduler(num_pages=200, max_requests=32)
    requests = [add(scheduler, list(range(80)) + [100 + i] * 5, f"r{i}") for i in range(32)]
    num_computed = 0
    while any(request.num_output < 2 for request in requests):
        num_computed += sum(step(scheduler, 64).values())
    assert num_computed <= 80 + 32 * 5 + 32 * 8  # once the prefix, each its own, and what they decode


# ---- classes


def test_a_higher_class_reads_first_and_the_lower_one_between_its_prompts():
    scheduler = make_scheduler(num_pages=500, prefix=False)
    low = add(scheduler, range(2000), "low", "batch")
    assert step(scheduler, 64) == {low: 64}  # alone it has the whole step
    high = add(scheduler, range(100), "high", "interactive")
    assert step(scheduler, 64) == {low: 1, high: 63}
    assert step(scheduler, 64) == {low: 1, high: 37}
    assert step(scheduler, 64) == {low: 1 + 64 // 8, high: 1}  # beside its decoding, small chunks


@pytest.mark.parametrize("class_name, share", [("batch", 0.3), ("long", 0.2)])
def test_a_class_gets_its_share_of_a_stream_that_never_pauses(class_name, share):
    scheduler = make_scheduler(num_pages=3000, max_requests=32, prefix=False)
    low = add(scheduler, range(9000), "low", class_name)
    num_steps = num_low = 0
    while num_steps < 200:
        while len(waiting(scheduler)) < 2:
            add(scheduler, range(60), f"r{num_steps}{len(waiting(scheduler))}")
        computed = step(scheduler, 64)
        for request in computed:
            if request is not low and request.num_output:
                scheduler.remove(request)
        if num_steps >= 100:  # its patience is over
            num_low += computed.get(low, 0)
        num_steps += 1
    assert num_low >= share * 64 * 100 * 0.95


def test_short_requests_pass_a_stream_of_long_ones():
    scheduler = make_scheduler(num_pages=3000, prefix=False)
    for i in range(4):
        add(scheduler, range(3000), f"long{i}", "long")
    step(scheduler, 64)
    short = add(scheduler, range(20), "short")
    step(scheduler, 64)
    assert short.num_output == 1


def test_the_lowest_class_gives_up_its_pages_first():
    scheduler = make_scheduler(num_pages=8, prefix=False)
    high, low = add(scheduler, range(20), "high"), add(scheduler, range(15), "low", "batch")
    step(scheduler, 64)
    while not low.num_preemptions:
        step(scheduler, 64)
        assert not high.num_preemptions
    assert low in waiting(scheduler)


def test_reserved_pages_are_lent_and_taken_back():
    classes = (AdmissionClass("interactive", 2, 0.5), AdmissionClass("batch", 1, 0.3, reserved_pages=10))
    scheduler = make_scheduler(num_pages=20, classes=classes, prefix=False)
    greedy = [add(scheduler, range(56), f"greedy{i}") for i in range(2)]
    step(scheduler, 200)
    assert scheduler.running == greedy  # nobody of batch is there: its pages are lent
    batch = add(scheduler, range(60), "batch", "batch")
    for _ in range(2):
        step(scheduler, 200)
    assert batch in scheduler.running and greedy[1].num_preemptions == 1 and not greedy[0].num_preemptions


def finish_all(scheduler, requests, num_output, budget=16, most_steps=500):
    """Steps until every request has drawn so much; they leave as they do."""
    for _ in range(most_steps):
        step(scheduler, budget)
        for request in scheduler.running:
            if request.num_output >= num_output:
                scheduler.remove(request)
        if not scheduler.running and not waiting(scheduler):
            return
    raise AssertionError(f"{[request.id for request in requests if request.num_output < num_output]} are not served")


@pytest.mark.parametrize("reserves", [(10, 10), (0, 10), (10, 0), (5, 15)])
@pytest.mark.parametrize("specs", [(), (KVSpec(1, 8, 8, window=16),)])
def test_reserves_neither_block_each_other_nor_throw_out_by_turns(reserves, specs):
    classes = (AdmissionClass("interactive", 2, 0.5, reserves[0]), AdmissionClass("batch", 1, 0.3, reserves[1]))
    scheduler = make_scheduler(num_pages=20, max_requests=4, classes=classes, prefix=False, specs=specs)
    requests = [add(scheduler, range(n), name, name) for n, name in ((73, "interactive"), (80, "batch"))]
    requests += [add(scheduler, range(n), f"more {n}", name) for n, name in ((100, "interactive"), (90, "batch"))]
    finish_all(scheduler, requests, num_output=8)
    assert max(request.num_preemptions for request in requests) <= 2
    assert scheduler.cache.num_available_full == 20


def test_a_class_below_its_reserve_takes_pages_from_who_is_above_theirs():
    classes = (AdmissionClass("interactive", 2, 0.5), AdmissionClass("long", 0, 0.2, reserved_pages=8))
    scheduler = make_scheduler(num_pages=20, classes=classes, prefix=False)
    long = add(scheduler, range(30), "long", "long")
    step(scheduler, 64)
    others = [add(scheduler, range(n), f"r{n}") for n in (56, 40)]
    for _ in range(25):
        step(scheduler, 200)
    assert not long.num_preemptions and long.num_output >= 25 and sum(r.num_preemptions for r in others) >= 1


def test_places_of_lower_classes_are_taken_back_and_no_class_is_shut_out():
    scheduler = make_scheduler(num_pages=3000, max_requests=4, prefix=False)
    for i in range(4):
        add(scheduler, range(20), f"batch{i}", "batch")
    step(scheduler, 64), step(scheduler, 64)
    short = add(scheduler, range(10), "short")
    for _ in range(3):
        step(scheduler, 64)
    assert short.num_output and len(scheduler.lines["batch"].running) == 3
    waiting_long = add(scheduler, range(20), "long", "long")
    for i in range(300):  # a queue of higher requests that never empties
        while len(scheduler.lines["interactive"].waiting) < 2:
            add(scheduler, range(10), f"r{i}")
        step(scheduler, 64)
        for request in scheduler.running:
            if request is not waiting_long and request.num_output >= 3:
                scheduler.remove(request)
    assert waiting_long.num_output


def test_nobody_waits_for_a_prefix_that_a_lower_class_reads_in_its_own_time():
    scheduler = make_scheduler(num_pages=3000, prefix=True)
    prefix = list(range(800))
    long = add(scheduler, prefix * 4, "long", "long")
    step(scheduler, 64)
    same, busy = add(scheduler, prefix, "same"), add(scheduler, [7] * 2000, "busy")
    for _ in range(14):
        step(scheduler, 64)
    assert same.num_output and long.num_computed < 800 and not busy.num_output


def test_what_cannot_be_admitted_is_not_looked_up_in_every_step(monkeypatch):
    scheduler = make_scheduler(num_pages=40, max_requests=8)
    add(scheduler, range(240), "runs")
    while waiting(scheduler) or any(request.want > 1 for request in scheduler.running):
        step(scheduler, 64)
    add(scheduler, range(500, 700), "has no room")
    for i in range(5):
        add(scheduler, range(900, 1000), f"r{i}", "batch")
    lookups, match = [], scheduler.cache.match
    monkeypatch.setattr(scheduler.cache, "match", lambda *args: lookups.append(args) or match(*args))
    for _ in range(30):
        step(scheduler, 64)
    assert len(lookups) <= 12


def test_what_a_class_refuses_names_its_limit():
    classes = (AdmissionClass("interactive", max_waiting=2, max_tokens=10),)
    scheduler = make_scheduler(classes=classes)
    with pytest.raises(ValueError, match="prompt has 10 tokens but a request of class interactive has at most 10"):
        add(scheduler, range(10))
    add(scheduler, [1]), add(scheduler, [2])
    with pytest.raises(ValueError, match="2 requests of class interactive are waiting, its limit is 2"):
        add(scheduler, [3])
    with pytest.raises(ValueError, match="'gold' is unknown: known are interactive"):
        add(scheduler, [3], class_name="gold")
    for bad in ({"share": 1.5}, {"share": -1}, {"reserved_pages": -1}, {"reserved_pages": 1.5},
                {"reserved_pages": float("inf")}, {"max_waiting": 0}, {"max_tokens": 1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            AdmissionClass("x", **bad)
    with pytest.raises(ValueError, match="36 pages but the cache has 32: lower some"):
        make_scheduler(classes=[AdmissionClass("a", reserved_pages=20), AdmissionClass("b", reserved_pages=0.5)])
    over = make_scheduler(classes=[AdmissionClass("a", share=0.9), AdmissionClass("b", share=0.3)])
    assert [line.share for line in over.lines.values()] == pytest.approx([0.75, 0.25])


def test_requests_that_name_no_class():
    scheduler = make_scheduler(num_pages=3000)
    tokens = list(range(9000))
    assert scheduler.class_of(tokens, "batch") == "long" and scheduler.class_of(tokens[:8192], "batch") == "batch"
    first = add(scheduler, tokens)
    while not first.num_output:
        step(scheduler, 512)
    assert scheduler.class_of(tokens, "interactive") == "interactive"  # little of it is left to compute


# ---- how much is read beside those that decode


@pytest.mark.parametrize("fixed_ms, decoding_ms, read_ms", [
    (2, 0.2, 0.2), (100, 0.5, 0.4), (1, 0.7, 0.7), (2, 0.4, 0.1)])
def test_a_long_prompt_at_most_doubles_the_time_between_tokens(fixed_ms, decoding_ms, read_ms):
    rng = random.Random(1)
    scheduler = make_scheduler(num_pages=5000, max_requests=32, prefix=False)
    decoding = [add(scheduler, range(100), f"r{i}") for i in range(16)]

    def timed_step():
        chunks = scheduler.plan(512)
        num_read = sum(chunk.end - chunk.start for chunk in chunks if chunk.end > chunk.start + 1)
        ms = fixed_ms + decoding_ms * (len(chunks) - (num_read > 0)) + read_ms * num_read
        ms *= rng.lognormvariate(0, 0.05)
        scheduler.observe(chunks, ms)
        for chunk in chunks:
            scheduler.commit(chunk)
            chunk.request.tokens += [1] * chunk.draws
        return ms

    def p95(times):
        return sorted(times)[int(0.95 * len(times))]

    while any(request.num_output < 2 for request in decoding):
        timed_step()
    without = p95([timed_step() for _ in range(100)])
    long, times = add(scheduler, range(6000), "long"), []
    while not long.num_output:
        times.append(timed_step())
    assert p95(times) <= 2 * without
    assert len(times) <= 1.2 * 6000 * read_ms / (READ_TIME * (fixed_ms + 16 * decoding_ms))  # nor held back further


# ---- fairness, by simulation: a step takes 2 ms and 0.2 ms a token


def simulate(num_long_tokens, seed, seconds=150, budget=512):
    """Short requests (64 to 256 tokens in, 64 out) arrive at random at 80 % of what the machine can do, and one long
    prompt among them: seconds to their first tokens while it is read, sorted, and seconds that it took."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_pages=16000, max_requests=256, prefix=False)
    tokens_per_s = budget / (0.002 + 0.0002 * budget)
    arrivals, now_s = [], 0.0
    while now_s < seconds:
        now_s += rng.expovariate(0.8 * tokens_per_s / (160 + 64))
        arrivals.append((now_s, rng.randint(64, 256), "interactive"))
    arrivals = deque(sorted(arrivals + ([(5.0, num_long_tokens, "long")] if num_long_tokens else [])))
    ttft, long_s, now_s = [], None, 0.0
    while arrivals or scheduler.running or waiting(scheduler):
        while arrivals and arrivals[0][0] <= now_s:
            submitted_s, num_tokens, class_name = arrivals.popleft()
            request = add(scheduler, [0] * num_tokens, class_name=class_name)
            request.submitted_s = submitted_s
        computed = step(scheduler, budget, lambda num_tokens: 2 + 0.2 * num_tokens)
        now_s = now_s + 0.002 + 0.0002 * sum(computed.values()) if computed else arrivals[0][0]
        for request in computed:
            if request.num_output == 1 and request.class_name == "long":
                long_s = now_s - request.submitted_s
                scheduler.remove(request)
            elif request.num_output == 1:
                ttft.append((request.submitted_s, now_s - request.submitted_s))
            elif request.num_output == 64:
                scheduler.remove(request)
    during = 5.0, 5.0 + (long_s or seconds)
    return sorted(seconds for at, seconds in ttft if during[0] <= at <= during[1]), long_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 7])
def test_a_long_prompt_and_many_short_ones_do_not_starve_each_other(seed):
    without, _ = simulate(0, seed)
    beside, long_s = simulate(100_000, seed)
    assert beside[int(0.95 * len(beside))] <= 1.5 * without[int(0.95 * len(without))]
    alone_s = 100_000 / (0.2 * 512 / (0.002 + 0.0002 * 512))  # with the capacity that the short ones leave
    assert long_s <= 3 * alone_s


# ---- planned ahead


def flying(scheduler, budget):
    """A step that was launched and has drawn nothing yet."""
    chunks = scheduler.plan(budget)
    for chunk in chunks:
        scheduler.commit(chunk)
    return chunks


def land(chunks):
    for chunk in chunks:
        if chunk.draws:
            chunk.request.tokens.append(1)


def spans(chunks):
    return [(chunk.request.id, chunk.start, chunk.end, chunk.num_drafted) for chunk in chunks]


@pytest.mark.parametrize("specs", [(), (KVSpec(1, 8, 8, window=8),)], ids=["full", "and windows"])
def test_a_plan_ahead_is_the_plan_that_would_be_made_later(specs):
    schedulers = [make_scheduler(specs=specs) for _ in range(2)]
    for scheduler in schedulers:
        for n in (3, 8, 20):
            add(scheduler, range(n), f"r{n}")
    flights = [flying(scheduler, 64) for scheduler in schedulers]
    assert spans(flights[0]) == [("r3", 0, 3, 0), ("r8", 0, 8, 0), ("r20", 0, 20, 0)]
    for _ in range(20):
        ahead = schedulers[0].plan_ahead(flights[0])
        assert all(chunk.draws for chunk in ahead)
        for chunks in flights:
            land(chunks)
        for chunk in ahead:
            schedulers[0].commit(chunk)
        flights = [ahead, flying(schedulers[1], 64)]
        assert spans(ahead) == spans(flights[1])
        pages = [[request.lease.pages for request in scheduler.running] for scheduler in schedulers]
        assert pages[0] == pages[1]
        pools = [[(group.pool.free, group.pool.keys) for group in scheduler.cache.groups] for scheduler in schedulers]
        assert pools[0] == pools[1]


def test_nothing_is_planned_ahead_of_a_prompt_or_of_pages_that_lack():
    scheduler = make_scheduler(num_pages=4)
    add(scheduler, [1, 2], "decodes")
    step(scheduler, 16)
    reads = add(scheduler, range(10), "reads")
    chunks = flying(scheduler, 8)
    assert spans(chunks) == [("decodes", 2, 3, 0), ("reads", 0, 7, 0)] and scheduler.plan_ahead(chunks) == []
    land(chunks)
    chunks = flying(scheduler, 8)
    assert [chunk.draws for chunk in chunks] == [True, True]
    assert scheduler.plan_ahead(chunks[:1]) == []  # somebody else runs
    while ahead := scheduler.plan_ahead(chunks):
        land(chunks)
        chunks = ahead
        for chunk in chunks:
            scheduler.commit(chunk)
    assert spans(chunks)[1] == ("reads", 15, 16, 0) and scheduler.num_preemptions == 0
    land(chunks)
    chunks = flying(scheduler, 8)
    assert reads.num_preemptions == 1  # there was no fifth page
    assert scheduler.plan_ahead(chunks) == []  # who waits may find one now


def full(num_waiting=2):
    """All places are taken and have been looked at: a step is in the air, and may be planned ahead."""
    scheduler = make_scheduler(max_requests=2)
    requests = [add(scheduler, [i], f"r{i}") for i in range(2 + num_waiting)]
    step(scheduler, 16)
    return scheduler, requests, flying(scheduler, 16)


def test_while_somebody_waits_the_lines_are_looked_at_now_and_then():
    scheduler, requests, chunks = full()
    num_ahead = 0
    while ahead := scheduler.plan_ahead(chunks):
        num_ahead += 1
        land(chunks)
        chunks = ahead
        for chunk in chunks:
            scheduler.commit(chunk)
    assert num_ahead == MOST_AHEAD
    land(chunks)
    assert scheduler.plan_ahead(flying(scheduler, 16))
    scheduler, requests, chunks = full(num_waiting=0)  # where nobody waits there is nothing to look at
    for _ in range(2 * MOST_AHEAD):
        ahead = scheduler.plan_ahead(chunks)
        assert len(ahead) == 2
        land(chunks)
        chunks = ahead
        for chunk in chunks:
            scheduler.commit(chunk)


@pytest.mark.parametrize("change", [lambda scheduler, requests: add(scheduler, [9], "new"),
                                    lambda scheduler, requests: scheduler.remove(requests[2])], ids=["come", "gone"])
def test_whoever_comes_or_goes_has_the_lines_looked_at(change):
    scheduler, requests, chunks = full()
    change(scheduler, requests)
    assert scheduler.plan_ahead(chunks) == []


def test_who_can_be_let_in_next_is_not_passed_over():
    scheduler = make_scheduler(prefix=False)
    for i in range(2):
        add(scheduler, [i] * 16, f"r{i}")
    step(scheduler, 8)
    chunks = flying(scheduler, 8)  # the budget is the first's
    assert spans(chunks) == [("r0", 8, 16, 0)] and scheduler.plan_ahead(chunks) == []
