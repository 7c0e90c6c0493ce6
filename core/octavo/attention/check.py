"""Does a class that a plugin offers keep to the contract? Raises with what is missing."""

from __future__ import annotations

import inspect
import re

from octavo.attention.contract import CONTRACT, AttentionBackend, Capabilities
from octavo.attention.device import Device

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_backend(offered: object) -> None:
    """Raise TypeError or ValueError unless `offered` is an attention backend of this contract that can be made."""
    if not (isinstance(offered, type) and issubclass(offered, AttentionBackend)):
        raise TypeError(f"{_shown(offered)} is not a subclass of octavo.AttentionBackend")
    _check_stated(offered, "contract")
    if offered.contract != CONTRACT:
        raise ValueError(
            f"{_shown(offered)} is written for contract {offered.contract!r}, this octavo speaks contract {CONTRACT}: "
            "install versions that fit each other"
        )
    _check_stated(offered, "name", "platform", "capabilities", "layout_type")
    _check_concrete(offered)
    _check_name(offered, "name")
    _check_name(offered, "platform")
    for attribute, kind in (("priority", int), ("capabilities", Capabilities)):
        if not isinstance(getattr(offered, attribute), kind):
            raise TypeError(f"{_shown(offered)}.{attribute} is {getattr(offered, attribute)!r}, not of {kind.__name__}")
    if not callable(offered.layout_type):
        raise TypeError(f"{_shown(offered)}.layout_type is {offered.layout_type!r}, which cannot be called")


def check_device(offered: object) -> None:
    """Raise TypeError or ValueError unless `offered` is a kind of device that can be made."""
    if not (isinstance(offered, type) and issubclass(offered, Device)):
        raise TypeError(f"{_shown(offered)} is not a subclass of octavo.attention.device.Device")
    _check_stated(offered, "name")
    _check_concrete(offered)
    _check_name(offered, "name")
    if not isinstance(offered.priority, int):
        raise TypeError(f"{_shown(offered)}.priority is {offered.priority!r}, not an int")


def _shown(offered: object) -> str:
    return f"{offered.__module__}.{offered.__qualname__}" if isinstance(offered, type) else repr(offered)


def _check_stated(offered: type, *attributes: str) -> None:
    missing = [attribute for attribute in attributes if not hasattr(offered, attribute)]
    if missing:
        raise TypeError(f"{_shown(offered)} does not state {', '.join(missing)}")


def _check_concrete(offered: type) -> None:
    if inspect.isabstract(offered):
        lacks = ", ".join(sorted(vars(offered)["__abstractmethods__"]))
        raise TypeError(f"{_shown(offered)} is abstract: it does not implement {lacks}")


def _check_name(offered: type, attribute: str) -> None:
    """Only what `ATTENTION` and `DEVICE` can spell."""
    name = getattr(offered, attribute)
    if not (isinstance(name, str) and _NAME.fullmatch(name) and name.casefold() != "auto"):
        raise ValueError(
            f'{_shown(offered)}.{attribute} is {name!r}: it must be letters, digits, "_", "." and "-", and not "auto"'
        )
