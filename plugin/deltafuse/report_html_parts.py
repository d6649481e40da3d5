"""Small pieces of HTML. Everything that came from a model goes through :func:`text`."""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NewType

#: Markup: made here, or escaped.
Html = NewType("Html", str)
#: Characters of one text that are shown.
LONGEST = 600


def text(value: Any) -> Html:
    """Any value as text: markup escaped, and characters that are not seen or turn the line around shown as codes."""
    whole = str(value)
    shown = "".join(_visible(c) for c in whole[:LONGEST])
    if len(whole) > LONGEST:
        shown += f"… ({len(whole):,} characters)"
    return Html(html.escape(shown, quote=True))


def _visible(c: str) -> str:
    kind = unicodedata.category(c)
    if kind in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return " " if c in "\n\t" else f"\\u{ord(c):04x}"
    return c


def join(parts: Iterable[Html], between: str = "") -> Html:
    """Pieces of markup in a row."""
    return Html(between.join(parts))


def tag(name: str, inner: Html, **attributes: Any) -> Html:
    """An element; ``class_`` is its class, an attribute of None is left out, values are escaped."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    written = "".join(f' {key}="{text(value)}"' for key, value in given.items())
    return Html(f"<{name}{written}>{inner}</{name}>")


def code(value: Any) -> Html:
    """A name out of the model."""
    return tag("code", text(value))


def paragraph(value: str, class_: str | None = None) -> Html:
    return tag("p", text(value), class_=class_)


def items(values: Iterable[Html], class_: str | None = None) -> Html:
    """A list."""
    return tag("ul", join(tag("li", value) for value in values), class_=class_)


def section(title: str, inner: Html, id_: str) -> Html:
    """A part of the page with a heading; nothing where there is nothing in it."""
    if not inner:
        return Html("")
    return tag("section", join([tag("h2", text(title)), inner]), id=id_)


def details(summary: Html, inner: Html, **attributes: Any) -> Html:
    """Something to open; printed open."""
    return tag("details", join([tag("summary", summary), inner]), **attributes)


def table(headings: Sequence[str], rows: Iterable[Sequence[Html]], numbers: Iterable[int] = ()) -> Html:
    """A table that scrolls by itself where it is wider than the page. ``numbers``: the columns set to the right."""
    right = set(numbers)

    def cells(name: str, row: Sequence[Html]) -> Html:
        return tag("tr", join(tag(name, cell, class_="n" if i in right else None) for i, cell in enumerate(row)))

    head = tag("thead", cells("th", [text(heading) for heading in headings]))
    body = tag("tbody", join(cells("td", row) for row in rows))
    return tag("div", tag("table", join([head, body])), class_="scroll", tabindex=0)


def pairs(rows: Iterable[tuple[str, Html]], *, grouped: bool = False) -> Html:
    """Names and what belongs to them, in two columns, or ``grouped`` one after the other."""
    made = (join([tag("dt", text(name)), Html(" "), tag("dd", value)]) for name, value in rows)
    return tag("dl", join(tag("div", pair) if grouped else pair for pair in made))


def bar(share: float, class_: str = "") -> Html:
    """A bar over ``share`` of the width, between 0 and 1."""
    width = 100 * min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    return Html(
        f'<svg class="bar {class_}" viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{width:.2f}" height="4"></rect></svg>'
    )


def number(value: Any) -> Html:
    """A whole number with its thousands apart."""
    return text(f"{value:,}")


def small(value: Any) -> str:
    """An error: 1.8e-07, 0; "–" where there is none."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "not finite" if isinstance(value, float) else "–"
    return f"{value:.1e}" if value else "0"


def span(low: int, high: int) -> str:
    """One number, or two where they differ."""
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
