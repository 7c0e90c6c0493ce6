"""The library itself, where it is installed: what loading it does, its tokens, and what it does when left alone."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.attention.device import CPU
from octavo.conformance.configuration import Configuration
from octavo.conformance.registry import CASES, Trial
from octavo_ipex import library
from octavo_ipex.backend import FlashDecodingBackend, PagedBackend
from octavo_ipex.base import IPEXBackend
from tests.backends.ipex.steps import Step

if reason := library.fault(library.CPU):
    pytest.skip(reason, allow_module_level=True)

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Attention is all that a transformer needs. " * 20]


def test_loading_it_leaves_nothing_behind() -> None:
    """No words on stderr, no class of loggers, no handler, no variable, nothing replaced in transformers."""
    code = """
        import logging, os, sys
        import torch, transformers
        before = (logging.getLoggerClass(), list(logging.root.handlers), dict(os.environ), torch.get_num_threads(),
                  transformers.tokenization_utils_base.PreTrainedTokenizerBase.pad)
        from octavo_ipex import library
        library.operators(library.CPU).flash_attn_varlen_func
        after = (logging.getLoggerClass(), list(logging.root.handlers), dict(os.environ), torch.get_num_threads(),
                 transformers.tokenization_utils_base.PreTrainedTokenizerBase.pad)
        assert before == after
        assert not [name for name in sys.modules if name.startswith("intel_extension_for_pytorch")]
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def tokens(model: Path, attention: str) -> list[tuple[int, ...]]:
    llm = LLM(model, attention=attention, dtype="float32", progress=False, max_batch_total_tokens=4096)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=32, temperature=0), progress=False)
    assert all(output.completions[0].error is None for output in outputs)
    return [tuple(output.completions[0].token_ids) for output in outputs]


def test_tokens_are_those_of_the_reference(demo_model_path: Path) -> None:
    truth = tokens(demo_model_path, "any/reference")
    assert all(truth)
    for name in ("flashdecoding-ipex", "ipex/paged"):
        assert tokens(demo_model_path, name) == truth


@pytest.mark.parametrize("kind", [FlashDecodingBackend, PagedBackend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_size_with_every_group(kind: type[IPEXBackend], dtype: torch.dtype) -> None:
    """The suite tries some of these together, and every block size."""
    sizes = itertools.product(kind.capabilities.head_sizes, (2, 8, 16), (16, 64))
    for head_size, heads, block_size in sizes:
        assert isinstance(head_size, int)
        configuration = Configuration(
            heads=heads, kv_heads=2, head_size=head_size, block_size=block_size, dtype=dtype, kv_dtype=dtype, layers=1
        )
        outcome = Trial(CASES["mixed"], configuration, kind, CPU()).run()
        assert outcome.result == "passed", f"{configuration}: {outcome.reason}"


# What the hazards that octavo stands in front of are like: were they mended, its care would be for nothing.


def decoding(contexts: Sequence[int], shared: int = 0) -> Step:
    return Step(PagedBackend, contexts, [1] * len(contexts), shared=shared)


def single(step: Step, contexts: Tensor, window: int) -> Tensor:
    out = torch.empty_like(step.query)
    library.operators(library.CPU).single_query_cached_kv_attention(
        out, step.query, step.cache.keys[0], step.cache.values[0], contexts, step.spec.scale,
        step.batch.block_table, contexts, step.size, int(contexts.max()), None, window, 1.0, 1.0, -1.0,
    )  # fmt: skip
    return out


def test_rows_that_share_a_block_are_refused() -> None:
    step = decoding([40, 41, 50, 60, 33], shared=2)
    with pytest.raises(RuntimeError, match="liding window"):
        single(step, step.batch.context_lengths, -1)


def test_rows_without_keys_are_nan() -> None:
    assert single(decoding([40, 20]), torch.tensor([40, 0], dtype=torch.int32), -1)[1].isnan().all()


def test_a_window_errs_where_it_hides_much() -> None:
    step = decoding([600])
    step.cache.keys[0].sub_(20)
    step.query.fill_(0.1)
    (keys, values) = step.rows[0]
    step.rows[0] = [keys[-20:] - 20, values[-20:]]
    with pytest.raises(AssertionError):
        step.check(single(step, step.batch.context_lengths, 20))
    step.rows[0] = [keys - 20, values]
    step.check(single(step, step.batch.context_lengths, 600))
