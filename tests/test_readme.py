"""The README is true: its links resolve, the code it names exists, its commands run as written."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import PATH, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "benchmark" / "results").glob("*.md"))]
README = PAGES[0].read_text()
# Budgets: what is appended to a command so that it ends soon.
SMALL = {
    "vpg trpo ppo": "--epochs 1 --steps-per-epoch 400",
    "ddpg td3 sac": "--epochs 1 --steps-per-epoch 200 --num-test-episodes 1",
}


def anchors(text):
    """GitHub's anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"", text):
        path, _, anchor = "".join(target).partition("#")
        if path.startswith("http"):
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {path}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text()), f"{page.name} links to #{anchor}"


def test_equations_link_to_the_lines_of_their_functions():
    links = re.findall(r"\[`(\w+)`\]\((algos/\w+\.py)#L(\d+)\)", README)
    assert len(links) > 30
    for name, script, number in links:
        line = (ROOT / script).read_text().splitlines()[int(number) - 1]
        assert re.match(rf"(def|class) {name}\b", line), f"{name} in {script}"


def test_every_logged_column_is_explained():
    for script in (ROOT / "algos").glob("*.py"):
        keys = re.findall(r'log_tabular\("(\w+)"', script.read_text())
        for loop in re.findall(r"for key in \((.*?)\):\n\s+logger.log_tabular", script.read_text()):
            keys += re.findall(r'"(\w+)"', loop)
        for key in set(keys) - {"Epoch"}:
            assert key in README, f"{key} of {script.name}"


def commands():
    """The shell commands of the README's code blocks, without their comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.M | re.S)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    lines = [line.split("  #")[0].strip() for line in lines]
    return [line for line in lines if line and not line.startswith("python3 -m venv")]


def shortened(command):
    """The command with a small budget."""
    script = re.match(r"(?:python|mpirun) .*?(\w+)_(?:torch|tf1)\.py", command)
    for names, flags in SMALL.items() if script else ():
        if script[1] in names.split():
            return f"{command} {flags}"
    return command


@pytest.mark.parametrize("words, code", [("sshd", 0), ("sshd compiler", 1)])
def test_nothing_is_skipped_for_want_of_what_ci_requires(tmp_path, words, code):
    skipped = "import conftest\ndef test():\n    conftest.needs_compiler()"
    (tmp_path / "test_skipped.py").write_text(skipped)
    program = [sys.executable, "-m", "pytest", "-rs", "-p", "conftest", "--rootdir", tmp_path]
    env = {"PYTHONPATH": str(ROOT / "tests"), "PATH": "", "CXX": "", "CI_REQUIRE": words}
    done = subprocess.run([*program, tmp_path], env=env, capture_output=True, text=True)
    assert done.returncode == code and "needs a C++ compiler" in done.stdout, done.stdout


@pytest.mark.slow
def test_commands_run_as_written(tmp_path):
    """One after another, in a copy, as a reader would: later ones use what earlier ones made."""
    for folder in ("algos", "benchmark", "common", "sweeps"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for sweep in (tmp_path / "sweeps").glob("*.toml"):
        text = re.sub(r"^epochs = .*", "epochs = 1", sweep.read_text(), flags=re.M)
        tests = "\nnum_test_episodes = 1" if "sac" in sweep.name else ""
        text = text.replace("[params]", f"[params]\nsteps_per_epoch = 200{tests}", 1)
        sweep.write_text(text)
    assert len(commands()) > 15
    examples = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)
    for i, example in enumerate(examples):
        small = 'eg.add("epochs", 1)\neg.add("steps_per_epoch", 400)\neg.run('
        (tmp_path / f"example_{i}.py").write_text(example.replace("eg.run(", small))
    for command in [*commands(), *(f"python example_{i}.py" for i in range(len(examples)))]:
        if command.startswith("diff"):
            assert all((tmp_path / w).exists() for w in shlex.split(command)[1:] if "/" in w)
            continue
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 400}
        options["env"] = {"PATH": PATH, "HOME": str(tmp_path), "MPLBACKEND": "Agg"}
        result = subprocess.run(["bash", "-c", shortened(command)], **options)
        assert result.returncode == 0, f"{command}\n{(result.stdout + result.stderr)[-4000:]}"
