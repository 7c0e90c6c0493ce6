"""The page's files, what it is told, and to which API key; then the page itself, in a browser."""

import base64
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests import checkpoints
from tests.checkpoints import EOS
from tests.server.browser import chromium, opened
from tests.server.live import Live, live, until

FILES = sorted(file.name for file in (resources.files("octavo.server.ui") / "page").iterdir())
FIRST, SECOND = (("", name) for name in ("first-key", "second-key"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(
        checkpoints.make("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=32_768),
        max_batch_total_tokens=65_536,
        api_key="first-key, second-key",
        engine_restart_seconds=0.5,
        compile=False,
    ) as running:
        yield running


@pytest.fixture
def http(server: Live) -> Iterator[httpx.Client]:
    """As a browser asks, once its user has given the first key."""
    with httpx.Client(base_url=server.url, timeout=120, auth=FIRST) as client:
        yield client
    until(lambda: server.held() == (0, 0))


def completion(http: httpx.Client, prompt: str, auth: tuple[str, str] = FIRST, **more: Any) -> Any:
    return http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **more}, auth=auth).json()


def shown(http: httpx.Client, auth: tuple[str, str] = FIRST) -> Any:
    """The page's state, after all that has happened."""
    asked = http.get("/ui/state", auth=auth).json()["time"]
    while (state := http.get("/ui/state", auth=auth).json())["time"] == asked:
        pass
    return state


# Files and keys


def test_files_come_with_a_strict_policy(http: httpx.Client) -> None:
    """All that the page is made of is there, as what it is; nothing else is."""
    page = http.get("/ui")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for name in FILES:
        response = http.get(f"/ui/{name}")
        assert response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'self'; base-uri 'none'")
        assert response.headers["x-content-type-options"] == "nosniff"
    assert http.get("/ui/app.js").headers["content-type"].startswith("text/javascript")
    for name in ("nothing.js", "..%2Froutes.py", "__init__.py"):
        assert http.get(f"/ui/{name}").status_code == 404


def test_only_the_page_asks_for_a_password(server: Live) -> None:
    for path in ("/ui", "/ui/state", "/ui/app.js"):
        response = httpx.get(server.url + path)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == 'Basic realm="octavo", charset="UTF-8"'
    assert httpx.get(f"{server.url}/uikit").headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{server.url}/v1/models").headers["www-authenticate"] == "Bearer"


def basic(given: bytes) -> bytes:
    return b"Basic " + base64.b64encode(given)


@pytest.mark.parametrize(
    "header",
    [
        *map(basic, (b":first-ke", b":first-key2", b"first-key", b"first-key:", b":first-key:", b":", b":\xff\xfe")),
        b"Basic", b"Basic \xc3\xa9", b"Basic Zmlyc3Qta2V5", b"Basic :first-key",
    ],
)  # fmt: skip
def test_a_wrong_password(server: Live, header: bytes) -> None:
    assert httpx.get(f"{server.url}/ui/state", headers={b"Authorization": header}).status_code == 401


def test_a_form_of_another_site_cannot_use_the_password(http: httpx.Client) -> None:
    """What a page can send without asking the server first is not taken; a key in a header of its own is."""
    body = b'{"inputs": "a", "parameters": {"max_new_tokens": 1}}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""):
        told = {"Content-Type": kind} if kind else {}
        assert http.post("/generate", content=body, headers=told).status_code == 401
    assert http.post("/generate", content=body, headers={"Content-Type": "application/json"}).status_code == 200
    assert http.get("/info").status_code == 200


# What the page is told


def test_another_keys_blocks_are_blocks(server: Live, http: httpx.Client) -> None:
    """Their number and age, and nothing of whose they are or what they hold."""
    completion(http, "only the first key knows this. " * 9)
    completion(http, "only the second key knows this. " * 9, SECOND)
    cache = shown(http, FIRST)["cache"]
    assert any(node["text"].startswith("only the first key") for node in cache["nodes"])
    assert "second key" not in str(cache)
    assert cache["others"]["nodes"] > 0
    assert 0 < len(owned(cache)) < states(cache)["cached"] == cache["stats"]["blocks_cached"]


@pytest.mark.parametrize("path", ["/ui", "/ui/state", "/ui/app.js"])
def test_the_page_is_the_first_keys(http: httpx.Client, path: str) -> None:
    """It shows sums of all tenants: who reads them before and after knows what another one did."""
    assert http.get(path, auth=FIRST).status_code == 200
    assert http.get(path, auth=SECOND).status_code == 403


@pytest.mark.parametrize("auth", ["FIRST", "SECOND"])
def test_a_running_request_is_shown_to_its_key(server: Live, http: httpx.Client, auth: str) -> None:
    prompt, own = "count for one key", auth == "FIRST"
    body = {"prompt": prompt, "max_tokens": 30_000, "stream": True, "logit_bias": {str(EOS): -100}}
    with http.stream("POST", "/v1/completions", json=body, auth=FIRST if own else SECOND) as response:
        lines = response.iter_lines()
        next(lines)
        cache = shown(http, FIRST)["cache"]
        told = [(request["running"], request["prompt_tokens"]) for request in cache["requests"]]
        assert told == ([(True, len(prompt))] if own else [])
        assert cache["others"]["requests"] == (0 if own else 1)
        assert min(run[2] for run in cache["runs"]) == (-2 if own else -1)


def owned(cache: Any) -> set[int]:
    """Numbers of the blocks that are somebody's."""
    numbered = [run[2] for run in cache["runs"] for _ in range(run[0])]
    return {block for block, owner in enumerate(numbered) if owner != -1}


def states(cache: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for count, state, *_ in cache["runs"]:
        counts[cache["states"][state]] += count
    return counts


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: Live, http: httpx.Client) -> Iterator[Page]:
    """Shows the page to the first key."""
    with opened(browser, f"{server.url}/ui", "first-key") as page:
        expect(page.locator("#status")).to_have_text("serving")
        page.locator("summary").click()
        page.locator("#temperature").fill("0")
        page.locator("#most").fill("24")
        yield page


def ask(page: Page, text: str) -> None:
    page.locator("#question").fill(text)
    page.locator("#question").press("Enter")


def test_an_answer_streams_and_asking_again_finds_it_cached(page: Page, http: httpx.Client) -> None:
    ask(page, "What is a page?")
    attempts = page.locator(".attempts li")
    expect(attempts).to_have_count(1)
    system = page.locator("#system").input_value()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "What is a page?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert page.locator(".answer").text_content() == answer["choices"][0]["message"]["content"]
    assert page.locator(".answer").evaluate("answer => answer.childNodes.length") > 4  # pieces as they came
    page.get_by_role("button", name="Ask again").click()
    expect(attempts).to_have_count(2)
    prompt = answer["usage"]["prompt_tokens"]
    expect(attempts.nth(1)).to_contain_text(f"{prompt - 1}/{prompt} cached")
    expect(attempts.nth(1)).to_contain_text("to first token")


def test_the_legend_says_what_the_metrics_say(page: Page, http: httpx.Client) -> None:
    ask(page, "Count the blocks.")
    expect(page.locator(".attempts li")).to_have_count(1)
    metrics = http.get("/metrics").text
    numbers = {}
    for state in ("free", "cached", "pinned", "held"):
        (line,) = (line for line in metrics.splitlines() if line.startswith(f'octavo_blocks{{state="{state}"}}'))
        numbers[state] = int(float(line.split()[1]))
    total = shown(http)["cache"]["stats"]["blocks_total"]
    assert numbers["free"] + numbers["cached"] + numbers["held"] == total
    for state, number in numbers.items():
        expect(page.locator(f"#legend .{state} b")).to_have_text(f"{number:,}")


def endless(route: Route) -> None:
    """The page's question, with an answer that does not end by itself, as one of random weights may at any token."""
    asked: Any = route.request.post_data_json
    route.continue_(post_data=json.dumps(asked | {"ignore_eos": True}))


def test_stop_gives_the_blocks_back(page: Page, server: Live) -> None:
    page.route("**/v1/chat/completions", endless)
    page.locator("#most").fill("30000")
    ask(page, "Go on and on.")
    expect(page.locator("#requests tbody tr")).to_have_count(1)
    expect(page.locator("#legend .held b")).not_to_have_text("0")
    expect(page.locator("#batch-note")).to_have_text("1 running, 0 waiting")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".attempts li")).to_contain_text("stopped")
    expect(page.locator("#requests tbody tr")).to_have_count(0)
    for state in ("pinned", "held"):
        expect(page.locator(f"#legend .{state} b")).to_have_text("0")
    assert server.held() == (0, 0)


def test_pointing_at_a_prefix_lights_its_blocks(page: Page, http: httpx.Client) -> None:
    completion(http, "a text of some length that nobody else has asked about yet. " * 6)
    row = page.get_by_role("treeitem").filter(has_text="that nobody else")
    row.hover()
    (node,) = (node for node in shown(http)["cache"]["nodes"] if "that nobody else" in node["text"])
    assert node["blocks"] > 10
    expect(page.locator("#caption")).to_contain_text(f"{node['blocks']} of its own")
    page.locator("#map").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("Block 2")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


def test_text_is_only_ever_text(page: Page) -> None:
    told = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    ask(page, told)
    expect(page.locator(".attempts li")).to_have_count(1)
    expect(page.locator(".asked")).to_have_text(told)
    expect(page.get_by_role("treeitem").filter(has_text="onerror").first).to_be_visible()
    assert page.locator("img, main script").count() == 0


def test_an_engine_that_dies_and_comes_back(page: Page, server: Live) -> None:
    page.locator("#most").fill("30000")
    ask(page, "Go on and on.")
    expect(page.locator("#requests tbody tr")).to_have_count(1)
    os.kill(server.service.engine.info.process_id, signal.SIGKILL)
    expect(page.locator("#status")).to_contain_text("was ended by SIGKILL")
    expect(page.locator(".attempts li")).to_contain_text("The engine died")
    expect(page.locator("#status")).to_have_text("serving", timeout=120_000)
    page.locator("#most").fill("8")
    ask(page, "Are you there?")
    expect(page.locator(".attempts li")).to_have_count(2)
    expect(page.locator(".attempts li").nth(1)).to_contain_text("cached")
