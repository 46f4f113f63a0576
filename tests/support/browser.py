"""Chromium without a window for tests of pages, and the texts of a page that lie over each other or leave it."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = [
    *(["chromium is not installed"] if not BROWSER else []),
    *(["chromedriver is not installed"] if not DRIVER else []),
    *(["selenium is not installed (extra `dev`)"] if not find_spec("selenium") else []),
]
"""Reasons why no browser can be started."""
_MISPLACED = (Path(__file__).parent / "misplaced_texts.js").read_text()


def chrome() -> Any:
    """Start a browser; its `quit` ends it."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = BROWSER
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1600,1000",
        "--lang=en",
    ):
        options.add_argument(word)
    return Chrome(options, Service(DRIVER))


def misplaced(browser: Any, width: int, medium: str = "screen") -> list[str]:
    """Return the texts of the open page that overlap, or that leave the page or their figure at the side.

    Args:
        browser: what `chrome` returned.
        width: width of the window in CSS pixels; Chromium's own windows are at least 500 wide.
        medium: `screen` or `print`.
    """
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium})
    return browser.execute_script(_MISPLACED)
