"""Public request traces, replayed on the scheduler and the cache with a fake model (2 ms a step and 0.2 ms a token).

The traces are not the project's: they are read from QUIRE_TRACES, else ../shared/traces, and skipped where absent.
`pytest tests/test_traces.py -s` prints what was measured.
"""

import csv
import json
import os
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
import torch

from kvcache import Cache, KVSpec
from sampling import Sampler, SamplingParams
from scheduler import Request, Scheduler

FOLDER = Path(os.environ.get("QUIRE_TRACES") or Path(__file__).resolve().parents[2] / "shared" / "traces")
SCALE = 64  # tokens of a trace for one of ours, so that its blocks of 512 are our pages of 8
PAGE_SIZE = 8
LOAD = 0.7  # of what the fake model can do at most, cache hits aside

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no traces in {FOLDER}")]


@dataclass
class Arrival:
    at_s: float
    prompt: list[int]
    num_output: int


def mooncake(name: str) -> list[Arrival]:
    """One page of 8 equal tokens for each block: equal chains of blocks, equal prefixes."""
    arrivals = []
    for row in map(json.loads, (FOLDER / name).read_text().splitlines()):
        num_tokens = max(1, row["input_length"] // SCALE)
        prompt = [block for block in row["hash_ids"] for _ in range(PAGE_SIZE)][:num_tokens]
        arrivals.append(Arrival(row["timestamp"] / 1000, prompt, max(1, row["output_length"] // SCALE)))
    return arrivals


def azure(name: str) -> list[Arrival]:
    """Lengths alone: no two prompts share anything."""
    with open(FOLDER / name) as file:
        rows = list(csv.DictReader(file))[:4000]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    lengths = [[max(1, int(row[column]) // 8) for column in ("ContextTokens", "GeneratedTokens")] for row in rows]
    return [Arrival(at - times[0], [i] * num_prompt, num_output)
            for i, (at, (num_prompt, num_output)) in enumerate(zip(times, lengths))]


def at_load(arrivals: list[Arrival]) -> list[Arrival]:
    """The same arrivals, sped up or slowed down to LOAD."""
    needed_s = 0.0002 * sum(len(arrival.prompt) + arrival.num_output for arrival in arrivals)
    stretch = needed_s / LOAD / max(arrival.at_s for arrival in arrivals)
    return [Arrival(arrival.at_s * stretch, arrival.prompt, arrival.num_output) for arrival in arrivals]


@dataclass
class Replay:
    ttft: list[float]  # seconds, sorted
    hit_rate: float  # of prompt tokens, at first admission
    num_preemptions: int
    num_evictions: int

    def __str__(self) -> str:
        p50, p95 = (self.ttft[int(share * len(self.ttft))] for share in (0.5, 0.95))
        return f"time to first token p50 {p50:.2f} s, p95 {p95:.2f} s, {self.num_preemptions} preemptions"


def replay(arrivals: list[Arrival], num_pages: int) -> Replay:
    cache = Cache([KVSpec(1, 1, 1)], num_pages, PAGE_SIZE, torch.int8, max_leases=256)
    scheduler = Scheduler(cache, 256)
    params = SamplingParams(seed=0)
    waiting, ends, done, ttft, now_s = deque(arrivals), {}, [], [], 0.0
    while waiting or ends:
        while waiting and waiting[0].at_s <= now_s:
            arrival = waiting.popleft()
            request = Request("", params, list(arrival.prompt), Sampler(params, [], [], 1), submitted_s=arrival.at_s)
            scheduler.add(request)
            ends[request] = len(arrival.prompt) + arrival.num_output
        chunks = scheduler.plan(512)
        if not chunks:
            now_s = waiting[0].at_s
            continue
        seconds = 0.002 + 0.0002 * sum(chunk.end - chunk.start for chunk in chunks)
        scheduler.observe(chunks, 1000 * seconds)
        now_s += seconds
        for chunk in chunks:
            draws = chunk.draws
            scheduler.commit(chunk)
            if draws:
                chunk.request.tokens.append(-len(done))  # what is drawn is shared by chance only
                if chunk.request.num_output == 1:
                    ttft.append(now_s - chunk.request.submitted_s)
                if len(chunk.request.tokens) == ends[chunk.request]:
                    scheduler.remove(chunk.request)
                    done.append(chunk.request)
                    del ends[chunk.request]
    assert len(done) == len(arrivals) and cache.num_available == cache.num_pages
    num_cached, num_prompt = (sum(getattr(request, name) for request in done) for name in ("num_cached", "num_prompt"))
    return Replay(sorted(ttft), num_cached / num_prompt, sum(request.num_preemptions for request in done),
                  cache.groups[0].pool.num_evictions)


def ideal_hit_rate(arrivals: list[Arrival], num_pages: int | None = None) -> float:
    """What a least-recently-used cache of so many whole pages (None: of any size) finds if every request is served in
    no time, before the next one comes. At least one token is always left to compute."""
    cached: OrderedDict[tuple, None] = OrderedDict()
    num_hit = 0
    for arrival in arrivals:
        keys, key = [], ()
        for start in range(0, len(arrival.prompt) - PAGE_SIZE + 1, PAGE_SIZE):
            key = (hash(key), *arrival.prompt[start : start + PAGE_SIZE])
            keys.append(key)
        usable = keys[: (len(arrival.prompt) - 1) // PAGE_SIZE]
        num_hit += next((i for i, key in enumerate(usable) if key not in cached), len(usable)) * PAGE_SIZE
        for key in reversed(keys):
            cached[key] = None
            cached.move_to_end(key)
        while num_pages is not None and len(cached) > num_pages:
            cached.popitem(last=False)
    return num_hit / sum(len(arrival.prompt) for arrival in arrivals)


@pytest.mark.parametrize("name", ["conversation_trace.jsonl", "synthetic_trace.jsonl"])
def test_the_hit_rate_of_shared_prefixes_is_near_what_an_infinite_cache_finds(name):
    arrivals = at_load(mooncake(name))
    bound = ideal_hit_rate(arrivals)
    num_distinct = len({token for arrival in arrivals for token in arrival.prompt})
    assert replay(arrivals, 2 * num_distinct).hit_rate >= 0.99 * bound  # nothing is ever evicted
    for pages in (num_distinct // 10, num_distinct // 50):
        ideal = ideal_hit_rate(arrivals, pages)
        found = replay(arrivals, pages)
        print(f"\n{name}: {pages} pages: hit rate {found.hit_rate:.1%} (served in no time {ideal:.1%}, infinite "
              f"{bound:.1%}), {found.num_evictions} evictions, {found}")
        assert found.hit_rate <= bound + 1e-9
        assert found.hit_rate >= 0.95 * ideal


@pytest.mark.parametrize("name", ["azure_code.csv", "azure_conv.csv"])
def test_lengths_as_they_come_are_all_served(name):
    arrivals = at_load(azure(name))
    found = replay(arrivals, 4000)
    print(f"\n{name}: {found}")
    assert found.hit_rate == 0
