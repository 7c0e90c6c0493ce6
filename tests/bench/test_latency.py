"""Times of requests worked out by hand: percentiles, goodput, arrivals, step times."""

import math
from pathlib import Path
from statistics import fmean, stdev

import pytest

from octavo.bench.latency import Latency, Objectives, latencies, percentiles, values
from octavo.bench.plot import draw
from octavo.bench.steps import StepTime, by_size, ratio
from octavo.bench.traffic import Answer, poisson


def answer(sent: float, *texts: float, ended: float | None = None, tokens: int | None = None) -> Answer:
    """An event a token, unless it is said otherwise."""
    return Answer(
        sent=sent, texts=list(texts), ended=texts[-1] if ended is None else ended,
        tokens=len(texts) if tokens is None else tokens,
    )  # fmt: skip


FAILED = Answer(sent=0.0, texts=[0.1], ended=0.2, tokens=0, error="status 429")


def test_the_times_of_a_request() -> None:
    """Five tokens in four events: two of them make a character together."""
    (found,) = latencies([answer(10.0, 11.0, 11.5, 12.5, 13.0, ended=13.25, tokens=5), FAILED])
    assert found == Latency(ttft=1.0, tpot=0.5, e2e=3.25, itl=(0.5, 1.0, 0.5))


def test_one_token_has_no_time_between() -> None:
    found = latencies([answer(0.0, 2.0)])
    assert found == [Latency(ttft=2.0, tpot=None, e2e=2.0, itl=())]
    assert values(found, "tpot") == values(found, "itl") == []
    assert percentiles(found).keys() == {f"{name}_p{rank}_seconds" for name in ("ttft", "e2e") for rank in (50, 90, 99)}


def test_percentiles() -> None:
    """Of 1 to 5 in any order; of ten gaps, all of them together and not request by request."""
    row = percentiles(latencies(answer(0.0, first, first + 1, first + 1 + gap) for first, gap in [
        (4.0, 2.0), (1.0, 1.0), (5.0, 1.0), (2.0, 3.0), (3.0, 1.0),
    ]))  # fmt: skip
    assert (row["ttft_p50_seconds"], row["ttft_p90_seconds"], row["ttft_p99_seconds"]) == (3.0, 4.6, 4.96)
    assert (row["itl_p50_seconds"], row["itl_p90_seconds"], row["itl_p99_seconds"]) == (1.0, 2.1, 2.91)
    assert (row["tpot_p50_seconds"], row["tpot_p90_seconds"]) == (1.0, 1.8)
    assert row["e2e_p50_seconds"] == 6.0


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("ttft=1", [True, True, False]),
        ("tpot=0.5", [True, False, True]),
        ("ttft=1.0,tpot=0.5", [True, False, False]),
        (" e2e=3 , ttft=5", [True, False, True]),
        ("ttft=0.999", [False, False, False]),
    ],
)
def test_a_good_request_keeps_every_limit(text: str, good: list[bool]) -> None:
    found = latencies([answer(0.0, 1.0, 1.5), answer(0.0, 1.0, 4.0), answer(0.0, 3.0)])
    assert list(map(Objectives.read(text).met_by, found)) == good


def test_limits_are_shown() -> None:
    assert str(Objectives.read("tpot=0.2,ttft=1.5")) == "ttft 1.5 s, tpot 0.2 s"


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=0", "ttft=nan", "ttft=inf", "latency=1", "", "ttft=1,,tpot=1"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"slo has .*give ttft, tpot or e2e with seconds above 0"):
        Objectives.read(text)


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps of an exponential distribution: its mean, its deviation, and no memory."""
    times = poisson(8.0, 40_000, seed=1)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    deviation = 1 / 8 / math.sqrt(len(gaps))
    assert abs(fmean(gaps) - 1 / 8) < 4 * deviation
    assert stdev(gaps) == pytest.approx(1 / 8, rel=0.03)
    long = [gap for gap in gaps if gap > 1 / 8]
    assert len(long) / len(gaps) == pytest.approx(math.exp(-1), rel=0.03)
    assert fmean(long) - 1 / 8 == pytest.approx(1 / 8, rel=0.05), "who has waited waits as long as who comes"
    assert times == poisson(8.0, 40_000, seed=1)
    assert times[:5] != poisson(8.0, 5, seed=2)


def test_steps_are_compared_at_equal_sizes() -> None:
    """Sizes that one side has too seldom are left out, and steps with prompts in them; medians, weighted by time."""
    mine = [StepTime(0.3, 0, 2)] * 3 + [StepTime(1.0, 0, 4)] * 4 + [StepTime(9.0, 64, 4), StepTime(7.0, 0, 5)]
    theirs = [StepTime(0.1, 0, 2), StepTime(0.2, 0, 2), StepTime(0.3, 0, 2)] + [StepTime(0.5, 0, 4)] * 5
    sizes = by_size(mine, theirs)
    assert [(size.rows, size.steps, size.other_steps, size.ratio) for size in sizes] == [
        (2, 3, 3, pytest.approx(1.5)), (4, 4, 5, 2.0),
    ]  # fmt: skip
    assert ratio(sizes) == pytest.approx((3 * 0.3 + 4 * 1.0) / (3 * 0.2 + 4 * 0.5))
    assert ratio(by_size(mine, [])) is None


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_plot(tmp_path: Path, ending: str) -> None:
    found = latencies([answer(0.0, 1.0, 1.5), answer(0.0, 3.0)])
    draw(found, Objectives.read("ttft=1"), tmp_path / f"plot.{ending}")
    begin = {"svg": b"<?xml", "png": b"\x89PNG"}[ending]
    assert (tmp_path / f"plot.{ending}").read_bytes().startswith(begin)
