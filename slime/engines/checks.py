"""Checks of request fields, shared by all messages of the engine's HTTP contract."""

from __future__ import annotations

from typing import Any, cast


class RequestError(ValueError):
    """A request cannot be served as it is; answered as ``{"error": {"message": ...}}``.

    Args:
        message: Field, what was found, what is accepted.
        status: HTTP status of the answer.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


_TYPE_WORDS: dict[type, str] = {
    int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "an object", list: "a list",
}  # fmt: skip


def checked(value: Any, kind: type[Any], where: str) -> Any:
    """``value`` if it is a ``kind`` (an integer is a number too); RequestError naming ``where`` otherwise."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(f"{where} is {value!r}; accepted: {_TYPE_WORDS[kind]}")
    return value


def list_of(value: Any, kind: type[Any], where: str) -> list[Any]:
    """``value`` if it is a list of ``kind``; RequestError naming ``where`` otherwise."""
    if not isinstance(value, list):
        raise RequestError(f"{where} is {value!r}; accepted: a list, each element {_TYPE_WORDS[kind]}")
    return [checked(item, kind, f"{where}[{i}]") for i, item in enumerate(cast("list[Any]", value))]


def as_object(body: Any) -> dict[str, Any]:
    """``body`` if it is a JSON object; RequestError otherwise."""
    if not isinstance(body, dict):
        raise RequestError(f"the body is {type(body).__name__}; accepted: a JSON object")
    return cast("dict[str, Any]", body)
