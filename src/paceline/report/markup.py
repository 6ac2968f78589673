"""HTML that is escaped unless it says otherwise. A run's name or sample may hold anything; a template engine would be
a dependency for the sake of one page."""

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already. Only `element` and `raw` make it."""


Node = str | Markup | None
"""A child of an element: text to be escaped, finished HTML, or nothing."""

VOID = frozenset({"meta", "input", "br"})


def element(tag: str, *children: Node, **attributes: str | bool | None) -> Markup:
    """One element. Attribute `class_` is class, `aria_label` is aria-label; True is a bare attribute, None none."""
    written = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(children)}</{tag}>")


def join(children: Iterable[Node]) -> Markup:
    return Markup("".join(_escaped(child) for child in children if child is not None))


def raw(text: str) -> Markup:
    """HTML, CSS or script of our own, passed through. Never anything that a run contains."""
    return Markup(text)


def _escaped(child: str) -> str:
    return child if isinstance(child, Markup) else html.escape(child)


def _attribute(name: str, value: str | bool | None) -> str:
    if value is None or value is False:
        return ""
    shown = name.rstrip("_").replace("_", "-")
    return f" {shown}" if value is True else f' {shown}="{html.escape(value)}"'
