"""The backend computes attention, and its shapes are few."""

import torch

from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.attention.device import CPU
from octavo.conformance import Suite
from octavo_example.backend import ExampleBackend, Lists
from octavo_example.plugin import octavo_attention_backends


class TestExample(Suite):
    """Every trial that follows from what it declares."""

    backend = ExampleBackend


def test_octavo_is_offered_it() -> None:
    assert octavo_attention_backends() == [ExampleBackend]


def planned(*rows: tuple[int, int]) -> list[Lists]:
    """The plan of rows with these contexts, the last tokens of which are new; a row has the blocks 1, 2, 3, ..."""
    contexts, new = zip(*rows, strict=True)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, *new]).cumsum(0).int(),
        context_lengths=torch.tensor(contexts).int(),
        block_table=torch.arange(1, 10).repeat(len(rows), 1).int(),
        slots=torch.zeros(sum(new), dtype=torch.int64),  # it looks at their number alone
        max_query=max(new),
        max_context=max(contexts),
        decodes=new.count(1),
    )
    floats = torch.float32
    spec = AttentionSpec(layers=1, heads=4, kv_heads=2, head_size=64, scale=0.125, dtype=floats, kv_dtype=floats)
    return ExampleBackend(spec, 128, CPU()).plan(batch)


def test_rows_that_decode_are_one_list() -> None:
    (lists,) = planned((130, 1), (5, 1), (300, 1))
    assert lists.blocks.tolist() == [1, 2, 1, 1, 2, 3, 0, 0]
    assert lists.owners.tolist() == [0, 0, 1, 2, 2, 2, 0, 0]
    assert lists.tokens.flatten().tolist() == [0, 1, 2, 3]
    assert lists.visible.sum((1, 2)).tolist() == [128, 2, 5, 128, 128, 44, 0, 0]


def test_the_block_of_the_next_token_is_listed_already() -> None:
    (lists,) = planned((128, 1))
    assert lists.blocks.tolist() == [1, 2]
    assert lists.visible.sum((1, 2)).tolist() == [128, 0]


def test_prompts_are_cut_into_tiles_that_see_what_is_before_them() -> None:
    first, second = planned((300, 200))
    assert torch.cat([first.tokens, second.tokens], 1).tolist() == [[*range(200)] + [200] * 56]
    assert first.visible.sum((0, 2)).tolist() == [*range(101, 229)]
    assert second.visible.sum((0, 2)).tolist() == [*range(229, 301)] + [0] * 56


def test_shapes_are_few() -> None:
    shapes = {
        planned(*[(context, 1)] * rows)[0].visible.shape for context in range(1, 1000, 50) for rows in range(1, 9)
    }
    assert len(shapes) < 20
