"""Safe YAML with a place for every key and value, and without YAML 1.1's traps.

Only ``true``/``false`` are booleans, only decimal numbers without leading zeros are numbers; ``no``, ``on``, ``010``
and ``12:30:00`` stay text. Keys are always text. A key given twice, a tag and a merge key are errors; size, depth and
what aliases expand to are bounded. Must never know what the values mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import yaml

from nodeagent.spec.errors import Path, Problem, SpecError

MAX_BYTES = 128 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,99})")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]{0,99})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_SURROGATE = re.compile("[\ud800-\udfff]")

Scalar = str | int | float | bool | None


class YamlPlace(NamedTuple):
    """Line and column, from 1."""

    line: int
    col: int


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content as plain Python values, and where each part of it stands."""

    filename: str
    value: object
    values: dict[Path, YamlPlace] = field(default_factory=dict)
    """Path of each value to where it starts."""
    keys: dict[Path, YamlPlace] = field(default_factory=dict)
    """Path of each mapping entry to where its key starts."""
    raw: dict[Path, str] = field(default_factory=dict)
    """Path of each unquoted scalar to its text as written."""
    origins: dict[Path, str] = field(default_factory=dict)
    """Path of each value that is not from the file to what it is from: the name of an environment variable."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with the YAML itself, without hiding the rest: keys given twice, keys that are no words."""

    def problem(self, path: Path, what: str, right: str = "", *, key: bool = False) -> Problem:
        """A problem with the value (or the key) at ``path``."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return Problem(self.origins[path[:end]], 0, 0, what, right)
        return Problem(self.filename, *self.place(path, key=key), what, right)

    def place(self, path: Path, *, key: bool = False) -> YamlPlace:
        """Where the value (or its key) stands; if the file does not have it, where its nearest parent does."""
        if key and path in self.keys:
            return self.keys[path]
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, YamlPlace(1, 1))


def scalar(text: str) -> Scalar:
    """What an unquoted scalar means."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text


class _Loader(yaml.SafeLoader):
    """Composes with a bound on depth; resolves nothing (all plain scalars stay text)."""

    yaml_implicit_resolvers = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        event = self.peek_event()  # type: ignore[no-untyped-call]
        problem = None
        if self.depth > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} levels deep"
        elif tag := getattr(event, "tag", None):
            problem = f"the tag {tag.replace('tag:yaml.org,2002:', '!!')} is not allowed"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Walk:
    """Turns composed nodes into values, filling the document's places and problems."""

    def __init__(self, document: Document, count: int) -> None:
        self.document = document
        self.count = count
        self.open: set[int] = set()

    def problem(self, place: YamlPlace, what: str, right: str = "") -> None:
        self.document.problems.append(Problem(self.document.filename, *place, what, right))

    def whole(self, text: str, place: YamlPlace) -> str:
        """The text, unless an escape in it is no character. Raises ``SpecError``: nothing could store or show it."""
        if half := _SURROGATE.search(text):
            self.problem(place, f"the escape \\u{ord(half[0]):04X} is half of a character", "write the whole character")
            raise SpecError(self.document.problems)
        return text

    def value(self, node: yaml.Node, path: Path) -> object:
        place = _place(node.start_mark)
        self.document.values[path] = place
        self.count += 1
        if self.count > MAX_VALUES:
            self.problem(place, f"more than {MAX_VALUES} values once aliases are followed", "write a smaller file")
            raise SpecError(self.document.problems)
        if id(node) in self.open:
            self.problem(place, "an alias inside of what it stands for", "write the values out")
            return None
        if isinstance(node, yaml.ScalarNode):
            text = self.whole(str(node.value), place)
            if node.style is not None:
                return text
            self.document.raw[path] = text
            return scalar(text)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(child, (*path, i)) for i, child in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, object]:
        out: dict[str, object] = {}
        for key_node, child in node.value:
            place = _place(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(place, "a key that is not a word", "write a plain word before the colon")
                continue
            key = self.whole(str(key_node.value), place)
            if key == "<<" and key_node.style is None:
                self.problem(place, "the merge key << is not supported", "write the keys out")
                continue
            if key in out:
                first = self.document.keys[(*path, key)]
                self.problem(
                    place,
                    f"the key '{key}' is given twice (first in line {first.line}, column {first.col})",
                    "keep one",
                )
                continue
            self.document.keys[(*path, key)] = place
            out[key] = self.value(child, (*path, key))
        return out


def _place(mark: yaml.Mark) -> YamlPlace:
    return YamlPlace(mark.line + 1, mark.column + 1)


_SYNTAX = (
    (r"'\\t'", "a tab", "indent with spaces"),
    (r"cannot start any token", "", "put the text in quotes"),
    (
        r"mapping values are not allowed",
        "a ':' where none can be",
        "put the text in quotes, or correct the indentation",
    ),
    (
        r"expected <block end>|<document start>",
        "this does not belong to what is above it",
        "correct the indentation, or close the quotes or brackets above",
    ),
    (r"could not find expected ':'", "a key without a ':'", "write 'key: value' (with a space after the colon)"),
    (r"sequence entries are not allowed", "a '-' where no list can start", "start the list on a line of its own"),
    (r"undefined alias", "", "define it above as &NAME"),
    (
        r"expected ',' or",
        "a list or mapping in brackets that is not closed here",
        "add the ',' or the closing bracket, or put the text in quotes",
    ),
    (r"stream end", "the file ends in the middle of something", "close the brackets or quotes above"),
    (r"another document", "a second document (---)", "this file holds one document"),
    (r"end of stream", "the file ends inside of quotes", "close them"),
    (r"escape character", "", "write \\\\ for a backslash, or use single quotes"),
    (r"^the tag", "", "write the plain value without it"),
)
"""What PyYAML says, what we say instead (empty: the same), and what would be right."""


def _syntax(error: yaml.MarkedYAMLError, filename: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    what = str(error.problem or "not YAML")
    right = ""
    for pattern, better, advice in _SYNTAX:
        if re.search(pattern, what):
            what, right = better or what, advice
            break
    line, col = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    return Problem(filename, line, col, what, right)


def load(text: str, filename: str) -> Document:
    """Read one YAML document. An empty one has the value None.

    Raises ``SpecError`` with the first place where the syntax breaks or a bound is passed. What is wrong with the
    YAML but lets the rest be read is in the document's ``problems``.
    """
    return _load(text, filename, lambda loader: [loader.get_single_node()])[0]


def load_all(text: str, filename: str) -> list[Document]:
    """Read the YAML documents of a file, which lines of ``---`` part: those that are not empty, or, if all are, one
    with the value None. Raises ``SpecError`` as ``load``."""
    found = [d for d in _load(text, filename, _each) if d.value is not None]
    return found or [Document(filename, None)]


def _each(loader: _Loader) -> list[yaml.Node | None]:
    found = []
    while loader.check_node():
        found.append(loader.get_node())
    return found


def _load(text: str, filename: str, read: Callable[[_Loader], list[yaml.Node | None]]) -> list[Document]:
    """The bounds are those of all documents together."""
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise SpecError([Problem(filename, 1, 1, f"larger than {MAX_BYTES // 1024} KiB", "is this the right file?")])
    try:
        loader = _Loader(text)
        try:
            nodes = read(loader)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise SpecError([_syntax(error, filename)]) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, col = before.count("\n") + 1, error.position - before.rfind("\n")
        what = f"the character U+{ord(text[error.position]):04X} is not allowed"
        raise SpecError(
            [Problem(filename, line, col, what, "remove it, or write it as an escape in double quotes")]
        ) from None
    found, count = [], 0
    for node in nodes:
        document = Document(filename, None)
        if node is not None:
            walk = _Walk(document, count)
            document = replace(document, value=walk.value(node, ()))
            count = walk.count
        found.append(document)
    return found
