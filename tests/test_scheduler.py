"""scheduler.py: who gets tokens and pages, played through without a model; a step "draws" the token 1."""

from kvcache import Cache, KVSpec
from sampling import Sampler, SamplingParams
from scheduler import Request, Scheduler

import pytest
import torch


def make_scheduler(num_pages=32, max_requests=8, prefix=True):
    cache = Cache([KVSpec(1, 8, 8)], num_pages, 8, torch.float32, max_leases=max_requests, prefix=prefix)
    return Scheduler(cache, max_requests)


def add(scheduler, prompt, id="r"):
    params = SamplingParams(seed=0)
    request = Request(id, params, list(prompt), Sampler(params, prompt, [], 100), submitted_s=0)
    scheduler.add(request)
    return request


def step(scheduler, budget):
    """Plans and commits one step; {request: tokens computed}."""
    chunks = scheduler.plan(budget)
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
    assert young.num_computed == 0 and young.num_output > 0 and scheduler.waiting[0] is young
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
    assert scheduler.cache.num_available == 32 and not scheduler.running and not scheduler.waiting
    assert len(scheduler.cache.free_rows) == 8
