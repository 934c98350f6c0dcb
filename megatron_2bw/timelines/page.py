"""Makes one HTML file of a page, its style sheets, its ES modules and its data; a browser can open it from a file.

Invariant: the sources stay as they are. A module becomes a data: URL of the page's import map, because a browser does
not load modules from files.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from megatron_2bw.files import finite

HERE = Path(__file__).parent / "page"  # the component: timelines, charts, style
_IMPORT = re.compile(r'(from|import) "\./([\w.]+)"')


def whole(page: Path, data: dict[str, Any]) -> str:
    """The HTML of `page` with all that it names. Style sheets and modules lie in its own folder or HERE.

    data: by the id of a <script type="application/json"> of the page
    """

    def text(name: str) -> str:
        return next(place / name for place in (page.parent, HERE) if (place / name).is_file()).read_text("utf-8")

    def style(match: re.Match[str]) -> str:
        return f"<style>\n{text(match[1])}</style>"

    def modules(match: re.Match[str]) -> str:
        urls = {}
        for name, source in _reached(match[1], text).items():
            urls[f"page/{name}"] = f"data:text/javascript;base64,{base64.b64encode(source.encode()).decode()}"
        return (
            f'<script type="importmap">{json.dumps({"imports": urls})}</script>\n'
            f'    <script type="module">import "page/{match[1]}";</script>'
        )

    def filled(match: re.Match[str]) -> str:
        return match[1] + script_json(data[match[2]]) + "</script>"

    html = page.read_text("utf-8")
    html = re.sub(r'<link rel="stylesheet" href="([\w.]+)" />', style, html)
    html = re.sub(r'<script type="module" src="([\w.]+)"></script>', modules, html)
    return re.sub(r'(<script type="application/json" id="(\w+)">)\s*null\s*</script>', filled, html)


def script_json(content: Any) -> str:
    """JSON without blanks that can stand in a <script>."""
    return json.dumps(finite(content), separators=(",", ":")).replace("<", "\\u003c")


def _reached(name: str, text: Any) -> dict[str, str]:
    """The sources of a module and of all that it imports, with the names of the import map."""
    found: dict[str, str] = {}
    missing = [name]
    while missing:
        name = missing.pop()
        source = text(name)
        found[name] = _IMPORT.sub(r'\1 "page/\2"', source)
        missing += [match[2] for match in _IMPORT.finditer(source) if match[2] not in found]
    return found
