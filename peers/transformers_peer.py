"""transformers, which reads GGUF files into plain weights: bfloat16 where the CPU computes with it, else float32."""

import time
from pathlib import Path

import torch
from serve import serve
from transformers import AutoModelForCausalLM


def load(path: str):
    model = AutoModelForCausalLM.from_pretrained(Path(path).parent, gguf_file=Path(path).name, dtype=best_dtype())
    model.eval()
    return lambda **task: run(model, **task)


def best_dtype():
    cpuinfo = Path("/proc/cpuinfo")
    has_bfloat16 = cpuinfo.exists() and any(name in cpuinfo.read_text() for name in ("amx_bf16", "avx512_bf16"))
    return torch.bfloat16 if has_bfloat16 else torch.float32


@torch.inference_mode()
def run(model, prompts, generate, threads):
    torch.set_num_threads(threads)
    if len(set(map(len, prompts))) > 1:
        raise ValueError("prompts of different lengths would need padding, which is not what others compute")
    ids = torch.tensor(prompts)
    start_s = time.perf_counter()
    output = model(ids, use_cache=True, logits_to_keep=1)
    ids = output.logits[:, -1].argmax(-1, keepdim=True)
    first_token_s = time.perf_counter() - start_s
    for _ in range(generate - 1):
        output = model(ids, past_key_values=output.past_key_values, use_cache=True)
        ids = output.logits[:, -1].argmax(-1, keepdim=True)
    finished_s = time.perf_counter() - start_s
    return {"first_token_s": first_token_s, "finished_s": finished_s, "decoded": (generate - 1) * len(prompts)}


if __name__ == "__main__":
    serve(load)
