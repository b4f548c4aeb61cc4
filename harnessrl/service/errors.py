"""Answers that are errors: one exception, and its body in the form of the API that was called."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with an HTTP status; raised anywhere below a route's handler."""

    def __init__(self, status: int, message: str, *, code: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        """Machine-readable reason of the model APIs, such as context_length_exceeded."""
        self.retry_after = retry_after
        """Seconds after which the same request may succeed; sent as Retry-After."""

    def response(self, *, model_route: bool) -> web.Response:
        """The error as an answer: OpenAI's form on model routes, {"detail": ...} elsewhere."""
        body = self.openai() if model_route else {"detail": self.message}
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return web.Response(
            status=self.status, body=orjson.dumps(body), content_type="application/json", headers=headers
        )

    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


def parse_json(body: bytes) -> Any:
    """Read a body.

    Raises:
        ApiError: 400, it is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
