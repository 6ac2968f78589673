"""HTML that is escaped unless it is `Markup`, and tables that a phone can show. A run's name or sample may hold
anything; a template engine would be a dependency for the sake of one page."""

import html
from collections.abc import Iterable, Sequence

OPEN_ROWS = 12  # a longer list is folded away


class Markup(str):
    """Text that is HTML, CSS or script of our own, passed through. Never anything that a run contains."""


Node = str | Markup | None  # a child of an element: text to be escaped, finished HTML, or nothing


def element(tag: str, *children: Node, **attributes: str | bool | None) -> Markup:
    """One element. Attribute `class_` is class, `aria_label` is aria-label; True is a bare attribute, None none."""
    written = "".join(_attribute(name, value) for name, value in attributes.items())
    end = "" if tag in ("meta", "input") else f"</{tag}>"
    return Markup(f"<{tag}{written}>{join(children)}{end}")


def join(children: Iterable[Node]) -> Markup:
    there = [child for child in children if child is not None]
    return Markup("".join(child if isinstance(child, Markup) else _escaped(child) for child in there))


def _escaped(text: str) -> str:
    """The name of a folder may hold half of a character, which no page can."""
    return html.escape(text.encode(errors="backslashreplace").decode())


def _attribute(name: str, value: str | bool | None) -> str:
    if value is None or value is False:
        return ""
    shown = name.rstrip("_").replace("_", "-")
    return f" {shown}" if value is True else f' {shown}="{_escaped(value)}"'


def details(title: str, *nodes: Node, is_open: bool = False, id: str | None = None) -> Markup:
    """With an `id` the live page knows the box again when its title has changed."""
    return element("details", element("summary", title), *nodes, open=is_open, id=id)


def folded(title: str, nodes: Sequence[Node], *, most: int = OPEN_ROWS) -> list[Node]:
    """The nodes as they are if they are few, else behind one click."""
    there: list[Node] = [node for node in nodes if node is not None]
    return there if len(there) <= most else [details(title, *there)]


def chart(name: str, label: str, kind: str = "chart", *, heading: Node = None) -> Markup:
    """The place of a chart that the script draws."""
    return element("div", heading, element("div", id=name, class_=kind, role="img", aria_label=label), class_="panel")


def stacked(headings: Sequence[str], rows: Iterable[tuple[Node, Sequence[Node]]], *, class_: str = "") -> Markup:
    """A row is its name and the cells beside it, below it on a phone; `headings` has one more than the cells."""
    body = [
        element(
            "tr",
            element("th", name, scope="row"),
            *(element("td", cell, data_label=heading) for cell, heading in zip(cells, headings[1:], strict=True)),
        )
        for name, cells in rows
    ]
    return element("table", _head(headings), element("tbody", *body), class_=f"stack {class_}".strip())


def scrolling(headings: Sequence[str], rows: Iterable[Sequence[Node]], *, label: str, named: bool = False) -> Markup:
    """In a box that the keyboard can scroll, too. `named`: the first cell of a row is its name and stays in view."""
    first, scope = ("th", "row") if named else ("td", None)
    body = [
        element("tr", element(first, row[0], scope=scope), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    table = element("table", _head(headings), element("tbody", *body))
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def values_table(rows: Iterable[tuple[str, Node, Node]], headings: Sequence[str] = ()) -> Markup:
    """Name, value and, where it was changed, what it was."""
    body = [
        element("tr", element("th", name, scope="row"), element("td", value, was), class_="changed" if was else None)
        for name, value, was in rows
    ]
    return element("table", _head(headings) if headings else None, element("tbody", *body), class_="values")


def _head(headings: Sequence[str]) -> Markup:
    return element("thead", element("tr", *(element("th", heading, scope="col") for heading in headings)))
