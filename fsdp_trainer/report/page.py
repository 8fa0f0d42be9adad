"""What all pages and notebook pieces share: one style for light, dark, print and phone, and how values become HTML.

A page is one file that needs nothing from elsewhere; a piece is the same without head, for a notebook's cell. Every
value is escaped by the templates (`*.html.jinja`), and every rule of the style stays inside `.fsdp`.
"""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, /, **values: Any) -> Markup:
    """Return a template of this folder with `values` in it, each escaped unless it is Markup already."""
    return Markup(_environment().get_template(template).render(**values))


def format_page(title: str, *parts: Markup) -> str:
    """Return a whole page: `parts` under one another, and the style; `title` is what the browser's tab says."""
    return str(render("page.html.jinja", title=title, parts=parts))


def format_piece(*parts: Markup) -> str:
    """Return the same for a notebook's cell or a page that is there already: no head, and nothing outside its box."""
    return str(render("piece.html.jinja", parts=parts))


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
