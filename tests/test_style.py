"""The scripts read as small diffs of one another, and the repository stays small.

    python tests/test_style.py

prints how large each part is, how much of a script is the algorithm, how many lines of code each
pair of scripts differs in, and the limits of all that. Comments, docstrings and blank lines do not
count.
"""

import ast
import difflib
import io
import re
import tokenize
from functools import cache

import pytest
from conftest import OFF_POLICY, ON_POLICY, ROOT, SCRIPTS

SECTIONS = ["Arguments", "Networks", "Buffer", "Losses", "Training", "Command line"]

# A function, a class, a field of Args or a part of `train` is the same to the letter, comments
# included, in all scripts that have it. If any of them uses the framework in it, it is the same in
# all of one framework. The intended exceptions are what each algorithm has of its own, and what
# each family has.
LOOKED_INTO = {"Args", "train"}  # field by field, part by part
FRAMEWORK = r"\b(torch|nn|device|tf|sess|mpi_pytorch|mpi_tf1|\w+_ph)\b"
OF_AN_ALGORITHM = {
    *("GaussianActor", "CategoricalActor"),  # TRPO's can be compared by KL
    *("actor_critic", "get_action", "compute_loss_pi", "compute_loss_q", "compute_backup"),
    *("Args.minibatch_size", "Args.q_lr"),  # what they are for
    *("train: Set-up", "train: Networks and optimizers", "train: The graph", "train: Policy"),
    *("train: Value function", "train: One gradient step", "train: Q functions"),
    *("train: Target networks", "train: The SavedModel", "train: Resume", "train: Main loop"),
}
OF_A_FAMILY = {*("to_env", "Args.pi_lr", "Args.epochs", "Args.hidden_sizes", "Args.activation")}
# Scripts that share what others have of their own.
SAME = [
    ("GaussianActor", "vpg ppo"),
    ("CategoricalActor", "vpg ppo"),
    ("actor_critic", "vpg ppo trpo"),
    ("get_action", "vpg ppo trpo"),
    ("train: Set-up", "ppo trpo"),
    ("train: Resume", "vpg ppo"),
    ("get_action", "ddpg td3"),
    ("compute_loss_q", "td3 sac"),
    ("train: Set-up", "ddpg td3 sac"),
    ("train: Resume", "ddpg td3"),
]


def source(script):
    return (ROOT / "algos" / f"{script}.py").read_text()


@cache
def blocks(script):
    """A script's functions, classes, fields of Args and parts of train: {name: text}."""
    text = source(script)
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        block = lines[first - 1 : node.end_lineno]
        found[node.name] = "\n".join(block)
        if node.name == "Args":
            for field in node.body:
                found[f"Args.{field.target.id}"] = lines[field.lineno - 1]
        if node.name == "train":
            found |= parts_of_train(block)
    return found


def parts_of_train(lines):
    """The paragraphs of train by the words before the colon in the comment that opens each."""
    parts, name = {}, "head"
    for line in lines:
        opening = re.match(r"^(?:    ){1,2}# ([A-Z][A-Za-z -]*):", line)
        name = f"train: {opening[1]}" if opening else name
        parts.setdefault(name, []).append(line)
    return {name: "\n".join(part) for name, part in parts.items()}


@cache
def groups():
    """{block's name: [(script, text), ...]}: texts that must be equal within each list."""
    all_blocks = [(s, name, text) for s in SCRIPTS for name, text in blocks(s).items()]
    uses_framework = {name for _, name, text in all_blocks if re.search(FRAMEWORK, text)}
    found = {}
    for script, name, text in all_blocks:
        algo, framework = script.split("_")
        key = [name] + ([framework] if name in uses_framework else [])
        alike = [[*key, algos] for block, algos in SAME if block == name and algo in algos.split()]
        if name in OF_AN_ALGORITHM:
            key.append(algo)
        elif name in OF_A_FAMILY:
            key.append("on-policy" if script in ON_POLICY else "off-policy")
        for words in [key, *alike] if name not in LOOKED_INTO | {"head"} else []:
            found.setdefault(" ".join(words), []).append((script, text))
    return {key: members for key, members in found.items() if len(members) > 1}


@pytest.mark.parametrize("block", groups())
def test_identical_blocks_are_identical(block):
    (first, wanted), *others = groups()[block]
    for script, text in others:
        diff = difflib.unified_diff(wanted.splitlines(), text.splitlines(), first, script, n=0)
        assert text == wanted, "\n".join(diff)


def test_the_exceptions_are_needed():
    """Each names a block that differs within a framework."""
    for name in OF_AN_ALGORITHM | OF_A_FAMILY:
        families = [ON_POLICY, OFF_POLICY] if name in OF_AN_ALGORITHM else [SCRIPTS]
        sets = [scripts[i::2] for scripts in families for i in (0, 1)]
        texts = [{blocks(s)[name] for s in scripts if name in blocks(s)} for scripts in sets]
        assert any(len(found) > 1 for found in texts), f"{name} is no exception"


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_come_in_order(script):
    text = source(script)
    banners = re.findall(r"^# ([A-Z][A-Za-z ]*) -+$", text, flags=re.M)
    own = ["Natural gradient"] if "trpo" in script else []
    assert [b for b in banners if b not in own] == SECTIONS
    assert all(len(line) == 100 for line in text.splitlines() if re.match("^# .* --+$", line))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_stands_alone(script):
    """It imports libraries and common/, never another script, and says how to run and diff it."""
    text = source(script)
    modules = re.findall(r"^(?:from|import) ([\w.]+)", text, flags=re.M)
    assert not {m.split(".")[0] for m in modules} & {*SCRIPTS, "algos", "benchmark"}
    docstring = ast.get_docstring(ast.parse(text))
    assert f"python algos/{script}.py" in docstring and "Diff me against" in docstring
    assert all(f"{script.split('_')[0]}_{f}.py" in docstring for f in ("torch", "tf1"))


@cache
def code_lines(path):
    """The lines of a file without comments, docstrings and blank lines: {line number: text}."""
    text = path.read_text()
    drop = set()
    for n in ast.walk(ast.parse(text)):
        if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(n):
            drop |= set(range(n.body[0].lineno, n.body[0].end_lineno + 1))
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return {i: x.rstrip() for i, x in enumerate(lines, 1) if i not in drop and x.strip()}


def tokens(path):
    """The number of tokens in a file without comments, docstrings and line ends."""
    text = path.read_text()
    defs = (ast.Module, ast.FunctionDef, ast.ClassDef)
    with_docs = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, defs) and ast.get_docstring(n)
    ]
    docs = {(n.body[0].lineno, n.body[0].col_offset) for n in with_docs}
    counted = inside = 0  # an f-string is one token; Python 3.12 and later take it apart
    for t in tokenize.generate_tokens(io.StringIO(text).readline):
        counted += not inside and t.type not in NO_TOKENS and t.start not in docs
        inside += (t.type == FSTRING_START) - (t.type == FSTRING_END)
    return counted


FSTRING_START, FSTRING_END = (getattr(tokenize, f"FSTRING_{end}", -1) for end in ("START", "END"))
NO_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_TOKENS |= {tokenize.ENDMARKER}


def imports(script):
    """The number of names that a script imports from common/; a module counts as one."""
    nodes = [n for n in ast.walk(ast.parse(source(script))) if isinstance(n, ast.ImportFrom)]
    return sum(len(n.names) for n in nodes if n.module.split(".")[0] == "common")


def algorithm_share(script):
    """Percent of a script's lines of code that are networks, buffer, losses, update and rollout.

    Of `train`, its functions and paragraphs count but for set-up, resume, logging and saving.
    """
    code = code_lines(ROOT / "algos" / f"{script}.py")
    section, counts, counted = "", False, 0
    for i, line in enumerate(source(script).splitlines(), 1):
        if banner := re.match(r"^# ([A-Z][A-Za-z ]*) -+$", line):
            section = banner[1]
            counts = section in {"Networks", "Buffer", "Losses", "Natural gradient"}
        elif section == "Training" and re.match(r"^    (# |def |update = mpi)", line):
            counts = not re.match(NOT_ALGORITHM, line)
        elif line.startswith("        # Log and save"):
            counts = False
        counted += i in code and counts
    return 100 * counted // len(code)


NOT_ALGORITHM = r"    (# Set-up|def export_policy|# The SavedModel|# Resume|update = mpi)"

# Limits, each at what has been reached: an algorithm's share at least, everything else at most.
LIMITS = {
    "common/ lines": 914,
    "common/ tokens": 9639,
    "common/ files": 9,
    "benchmark/ lines": 2044,
    "exercises/ lines": 733,
    "tests/ lines": 6054,
    "names from common/": 10,
    "tf1 longer than torch": 11,
}
# Of each script: lines, and the algorithm's share in percent.
SCRIPT_LIMITS = {
    "vpg_torch": (210, 65),
    "vpg_tf1": (215, 67),
    "trpo_torch": (277, 70),
    "trpo_tf1": (283, 72),
    "ppo_torch": (234, 66),
    "ppo_tf1": (243, 68),
    "ddpg_torch": (199, 60),
    "ddpg_tf1": (210, 62),
    "td3_torch": (219, 62),
    "td3_tf1": (228, 64),
    "sac_torch": (230, 65),
    "sac_tf1": (240, 66),
}
# Lines of code that a reader of one script finds changed in another: those taken out or those put
# in, whichever are more.
DIFF_LIMITS = {
    ("vpg_torch", "ppo_torch"): 36,
    ("vpg_tf1", "ppo_tf1"): 41,
    ("vpg_torch", "trpo_torch"): 87,
    ("vpg_tf1", "trpo_tf1"): 86,
    ("ddpg_torch", "td3_torch"): 43,
    ("ddpg_tf1", "td3_tf1"): 38,
    ("td3_torch", "sac_torch"): 53,
    ("td3_tf1", "sac_tf1"): 59,
    ("vpg_torch", "vpg_tf1"): 69,
    ("trpo_torch", "trpo_tf1"): 91,
    ("ppo_torch", "ppo_tf1"): 79,
    ("ddpg_torch", "ddpg_tf1"): 69,
    ("td3_torch", "td3_tf1"): 85,
    ("sac_torch", "sac_tf1"): 94,
}


def table():
    """[(what, how much, limit), ...]"""
    rows, lines = [], {}
    for folder in ("common", "benchmark", "exercises", "tests"):
        paths = sorted((ROOT / folder).glob("*.py"))
        rows.append((f"{folder}/ lines", sum(len(code_lines(path)) for path in paths)))
        if folder == "common":
            rows += [("common/ tokens", sum(map(tokens, paths))), ("common/ files", len(paths))]
    rows.append(("names from common/", max(map(imports, SCRIPTS))))
    for script in SCRIPTS:
        lines[script] = list(code_lines(ROOT / "algos" / f"{script}.py").values())
    more = [len(lines[b]) - len(lines[a]) for a, b in zip(SCRIPTS[::2], SCRIPTS[1::2], strict=True)]
    rows.append(("tf1 longer than torch", max(more)))
    rows = [(what, found, LIMITS[what]) for what, found in rows]
    for script, (most, least) in SCRIPT_LIMITS.items():
        rows.append((f"{script} lines", len(lines[script]), most))
        rows.append((f"{script} algorithm %", algorithm_share(script), least))
    for (a, b), limit in DIFF_LIMITS.items():
        diff = list(difflib.unified_diff(lines[a], lines[b], n=0, lineterm=""))[2:]
        size = max(sum(line[0] == sign for line in diff) for sign in "-+")
        rows.append((f"{a} -> {b}", size, limit))
    return rows


@pytest.mark.parametrize("what, found, limit", table())
def test_limits(what, found, limit):
    assert found >= limit if what.endswith("%") else found <= limit


if __name__ == "__main__":
    for what, found, limit in table():
        print(f"{what:>24} {found:>6}  at {'least' if what.endswith('%') else 'most'} {limit}")
