"""Tables that a phone can show: either each row becomes a block with its own labels, or the table scrolls in a box.
And a box for lists that would otherwise be longer than the rest of the page."""

from collections.abc import Iterable, Sequence

from paceline.report.markup import Markup, Node, element

OPEN_ROWS = 12
"""A longer list is folded away."""


def folded(title: str, nodes: Sequence[Node]) -> list[Node]:
    """The nodes as they are if they are few, else behind one click."""
    there: list[Node] = [node for node in nodes if node is not None]
    return there if len(there) <= OPEN_ROWS else [element("details", element("summary", title), *there)]


def stacked(headings: Sequence[str], rows: Iterable[tuple[Node, Sequence[Node]]], *, class_: str = "") -> Markup:
    """A row is its name and the cells beside it; `headings` has one more than the cells."""
    body = [
        element(
            "tr",
            element("th", name, scope="row"),
            *(element("td", cell, data_label=heading) for cell, heading in zip(cells, headings[1:], strict=True)),
        )
        for name, cells in rows
    ]
    return element("table", _head(headings), element("tbody", *body), class_=f"stack {class_}".strip())


def scrolling(headings: Sequence[str], rows: Iterable[Sequence[Node]], *, label: str) -> Markup:
    """In a box of its own width, which the keyboard can scroll, too."""
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    table = element("table", _head(headings), element("tbody", *body))
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def facts(rows: Iterable[tuple[str, Node]]) -> Markup:
    """Name and value, without headings."""
    body = [element("tr", element("th", name, scope="row"), element("td", value)) for name, value in rows]
    return element("table", element("tbody", *body), class_="values")


def _head(headings: Sequence[str]) -> Markup:
    return element("thead", element("tr", *(element("th", heading, scope="col") for heading in headings)))
