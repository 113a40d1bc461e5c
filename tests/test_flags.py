"""flags.py: every spelling of a flag, and a flag for every setting. What the commands make of them is test_run.py's."""

import pytest

import flags


@pytest.mark.parametrize("words, meant", [
    ("-p hi", "--prompt=hi"),
    ("--prompt -x", "--prompt=-x"),
    ("-p --json", "--prompt=--json"),
    ("-p=--json", "--prompt=--json"),
    ("--stop -- -n 5", "--stop=-- -n 5"),
    ("--max_tokens 5 --n-predict=6", "--max-tokens 5 --max-tokens=6"),
    ("--max_new_tokens 5 --repeat_penalty=1.5 --temp 1", "--max-tokens 5 --repetition-penalty=1.5 --temperature 1"),
    ("--ctx-size 9 --max-model-len 9", "--context 9 --context 9"),
    ("--max_num_seqs=1 --max-num-batched-tokens 2", "--max-requests=1 --max-step-tokens 2"),
    ("a_b=c_d -f a_b", "a_b=c_d -f a_b"),
    ("-- -p --max_tokens", "-- -p --max_tokens"),
    ("-p", "--prompt"),
])
def test_flags_have_one_spelling(words, meant):
    assert list(flags.normalized(words.split())) == meant.split()


def test_every_sampling_parameter_has_a_flag():
    from sampling import SamplingParams

    assert sorted(flags.SAMPLING_FIELDS) == sorted(field.name for field in SamplingParams.__dataclass_fields__.values())
    for alias in ("--max-new-tokens", "--n-predict", "--temp", "--repeat-penalty"):
        assert flags.ALIASES[alias].removeprefix("--").replace("-", "_") in flags.SAMPLING_FIELDS
