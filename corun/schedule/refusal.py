"""Requests that no held schedule can ever run, in words for their sender. Pure Python."""

from corun.schedule.ledger import KVGeometry


def refusal(
    geometry: KVGeometry,
    prompt_tokens: int,
    max_tokens: int,
    *,
    streaming: bool = False,
    multimodal: bool = False,
) -> str | None:
    """Why CoRun can never run such a request, in words for its sender; None if it can.

    streaming: its prompt arrives in pieces. multimodal: it has images, audio or video.
    """
    if streaming:
        return (
            "CoRun does not take streaming input: how far a request has got when the next piece "
            "arrives depends on other requests. Send the whole prompt at once"
        )
    if multimodal:
        return (
            "CoRun does not take images, audio or video: the room left in the encoder cache, which "
            "all requests share, would decide where a prompt is cut"
        )
    return geometry.never_fits_message(prompt_tokens, max_tokens)
