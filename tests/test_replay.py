"""replay.py: replayed decode steps give the bits that the same steps give through Python."""

import pytest
import torch

import tiny
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from model import load_model
from sampling import SamplingParams

PROMPTS = [list(range(n, 3 * n)) for n in (1, 5, 17, 40)]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request, tmp_path_factory, native_ops):
    folder = tmp_path_factory.mktemp(request.param)
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with open_checkpoint(getattr(tiny, f"tiny_{request.param}")(folder, **(windows if request.param == "qwen2" else {}))
                         ) as checkpoint:
        return load_model(checkpoint, torch.float32, ops=native_ops)


def run(model, replayed: bool):
    """Ids and the logits of every token; requests end one by one, so that all sizes from 4 to 1 occur twice."""
    engine = Engine(model, EngineConfig(num_pages=64, page_size=8))
    if not replayed:
        engine.replay.new_recording = None
    seen, logits = [], model.logits
    engine.model.logits = lambda h_LD: seen.append(logits(h_LD).clone()) or seen[-1]
    requests = [engine.submit(prompt, SamplingParams(max_tokens=3 + 2 * i, ignore_eos=True))
                for i, prompt in enumerate(PROMPTS)]
    try:
        while engine.has_work:
            engine.step()
    finally:
        del engine.model.logits
    return [request.output_ids for request in requests], seen, engine.replay.recorded


def test_replayed_steps_have_the_bits_of_steps_through_python(model):
    ids, logits, recorded = run(model, replayed=True)
    other_ids, other_logits, none_recorded = run(model, replayed=False)
    assert {(1, 1), (2, 2), (3, 3), (4, 4)} <= {size[:2] for size in recorded} and not none_recorded
    assert ids == other_ids
    assert len(logits) == len(other_logits) and all(map(torch.equal, logits, other_logits))


def test_two_engines_replay_on_their_own_caches(model):
    first, second = (Engine(model, EngineConfig(num_pages=16, page_size=8)) for _ in range(2))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    alone = [Engine(model, EngineConfig(num_pages=16, page_size=8)).generate([prompt], params)[0].token_ids
             for prompt in PROMPTS[:2]]
    ours, theirs = first.submit(PROMPTS[0], params), second.submit(PROMPTS[1], params)
    while first.has_work or second.has_work:
        first.step(), second.step()
    assert [ours.output_ids, theirs.output_ids] == alone


def test_operations_that_cannot_record_run_every_step(tmp_path):
    with open_checkpoint(tiny.tiny_llama(tmp_path)) as checkpoint:
        engine = Engine(load_model(checkpoint, torch.float64), EngineConfig(num_pages=16, page_size=8))
    engine.generate([PROMPTS[1]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert not engine.replay.recorded
