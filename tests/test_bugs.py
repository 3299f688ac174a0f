"""Mistakes that raise no error and only spoil the numbers: each makes a test of this suite fail."""

import ast
import shutil
import sys
import tomllib

import forked
import pytest
from conftest import ROOT

BUGS = tomllib.loads((ROOT / "tests" / "bugs.toml").read_text())["bug"]


def test_bugs_fit_the_code():
    """Each old text occurs once, its replacement compiles, and the named test exists."""
    assert len({bug["name"] for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        for path in bug["files"]:
            text = (ROOT / path).read_text()
            assert text.count(bug["old"]) == 1, (bug["name"], path)
            compile(text.replace(bug["old"], bug["new"]), path, "exec")
        path, _, name = bug["test"].partition("::")
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name.partition("[")[0] in functions, bug["name"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if "exercise" not in bug], ids=lambda bug: bug["name"]
)
def test_a_planted_bug_is_caught(bug, tmp_path):
    """In a copy of the project, by a test that fails, not by an error on the way to it. Those that
    are exercises are planted by test_exercises.py."""
    copy, left_out = tmp_path / "copy", shutil.ignore_patterns("results", "__pycache__")
    for folder in ("algos", "benchmark", "common", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for path in map(copy.joinpath, bug["files"]):
        path.write_text(path.read_text().replace(bug["old"], bug["new"]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += [f"--basetemp={tmp_path / 'tmp'}", bug["test"]]
    code, output = forked.run_for(command, 600, copy)
    if "needs TensorFlow" in output:
        pytest.skip("needs TensorFlow")
    assert code == 1 and "\n1 failed" in output, f"{bug['seen']}\n{output}"
