"""Debian's chromium, without a window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

expect.set_options(timeout=60_000)  # of a condition that comes true, however busy the machine is
CHROMIUM = shutil.which("chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("the page is tested in Debian's chromium, which is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, password: str) -> Iterator[Page]:
    """A page that may neither say anything on the console, but that a server was down, nor speak to another host."""
    context = browser.new_context(http_credentials={"username": "me", "password": password})
    context.add_init_script("delete ReadableStream.prototype[Symbol.asyncIterator]")  # as in Safari
    page = context.new_page()
    page.set_default_timeout(60_000)
    told: list[str] = []
    hosts = set()
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("dialog", lambda dialog: told.append(dialog.message))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.goto(url)
    yield page
    context.close()
    assert [one for one in told if "503" not in one] == []
    assert hosts == {urlsplit(url).netloc}
