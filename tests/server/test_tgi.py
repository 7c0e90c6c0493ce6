"""TGI's routes: what the parameters do, what comes back, and in which headers."""

import json
import statistics
from typing import Any

import httpx
import pytest

from tests.checkpoints import EOS, byte_tokenizer
from tests.engine.harness import generate
from tests.server.live import Live

TOKENIZER = byte_tokenizer()
PROMPT = "A page table maps"


def ask(http: httpx.Client, route: str = "/generate", inputs: str = PROMPT, **parameters: Any) -> httpx.Response:
    response = http.post(route, json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    return response


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data:")) for line in response.text.splitlines() if line.startswith("data:")]


def expected(reference: Any, count: int, prompt: str = PROMPT) -> list[int]:
    return generate(reference, TOKENIZER.encode(prompt, add_special_tokens=False), count)


def test_the_best_of_several(http: httpx.Client) -> None:
    answer = ask(http, best_of=2, do_sample=True, max_new_tokens=8, details=True, top_n_tokens=1).json()
    details = answer["details"]
    (other,) = details["best_of_sequences"]

    def mean(tokens: list[dict[str, Any]]) -> float:
        return statistics.fmean(token["logprob"] for token in tokens)

    assert other["generated_text"] != answer["generated_text"]
    assert mean(details["tokens"]) >= mean(other["tokens"])
    assert [len(top) for top in other["top_tokens"]] == [1] * len(other["tokens"])
    assert details["seed"] is not None
    plain = ask(http, best_of=2, do_sample=True, max_new_tokens=8).json()
    assert plain.keys() == {"generated_text"}


def test_a_seed_is_told_and_repeats(http: httpx.Client) -> None:
    first = ask(http, do_sample=True, max_new_tokens=8, details=True).json()
    again = ask(http, do_sample=True, max_new_tokens=8, details=True, seed=first["details"]["seed"]).json()
    assert again == first
    assert ask(http, max_new_tokens=1, details=True).json()["details"]["seed"] is None
    (*_, last) = events(ask(http, "/generate_stream", temperature=1.0, max_new_tokens=8, details=True, seed=2**64 - 1))
    assert last["details"]["seed"] == 2**64 - 1


@pytest.mark.parametrize("parameters", [{"temperature": 1.0}, {"top_k": 200}, {"top_p": 0.99}, {"typical_p": 0.99}])
def test_what_implies_drawing(http: httpx.Client, reference: Any, parameters: dict[str, Any]) -> None:
    greedy = TOKENIZER.decode(expected(reference, 16))
    drawn = {ask(http, max_new_tokens=16, seed=seed, **parameters).json()["generated_text"] for seed in range(3)}
    assert len(drawn - {greedy}) >= 2
    assert ask(http, max_new_tokens=16).json()["generated_text"] == greedy


def test_without_parameters_tokens_are_drawn(http: httpx.Client) -> None:
    """Up to the server's limit: the prompt leaves room for 24."""
    answers = [http.post("/generate", json={"inputs": "a" * 1000}).json()["generated_text"] for _ in range(3)]
    assert len(set(answers)) > 1


def test_the_stop_text_stays(http: httpx.Client, reference: Any) -> None:
    whole = str(TOKENIZER.decode(expected(reference, 20)))
    stop = whole[6:8]
    until = whole[: whole.index(stop) + 2]
    answer = ask(http, max_new_tokens=20, stop=["never", stop], details=True).json()
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == (until, "stop_sequence")
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == until
    parts = events(ask(http, "/generate_stream", max_new_tokens=20, stop=[stop], details=True))
    assert "".join(part["token"]["text"] for part in parts) == until
    assert parts[-1]["generated_text"] == until
    assert parts[-1]["details"]["finish_reason"] == "stop_sequence"


@pytest.fixture
def ended(http: httpx.Client) -> tuple[int, Any]:
    """A seed with which an answer ends by itself, and the answer: drawn until one does."""
    for seed in range(400):
        answer = ask(http, inputs="count", do_sample=True, max_new_tokens=64, seed=seed, details=True).json()
        if answer["details"]["finish_reason"] == "eos_token" and answer["generated_text"]:
            return seed, answer
    pytest.fail("no end token came")


def test_the_end_token_is_special_and_no_text(ended: tuple[int, Any]) -> None:
    """Its name is told as its text, and is not in the answer."""
    _, answer = ended
    *others, last = answer["details"]["tokens"]
    assert (last["id"], last["text"], last["special"]) == (EOS, "<end>", True)
    assert answer["generated_text"] == TOKENIZER.decode([token["id"] for token in others], skip_special_tokens=True)


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_the_end_token_brings_what_was_held_back(http: httpx.Client, ended: tuple[int, Any], route: str) -> None:
    """The beginning of a stop text that never came: clients put an answer together from tokens that are not special."""
    seed, answer = ended
    text = answer["generated_text"]
    response = ask(
        http, route, inputs="count", do_sample=True, max_new_tokens=64, seed=seed, details=True, stop=[text[-1] + "?!"]
    )
    if route == "/generate":
        tokens, said = response.json()["details"]["tokens"], response.json()["generated_text"]
    else:
        parts = events(response)
        tokens, said = [part["token"] for part in parts], parts[-1]["generated_text"]
    assert said == text
    assert "".join(token["text"] for token in tokens if not token["special"]) == text
    assert (tokens[-1]["id"], tokens[-1]["text"], tokens[-1]["special"]) == (EOS, text[-1], False)


def test_the_prompt_in_front(http: httpx.Client) -> None:
    bare = ask(http, max_new_tokens=4).json()["generated_text"]
    assert ask(http, max_new_tokens=4, return_full_text=True).json()["generated_text"] == PROMPT + bare
    assert ask(http, "/", max_new_tokens=4).json() == [{"generated_text": PROMPT + bare}]
    assert ask(http, "/", max_new_tokens=4, return_full_text=False).json() == [{"generated_text": bare}]
    parts = events(ask(http, "/generate_stream", max_new_tokens=4, return_full_text=True))
    assert parts[-1]["generated_text"] == PROMPT + bare
    streamed = http.post("/", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 4}, "stream": True})
    assert [part["token"]["id"] for part in events(streamed)] == [part["token"]["id"] for part in parts]


def test_the_last_tokens_are_kept(http: httpx.Client, reference: Any) -> None:
    answer = ask(http, truncate=5, max_new_tokens=6, details=True, decoder_input_details=True).json()
    assert [token["text"] for token in answer["details"]["prefill"]] == list(PROMPT[-5:])
    assert [token["id"] for token in answer["details"]["tokens"]] == expected(reference, 6, PROMPT[-5:])


def test_prefill_has_the_prompts_probabilities(http: httpx.Client) -> None:
    """And is given although the cache knows the prompt."""
    ask(http, max_new_tokens=1)
    response = ask(http, max_new_tokens=1, decoder_input_details=True)
    prefill = response.json()["details"]["prefill"]
    assert [token["text"] for token in prefill] == list(PROMPT)
    assert prefill[0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in prefill[1:])
    assert response.headers["x-cached-tokens"] == "0"


def test_headers(http: httpx.Client, server: Live) -> None:
    headers = ask(http, max_new_tokens=5).headers
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("cpu", str(len(PROMPT)))
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == (str(len(PROMPT)), "5")
    times = {name: float(headers[f"x-{name}"]) for name in ("total-time", "validation-time", "inference-time")}
    assert all(value > 0 for value in times.values())
    parts = times["validation-time"] + times["inference-time"] + float(headers["x-queue-time"])
    assert parts == pytest.approx(times["total-time"], abs=0.01)
    assert float(headers["x-time-per-token"]) == pytest.approx(times["inference-time"] / 5, abs=0.01)
    assert float(headers["x-compute-time"]) == pytest.approx(times["total-time"] / 1000, abs=0.001)
    streamed = ask(http, "/generate_stream", max_new_tokens=1).headers
    assert (streamed["x-compute-type"], streamed["x-accel-buffering"]) == ("cpu", "no")


def test_hits_are_told(http: httpx.Client) -> None:
    prompt = "nobody has asked this before, at least not here"
    assert [ask(http, inputs=prompt, max_new_tokens=1).headers["x-cached-tokens"] for _ in range(2)] == [
        "0", str(len(prompt) - 1),
    ]  # fmt: skip


def test_penalties_change_the_answer(http: httpx.Client) -> None:
    plain = ask(http, max_new_tokens=32).json()
    assert ask(http, max_new_tokens=32, repetition_penalty=5.0).json() != plain
    assert ask(http, max_new_tokens=32, frequency_penalty=2.0).json() != plain
    assert ask(http, max_new_tokens=32, repetition_penalty=1.0, frequency_penalty=0.0, watermark=False).json() == plain
