"""Batch files for tests: making them, running them on a tiny model, reading the answers."""

import json
import random
from argparse import Namespace
from pathlib import Path

import torch

import batch
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from model import load_model
from vocab import load_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def load(folder, **config) -> Engine:
    with open_checkpoint(folder) as checkpoint:
        return Engine(load_model(checkpoint, torch.float64), EngineConfig(**{"max_requests": 3, "page_size": 8,
                      "num_pages": 200} | config), load_tokenizer(checkpoint), name="tiny")


def run(engine, source, output=None, sampling=(), **flags) -> int:
    flags = dict.fromkeys(("ordered", "resume", "overwrite", "raw", "stats", "watch"), False) | flags
    args = Namespace(input=str(source), output=output and str(output),
                     sampling={"max_tokens": 6, "ignore_eos": True} | dict(sampling), **({"deadline": None} | flags))
    return batch.main(args, lambda args: engine)


def write(path: Path, lines) -> Path:
    """A file of lines: JSON unless they are text already."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def by_id(path: Path) -> dict:
    """Answers by their id; each once; without what depends on who ran beside them."""
    answers = read(path)
    found = {answer["id"]: answer for answer in answers}
    assert len(found) == len(answers)
    return {id: {key: value for key, value in answer.items() if key not in ("cached_tokens", "preemptions")}
            for id, answer in found.items()}


def records(num: int) -> list[dict]:
    """Short lines of very different lengths, some sampled, all sharing a beginning."""
    rng, made = random.Random(5), []
    for i in range(num):
        text = "Once upon a time " + "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 60)))
        made.append({"id": f"r{i}", "prompt": text, "max_tokens": rng.choice((1, 2, 5, 30)), "seed": i,
                     "temperature": rng.choice((0, 0.9)), "raw": rng.random() < 0.5})
    return made


def chat_line(custom_id="a", **body) -> dict:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1} | body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def text_line(custom_id="a", **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": TEXT, "body": {"prompt": "hi", "seed": 1} | body}
