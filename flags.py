"""The flags of the command line: how they are spelled, what each accepts, and which are not built yet.

Owns the tables of flags that commands share, and the parser that is made of them. Knows nothing of what they do: run.py
does. Needs no torch. Start at `make_parser`; the tables are at the end.
"""
from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

VERSION = "0.1.0"
DTYPE_NBYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ALIASES = {"-p": "--prompt", "-S": "--system", "--max-new-tokens": "--max-tokens", "--n-predict": "--max-tokens",
           "--temp": "--temperature", "--repeat-penalty": "--repetition-penalty", "--ctx-size": "--context",
           "--max-model-len": "--context", "--max-num-batched-tokens": "--max-step-tokens",
           "--max-num-seqs": "--max-requests"}
UNBROKEN, UNBROKEN_HYPHEN = "\N{NO-BREAK SPACE}", "\N{NON-BREAKING HYPHEN}"
TEXT_FLAGS = ("--prompt", "--system", "--stop", "--decode")  # their value may begin with a dash


class UsageError(ValueError):
    """The user asked for what cannot be: exit status 2."""


def normalized(words: Iterable[str]) -> Iterator[str]:
    """Flags in one spelling: aliases replaced, `-` for `_`, and a text joined to its flag: it may begin with a dash."""
    words = iter(words)
    for word in words:
        if word == "--":
            yield from (word, *words)
            return
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        flag = ALIASES.get(flag, flag)
        if flag in TEXT_FLAGS and not equals:
            text = next(words, None)
            equals, value = ("", "") if text is None else ("=", text)
        yield flag + equals + value


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, and whose help notices that its reader has gone."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, 2, 30),
                         **options)

    def error(self, message: str):
        raise UsageError(f"{message.removeprefix('argument ')}; {self.prog} --help lists the flags")

    def print_help(self, file=None) -> None:
        print(self.format_help().replace(UNBROKEN, " ").replace(UNBROKEN_HYPHEN, "-"), end="", file=file)


class PrintCompletions(argparse.Action):
    """Prints a script for the shell that is named, and ends."""

    def __call__(self, parser, namespace, shell, option_string=None):
        from completions import completion_script

        print(completion_script(shell, {name: (command.help, [*command.all_flags, HELP_ALL])
                                        for name, command in self.commands.items()}))
        parser.exit()


def make_parser(commands: Mapping[str, Command], in_full: bool = False) -> Parser:
    """`in_full`: help tells of every flag; else those that most people leave alone are only named, so that it fits a
    screen."""
    parser = Parser(prog="run.py", usage="run.py [COMMAND] [flags]", description="Runs language models, exactly.",
                    epilog="Without a command: generate; without anything, in a terminal: chat. "
                           "run.py COMMAND --help lists a command's flags.")
    parser.add_argument("--version", action="version", version=f"quire {VERSION}")
    completions = parser.add_argument("--completions", action=PrintCompletions, choices=("bash", "zsh", "fish"),
                                      metavar="SHELL", help="print a script that completes commands and flags")
    completions.commands = commands
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in commands.items():
        sub = subparsers.add_parser(name, prog=f"run.py {name}", usage=f"run.py {name} {command.usage}",
                                    help=command.help, description=f"{command.help.capitalize()}.")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        group = sub
        for title in (None, *command.groups):
            flags, is_brief = command.flags if title is None else GROUPS[title], title in BRIEF and not in_full
            if title not in (None, "requests") and not (title == "model" and "prompt" in command.groups):
                group = sub.add_argument_group(title, "" if is_brief else None)  # others stand under the one before
            for names, options in flags:
                group.add_argument(*names, **options | ({"help": argparse.SUPPRESS} if is_brief else {}))
            if is_brief:
                group.description += (", " if group.description else "") + ", ".join(map(named, shown(flags)))
        sub.add_argument(*HELP_ALL[0], **HELP_ALL[1])
        sub.set_defaults(run=command.run, command=name, **command.defaults)
    return parser


def shown(flags: Iterable[Flag]) -> list[Flag]:
    return [flag for flag in flags if flag[1].get("help") != argparse.SUPPRESS]


def named(flag: Flag) -> str:
    """As one word, which no line end cuts: for instance -n/--max-tokens N."""
    names, options = flag
    return UNBROKEN.join(["/".join(names), *filter(None, [options.get("metavar")])]).replace("-", UNBROKEN_HYPHEN)


def value(convert: Callable, accepts: Callable, complaint: str) -> Callable[[str], object]:
    """A type for argparse: `convert`ed text that is accepted."""
    def parse(text: str):
        try:
            if accepts(converted := convert(text)):
                return converted
        except (ValueError, KeyError):
            pass
        raise argparse.ArgumentTypeError(f"{text!r} {complaint}")

    return parse


def one_of(*built: str, later: str | None = None) -> Callable[[str], object]:
    parse = value(str, built.__contains__,
                  f"is not one of {', '.join(built)}" + (f" ({later} is not built yet)" if later else ""))
    parse.choices = built  # for completion
    return parse


def id_list(text: str) -> list[int]:
    return [int(id) for id in text.replace(",", " ").split()]


def id_and_number(text: str) -> tuple[int, float]:
    id, _, number = text.partition("=")
    return int(id), float(number)


Flag = tuple[tuple[str, ...], dict]  # what argparse's add_argument takes


def flag(*names: str, **options) -> Flag:
    return names, options


def switch(name: str, help: str) -> Flag:
    return (name,), {"action": "store_true", "help": help}


def sampling(*names: str, **options) -> Flag:
    return names, {"default": argparse.SUPPRESS, **options}  # absent from args unless it was given


def class_settings(text: str) -> tuple[str, dict[str, float]]:
    """NAME:priority=1,share=0.3,... : the name, and the fields of scheduler.AdmissionClass that are given."""
    name, _, settings = text.partition(":")
    pairs = [pair.partition("=") for pair in settings.split(",")]
    fields = {CLASS_FIELDS[key.strip().replace("_", "-")]: number for key, _, number in pairs}
    whole = ("priority", "max_waiting", "max_tokens")
    if not name or len(fields) < len(pairs):
        raise ValueError
    return name, {field: int(number) if field in whole else float(number) for field, number in fields.items()}


def tree_shape(text: str) -> tuple[int, int]:
    width, depth = map(int, text.lower().split("x"))
    return width, depth


CLASS_FIELDS = {"priority": "priority", "share": "share", "reserve": "reserved_pages", "max-waiting": "max_waiting",
                "max-tokens": "max_tokens"}
COUNT = value(int, lambda n: n >= 1, "is not a whole number of at least 1")
THREADS = value(int, lambda n: 1 <= n <= 256, "is not a whole number from 1 to 256")
PAGE_SIZE = value(int, [8, 16, 32, 64, 128, 256].__contains__, "is not a power of two from 8 to 256")
SCALE = value(float, lambda x: 0 < x <= 100, "is not a number above 0, at most 100")
POSITIVE = value(float, lambda x: 0 < x < math.inf, "is not a finite number above 0")
ONE_RANK = value(int, lambda n: n == 1, "is not 1, and more ranks are not built yet")
DRAFT = value(str, lambda name: name not in ("", "medusa", "eagle", "medusa:", "eagle:")
              and not name.startswith(("ngram:", "mtp:")),
              "is not ngram, mtp, medusa:FOLDER, eagle:FOLDER or a model")
TREE = value(tree_shape, lambda shape: min(shape) >= 1 and shape[0] * (shape[1] - 1) < 64,
             "is not WIDTHxDEPTH like 4x3, with fewer than 64 tokens above the last level")
IDS = value(id_list, lambda _: True, "is not a list of token ids like 1,2")
CLASS = value(class_settings, lambda _: True,
              f"is not NAME:SETTING=NUMBER,... with settings {', '.join(CLASS_FIELDS)}")
BIAS = value(id_and_number, lambda _: True, "is not a token id and a number like 5=-1.5")

PROMPT_FLAGS = [
    flag("-p", "--prompt", action="append", default=[], metavar="TEXT", help="taken literally"),
    flag("-f", "--file", action="append", default=[], metavar="FILE", help="UTF-8; - is stdin"),
    flag("text", nargs="?", metavar="TEXT", help="the same as -p; without any, stdin is read"),
]
MODEL_FLAGS = [
    flag("-m", "--model", metavar="MODEL", help="a .gguf or .bin file, a folder, or a hub id"),
    flag("--tokenizer", metavar="PATH", help="its file or folder, if not the model's own"),
]
DTYPE_FLAGS = [
    flag("--dtype", type=one_of("auto", *DTYPE_NBYTES), default="auto", metavar="TYPE", help=", ".join(DTYPE_NBYTES)),
    flag("--cache-dtype", type=one_of("auto", "float32", "bfloat16", "int8"), default="auto", metavar="TYPE",
         help="float32, bfloat16, int8; default: as --dtype"),
    flag("--kernels", type=one_of("auto", "native", "torch"), metavar="NAME", help="auto, native or torch"),
]
SAMPLING_FLAGS = [
    sampling("-n", "--max-tokens", type=int, metavar="N", help="the answer's length at most (512)"),
    sampling("-t", "--temperature", type=float, metavar="X", help="0: always the likeliest token (0)"),
    sampling("-k", "--top-k", type=int, metavar="N", help="draw from the N likeliest (all)"),
    sampling("--top-p", type=float, metavar="X", help="draw from the likeliest that sum up to X (1)"),
    sampling("--min-p", type=float, metavar="X", help="drop those below X times the likeliest (0)"),
    sampling("--repetition-penalty", type=float, metavar="X", help="divide logits of what occurred (1)"),
    sampling("--presence-penalty", type=float, metavar="X", help="subtract from what was answered (0)"),
    sampling("--frequency-penalty", type=float, metavar="X", help="subtract for every occurrence (0)"),
    sampling("--logit-bias", type=BIAS, action="append", metavar="ID=X", help="add to a token's logit (repeatable)"),
    sampling("-s", "--seed", type=int, metavar="N", help="sample i uses N + i (random, and reported)"),
    sampling("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)"),
    sampling("--stop-token-ids", type=IDS, metavar="1,2", help="end at one of these tokens"),
    sampling("--include-stop", action="store_true", help="show what ended the answer"),
    sampling("--ignore-eos", action="store_true", help="go on past end-of-text tokens"),
    sampling("--min-tokens", type=int, metavar="N", help="do not end before so many (0)"),
    sampling("--logprobs", type=int, metavar="N", help="log-probabilities, of N alternatives too"),
    sampling("--num-samples", type=int, metavar="N", help="so many answers (1)"),
]
SAMPLING_FIELDS = [names[-1].removeprefix("--").replace("-", "_") for names, _ in SAMPLING_FLAGS]
ENGINE_FLAGS = [
    *DTYPE_FLAGS,
    flag("--threads", type=THREADS, metavar="N", help="default: the physical cores it may use"),
    flag("--device", type=one_of("auto", "cpu", "cuda"), default="auto", metavar="WHERE",
         help="cpu, or cuda: an NVIDIA GPU (auto: if there is one)"),
    flag("-c", "--context", type=COUNT, metavar="N", help="most tokens, prompt and answer (as trained)"),
    flag("--page-size", type=PAGE_SIZE, default=32, metavar="N", help="tokens a page of the cache holds (32)"),
    flag("--cache-memory", type=POSITIVE, metavar="GB", help="default: 4, or 40 %% of what is free"),
    flag("--num-pages", type=COUNT, metavar="N", help="the same in pages"),
    flag("--max-step-tokens", type=COUNT, metavar="N", help="computed in a step (512, on a GPU 2048)"),
    flag("--max-requests", type=COUNT, metavar="N", help="running at a time (64, on a GPU 256)"),
    switch("--no-prefix-cache", "compute shared prefixes again"),
    flag("--prefill", type=one_of("exact", "bfloat16"), default="exact", metavar="HOW",
         help="exact, or bfloat16: faster with AMX, inexact"),
    # What is promised and this build lacks is refused, never ignored.
    *(flag(name, type=ONE_RANK, help=argparse.SUPPRESS) for name in ("--tp", "--pp", "--dp")),
    flag("--draft", type=DRAFT, metavar="METHOD", help="ngram, mtp, medusa:DIR, eagle:DIR or a model"),
    flag("--draft-tokens", type=COUNT, default=4, metavar="N", help="proposed at a time, at most (4)"),
    flag("--draft-tree", type=TREE, metavar="WxD", help="of W tokens a level, D levels (mtp, medusa, eagle)"),
    flag("--verify", type=one_of("coupled", "rejection", "block"), default="coupled", metavar="HOW",
         help="coupled (same tokens), rejection, block"),
    switch("--draft-chances", "report what chance drafts had (takes time)"),
]
REQUEST_FLAGS = [
    flag("--deadline", type=POSITIVE, metavar="SECONDS", help="cancel what takes longer"),
    flag("--class", type=CLASS, action="append", default=[], dest="classes", metavar="NAME:KEY=X,...",
         help="admission class: priority, share, ... (repeatable)"),
    flag("--trace", metavar="FILE", help="write what each step did, a JSON line each"),
]
HELP_ALL = flag("--help-all", action="help", help="tell what each flag does")
BRIEF = ("sampling", "engine", "requests")  # groups whose flags help only names
GROUPS = {"prompt": PROMPT_FLAGS, "model": MODEL_FLAGS, "arithmetic": DTYPE_FLAGS, "sampling": SAMPLING_FLAGS,
          "engine": ENGINE_FLAGS, "requests": REQUEST_FLAGS}


@dataclass(frozen=True)
class Command:
    """What runs, what it does, how it is called; its own flags, the groups it shares, and its defaults in these."""

    run: Callable[[argparse.Namespace], int]
    help: str
    usage: str
    flags: list[Flag]
    groups: tuple[str, ...]
    defaults: dict = field(default_factory=dict)

    @property
    def all_flags(self) -> list[Flag]:
        return [flag for flags in (self.flags, *(GROUPS[name] for name in self.groups)) for flag in flags]
