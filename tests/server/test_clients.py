"""The clients that people have, unmodified: huggingface_hub, openai, and one that reads byte by byte."""

import json
import socket
import statistics
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import torch
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from tests.checkpoints import EOS, byte_tokenizer
from tests.engine.harness import generate
from tests.server.live import Live

TOKENIZER = byte_tokenizer()
PROMPT = "A page table maps"
CHAT: Any = [{"role": "user", "content": "Where is block 7?"}]
TEMPLATED = "user: Where is block 7?\nassistant:"


@pytest.fixture
def hub(server: Live, http: httpx.Client) -> InferenceClient:
    return InferenceClient(server.url)


@pytest.fixture
def client(server: Live, http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def greedy(reference: Any, text: str, count: int) -> list[int]:
    """What transformers answers."""
    return generate(reference, TOKENIZER.encode(text, add_special_tokens=False), count)


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def log_probabilities(reference: Any, ids: list[int]) -> list[float]:
    """Of each token behind the first, as transformers has them."""
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0, :-1]
    chosen: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return chosen


def test_hub_text_generation(hub: InferenceClient, reference: Any) -> None:
    expected = text_of(greedy(reference, PROMPT, 12))
    assert hub.text_generation(PROMPT, max_new_tokens=12, return_full_text=False) == expected
    assert hub.text_generation(PROMPT, max_new_tokens=12) == PROMPT + expected  # the default of the route `/`


def test_hub_text_generation_with_details(hub: InferenceClient, reference: Any) -> None:
    expected = greedy(reference, PROMPT, 12)
    answer = hub.text_generation(
        PROMPT, max_new_tokens=12, details=True, decoder_input_details=True, top_n_tokens=2, return_full_text=True
    )
    assert answer.generated_text == PROMPT + text_of(expected)
    details = answer.details
    assert details is not None
    assert [token.id for token in details.tokens] == expected
    assert "".join(token.text for token in details.tokens if not token.special) == text_of(expected)
    assert [token.id for token in details.prefill] == TOKENIZER.encode(PROMPT, add_special_tokens=False)
    assert (details.finish_reason, details.generated_tokens) == ("length", 12)
    assert details.top_tokens is not None
    likeliest: Any = [top[0] for top in details.top_tokens]  # the client leaves them as the JSON has them
    assert [token["id"] for token in likeliest] == expected
    assert {len(top) for top in details.top_tokens} == {2}


def test_hub_text_generation_streams(hub: InferenceClient, reference: Any) -> None:
    expected = greedy(reference, PROMPT, 12)
    parts = list(hub.text_generation(PROMPT, max_new_tokens=12, stream=True, details=True))
    assert [part.token.id for part in parts] == expected
    assert [part.index for part in parts] == list(range(1, 13))
    assert [part.generated_text for part in parts] == [None] * 11 + [text_of(expected)]
    last = parts[-1].details
    assert last is not None
    assert (last.finish_reason, last.generated_tokens, last.input_length) == ("length", 12, len(PROMPT))
    assert "".join(hub.text_generation(PROMPT, max_new_tokens=12, stream=True)) == text_of(expected)


def test_hub_raises_its_own_error_for_ours(hub: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="`inputs` tokens"):
        hub.text_generation(PROMPT, max_new_tokens=100_000)


def test_hub_chat(hub: InferenceClient, reference: Any) -> None:
    expected = text_of(greedy(reference, TEMPLATED, 10))
    answer = hub.chat_completion(CHAT, max_tokens=10, temperature=0)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 10
    chunks = list(hub.chat_completion(CHAT, max_tokens=10, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_openai_chat(client: openai.OpenAI, reference: Any) -> None:
    expected = greedy(reference, TEMPLATED, 10)
    answer = client.chat.completions.create(
        model="whatever", messages=CHAT, max_tokens=10, temperature=0, logprobs=True, top_logprobs=2
    )  # fmt: skip
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (text_of(expected), "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for token, id in zip(choice.logprobs.content, expected, strict=True):
        assert token.token == TOKENIZER.decode([id])
        assert token.bytes in (None, list(token.token.encode()))
        assert len(token.top_logprobs) == 2
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(TEMPLATED), 10)
    again = client.chat.completions.create(model="octavo", messages=CHAT, max_tokens=1)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == len(TEMPLATED) - 1


def test_openai_chat_streams(client: openai.OpenAI, reference: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model="octavo", messages=CHAT, max_completion_tokens=10, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text_of(greedy(reference, TEMPLATED, 10))
    assert [part.choices[0].delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert not last.choices
    assert last.usage is not None
    assert last.usage.total_tokens == len(TEMPLATED) + 10


def test_openai_chat_gives_n_answers(client: openai.OpenAI) -> None:
    ask: Any = {"model": "octavo", "messages": CHAT, "max_tokens": 6, "seed": 5, "n": 2}
    answer = client.chat.completions.create(**ask)
    first, second = (choice.message.content for choice in answer.choices)
    assert first != second
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: first, 1: second}


def test_openai_completions(client: openai.OpenAI, reference: Any) -> None:
    prompts = [PROMPT, "Blocks are"]
    expected = [text_of(greedy(reference, prompt, 8)) for prompt in prompts]
    ask: Any = {"model": "octavo", "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(prompt=prompts, **ask)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(prompt=prompts, stream=True, **ask):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[0], texts[1]] == expected
    ids = TOKENIZER.encode(PROMPT, add_special_tokens=False)
    assert client.completions.create(prompt=ids, **ask).choices[0].text == expected[0]
    assert client.completions.create(prompt=[ids], echo=True, **ask).choices[0].text == PROMPT + expected[0]


def test_openai_completions_with_logprobs_and_echo(client: openai.OpenAI, reference: Any) -> None:
    expected = greedy(reference, PROMPT, 4)
    answer = client.completions.create(
        model="octavo", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=1, echo=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    ids = TOKENIZER.encode(PROMPT, add_special_tokens=False) + expected
    assert logprobs.tokens == [TOKENIZER.decode([id]) for id in ids]
    first, *others = list[Any](logprobs.token_logprobs or [])  # the client's types know no echo
    assert first is None
    assert others == [pytest.approx(value, abs=1e-4) for value in log_probabilities(reference, ids)]


def test_openai_returns_the_best_of_several(client: openai.OpenAI) -> None:
    """All of them are paid for; the one returned is the likeliest of those that the seed gives."""
    ask: Any = {"model": "octavo", "prompt": PROMPT, "max_tokens": 8, "seed": 3, "logprobs": 0}
    answer = client.completions.create(best_of=2, **ask)
    (best,) = answer.choices
    assert answer.usage is not None
    assert 8 < answer.usage.completion_tokens <= 16
    both = client.completions.create(n=2, **ask).choices
    means = {choice.text: mean(choice.logprobs) for choice in both}
    assert best.text == max(means, key=means.__getitem__)


def mean(logprobs: Any) -> float:
    return statistics.fmean(logprobs.token_logprobs)


def test_openai_stops_in_front_of_the_text(client: openai.OpenAI, reference: Any) -> None:
    whole = text_of(greedy(reference, PROMPT, 20))
    stop = whole[6:8]
    ask: Any = {"model": "octavo", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    for given in (stop, ["never seen", stop]):
        (choice,) = client.completions.create(stop=given, **ask).choices
        assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_openai_bias_and_seed(client: openai.OpenAI) -> None:
    ask: Any = {"model": "octavo", "prompt": PROMPT, "max_tokens": 6}
    forced = client.completions.create(logit_bias={str(TOKENIZER.encode("A")[-1]): 100}, **ask).choices[0].text
    assert forced == "A" * 6
    drawn = [client.completions.create(seed=seed, **ask).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_end_of_sequence_may_be_passed_over(client: openai.OpenAI) -> None:
    """The bias leaves nothing but ends to choose."""
    wanted: Any = {"model": "any", "prompt": PROMPT, "max_tokens": 5, "logit_bias": {str(EOS): 100}}
    for more, tokens, reason in ({}, 1, "stop"), ({"ignore_eos": True}, 5, "length"):
        answer = client.completions.create(**wanted, extra_body=more)
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (tokens, reason)


def test_openai_models(client: openai.OpenAI, server: Live) -> None:
    assert [model.id for model in client.models.list()] == [server.service.model]


def test_events_read_byte_by_byte(server: Live, http: httpx.Client, reference: Any) -> None:
    """Each event is `data: JSON` and an empty line; a chat's stream ends with [DONE], and the connection lives on."""
    expected = text_of(greedy(reference, TEMPLATED, 6))
    body = json.dumps({"messages": CHAT, "max_tokens": 6, "temperature": 0, "stream": True}).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), 120) as connection:
        for _ in range(2):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += connection.recv(1)
            head_bytes, _, chunked = received.partition(b"\r\n\r\n")
            assert b"content-type: text/event-stream" in head_bytes
            events = dechunked(chunked).split(b"\n\n")
            assert [event[:6] for event in events[:-1]] == [b"data: "] * (len(events) - 1)
            assert events[-2:] == [b"data: [DONE]", b""]
            deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events[:-2]]
            assert "".join(delta.get("content", "") for delta in deltas) == expected


def dechunked(data: bytes) -> bytes:
    """The body of a chunked transfer; each chunk holds whole events: one write an event."""
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        chunk, data = rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        assert chunk == b"" or chunk.endswith(b"\n\n")
        body += chunk
    return body
