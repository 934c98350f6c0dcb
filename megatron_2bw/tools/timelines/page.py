"""Makes one HTML file of a page, its style sheets, its ES modules and its data; a
browser can open it from a file.

Invariant: the sources stay as they are. A module becomes a data: URL of the page's
import map, because a browser does not load modules from files.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_2bw.base.files import finite

HERE = Path(__file__).parent / "page"  # the component: timelines, charts, style
_IMPORT = re.compile(r'(from|import) "\./([\w.]+)"')


def whole(page: Path, data: dict[str, Any]) -> str:
    """The HTML of `page` with all that it names. Style sheets and modules lie in its
    own folder or HERE.

    data: by the id of a <script type="application/json"> of the page
    """

    def text(name: str) -> str:
        return next(
            place / name for place in (page.parent, HERE) if (place / name).is_file()
        ).read_text("utf-8")

    html = page.read_text("utf-8")
    html = re.sub(
        r'<link rel="stylesheet" href="([\w.]+)" />',
        lambda it: f"<style>\n{text(it[1])}</style>",
        html,
    )
    html = re.sub(
        r'<script type="module" src="([\w.]+)"></script>',
        lambda it: _modules(it[1], text),
        html,
    )
    empty = r'(<script type="application/json" id="(\w+)">)\s*null\s*</script>'
    return re.sub(empty, lambda it: f"{it[1]}{script_json(data[it[2]])}</script>", html)


def script_json(content: Any) -> str:
    """JSON without blanks that can stand in a <script>."""
    return json.dumps(finite(content), separators=(",", ":")).replace("<", "\\u003c")


def _modules(first: str, text: Callable[[str], str]) -> str:
    """The module `first` and all that it imports, and a script that starts it."""
    urls: dict[str, str] = {}
    missing = [first]
    while missing:
        name = missing.pop()
        source = text(name)
        inside = _IMPORT.sub(r'\1 "page/\2"', source).encode()
        urls[f"page/{name}"] = (
            f"data:text/javascript;base64,{base64.b64encode(inside).decode()}"
        )
        missing += [
            match[2]
            for match in _IMPORT.finditer(source)
            if f"page/{match[2]}" not in urls
        ]
    return (
        f'<script type="importmap">{json.dumps({"imports": urls})}</script>\n'
        f'    <script type="module">import "page/{first}";</script>'
    )
