"""Bounds of grammars and schemas that are checked before compiling them, in linear time.

llguidance recurses along rules and references that lead to each other and overflows a thread's
stack at some 2,000 of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

# Characters of a request's grammar or schema.
LONGEST = 1 << 18
# Levels of nesting; also the length of a chain in which each rule or reference leads to the next.
DEEPEST = 200
# Rules of a grammar; different references of a schema.
MOST_RULES = 1000

_LARK = re.compile(r"^[ \t\r\f\v]*(%llguidance\b|start\s*:)", re.MULTILINE)
# The beginning of a rule; strings, comments, expressions and classes of characters as a whole;
# other names. What is left open ends with its line, so that nothing is looked at many times.
_PARTS = (
    r"(?P<rule>^[ \t?!]*(?P<own>[A-Za-z_][\w-]*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*(?:::=|:))"
    r'|"(?:\\.|[^"\\\n])*"?|%s|(?P<name>[A-Za-z_][\w-]*)|[()]'
)
_IN_LARK = re.compile(_PARTS % r"//[^\n]*|/(?:\\.|[^/\\\n])*/?", re.MULTILINE)
_IN_GBNF = re.compile(_PARTS % r"#[^\n]*|\[(?:\\.|[^\]\\\n])*\]?", re.MULTILINE)

# The names that each name leads to.
Graph = dict[str, set[str]]


def grammar_problem(text: str) -> str | None:
    """Return why a grammar of Lark or GBNF is refused, ``None`` if it may be compiled."""
    rules: Graph = {}
    own, depth = "", 0
    for part in (_IN_LARK if _LARK.search(text) else _IN_GBNF).finditer(text):
        if part["rule"]:
            own, depth = part["own"], 0
            rules.setdefault(own, set())
        elif part["name"] and own:
            rules[own].add(part["name"])
        elif part[0] in "()":
            depth += 1 if part[0] == "(" else -1
            if depth > DEEPEST:
                return f"is nested more than {DEEPEST} levels deep"
    return _too_much(rules, "rules")


def schema_problem(schema: object) -> str | None:
    """Return why a JSON schema is refused, ``None`` if it may be compiled."""
    references: dict[str, object] = {}  # with the part of the schema that each leads to
    level = [schema]
    for _ in range(DEEPEST):
        for part in level:
            target = _reference(part)
            if target is not None and target not in references:
                references[target] = _at(schema, target)
        level = [part for whole in level for part in _parts(whole)]
    if level:
        return f"is nested more than {DEEPEST} levels deep"
    names = {id(part): name for name, part in references.items() if part is not None}
    graph: Graph = {name: set() for name in references}
    within: list[tuple[object, str | None]] = [(schema, None)]
    while within:
        whole, outer = within.pop()
        name = names.get(id(whole), outer)
        if outer is not None and name is not None and name != outer:
            graph[outer].add(name)
        target = _reference(whole)
        if name is not None and target is not None:
            graph[name].add(target)
        within += [(part, name) for part in _parts(whole)]
    return _too_much(graph, "references")


def _parts(value: object) -> list[object]:
    """Return the objects and lists of an object or a list."""
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in within if isinstance(part, dict | list)]


def _reference(value: object) -> str | None:
    target = value.get("$ref") if isinstance(value, dict) else None
    return target if isinstance(target, str) else None


def _at(schema: object, reference: str) -> object:
    """Return the part of a schema that a reference leads to, ``None`` unless it is a plain path."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: object = schema
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            return None
    return found


def _too_much(graph: Graph, what: str) -> str | None:
    if len(graph) > MOST_RULES:
        return f"has {len(graph)} different {what}; at most {MOST_RULES} can be compiled"
    longest = _longest_chain(graph)
    if longest > DEEPEST:
        return (
            f"has {longest} {what} of which each leads to the next; at most {DEEPEST} can be "
            "compiled"
        )
    return None


def _longest_chain(graph: Mapping[str, set[str]]) -> int:
    """Return the number of names in the longest chain; a name that leads back ends its chain."""
    length: dict[str, int] = {}  # 0 until the names that a name leads to are done
    done: set[str] = set()
    for start in graph:
        stack = [start]
        while stack:
            name = stack[-1]
            following = graph.get(name, set())
            if name not in length:
                length[name] = 0
                stack += [other for other in following if other not in length]
                continue
            stack.pop()
            if name not in done:
                done.add(name)
                length[name] = 1 + max((length[other] for other in following), default=0)
    return max(length.values(), default=0)
