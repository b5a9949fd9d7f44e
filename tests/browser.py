"""A real browser for tests of the page: Debian's chromium, headless, driven by selenium."""

import shutil
from contextlib import contextmanager

import pytest

from child_processes import LIMIT


@contextmanager
def chromium(width=1100, height=1000):
    """Yield a driver; skip where there is no browser."""
    webdriver = pytest.importorskip("selenium.webdriver")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no chromium with its chromedriver here; apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        chrome.set_page_load_timeout(LIMIT)
        yield chrome
    finally:
        chrome.quit()
