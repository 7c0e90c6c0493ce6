"""The ROCm backends on a CPU: their kernels are interpreted, with the tiles of a chip that claims few processors."""

from __future__ import annotations

from octavo.attention.device import Device
from octavo_rocm.backend import FlashDecodingBackend, PagedBackend, ROCmBackend
from octavo_triton.chips import chips
from octavo_triton.gpu import GPU
from tests.backends.compiled import chip_of

CHIPS = tuple(chips(ROCmBackend.folder / "chips.json"))
BACKENDS = (FlashDecodingBackend, PagedBackend)


def on(architecture: str, kind: type[ROCmBackend]) -> type[ROCmBackend]:
    """That backend as it is on one chip."""

    class On(kind):  # type: ignore[misc,valid-type]
        @classmethod
        def probe(cls, device: Device) -> str | None:
            return None

        @classmethod
        def gpu(cls, device: Device) -> GPU:
            return GPU(architecture, chip_of(kind, architecture).shared_bytes, 8)

    found: type[ROCmBackend] = On
    return found
