"""The site builds without a warning and without a network, and the built pages fetch nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# what a browser fetches by itself: scripts, styles, images, frames; a link is only followed by a reader
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']?(?P<src>[^\"' >]+)"
    r"|<link\b[^>]*?\bhref=[\"']?(?P<href>[^\"' >]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built once."""
    out = tmp_path_factory.mktemp("site")
    # not --quiet: what it hides does not count for --strict
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    # a proxy that nobody answers at: whoever wants a network fails
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


def test_every_page_is_built(site: Path) -> None:
    wanted = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert {path.relative_to(site) for path in site.rglob("*.html")} == wanted | {Path("404.html")}


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    for path in pages:
        found = [match["src"] or match["href"] for match in FETCHED.finditer(path.read_text(encoding="utf-8"))]
        assert found, path.name
        assert [url for url in found if re.match(r"(https?:)?//", url)] == [], path.name


def test_styles_fetch_nothing_from_elsewhere(site: Path) -> None:
    styles = list(site.rglob("*.css"))
    assert styles
    for path in styles:
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)|@import", text) == [], path.name


def test_no_page_needs_what_the_theme_would_fetch(site: Path) -> None:
    # the theme's script loads diagrams and the counters of a repository from elsewhere where a page has them
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert 'class="mermaid"' not in text, path.name
        assert "data-md-component=source" not in text.replace('"', ""), path.name


def test_search_finds_a_noun(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "GQAttention" in index
    assert "prefix cache" in index
