"""OpenVINO GenAI: its continuous-batching pipeline, stepped by hand, reads GGUF files of the llama and qwen2 kinds."""

import os
import time

import numpy as np
import openvino
import openvino_genai
from serve import serve


def load(path: str):
    cores = len(os.sched_getaffinity(0))
    pipelines = {cores: compiled(path, cores)}  # the number of threads is fixed when the model is compiled

    def task(prompts, generate, threads):
        if threads not in pipelines:
            pipelines.clear()
            pipelines[threads] = compiled(path, threads)
        return run(pipelines[threads], prompts, generate)

    return task


def compiled(path: str, threads: int):
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 8192, 256
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = False, False
    scheduler.cache_size = 2
    return openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})


def run(pipeline, prompts, generate):
    config = openvino_genai.GenerationConfig(max_new_tokens=generate, ignore_eos=True, do_sample=False)
    inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
    start_s = time.perf_counter()
    handles = [pipeline.add_request(i, ids, config) for i, ids in enumerate(inputs)]
    counts, first_token_s, early = [0] * len(prompts), None, 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for i, handle in enumerate(handles):
            while handle.can_read():
                counts[i] += sum(len(output.generated_ids) for output in handle.read().values())
        if first_token_s is None and all(counts):
            first_token_s, early = time.perf_counter() - start_s, sum(counts)
    finished_s = time.perf_counter() - start_s
    if set(counts) != {generate}:
        raise RuntimeError(f"answers of {min(counts)} to {max(counts)} tokens instead of {generate}")
    return {"first_token_s": first_token_s, "finished_s": finished_s, "decoded": sum(counts) - early}


if __name__ == "__main__":
    serve(load)
