"""What MkDocs does beside building ``docs/``: it adds pages, and checks links.

Added are pages that lie elsewhere, notebooks, and pages that the menu does not name. A link to
another file (code, a recipe) must lead to one; the site has no copy of it, and shows its text.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "deploy.md": "docker/README.md",
    "containers.md": "docker/containers.md",
    "systemd.md": "docker/systemd/README.md",
    "trust.md": "server_app/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the algorithms' pages that the menu does not name to its part "Algorithms"."""
    (menu,) = (part["Algorithms"] for part in config.nav or [] if "Algorithms" in part)
    pages = {f"algorithms/{path.name}" for path in (ROOT / "docs" / "algorithms").glob("*.md")}
    menu += sorted(page for page in pages if page not in str(menu))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere, and a page for each notebook."""
    for name, source in ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        files.append(
            File.generated(config, f"notebooks/{notebook.stem}.md", content=_as_page(notebook))
        )
    return files


def _as_page(notebook: Path) -> str:
    """Markdown, with the code in fences."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(
        text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links as the site needs them, and take from fences what only tests read."""
    uris = {
        Path(str(file.abs_src_path)).resolve(): file.src_uri for file in files if file.abs_src_path
    }

    def of_the_site(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups(default="")
        path = (Path(str(page.file.abs_src_path)).parent / target).resolve()
        if not path.exists():
            raise PluginError(f"{page.file.abs_src_path}: a link to {target}, which is not there")
        if path not in uris:
            return text
        address = os.path.relpath(uris[path], Path(page.file.src_uri).parent)
        return f"{image}[{text}]({address}{anchor})"

    return re.sub(r"(?m)^```(\w+) .*$", r"```\1", LINK.sub(of_the_site, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A head without a text is a plain cell: a screen reader would announce an empty one."""
    return html.replace("<th></th>", "<td></td>")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The theme's search is a dialog without a name."""
    return output.replace(
        'data-md-component="search" role="dialog"',
        'data-md-component="search" role="dialog" aria-label="Search"',
    )
