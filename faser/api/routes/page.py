"""GET / and the files below /page/: the page, for browsers. A program that asks for JSON learns the routes."""

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from faser.api.page.files import PageFiles


def page_router(files: PageFiles) -> APIRouter:
    router = APIRouter()

    async def get_file(http: Request) -> Response:
        shown = files.answer(http.scope)
        if shown is None:
            raise HTTPException(404)  # its message lists the routes
        return shown

    for route in sorted(files.routes):
        router.add_api_route(route, get_file, methods=["GET", "HEAD"], include_in_schema=False)
    return router
