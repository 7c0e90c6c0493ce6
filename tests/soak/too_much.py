"""Requests that cannot be, each with the status and a word of the message that it must get."""

from __future__ import annotations

from typing import Any

from tests.soak.served import PAYLOAD_LIMIT, PLACES, TOTAL_TOKENS

TOO_MUCH: list[tuple[str, Any, int, str]] = [
    ("/generate", {"inputs": "a" * (TOTAL_TOKENS + 9)}, 422, "`inputs`"),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": TOTAL_TOKENS}}, 422, "`max_new_tokens`"),
    ("/generate_stream", {"inputs": "a" * PAYLOAD_LIMIT}, 413, "payload_limit"),
    ("/v1/completions", {"prompt": ["a"] * 5}, 422, "`prompt`"),
    ("/v1/completions", {"prompt": "a", "n": PLACES + 1}, 422, "`n`"),
    ("/v1/completions", {"prompt": "a", "best_of": 3}, 422, "`best_of`"),
    ("/v1/completions", {"prompt": [999]}, 422, "999"),
    ("/v1/chat/completions", {"messages": [{"role": "u", "content": "a"}], "stop": ["a"] * 9}, 422, "`stop`"),
    ("/generate", b'{"inputs": "a",}', 400, "not JSON"),
    ("/generate", b"[" * 10_000, 400, "not JSON"),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 422, "`prompt`"),
    ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', 422, "`temperature`"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 422, "`max_tokens`"),
    ("/tokenize", {"inputs": 1}, 422, "`inputs`"),
    ("/nowhere", {}, 404, "/nowhere"),
]
