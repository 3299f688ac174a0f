"""The scripts read as small diffs of one another, and the repository stays small.

    python tests/test_style.py

prints how many lines of code each pair of scripts differs in, how many each part has, and how much
of a script is the algorithm. Comments, docstrings and blank lines are not counted.
"""

import ast
import difflib
import io
import re
import tokenize
from functools import cache

import pytest
from conftest import ON_POLICY, ROOT, SCRIPTS

SECTIONS = ["Arguments", "Networks", "Buffer", "Losses", "Training", "Command line"]

# The intended exceptions. A function, a class, a field of Args or a part of `train` is the same to
# the letter, comments included, in all scripts that have it, unless it is named here: with what it
# depends on within its family, "framework", "algo" or both; or as one that each family has of its
# own.
LOOKED_INTO = {"Args", "train"}  # field by field, part by part
DEPENDS_ON = {
    "on-policy": {
        "actor_critic": "framework",
        "GaussianActor": "framework algo",  # TRPO's can be compared by KL
        "CategoricalActor": "framework algo",
        "compute_loss_pi": "framework algo",
        "compute_loss_v": "framework",
        "flat_grad": "framework",
        "fisher_product": "framework",
        "Args.compile": "algo",  # TRPO's policy is differentiated twice, which excludes it
        "train: Set-up": "framework",
        "train: Networks and optimizers": "framework algo",
        "train: The graph": "algo",
        "train: Policy": "framework algo",
        "train: Value function": "framework algo",
        "train: Resume": "framework algo",
    },
    "off-policy": {
        "actor_critic": "framework algo",
        "DeterministicActor": "framework",
        "SquashedGaussianActor": "framework",
        "QFunction": "framework",
        "TwinQFunction": "framework",
        "get_action": "algo",  # a fixed action and noise, or a sample of SAC's policy
        "compute_backup": "framework algo",
        "compute_loss_q": "framework algo",
        "compute_loss_pi": "framework algo",
        "compute_loss_alpha": "framework",
        "Args.q_lr": "algo",  # one Q function or two
        "train: Set-up": "framework",
        "train: Networks and optimizers": "framework algo",
        "train: One gradient step": "algo",
        "train: Q function": "framework",
        "train: Q functions": "framework algo",
        "train: Policy": "framework algo",
        "train: Alpha": "framework",
        "train: Target networks": "framework algo",
        "train: The SavedModel": "algo",
        "train: Resume": "framework algo",
        "train: Main loop": "algo",  # what is logged, the noise
    },
}
OF_A_FAMILY = {
    *("actor_critic", "get_action", "to_env", "compute_loss_pi", "Args.compile", "Args.pi_lr"),
    *("Args.epochs", "Args.hidden_sizes", "Args.activation", "Args.save_freq"),
    *("train: Set-up", "train: Networks and optimizers", "train: Policy", "train: Resume"),
    "train: Main loop",
}
# Scripts that share more than that.
SAME = [
    ("GaussianActor", ("vpg", "ppo")),
    ("CategoricalActor", ("vpg", "ppo")),
    ("get_action", ("ddpg", "td3")),
    ("compute_loss_q", ("td3", "sac")),
]
# Lines that may differ in any block: what the framework calls its state, an algorithm's columns.
FREE_LINES = (r"^ *state = ", r"^ *save_model\(", r'^ *for key in \("Entropy",')


def traits(script):
    """What a block of a script may depend on."""
    algo, framework = script.split("_")
    family = "on-policy" if script in ON_POLICY else "off-policy"
    return {"algo": algo, "framework": framework, "family": family}


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
        if not any(re.match(pattern, line) for pattern in FREE_LINES):
            parts.setdefault(name, []).append(line)
    return {name: "\n".join(part) for name, part in parts.items()}


def depends_on(name, script):
    """What a block depends on, as traits."""
    family = traits(script)["family"]
    own = ["family"] if name in OF_A_FAMILY else []
    return [*own, *DEPENDS_ON[family].get(name, "").split()]


def groups():
    """{block's name: [(script, text), ...]}: texts that must be equal within each list."""
    found = {}
    for script in SCRIPTS:
        for name, text in blocks(script).items():
            if name not in LOOKED_INTO and name != "head":
                key = (name, *(traits(script)[trait] for trait in depends_on(name, script)))
                found.setdefault(key, []).append((script, text))
    for name, algos in SAME:
        for framework in ("torch", "tf1"):
            scripts = [s for s in SCRIPTS if s in [f"{algo}_{framework}" for algo in algos]]
            found[name, framework, *algos] = [(s, blocks(s)[name]) for s in scripts]
    return {" ".join(key): members for key, members in found.items() if len(members) > 1}


@pytest.mark.parametrize("block", groups())
def test_identical_blocks_are_identical(block):
    (first, wanted), *others = groups()[block]
    for script, text in others:
        diff = difflib.unified_diff(wanted.splitlines(), text.splitlines(), first, script, n=0)
        assert text == wanted, "\n".join(diff)


def test_the_table_of_exceptions_is_needed():
    """Every exception names a block that exists and differs; what none needs is taken out."""
    found = {script: blocks(script) for script in SCRIPTS}
    for family, exceptions in DEPENDS_ON.items():
        scripts = [s for s in SCRIPTS if traits(s)["family"] == family]
        for name in exceptions:
            texts = {found[s][name] for s in scripts if name in found[s]}
            assert len(texts) > 1, f"{name} is the same in all of {family}, or is nowhere"
    for name in OF_A_FAMILY:
        assert len({found[s][name] for s in SCRIPTS if name in found[s]}) > 1, name


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


# Lines of code that a reader of one script finds changed in another: those taken out or those put
# in, whichever are more. The limits are what we have, and a few lines.
DIFF_LIMITS = {("vpg", "ppo"): 30, ("vpg", "trpo"): 85, ("ddpg", "td3"): 52, ("td3", "sac"): 60}
DIFF_LIMIT_TORCH_TF1 = 112


def diff_sizes():
    """[(a, b, lines only in a, lines only in b, limit), ...]"""
    pairs = [(f"{a}_{f}", f"{b}_{f}", limit)
             for (a, b), limit in DIFF_LIMITS.items() for f in ("torch", "tf1")]  # fmt: skip
    pairs += [(a, a.replace("torch", "tf1"), DIFF_LIMIT_TORCH_TF1) for a in SCRIPTS[::2]]
    sizes = []
    for a, b, limit in pairs:
        lines = [list(code_lines(ROOT / "algos" / f"{script}.py").values()) for script in (a, b)]
        diff = list(difflib.unified_diff(*lines, n=0, lineterm=""))[2:]
        gone, new = (sum(line[0] == sign for line in diff) for sign in "-+")
        sizes.append((a, b, gone, new, limit))
    return sizes


@pytest.mark.parametrize("a, b, gone, new, limit", diff_sizes())
def test_diffs_are_small(a, b, gone, new, limit):
    assert max(gone, new) <= limit


# Lines of code at most, and the share of a script that is the algorithm at least: the lines of
# these sections among all.
SIZE_LIMITS = {"common": 1000, "benchmark": 1800, "tests": 4300}
ALGORITHM = {"Networks", "Buffer", "Losses", "Natural gradient", "Training"}
SHARE = 0.65


def size(folder):
    """Lines of code in a folder."""
    return sum(len(code_lines(path)) for path in sorted((ROOT / folder).glob("*.py")))


def algorithm_share(script):
    """The share of a script's lines of code that lie in the sections about the algorithm."""
    code = code_lines(ROOT / "algos" / f"{script}.py")
    section, counted = "", 0
    for i, line in enumerate(source(script).splitlines(), 1):
        if banner := re.match(r"^# ([A-Z][A-Za-z ]*) -+$", line):
            section = banner[1]
        counted += i in code and section in ALGORITHM
    return counted / len(code)


@pytest.mark.parametrize("script", SCRIPTS)
def test_most_of_a_script_is_the_algorithm(script):
    assert algorithm_share(script) >= SHARE


if __name__ == "__main__":
    for a, b, gone, new, limit in diff_sizes():
        print(f"{a:>11} -> {b:<11} -{gone:<3} +{new:<3} of {limit}")
    for folder, limit in SIZE_LIMITS.items():
        print(f"{folder + '/':>11} {size(folder)} of {limit}")
    for script in SCRIPTS:
        lines = len(code_lines(ROOT / "algos" / f"{script}.py"))
        print(f"{script:>11} {lines} lines, algorithm {algorithm_share(script):.0%}")
