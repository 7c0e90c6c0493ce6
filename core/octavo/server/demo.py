"""`octavo demo`: a server on the demo model, and its first client, who shows what it asks and what comes."""

from __future__ import annotations

import errno
import json
import logging
import shlex
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from octavo.server.run import serve
from octavo.settings import Settings

_ROUTE = "/v1/chat/completions"
_BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is a page table? Answer in two sentences."}],
    "max_tokens": 96,
    "temperature": 0,
    "stream": True,
}
_SECONDS = 300.0
"""That nothing may come for."""


def demo(settings: Settings, say: Callable[[str], None], *, check: bool) -> int:
    """Serve, ask, show the answer, and go on serving until a signal unless `check`; returns the exit status.

    `say` gets the text as it comes. A port that was not asked for and is in use gives way to one that is free.
    """
    if "port" not in settings.sources and _in_use(settings):
        say(f"==> Port {settings.port} is in use: taking one that is free\n")
        settings = settings.model_copy(update={"port": 0})

    def visit(url: str) -> bool:
        _ask(url, say, next(iter(settings.api_key), None))
        if not check:
            say(f"==> Chat with it, and look at its cache: {url}/ui\n")
            say(f"==> Every route, to try out:             {url}/docs\n")
            say("==> It serves until Ctrl-C\n")
        return not check

    say("==> Starting octavo serve demo\n")
    logging.getLogger("octavo.server.requests").setLevel(logging.WARNING)  # its lines would stand in the answer
    return serve(settings, visit)


def _in_use(settings: Settings) -> bool:
    """Is somebody at the address? What else speaks against it is told by the server."""
    try:
        socket.create_server((settings.host, settings.port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _ask(url: str, say: Callable[[str], None], key: str | None = None) -> None:
    """Stream a chat. Raises OSError where it is not answered as it should be."""
    body, headers = json.dumps(_BODY), {"Content-Type": "application/json"}
    connection = HTTPConnection(urlsplit(url).netloc, timeout=_SECONDS)
    try:
        connection.request("GET", "/health")
        health = connection.getresponse()
        health.read()
        if health.status != 200:
            raise OSError(f"{url}/health answers {health.status}")
        say(f"==> It is healthy. A chat:\n$ curl -N {url}{_ROUTE} \\\n    -H 'Content-Type: application/json' \\\n")
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
            say("    -H 'Authorization: Bearer YOUR-KEY' \\\n")
        say(f"    -d {shlex.quote(body)}\n\n")
        connection.request("POST", _ROUTE, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{url}{_ROUTE} answers {response.status}: {response.read().decode(errors='replace')}")
        texts = 0
        for text in _texts(response):
            say(text)
            texts += len(text)
        say("\n\n")
    finally:
        connection.close()
    if not texts:
        raise OSError(f"{url}{_ROUTE} answered with no text")


def _texts(lines: Iterator[bytes]) -> Iterator[str]:
    """The text of each event. Raises OSError for an error among them, or an end that is none."""
    for line in lines:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data: "):
            event = json.loads(data)
            if "error" in event:
                raise OSError(f"the answer broke off: {event['error']['message']}")
            yield from (choice["delta"].get("content") or "" for choice in event["choices"])
    raise OSError("the answer broke off")
