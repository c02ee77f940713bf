"""YAML files with their line numbers: plain data, and where each key path stands in the file.

Stricter than YAML: a key may stand in a mapping once only (YAML's parsers take the last in silence), and the
file's size and nesting are limited, repeated anchors counted as often as they are used.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .core.config_rules import path_text
from .errors import BadInput
from .limits import CONFIG_MAX_BYTES

NODES_MAX = 1_000_000
DEPTH_MAX = 100


class YamlFile(NamedTuple):
    """`data` as plain builtin types; `lines` from key path to line; `name` as the user wrote the file's name."""

    name: str
    data: Any
    lines: dict[tuple[str | int, ...], int]

    def where(self, path: tuple[str | int, ...]) -> str:
        """file:line of a key path, or of the closest parent that is there."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


def read_yaml(path: str | Path, field: str = "file") -> YamlFile:
    """Reads one file. BadInput names it, and the line where there is one."""
    name = str(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(CONFIG_MAX_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise BadInput(field, name, f"a YAML file that can be read: {reason}") from None
    if len(raw) > CONFIG_MAX_BYTES:
        raise BadInput(field, name, f"a file of at most {CONFIG_MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = raw[: problem.start].count(b"\n") + 1
        raise BadInput(field, name, "text in UTF-8", f"{name}:{line}") from None
    return parse_yaml(text, name, field)


def parse_yaml(text: str, name: str, field: str = "file") -> YamlFile:
    """The same for text at hand; `name` is what errors call it."""
    loader = _loader(text, name, field)
    try:
        root = loader.get_single_node()
        lines: dict[tuple[str | int, ...], int] = {}
        if root is None:
            return YamlFile(name, None, lines)
        _Walk(loader, name, lines).visit(root, ())
        return YamlFile(name, loader.construct_document(root), lines)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise BadInput(field, name, f"valid YAML: {problem.problem or problem.context}", where) from None
    except yaml.YAMLError as problem:
        raise BadInput(field, name, f"valid YAML: {' '.join(str(problem).split())}", name) from None
    except RecursionError:
        raise BadInput(field, name, f"at most {DEPTH_MAX} levels of nesting", name) from None
    except (ValueError, OverflowError) as problem:  # 2024-13-45, or an integer of too many digits
        raise BadInput(field, name, f"valid YAML: {problem}", name) from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Takes keys of any length: YAML's limit of 1024 would say "could not find expected ':'" to a long name,
    where the rule for names says what is wrong with it.
    """

    def stale_possible_simple_keys(self) -> None:
        if self.flow_level > DEPTH_MAX:  # also bounds what is gone over here, at every token
            raise yaml.MarkedYAMLError(
                problem=f"more than {DEPTH_MAX} levels of nesting", problem_mark=self.get_mark()
            )
        for key in self.possible_simple_keys.values():
            key.index = self.index  # the parser compares it with where it is, for that limit and nothing else
        super().stale_possible_simple_keys()


def _loader(text: str, name: str, field: str) -> yaml.SafeLoader:
    """PyYAML's reader looks for control characters as it is made, so that error comes from here."""
    try:
        return _Loader(text)
    except yaml.reader.ReaderError as problem:
        line = text[: problem.position].count("\n") + 1
        code = problem.character if isinstance(problem.character, int) else ord(problem.character[:1])
        expected = f"text without control characters, here U+{code:04X}"
        raise BadInput(field, name, expected, f"{name}:{line}") from None


class _Walk:
    """Goes over the composed nodes once: notes lines, refuses double keys and what would blow up."""

    def __init__(self, loader: yaml.SafeLoader, name: str, lines: dict[tuple[str | int, ...], int]) -> None:
        self.loader, self.name, self.lines = loader, name, lines
        self.visited = 0

    def visit(self, node: yaml.Node, path: tuple[str | int, ...], line: int | None = None) -> None:
        self.visited += 1
        where = f"{self.name}:{node.start_mark.line + 1}"
        if self.visited > NODES_MAX:
            raise BadInput("file", self.name, f"at most {NODES_MAX} values", where)
        if len(path) > DEPTH_MAX:
            raise BadInput("file", self.name, f"at most {DEPTH_MAX} levels of nesting, and no loops", where)
        self.lines.setdefault(path, line or node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, path)

    def _visit_mapping(self, node: yaml.MappingNode, path: tuple[str | int, ...]) -> None:
        first_lines: dict[Hashable, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # its keys have no line of their own: errors fall back to the mapping's
            line = key_node.start_mark.line + 1
            key = self.loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                field = f"{path_text(path) or 'file'} (a key)"
                raise BadInput(field, key, "text; put it in quotes", f"{self.name}:{line}")
            if key in first_lines:
                expected = f"each key once; it stands on line {first_lines[key]} already"
                raise BadInput(f"{path_text(path) or 'file'} (a key)", key, expected, f"{self.name}:{line}")
            first_lines[key] = line
            self.visit(value_node, (*path, key), line)
