"""The house rules that no type checker sees: who may import whom, who reads the environment, how long a file is."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import grimp
import pytest
from importlinter import Contract
from importlinter.api import read_configuration
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

import octavo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXAMPLE = ROOT / "plugins/example"
"""A distribution of its own, which octavo's wheel carries as text."""
PACKAGES = [
    path.parent
    for root in ("core", "backends/*", "plugins/*")
    for path in ROOT.glob(f"{root}/*/__init__.py")
    if not path.is_relative_to(EXAMPLE)
]
SOURCES = [path for root in ("core", "backends", "plugins") for path in sorted((ROOT / root).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LONGEST_FILE = 300

CONTRACT_TYPES: dict[str, type[Contract]] = {"forbidden": ForbiddenContract, "layers": LayersContract}
# For each contract an import that breaks it: importer, imported.
BREACHES = {
    "core-knows-no-backend": ("octavo.engine", "octavo_reference"),
    "backends-know-the-contract-only": ("octavo_reference.plugin", "octavo.engine.scheduler"),
    "kernels-know-no-device": ("octavo_triton.backend", "octavo_cuda.backend"),
    "plugins-know-the-hooks-only": ("octavo_grammar.plugin", "octavo.engine.scheduler"),
    "server-speaks-to-the-process": ("octavo.server.app", "octavo.engine.scheduler"),
    "server-computes-nothing": ("octavo.engine.output", "octavo.engine.sampler"),
    "scheduling-touches-no-tensor": ("octavo.kv.pool", "torch"),
    "layers": ("octavo.models", "octavo.engine.scheduler"),
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Every import of octavo and its backends."""
    names = [package.name for package in PACKAGES]
    return grimp.build_graph(*names, include_external_packages=True, cache_dir=None)


@pytest.fixture(scope="module")
def contracts() -> dict[str, Contract]:
    """The contracts of pyproject.toml by their ids."""
    configuration = read_configuration(str(ROOT / "pyproject.toml"))
    return {
        options["id"]: CONTRACT_TYPES[options["type"]](options["name"], configuration["session_options"], options)
        for options in configuration["contracts_options"]
    }


def is_kept(contract: Contract, graph: grimp.ImportGraph) -> bool:
    """Check one contract on a copy of the graph, since a check takes ignored imports out of it."""
    return contract.check(deepcopy(graph), verbose=False).kept


def test_every_contract_has_a_breach(contracts: dict[str, Contract]) -> None:
    assert contracts.keys() == BREACHES.keys()


@pytest.mark.parametrize("contract", BREACHES)
def test_contract_is_kept(contract: str, contracts: dict[str, Contract], graph: grimp.ImportGraph) -> None:
    assert is_kept(contracts[contract], graph), "`lint-imports` says which import breaks it"


@pytest.mark.parametrize("contract", BREACHES)
def test_contract_catches_a_breach(contract: str, contracts: dict[str, Contract], graph: grimp.ImportGraph) -> None:
    importer, imported = BREACHES[contract]
    broken = deepcopy(graph)
    for module in (importer, imported):
        if module not in broken.modules:
            broken.add_module(module)
    broken.add_import(importer=importer, imported=imported)
    assert not is_kept(contracts[contract], broken)


def test_every_package_is_in_the_house() -> None:
    """A backend that is forgotten in a list is missing in the wheel, or under no contract."""
    hatch, linter = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"], PROJECT["tool"]["importlinter"]
    assert set(hatch["packages"]) == {str(package.relative_to(ROOT)) for package in [*PACKAGES, EXAMPLE]}
    assert set(hatch["dev-mode-dirs"]) == {str(package.parent.relative_to(ROOT)) for package in PACKAGES}
    assert set(linter["root_packages"]) == {package.name for package in PACKAGES}
    core, backends, plugins = (set(linter["contracts"][number]["source_modules"]) for number in (0, 1, 2))
    assert core == {"octavo"}
    assert core | backends | plugins == set(linter["root_packages"])
    assert set(linter["contracts"][0]["forbidden_modules"]) == backends | plugins


def imported(path: Path) -> Iterator[str]:
    """What a file imports of octavo, as module.name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "octavo":
                yield from (f"{module}.{name.name}" for name in names)
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] == "octavo")


def test_the_example_knows_what_a_stranger_is_told_of() -> None:
    """The contract, the stock layouts, and octavo's public names."""
    told = {f"octavo.{name}" for name in octavo.__all__} | {"octavo.conformance.Suite"}
    modules = {"octavo.attention.contract", "octavo.attention.device", "octavo.kv.layout"}
    names = {name for path in EXAMPLE.rglob("*.py") for name in imported(path)}
    assert "octavo.hookimpl" in names
    assert {name for name in names - told if name.rpartition(".")[0] not in modules} == set()


def test_the_cache_bookkeeping_is_all_under_contract(contracts: dict[str, Contract], graph: grimp.ImportGraph) -> None:
    """Layouts, their dtypes and scales may know tensors: another new module is to be listed in the contract."""
    listed = {str(module) for module in contracts["scheduling-touches-no-tensor"].source_modules}  # type: ignore[attr-defined]
    knowing = {"octavo.kv.layout", "octavo.kv.dtypes", "octavo.kv.scales"}
    assert graph.find_children("octavo.kv") - knowing <= listed


def environment_reads(path: Path) -> Iterator[int]:
    """The lines of a file that name os.environ or os.getenv; a default that is set for a library is no read."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defaults = {id(environ) for node in ast.walk(tree) for environ in named_for_defaults(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv") if id(node) not in defaults:
                yield node.lineno
            case ast.ImportFrom(module="os", names=names) if {name.name for name in names} & {"environ", "getenv"}:
                yield node.lineno


def named_for_defaults(node: ast.AST) -> Iterator[ast.AST]:
    """The `os.environ` of `os.environ.setdefault(...)`, and of the condition that another variable is not set."""
    match node:
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ") as named, attr="setdefault"))
        ):
            yield named
        case ast.If(test=ast.Compare(ops=[ast.NotIn()], comparators=[named]), body=body, orelse=[]):
            if all(any(named_for_defaults(statement)) for statement in body):
                yield named


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("os.environ.setdefault('A', '1')", []),
        ("if 'B' not in os.environ:\n    os.environ.setdefault('A', '1')", []),
        ("if 'B' not in os.environ:\n    print()", [1]),
        ("if 'B' not in os.environ:\n    os.environ.setdefault('A', os.environ['C'])", [2]),
        ("a = os.environ.setdefault('A', '1')", [1]),
        ("if 'B' in os.environ:\n    os.environ.setdefault('A', '1')", [1]),
        ("from os import getenv", [1]),
    ],
)
def test_what_reads_the_environment(tmp_path: Path, source: str, lines: list[int]) -> None:
    file = tmp_path / "file.py"
    file.write_text(source, encoding="utf-8")
    assert list(environment_reads(file)) == lines


def test_only_the_settings_of_core_read_the_environment() -> None:
    reads = {path: list(environment_reads(path)) for path in SOURCES if path.is_relative_to(ROOT / "core")}
    assert reads.pop(ROOT / "core/octavo/settings/__init__.py")
    assert {path: lines for path, lines in reads.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["import os; os.environ['ATTENTION']", "import os; os.getenv('X')", "from os import environ"]
)
def test_environment_reads_are_seen(line: str, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(line)
    assert list(environment_reads(source)) == [1]


def test_a_default_for_a_library_is_no_read(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("import os\nos.environ.setdefault('A', '1')\nvalue = os.environ.setdefault('A', '1')")
    assert list(environment_reads(source)) == [3]


def test_files_are_short() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES + TESTS}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_importing_octavo_is_light() -> None:
    """``octavo --help`` must not wait for torch."""
    check = "import sys, octavo; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True)


@pytest.mark.parametrize(
    "does",
    [
        "import octavo.server.run; assert 'transformers' not in sys.modules and 'fastapi' not in sys.modules",
        "import octavo.server.http; assert 'transformers' not in sys.modules",
        "import octavo.models.tokenizer, octavo.engine.detokenizer",
        "from octavo.plugins import plugins; from octavo import SamplingParams; from octavo.grammar import JsonObject;"
        "assert plugins().logits_processors(SamplingParams(grammar=JsonObject()), None)",
    ],
    ids=["run", "http", "tokenizer", "grammar"],
)
def test_the_servers_process_computes_nothing(does: str) -> None:
    """torch takes seconds to import, and hundreds of megabytes; what is not needed until the engine starts waits."""
    subprocess.run([sys.executable, "-c", f"import sys; {does}; sys.exit('torch' in sys.modules)"], check=True)
