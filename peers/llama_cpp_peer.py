"""llama.cpp through llama-cpp-python's low-level interface: several sequences share each batch.

Flash attention serves one short sequence; for long contexts and for batches it is slower on CPUs and stays off. Tokens
are drawn by numpy's argmax, which is faster than llama.cpp's samplers.
"""

import time

import llama_cpp
import numpy as np
from serve import serve

LONG_CONTEXT = 1024
UBATCH = 512


def load(path: str):
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {path}")
    return Runner(model).task


class Runner:
    def __init__(self, model):
        self.model = model
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.context, self.shape = None, None

    def task(self, prompts, generate, threads):
        self.open(len(prompts), sum(map(len, prompts)), max(map(len, prompts)) + generate, threads)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        prompt_batch, step_batch = filled(prompts), filled([[0]] * len(prompts))
        starts = np.array([len(prompt) for prompt in prompts])
        token, position = (np.ctypeslib.as_array(field, starts.shape) for field in (step_batch.token, step_batch.pos))
        start_s = time.perf_counter()
        token[:] = self.decode(prompt_batch)
        first_token_s = time.perf_counter() - start_s
        for i in range(generate - 1):
            position[:] = starts + i
            token[:] = self.decode(step_batch)
        finished_s = time.perf_counter() - start_s
        for batch in (prompt_batch, step_batch):
            llama_cpp.llama_batch_free(batch)
        return {"first_token_s": first_token_s, "finished_s": finished_s, "decoded": (generate - 1) * len(prompts)}

    def open(self, num_sequences, prompt_tokens, sequence_tokens, threads):
        """A context of this shape: the one there is if it fits exactly, since a larger one decodes more slowly."""
        shape = num_sequences, prompt_tokens, sequence_tokens, threads
        if shape == self.shape:
            return
        if self.context:
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_ctx = num_sequences * (-(-sequence_tokens // 256) * 256)
        params.n_batch, params.n_ubatch = max(UBATCH, prompt_tokens), UBATCH
        params.n_threads = params.n_threads_batch = threads
        flash = num_sequences == 1 and sequence_tokens <= LONG_CONTEXT
        params.flash_attn_type = (llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else
                                  llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED)
        self.context, self.shape = llama_cpp.llama_init_from_model(self.model, params), shape
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens for {num_sequences} sequences")

    def decode(self, batch):
        """The likeliest next token of each sequence."""
        status = llama_cpp.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        num_rows = self.shape[0]
        logits = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (num_rows, self.vocab)).argmax(axis=1)


def filled(prompts):
    """A llama_batch of whole sequences; logits are wanted after the last token of each."""
    batch = llama_cpp.llama_batch_init(sum(map(len, prompts)), 0, 1)
    i = 0
    for sequence, ids in enumerate(prompts):
        for position, id in enumerate(ids):
            batch.token[i], batch.pos[i] = id, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = position == len(ids) - 1
            i += 1
    batch.n_tokens = i
    return batch


if __name__ == "__main__":
    serve(load)
