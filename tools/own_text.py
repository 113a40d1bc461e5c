"""Text that a model writes itself, with what it computed on the way: what a draft head learns from (train_head.py).

Owns the prompts, and the way of hidden rows and logits' sums from the engine's steps into tensors. Knows nothing of
heads. Start at `write_text`. Letters besides those of model.py: X the width of all tapped rows together.
"""
from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine import Engine  # noqa: E402 (it needs the path above)
from kvcache import Cache  # noqa: E402
from model import Model  # noqa: E402
from sampling import NO_DRAFT, SamplingParams  # noqa: E402
from scheduler import Request  # noqa: E402

# The model answers many small questions, half of them greedily, half of them with draws.
TASKS = """Explain {} to a curious teenager. | What are the main causes and effects of {}?
Write a short story about {}. | Give me five practical tips about {}. | Summarize the history of {} in two paragraphs.
Write a poem about {}. | What are common misconceptions about {}?
Compare {} with something similar and say how they differ. | Write an email to a colleague about {}.
List ten facts about {}. | Write a dialogue between two friends about {}. | Describe {} step by step.
What questions would an expert ask about {}? | Write a lesson plan about {}.
Write a Python function that has to do with {}, and explain it. | Define {} and give three examples.
Argue for and against {}. | How has {} changed over the last hundred years? | Write a news report about {}.
What should a beginner know about {}? | Give a recipe or a procedure that involves {}.
Write a product review about {}. | Write a small SQL schema for data about {}.
Make a table of terms about {} with their meanings. | What is the future of {}?
Write a quiz of five questions about {}, with answers. | Write a speech in praise of {}.
Translate a simple sentence about {} into French and Spanish, and explain the words. | Write a diary entry about {}.
Solve a word problem with numbers about {}, step by step. | Write a JSON document that describes {}."""
TOPICS = """photosynthesis, the Roman Empire, bicycles, bread, the Moon, climate change, chess, jazz, vaccines,
earthquakes, machine learning, the printing press, coffee, whales, democracy, volcanoes, black holes, electric cars,
gardening, the water cycle, money, the French Revolution, bees, football, sleep, sorting algorithms, DNA, the Silk
Road, cats, inflation, rivers, wind power, cooking rice, public libraries, the human heart, robots, mountains, trains,
novels, probability, the Internet, honesty, running, glass, the Great Wall of China, antibiotics, painting, data
privacy, gravity, school, maps, the violin, owls, recycling, space travel, tea, friendship, prime numbers, bridges,
the weather, small businesses, tourism, plastic, dinosaurs, photography, a job interview, computer networks, the
immune system, rain, fractions, the theatre, migration, clocks, the ocean floor, working from home, solar panels,
salt, ants, ancient Egypt, a city park, unit testing, moving house, a long winter, the stock market, healthy food,
dogs, learning a language"""
BEGINNINGS = ('def read_{0}(path):\n    """Reads a file about {1}."""\n', "class {0}:\n    def __init__(self, name):\n",
              "import random\n\n# A small simulation of {1}\n", "# {1}\n\n## Introduction\n\n",
              "The story of {1} begins with",
              "Most people who think about {1}", "In the early morning, when nobody was thinking of {1},",
              "Question: What is {1}?\nAnswer:")
ANSWER_TOKENS = (200, 400)  # the longest answers, at least and at most


def prompts(engine: Engine, seed: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Each task with each topic once, in an order of its own; one in six is a text to go on with, no question."""
    chance, tokenizer = random.Random(seed), engine.tokenizer
    tasks = [task.strip() for line in TASKS.split("\n") for task in line.split("|")]
    topics = [topic.strip() for topic in TOPICS.replace("\n", " ").split(",")]
    pairs = list(itertools.product(tasks, topics))
    for number in itertools.count():
        if number % len(pairs) == 0:
            chance.shuffle(pairs)
        task, topic = pairs[number % len(pairs)]
        if number % 6 == 5 or tokenizer.chat_template is None:
            ids = tokenizer.encode(chance.choice(BEGINNINGS).format(topic.replace(" ", "_"), topic))
        else:
            ids = tokenizer.chat([{"role": "user", "content": task.format(topic)}])
        most = min(chance.randint(*ANSWER_TOKENS), engine.capacity - len(ids) - 1)
        temperature = 0.0 if number % 2 else chance.choice((0.7, 0.8, 0.9, 1.0))
        yield ids, SamplingParams(max_tokens=most, temperature=temperature, seed=seed + number)


@dataclass
class Text:
    """All sequences one after the other, and what the model computed at each token. `drawn_T`: whether the model wrote
    the token after it; `greedy_T`: at temperature 0. Where it did, `best_T` is the likeliest id, and `log_sum_T` the
    logarithm of the sum of exponentiated logits."""

    token_T: Tensor
    doc_T: Tensor  # number of its sequence
    drawn_T: Tensor
    greedy_T: Tensor
    h_TD: Tensor
    taps_TX: Tensor
    log_sum_T: Tensor
    best_T: Tensor

    def __getitem__(self, rows) -> Text:
        return Text(*(getattr(self, field.name)[rows] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.token_T)


class Recorder:
    """A drafter that drafts nothing and keeps the hidden rows that it is shown: so features come with the text. What a
    row's logits are like it notes when the engine has them computed for the draw."""

    name, is_free = "recorder", True

    def __init__(self, model: Model):
        last = len(model.layers) - 1
        self.layers = [min(max(layer, 0), last) for layer in (2, (last + 1) // 2, last - 2)]
        self.taps = tuple(sorted(set(self.layers)))  # a step hands them out in this order, each once
        self.logits, self.num_seen = model.logits, 0
        self.steps: list[tuple[Tensor, Tensor]] = []  # rows of h and of all taps side by side
        self.rows: dict[Request, list[int]] = {}  # of each place of a request, among all rows that were seen
        self.drawing: list[int] = []  # of them those whose logits were computed, and what these are like:
        self.likes: list[tuple[Tensor, Tensor, Tensor]] = []  # the greatest logit, its id, the logarithm of the sum

    def watched_logits(self, h_LD: Tensor) -> Tensor:
        logits_LV = self.logits(h_LD)
        top_L, id_L = logits_LV.max(-1)
        log_p_L = torch.log_softmax(logits_LV, -1).gather(1, id_L[:, None])[:, 0]  # ten times as fast as logsumexp
        self.likes.append((top_L, id_L, top_L - log_p_L))
        return logits_LV

    def bind(self, cache: Cache) -> None:
        """Whatever the cache: rows are kept by place."""

    def observe(self, spans: Sequence[tuple[Request, int, int]], h_TD: Tensor, taps: Sequence[Tensor]) -> None:
        taps_TX = torch.cat([taps[self.taps.index(layer)] for layer in self.layers], 1)
        self.steps.append((h_TD.bfloat16(), taps_TX.bfloat16()))
        for request, start, end in spans:  # what was preempted is computed again
            first = self.num_seen
            self.num_seen += end - start
            self.rows.setdefault(request, [])[start:end] = range(first, self.num_seen)
            if end == len(request.tokens):  # the next token is drawn
                self.drawing.append(self.num_seen - 1)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list:
        return [NO_DRAFT] * len(requests)

    def forget(self, request: Request) -> None:
        pass

    def text(self, requests: Sequence[Request], output_VD: Tensor) -> Text:
        row_T = torch.tensor([row for request in requests for row in self.rows[request]])
        counts = [len(self.rows[request]) for request in requests]

        def of_each(values: Callable[[Request], Sequence]) -> Tensor:
            return torch.tensor([x for request, count in zip(requests, counts) for x in values(request)[:count]])

        h_TD, taps_TX = (torch.cat(parts)[row_T] for parts in zip(*self.steps))
        greatest_L, best_L, log_sum_L = map(torch.cat, zip(*self.likes))
        at_T, is_drawn_T = torch.zeros(self.num_seen, dtype=torch.int64), torch.zeros(self.num_seen, dtype=torch.bool)
        at_T[self.drawing], is_drawn_T[self.drawing] = torch.arange(len(self.drawing)), True
        at_T, is_drawn_T = at_T[row_T], is_drawn_T[row_T]
        # Logits will be computed from these rows, and differ a little from those of quantized kernels. So that the
        # likeliest token has the probability that it had, the sum takes on its logit's difference.
        again_T = torch.cat([(h_ID.float() * output_VD[id_I]).sum(-1)
                             for h_ID, id_I in zip(h_TD.split(4096), best_L[at_T].split(4096))])
        log_sum_T = log_sum_L[at_T] - greatest_L[at_T] + again_T
        return Text(of_each(lambda r: r.tokens), torch.arange(len(requests)).repeat_interleave(torch.tensor(counts)),
                    is_drawn_T, of_each(lambda r: [r.params.temperature == 0] * len(r.tokens)), h_TD, taps_TX,
                    log_sum_T.masked_fill(~is_drawn_T, math.inf), best_L[at_T])


def write_text(engine: Engine, clock: Clock, num_tokens: float, seed: int) -> Text:
    """Has the model answer prompts until the time is over, or as many prompts as may take so many tokens with their
    answers. (To stop at a token would not give the same text twice: steps are cut by how long they take.)"""
    recorder, source, asked = Recorder(engine.model), prompts(engine, seed), 0
    requests: list[Request] = []
    engine.draft_with(recorder)
    engine.model.logits = recorder.watched_logits
    while not clock.is_over and (asked < num_tokens or engine.has_work):
        while asked < num_tokens and len(engine.writers) < engine.config.max_requests:
            ids, params = next(source)
            requests.append(engine.submit(ids, params))
            asked += len(ids) + params.max_tokens
        engine.step()
        clock.tell(lambda: f"{recorder.num_seen} tokens of text")
    for request in list(engine.writers):
        engine.abort(request)
    engine.model.logits = recorder.logits
    return recorder.text([request for request in requests if request in recorder.rows],
                         table(engine.model, engine.model.output))


def table(model: Model, matrix) -> Tensor:
    """A matrix with a row for each id, as numbers, however it is stored."""
    return model.ops.embed(matrix.weight, torch.arange(model.config.vocab)).float()


class Clock:
    """How much of a phase is over, by the time it may take or by the number of its steps; and a line now and then."""

    def __init__(self, what: str, seconds: float, num_steps: int | None = None):
        self.what, self.seconds, self.num_steps = what, seconds, num_steps
        self.start_s = self.told_s = time.perf_counter()
        self.step = 0

    @property
    def part(self) -> float:
        if self.num_steps is not None:
            return self.step / self.num_steps
        return (time.perf_counter() - self.start_s) / self.seconds

    @property
    def is_over(self) -> bool:
        return self.part >= 1

    def tell(self, line: Callable[[], str], every_s: float = 20) -> None:
        now_s = time.perf_counter()
        if now_s - self.told_s >= every_s:
            self.told_s = now_s
            print(f"{self.what} {now_s - self.start_s:5.0f} s: {line()}", flush=True)
