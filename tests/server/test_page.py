"""The page in a real browser: load it, press its buttons, see it change."""

import pytest

from browser import chromium
from child_processes import until
from control_site import TOKEN, Engine, Trainer, serving
from flyweight.lifecycle.control import Control


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def running(tmp_path_factory, browser):
    place = tmp_path_factory.mktemp("page")
    address, cell = f"unix:{place}/policy", place / "engine.cell"
    with (
        Trainer(address, place / "run"),
        Engine(address, cell, store=place / "run", should_follow=False) as engine,
        serving([Control(cell, 1, name="engine-0")], str(place / "run")) as site,
    ):
        site.engine = engine
        site.good("POST", "/v1/update_weights")
        yield site


class Page:
    """What a person sees and does in the browser."""

    def __init__(self, browser, site):
        self.browser, self.site = browser, site

    def load(self, fragment=f"#token={TOKEN}"):
        self.browser.get("about:blank")
        self.browser.get(f"{self.site.address}/{fragment}")
        return self

    def find(self, selector):
        return self.browser.find_element("css selector", selector)

    def text(self, selector):
        script = "const e = document.querySelector(arguments[0]); return e && e.textContent"
        return self.browser.execute_script(script, selector)

    def press(self, selector):
        until(lambda: self.find(selector).is_displayed() and self.find(selector).is_enabled())
        self.find(selector).click()

    def sees(self, selector, words):
        """Wait until an element shows these words."""
        try:
            until(lambda: words in (self.text(selector) or ""))
        except AssertionError:
            raise AssertionError(
                f"{selector} shows {self.text(selector)!r}, not {words!r}"
            ) from None

    def complaints(self):
        """What the console logged, except for HTTP errors that a test causes on purpose."""
        return [each for each in self.browser.get_log("browser") if each["source"] != "network"]


@pytest.fixture
def page(browser, running):
    running.engine.tell("finish")
    if running.replica()["ranks"][0]["absent"]:
        running.good("POST", "/v1/wakeup")
    running.good("POST", "/v1/resume")
    browser.execute_script("try { sessionStorage.clear() } catch (error) {}")
    yield Page(browser, running)
    assert not Page(browser, running).complaints()


def test_a_press_changes_the_state_and_the_page_shows_it(page):
    """C31, C32"""
    page.load().sees(".state", "SERVING")
    page.press(".pause")
    page.sees(".state", "PAUSED")
    assert page.site.state == "PAUSED"
    page.press(".resume")
    page.sees(".state", "SERVING")
    page.sees(".answer", "finished in")
    assert page.site.state == "SERVING"
    page.sees("#operations", "resume-")


def test_the_token_leaves_the_address_and_is_kept_for_the_tab(page):
    """C33"""
    page.load().sees("#link", "live")
    assert TOKEN not in page.browser.current_url
    page.browser.refresh()
    page.sees("#link", "live")


def test_the_page_asks_for_the_token_until_it_is_the_right_one(page):
    """C33"""
    page.load("").sees("#link", "needs a token")
    assert page.text(".state") is None
    page.find("#token").send_keys("wrong")
    page.press("#token-use")
    page.sees("#token-text", "another token")
    page.find("#token").send_keys(TOKEN)
    page.press("#token-use")
    page.sees(".state", "SERVING")


def test_update_and_roll_change_the_version_and_the_timeline(page):
    page.load().sees(".state", "SERVING")
    page.find(".number").send_keys("2")
    page.press(".roll")
    page.sees(".version", "version 2, back from 3, pinned")
    assert page.site.replica()["version"] == 2
    page.sees("#rounds tbody tr", "engine-0")
    page.press(".update")
    page.sees(".version", "version 3")
    until(lambda: page.text("#rounds tbody tr td:nth-child(3)") == "3")
    assert float(page.text("#rounds tbody tr td:nth-child(7)")) > 0  # the pause
    assert len(page.browser.find_elements("css selector", "#speeds div")) >= 2


def test_a_roll_without_a_number_asks_for_one(page):
    page.load().sees(".state", "SERVING")
    page.press(".roll")
    page.sees(".answer", "enter a version number")


def test_clear_asks_for_confirmation_and_restore_undoes_it(page):
    page.load().sees(".state", "SERVING")
    page.press(".clear")
    page.press("#clear-dialog button[value=cancel]")
    assert page.site.state == "SERVING"
    page.press(".clear")
    page.press("#clear-go")
    page.sees(".state", "CLEARED")
    page.press(".resume")
    page.sees(".answer", "it accepts PAUSE, CLEAR, RESTORE or UPDATE")
    page.sees("#faults", "it accepts PAUSE, CLEAR, RESTORE or UPDATE")
    page.press(".restore")
    page.sees(".state", "SERVING")


def test_buttons_are_disabled_while_an_operation_runs(page):
    page.load().sees(".state", "SERVING")
    page.site.engine.tell("request")
    page.press(".pause")
    page.sees(".state", "PAUSING")
    page.sees(".answer", "is running")
    assert not page.find(".update").is_enabled()
    page.site.engine.tell("finish")
    page.sees(".state", "PAUSED")
    until(lambda: page.find(".resume").is_enabled())


def test_a_replica_name_is_shown_as_text_and_never_as_markup(browser, tmp_path):
    name = "<img src=x onerror=document.title='broken'>"
    with serving([Control(tmp_path / "odd.cell", 1, name=name)]) as site:
        page = Page(browser, site).load()
        page.sees(".name", name)
        page.sees(".state", "ABSENT")
        page.sees(".reason", "none of its 1 ranks has started yet")
        assert browser.title == "Flyweight"
        assert not page.complaints()


def test_the_page_reconnects_to_a_server_that_restarts(browser, tmp_path):
    cell = tmp_path / "back.cell"
    with serving([Control(cell, 1)]) as site:
        page = Page(browser, site).load()
        page.sees("#link", "live")
    page.sees("#link", "reconnecting")
    with serving([Control(cell, 1)], port=int(site.netloc.rpartition(":")[2])):
        page.sees("#link", "live")


@pytest.mark.parametrize("width", [390, 900])
def test_the_page_fits_small_screens(page, width):
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        page.load().sees(".state", "SERVING")
        script = "return [document.documentElement.scrollWidth, window.innerWidth]"
        content, window = page.browser.execute_script(script)
        assert content <= window == width
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
