"""The networks that continue hidden rows, against references written out here; and their files."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from tiny_heads import eagle_tensors, medusa_tensors, mtp_tensors, write_eagle, write_medusa

import kernels
from checkpoint import open_checkpoint
from heads import Eagle, Eagle3, open_eagle, open_medusa, open_mtp
from kvcache import Cache, Lease
from model import Batch, load_model

CONFIG = tiny.tiny_config("llama", num_hidden_layers=8)
V, D, A, EPS = 320, 64, 16, 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tensors = tiny.tiny_tensors(CONFIG) | mtp_tensors(CONFIG)
    return tiny.write_safetensors(tmp_path_factory.mktemp("model"), "llama", tensors=tensors, num_hidden_layers=8,
                                  num_nextn_predict_layers=1)


def load(folder, ops=kernels):
    with open_checkpoint(folder) as checkpoint:
        return load_model(checkpoint, torch.float64 if ops is kernels else torch.float32, ops=ops)


@pytest.fixture(scope="module", params=["kernels", "native"])
def model(folder, request):
    return load(folder, kernels if request.param == "kernels" else request.getfixturevalue("native_ops"))


def near(got, expected, model):
    """Within what float64 rounds, or natively float32."""
    error = (got.double() - expected).abs().max()
    assert error < (1e-10 if model.dtype == torch.float64 and model.ops is kernels else 2e-5) * expected.abs().max()


# ---- references: one sequence, plain attention, float64


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def rotated(x_THA, theta=10000.0):
    place = torch.arange(len(x_THA), dtype=torch.float64)
    angle = place[:, None] * theta ** (-torch.arange(0, A, 2, dtype=torch.float64) / A)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x_THA[..., : A // 2], x_THA[..., A // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attended(x, t, name):
    q, k, v = ((x @ t[f"{name}.self_attn.{part}_proj.weight"].double().T).unflatten(1, (-1, A)) for part in "qkv")
    q, k, v = rotated(q).transpose(0, 1), rotated(k).transpose(0, 1), v.transpose(0, 1)
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = (q @ k.transpose(1, 2) / A**0.5).masked_fill(~torch.ones(len(x), len(x)).tril().bool(), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return out @ t[f"{name}.self_attn.o_proj.weight"].double().T


def fed(h, t, name):
    x = norm(h, t[f"{name}.post_attention_layernorm.weight"])
    gate, up = (x @ t[f"{name}.mlp.{part}_proj.weight"].double().T for part in ("gate", "up"))
    return h + (F.silu(gate) * up) @ t[f"{name}.mlp.down_proj.weight"].double().T


def eagle_1(embedding, f, t):
    h = torch.cat((embedding, f), -1) @ t["fc.weight"].double().T + t.get("fc.bias", torch.zeros(D)).double()
    return fed(h + attended(h, t, "layers.0"), t, "layers.0")


def eagle_3(embedding, f, t, adds_normed=False):
    normed = norm(f, t["midlayer.hidden_norm.weight"])
    x = torch.cat((norm(embedding, t["midlayer.input_layernorm.weight"]), normed), -1)
    return fed((normed if adds_normed else f) + attended(x, t, "midlayer"), t, "midlayer")


def mtp(embedding, f, t):
    name = "model.layers.8"
    x = torch.cat((norm(embedding, t[f"{name}.enorm.weight"]), norm(f, t[f"{name}.hnorm.weight"])), -1)
    h = x @ t[f"{name}.eh_proj.weight"].double().T
    h = fed(h + attended(norm(h, t[f"{name}.input_layernorm.weight"]), t, name), t, name)
    return norm(h, t[f"{name}.shared_head.norm.weight"])


# ---- and ours


TOKENS = [(37 * i + 11) % V for i in range(21)]
FEATURES = torch.randn(21, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
EMBEDDING = tiny.tiny_tensors(CONFIG)["model.embed_tokens.weight"].double()[TOKENS]
HEAD = tiny.tiny_tensors(CONFIG)["lm_head.weight"].double()


def run(network, model, chunks=(21,), **settings):
    """The network's rows for all tokens, computed in these chunks."""
    dtype = model.dtype if model.ops is kernels else torch.float32
    cache = Cache(model.kv_specs(), 8, 8, dtype, new_kv=model.ops.new_kv)
    lease = Lease()
    cache.open(lease)
    cache.grow(lease, 21)
    config = network.config
    kv = model.ops.new_kv(8, 8, config.kv_heads, config.head_dim, config.head_dim, dtype, "cpu", 0)
    rows, start = [], 0
    for size in chunks:
        batch = Batch.pack(cache, [lease.row], [TOKENS[start : start + size]], [start], ())
        rows.append(network.forward(batch, FEATURES[start : start + size].to(dtype), kv).clone())
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("bias", [False, True])
def test_eagle_1(model, tmp_path, bias):
    network = open_eagle(write_eagle(tmp_path, CONFIG, 1, bias=bias), model)
    assert isinstance(network, Eagle) and network.taps == ()
    expected = eagle_1(EMBEDDING, FEATURES, eagle_tensors(CONFIG, 1, bias=bias))
    for chunks in ((21,), (5, 1, 1, 14)):
        near(run(network, model, chunks), expected, model)
    near(network.logits(expected.to(model.dtype)), expected @ HEAD.T, model)


@pytest.mark.parametrize("adds_normed", [False, True])
@pytest.mark.parametrize("draft_vocab", [None, 50])
def test_eagle_3(model, tmp_path, adds_normed, draft_vocab):
    folder = write_eagle(tmp_path, CONFIG, 3, draft_vocab=draft_vocab, norm_before_residual=adds_normed)
    network, tensors = open_eagle(folder, model), eagle_tensors(CONFIG, 3, draft_vocab=draft_vocab)
    assert isinstance(network, Eagle3) and network.taps == (2, 4, 5)
    taps = [torch.randn(4, D, dtype=torch.float64) for _ in range(3)]
    features = network.features(network.seen(None, [tap.to(model.dtype) for tap in taps]))
    near(features, torch.cat(taps, -1) @ tensors["fc.weight"].double().T, model)
    expected = eagle_3(EMBEDDING, FEATURES, tensors, adds_normed)
    for chunks in ((21,), (5, 1, 1, 14)):
        near(run(network, model, chunks), expected, model)
    scores = norm(expected, tensors["norm.weight"]) @ tensors["lm_head.weight"].double().T
    logits = network.logits(expected.to(model.dtype))
    ids = tensors["t2d"].nonzero()[:, 0] if draft_vocab else torch.arange(V)
    near(logits[:, ids], scores, model)
    others = torch.ones(V, dtype=torch.bool).index_fill_(0, ids, False)
    assert logits.isfinite().all() and (logits[:, others] < -1e20).all() and logits.shape == (21, V)


def test_mtp(model, folder):
    with open_checkpoint(folder) as checkpoint:
        network = open_mtp(checkpoint, model)
    expected = mtp(EMBEDDING, FEATURES, mtp_tensors(CONFIG))
    for chunks in ((21,), (5, 1, 1, 14)):
        near(run(network, model, chunks), expected, model)
    near(network.logits(expected.to(model.dtype)), expected @ HEAD.T, model)


@pytest.mark.parametrize("num_blocks, prefix", [(1, "medusa_head."), (2, "")])
def test_medusa(model, tmp_path, num_blocks, prefix):
    heads = open_medusa(write_medusa(tmp_path, CONFIG, 4, num_blocks, prefix=prefix), model)
    tensors = medusa_tensors(CONFIG, 4, num_blocks, prefix=prefix)
    assert len(heads) == 4
    for i, head in enumerate(heads):
        x = FEATURES
        for j in range(num_blocks):
            name = f"{prefix}{i}.{j}.linear"
            x = x + F.silu(x @ tensors[f"{name}.weight"].double().T + tensors[f"{name}.bias"].double())
        near(head(FEATURES.to(model.dtype)), x @ tensors[f"{prefix}{i}.{num_blocks}.weight"].double().T, model)


def test_mtp_in_a_gguf_is_the_same(folder, tmp_path):
    tensors = tiny.tiny_tensors(CONFIG) | mtp_tensors(CONFIG)
    twin = tiny.write_gguf(tmp_path / "twin.gguf", tensors=tensors, num_hidden_layers=8, num_nextn_predict_layers=1)
    rows = []
    for path in (folder, twin):
        model = load(path)
        assert len(model.layers) == 8 and not model.notes
        with open_checkpoint(path) as checkpoint:
            rows.append(run(open_mtp(checkpoint, model), model))
    assert rows[0].equal(rows[1])


def test_layers_for_prediction_are_no_news(model):
    """They belong to drafters: the model runs without them and does not call them unused."""
    assert model.notes == [] and len(model.layers) == 8


# ---- files that do not fit


@pytest.fixture
def plain(tmp_path):
    return load(tiny.tiny_llama(tmp_path / "plain", num_hidden_layers=8))


def broken(tensors, **changes):
    tensors = tensors | ({"fc.bias": changes["fc_bias"]} if "fc_bias" in changes else {})
    return {name: changes.get(name.replace(".", "_"), tensor) for name, tensor in tensors.items()
            if changes.get(name.replace(".", "_"), tensor) is not None}


@pytest.mark.parametrize("changes, settings, words", [
    ({"fc_weight": torch.zeros(D, D)}, {}, "fc.weight is (64, 64), not (64, 192)"),
    ({"norm_weight": None}, {}, "norm.weight (64,) is missing"),
    ({"midlayer_self_attn_q_proj_weight": None}, {}, "midlayer.self_attn.q_proj.weight"),
    ({"d2t": torch.full((50,), 300)}, {}, "d2t names ids 300 to 349"),
    ({"d2t": torch.zeros(49, dtype=torch.int64)}, {}, "d2t is (49,), not (50,)"),
    ({"d2t": torch.zeros(0, dtype=torch.int64)}, {}, "d2t is (0,), not (50,)"),
    ({"d2t": torch.tensor(3)}, {}, "d2t is (), not (50,)"), ({"fc_bias": torch.zeros(3)}, {}, "fc.bias is (3,)"),
    ({}, {"draft_vocab_size": "x"}, "'draft_vocab_size' is 'x'"), ({}, {"draft_vocab_size": -5}, "'draft_vocab_size'"),
    ({}, {"norm_before_residual": "no"}, "but must be true or false"),
    ({}, {"eagle_aux_hidden_state_layer_ids": 5}, "layers [5]"),
    ({}, {"hidden_size": 32}, "the head is 32 wide but the model 64"),
    ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "[1, 2]"),
    ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "layers 0 to 7"),
    ({}, {"eagle_aux_hidden_state_layer_ids": [5, 2, 7]}, "must ascend"),
    ({}, {"norm_output": True}, "norm_output is set")])
def test_a_head_of_another_model_is_refused(plain, tmp_path, changes, settings, words):
    tensors = broken(eagle_tensors(CONFIG, 3, draft_vocab=50), **changes)
    folder = write_eagle(tmp_path / "head", CONFIG, 3, tensors=tensors, **({"draft_vocab_size": 50} | settings))
    with pytest.raises(ValueError) as error:
        open_eagle(folder, plain)
    assert words in str(error.value) and str(folder) in str(error.value)


def test_folders_without_heads_are_refused(plain, tmp_path):
    for make, words in ((lambda folder: None, "no such folder"),
                        (lambda folder: folder.mkdir(), "no model.safetensors"),
                        (lambda folder: (folder / "pytorch_model.bin").touch(), "pickle"),
                        (lambda folder: write_medusa(folder, CONFIG | {"hidden_size": 32}), "not (64, 64)"),
                        (lambda folder: write_eagle(folder, CONFIG, 1), "holds 2 safetensors files")):
        make(tmp_path / "heads")
        with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
            open_medusa(tmp_path / "heads", plain)
    with open_checkpoint(tmp_path / "plain") as checkpoint, pytest.raises(ValueError, match="no layers for multi"):
        open_mtp(checkpoint, plain)
