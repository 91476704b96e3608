"""CORS: which web pages a browser lets read answers. Without allowed origins, none but the server's own."""

from dataclasses import dataclass

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from faser.api.middleware.request_id import REQUEST_ID_HEADER

_EXPOSED_HEADERS = (REQUEST_ID_HEADER, "Retry-After")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsSettings:
    """Origins: no page of another origin is let in while there are none. "*" stands for all."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


def add_cors(app: FastAPI, settings: CorsSettings) -> None:
    """Put the middleware around the app, if any origin is allowed."""
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=settings.methods,
            allow_headers=settings.headers,
            allow_credentials=settings.credentials,
            expose_headers=_EXPOSED_HEADERS,
        )
