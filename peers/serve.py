"""What all adapters share: the conversation with peer.py, a JSON object a line.

An adapter is `python ADAPTER.py MODEL` in the environment of the engine that it drives. It loads the model and says
{"ready": true}. Each line that then comes is a task,

    {"prompts": [[id, ...], ...], "generate": n, "threads": t}

all prompts at once, each continued greedily by n tokens whatever they are, with nothing kept from the task before. It
answers with seconds from the task's start and the tokens drawn between these two moments,

    {"first_token_s": every prompt has its first token, "finished_s": all tokens are there, "decoded": count}

or, if something fails, at any time {"error": reason}. Whatever else the engine prints goes to stderr.
"""

import ctypes
import json
import os
import signal
import sys
import traceback

PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


def serve(load) -> None:
    """`load(path of the model) -> task(prompts, generate, threads) -> answer`."""
    if sys.platform == "linux":  # peer.py stops us between tasks: stopped, we would outlive it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def attempt(work, *args, **named):
        try:
            return work(*args, **named)
        except Exception as error:
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}) + "\n")

    task = attempt(load, sys.argv[1])
    if task is None:
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answer = attempt(task, **json.loads(line))
        if answer is not None:
            answers.write(json.dumps(answer) + "\n")
