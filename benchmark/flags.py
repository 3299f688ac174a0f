"""Which flags a script takes, read from the source of its `Args` dataclass.

The script is not imported: that would load torch or tensorflow, seconds to check a name.
"""

import ast
import contextlib
import dataclasses
import difflib
import json
import math
from pathlib import Path

from common import UsageError
from common.serialization import read_text

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a script's `Args`.

    kinds: the types that its annotation allows, of "bool int float str tuple dict none any".
    choices: what a Literal allows, besides the kinds. items: kinds of a tuple's items.
    low, high, open_low: bounds of its numbers (common/args.py, Range).
    has_default, default: its default, where it is a literal.
    """

    name: str
    kinds: frozenset
    choices: tuple = ()
    items: frozenset = frozenset()
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    has_default: bool = False
    default: object = None

    def expected(self):
        """What a value must be, in words."""
        words = [json.dumps(choice) for choice in self.choices]
        names = {"tuple": "list", "str": "string", "bool": "true or false", "dict": "table"}
        words += [names.get(kind, kind) for kind in sorted(self.kinds - {"none"})]
        return " or ".join(words)

    def takes(self, value):
        """Whether a value, as TOML or JSON has it, is of a type that this field allows."""
        if value in self.choices and isinstance(value, str):
            return True
        kind = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict"}.get(type(value))
        if isinstance(value, list | tuple):
            one = Field(self.name, self.items)
            return "any" in self.kinds or ("tuple" in self.kinds and all(map(one.takes, value)))
        if value is None:
            kind = "none"
        return (
            kind in self.kinds or (kind == "int" and "float" in self.kinds) or "any" in self.kinds
        )

    def check(self, value):
        """The value, ints made floats where the field is a float; UsageError says what is wrong."""
        if not self.takes(value):
            hint = ""
            if "tuple" in self.kinds and isinstance(value, int | float):
                hint = f"; the values of a grid are lists themselves: [[{value}, ...]]"
            shown = json.dumps(value, default=str)
            raise UsageError(f"expected {self.expected()}, got {shown}{hint}")
        if isinstance(value, dict):
            try:
                json.dumps(value, allow_nan=False)
            except (ValueError, TypeError) as e:
                raise UsageError(f"cannot be written as JSON: {e}") from e
        for x in value if isinstance(value, list | tuple) else [value]:
            if isinstance(x, int | float) and not isinstance(x, bool):
                above = x > self.low if self.open_low else x >= self.low
                if not (math.isfinite(x) and above and x <= self.high):
                    raise UsageError(f"must be {self.bounds()}, got {x}")
            if isinstance(x, str) and "\0" in x:
                raise UsageError("a string must not hold a NUL character")
        if isinstance(value, int) and "float" in self.kinds and not {"int", "bool"} & self.kinds:
            value = float(value)
        return value

    def bounds(self):
        if self.high < math.inf:
            return f"between {self.low:g} and {self.high:g}"
        if self.low > -math.inf:
            return f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        return "finite"

    def parse(self, text):
        """A value of this field from a word of a command line."""
        candidates = [text]
        for read in (json.loads, float, lambda t: json.loads(t.lower())):
            try:
                candidates.append(read(text))
            except (ValueError, RecursionError):
                continue
        if "tuple" in self.kinds and not text.startswith("["):
            with contextlib.suppress(ValueError):
                candidates.append(json.loads(f"[{text}]"))
            candidates.append(text.split(","))
        for value in candidates:
            if self.takes(value):
                return self.check(value)
        raise UsageError(f"expected {self.expected()}, got {text}")

    def words(self, value):
        """The words of a command line that set this field."""
        flag = "--" + self.name.replace("_", "-")
        if isinstance(value, bool):
            return [flag if value else "--no-" + flag[2:]]
        if isinstance(value, dict):
            return [flag, json.dumps(value, ensure_ascii=False)]
        values = list(map(str, value)) if isinstance(value, list | tuple) else [str(value)]
        if values and values[0].startswith("-"):  # or it would look like a flag itself
            return [f"{flag}={values[0]}", *values[1:]]
        return [flag, *values]


def read_fields(script):
    """The fields of a script's `Args`: {name: Field}. UsageError if there are none to read."""
    try:
        return _read_fields(script)
    except UsageError:
        raise
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as e:
        raise UsageError(f"cannot read the flags of {script}: {e}") from e


def _read_fields(script):
    path = Path(script)
    tree = _parse(path)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            break
    else:
        raise UsageError(f"{script} has no dataclass called Args to read its flags from")
    fields = {}
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            name = line.target.id
            spec = _read_type(line.annotation, tree, path)
            fields[name] = Field(name, **{"kinds": frozenset({"any"}), **spec, **_default(line)})
    return fields


def find_field(script, fields, name):
    """The field called `name`; UsageError, with the nearest name, if the script has none."""
    if name in fields:
        return fields[name]
    near = difflib.get_close_matches(name, fields, 1)
    hint = f" (perhaps {near[0]}?)" if near else ""
    raise UsageError(f"{Path(script).name} has no flag --{name.replace('_', '-')}{hint}")


def _parse(path):
    try:
        return ast.parse(read_text(path))
    except (OSError, SyntaxError, ValueError) as e:
        raise UsageError(f"cannot read {path}: {e}") from e


def _default(line):
    node = line.value
    if isinstance(node, ast.Call):  # field(default_factory=dict)
        for keyword in node.keywords:
            if keyword.arg == "default_factory" and isinstance(keyword.value, ast.Name):
                empty = {"dict": {}, "list": [], "tuple": ()}
                if keyword.value.id in empty:
                    return {"has_default": True, "default": empty[keyword.value.id]}
        return {}
    try:
        return {"has_default": True, "default": ast.literal_eval(node)}
    except (ValueError, TypeError):
        return {}


def _read_type(node, tree, path):
    """What an annotation allows, as arguments of Field; {} for what is not understood."""
    if isinstance(node, ast.Constant) and node.value is None:
        return {"kinds": frozenset({"none"})}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _read_type(ast.parse(node.value, mode="eval").body, tree, path)
    if isinstance(node, ast.Name) and node.id in ("bool", "int", "float", "str", "tuple", "dict"):
        return {"kinds": frozenset({node.id})}
    if isinstance(node, ast.Name):
        return _read_alias(node.id, tree, path)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_read_type(part, tree, path) for part in (node.left, node.right)])
    if not isinstance(node, ast.Subscript):
        return {}
    outer = getattr(node.value, "id", getattr(node.value, "attr", None))
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Literal":
        return {"kinds": frozenset(), "choices": tuple(ast.literal_eval(part) for part in parts)}
    if outer in ("tuple", "list", "Tuple", "List", "Sequence"):
        items = _read_type(parts[0], tree, path).get("kinds", frozenset({"any"}))
        return {"kinds": frozenset({"tuple"}), "items": items}
    if outer in ("dict", "Dict"):
        return {"kinds": frozenset({"dict"})}
    if outer == "Optional":
        return _union([_read_type(parts[0], tree, path), {"kinds": frozenset({"none"})}])
    if outer == "Union":
        return _union([_read_type(part, tree, path) for part in parts])
    if outer == "Annotated":
        spec = dict(_read_type(parts[0], tree, path))
        for call in parts[1:]:
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "Range":
                names = ("low", "high", "open_low")
                given = dict(zip(names, call.args, strict=False))
                given |= {keyword.arg: keyword.value for keyword in call.keywords}
                spec |= {name: ast.literal_eval(value) for name, value in given.items()}
        return spec
    return {}


def _union(specs):
    if not all("kinds" in spec for spec in specs):
        return {}
    merged = {key: value for spec in specs for key, value in spec.items()}
    merged["kinds"] = frozenset().union(*(spec["kinds"] for spec in specs))
    merged["choices"] = sum((spec.get("choices", ()) for spec in specs), ())
    return merged


def _read_alias(name, tree, path):
    """A type with a name of its own: assigned in this file, or imported from one of the project."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == name for t in node.targets):
            return _read_type(node.value, tree, path)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) != name:
                    continue
                for base in (path.resolve().parent, path.resolve().parent.parent, ROOT):
                    source = base.joinpath(*node.module.split(".")).with_suffix(".py")
                    if source.is_file():
                        return _read_alias(alias.name, _parse(source), source)
    return {}
