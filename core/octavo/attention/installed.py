"""What plugins add to attention: backends, and kinds of device, that keep to the contract."""

from __future__ import annotations

from octavo import __version__
from octavo.attention.check import check_backend, check_device
from octavo.attention.contract import AttentionBackend
from octavo.attention.device import BUILT_IN, Device
from octavo.hooks import PROJECT
from octavo.plugins import Origin, Plugins, Registered


def backends(plugins: Plugins) -> tuple[Registered[AttentionBackend], ...]:
    """All attention backends that honour the contract, whether or not they can run here."""
    return plugins.collect("octavo_attention_backends", check_backend, lambda backend: backend.qualified_name())


def devices(plugins: Plugins) -> tuple[Registered[Device], ...]:
    """All kinds of device, octavo's own first, whether or not this machine has one."""
    own = [Registered(device, Origin(PROJECT, __version__, "")) for device in BUILT_IN]
    return plugins.collect("octavo_devices", check_device, lambda device: device.name, own)
