"""Whole models on the kernels for AMX, in the emulator: what test_native.py and others hold of this CPU's kernels.

The kernels alone are in test_native_matmul.py and test_native_attention.py, under every instruction set.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from instructions import EMULATED

# Batches, chunks, hits, preemption, rounded prompts; recorded steps; drafts and their trees.
TESTS = ("test_native.py::test_company_changes_no_bit", "test_native.py::test_preemption_changes_no_id",
         "test_native.py::test_logits_are_near_those_of_the_reference",
         "test_native.py::test_large_chunks_in_bfloat16_touch_no_others", "test_replay.py",
         "test_lookahead.py::test_drafts_change_no_token",
         "test_lookahead.py::test_what_stands_of_a_tree_lies_where_the_text_does")
# Of all types of weights two; not those through torch.
SOME = "(q4_1 or bf16 or replay or lookahead) and not kernels"
CODE = """
import sys
import instructions, native, pytest
native.load().set_isa(instructions.AMX)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not EMULATED, reason="this CPU has AMX, and all tests use it; or no AVX2 to emulate it with")
def test_whole_models_compute_the_same_in_every_company():
    tests = Path(__file__).parent
    names = [f"{tests}/{name}" for name in TESTS]
    done = subprocess.run([sys.executable, "-c", CODE, "-q", "-p", "no:cacheprovider", *names, "-k", SOME],
                          env=os.environ | {"EMULATE_AMX": "1", "PYTHONPATH": f"{tests}:{tests.parent}"},
                          cwd=tests.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
