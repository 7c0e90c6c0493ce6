"""Plugins are found and checked one at a time; a broken one is named and harms only itself."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.attention.device import CPU
from octavo.attention.installed import backends
from octavo.attention.select import choose
from octavo.attention.wish import UnknownBackend
from octavo.plugins import Plugins
from tests.distributions import BACKEND, Offers, backend, installed_in, plugins_of, spec, write_distribution


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path`; what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def names(plugins: Plugins) -> list[str]:
    return [one.kind.qualified_name() for one in backends(plugins)]


BROKEN = {
    "import error": ("import octavo_nowhere", "import", "ModuleNotFoundError: No module named 'octavo_nowhere'"),
    "exit at import": ("import sys; sys.exit('no license')", "import", "SystemExit: no license"),
    "panic at import": ("class Panic(BaseException): ...\nraise Panic('unwrap')", "import", "Panic: unwrap"),
    "error at import": ("1 / 0", "import", "ZeroDivisionError: division by zero"),
    "no mark": (BACKEND.replace("@hookimpl", ""), "import", "no function that is marked with octavo.hookimpl"),
    "unknown argument": (
        BACKEND.replace("backends():", "backends(model):"),
        "import",
        "PluginValidationError",
    ),
    "misspelt hook": (
        BACKEND.replace("octavo_attention_backends", "octavo_attention_backend"),
        "octavo_attention_backend",
        "no such hook, did you mean octavo_attention_backends?",
    ),
    "raises": (
        BACKEND.replace("return [Backend]", "raise RuntimeError('no driver')"),
        "octavo_attention_backends",
        "RuntimeError: no driver",
    ),
    "raises as a generator": (
        BACKEND.replace("return [Backend]", "yield 1 / 0"),
        "octavo_attention_backends",
        "ZeroDivisionError",
    ),
    "a word": (BACKEND.replace("[Backend]", "'good'"), "octavo_attention_backends", "'good' is not a subclass of"),
    "a number": (BACKEND.replace("[Backend]", "5"), "octavo_attention_backends", "5 is not a subclass of"),
    "an object": (BACKEND.replace("[Backend]", "[object()]"), "octavo_attention_backends", "is not a subclass of"),
    "another class": (
        BACKEND.replace("[Backend]", "[dict]"),
        "octavo_attention_backends",
        "builtins.dict is not a subclass",
    ),
    "contract 99": (
        BACKEND.replace("contract = 1", "contract = 99"),
        "octavo_attention_backends",
        "broken.Backend is written for contract 99, this octavo speaks contract 1",
    ),
    "no contract": (BACKEND.replace("contract = 1", ""), "octavo_attention_backends", "does not state contract"),
    "no name": (BACKEND.replace('name = "good"', ""), "octavo_attention_backends", "does not state name"),
    "no platform": (BACKEND.replace('platform = "test"', ""), "octavo_attention_backends", "does not state platform"),
    "no layout": (
        BACKEND.replace("layout_type = TOKEN_MAJOR", ""),
        "octavo_attention_backends",
        "does not state layout_type",
    ),
    "layout is a word": (BACKEND.replace("= TOKEN_MAJOR", "= 'NHD'"), "octavo_attention_backends", "cannot be called"),
    "capabilities are a dict": (
        BACKEND.replace("Capabilities(", "dict("),
        "octavo_attention_backends",
        "not of Capabilities",
    ),
    "abstract": (
        BACKEND.replace("def attend", "def attends"),
        "octavo_attention_backends",
        "does not implement attend",
    ),
    "name of two words": (BACKEND.replace('"good"', '"not good"'), "octavo_attention_backends", "name is 'not good'"),
    "name with a comma": (BACKEND.replace('"good"', '"a,b"'), "octavo_attention_backends", "name is 'a,b'"),
    "name auto": (BACKEND.replace('"good"', '"auto"'), "octavo_attention_backends", "name is 'auto'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_named_and_the_others_go_on(case: str, site: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, where, error = BROKEN[case]
    write_distribution(site, "broken", "0.7", source)
    write_distribution(site, "sound", "1.2")
    plugins = installed_in(site)
    assert choose([spec()], CPU(), plugins=plugins).name == "test/good"
    assert names(plugins) == ["test/good"]
    (fault,) = plugins.faults
    assert (fault.origin.distribution, fault.origin.version, fault.where) == ("broken", "0.7", where)
    assert error in str(fault)
    assert "\n" not in str(fault)
    assert str(fault) in caplog.text


def test_a_plugin_that_pluggy_cannot_hold_is_named() -> None:
    class Unhashable(Offers):
        __hash__ = None  # type: ignore[assignment]

    plugins = plugins_of(Unhashable([backend("lost")]), Offers([backend("kept")]))
    assert names(plugins) == ["test/kept"]
    assert [(fault.where, fault.error_line) for fault in plugins.faults] == [
        ("import", "TypeError: unhashable type: 'Unhashable'")
    ]


def test_a_wrong_class_leaves_its_neighbours_in_the_same_list(site: Path) -> None:
    write_distribution(site, "half", "1", BACKEND.replace("[Backend]", "[dict, Backend]"))
    plugins = installed_in(site)
    assert names(plugins) == ["test/good"]
    assert [fault.where for fault in plugins.faults] == ["octavo_attention_backends"]


def test_a_misspelt_hook_loses_only_itself(site: Path) -> None:
    write_distribution(site, "half", "1", BACKEND + "\n@hookimpl\ndef octavo_step_finish(step): ...\n")
    plugins = installed_in(site)
    assert names(plugins) == ["test/good"]
    assert "did you mean octavo_step_finished?" in str(plugins.faults[0])


def test_a_hook_of_a_later_octavo_may_be_optional(site: Path) -> None:
    source = BACKEND + "\n@hookimpl(optionalhook=True)\ndef octavo_next_year(): ...\n"
    write_distribution(site, "ahead", "1", source)
    plugins = installed_in(site)
    assert names(plugins) == ["test/good"]
    assert plugins.faults == []


def test_one_name_in_two_distributions_is_nobodys(site: Path) -> None:
    write_distribution(site, "first", "1.0")
    write_distribution(site, "second", "2.0", BACKEND.replace('"good"', '"Good"'))
    write_distribution(site, "third", "3.0", BACKEND.replace('"good"', '"other"'))
    plugins = installed_in(site)
    assert choose([spec()], CPU(), plugins=plugins).name == "test/other"
    assert {fault.origin.distribution for fault in plugins.faults} == {"first", "second"}
    for fault in plugins.faults:
        assert "first.Backend of first 1.0" in str(fault)
        assert "second.Backend of second 2.0" in str(fault)
    with pytest.raises(ValueError, match=r"registered twice, by .*first 1\.0.*second 2\.0"):
        choose([spec()], CPU(), attention="good", plugins=plugins)


def test_plugins_on_the_path_are_found(site: Path) -> None:
    write_distribution(site, "octavo-anywhere", "1.5", BACKEND.replace('"good"', '"anywhere"'))
    found = {one.kind.qualified_name(): one.origin for one in backends(Plugins())}
    assert str(found["test/anywhere"]) == "octavo-anywhere 1.5"


def test_of_two_copies_of_a_distribution_the_first_on_the_path_counts(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, earlier = site / "later", site / "earlier"
    for folder, version in ((later, "1"), (earlier, "2")):
        folder.mkdir()
        write_distribution(folder, "octavo-twice", version, BACKEND.replace('"good"', '"twice"'))
        monkeypatch.syspath_prepend(str(folder))
    plugins = Plugins()
    assert [str(origin) for origin in plugins.origins if "twice" in origin.distribution] == ["octavo-twice 2"]
    assert plugins.faults == []


def test_unreadable_entry_points_are_named(site: Path) -> None:
    write_distribution(site, "octavo-garbled", "4", entry_points="[octavo]\nno equals sign\n")
    write_distribution(site, "octavo-sound", "1", BACKEND.replace('"good"', '"anywhere"'))
    plugins = Plugins()
    assert "test/anywhere" in names(plugins)
    assert [(str(one.origin), one.where) for one in plugins.faults] == [("octavo-garbled 4", "entry_points.txt")]


def test_an_unknown_name_is_blamed_on_the_plugin_that_failed(site: Path) -> None:
    write_distribution(site, "other-broken", "1", "1 / 0")
    write_distribution(site, "octavo-mychip", "0.7", "import octavo_nowhere")
    write_distribution(site, "sound", "1.2")
    with pytest.raises(UnknownBackend, match=r"octavo-mychip 0\.7 .*No module named 'octavo_nowhere'") as caught:
        choose([spec()], CPU(), attention="mychip", plugins=installed_in(site))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
