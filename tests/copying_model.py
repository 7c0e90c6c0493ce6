"""A model that repeats its prompt, for dtypes of 16 bits: it reads the next token from the cache, by a wide margin."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests import checkpoints

VOCABULARY = 256
BEGIN = 0
"""Stands before a prompt, and nowhere else."""
_THETA = 1e8
_CLOSE = 0.4
"""Of a code's own product with itself: codes of two tokens have at most that much in common."""
_SHARP = 15.0
"""By how much the key that is looked for scores above all others."""
_MARGIN = 10.0
"""Between the logit of the next token and the others', when attention is exact."""


def copying_model(folder: Path, head_size: int, group: int) -> Path:
    """Save a Llama that continues a run of tokens, which began anew, as it went the first time.

    It is an induction head, written down (arXiv 2209.11895). In the first layer a token looks at the one before it:
    queries and keys are constants, and rotary positions make the key one back the best. In the second it looks for the
    key whose token before was the token itself, by a code for each token in dimensions that hardly rotate, and takes
    that key's token. So each answer comes from the one key of the whole context that holds it.
    """
    key_heads = VOCABULARY // head_size
    model = checkpoints.build(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=3 * VOCABULARY + 16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=key_heads * group,
        num_key_value_heads=key_heads,
        head_dim=head_size,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.no_grad():
        _write_weights(model, head_size, group)
    return checkpoints.save(model, checkpoints.number_tokenizer(VOCABULARY), folder)


def continuation(prompt: Sequence[int], tokens: int) -> list[int]:
    """What it is to say: behind each token what stood behind it the last time."""
    said = list(prompt)
    for _ in range(tokens):
        last = max(place for place, token in enumerate(said[:-1]) if token == said[-1])
        said.append(said[last + 1])
    return said[len(prompt) :]


def _write_weights(model: PreTrainedModel, head_size: int, group: int) -> None:
    """The stream holds the token, the one before it, the answer, each one-hot, and a one."""
    own, before, answer = (slice(part * VOCABULARY, (part + 1) * VOCABULARY) for part in range(3))
    one, hidden = 3 * VOCABULARY, 3 * VOCABULARY + 16
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    one_hot = torch.eye(VOCABULARY)
    embedding = model.get_parameter("model.embed_tokens.weight")
    embedding[:, own], embedding[:, one] = one_hot, 1.0
    steady, codes = _codes(head_size)
    queries, keys = _one_back(head_size, steady)
    for layer, parts in ((0, 2), (1, 3)):
        query, key, value, out = (
            model.get_parameter(f"model.layers.{layer}.self_attn.{name}_proj.weight") for name in "qkvo"
        )
        unit = (parts / hidden) ** 0.5  # undoes the norm's scale
        heads = len(query) // head_size
        if layer == 0:
            query[:, one], key[:, one] = unit * queries.repeat(heads), unit * keys.repeat(heads // group)
        else:
            amplitude = (_SHARP * head_size**0.5 / (len(steady) * (1 - _CLOSE))) ** 0.5
            for head in range(heads):
                query[head * head_size + steady, own] = unit * amplitude * codes.T
            for head in range(heads // group):
                key[head * head_size + steady, before] = unit * amplitude * codes.T
        value[:, own] = unit * one_hot
        grouped = one_hot.view(VOCABULARY, -1, 1, head_size).expand(-1, -1, group, -1).flatten(1) / group
        out[before if layer == 0 else answer] = grouped
    model.get_parameter("lm_head.weight")[:, answer] = _MARGIN * (4 / hidden) ** 0.5 * one_hot


def _angles(head_size: int) -> Tensor:
    """Of each pair of dimensions, from one position to the next."""
    return _THETA ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)


def _one_back(head_size: int, steady: Tensor) -> tuple[Tensor, Tensor]:
    """A query and a key [head_size] in pairs that rotate: their product is largest one position back."""
    pairs = head_size // 2 - len(steady) // 2
    angles = _angles(head_size)[:pairs]
    query, key = torch.zeros(2, head_size, dtype=torch.float64)
    query[:pairs], query[head_size // 2 :][:pairs], key[:pairs] = angles.cos(), -angles.sin(), 1.0
    distance = torch.arange(1, 1024)[:, None]
    products = torch.cat([angles.cos().sum()[None], (distance * angles).cos().sum(-1)])  # from where it is best
    amplitude = (_SHARP * head_size**0.5 / (pairs - products.max())) ** 0.5
    return (query * amplitude).float(), (key * amplitude).float()


def _codes(head_size: int) -> tuple[Tensor, Tensor]:
    """Dimensions [n] of the slower half of pairs, which hardly rotate, and each token's signs there [vocabulary, n]."""
    half = head_size // 2
    steady = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, head_size)])
    chance = torch.Generator().manual_seed(0)
    codes = torch.empty(0, len(steady))
    while len(codes) < VOCABULARY:
        for drawn in torch.randn(1024, len(steady), generator=chance).sign():
            if len(codes) < VOCABULARY and not (codes @ drawn > _CLOSE * len(steady)).any():
                codes = torch.cat([codes, drawn[None]])
    return steady, codes
