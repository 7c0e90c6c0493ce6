"""The reference pages, made from docstrings: `make reference` writes them, tests/test_docs.py holds them in step."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from textwrap import dedent
from typing import Final

from octavo.hooks import HOOKS

DOCS: Final = Path(__file__).parents[1] / "docs"
MARK: Final = "<!-- What follows is made by `make reference`, from docstrings: change it there. -->"


@dataclass(frozen=True)
class Source:
    """A module of which a page tells."""

    module: str
    names: tuple[str, ...] = ()
    """What it tells of, in this order; empty: of all that is public."""


PAGES: Final = {
    "contract.md": (
        Source("octavo.attention.contract"),
        Source("octavo.attention.ahead"),
        Source("octavo.kv.layout"),
        Source("octavo.kv.dtypes"),
        Source("octavo.attention.device", ("Device", "Memory")),
        Source("octavo.conformance.suite"),
    ),
    "hooks.md": (Source("octavo.hooks", (*HOOKS, "LogitsProcessor", "GrammarRefused", "StepStats", "RequestSummary")),),
}


@dataclass(frozen=True)
class Member:
    """A class, a function or a variable."""

    name: str
    node: ast.stmt
    code: str
    """As the source has it, without bodies."""
    text: str
    """Its docstring; of a variable the one behind it."""


def page(name: str) -> str:
    """The whole text of a page: down to the mark as it is, and behind it what docstrings say."""
    written, mark, _ = (DOCS / name).read_text(encoding="utf-8").partition(MARK)
    parts = (part for source in PAGES[name] for part in _module(source))
    return "\n\n".join([written + mark, *parts]) + "\n"


def _module(source: Source) -> Iterator[str]:
    code = inspect.getsource(import_module(source.module))
    tree = ast.parse(code)
    found = {member.name: member for member in _members(code, tree.body) if member.text}
    yield f"## `{source.module}`"
    if not source.names:
        yield ast.get_docstring(tree) or ""
    for member in [found[name] for name in source.names or found]:
        yield from _shown(member, code)


def _members(code: str, body: Sequence[ast.stmt]) -> Iterator[Member]:
    """What is public: classes, functions, variables."""
    for node, behind in zip_longest(body, body[1:]):
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield Member(name, node, "", ast.get_docstring(node) or "")
            case ast.FunctionDef(name=name) if not name.startswith("_") or name in ("__init__", "__call__"):
                yield Member(name, node, _head(code, node), ast.get_docstring(node) or "")
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                segment = ast.get_source_segment(code, node) or ""
                if not name.startswith("_") and ": _" not in segment:
                    yield Member(name, node, segment, _string(behind))


def _head(code: str, node: ast.FunctionDef) -> str:
    """A function up to its body."""
    first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
    return dedent("".join(code.splitlines(keepends=True)[first - 1 : node.body[0].lineno - 1])).strip()


def _string(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return inspect.cleandoc(text)
    return ""


def _shown(member: Member, code: str) -> Iterator[str]:
    match member.node:
        case ast.ClassDef(name=name, body=body):
            yield f"### {name}\n\n{member.text}"
            inner = list(_members(code, body))
            if lines := [_line(one) for one in inner if not _called(one)]:
                yield "\n".join(lines)
            yield from (_function(one, "####") for one in inner if _called(one))
        case ast.FunctionDef():
            yield _function(member, "###")
        case _:
            yield _line(member)


def _called(member: Member) -> bool:
    return isinstance(member.node, ast.FunctionDef) and "@property" not in member.code


def _line(member: Member) -> str:
    """A variable, a field or a property."""
    match member.node:
        case ast.FunctionDef(returns=returns):
            declared = f"{member.name}: {ast.unparse(returns) if returns else ''}"
        case _:
            declared = member.code
    text = f": {member.text}".replace("\n", "\n  ").replace("  \n", "\n") if member.text else ""
    return f"- `{declared}`{text}"


def _function(member: Member, heading: str) -> str:
    return f"{heading} {member.name}\n\n```python\n{member.code} ...\n```\n\n{member.text}"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
