"""The pages are true: links resolve, the code they name exists, their commands run as written."""

import ast
import re
import shlex
import shutil
import subprocess
import sys

import pandas as pd
import pytest
from conftest import PATH, ROOT, mpi, slow

FOLDERS = ("algos", "benchmark", "common", "exercises", "tests")
PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in FOLDERS)]
PAGES += [ROOT / "exercises" / "DEBUGGING.md", ROOT / "exercises" / "PROBES.md"]
RESULTS = sorted((ROOT / "benchmark").glob("*/*.md"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Budgets: what is appended to a command so that it ends soon.
SMALL = {
    "vpg trpo ppo": "--epochs 1 --steps-per-epoch 400",
    "ddpg td3 sac": "--epochs 1 --steps-per-epoch 200 --num-test-episodes 1",
}
# Flags of grid.py that are Spinning Up's, of all programs, of TensorBoard and of uv.
OTHER_FLAGS = {"env", "hid", "act", "cpu", "dt", "help", "index-url", "logdir", "python"}


def anchors(text):
    """GitHub's anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_first_page_is_short():
    assert len(PAGES[0].read_text().split()) <= 2000


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page):
    """To files and headings; a link that is called by a name in code leads to its definition."""
    links = re.findall(r"\[([^][]*)\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"", page.read_text())
    for text, target, source in links:
        path, _, anchor = (target or source).partition("#")
        if path.startswith("http"):
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {path}"
        if anchor:
            assert anchor in anchors(linked.read_text()), f"{page.name} links to {path}#{anchor}"
        if linked.suffix == ".py" and (name := re.fullmatch(r"`(\w+)`", text)):
            definition = rf"^ *(def|class) {name[1]}\b|^{name[1]} = "
            assert re.search(definition, linked.read_text(), flags=re.M), f"{name[1]} in {path}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_flags_exist(page):
    """A flag is a field of the arguments of some program; in a script's command, of that script."""

    def fields(paths):
        classes = [n for p in paths for n in ast.parse(p.read_text()).body if hasattr(n, "bases")]
        lines = [line for n in classes if n.name in ("Args", "Options") for line in n.body]
        names = {x.target.id for x in lines if isinstance(x, ast.AnnAssign)}
        return {flag.replace("_", "-") for name in names for flag in (name, f"no_{name}")}

    folders = ("algos", "benchmark", "exercises")
    known = fields(p for folder in folders for p in ROOT.glob(f"{folder}/*.py")) | OTHER_FLAGS
    for line in page.read_text().splitlines():
        if "python3 -m venv" in line or "ruff" in line:
            continue
        script = re.match(r"(?:python|mpirun) .*?(algos/\w+\.py)", line)
        flags = fields([ROOT / script[1]]) if script and "grid.py" not in line else known
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", line):
            assert flag in flags, f"--{flag} in {line}"


def test_every_logged_column_is_explained():
    course = PAGES[1].read_text()
    for script in (ROOT / "algos").glob("*.py"):
        keys = re.findall(r'log_tabular\("(\w+)"', script.read_text())
        for loop in re.findall(r"(?:for key in|keys =) (.*)", script.read_text()):
            keys += re.findall(r'"(\w+)"', loop)
        assert len(keys) >= 10
        for key in set(keys):
            name = re.sub("[12]", "", key)  # Q1Vals: QVals
            row = re.search(rf"^\|[^|]*`(Average)?{name}`", course, flags=re.M)
            assert row, f"{key} of {script.name}"


def blocks(page, language=""):
    """The fenced code blocks of a page in a language, or in none: what runs here. Those that need a
    cluster, several machines or minutes are indented instead."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.M | re.S)
    return [block for name, block in found if name == language]


def commands(page):
    """The shell commands of a page, without their comments; of the set-up, what comes after it."""
    lines = [line.split("  #")[0].strip() for block in blocks(page) for line in block.splitlines()]
    lines = [re.sub(r"^python3 -m venv .*&& ", "", line) for line in lines]
    return [line for line in lines if line and not re.match("python -m pytest|ruff", line)]


def shortened(command):
    """The command with a small budget."""
    script = re.match(r"(?:python|mpirun) .*?(\w+)_(?:torch|tf1)\.py", command)
    if script:
        (flags,) = [flags for names, flags in SMALL.items() if script[1] in names.split()]
        flags = flags.replace("1", "2", 1) if "--resume" in command else flags
        command = f"{re.sub(r' --(epochs|steps-per-epoch) [0-9]+', '', command)} {flags}"
    return command


@pytest.mark.parametrize("words, code", [("Slurm", 0), ("Slurm compiler", 1)])
def test_nothing_is_skipped_for_want_of_what_ci_requires(tmp_path, words, code):
    skipped = "import conftest\ndef test():\n    conftest.needs_compiler()"
    (tmp_path / "test_skipped.py").write_text(skipped)
    program = [sys.executable, "-m", "pytest", "-rs", "-p", "conftest", "--rootdir", tmp_path]
    env = {"PYTHONPATH": str(ROOT / "tests"), "PATH": "", "CXX": "", "CI_REQUIRE": words}
    done = subprocess.run([*program, tmp_path], env=env, capture_output=True, text=True)
    assert done.returncode == code and "needs a C++ compiler" in done.stdout, done.stdout


@pytest.mark.parametrize("number, directory", [(0, "my_run"), slow(1, "my_tf_run")])
def test_a_program_of_ones_own(tmp_path, number, directory):
    """The programs of common/README.md: their loss falls, they leave networks and events, and one
    that dies and is started again has the table of one that does not."""
    example = blocks(ROOT / "common" / "README.md", "python")[number]
    save = "    logger.save_state"
    dying = example.replace(save, f"    if epoch == 2:\n        mpi.abort(1)\n{save}")
    tables = []
    for name, programs in ("whole", [example]), ("killed", [dying, example]):
        (tmp_path / name).mkdir()
        for program in programs:
            done = mpi(tmp_path / name, program, 1, cwd=tmp_path / name, check=False)
            assert (done.returncode == 0) == (program is example), done.stderr
        run = tmp_path / name / directory
        tables.append(pd.read_csv(run / "progress.txt", sep="\t"))
        model = ["torch_save/model.pt", "tf1_save/*.pb"][number]
        assert all(list(run.glob(file)) for file in ("events.*", "config.json", model))
    loss = tables[0].AverageLoss
    assert len(loss) == 5 and loss[4] < 0.1 * loss[0]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_run_as_written(tmp_path, page):
    """One after another, in a copy, as a reader would: later ones use what earlier ones made."""
    for folder in (*FOLDERS, "sweeps"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(PAGES[0], tmp_path)
    for sweep in (tmp_path / "sweeps").glob("*.toml"):
        text = re.sub(r"^epochs = .*", "epochs = 1", sweep.read_text(), flags=re.M)
        sweep.write_text(text.replace("[params]", "[params]\nsteps_per_epoch = 200", 1))
    examples = blocks(page, "python")
    for i, example in enumerate(examples):
        small = 'eg.add("epochs", 1)\neg.add("steps_per_epoch", 400)\neg.run('
        (tmp_path / f"example_{i}.py").write_text(example.replace("eg.run(", small))
    for command in [*commands(page), *(f"python example_{i}.py" for i in range(len(examples)))]:
        if command.startswith("diff"):
            assert all((tmp_path / w).exists() for w in shlex.split(command)[1:])
            continue
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 400}
        options["env"] = {"PATH": PATH, "HOME": str(tmp_path), "MPLBACKEND": "Agg"}
        result = subprocess.run(["bash", "-c", shortened(command)], **options)
        assert result.returncode == 0, f"{command}\n{(result.stdout + result.stderr)[-4000:]}"
