"""The backend on a CPU that claims to be a small Hopper GPU."""

from octavo.attention.contract import AttentionSpec
from octavo.attention.device import Device
from octavo.kv.layout import TOKEN_MAJOR, KVCacheLayout
from octavo_flashinfer.backend import FlashInferBackend
from tests.plugins.flashinfer import library


class OnCPU(FlashInferBackend):
    """Keys and values are written by PyTorch: there is no GPU for Triton's kernel."""

    platform = "imagined"

    @classmethod
    def probe(cls, device: Device) -> str | None:
        return None

    @staticmethod
    def layout_type(spec: AttentionSpec, block_size: int) -> KVCacheLayout:
        usual = FlashInferBackend.layout_type(spec, block_size)
        assert usual == TOKEN_MAJOR(spec, block_size)
        return TOKEN_MAJOR(spec, block_size)

    def capability(self) -> int:
        return 9

    def count_processors(self) -> int:
        return library.PROCESSORS
