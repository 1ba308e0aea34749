"""What an engine made of a choice, checked against the grants. Pure Python."""

from collections.abc import Mapping

from corun.schedule.held import Choice, HeldPolicy, RequestT


def violation(
    policy: HeldPolicy, choice: Choice[RequestT], tokens: Mapping[str, int]
) -> str | None:
    """What in an executed step breaks the policy, or None.

    tokens: tokens scheduled, by request id; ``num_computed_tokens`` counts them already.
    """
    longer = [r.request_id for r in choice.decoding if tokens.get(r.request_id, 1) != 1]
    if longer:
        return f"vLLM scheduled more than one token in decode for {longer}"
    if len(tokens) < 2:
        return None  # cut by the engine, at its own constant length
    for request in (*choice.partial, *choice.starting):
        chunk = tokens.get(request.request_id)
        if chunk is None:
            continue
        if chunk == 1 and not policy.grants.mixed:
            return f"vLLM ran one token of {request.request_id}'s prompt beside other requests"
        cut = chunk != policy.step_tokens and policy.in_prefill(request)
        if cut and not policy.grants.free_chunks:
            return (
                f"vLLM cut {request.request_id}'s prompt after {chunk} tokens beside other "
                f"requests (must be {policy.step_tokens})"
            )
    return None
