"""The architecture and the house rules of DESIGN.md, checked on the syntax trees of the modules."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A module imports only from those after it.
ORDER = (
    "run loading flags completions chat screen batch dialects bench limits peer live view engine writer lookahead "
    "heads speculative scheduler pace replay model weights sampling kvcache parallel gpu native kernels vocab "
    "tokenizer chat_template checkpoint families quant hub terminal"
).split()
# So that `tokenize`, `info` and `--help` are instant.
NO_TORCH = ("loading", "screen", "live", "view", "flags", "completions", "vocab", "tokenizer", "chat_template",
            "checkpoint", "families", "quant", "hub", "terminal")
# May print, parse arguments and read the environment.
TERMINAL = ("run", "loading", "flags", "completions", "chat", "screen", "batch", "bench", "live", "view", "terminal")
MAX_LINE, MAX_FUNCTION, MAX_MODULE = 120, 80, 900

MODULES = sorted(path.stem for path in ROOT.glob("*.py"))
TREES = {name: ast.parse((ROOT / f"{name}.py").read_text("utf-8")) for name in MODULES}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

each_module = pytest.mark.parametrize("module", MODULES)


def imports(tree: ast.AST) -> set[str]:
    """The first part of every name that `tree` imports, at any depth."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import in a flat set of modules"
            found.add(node.module.partition(".")[0])
    return found


class AtRuntime(ast.NodeTransformer):
    """Cuts what is there for type checkers only."""

    def visit_If(self, node):
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


class AtImport(AtRuntime):
    """Cuts function bodies too: what stays runs when the module is imported."""

    def visit_FunctionDef(self, node):
        return None

    visit_AsyncFunctionDef = visit_FunctionDef


def cut(kind: type[AtRuntime], module: str) -> ast.Module:
    return kind().visit(ast.parse((ROOT / f"{module}.py").read_text("utf-8")))


@each_module
def test_a_module_imports_only_from_modules_below_it(module):
    assert module in ORDER, f"{module}.py has no place in the import order of DESIGN.md"
    local = imports(cut(AtRuntime, module)) & set(MODULES)
    above = [name for name in local if ORDER.index(name) <= ORDER.index(module)]
    assert not above, f"{module}.py imports {above}, which do not stand below it"


def test_the_import_order_is_the_one_in_the_design():
    design = (ROOT / "DESIGN.md").read_text("utf-8")
    assert re.findall(r"^(\w+)\.py {2,}", design, re.MULTILINE) == ORDER


@pytest.mark.parametrize("module", NO_TORCH)
def test_instant_modules_do_not_import_torch(module):
    assert "torch" not in imports(cut(AtImport, module))


def test_instant_modules_load_without_torch():
    code = f"import sys, {', '.join(NO_TORCH)}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("module", [name for name in MODULES if name not in TERMINAL])
def test_only_commands_print_parse_arguments_or_read_the_environment(module):
    tree = TREES[module]
    assert "argparse" not in imports(tree)
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        forbidden = text in ("print", "input", "os.environ", "os.getenv", "sys.argv", "sys.stdout", "sys.stderr")
        if module == "native" and text == "os.environ":
            continue  # the compiler's tools are found through PATH alone
        assert not forbidden, f"{module}.py:{node.lineno} uses {text}"


@each_module
def test_nothing_is_global(module):
    found = [node.lineno for node in ast.walk(TREES[module]) if isinstance(node, ast.Global)]
    assert not found, f"{module}.py: global statements in lines {found}"


@each_module
def test_every_module_says_what_it_owns(module):
    assert ast.get_docstring(TREES[module]), f"{module}.py has no docstring"


@each_module
def test_every_module_has_tests(module):
    assert (ROOT / "tests" / f"test_{module}.py").is_file()


@each_module
def test_functions_and_modules_are_short(module):
    num_lines = len((ROOT / f"{module}.py").read_text("utf-8").splitlines())
    assert num_lines <= MAX_MODULE, f"{module}.py has {num_lines} lines"
    for function in ast.walk(TREES[module]):
        if not isinstance(function, FUNCTIONS) or function.name == "forward":
            continue
        body = function.body[1:] if ast.get_docstring(function) else function.body
        length = function.end_lineno - body[0].lineno + 1 if body else 0
        assert length <= MAX_FUNCTION, f"{module}.py:{function.lineno} {function.name} has {length} lines"


@pytest.mark.parametrize("path", sorted(path for pattern in ("*.py", "t*/*.py", "peers/*.py", "csrc/*", "csrc/*/*")
                                        for path in ROOT.glob(pattern) if path.is_file()), ids=lambda path: path.name)
def test_lines_are_short_and_clean(path):
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        assert len(line) <= MAX_LINE, f"{path.name}:{number} has {len(line)} characters"
        assert line == line.rstrip() and "\t" not in line, f"{path.name}:{number} has a tab or trailing blanks"


@each_module
def test_shape_suffixes_use_the_letters_of_the_dimension_key(module):
    """`q_THA` is fine; `q_BHQ` is not, as there is no Q in the key. Constants, all capitals, are no tensors.

    A module whose dimensions are its own names their letters in its docstring.
    """
    key = set(re.findall(r"`([A-Z])`", dimension_key()))
    assert len(key) > 20, "the dimension key was not found in DESIGN.md"
    key |= set(re.findall(r"`([A-Z])`", ast.get_docstring(TREES[module])))
    for node in ast.walk(TREES[module]):
        name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None) or ""
        suffix = re.fullmatch(r"[a-z]\w*_([A-Z][A-Z0-9]*)", name)
        if suffix:
            unknown = set(re.sub("[0-9]", "", suffix[1])) - key
            assert not unknown, f"{module}.py:{node.lineno} {name}: {sorted(unknown)} is not in the dimension key"


def test_the_sanitizers_see_every_kernel():
    kernels = re.findall(r"^\w+ (\w+_cpu)\(", (ROOT / "csrc/kernels.h").read_text("utf-8"), re.M)
    driver = (ROOT / "csrc/sanitize.cpp").read_text("utf-8")
    assert len(kernels) > 10 and all(f"{name}(" in driver for name in kernels)


def dimension_key() -> str:
    return re.search(r"^## Dimension key$(.*?)^## ", (ROOT / "DESIGN.md").read_text("utf-8"), re.M | re.S)[1]
