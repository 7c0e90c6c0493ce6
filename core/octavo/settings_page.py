"""Every setting on a page: docs/settings.md, and what `octavo settings` prints."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from octavo.options import flags_of
from octavo.settings import GROUPS, Settings, schemas, variable
from octavo.settings.values import allowed, default

_TOP = """\
<!-- Made by `make settings`, from the settings' source: change it there. -->
# Settings

Each is given by a flag of `octavo serve`, by a variable, or in a TOML file under its name; as an argument of
`octavo.LLM` and `octavo.settings.Settings` too. Other commands take some of the flags. A flag or an argument wins over
the variable, that over the file. `octavo settings` prints what they are here, and where each comes from.

```toml
# octavo serve --config octavo.toml, or OCTAVO_CONFIG=octavo.toml
model_id = "demo"
port = 8080
prefix_caching = true
api_key = ["first", "second"]
attention = "reference"
```

A value that cannot be is refused with where it came from and what is allowed, and so is a name in the file that is no
setting's. A variable that looks like a misspelt setting, or is [one of TGI's that is
gone](migrate-from-tgi.md#flags-and-variables-that-are-gone), gets a warning.
"""


def markdown() -> str:
    """The page of all settings."""
    parts = [_TOP]
    for group, names in GROUPS.items():
        parts.append(
            f"\n## {group}\n\n| setting | flag, variable | default | allowed | meaning |\n|---|---|---|---|---|\n"
        )
        parts.extend(_row(name) for name in names)
    return "".join(parts)


def _row(name: str) -> str:
    field, schema = Settings.model_fields[name], schemas()[name]
    names = "<br>".join(f"`{one}`" for one in (*flags_of(name), variable(name)))
    value = default(field)
    shown = "" if value is None else f"`{value}`"
    meaning = (field.description or "").replace("*", "\\*")
    return f"| `{name}` | {names} | {shown} | {allowed(schema)} | {meaning} |\n"


def table(settings: Settings) -> Table:
    """What every setting is, and where it comes from; keys are not shown."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("setting", "value", "from"):
        shown.add_column(title, overflow="fold")
    for group, names in GROUPS.items():
        shown.add_section()
        shown.add_row(f"[bold]{group}[/bold]")
        for name in names:
            value = getattr(settings, name)
            told = f"{len(value)}, not shown" if name == "api_key" and value else _text(value)
            shown.add_row(f"  {name}", escape(told), escape(settings.sources.get(name, "default")))
    return shown


def _text(value: object) -> str:
    """As one would write it; nothing where it is unset."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)
