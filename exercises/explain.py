"""What failed, in a line or two for a learner: pytest's plugin for `exercise.py check`.

The tests alone say what is right. This only explains: the function to be written is compared, call
by call, with the original's, and the first call with another result is noted; and so are the test
that fails and the message of its assertion. EXERCISE in the environment is a JSON object with the
`script`, the `function` ("" if there is none to compare), and the file to write the `report` to.
"""

import copy
import functools
import importlib.util
import inspect
import json
import os
import re
from pathlib import Path

import numpy as np

ORIGINAL = Path(__file__).with_name("original.py")
NOTE = json.loads(os.environ.get("EXERCISE", "{}"))


def pytest_sessionstart():
    import conftest

    load = conftest.load_script

    def load_and_watch(name):
        module = load(name)
        if name == NOTE["script"] and NOTE["function"]:
            spec = importlib.util.spec_from_file_location("original", ORIGINAL)
            original = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(original)
            watch(module, original, NOTE["function"])
        return module

    conftest.load_script = load_and_watch


def watch(module, original, function):
    """Replace a function or method of `module` by one that also notes the first wrong call."""
    *owner, name = function.split(".")
    for part in owner:
        module, original = getattr(module, part), getattr(original, part)
    if "." in function and not inspect.isclass(module):  # a function within a function
        return
    theirs, right = getattr(module, name), getattr(original, name)

    @functools.wraps(theirs)
    def watched(*args, **kwargs):
        if "call" in NOTE:
            return theirs(*args, **kwargs)
        given = call_text(function, theirs, args, kwargs)
        copies = [copied(x) for x in args]
        try:
            wanted = right(*copies, **{key: copied(x) for key, x in kwargs.items()})
        except Exception:  # what it was given is wrong already
            return theirs(*args, **kwargs)
        found = theirs(*args, **kwargs)
        wrong = difference("", found, wanted)
        if owner and copies[0] is not args[0]:  # a buffer: what it has stored
            mine, others = vars(args[0]), vars(copies[0])
            wrong = wrong or next(
                filter(None, (difference(f".{key}", mine.get(key), others[key]) for key in others)),
                None,
            )
        if wrong:
            NOTE["call"] = f"{given}\n{wrong}"
        return found

    setattr(module, name, watched)


def copied(x):
    """Copies of arrays, generators and buffers, which calls change; anything else as it is."""
    changes = isinstance(x, np.ndarray | np.random.Generator) or type(x).__name__.endswith("Buffer")
    return copy.deepcopy(x) if changes else x


def difference(name, found, wanted):
    """A sentence that says how a result differs from what it should be, or None."""
    if isinstance(wanted, tuple | list) and isinstance(found, tuple | list):
        if len(found) != len(wanted):
            return f"result{name}: {len(found)} values instead of {len(wanted)}"
        pairs = enumerate(zip(found, wanted, strict=True), 1)
        parts = (difference(f"{name} {i}", *pair) for i, pair in pairs)
        return next(filter(None, parts), None)
    if hasattr(wanted, "graph"):  # of TensorFlow 1: a node, without a value
        return None
    name = name[1:] if name.startswith(".") else f"result{name}"
    if found is None:
        return f"{name}: None, should be {show(wanted)}"
    a, b = array(found), array(wanted)
    if a.shape != b.shape:
        return f"{name}: shape {list(a.shape)}, should be {list(b.shape)}"
    if a.dtype == object or b.dtype.kind not in "fiub":
        return None
    wrong = ~np.isclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    if not wrong.any():
        return None
    text = f"{name}: {show(found)}, should be {show(wanted)}"
    if a.size > 6:
        at = tuple(map(int, np.argwhere(wrong)[0]))
        text += f"; first wrong at {list(at)}: {a[at]:.4g}, should be {b[at]:.4g}"
    return text


def array(x):
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)


def show(x):
    """A value in one short line."""
    if isinstance(x, tuple | list):
        return f"({', '.join(map(show, x))})"
    if hasattr(x, "detach") or isinstance(x, np.ndarray):
        x = array(x)
        text = np.array2string(x, precision=4, threshold=6, edgeitems=2, separator=", ")
        text = re.sub(r"\s+", " ", text)
        return text if x.size <= 6 else f"{text} of shape {list(x.shape)}"
    if isinstance(x, int | float | str | bool | None):
        return f"{x:.4g}" if isinstance(x, float) else repr(x)
    return f"<{type(x).__name__}>"


def call_text(function, theirs, args, kwargs):
    """A call as one would write it, `self` left out."""
    given = inspect.signature(theirs).bind(*args, **kwargs).arguments
    return f"{function}({', '.join(f'{k}={show(x)}' for k, x in given.items() if k != 'self')})"


def pytest_exception_interact(node, call):
    """Write the report of the first failure."""
    error = call.excinfo.value
    error = error.__cause__ or error if type(error).__name__ == "CollectError" else error
    doc = (inspect.getdoc(getattr(node, "function", None)) or "").partition("\n\n")[0]
    report = {"test": node.name, "doc": " ".join(doc.split()), "call": NOTE.get("call")}
    report |= {"said": said(error), "line": line_of(error)}
    Path(NOTE["report"]).write_text(json.dumps(report))


def line_of(error):
    """The line of the script in which an error was raised, or None."""
    text, trace = str(error), error.__traceback__
    found = [int(x) for x in re.findall(rf'{NOTE["script"]}\.py", line ([0-9]+)', text)]
    while trace:
        if Path(trace.tb_frame.f_code.co_filename).stem == NOTE["script"]:
            found.append(trace.tb_lineno)
        trace = trace.tb_next
    return found[-1] if found else None


def said(error):
    """What an error says, in a line."""
    text = str(error).strip()
    if type(error).__name__ == "Failed":  # a program's output; its last line says why
        return short(text.splitlines()[-1])
    if not isinstance(error, AssertionError):
        return short(f"{type(error).__name__}: {text.partition(chr(10))[0]}")
    if rows := re.findall(r"^ *'?([A-Z]\w+)'? *\| *(\S+) *\| *(\S+)", text, flags=re.M):
        rows = [(key, float(a), float(b)) for key, a, b in rows if key != "Index"]
        return "; ".join(f"{key} is {a:.4g}, should be {b:.4g}" for key, a, b in rows[:3])
    if arrays := re.search(r"ACTUAL: (.*?)\n *DESIRED: (.*)", text, flags=re.S):
        a, b = (short(re.sub(r"\s+", " ", x), 80) for x in arrays.groups())
        return f"got {a}, should be {b}"
    return short(text.partition("\n")[0].removeprefix("AssertionError: "))


def short(text, width=200):
    return text if len(text) <= width else text[: width - 4] + " ..."
