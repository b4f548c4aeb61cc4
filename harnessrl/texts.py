"""`key=value` as it is typed: YAML has `001` and `on` for the number 1 and true, where a run's name or a key is meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harnessrl.errors import ConfigError


def override(item: str, texts: Mapping[str, str]) -> DictConfig:
    """One `key=value`; the value is read as YAML, but that of a key among `texts` stays as it is typed.

    `run=001` is the run "001" and `key=on` the key "on", where YAML has the numbers 1 and true.

    Raises:
        ConfigError: no key=value, or a value that is no YAML.
    """
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"{item!r}: expected key=value")
    try:
        part = OmegaConf.from_dotlist([item])
    except Exception as error:  # yaml's own errors: of the user's text
        raise ConfigError(f"{item!r}: the value is not readable as YAML: {first_line(error)}") from error
    dotted = key.replace("[", ".").replace("]", "")
    if (texts.get(dotted) == "one" or texts.get(dotted.rpartition(".")[0]) == "by name") and _bent(part, dotted):
        OmegaConf.update(part, dotted, text)
    refuse_bent(part, texts, item)
    return part


def refuse_bent(part: DictConfig, texts: Mapping[str, str], source: str) -> None:
    """Refuse a text that YAML made something else of.

    Raises:
        ConfigError: by source and key.
    """
    for key in texts:
        if bent := _bent(part, key):
            raise ConfigError(f"{source}: {key}: expected text, got {bent[0]!r} as YAML reads it; put it in quotes")


def _bent(part: DictConfig, key: str) -> list[Any]:
    """What YAML made something else of than a text: numbers, truth values, and so on, in lists and mappings too."""
    try:
        value = OmegaConf.select(part, key)
    except OmegaConfBaseException:  # it refers to another key; what that is, is seen when all is merged
        return []
    if isinstance(value, DictConfig):
        value = list(value.values())
    values = value if isinstance(value, list | ListConfig) else [value]
    return [one for one in values if not isinstance(one, str | None)]


def texts_of(cls: type) -> dict[str, str]:
    """Dotted keys of a dataclass whose values are texts: "one", "several" (a list) or "by name" (a mapping)."""
    forms = {str: "one", list[str]: "several", dict[str, str]: "by name"}
    found = {key: forms.get(kind) or forms.get(_without_none(kind)) for key, kind in _kinds(cls)}
    return {key: form for key, form in found.items() if form}


def _without_none(kind: Any) -> Any:
    """`X` of `X | None`."""
    others = [one for one in get_args(kind) if one is not type(None)]
    return others[0] if len(others) == 1 else kind


def _kinds(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a dataclass and their types."""
    for name, kind in get_type_hints(cls).items():
        if is_dataclass(kind):
            yield from _kinds(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def first_line(error: Exception) -> str:
    """What OmegaConf says, in a line."""
    line = str(error).partition("\n")[0]
    return "has no value (YAML wants a space after a mapping's colon)" if line.endswith("is not Optional") else line
