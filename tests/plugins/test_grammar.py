"""Grammars in the engine. What a model of random weights samples must fit: jsonschema and re say whether it does."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch

import octavo_grammar.plugin
import octavo_reference.plugin
from octavo import LLM, SamplingParams
from octavo.engine.scheduler import RequestRefused
from octavo.grammar import MOST_BYTES, Grammar, JsonObject, JsonSchema, Regex, Tool, ToolCalls
from octavo.hooks import GrammarRefused
from octavo.plugins import Plugins
from octavo_grammar.processor import GrammarProcessor, processor
from tests import checkpoints
from tests.distributions import plugins_of

TOKENIZER = checkpoints.byte_tokenizer()
ENDS = frozenset({checkpoints.EOS})
PROMPT = list(b"A page table maps")
SCHEMAS: dict[str, Any] = {
    "scalars": {
        "type": "object",
        "properties": {
            "flag": {"type": "boolean"},
            "kind": {"enum": ["free", "held", None, 7]},
            "share": {"type": "integer", "minimum": -5, "maximum": 120},
            "name": {"type": "string", "maxLength": 6},
        },
        "required": ["flag", "kind", "share"],
        "additionalProperties": False,
    },
    "references": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 1, "maxItems": 2},
                },
                "required": ["id", "children"],
                "additionalProperties": False,
            },
            "leaf": {"anyOf": [{"type": "null"}, {"const": "leaf"}]},
        },
        "$ref": "#/$defs/node",
    },
    "formats": {
        "type": "array",
        "prefixItems": [{"type": "string", "format": "date"}, {"type": "string", "format": "uuid"}],
        "minItems": 2,
        "items": False,
    },
    "one of two": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": value}}, "required": ["k"], "additionalProperties": False}
            for value in ("a", "b")
        ]
    },
}
PATTERNS = [r"\d{4}-(0\d|1[0-2])", r"(yes|no|[^\x00-\x7f]{2})\n?", r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)", r"^/a/$"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return plugins_of(octavo_grammar.plugin)


def load(folder: Path, **settings: Any) -> LLM:
    chosen: dict[str, Any] = {
        "attention": "reference",
        "device": "cpu",
        "max_batch_total_tokens": 8192,
        "compile": False,
    }
    return LLM(
        folder, plugins=plugins_of(octavo_reference.plugin, octavo_grammar.plugin), progress=False, **chosen | settings
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder)


def sampled(grammar: Grammar | None, **others: Any) -> SamplingParams:
    return SamplingParams(**{"grammar": grammar, "max_tokens": 600, "seed": 1} | others)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("given", ["a mapping", "a text"])
def test_json_fits_its_schema(llm: LLM, name: str, given: str) -> None:
    schema = SCHEMAS[name]
    grammar = JsonSchema(schema if given == "a mapping" else json.dumps(schema))
    (output,) = llm.generate([PROMPT], sampled(grammar, n=4), progress=False)
    assert len({completion.text for completion in output.completions}) > 1
    for completion in output.completions:
        assert completion.finish_reason == "eos"
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
            json.loads(completion.text)
        )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_text_matches_its_pattern(llm: LLM, pattern: str) -> None:
    for temperature, top_p in ((1.0, 1.0), (2.0, 0.5)):
        params = sampled(Regex(pattern), n=4, best_of=6, temperature=temperature, top_p=top_p, logprobs=1)
        (output,) = llm.generate([PROMPT], params, progress=False)
        for completion in output.completions:
            assert completion.finish_reason == "eos"
            assert re.fullmatch(pattern, completion.text)
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)


def test_any_object(llm: LLM) -> None:
    (output,) = llm.generate([PROMPT], sampled(JsonObject(), n=4, max_tokens=900), progress=False)
    ended = [completion for completion in output.completions if completion.finish_reason == "eos"]
    assert ended
    for completion in ended:
        assert isinstance(json.loads(completion.text), dict)


def test_an_answer_that_is_cut_off_is_a_beginning(llm: LLM) -> None:
    whole, cut = (
        llm.generate([PROMPT], sampled(JsonSchema(SCHEMAS["scalars"]), **limit), progress=False)[0].completions[0]
        for limit in ({}, {"max_tokens": 5})
    )
    assert cut.finish_reason == "length"
    assert cut.token_ids == whole.token_ids[:5]


def test_preempted_requests_go_on_where_they_were(folder: Path, llm: LLM) -> None:
    params = [sampled(JsonSchema(SCHEMAS["scalars"]), seed=seed) for seed in range(4)]
    expected = llm.generate([PROMPT] * 4, params, progress=False)
    tight = load(folder, max_batch_total_tokens=160, block_size=16, max_total_tokens=160)
    found = tight.generate(
        [PROMPT] * 4, [sampled(one.grammar, seed=one.seed, max_tokens=140) for one in params], progress=False
    )
    assert tight.engine.scheduler.preemptions > 0
    for one, other in zip(found, expected, strict=True):
        assert one.completions[0].token_ids == other.completions[0].token_ids[:140]


def test_neighbours_are_left_alone(llm: LLM) -> None:
    params = [
        sampled(JsonSchema(SCHEMAS["references"]), seed=3),
        sampled(None, seed=4, max_tokens=40),
        sampled(Regex(PATTERNS[2]), seed=5),
        sampled(None, temperature=0, max_tokens=40),
    ]
    together = llm.generate([PROMPT] * 4, params, progress=False)
    for one, output in zip(params, together, strict=True):
        (alone,) = llm.generate([PROMPT], one, progress=False)
        assert output.completions[0].token_ids == alone.completions[0].token_ids


def test_stop_tokens_end_where_the_grammar_may(llm: LLM) -> None:
    """One that the grammar does not know comes where the text may end, however likely it is before."""
    a, b = (TOKENIZER.encode(letter)[-1] for letter in "ab")
    for pattern, expected in (("a{3,5}", [a, a, a, b]), ("ab?a", [a, b])):
        params = sampled(Regex(pattern), stop_token_ids=[b], logit_bias={b: 100})
        (output,) = llm.generate([PROMPT], params, progress=False)
        assert output.completions[0].token_ids == expected
        assert output.completions[0].finish_reason == "eos"


def test_a_stop_text_cuts_as_ever(llm: LLM) -> None:
    (output,) = llm.generate([PROMPT], sampled(Regex("abc"), stop="b"), progress=False)
    assert (output.completions[0].text, output.completions[0].finish_reason) == ("a", "stop")


@pytest.mark.parametrize("field", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_what_does_not_go_with_a_grammar(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(field))}=.* does not go with grammar"):
        SamplingParams(grammar=JsonObject(), **field)


def allowed(one: GrammarProcessor, output_ids: list[int]) -> list[int]:
    logits = one(output_ids, torch.zeros(checkpoints.VOCABULARY))
    return torch.isfinite(logits).nonzero().flatten().tolist()


def test_a_processor_may_be_behind_or_ahead() -> None:
    """It is asked for any beginning of its sequence, in any order, and answers as a new one that has seen nothing."""
    text = json.dumps({"flag": True, "kind": "held", "share": 12})
    ids = TOKENIZER.encode(text)
    grammar = JsonSchema(SCHEMAS["scalars"])
    old = processor(grammar, TOKENIZER, ENDS, frozenset())
    lengths = [*range(len(ids) + 1)] * 2
    random.Random(5).shuffle(lengths)
    for length in lengths:
        new = processor(grammar, TOKENIZER, ENDS, frozenset())
        assert allowed(old, ids[:length]) == allowed(new, ids[:length])
        assert ids[length : length + 1] == [] or ids[length] in allowed(old, ids[:length])
        assert (checkpoints.EOS in allowed(old, ids[:length])) == (length == len(ids))


CALL = '<tool_call>\n{"name": "find", "arguments": {"block": 7}}\n</tool_call>'
FIND = Tool("find", {"type": "object", "properties": {"block": {"type": "integer"}}, "required": ["block"]})


@pytest.mark.parametrize(
    ("text", "required", "parallel", "taken"),
    [
        ("I see.", False, True, True),
        ("1 < 2, and <tool_cal", False, True, True),
        ("I look. " + CALL, False, True, True),
        (f"{CALL}\n{CALL}", False, True, True),
        (f"{CALL}\n{CALL}", False, False, False),
        (CALL + " Done.", False, True, False),
        ("<tool_call>find", False, True, False),
        (CALL.replace("7", '"7"'), False, True, False),
        (CALL.replace("find", "evict"), False, True, False),
        (CALL, True, False, True),
        (f"{CALL}\n{CALL}", True, True, True),
        ("I look. " + CALL, True, True, False),
        ("", True, True, False),
    ],
)
def test_calls_of_tools(text: str, required: bool, parallel: bool, taken: bool) -> None:
    """A text is taken if each of its tokens may come, and then the end."""
    one = processor(ToolCalls((FIND,), required, parallel), TOKENIZER, ENDS, frozenset())
    ids = [*TOKENIZER.encode(text), checkpoints.EOS] if text else [checkpoints.EOS]
    assert all(token in allowed(one, ids[:place]) for place, token in enumerate(ids)) == taken or not taken
    if not taken:
        fits = 0
        fresh = processor(ToolCalls((FIND,), required, parallel), TOKENIZER, ENDS, frozenset())
        while fits < len(ids) and ids[fits] in allowed(fresh, ids[:fits]):
            fits += 1
        assert fits < len(ids)


REFUSED: list[tuple[Any, str]] = [
    (lambda: Regex("(?=a)b"), "look-around"),
    (lambda: Regex(r"(a)\1"), "backreferences"),
    (lambda: Regex("("), "unclosed group"),
    (lambda: Regex("(" * 3000 + "a" + ")" * 3000), "nest"),
    (lambda: Regex("a" * (MOST_BYTES + 1)), f"at most {MOST_BYTES}"),
    (lambda: Regex("\ud800"), "surrogate"),
    (lambda: JsonSchema({"type": "nonsense"}), "nonsense"),
    (lambda: JsonSchema({"not": {"type": "string"}}), "not"),
    (lambda: JsonSchema({"not": {"type": "string"}, "x-guidance": {"lenient": True}}), "not"),
    (lambda: JsonSchema({"oneOf": [{"type": "string"}, {"maxLength": 3}]}), "oneOf"),
    (lambda: JsonSchema({"$ref": "#"}), "nothing matches"),
    (lambda: JsonSchema({"$ref": "file:///etc/passwd"}), "not present"),
    (lambda: JsonSchema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    (lambda: JsonSchema('{"items":' * 5000 + "{}" + "}" * 5000), "too deeply|bytes"),  # by how deep Python goes
    (lambda: JsonSchema({"enum": ["x" * MOST_BYTES]}), f"at most {MOST_BYTES}"),
    (lambda: JsonSchema({"type": "object", "properties": {f"p{i}": {} for i in range(2400)}}), "too big"),
    (lambda: JsonSchema({"const": float("nan")}), "JSON"),
    (lambda: JsonSchema("[]"), "no JSON object"),
    (lambda: JsonSchema("{"), "cannot be read"),
    (lambda: JsonSchema("false"), "no JSON object"),
    (lambda: ToolCalls((Tool("f", {"type": "object", "properties": 3}),)), "properties"),
    (lambda: ToolCalls(()), "at least one"),
]


@pytest.mark.parametrize(("grammar", "reason"), REFUSED)
def test_refused_with_the_reason(grammar: Any, reason: str, plugins: Plugins) -> None:
    with pytest.raises(ValueError, match=reason):
        plugins.logits_processors(SamplingParams(grammar=grammar()), TOKENIZER, ENDS)
    assert not plugins.faults


def test_a_request_is_refused_and_others_run(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match="prompt 1: grammar is not valid"):
        llm.generate([PROMPT] * 2, [sampled(None), sampled(Regex("("))], progress=False)
    assert not llm.engine.busy
    endless = load(checkpoints.counting_model(tmp_path))
    with pytest.raises(RequestRefused, match="no end-of-sequence token"):
        endless.generate([[1, 2]], sampled(Regex("1")), progress=False)


def test_without_the_plugin_or_its_library(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(grammar=JsonObject())
    with pytest.raises(GrammarRefused, match=r"pip install 'octavo\[grammar\]'"):
        plugins_of().logits_processors(params, TOKENIZER, ENDS)
    monkeypatch.setattr(octavo_grammar.plugin, "find_spec", lambda name: None)
    with pytest.raises(GrammarRefused, match=r"needs? llguidance.* pip install 'octavo\[grammar\]'"):
        plugins.logits_processors(params, TOKENIZER, ENDS)
