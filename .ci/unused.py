"""Lists modules and definitions of the package that no door reaches; tests and benchmarks are none.

Doors are the command line, the public names, the client, the HTTP server and its jobs, migrations,
and what the documentation and the examples use. A definition reaches the names in it; a method is
reached with its class and an attribute of its name in any reached code, or a string that is its
name.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "stagewright"
DOORS = re.compile(rf"{PACKAGE}(\.__main__|\.cli(\..*)?|\.client|\.service\.jobs\.migrations\..*)?")
# Packages whose modules are imported when they are needed, by names in strings.
LATE = tuple(
    f"{PACKAGE}.{one}" for one in ("service", "solvers.backends", "solvers.clusters.policies")
)
LATE_NAMES = ("solve",)  # what is called in all of them
# Decorators that hand their function to nobody; any other registers what it decorates.
PURE = (
    "abstractmethod", "asynccontextmanager", "cache", "cached_property", "classmethod",
    "contextmanager", "dataclass", "inner", "lean", "lru_cache", "njit", "overload", "property",
    "runtime_checkable", "staticmethod", "wraps",
)  # fmt: skip
# Bases that call no method of a class by its name; any other may call all.
PLAIN = (
    "ABC", "BaseModel", "Enum", "Exception", "Generic", "IntEnum", "NamedTuple", "Protocol",
    "RuntimeError", "StrEnum", "TypedDict", "ValueError", "dict", "float", "int", "object", "str",
    "tuple",
)  # fmt: skip
CALLED_BY_OTHERS = {
    "_repr_html_": "notebooks call it",
    "__all__": "Python reads it",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A module's ``definitions``, what names it ``imports``, and ``statements`` that always run."""

    def __init__(self, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        self.path = path
        self.definitions: dict[str, list[ast.stmt]] = defaultdict(list)
        self.imports: dict[str, list[str]] = defaultdict(list)
        self.statements: list[ast.stmt] = []
        for one in _flat(tree.body):
            names = list(_names(one))
            if not names or _registers(one):
                self.statements.append(one)
            for name in names:
                self.definitions[name].append(one)
            for method in _methods(one):
                self.definitions[f"{names[0]}.{method.name}"].append(method)
        for name, dotted in _imported(tree):
            self.imports[name].append(dotted)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each name that an import gives, and what it stands for."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield alias.asname or alias.name, home + alias.name
        elif isinstance(node, ast.stmt | ast.excepthandler):
            yield from _imported(node)


def _methods(one: ast.stmt) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    body = one.body if isinstance(one, ast.ClassDef) else ()
    return [method for method in body if isinstance(method, Function)]


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module with those under its conditions."""
    for one in body:
        if isinstance(one, ast.If | ast.Try):
            handled = [x for handler in getattr(one, "handlers", ()) for x in handler.body]
            yield from _flat([*one.body, *one.orelse, *handled])
        else:
            yield one


def _names(one: ast.stmt) -> Iterator[str]:
    """What a statement defines."""
    if isinstance(one, Function | ast.ClassDef):
        yield one.name
    elif isinstance(one, ast.Assign | ast.AnnAssign):
        for target in one.targets if isinstance(one, ast.Assign) else (one.target,):
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _registers(one: ast.stmt) -> bool:
    return any(_last(by) not in PURE for by in getattr(one, "decorator_list", ()))


def _last(node: ast.expr) -> str:
    """``c`` of ``a.b.c(...)[...]``."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class Reach:
    """What is reached."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules
        self.found: set[tuple[str, str]] = set()  # modules with "", definitions
        self.attributes: set[str] = set()
        self.methods: dict[str, list[tuple[str, str]]] = defaultdict(list)  # no attribute yet
        self.waiting: list[tuple[str, ast.AST]] = []

    def module(self, name: str) -> None:
        """A module, whose statements run."""
        if name in self.modules and (name, "") not in self.found:
            self.found.add((name, ""))
            self.waiting += [(name, one) for one in self.modules[name].statements]

    def place(self, dotted: str) -> None:
        """A module or a definition in one, by its whole name."""
        self.module(dotted)
        module, _, name = dotted.rpartition(".")
        if module in self.modules:
            self.name(module, name)

    def name(self, module: str, name: str) -> None:
        """What a name stands for in a module."""
        self.module(module)
        if (module, name) in self.found:
            return
        self.found.add((module, name))
        for one in self.modules[module].definitions.get(name, ()):
            if isinstance(one, ast.ClassDef):
                self._class(module, one)
            else:
                self.waiting.append((module, one))
        for dotted in self.modules[module].imports.get(name, ()):
            self.place(dotted)

    def attribute(self, name: str) -> None:
        """The methods of reached classes with this name."""
        self.attributes.add(name)
        for module, method in self.methods.pop(name, ()):
            self.name(module, method)

    def follow(self) -> None:
        """All that what is reached reaches."""
        while self.waiting:
            module, start = self.waiting.pop()
            for node in ast.walk(start):
                self._node(module, node)

    def _class(self, module: str, one: ast.ClassDef) -> None:
        is_called = self._has_callers(module, one)
        self.waiting += [(module, x) for x in (*one.bases, *one.keywords, *one.decorator_list)]
        for node in one.body:
            if not isinstance(node, Function):
                self.waiting.append((module, node))
                continue
            self.methods[node.name].append((module, f"{one.name}.{node.name}"))
            known = node.name in self.attributes or node.name in CALLED_BY_OTHERS
            if is_called or known or node.name.startswith("__") or _registers(node):
                self.attribute(node.name)

    def _has_callers(self, module: str, one: ast.ClassDef) -> bool:
        """Whether the class extends one of another library, which may call its methods."""
        for base in one.bases:
            if _last(base) in PLAIN:
                continue
            homes = [(module, _last(base))] if isinstance(base, ast.Name | ast.Subscript) else []
            homes += [x.rpartition(".")[::2] for x in self.modules[module].imports[_last(base)]]
            known = [
                (home, x)
                for home, name in homes
                if home in self.modules
                for x in self.modules[home].definitions.get(name, ())
            ]
            if not known or any(
                isinstance(x, ast.ClassDef) and self._has_callers(home, x) for home, x in known
            ):
                return True
        return False

    def _node(self, module: str, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self.name(module, node.id)
        elif isinstance(node, ast.Attribute):
            self.attribute(node.attr)
            for home in self.modules[module].imports.get(_last(node.value), ()):
                self.place(f"{home}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.module(f"{node.module}")
                self.module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.arg | ast.AnnAssign | Function):
            self._hint(module, node.returns if isinstance(node, Function) else node.annotation)
        else:
            self._text(_quoted(node))

    def _hint(self, module: str, hint: ast.expr | None) -> None:
        """The names in the quoted parts of an annotation."""
        for node in ast.walk(hint) if hint else ():
            for word in re.findall(r"[A-Za-z_]\w*", _quoted(node)):
                self.name(module, word)

    def _text(self, text: str) -> None:
        """``package.module``, ``module:name`` of a use case, or the name of an attribute."""
        if text.isidentifier():
            self.attribute(text)
        elif text.startswith(f"{PACKAGE}."):
            self.place(text)
        elif re.fullmatch(r"[\w.]+:\w+", text):
            self.place(f"{PACKAGE}.service.{text.replace(':', '.')}")

    def _call(self, node: ast.Call) -> None:
        """``late("module", "name")``."""
        texts = [x.value for x in node.args if isinstance(x, ast.Constant)]
        for home in (f"{package}.{text}" for package in LATE for text in texts):
            for name in (*texts, *LATE_NAMES) if home in self.modules else ():
                self.place(f"{home}.{name}")


def _quoted(node: ast.AST) -> str:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""


def _modules() -> dict[str, Module]:
    tops = [folder.resolve() for folder in (ROOT / PACKAGE).iterdir() if folder.is_dir()]
    files = [*(ROOT / PACKAGE).glob("*.py"), *(x for top in tops for x in top.rglob("*.py"))]
    modules = {}
    for path in sorted(files):
        parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
        parts = parts[1:] if parts[1] == PACKAGE else parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = Module(path)
    return modules


def _documents(reach: Reach) -> None:
    """What the pages, the examples and the scripts of drawings use."""
    pages = [
        path.read_text(encoding="utf-8") for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md")
    ]
    inline = [code for page in pages for code in re.findall(r"`[^`\n]+`", page)]
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "executor").rglob("*.j*")]
    for word in re.findall(r"\.([a-z_]+)", "\n".join([*inline, *scripts])):
        reach.attribute(word)
    code = [
        block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ]
    for path in (*ROOT.glob("docs/*.py"), *ROOT.glob("examples/**/*.py")):
        code.append(path.read_text(encoding="utf-8"))
    for tree in map(ast.parse, code):
        for _, dotted in _imported(tree):
            reach.place(dotted)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                reach.attribute(node.attr)


def _reached(modules: dict[str, Module]) -> set[tuple[str, str]]:
    reach = Reach(modules)
    for door in filter(DOORS.fullmatch, modules):
        reach.module(door)
        for name in [*modules[door].definitions, *modules[door].imports]:
            if not name.startswith("_") or door == PACKAGE:
                reach.name(door, name)
    _documents(reach)
    reach.follow()
    return reach.found


def unused() -> Iterator[str]:
    """A line for each module or definition that no door reaches."""
    modules = _modules()
    reached = _reached(modules)
    for name, module in modules.items():
        path = module.path.relative_to(ROOT)
        if module.definitions and (name, "") not in reached:
            yield f"{path}: no door reaches this module"
            continue
        for one, nodes in module.definitions.items():
            owner, _, last = one.rpartition(".")
            is_told = bool(owner) and (name, owner) not in reached  # with its class
            is_called = last in CALLED_BY_OTHERS or any(map(_registers, nodes))
            if (name, one) not in reached and not is_told and not is_called:
                yield f"{path}:{nodes[0].lineno}: {one} is used by nothing"


if __name__ == "__main__":
    lines = list(unused())
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(1 if lines else 0)
