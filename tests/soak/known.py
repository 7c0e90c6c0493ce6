"""Requests whose answers are known: each was answered once by a server that nobody disturbed."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tests.soak.http import Connection, Response
from tests.soak.served import KEYS, Served

CLEAR = 1e-2
"""By so much the likeliest token leads at every place: batches round differently, and must not decide."""
MOST_TOKENS = 160
WORDS = ("page", "table", "block", "slot", "prefix", "tree", "cache", "key", "value", "token", "head", "layer", "step")


@dataclass
class Known:
    """A greedy request."""

    path: str
    body: dict[str, Any]
    text: str = ""

    def asked(self, *, stream: bool) -> tuple[str, dict[str, Any]]:
        """Where to, and with which body."""
        if self.path == "/generate":
            return ("/generate_stream" if stream else self.path), self.body
        return self.path, self.body | {"stream": stream}


def draw(chance: random.Random) -> Known:
    """One more, short or long, of one of three routes; many begin alike."""
    prompt = " ".join(
        chance.choices(WORDS[:3], k=chance.randrange(1, 12)) + chance.choices(WORDS, k=chance.randrange(12))
    )
    tokens = chance.choice([1, 5, 20, 60, MOST_TOKENS])
    match chance.randrange(3):
        case 0:
            return Known("/generate", {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "details": True}})
        case 1:
            return Known("/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0})
    messages = [{"role": "user", "content": prompt}]
    return Known("/v1/chat/completions", {"messages": messages, "max_tokens": tokens, "temperature": 0})


async def learn(server: Served, chance: random.Random, wanted: int) -> list[Known]:
    """So many, those left out whose likeliest tokens are close to each other."""
    found: list[Known] = []
    while len(found) < wanted:
        one = draw(chance)
        async with Connection(server.port, KEYS[0]) as connection:
            await connection.ask("POST", *_with_rivals(one))
            response = await connection.response()
            assert response.status == 200, await response.whole()
            one.text, leads = await _read(one, response)
        if min(leads) > CLEAR:
            found.append(one)
    return found


def _with_rivals(one: Known) -> tuple[str, dict[str, Any]]:
    """With the two likeliest tokens of each place."""
    if one.path == "/generate":
        parameters = one.body["parameters"] | {"top_n_tokens": 2}
        return one.path, one.body | {"parameters": parameters}
    if one.path == "/v1/completions":
        return one.path, one.body | {"logprobs": 2}
    return one.path, one.body | {"logprobs": True, "top_logprobs": 2}


async def _read(one: Known, response: Response) -> tuple[str, list[float]]:
    answer = json.loads(await response.whole())
    if one.path == "/generate":
        tops = [[token["logprob"] for token in top] for top in answer["details"]["top_tokens"]]
        return answer["generated_text"], [top[0] - top[1] for top in tops]
    choice = answer["choices"][0]
    if one.path == "/v1/completions":
        tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        # Two bytes that are no characters have one name: then the lead is not known.
        return choice["text"], [top[0] - top[1] if len(top) > 1 else 0.0 for top in tops]
    tops = [[top["logprob"] for top in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
    return choice["message"]["content"], [top[0] - top[1] for top in tops]


async def texts(events: AsyncIterator[Any]) -> AsyncIterator[str]:
    """What each event of a stream adds. Raises Told for one that is an error."""
    async for event in events:
        if event is None:
            continue
        if "error" in event:
            error = event["error"]
            raise Told(error["code"] if isinstance(error, dict) else event["error_type"])
        if "token" in event:
            yield event["token"]["text"] if not event["token"]["special"] else ""
            continue
        for choice in event["choices"]:
            yield choice["text"] if "text" in choice else choice["delta"].get("content", "")


class Told(Exception):
    """A stream ended with an error, of this kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def number(chance: random.Random) -> float:
    """One of a thousand, of many digits. A tokenizer keeps the words that it has split, up to 10,000 in each thread.

    To this one each text is a word: new ones without end would take half an hour to show that they are kept no longer.
    """
    return chance.randrange(1, 1000) / 7
