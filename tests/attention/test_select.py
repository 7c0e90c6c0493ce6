"""`ATTENTION` is obeyed or refused with every candidate's reasons; unset, the best that can run is chosen."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import CPU, Device
from octavo.attention.select import Selection, choose, choose_device
from octavo.attention.wish import BackendUnavailable, UnknownBackend, Wish, parse
from octavo.hooks import hookimpl
from octavo.kv.layout import HEAD_MAJOR, PACKED, TOKEN_MAJOR, Axes
from tests.distributions import Offers, backend, plugins_of, spec


def select(*backends: type[AttentionBackend], attention: str | None = None, **wishes: Any) -> Selection:
    return choose([spec()], CPU(), attention=attention, plugins=plugins_of(Offers(backends)), **wishes)


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        (None, Wish()),
        ("", Wish()),
        ("  ", Wish()),
        ("AUTO", Wish()),
        ("Paged", Wish(name="paged")),
        (" rocm / paged ", Wish(name="rocm/paged")),
        ("prefill=flashinfer,decode=paged", Wish(phases=("flashinfer", "paged"))),
        ("Decode = cuda/Paged , prefill = FlashInfer", Wish(phases=("flashinfer", "cuda/paged"))),
    ],
)
def test_what_attention_may_say(text: str | None, wish: Wish) -> None:
    assert parse(text) == wish


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prefill=paged", "no backend for decode"),
        ("decode=paged", "no backend for prefill"),
        ("prefill=a,prefill=b", '"prefill=b" is not one of'),
        ("prefill=a,decode=", '"decode=" is not one of'),
        ("prefill=a,decode=b=c", '"decode=b=c" is not one of'),
        ("prefil=a,decode=b", '"prefil=a" is not one of'),
        ("a,b", '"a" is not one of'),
        ("prefill=a,decode=b,", '"" is not one of'),
    ],
)
def test_what_it_may_not_say(text: str, problem: str) -> None:
    with pytest.raises(UnknownBackend, match=problem) as caught:
        parse(text)
    assert text in str(caught.value)
    assert "prefill=NAME,decode=NAME" in str(caught.value)


def test_unset_takes_the_highest_priority_that_can(caplog: pytest.LogCaptureFixture) -> None:
    low, high = backend("low", priority=1), backend("high", priority=2)
    best = backend("best", priority=3, unfit="there is no card")
    with caplog.at_level(logging.INFO):
        choose([], CPU(), plugins=plugins_of(Offers((low, best, high))))
        assert not caplog.messages, "no model is known yet"
        selection = select(low, best, high)
    assert selection.chosen is high
    assert [one.name for one in selection.candidates] == ["test/best", "test/high", "test/low"]
    assert [one.reasons for one in selection.candidates] == [("there is no card",), (), ()]
    assert "there is no card" in caplog.text.partition("test/high is chosen over test/best")[2]


def test_a_negative_priority_waits_to_be_asked() -> None:
    shy = backend("shy", priority=-1)
    assert select(shy, backend("low")).name == "test/low"
    assert select(shy, backend("low"), attention="shy").chosen is shy
    with pytest.raises(BackendUnavailable, match=r"unless it is asked for by name \(test/shy\)"):
        select(shy)


class Prefers:
    def __init__(self, *names: str) -> None:
        self.names, self.asked = list(names), dict[str, Any]()

    @hookimpl
    def octavo_rank_backends(self, spec: Any, device: Any, names: Any) -> list[str]:
        self.asked = {"layers": spec.layers, "device": device.name, "names": names}
        return self.names


def test_plugins_rank_those_that_can() -> None:
    window = {"features": frozenset({"window"})}
    able = [backend("a", priority=3, can=window), backend("d", priority=-1, can=window)]
    offers = Offers([*able, backend("plain"), backend("absent", unfit="no", can=window)])
    prefers = Prefers("test/d")
    specs = [spec(layers=1), spec(layers=5, window=3), spec(layers=2)]
    assert choose(specs, CPU(), plugins=plugins_of(offers, prefers)).name == "test/d"
    assert prefers.asked == {"layers": 5, "device": "cpu", "names": ["test/a", "test/d"]}
    assert choose(specs, CPU(), attention="a", plugins=plugins_of(offers, prefers)).name == "test/a"


def test_set_and_unsuitable_is_an_error_with_every_candidate() -> None:
    paged = backend("paged", "cuda", unfit="PyTorch is built without CUDA", can={"head_sizes": (64, 128)})
    with pytest.raises(BackendUnavailable) as caught:
        select(paged, backend("other", "rocm", unfit="no card"), backend("sound"), attention="PAGED")
    message = str(caught.value)
    assert message.startswith(
        "attention paged cannot be used here: cuda/paged: PyTorch is built without CUDA; "
        "cuda/paged: head size 8 is not supported: it takes 64, 128\n"
    )
    assert "rocm/other (" in message
    assert "no card" in message
    assert "test/sound (" in message


def test_none_that_can_is_an_error_with_every_candidate() -> None:
    with pytest.raises(BackendUnavailable, match=r"(?s)serve this on cpu.*x/a .*: no card.*x/b .*dtype float32 is not"):
        select(backend("a", "x", unfit="no card"), backend("b", "x", can={"dtypes": (torch.float16,)}))


def test_unknown_names_get_close_ones() -> None:
    with pytest.raises(UnknownBackend) as caught:
        select(backend("paged", "cuda"), backend("flashdecoding", "cuda"), attention="pagd")
    assert 'there is no backend "pagd", did you mean paged?' in str(caught.value)
    assert "cuda/flashdecoding" in str(caught.value)


def test_a_platform_tells_namesakes_apart() -> None:
    cuda, rocm, ipex = (backend("paged", platform) for platform in ("cuda", "rocm", "ipex"))
    assert select(cuda, rocm, ipex, attention="rocm/paged").chosen is rocm
    with pytest.raises(UnknownBackend, match="did you mean cuda/paged"):
        select(cuda, rocm, attention="cud/paged")


def test_of_namesakes_the_first_that_can() -> None:
    cuda = backend("paged", "cuda", priority=3, unfit="no card")
    ipex, rocm = backend("paged", "ipex", priority=1), backend("paged", "rocm", priority=2)
    assert select(cuda, ipex, rocm, backend("best", priority=9), attention="paged").chosen is rocm


def test_a_probe_that_raises_is_a_reason() -> None:
    def probe(device: Device) -> str | None:
        raise OSError("libchip.so: cannot open\nshared object")

    broken = backend("broken", priority=5, probe=probe)
    selection = select(broken, backend("sound"))
    assert selection.name == "test/sound"
    assert selection.candidates[0].reasons == ("it raises when asked: OSError: libchip.so: cannot open shared object",)


def test_all_groups_must_be_served() -> None:
    plain = backend("plain", priority=2)
    windowed = backend("windowed", can={"features": frozenset({"window"})})
    plugins = plugins_of(Offers([plain, windowed]))
    selection = choose([spec(), spec(window=4)], CPU(), plugins=plugins)
    assert selection.chosen is windowed
    assert selection.candidates[0].reasons == ("the model needs window 4: it supports none",)


def test_block_sizes() -> None:
    any_size = backend("any", can={"block_sizes": (64, ...)})
    assert select(backend()).block_size == 16
    assert select(backend(), block_size=32).block_size == 32
    assert select(any_size).block_size == 64
    assert select(any_size, block_size=7).block_size == 7
    assert select(backend("whatever", can={"block_sizes": (...,)})).block_size == 16
    assert select(backend("picky", priority=1), any_size, block_size=7).chosen is any_size
    with pytest.raises(BackendUnavailable, match="block size 7 is not supported: it takes 16, 32"):
        select(backend(), any_size, attention="paged", block_size=7)


def test_the_preferred_block_size_gives_way_to_the_layout() -> None:
    """16 bytes of float32 are 4 elements: slot/x takes blocks of 8, not of 6."""
    packed = backend(can={"block_sizes": (6, 8)}, layout_type=Axes("block head dim slot/x x"))
    assert select(packed).block_size == 8
    with pytest.raises(BackendUnavailable, match=r"it has no layout for blocks of 6: axis slot/x .*6 is not"):
        select(packed, block_size=6)


def test_a_layout_that_never_fits_is_a_reason() -> None:
    plugins = plugins_of(Offers([backend(layout_type=PACKED)]))
    with pytest.raises(BackendUnavailable, match="axis dim/x"):
        choose([spec(head_size=6)], CPU(), plugins=plugins)


def test_what_a_backend_costs_is_told() -> None:
    selection = select(backend())
    assert [feature for feature, _ in selection.switched_off] == ["prefix caching", "chunked prefill"]
    assert "prefix caching off: it cannot start a query behind keys" in selection.summary()
    able = select(backend(can={"prefix_caching": True}))
    assert able.switched_off == ()
    assert able.summary() == "attention test/paged on cpu, blocks of 16 tokens"


def test_prefix_caching_can_be_needed() -> None:
    with_it = backend("with", can={"prefix_caching": True})
    assert select(backend("without", priority=3), with_it, prefix_caching=True).chosen is with_it
    with pytest.raises(BackendUnavailable, match="prefix caching is asked for"):
        select(backend("without"), with_it, attention="without", prefix_caching=True)


def test_phases_share_a_layout_and_a_block_size() -> None:
    prefill = backend("fast", can={"block_sizes": (64, 16), "prefix_caching": True})
    decode = backend("paged", can={"block_sizes": (32, 16, 64)})
    selection = select(prefill, decode, attention="decode=paged,prefill=fast")
    assert selection.block_size == 16
    assert selection.name == "prefill=test/fast,decode=test/paged"
    assert selection.capabilities.prefix_caching
    assert select(prefill, decode, attention="decode=paged,prefill=fast", block_size=64).block_size == 64
    assert select(prefill, decode, attention="decode=fast,prefill=fast").chosen is prefill
    assert select(prefill, decode, attention="prefill=fast,decode=paged", prefix_caching=True).block_size == 16
    with pytest.raises(BackendUnavailable, match="prefix caching is asked for, and prefill=paged"):
        select(prefill, decode, attention="prefill=paged,decode=fast", prefix_caching=True)


@pytest.mark.parametrize(
    ("prefill", "block_size", "reason"),
    [
        (backend("fast", layout_type=HEAD_MAJOR), None, "test/fast and test/paged cannot share a cache: their layouts"),
        (backend("fast", can={"block_sizes": (64,)}), None, "prefill=test/fast: block size 16 is not supported"),
        (backend("fast", can={"block_sizes": (64, 32)}), 64, "block size 64 is not supported: it takes 16, 32"),
        (backend("fast", unfit="no card"), None, "test/fast: no card"),
    ],
)
def test_phases_that_do_not_fit(prefill: type[AttentionBackend], block_size: int | None, reason: str) -> None:
    with pytest.raises(BackendUnavailable, match=reason) as caught:
        select(prefill, backend("paged"), attention="prefill=fast,decode=paged", block_size=block_size)
    assert "test/paged (" in str(caught.value)


def test_build_makes_the_chosen_backend() -> None:
    selection = select(backend(), block_size=32)
    made = selection.build(spec(), CPU())
    assert isinstance(made, selection.chosen)
    assert (made.spec, made.block_size) == (spec(), 32)
    assert made.layout == TOKEN_MAJOR(spec(), 32)
    with pytest.raises(ValueError, match="takes no such option: speed") as caught:
        selection.build(spec(), CPU(), {"speed": 9})
    assert "test/paged" in caught.value.__notes__[0]


def test_devices() -> None:
    class Board(CPU):
        name = "board"
        priority = 20

    class Absent(CPU):
        name = "absent"
        priority = 30

        @classmethod
        def unavailable(cls) -> str | None:
            raise OSError("no driver")

    plugins = plugins_of(Offers(devices=[Board, Absent]))
    assert type(choose_device("auto", plugins)) is Board
    assert type(choose_device("CPU", plugins)) is CPU
    with pytest.raises(ValueError, match=r'(?s)"absent" cannot be used here.*absent: it raises.*no driver.*cpu: avail'):
        choose_device("absent", plugins)
    with pytest.raises(ValueError, match='"tpu" is not known'):
        choose_device("tpu", plugins)


NAMES, PLATFORMS = ("a", "b", "c"), ("x", "y")
OFFERED = st.dictionaries(
    st.tuples(st.sampled_from(PLATFORMS), st.sampled_from(NAMES)),
    st.tuples(st.integers(-2, 3), st.booleans(), st.sampled_from([(16,), (32, 16), (64, ...)])),
)


@settings(deadline=None)
@given(
    OFFERED,
    st.sampled_from([None, *NAMES, *(f"{platform}/{name}" for platform in PLATFORMS for name in NAMES)]),
    st.sampled_from([None, 16, 32, 7]),
)
def test_choice_against_brute_force(
    offered: dict[tuple[str, str], tuple[int, bool, Any]], attention: str | None, block_size: int | None
) -> None:
    """Whatever is installed and asked for: the best that fits, or an error; never what was not asked for."""
    backends = [
        backend(name, platform, priority=priority, unfit=None if able else "no card", can={"block_sizes": sizes})
        for (platform, name), (priority, able, sizes) in offered.items()
    ]
    fits = {
        (platform, name): priority
        for (platform, name), (priority, able, sizes) in offered.items()
        if able
        and (block_size is None or block_size in sizes or ... in sizes)
        and (priority >= 0 if attention is None else attention in (name, f"{platform}/{name}"))
    }
    if fits:
        chosen = select(*backends, attention=attention, block_size=block_size).chosen
        assert fits[chosen.platform, chosen.name] == max(fits.values())
    else:
        known = attention is None or any(attention in (one.name, one.qualified_name()) for one in backends)
        with pytest.raises(BackendUnavailable if known else UnknownBackend) as caught:
            select(*backends, attention=attention, block_size=block_size)
        assert all(one.qualified_name() in str(caught.value) for one in backends)
