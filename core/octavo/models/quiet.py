"""What the libraries print while they load a model, and how it is kept off the screen."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def quiet(*, progress: bool, hide_stderr: bool = False) -> Iterator[None]:
    """Keep the libraries' warnings off the screen, and their progress bars unless `progress`.

    `hide_stderr` is for the bar of transformers' GGUF import, which cannot be switched off.
    """
    log: Any = transformers_logging  # its functions have no types
    hub = logging.getLogger("huggingface_hub")
    levels, bars = (log.get_verbosity(), hub.level), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    hub.setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        if not progress:
            log.disable_progress_bar()
            if hide_stderr:
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            yield
        finally:
            log.set_verbosity(levels[0])
            hub.setLevel(levels[1])
            if bars:
                log.enable_progress_bar()
