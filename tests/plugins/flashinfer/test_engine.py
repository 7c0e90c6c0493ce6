"""A model over the stand-in: steps are captured, replayed, and launched ahead of the tokens that they need."""

from collections.abc import Callable
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.attention.device import CPU
from tests import checkpoints
from tests.distributions import Offers, plugins_of
from tests.plugins.flashinfer.on_cpu import OnCPU

VOCABULARY = 128


class Replaying(CPU):
    """A replay runs the step anew, with the plan of the capture and whatever lies in the tensors by then."""

    name = "replaying"
    captures = True
    asynchronous = True

    def capture(self, run: Callable[[], None], pool: object = None) -> Callable[[], None] | None:
        return run


def test_a_model_that_counts(tmp_path: Path) -> None:
    llm = LLM(
        checkpoints.counting_model(tmp_path, VOCABULARY), device="replaying", attention="imagined/flashinfer",
        dtype="float16", plugins=plugins_of(Offers([OnCPU], [Replaying])), max_batch_total_tokens=1024,
        max_batch_size=8, max_batch_prefill_tokens=16, compile=False, progress=False,
    )  # fmt: skip
    prompts = [list(range(first, first + length)) for first, length in ((3, 30), (70, 2), (0, 1), (3, 21), (40, 9))]
    tokens = [25, 12, 30, 7, 18]
    params = [SamplingParams(max_tokens=most, temperature=0) for most in tokens]
    for _ in range(2):  # the second time from the cache
        answers = [output.completions[0] for output in llm.generate(prompts, params, progress=False)]
        for prompt, answer, most in zip(prompts, answers, tokens, strict=True):
            assert answer.error is None
            assert answer.token_ids == [(prompt[-1] + 1 + nth) % VOCABULARY for nth in range(most)]
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    assert graphs.replays > 20
