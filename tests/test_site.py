"""The documentation site builds without a warning, needs no network, and links to every name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
API = REPOSITORY / "docs" / "api"

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    return {
        page.relative_to(site).as_posix(): page.read_text(encoding="utf-8")
        for page in site.rglob("*.html")
    }


def test_nothing_is_fetched_from_elsewhere(site, pages):
    fetched = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    assert not {name: found for name, page in pages.items() if (found := fetched.findall(page))}
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert "@import" not in styles and not re.search(r"url\(['\"]?https?:", styles)


def test_every_name_has_an_anchor(pages):
    anchors = set(re.findall(r'id="([\w.]+)"', "".join(pages.values())))
    entries = "".join(page.read_text(encoding="utf-8") for page in API.glob("*.md"))
    named = set(re.findall(r"^::: (wvprobe\.\w+\.\w+)$", entries, flags=re.MULTILINE))
    assert len(named) > 190
    assert named <= anchors, named - anchors


def test_no_role_of_a_docstring_is_left(pages):
    """:func:`~wvprobe.capture` becomes a link, see docs/tools/roles.py."""
    for name, page in pages.items():
        assert not re.search(r":(?:func|class|meth|mod):", page), name
    assert 'href="#wvprobe.vocabulary.top_tokens"' in pages["api/weights.html"]


def test_site_searches_offline_and_holds_no_tools(site):
    assert not (site / "tools").exists()
    assert (site / "search" / "search_index.js").exists(), "search works without a server"
