"""The HTTP application: every route behind one guard that authenticates, commits, and words errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from harnessrl.service.api import EVENT_ROUTES, Api
from harnessrl.service.errors import ApiError
from harnessrl.service.gateway import Gateway
from harnessrl.service.keys import permitted
from harnessrl.service.settings import ServiceConfig
from harnessrl.service.store import Store

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MODEL_ROUTE = "/proxy/rollout/"
_OPENAI = "/proxy/rollout/{rollout_id}/attempt/{attempt}/mode/{mode}/openai/v1"


def make_app(config: ServiceConfig, store: Store, api: Api, gateway: Gateway) -> web.Application:
    """Put the handlers together."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        model_route = request.path.startswith(_MODEL_ROUTE)
        try:
            _authenticate(request, config.key)
            response = await handler(request)
            if not model_route:  # model routes commit before they write (gateway.py)
                await store.saved()
            return response
        except ApiError as error:
            return error.response(model_route=model_route)
        except web.HTTPException as error:
            return _plain(error, config).response(model_route=model_route)
        except (asyncio.CancelledError, ConnectionError):  # the client is gone: nobody is owed an answer
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return ApiError(500, "internal error; see the service's log").response(model_route=model_route)

    app = web.Application(middlewares=[guard], client_max_size=config.max_body)
    app.add_routes(api.routes())
    app.add_routes([web.post(_OPENAI + "/{path:.+}", gateway.call), web.get(_OPENAI + "/models", gateway.models)])
    return app


def _authenticate(request: web.Request, master: str) -> None:
    if request.path == "/healthz":
        return
    given = request.headers.get("Authorization", "")
    key = given[7:].strip() if given[:7].lower() == "bearer " else request.headers.get("x-api-key")
    if not permitted(key, master, _owner(request)):
        raise ApiError(401, "missing or wrong key: send Authorization: Bearer KEY, or x-api-key: KEY")


def _owner(request: web.Request) -> str | None:
    """The rollout whose own key reaches what the request asks for; None where only the master key does."""
    resource = request.match_info.route.resource
    if resource is None:  # no such route: 401 would tell a harness that its key is wrong
        return request.path.removeprefix(_MODEL_ROUTE).split("/")[0] if request.path.startswith(_MODEL_ROUTE) else None
    own = resource.canonical in EVENT_ROUTES or resource.canonical.startswith(_OPENAI)
    return request.match_info["rollout_id"] if own else None


def _plain(error: web.HTTPException, config: ServiceConfig) -> ApiError:
    """aiohttp's own refusals (no such route, wrong method, body too large) in the API's form."""
    if error.status == 413:
        return ApiError(413, f"the body is larger than {config.max_body} bytes")
    return ApiError(error.status, error.reason)
