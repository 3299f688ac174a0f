"""The scripts read as small diffs of one another: what is meant to be the same is the same.

    python tests/test_style.py

prints how many lines of code each pair of scripts differs in.
"""

import ast
import difflib
import io
import re
import tokenize
from functools import cache
from itertools import combinations

import pytest
from conftest import ROOT

SCRIPTS = sorted(p.stem for p in (ROOT / "algos").glob("*.py"))
ON_POLICY = ("vpg", "trpo", "ppo")
SECTIONS = ["Arguments", "Networks", "Buffer", "Losses", "Training", "Command line"]
SECTIONS_OF_ITS_OWN = {"trpo": "Natural gradient"}

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
        "train: Target networks": "framework algo",
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
FREE_LINES = (
    r"^ *state = ",
    r"^ *save_model\(",
    r'^ *for key in \("Entropy",',
)


def traits(script):
    """What a block of a script may depend on."""
    algo, framework = script.split("_")
    family = "on-policy" if algo in ON_POLICY else "off-policy"
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
        for name in exceptions if scripts else ():
            texts = {found[s][name] for s in scripts if name in found[s]}
            assert len(texts) > 1, f"{name} is the same in all of {family}, or is nowhere"
    if len({traits(s)["family"] for s in SCRIPTS}) == 2:
        for name in OF_A_FAMILY:
            assert len({found[s][name] for s in SCRIPTS if name in found[s]}) > 1, name


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_come_in_order(script):
    text, algo = source(script), traits(script)["algo"]
    banners = re.findall(r"^# ([A-Z][A-Za-z ]*) -+$", text, flags=re.M)
    own = SECTIONS_OF_ITS_OWN.get(algo)
    assert [b for b in banners if b != own] == SECTIONS
    assert all(len(line) == 100 for line in text.splitlines() if re.match("^# .* --+$", line))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_stands_alone(script):
    """It imports libraries and common/, never another script, and says how to run and diff it."""
    text = source(script)
    modules = re.findall(r"^(?:from|import) ([\w.]+)", text, flags=re.M)
    assert not {m.split(".")[0] for m in modules} & {*SCRIPTS, "algos", "benchmark"}
    docstring = ast.get_docstring(ast.parse(text))
    assert f"python algos/{script}.py" in docstring
    mentioned = re.findall(r"[a-z0-9]+_(?:torch|tf1)(?=\.py)", docstring)
    other = script.replace("torch", "tf1") if "torch" in script else script.replace("tf1", "torch")
    assert other in mentioned and "Diff me against" in docstring


def code_lines(script):
    """The lines of a script without comments, docstrings and blank lines."""
    text = source(script)
    drop = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            drop |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kept = [line.rstrip() for i, line in enumerate(lines, 1) if i not in drop]
    return [line for line in kept if line]


def changed_lines(a, b):
    """(lines of code that only `a` has, lines that only `b` has)."""
    diff = list(difflib.unified_diff(code_lines(a), code_lines(b), n=0, lineterm=""))[2:]
    return sum(line[0] == "-" for line in diff), sum(line[0] == "+" for line in diff)


# Changed lines of code between the same algorithms in other collections that are read by diffs.
# Ours are counted both ways, lines taken out and lines put in; the larger is held against theirs.
PEERS = {("vpg", "ppo"): 38, ("vpg", "trpo"): 109, ("ddpg", "td3"): 61, ("td3", "sac"): 64}
PEERS_TORCH_TF1 = 108


def diff_sizes():
    """[(a, b, lines only in a, lines only in b, the best peer's changed lines), ...]."""
    pairs = [
        (f"{a}_{f}", f"{b}_{f}", peer) for (a, b), peer in PEERS.items() for f in ("torch", "tf1")
    ]
    algos = sorted({traits(s)["algo"] for s in SCRIPTS})
    pairs += [(f"{a}_torch", f"{a}_tf1", PEERS_TORCH_TF1) for a in algos]
    return [(a, b, *changed_lines(a, b), peer) for a, b, peer in pairs if {a, b} <= set(SCRIPTS)]


@pytest.mark.parametrize("a, b, gone, new, peer", diff_sizes())
def test_diffs_are_small(a, b, gone, new, peer):
    assert max(gone, new) < peer


if __name__ == "__main__":
    for a, b, gone, new, peer in diff_sizes():
        print(f"{a:>11} -> {b:<11} -{gone:<3} +{new:<3} peers {peer}")
    for a, b in combinations([s for s in SCRIPTS if s.endswith("torch")], 2):
        if traits(a)["family"] == traits(b)["family"]:
            print(a, b, changed_lines(a, b))
