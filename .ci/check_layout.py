"""The layout and import rules of the project, checked on the syntax tree; part of `make lint`.

1. pools/core imports only what is pure: an allow-list, so that a new clock or a new door to I/O is not overlooked.
2. Under pools/, only the client touches ray; nothing touches ray_pools.actors but the command line, inside functions.
3. No absolute import of `pools` or `actors`: a user's own modules of these names would be loaded instead.
4. Modules of at most 500 lines, functions of at most 70, no module called utils, a docstring in every module.
5. Every package on disk, and every file in it that is no module, is listed in pyproject.toml for installed copies.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

TOO_LONG_ALLOWED: dict[str, str] = {}
"""Path, or path::function, to the reason why it may be longer."""

CORE_MAY_IMPORT = {
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "decimal", "difflib", "enum", "fractions",
    "functools", "hashlib", "heapq", "hmac", "itertools", "math", "msgpack", "operator", "re", "struct", "types",
    "typing", "typing_extensions",
    "ray_pools.core", "ray_pools.errors", "ray_pools.limits", "ray_pools.settings",
}  # fmt: skip
"""msgpack is here as a function from values to bytes; hashlib and hmac likewise."""

CORE_MAY_NOT_CALL = {"open", "input", "print", "__import__", "exec", "eval", "breakpoint", "id", "hash"}
"""I/O and loading, and what differs between two processes (so a replay would give another state)."""

SOURCE_ROOTS = {"pools": "ray_pools", "actors": "ray_pools.actors"}
CHECKED = ("pools", "actors", "tests", "benchmarks", "examples", ".ci")


def package_of(path: PurePosixPath) -> str:
    """The package whose relative imports a file resolves against, or "" outside the distribution."""
    root = SOURCE_ROOTS.get(path.parts[0])
    return ".".join([root, *path.parent.parts[1:]]) if root else ""


def imports_of(tree: ast.Module, package: str) -> Iterator[tuple[str, int, bool]]:
    """Each imported name in full, its line, and whether it stands inside a function."""
    inside = {
        id(child)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                kept = parents[: len(parents) - node.level + 1]
                base = ".".join([*kept, *([base] if base else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, id(node) in inside


def under(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def check_imports(path: PurePosixPath, tree: ast.Module) -> Iterator[str]:
    in_core = path.parts[:2] == ("pools", "core")
    in_client = path.parts[0] == "pools" and PurePosixPath(path.parts[1]).stem == "client"
    in_cli = path.parts[0] == "pools" and PurePosixPath(path.parts[1]).stem == "cli"
    for name, line, lazily in imports_of(tree, package_of(path)):
        if name.split(".")[0] in SOURCE_ROOTS:
            yield f"{path}:{line}: imports {name}: a user's own module may have that name; use ray_pools"
        if in_core and not any(under(name, module) for module in CORE_MAY_IMPORT):
            yield f"{path}:{line}: the core imports {name}: it is pure, see CORE_MAY_IMPORT"
        elif path.parts[0] == "pools" and not in_client and under(name, "ray"):
            yield f"{path}:{line}: imports {name}: under pools/ only the client touches ray"
        if path.parts[0] == "pools" and under(name, "ray_pools.actors") and not (in_cli and lazily):
            yield f"{path}:{line}: imports {name}: only pools/cli may, and only inside a function"


def check_core_calls(path: PurePosixPath, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in CORE_MAY_NOT_CALL
        ):
            yield f"{path}:{node.lineno}: the core calls {node.func.id}(): it is pure and must replay the same"


def check_size(path: PurePosixPath, tree: ast.Module, source: str) -> Iterator[str]:
    lines = source.count("\n")
    if lines > MODULE_LINES_MAX and str(path) not in TOO_LONG_ALLOWED:
        yield f"{path}:1: {lines} lines: a module has at most {MODULE_LINES_MAX}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX and f"{path}::{node.name}" not in TOO_LONG_ALLOWED:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines: at most {FUNCTION_LINES_MAX}"


def check_file(name: str, source: str) -> list[str]:
    """What breaks a rule in one file; `name` is its path from the top of the repository."""
    path = PurePosixPath(name)
    problems = []
    if {part.removesuffix(".py") for part in path.parts} & {"utils", "util"}:
        problems.append(f"{path}:1: no module called utils: name it after what it does")
    try:
        tree = ast.parse(source)
    except SyntaxError as problem:
        return [*problems, f"{path}:{problem.lineno}: {problem.msg}"]
    if tree.body and not ast.get_docstring(tree):
        problems.append(f"{path}:1: the module's first lines say what lives in it")
    if path.parts[0] in SOURCE_ROOTS:
        problems += check_imports(path, tree)
    if path.parts[:2] == ("pools", "core"):
        problems += check_core_calls(path, tree)
    return [*problems, *check_size(path, tree, source)]


def check_packages(top: Path) -> list[str]:
    """Packages on disk against the list in pyproject.toml."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found,no-redef]
    settings = tomllib.loads((top / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = set(settings["packages"])
    found = set()
    for root in SOURCE_ROOTS:
        for init in sorted((top / root).rglob("__init__.py")):
            found.add(package_of(PurePosixPath(init.relative_to(top).as_posix())))
    problems = [f"pyproject.toml:1: package {name} is not listed" for name in sorted(found - listed)]
    problems += [
        f"pyproject.toml:1: package {name} is listed but not there" for name in sorted(listed - found)
    ]
    return problems + check_data(top, settings["package-data"])


def check_data(top: Path, listed: dict[str, list[str]]) -> list[str]:
    """Files that are no modules, against the patterns of package-data."""
    matched = set()
    for package, patterns in listed.items():
        root = next(root for root, name in sorted(SOURCE_ROOTS.items()) if under(package, name))
        folder = top / root / "/".join(package.split(".")[SOURCE_ROOTS[root].count(".") + 1 :])
        matched |= {file for pattern in patterns for file in folder.glob(pattern)}
    return [
        f"pyproject.toml:1: {file.relative_to(top)} is in no pattern of package-data"
        for root in SOURCE_ROOTS
        for file in sorted((top / root).rglob("*"))
        if file.is_file() and file.suffix not in (".py", ".pyc") and file not in matched
    ]


def main(top: Path) -> int:
    problems = check_packages(top)
    count = 0
    for folder in CHECKED:
        for file in sorted((top / folder).rglob("*.py")):
            count += 1
            problems += check_file(file.relative_to(top).as_posix(), file.read_text(encoding="utf-8"))
    for problem in problems:
        print(problem)
    print(f"layout: {count} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
