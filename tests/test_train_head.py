"""tools/train_head.py: what it writes, that its unrolled training computes what drafting computes, that it learns."""

import json
import signal
import sys
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from safetensors.torch import load_file

import tiny
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from model import load_model
from vocab import load_tokenizer

sys.path.insert(0, str(ROOT / "tools"))
import train_head  # noqa: E402 (it needs the path above)
from own_text import Clock, Text, table, write_text  # noqa: E402
from train_head import Eagle, Judgement, Medusa, Plan, blocks, chains, evaluate, train, write  # noqa: E402

STEPS = 3


def load(folder) -> Engine:
    with open_checkpoint(folder) as checkpoint:
        config = EngineConfig(num_pages=400, max_requests=16, prefix_cache=False)
        return Engine(load_model(checkpoint, torch.float32), config, load_tokenizer(checkpoint))


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    return load(tiny.tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=6))


@pytest.fixture(scope="module")
def text(engine) -> Text:
    return write_text(engine, Clock("text", 60), 3000, seed=1)


@pytest.fixture
def head(engine, text) -> Eagle:
    """All of it random, so that every part matters."""
    eagle = Eagle(engine.model, text, torch.arange(0, 320, 5))
    for i, (name, weight) in enumerate(eagle.weights.items()):
        noise = randn(*weight.shape, seed=i)
        eagle.weights[name] = 1 + 0.2 * noise if weight.dim() == 1 else noise / weight.shape[1] ** 0.5
    return eagle


def published(head, folder) -> tuple[dict, dict]:
    write(head, folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text("utf-8"))


# ---- the text


def test_features_are_those_of_the_whole_text_computed_at_once(engine, text):
    """Hidden rows, the sum and the likeliest token, against the model run over one sequence that was decoded."""
    rows = text[text.doc_T == 3]
    other = load_whole(engine, rows)
    logits = other @ table(engine.model, engine.model.output).T
    assert (rows.h_TD.float() - other).abs().max() < 0.03  # bfloat16
    drawn = rows.drawn_T
    assert (rows.log_sum_T - logits.logsumexp(-1))[drawn].abs().max() < 0.05
    assert torch.equal(rows.best_T[drawn], logits.argmax(-1)[drawn])
    assert rows.log_sum_T[~drawn].isinf().all()


def load_whole(engine, rows) -> torch.Tensor:
    """Normalised hidden rows of a sequence, through an engine of its own."""
    seen = []
    own = Engine(engine.model, EngineConfig(num_pages=40, prefix_cache=False))
    forward = own.model.forward
    try:
        own.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
        own.logits(rows.token_T.tolist())
    finally:
        del own.model.forward
    return torch.cat([h_TD for h_TD, _ in seen])


def test_half_of_the_text_is_greedy_and_none_of_it_is_left_out(text):
    """A sequence's rows: those of its prompt, then those from which the model drew a token, the likeliest if greedy."""
    for doc in range(int(text.doc_T.max()) + 1):
        rows = text[text.doc_T == doc]
        drawn = rows.drawn_T.tolist()
        assert drawn == sorted(drawn)
        if rows.greedy_T[0]:
            assert torch.equal(rows.best_T[:-1][rows.drawn_T[:-1]], rows.token_T[1:][rows.drawn_T[:-1]])
    greedy = {int(doc): bool(is_greedy) for doc, is_greedy in zip(text.doc_T, text.greedy_T)}
    assert abs(sum(greedy.values()) - len(greedy) / 2) <= 1


# ---- what is computed


def drafted(head: Eagle, rows: Text, start: int, num_steps: int) -> list[torch.Tensor]:
    """Hidden rows of a chain from place `start`, by a plain step-by-step computation: a list of keys and values that
    grows by one entry at a time, and one head after the other."""
    w = {name.removeprefix("midlayer."): weight for name, weight in head.weights.items()}
    config, D = head.config, head.config.hidden
    A, group = config.head_dim, config.heads // config.kv_heads

    def norm(x, name):
        return x / (x.square().mean() + config.norm_eps).sqrt() * w[f"{name}.weight"]

    def rotated(x, place):
        a, b = x[: A // 2], x[A // 2 :]
        angle = (place * config.rope.theta ** (-torch.arange(0, A, 2, dtype=torch.float64) / A)).float()
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))

    keys, values, found = [], [], []
    fc = head.weights["fc.weight"] / head.size_X
    for place in range(start + num_steps):
        f = fc @ rows.taps_TX[place].float() if place <= start else found[-1]
        x = torch.cat((norm(head.embed_VD[rows.token_T[place + 1]], "input_layernorm"), norm(f, "hidden_norm")))
        q, k, v = (w[f"self_attn.{kind}_proj.weight"] @ x for kind in "qkv")
        keys.append([rotated(part, place) for part in k.split(A)])
        values.append(v.split(A))
        out = []
        for i, query in enumerate(q.split(A)):
            scores = torch.stack([rotated(query, place) @ key[i // group] for key in keys]) / A**0.5
            out.append(sum(share * value[i // group] for share, value in zip(scores.softmax(0), values)))
        h = f + w["self_attn.o_proj.weight"] @ torch.cat(out)
        x = norm(h, "post_attention_layernorm")
        act = F.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
        h = h + w["mlp.down_proj.weight"] @ act
        assert len(h) == D
        if place >= start:
            found.append(h)
    return found


def test_unrolled_training_computes_what_drafting_computes(head, text):
    """At each place where a chain may begin, in rows that hold parts of several sequences; and no other place begins
    a chain."""
    rows = blocks(text, STEPS)
    row = next(r for r in range(len(rows)) if len(rows.doc_T[r].unique()) > 1 and len(chains(rows[[r]], STEPS)) > 20)
    block = rows[[row]]
    unrolled = torch.stack([h_RTD[0] for h_RTD in head.hidden(block, STEPS)])
    starts = chains(block, STEPS).tolist()
    for start in (starts[0], starts[-1]):
        first = int((block.doc_T[0] == block.doc_T[0, start]).nonzero()[0])
        expected = torch.stack(drafted(head, block[0][slice(first, 256)], start - first, STEPS))
        assert (unrolled[:, start] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_chains_are_where_the_model_itself_drew_all_their_tokens(text):
    rows = blocks(text, STEPS)
    found = set(chains(rows, STEPS).tolist())
    doc, drawn = rows.doc_T.tolist(), rows.drawn_T.tolist()
    for place in range(rows.doc_T.numel()):
        r, i = divmod(place, 256)
        whole = i + STEPS < 256 and doc[r][i] == doc[r][i + STEPS] and all(drawn[r][i + 1 : i + STEPS + 1])
        assert (place in found) == whole
    assert found


def test_the_judgement_and_its_gradient_are_those_of_the_formula():
    """Chance sum min(p, q) and cross-entropy, where other ids have a logit of 0 each."""
    logits_NC = (2 * randn(5, 30)).double().requires_grad_()
    p_NC = 0.9 * randn(5, 30, seed=1).double().softmax(-1)
    outside = torch.tensor(12.0, dtype=torch.float64).log().item()
    q_NC = torch.cat((logits_NC, torch.zeros(5, 12)), 1).softmax(-1)[:, :30]
    accept_N, entropy_N = Judgement.apply(logits_NC, p_NC, outside)
    assert torch.allclose(accept_N, torch.minimum(p_NC, q_NC).sum(-1), rtol=1e-12)
    assert torch.allclose(entropy_N, -(p_NC * q_NC.log()).sum(-1), rtol=1e-12)
    assert torch.autograd.gradcheck(lambda logits_NC: Judgement.apply(logits_NC, p_NC, outside), (logits_NC,))


def test_the_models_probabilities_are_recomputed_from_hidden_rows(engine, text, head):
    """A head whose last matrix is the model's own, judged on the model's own rows, always stands where it knows all
    ids."""
    medusa = Medusa(engine.model, text, torch.arange(320), num_heads=STEPS)
    for i in range(STEPS):
        medusa.weights[f"medusa_head.{i}.1.weight"] = medusa.known_CD
        medusa.weights[f"medusa_head.{i}.0.linear.bias"] -= 100  # whose SiLU is nothing
    block = blocks(text, STEPS)[[0]]
    chain_N = chains(block, STEPS)
    for step in range(STEPS):
        ahead = Text(**{field.name: getattr(block, field.name) for field in fields(block)})
        ahead.h_TD = block.h_TD.roll(-1 - step, 1)
        medusa.hidden = lambda _, num_steps: [ahead.h_TD.float()] * num_steps
        accept_N, _, logits_NC = list(train_head.judged(medusa, block, STEPS, chain_N))[step]
        assert (accept_N - 1).abs().max() < 0.01
        assert (logits_NC.argmax(-1) == block.best_T.flatten()[chain_N + step + 1]).float().mean() > 0.95  # near-ties


# ---- what is written


def test_an_eagle_head_has_the_published_layout(head, tmp_path):
    tensors, config = published(head, tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (64, 192), "norm.weight": (64,), "lm_head.weight": (64, 64), "d2t": (64,), "t2d": (320,),
        "midlayer.input_layernorm.weight": (64,), "midlayer.hidden_norm.weight": (64,),
        "midlayer.post_attention_layernorm.weight": (64,),
        "midlayer.self_attn.q_proj.weight": (64, 128), "midlayer.self_attn.k_proj.weight": (32, 128),
        "midlayer.self_attn.v_proj.weight": (32, 128), "midlayer.self_attn.o_proj.weight": (64, 64),
        "midlayer.mlp.gate_proj.weight": (96, 64), "midlayer.mlp.up_proj.weight": (96, 64),
        "midlayer.mlp.down_proj.weight": (64, 96)}
    assert (torch.arange(64) + tensors["d2t"]).tolist() == list(range(0, 320, 5))
    assert tensors["t2d"].nonzero()[:, 0].tolist() == list(range(0, 320, 5)) and tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["fc.weight"], (head.weights["fc.weight"] / head.size_X).bfloat16())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 64
    assert (config["vocab_size"], config["num_key_value_heads"], config["rope_theta"]) == (320, 2, 10000.0)


def test_medusa_heads_have_the_published_layout(engine, text, tmp_path):
    """Rows of ids that the heads do not know are zero."""
    ids = torch.arange(0, 320, 5)
    tensors, config = published(Medusa(engine.model, text, ids), tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f"medusa_head.{i}.{name}": shape for i in range(3) for name, shape in (
            ("0.linear.weight", (64, 64)), ("0.linear.bias", (64,)), ("1.weight", (320, 64)))}
    assert config == {"medusa_num_heads": 3, "medusa_num_layers": 1, "hidden_size": 64, "vocab_size": 320}
    known = tensors["medusa_head.2.1.weight"].abs().sum(1) > 0
    assert known.nonzero()[:, 0].tolist() == ids.tolist()


def test_what_cannot_be_is_said_in_one_line(capsys, tmp_path):
    assert train_head.main(["eagle", str(tmp_path), "-m", str(tmp_path / "none")]) == 1
    assert train_head.main(["falcon", str(tmp_path)]) == 2
    folder = tiny.tiny_llama(tmp_path / "model")
    assert train_head.main(["eagle", str(tmp_path), "-m", str(folder), "--tokens", "100"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("train_head.py: error: ") for line in lines)
    assert "too few to train on: raise --minutes or --tokens" in lines[2]


@pytest.mark.slow
def test_interrupted_training_writes_what_it_has(tmp_path, monkeypatch):
    folder = tiny.tiny_llama(tmp_path / "model")

    def interrupt(clock, line):
        if clock.what == "medusa" and clock.step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Clock, "tell", interrupt)
    words = ["medusa", str(tmp_path), "-m", str(folder), "--tokens", "20000", "--steps", "1000", "--ids", "100"]
    assert train_head.main(words) == 130
    tensors = load_file(tmp_path / "medusa" / "model.safetensors")
    assert tensors["medusa_head.0.0.linear.weight"].abs().sum() > 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_heads(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "model")
    words = ["-m", str(folder), "--tokens", "20000", "--steps", "3", "--ids", "100"]
    assert [train_head.main(["medusa", str(tmp_path / name), *words]) for name in "ab"] == [0, 0]
    first, second = ((tmp_path / name / "medusa" / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


# ---- that it learns


def script() -> dict:
    """Each of 40 ids goes on to one of two others; the second is rare."""
    return {i: {(3 * i + 1) % 40: 0.8, (7 * i + 2) % 40: 0.2} for i in range(40)} | {None: 0}


@pytest.mark.slow
@pytest.mark.parametrize("kind, gain", [("eagle", 0.2), ("medusa", 0.01)])
def test_training_raises_acceptance(kind, gain, tmp_path):
    """Medusa's heads begin close to the best they can be: what follows a token is linear in its hidden row here."""
    engine = load(tiny.scripted(tmp_path / "model", script(), vocab=320))
    text = write_text(engine, Clock("text", 60), 12000, seed=1)
    held = text.doc_T % 5 == 4
    text, held = text[~held], text[held]
    torch.manual_seed(0)
    ids = torch.arange(64)
    head = Eagle(engine.model, text, ids) if kind == "eagle" else Medusa(engine.model, text, ids)
    before = accepted(head, held)
    train(head, text, Clock(kind, 60, num_steps=80), STEPS, Plan(), seed=1)
    after = accepted(head, held)
    assert after > before + gain, (before, evaluate(head, held, STEPS))


@torch.no_grad()
def accepted(head, text: Text) -> float:
    block = blocks(text, STEPS)
    accepts, _, _ = zip(*train_head.judged(head, block, STEPS, chains(block, STEPS)))
    return float(torch.stack(accepts).mean())
