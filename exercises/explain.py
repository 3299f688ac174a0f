"""What failed, in a line or two for a learner: pytest's plugin for `exercise.py check`.

The tests alone say what is right. This only explains: every call of the function to be written is
repeated with the original's. The test that fails is noted, and the first call with another result,
or else the test's message. EXERCISE in the environment is a JSON list: the script, the function
("" if there is none to compare), and the file to write.
"""

import contextlib
import copy
import functools
import inspect
import json
import os
import re
import textwrap
import traceback
from pathlib import Path

import numpy as np

SCRIPT, FUNCTION, REPORT = json.loads(os.environ["EXERCISE"])
wrong_calls = []  # as text
BUFFERS = ("GAEBuffer", "ReplayBuffer")


def pytest_sessionstart():
    """Have the tests load a script whose function is watched."""
    import conftest

    load = conftest.load_script

    def load_and_watch(name):
        module = load(name)
        if name == SCRIPT:
            watch(module, load("original"), *FUNCTION.split("."))
        return module

    conftest.load_script = load_and_watch


def watch(owner, original, name, *method):
    """Note the first call of a function or method that differs from the original's."""
    if method and inspect.isclass(getattr(owner, name)):
        return watch(getattr(owner, name), getattr(original, name), *method)
    if method or not name:  # a function within a function: nothing outside calls it
        return None
    theirs, right = getattr(owner, name), getattr(original, name)

    @functools.wraps(theirs)
    def watched(*args, **kwargs):
        given = inspect.signature(right).bind(*args, **kwargs).arguments
        given = ", ".join(f"{key}={show(x)}" for key, x in given.items() if key != "self")
        copies, more = [copied(x) for x in args], {key: copied(x) for key, x in kwargs.items()}
        found = theirs(*args, **kwargs)
        with contextlib.suppress(Exception):  # the original's, if what it is given is wrong already
            wanted, outcome = results(right(*copies, **more), copies), results(found, args)
            wrong = (difference(key, outcome.get(key), wanted[key]) for key in wanted)
            if wrong := next(filter(None, wrong), None):
                wrong_calls.append(f"{FUNCTION}({given})\n{wrong}")
        return found

    setattr(owner, name, watched)


def copied(x):
    """Copies of what a call may change; anything else as it is."""
    if hasattr(x, "clone"):  # a tensor, with its graph
        return x.clone()
    changes = isinstance(x, np.ndarray | np.random.Generator) or type(x).__name__ in BUFFERS
    return copy.deepcopy(x) if changes else x


def results(value, args):
    """{name: value} of what a call has given and, in a buffer, stored."""
    parts = dict(enumerate(value, 1)) if isinstance(value, tuple) else {"": value}
    stored = vars(args[0]) if args and type(args[0]).__name__ in BUFFERS else {}
    return {f"result {key}".strip(): x for key, x in parts.items()} | stored


def difference(name, found, wanted):
    """A sentence that says how a result differs from what it should be, or None."""
    if not is_array(wanted) or not is_array(found):
        same = hasattr(wanted, "graph") or repr(found) == repr(wanted)  # a graph's nodes: no values
        return None if same else f"{name} is {show(found)}, should be {show(wanted)}"
    a, b = array(found), array(wanted)
    if a.shape != b.shape:
        return f"{name} has shape {list(a.shape)}, should have {list(b.shape)}"
    wrong = np.argwhere(~np.isclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True))
    if not len(wrong):
        return None
    first = tuple(map(int, wrong[0]))
    where = f"; first at {list(first)}: {a[first]:.6g}, should be {b[first]:.6g}"
    return f"{name} is {show(a)}, should be {show(b)}" + where * (a.size > 6) + nearly(a, b)


def nearly(a, b):
    """What to add where the largest difference is small beside the largest value, or ""."""
    error, size = np.abs(np.subtract(a, b, dtype=float)).max(), np.abs(b).max()
    close = f" (off by {error:.1g}: rounding, or a slightly different formula)"
    return close * bool(error <= 2e-4 * size)


def is_array(x):
    return isinstance(x, np.ndarray | np.number | int | float) or hasattr(x, "detach")


def array(x):
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)


def show(x):
    """A value in one short line."""
    if isinstance(x, np.ndarray) or hasattr(x, "detach"):
        text = np.array2string(array(x), precision=4, threshold=6, edgeitems=2, separator=", ")
        text = re.sub(r"(?<=\[)\s+|\s+(?=[],])", "", re.sub(r"\s+", " ", text))
        return text if array(x).size <= 6 else f"{text} of shape {list(x.shape)}"
    if isinstance(x, tuple | list):
        return f"({', '.join(map(show, x))})"
    return repr(x) if isinstance(x, int | float | str | None) else f"<{type(x).__name__}>"


def pytest_exception_interact(node, call):
    """Write the report: of the first failure, since pytest -x stops there."""
    error = call.excinfo.value
    error = error.__cause__ or error  # of an import that failed
    doc = (inspect.getdoc(getattr(node, "function", None)) or "").partition("\n\n")[0]
    text = "".join(traceback.format_exception(error))  # with that of a program it has run
    lines = re.findall(rf'{SCRIPT}\.py", line ([0-9]+)', text)
    wrong = [*wrong_calls, said(error) + (f" (line {lines[-1]})" if lines else "")]
    doc = f', says: "{" ".join(doc.split())}"' if doc else ", has failed."
    Path(REPORT).write_text(f"{wrong[0]}\nThe test, {node.name}{doc}", "utf-8")


def said(error):
    """What an error says, in a line."""
    text = str(error).strip()
    if type(error).__name__ == "Failed":  # a program's output; its last error says why
        errors = re.findall(r"^(?:\S*Error|Fatal error).*", text, flags=re.M)
        text = (errors or text.splitlines())[-1]
    elif not isinstance(error, AssertionError):
        text = f"{type(error).__name__}: {text}"
    elif rows := re.findall(r"^ *'?([A-Z]\w+)'? *\| *(\S+) *\| *(\S+)", text, flags=re.M):
        rows = [(key, float(a), float(b)) for key, a, b in rows if key != "Index"]
        text = "; ".join(f"{key} is {a:.6g}, should be {b:.6g}" for key, a, b in rows[:3])
        text += min((nearly(a, b) for _, a, b in rows), key=len)  # "" unless all are near
    elif arrays := re.search(r"ACTUAL: (.*?)\n *DESIRED: (.*)", text, flags=re.S):
        a, b = (textwrap.shorten(x, 80) for x in arrays.groups())
        text = f"got {a}, should be {b}"
    return textwrap.shorten(text.partition("\n")[0].removeprefix("AssertionError: "), 250)
