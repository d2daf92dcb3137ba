"""The page in a browser, without a network: walked, read, saved from, at two widths."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

# They read the same pages, which one process writes.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("report")]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# GQA, an encoder, latent attention; and two models on one page.
PAGES = [
    ("deepseek_v3",),
    pytest.param(("llama", "bert"), marks=pytest.mark.ci),
]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser, small_report) -> Iterator[Any]:
    """Return what opens a report offline; the browser must have had nothing to complain of."""
    contexts, complaints = [], []

    def opened(families: tuple[str, ...], viewport=DESKTOP, **settings: Any) -> Any:
        context = browser.new_context(viewport=viewport, offline=True, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url))
        page.goto(small_report(*families).page.resolve().as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


def until(page: Any, condition: str) -> None:
    """Wait until something holds; by hand, since the page forbids code to be made from text."""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it never held that {condition}")


def draw_all(page: Any) -> None:
    """Scroll through the page, so that every figure is drawn."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for y in range(0, height, 600):
        page.evaluate(f"scrollTo(0, {y})")
        page.wait_for_timeout(40)
    until(
        page, "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg'))"
    )


@pytest.mark.parametrize("families", PAGES, ids="+".join)
def test_every_figure_is_drawn_and_nothing_scrolls_sideways(families, open_page):
    for viewport in (DESKTOP, PHONE):
        page = open_page(families, viewport, has_touch=viewport is PHONE)
        draw_all(page)
        assert page.locator(".plot").count() > 10 * len(families)
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        page.wait_for_timeout(200)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= viewport["width"]


@pytest.mark.parametrize("families", PAGES, ids="+".join)
def test_the_page_is_walked_by_keyboard(families, open_page):
    page = open_page(families)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to what was found"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    seen: set[str] = set()
    summary = ""
    for _ in range(200):
        page.keyboard.press("Tab")
        kind = page.evaluate("document.activeElement.tagName.toLowerCase()")
        seen.add(kind)
        summary = page.evaluate("document.activeElement.textContent")
        if kind == "summary" and summary.startswith("Table behind"):
            break
    assert {"a", "button", "summary"} <= seen and summary
    page.keyboard.press("Enter")
    until(page, "document.activeElement.parentElement.open")
    until(page, "document.activeElement.parentElement.querySelector('tbody td') !== null")


@pytest.mark.parametrize("families", PAGES, ids="+".join)
def test_headings_are_in_order_and_figures_have_names(families, open_page):
    page = open_page(families)
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].map((one) => Number(one.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    names = page.evaluate(
        "[...document.querySelectorAll('.plot')].map((one) => one.getAttribute('aria-label'))"
    )
    assert all(names) and page.locator(".plot[role=img]").count() == len(names)
    for landmark in ("main", "nav", "header"):
        assert page.locator(landmark).count() == 1
    verdicts = page.locator("table.verdicts")
    assert verdicts.locator("caption").count() == 1
    assert verdicts.locator("th:not([scope])").count() == 0


@pytest.mark.ci
def test_a_table_is_saved_as_it_is_in_the_frame(open_page, small_report):
    written = small_report("llama")
    page = open_page(("llama",))
    kept = json.loads((written.page.parent / ".wvprobe-run" / "0-2.1.json").read_text())
    expected = kept["exhibits"][1]
    box = page.locator("details[data-table='0-2.1-2']")
    box.locator("summary").click()
    shown = box.locator("tbody tr").count()
    assert shown == min(200, len(expected["rows"]))
    with page.expect_download() as saved:
        box.get_by_role("button", name="CSV").click()
    read = pandas.read_csv(saved.value.path())
    frame = pandas.DataFrame(expected["rows"], columns=expected["columns"])
    pandas.testing.assert_frame_equal(read, frame, check_dtype=False, rtol=1e-12)
    with page.expect_download() as saved:
        box.get_by_role("button", name="JSON").click()
    rows = json.loads(Path(saved.value.path()).read_text())
    assert [list(row.values()) for row in rows] == expected["rows"]


@pytest.mark.ci
def test_all_numbers_are_saved(open_page, small_report):
    written = small_report("llama", "bert")
    page = open_page(("llama", "bert"))
    with page.expect_download() as saved:
        page.get_by_role("button", name="JSON of the numbers of all claims").click()
    document = json.loads(Path(saved.value.path()).read_text())
    assert document == json.loads(written.results.read_text())
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV of the numbers of all claims").click()
    frame = pandas.read_csv(io.StringIO(Path(saved.value.path()).read_text()), dtype={"id": str})
    for claim in document["claims"]:
        rows = frame[(frame["id"] == claim["id"]) & (frame["model"] == claim["model"])]
        named = rows.dropna(subset=["number"]).set_index("number")["value"]
        assert set(rows["verdict"]) == {claim["verdict"]}
        assert {name: value for name, value in claim["numbers"].items() if value is not None} == (
            named.dropna().to_dict()
        )


@pytest.mark.parametrize("families", PAGES, ids="+".join)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(families, scheme, open_page):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    page = open_page(families, color_scheme=scheme)
    draw_all(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    page.wait_for_timeout(300)
    found = axe.Axe().run(page).response["violations"]
    serious = [
        (one["id"], one["impact"], one["help"], [node["html"][:200] for node in one["nodes"][:3]])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    assert not serious


@pytest.mark.ci
def test_dark_and_light_are_chosen_while_the_page_is_open(open_page):
    page = open_page(("llama",), color_scheme="light")
    draw_all(page)
    ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ink), page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    until(page, f"{ink} !== '{light[0]}'")
    assert (page.evaluate(ink), page.evaluate(ground)) == ("rgb(230, 235, 240)", "rgb(18, 24, 31)")
    assert light == ("rgb(31, 41, 51)", "rgb(255, 255, 255)")


@pytest.mark.ci
def test_on_paper_everything_is_open_and_on_white(open_page):
    page = open_page(("llama",), color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    tables = page.locator("details[data-table]")
    assert page.locator("details[data-table] table").count() == tables.count() > 10
    until(page, "document.querySelector('.plot .xtick text') !== null")
    ink = page.evaluate("getComputedStyle(document.querySelector('.plot .xtick text')).fill")
    assert ink == "rgb(31, 41, 51)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
