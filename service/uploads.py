"""Reads the image files of a multipart request, and says what is wrong with one that holds none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from service.limits import Refused

if TYPE_CHECKING:
    from starlette.datastructures import FormData
    from starlette.requests import Request


async def read_images(request: Request, field: str, most: int) -> list[bytes] | Refused:
    """The files of a multipart field, at most ``most``, or why not.

    We read the form ourselves: BentoML's reader takes text where a file belongs for a URL and fetches it, and a JSON body
    likewise, so a stranger could make the service send requests.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if not media_type:
        return Refused("image_missing", f'send the image as multipart/form-data, in the field "{field}"')
    if media_type != "multipart/form-data":
        return Refused("not_multipart", f'send the image as multipart/form-data, in the field "{field}"')
    crowd = Refused("too_many_images", f"at most {most} image{'s' if most > 1 else ''} in one request", limit=most)
    try:
        async with request.form(max_files=most + 1, max_fields=8, max_part_size=65_536) as form:
            return await _files(form, field) if len(form.getlist(field)) <= most else crowd
    except Refused as refused:  # the body grew past the limit while it was read
        return refused
    except (HTTPException, ValueError) as error:
        return (
            crowd if "too many files" in str(getattr(error, "detail", error)).lower() else Refused("bad_request", "the multipart form cannot be read")
        )


async def _files(form: FormData, field: str) -> list[bytes] | Refused:
    parts = form.getlist(field)
    if not parts:
        return Refused("image_missing", f'the form has no field "{field}"')
    if any(isinstance(part, str) for part in parts):
        return Refused("image_missing", f'the field "{field}" holds text; it must hold a file')
    return [await part.read() for part in parts if not isinstance(part, str)]
