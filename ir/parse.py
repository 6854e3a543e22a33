"""Reads the printed form of a graph.

    graph   = "graph" "@" name "(" [symbol {"," symbol}] ")" ["arch" string] "{" body "}"
    body    = {node | output | derived | analysis}
    node    = "%" id "=" operator ["(" [ref {"," ref}] ")" | string | number] ["{" attr {"," attr} "}"] ":" type
    attr    = name "=" (string | number | "true" | "false" | dim | "[" [dim {"," dim}] "]")
    output  = "output" string "=" ref
    derived = "derived" string "{" body "}"
    analysis = "analysis" string "=" JSON
    type    = dtype "[" dim {"," dim} "]"

``#`` starts a comment that ends with the line. Attributes left out take their defaults. Types are stated and inferred; they must agree.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from ggufc.ir.dims import parse_dim
from ggufc.ir.errors import IRError
from ggufc.ir.graph import Graph, Node
from ggufc.ir.ops import OPS
from ggufc.ir.ops.base import Attr, Op
from ggufc.ir.text import WORD
from ggufc.ir.types import TensorType, parse_type
from ggufc.ir.verify import verify

_SPACE = re.compile(r"(?:\s+|#[^\n]*)*")
_ID = re.compile(r"%[A-Za-z0-9_.]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[-+]?(?:inf|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_DIM = re.compile(r"[-+*A-Za-z0-9_ \t]+")
_TYPE = re.compile(r"[a-z][a-z0-9_]*\s*\[[^\]\n]*\]")


def parse_graph(text: str, *, check: bool = True) -> Graph:
    """The graph that ``text`` prints. Raises ``IRError`` with line, column and the source line; with ``check`` the graph is verified."""
    parser = _Parser(text)
    g = parser.graph()
    if check:
        verify(g)
    return g


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Raises with the position ``at`` (the current one by default) and its source line."""
        at = min(self.pos if at is None else at, len(self.text))
        line = self.text.count("\n", 0, at) + 1
        start = self.text.rfind("\n", 0, at) + 1
        end = self.text.find("\n", at)
        source = self.text[start : len(self.text) if end < 0 else end]
        # Tabs are kept in the caret's line so that it stands below the right character.
        lead = "".join("\t" if c == "\t" else " " for c in source[: at - start])
        raise IRError(f"line {line}, column {at - start + 1}: {message}\n    {source}\n    {lead}^", line=line, column=at - start + 1)

    def skip(self) -> None:
        m = _SPACE.match(self.text, self.pos)
        self.pos = m.end() if m else self.pos

    def peek(self, literal: str) -> bool:
        self.skip()
        return self.text.startswith(literal, self.pos)

    def accept(self, literal: str) -> bool:
        if not self.peek(literal):
            return False
        self.pos += len(literal)
        return True

    def expect(self, literal: str, after: str) -> None:
        if not self.accept(literal):
            self.fail(f"{literal!r} is expected {after}.")

    def match(self, pattern: re.Pattern[str], what: str) -> tuple[str, int]:
        """The matched text and where it starts."""
        self.skip()
        m = pattern.match(self.text, self.pos)
        if m is None:
            self.fail(f"{what} is expected here.")
        self.pos = m.end()
        return m.group(), m.start()

    def keyword(self, word: str) -> bool:
        self.skip()
        m = WORD.match(self.text, self.pos)
        if m is None or m.group() != word:
            return False
        self.pos = m.end()
        return True

    def string(self, what: str) -> str:
        raw, at = self.match(_STRING, f"{what} in double quotes")
        try:
            return str(json.loads(raw))
        except ValueError:
            self.fail(f"{raw} is not a string; escapes are JSON's.", at)

    def graph(self) -> Graph:
        if not self.keyword("graph"):
            self.fail("a graph starts with the word graph.")
        self.expect("@", "before the graph's name")
        name = self.string("a name") if self.peek('"') else self.match(WORD, "the graph's name")[0]
        self.expect("(", "before the symbols")
        symbols: list[str] = []
        while not self.accept(")"):
            if symbols:
                self.expect(",", "between symbols")
            symbols.append(self.match(_NAME, "a symbol")[0])
        arch = self.string("the architecture") if self.keyword("arch") else ""
        g = Graph(name, arch, tuple(symbols))
        self.expect("{", "before the graph's body")
        self.body(g)
        self.skip()
        if self.pos < len(self.text):
            self.fail("nothing may follow the graph.")
        return g

    def body(self, g: Graph, nested: bool = False) -> None:
        values: dict[str, Node] = {}
        while not self.accept("}"):
            if self.peek("%"):
                self.node(g, values)
                continue
            self.skip()
            at = self.pos
            if self.pos >= len(self.text):
                self.fail("the text ends inside a graph; '}' is missing.")
            word = self.match(WORD, "a node (%0 = ...), output, derived, analysis or '}'")[0]
            if word not in ("output", "derived", "analysis"):
                self.fail(f"{word!r} is not expected here; a node (%0 = ...), output, derived, analysis or '}}' is.", at)
            key_at = self.pos
            key = self.string(f"the name of the {word}")
            sections: dict[str, dict[str, Any]] = {"output": g.outputs, "derived": g.derived, "analysis": g.analysis}
            into = sections[word]
            if key in into:
                self.fail(f"{word} {key!r} is given twice.", key_at + 1)
            if word == "output":
                into[key] = self.output(values)
            elif word == "derived":
                into[key] = self.derived(g, key, nested)
            else:
                into[key] = self.analysis(key)

    def output(self, values: dict[str, Node]) -> Node:
        self.expect("=", "after the output's name")
        return self.ref(values)

    def derived(self, g: Graph, key: str, nested: bool) -> Graph:
        if nested:
            self.fail(f"derived weight {key!r} stands inside another derived weight; put its nodes there directly.")
        sub = Graph(key, g.arch)
        self.expect("{", "before the derived weight's nodes")
        self.body(sub, nested=True)
        return sub

    def analysis(self, key: str) -> Any:
        self.expect("=", "after the analysis' name")
        self.skip()
        try:
            data, self.pos = json.JSONDecoder().raw_decode(self.text, self.pos)
        except json.JSONDecodeError as e:
            self.fail(f"the result of analysis {key!r} is not JSON: {e.msg}.", e.pos)
        except (RecursionError, ValueError) as e:
            self.fail(f"the result of analysis {key!r} cannot be read: {e}.")
        return data

    def ref(self, values: dict[str, Node]) -> Node:
        ident, at = self.match(_ID, "a value such as %0")
        if ident not in values:
            self.fail(f"{ident} is not defined before this point.", at)
        return values[ident]

    def node(self, g: Graph, values: dict[str, Node]) -> None:
        ident, at = self.match(_ID, "a value such as %0")
        if ident in values:
            self.fail(f"{ident} is defined twice.", at)
        self.expect("=", f"after {ident}")
        op_name, op_at = self.match(_NAME, "an operator")
        op = OPS.get(op_name)
        if op is None:
            self.fail(f"operator {op_name!r} is unknown.", op_at)
        attrs: dict[str, Any] = {}
        operands: list[Node] = []
        if op.is_leaf:
            head = next(a for a in op.attrs if a.name == op.headline)
            attrs[head.name] = self.value(op, head)
        else:
            self.expect("(", f"after {op_name}")
            while not self.accept(")"):
                if operands:
                    self.expect(",", "between operands")
                operands.append(self.ref(values))
        name, loc = self.attributes(op, attrs)
        self.expect(":", "before the result's type")
        stated, type_at = self.type()
        try:
            declared = stated if op.declared_type else None
            node = g.add(op_name, *operands, name=name or attrs.pop("name", ""), loc=loc, type=declared, **attrs)
        except IRError as e:
            self.fail(e.message, op_at)
        if node.type != stated:
            self.fail(f"the type is stated as {stated}, but {op_name} gives {node.type}.", type_at)
        values[ident] = node

    def attributes(self, op: Op, attrs: dict[str, Any]) -> tuple[str, str]:
        """Fills ``attrs``; returns the node's name and location."""
        declared = {a.name: a for a in op.attrs}
        common = {"name": "", "loc": ""}
        seen: set[str] = set()
        if not self.accept("{"):
            return "", ""
        while not self.accept("}"):
            if seen:
                self.expect(",", "between attributes")
            key, at = self.match(_NAME, "an attribute's name")
            if key in seen or key in attrs:
                self.fail(f"attribute {key!r} is given twice.", at)
            seen.add(key)
            self.expect("=", f"after attribute {key}")
            if key in declared:
                attrs[key] = self.value(op, declared[key])
            elif key in common:
                common[key] = self.string(f"the {key}")
            else:
                self.fail(f"{op.name} has no attribute {key!r}; it has {', '.join([*declared, 'name', 'loc'])}.", at)
        return common["name"], common["loc"]

    def value(self, op: Op, a: Attr) -> Any:
        """One attribute value, read as the declared kind asks."""
        self.skip()
        at = self.pos
        if a.kind == "str":
            found: Any = self.string(f"{op.name}'s {a.name}")
        elif a.kind == "bool":
            word = self.match(_NAME, "true or false")[0]
            if word not in ("true", "false"):
                self.fail(f"{a.name} must be true or false.", at)
            found = word == "true"
        elif a.kind in ("int", "float"):
            raw = self.match(_NUMBER, "a number")[0]
            try:
                found = int(raw) if a.kind == "int" else float(raw)
            except ValueError:
                self.fail(f"{a.name} = {raw} must be a whole number.", at)
        elif a.kind == "dim":
            found = self.dim()
        else:
            found = []
            self.expect("[", f"before the list {a.name}")
            while not self.accept("]"):
                if found:
                    self.expect(",", "between list entries")
                found.append(self.dim())
        try:
            return a.convert(op.name, found)
        except IRError as e:
            self.fail(e.message, at)

    def dim(self) -> Any:
        raw, at = self.match(_DIM, "a dimension such as 576 or 2*T+1")
        try:
            return parse_dim(raw)
        except IRError as e:
            self.fail(e.message, at)

    def type(self) -> tuple[TensorType, int]:
        raw, at = self.match(_TYPE, "a type such as f32[576, T]")
        try:
            return parse_type(raw), at
        except IRError as e:
            self.fail(e.message, at)
