"""What the page asks for: as it is described, for little of the engine's time, and only where it is served."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from octavo.async_engine import CacheSnapshot
from octavo.server.app import create_app
from octavo.server.ui import state
from octavo.server.ui.state import SHARE, Viewer
from octavo.settings import Settings
from tests.server.live import Live


def test_the_state_is_as_described(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a prompt of more than one block: " * 4, "max_tokens": 2})
    described = http.get("/openapi.json").json()
    schema = described["paths"]["/ui/state"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    shown = http.get("/ui/state").json()
    jsonschema.validate(shown, schema | {"components": described["components"]})
    cache = shown["cache"]
    assert cache["nodes"]
    assert sum(run[0] for run in cache["runs"]) == cache["stats"]["blocks_total"]


def test_it_can_be_switched_off(server: Live) -> None:
    async def paths() -> set[str]:
        return {getattr(route, "path", "") for route in create_app(server.service.engine, Settings(ui=False)).routes}

    on_step = server.service.engine.on_step
    assert not {path for path in server.run(paths()) if path.startswith("/ui")}
    server.service.engine.on_step = on_step


def test_many_pages_ask_the_engine_once(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the less often, the longer it takes. What comes is worked out for each tenant once."""
    engine, clock, asked = server.service.engine, [1000.0], 0
    real, worked_out, told = engine.snapshot, state._runs, 0

    def runs(*snapshot: Any) -> list[tuple[int, int, int, float]]:
        nonlocal told
        told += 1
        return worked_out(*snapshot)

    async def snapshot(most: int) -> CacheSnapshot:
        nonlocal asked
        asked += 1
        found = await real(most)
        found.seconds = 0.05
        return found

    async def look(viewer: Viewer, pages: int) -> None:
        await asyncio.gather(*(viewer.state(tenant) for tenant in ("a", "b") * (pages // 2)))

    monkeypatch.setattr(engine, "snapshot", snapshot)
    monkeypatch.setattr(state, "_runs", runs)
    monkeypatch.setattr("octavo.server.ui.state.time", SimpleNamespace(monotonic=lambda: clock[0]))
    viewer = Viewer(server.service)
    for seconds, times in ((0.0, 1), (0.05 / SHARE - 0.1, 1), (0.2, 2)):
        clock[0] += seconds
        server.run(look(viewer, 20))
        assert (asked, told) == (times, 2 * times)
