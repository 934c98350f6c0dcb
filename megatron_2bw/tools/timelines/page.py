"""Makes one HTML file of a page, its style sheets, its ES modules and its data; a
browser can open it from a file.

Invariant: the sources stay as they are. A module becomes a data: URL of the page's
import map, because a browser does not load modules from files.
"""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_2bw.base.files import finite

HERE = Path(__file__).parent / "page"  # the component: timelines, charts, style
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)" />')
_SCRIPT = re.compile(r'<script type="module" src="([\w.]+)"></script>')
_DATA = re.compile(r'(<script type="application/json" id="(\w+)">)\s*null\s*</script>')
_IMPORT = re.compile(r'(from|import) "\./([\w.]+)"')


def bundle(page: Path, data: dict[str, Any]) -> str:
    """The HTML of `page` with all that it names. Style sheets and modules lie in its
    own folder or HERE.

    data: by the id of a <script type="application/json"> of the page
    """

    def read(name: str) -> str:
        beside = page.parent / name
        return (beside if beside.is_file() else HERE / name).read_text("utf-8")

    html = page.read_text("utf-8")
    for match in _STYLE.finditer(html):
        html = html.replace(match[0], f"<style>\n{read(match[1])}</style>")
    for match in _SCRIPT.finditer(html):
        html = html.replace(match[0], _modules(match[1], read))
    for match in _DATA.finditer(html):
        content = script_json(data[match[2]])
        html = html.replace(match[0], f"{match[1]}{content}</script>")
    return html


def script_json(content: Any) -> str:
    """JSON without blanks that can stand in a <script>."""
    text = json.dumps(finite(content), separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _modules(first: str, read: Callable[[str], str]) -> str:
    """The module `first` and all that it imports, and a script that starts it."""
    urls = {}
    missing = [first]
    while missing:
        name = missing.pop()
        source = read(name)
        module = _IMPORT.sub(r'\1 "page/\2"', source)
        content = base64.b64encode(module.encode()).decode()
        urls[f"page/{name}"] = f"data:text/javascript;base64,{content}"
        for match in _IMPORT.finditer(source):
            if f"page/{match[2]}" not in urls:
                missing.append(match[2])
    return (
        f'<script type="importmap">{json.dumps({"imports": urls})}</script>\n'
        f'    <script type="module">import "page/{first}";</script>'
    )
