"""Makes tests/data/references_*.json: what transformers answers on the same dequantized weights.

Run it by hand, once (it takes ten minutes and 9 GB): `python tests/make_references.py [smollm2 qwen0.5b qwen1.5b]`.
It uses nothing of this project: files are read and dequantized by the `gguf` package, ids come from a tokenizer put
together with the `tokenizers` library, the forward pass is that of transformers in float32. Start reading at `main`.

A file holds, for each prompt: its ids, 64 greedy ids (EOS is an ordinary token), the five likeliest ids of each step
with their log-probabilities, raw logits at 32 fixed ids after the prompt and at the last step, and the smallest gap
between the best and the second-best logit. A prompt with a gap under MIN_GAP is refused: rounding could flip it.
"""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import jinja2
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

DATA = Path(__file__).parent / "data"
STEPS = 64
MIN_GAP = 1e-3
ROWS_AT_ONCE = 8192   # dequantize a matrix in slices: numpy's intermediates are several times the result

FILES = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}

PROMPTS = {
    "prose": "The lighthouse keeper climbed the stairs one last time that evening, and from the gallery he saw",
    "code": "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n"
            "    \"\"\"Merge two sorted lists.\"\"\"\n",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610,",
    "script": "Москва — столица России. 東京は日本の首都です。 Αθήνα είναι",
    "token": "Hello",
}
CHAT = [
    {"role": "system", "content": "You answer in one short paragraph."},
    {"role": "user", "content": "Why does the moon look larger near the horizon?"},
    {"role": "assistant", "content": "It is an illusion: the moon's disc is the same size wherever it stands."},
    {"role": "user", "content": "How could I show that with a coin?"},
]
LONG_TOKENS = 600

# The pre-tokenizers that GGUF names, as the models' own tokenizer.json files spell them.
QWEN2_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True)
class File:
    """One GGUF file: its metadata as plain values, its tensors as the gguf package reads them."""

    fields: dict
    tensors: dict[str, gguf.ReaderTensor]

    def __getitem__(self, key: str):
        """The value of `<architecture>.key`."""
        return self.fields[f"{self.fields['general.architecture']}.{key}"]


def main(names: list[str]) -> None:
    torch.set_grad_enabled(False)
    text = None
    for name, file_name in FILES.items():
        if name in names:
            path = Path(os.environ.get("QUIRE_MODELS", Path.home() / ".cache" / "quire")) / file_name
            text = text or long_text(path.parent / FILES["smollm2"])
            write(name, make(read(path), path.name, text))


def make(file: File, file_name: str, text: str) -> dict:
    """The contents of one reference file."""
    tokenizer, model = build_tokenizer(file), build_model(file)
    prompts = {name: encode(tokenizer, prompt) for name, prompt in PROMPTS.items()}
    prompts["chat"] = encode(tokenizer, render(file, CHAT))
    prompts["long"] = encode(tokenizer, text)[:LONG_TOKENS]
    reference = {"file": file_name, "made_with": {"transformers": transformers.__version__, "dtype": "float32"}}
    if file_name == FILES["smollm2"]:
        reference["perplexity"] = check_smollm2(model)
    reference["logit_ids"] = [model.config.vocab_size * i // 32 for i in range(32)]
    *short, long = prompts.values()   # the long one goes alone, or the others would be mostly padding
    answers = continuations(model, short) + continuations(model, [long])
    reference["prompts"] = {name: scores(model, prompt_ids, ids, reference["logit_ids"])
                            for (name, prompt_ids), ids in zip(prompts.items(), answers)}
    for name, answer in reference["prompts"].items():
        print(f"{name}: gap {answer['min_gap']:.4f} at {answer['min_gap_step']}: {tokenizer.decode(answer['ids'])!r}")
    close = [name for name, answer in reference["prompts"].items() if answer["min_gap"] < MIN_GAP]
    if close:
        raise SystemExit(f"near ties in {close}: change these prompts")
    return reference


def read(path: Path) -> File:
    reader = gguf.GGUFReader(path)
    return File({key: field.contents() for key, field in reader.fields.items()}, {t.name: t for t in reader.tensors})


# --- tokenizer ------------------------------------------------------------------------------------------------------

def build_tokenizer(file: File) -> Tokenizer:
    """Byte-level BPE from the file's vocabulary and merges; its control tokens are matched in the text."""
    tokens, fields = file.fields["tokenizer.ggml.tokens"], file.fields
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    if fields["tokenizer.ggml.pre"] == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        tokenizer.normalizer = normalizers.NFC()
        steps = [pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds) if kind == gguf.TokenType.CONTROL])
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        raise SystemExit(f"this vocabulary cannot write {text!r}: change the prompt")
    return ids


def render(file: File, messages: list[dict]) -> str:
    template = jinja2.Environment().from_string(file.fields["tokenizer.chat_template"])
    return template.render(messages=messages, add_generation_prompt=True)


def long_text(smollm2: Path) -> str:
    """A thousand tokens of the perplexity text, from the start of a line."""
    ids = json.loads((DATA / "text30k.llamacpp.ids.json").read_text())[3000:4000]
    return build_tokenizer(read(smollm2)).decode(ids).split("\n", 1)[1]


# --- model ----------------------------------------------------------------------------------------------------------

def build_model(file: File) -> transformers.PreTrainedModel:
    """A transformers model in float32 whose parameters are the file's dequantized tensors."""
    llama = file.fields["general.architecture"] == "llama"
    heads, kv_heads = file["attention.head_count"], file["attention.head_count_kv"]
    config = (transformers.LlamaConfig if llama else transformers.Qwen2Config)(
        hidden_size=file["embedding_length"], intermediate_size=file["feed_forward_length"],
        num_hidden_layers=file["block_count"], num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=file["context_length"], rms_norm_eps=file["attention.layer_norm_rms_epsilon"],
        vocab_size=len(file.fields["tokenizer.ggml.tokens"]), hidden_act="silu",
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_parameters={"rope_type": "default", "rope_theta": file["rope.freq_base"]},
        attn_implementation="eager",
    )
    model = (transformers.LlamaForCausalLM if llama else transformers.Qwen2ForCausalLM)(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA if llama else gguf.MODEL_ARCH.QWEN2, file["block_count"])
    unused = set(file.tensors)
    for hf_name, parameter in model.named_parameters():   # a tied head is listed once, as the embedding
        stem, kind = hf_name.rsplit(".", 1)
        name = f"{names.get_name(stem)}.{kind}"
        unused.remove(name)
        fill_(parameter, file.tensors[name])
        if llama and ".attn_q." in name:
            parameter.copy_(half_split(parameter, heads))
        if llama and ".attn_k." in name:
            parameter.copy_(half_split(parameter, kv_heads))
    if unused:
        raise SystemExit(f"tensors of no parameter: {sorted(unused)}")
    return model


def fill_(parameter: torch.Tensor, tensor: gguf.ReaderTensor) -> None:
    """Dequantizes `tensor` into `parameter`, some rows at a time."""
    if list(parameter.shape) != list(tensor.shape[::-1]):
        raise SystemExit(f"{tensor.name}: {tensor.shape} in the file, {tuple(parameter.shape)} in the model")
    rows = tensor.data if parameter.dim() == 2 else tensor.data[None]
    flat = parameter if parameter.dim() == 2 else parameter[None]
    for i in range(0, len(rows), ROWS_AT_ONCE):
        values = gguf.quants.dequantize(rows[i:i + ROWS_AT_ONCE], tensor.tensor_type)
        flat[i:i + ROWS_AT_ONCE].copy_(torch.from_numpy(values.copy()))


def half_split(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """llama-architecture GGUF stores a head's rows in rotated pairs (2i, 2i+1); transformers rotates (i, i + A/2)."""
    O, I = weight_OI.shape
    return weight_OI.view(heads, O // heads // 2, 2, I).transpose(1, 2).reshape(O, I)


# --- answers --------------------------------------------------------------------------------------------------------

def continuations(model, prompts: list[list[int]]) -> list[list[int]]:
    """STEPS greedy ids after each prompt, by transformers' own loop over one batch padded on the left."""
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.generate(padded, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)[:, width:].tolist()


def scores(model, prompt_ids: list[int], ids: list[int], logit_ids: list[int]) -> dict:
    """What one pass over the prompt and its answer says of each step: no cache, no padding, no neighbours."""
    logits_LV = model(torch.tensor([prompt_ids + ids[:-1]]), logits_to_keep=len(ids)).logits[0]
    best = logits_LV.log_softmax(-1).topk(5)
    if best.indices[:, 0].tolist() != ids:
        raise SystemExit("a single pass disagrees with the batch of continuations: there must be a near tie")
    gaps = best.values[:, 0] - best.values[:, 1]
    top5 = [[[i, round(p, 6)] for i, p in zip(*step)] for step in zip(best.indices.tolist(), best.values.tolist())]
    after_prompt, last = ([round(x, 5) for x in logits_V[logit_ids].tolist()] for logits_V in logits_LV[[0, -1]])
    return {"prompt_ids": prompt_ids, "ids": ids, "min_gap": round(gaps.min().item(), 6),
            "min_gap_step": gaps.argmin().item(), "logits_after_prompt": after_prompt, "logits_last": last,
            "top5": top5}


def check_smollm2(model) -> float:
    """An older run of transformers, with its own GGUF reader, must agree with the model built here."""
    for name, known in json.loads((DATA / "references_hf.json").read_text()).items():
        answer = scores(model, known["prompt_ids"], known["ids"], [])
        worst = max(abs(a - b) for ours, theirs in zip(answer["top5"], known["top5"])
                    for (_, a), (_, b) in zip(ours, theirs))
        if worst > 1e-3:
            raise SystemExit(f"the built model disagrees with references_hf.json on {name!r} (by {worst})")
    return perplexity(model, json.loads((DATA / "text30k.llamacpp.ids.json").read_text()))


def perplexity(model, ids: list[int], context: int = 512) -> float:
    """llama.cpp's rule: of each whole window, the ids from context / 2 + 1 on, scored from the logits before them."""
    losses = []
    for start in range(0, len(ids) - context + 1, context):
        window = torch.tensor([ids[start:start + context]])
        logits_TV = model(window).logits[0, context // 2:-1]
        losses.append(torch.nn.functional.cross_entropy(logits_TV.double(), window[0, context // 2 + 1:]).item())
    return round(math.exp(sum(losses) / len(losses)), 4)


def write(name: str, reference: dict) -> None:
    """JSON with a line for each step of `top5` and for each other value: small, and readable in a diff."""
    lines = json.dumps(reference, ensure_ascii=False, separators=(",", ":"))
    for opening in ('"prompts":', '"prompt_ids":', '"ids":', '"min_gap":', '"logits_after_prompt":', '"logits_last":',
                    '"top5":', "[[", '"perplexity":', '"logit_ids":'):
        lines = lines.replace(opening, "\n" + opening)
    (DATA / f"references_{name}.json").write_text(lines + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(FILES))
