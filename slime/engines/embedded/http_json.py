"""JSON over aiohttp: bodies in, replies and errors out."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from slime.engines.api import RequestError
from slime.errors import SlimeError

logger = logging.getLogger(__name__)


async def read_json(request: web.Request) -> Any:
    """Body of a request; an empty one is an empty object.

    Raises:
        RequestError: It is not JSON.
    """
    body = await request.read()
    if not body.strip():
        return {}
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def json_reply(value: Any, status: int = 200) -> web.Response:
    """A reply with ``value`` as its body."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_reply(message: str, status: int) -> web.Response:
    """A reply in the shape every error has."""
    return json_reply({"error": {"message": message}}, status=status)


@web.middleware
async def report_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every failure of a handler with its reason; a failed request never ends the server."""
    try:
        return await handler(request)
    except RequestError as error:
        return error_reply(str(error), error.status)
    except web.HTTPException as error:
        return error_reply(f"{request.method} {request.path}: {error.reason}", error.status)
    except SlimeError as error:
        return error_reply(str(error), 500)
    except Exception as error:  # request boundary: one bad request must not take the others down
        logger.exception("%s %s failed", request.method, request.path)
        return error_reply(f"{request.method} {request.path} failed: {error!r}", 500)
