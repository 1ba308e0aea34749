"""Seam: the OpenAI-compatible server. Every answer reports the seed, the policy and the domain.

A request without a seed gets one drawn where vLLM turns the HTTP request into sampling parameters;
a header reports it, so that sending the request again with that seed gives the same bits. Response
headers: ``x-corun-seed``, ``x-corun-policy``, ``x-corun-domain``; the domain is also OpenAI's
``system_fingerprint`` unless ``--fingerprint-mode`` says otherwise. ``GET /corun/report`` returns
what the workers report: the plan, the executed steps, violations, and the domain.

A completion request with several prompts: a seed that it brings is used for each of them (vLLM's
rule: batching prompts does not change their answers). Where it brings none, each prompt gets its
own, so that equal prompts do not come back as clones: prompt 0 a drawn one, s, and prompt i
``member_seed(s, i)``. The header lists them in order, at most ``MAX_LISTED`` of them.
"""

import importlib
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

from corun.config import resolve
from corun.contract import fingerprint
from corun.engine.wrap_once import wrap_once
from corun.list_seeds import member_seed
from corun.seeds import draw_seed

REQUESTS = (
    ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest"),
)
# Where `build_app` and `init_app_state` are looked up when the server starts, newest vLLM first.
# In 0.32 the second is a shim that re-exports the first.
SERVERS = {
    "0.32": "vllm.entrypoints.launchers.api_server.entry",
    "0.25": "vllm.entrypoints.openai.api_server",
}
SEAMS = tuple((module, f"{name}.to_sampling_params") for module, name in REQUESTS)
SEAMS_BY_VERSION = {
    version: (
        (module, "build_app", ("args",)),
        (module, "init_app_state", ("engine_client", "state", "args")),
    )
    for version, module in SERVERS.items()
}

REPORT_PATH = "/corun/report"
MAX_LISTED = 64  # seeds in the header; keeps it far below the 8 KB that proxies allow
_UNSEEDED = (None, -1)  # vLLM reads -1 as no seed

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# The seeds of the HTTP request being answered, in prompt order; None outside of one.
_used: ContextVar[list[int] | None] = ContextVar("corun_seeds", default=None)


class SeedMiddleware:
    """Pure ASGI middleware: adds the ``x-corun-*`` headers. It never reads or holds a body.

    state: attribute `corun` of ``app.state``, a mapping with "policy" and "domain", once known.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seeds: list[int] = []

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_headers(scope, seeds)]
            await send(message)

        token = _used.set(seeds)
        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            _used.reset(token)


def list_seeds(seeds: list[int]) -> str:
    """The value of ``x-corun-seed``: one seed that all prompts share, or each prompt's in order."""
    listed = [str(seed) for seed in (seeds if len(set(seeds)) > 1 else seeds[:1])]
    return ",".join(listed[:MAX_LISTED] + ["..."] * (len(listed) > MAX_LISTED))


def _headers(scope: Scope, seeds: list[int]) -> list[tuple[bytes, bytes]]:
    values = {}
    if seeds:
        values["x-corun-seed"] = list_seeds(seeds)
    published = getattr(getattr(scope.get("app"), "state", None), "corun", None)
    if published:
        values["x-corun-policy"] = published["policy"]
        values["x-corun-domain"] = published["domain"]
    return [(name.encode(), value.encode()) for name, value in values.items()]


def next_seed(used: list[int]) -> int:
    """The seed of a request's next unseeded prompt. used: those of the prompts before it."""
    return member_seed(used[0], len(used)) if used else draw_seed()


def _to_sampling_params(original: Callable) -> Callable:
    """Seed unseeded requests where vLLM makes their sampling parameters, once per prompt."""

    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        used = _used.get()
        if used is None:
            return original(self, *args, **kwargs)
        given = self.seed
        if given in _UNSEEDED:
            self.seed = next_seed(used)
        used.append(self.seed)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.seed = given

    return to_sampling_params


async def _report(request: Any) -> Any:
    from starlette.responses import JSONResponse

    workers = await request.app.state.engine_client.collective_rpc("corun_report")
    return JSONResponse({**request.app.state.corun, "workers": workers})


def _build_app(original: Callable) -> Callable:
    """Add the middleware and the report to the app."""

    def build_app(args: Any, *rest: Any, **kwargs: Any) -> Any:
        app = original(args, *rest, **kwargs)
        if resolve(args.additional_config).enabled:
            from starlette.middleware import Middleware

            # Innermost: after authentication, and in the task that runs the endpoint.
            app.user_middleware.append(Middleware(SeedMiddleware))
            if app.middleware_stack is not None:  # vLLM's last step has built it
                app.middleware_stack = app.build_middleware_stack()
            app.add_route(REPORT_PATH, _report, methods=["GET"])
        return app

    return build_app


def _init_app_state(original: Callable) -> Callable:
    """Learn the policy and the domain once the engine is up."""

    async def init_app_state(
        engine_client: Any, state: Any, args: Any, *rest: Any, **kwargs: Any
    ) -> None:
        if resolve(args.additional_config).enabled:
            report = (await engine_client.collective_rpc("corun_report"))[0]
            domain = fingerprint(report["domain"])
            state.corun = {"policy": report["plan"]["policy"], "domain": domain}
            if args.fingerprint_mode == "full":  # the default
                args.fingerprint_mode, args.fingerprint_value = "custom", domain
        await original(engine_client, state, args, *rest, **kwargs)

    return init_app_state


def hold_request(request_class: Any) -> None:
    """Seed the requests of one of vLLM's classes in REQUESTS."""
    wrap_once(request_class, "to_sampling_params", _to_sampling_params)


def hold_server(server: Any) -> None:
    """Hold one of vLLM's server modules."""
    wrap_once(server, "build_app", _build_app)
    wrap_once(server, "init_app_state", _init_app_state)


def running_servers() -> Iterator[Any]:
    """The server modules of this process: imported, or run as ``python -m``."""
    for name in SERVERS.values():
        module = sys.modules.get(name)
        serve = getattr(module, "build_and_serve", None)
        if serve is not None and serve.__module__ == name:  # else the shim
            yield module
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) in SERVERS.values():
        yield main


def install_http() -> None:
    """Hold vLLM's HTTP server to the reporting above. Idempotent, and inert while CoRun is off.

    Does nothing in a process that has not imported the server: it serves no HTTP.
    """
    for server in running_servers():
        for module, request_class in REQUESTS:
            hold_request(getattr(importlib.import_module(module), request_class))
        hold_server(server)
