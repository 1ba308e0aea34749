"""corun.engine.http, driven by hand: its headers, and the seeds that it gives and reports."""

import asyncio
import importlib
import json
from types import SimpleNamespace

import pytest

from corun.engine import http
from corun.list_seeds import member_seed
from corun.seeds import DRAWN_SEED_BITS


def make_request_class():
    """What vLLM's request classes have that matters here; a class of its own for each test."""

    class Request:
        def __init__(self, **keys):
            self.seed = keys.get("seed")
            self.prompts = keys.get("prompts", 1)

        def to_sampling_params(self, max_tokens, defaults=None):
            if self.seed == "boom":
                raise ValueError("boom")
            seed = None if self.seed == -1 else self.seed
            return SimpleNamespace(seed=seed, max_tokens=max_tokens)

    http.hold_request(Request)
    http.hold_request(Request)  # a second time changes nothing
    return Request


def app_for(request_class, seen, chunks=1):
    """An ASGI app like vLLM's endpoints: reads the body, makes parameters, then answers."""

    async def app(scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        seen["body"] = body
        try:
            keys = json.loads(body)
        except ValueError:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"bad"})
            return
        request = request_class(**keys)

        async def handler():  # vLLM runs its handlers in a task of their own
            return [request.to_sampling_params(8) for _ in range(request.prompts)]

        seen["seeds"] = [p.seed for p in await asyncio.create_task(handler())]
        seen["request"] = request
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        for i in range(chunks):
            await send(
                {"type": "http.response.body", "body": b"x%d" % i, "more_body": i < chunks - 1}
            )

    return app


def call(app, body, state=None, pieces=None):
    """One POST; returns (status, headers, body chunks)."""
    sent = []
    parts = pieces or [body]
    incoming = [
        {"type": "http.request", "body": p, "more_body": i < len(parts) - 1}
        for i, p in enumerate(parts)
    ]

    async def receive():
        return incoming.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    if state is not None:
        scope["app"] = SimpleNamespace(state=SimpleNamespace(corun=state))
    asyncio.run(http.SeedMiddleware(app)(scope, receive, send))
    headers = [(k.decode(), v.decode()) for k, v in sent[0]["headers"]]
    assert len({k for k, _ in headers}) == len(headers)
    return sent[0]["status"], dict(headers), [m["body"] for m in sent[1:]]


def ask(**keys):
    seen: dict = {}
    _, headers, _ = call(app_for(make_request_class(), seen), json.dumps(keys).encode())
    return seen, headers


@pytest.mark.parametrize("given", [{}, {"seed": None}, {"seed": -1}])
def test_an_unseeded_request_gets_a_seed_and_is_told(given):
    seen, headers = ask(**given)
    assert 0 <= seen["seeds"][0] < 2**DRAWN_SEED_BITS
    assert headers["x-corun-seed"] == str(seen["seeds"][0])
    assert headers["a"] == "b"
    assert seen["request"].seed == given.get("seed")  # the request itself is left as it came


def test_draws_differ():
    assert len({ask()[0]["seeds"][0] for _ in range(200)}) == 200


@pytest.mark.parametrize("seed", [0, 42, -7, 2**63 - 1])
def test_a_given_seed_is_used_and_reported(seed):
    seen, headers = ask(seed=seed, prompts=3)
    assert seen["seeds"] == [seed] * 3
    assert headers["x-corun-seed"] == str(seed)


def test_several_unseeded_prompts_get_a_seed_each():
    seen, headers = ask(prompts=40)
    seeds = seen["seeds"]
    assert len(set(seeds)) == 40
    assert headers["x-corun-seed"] == ",".join(map(str, seeds))
    assert seeds[1:] == [member_seed(seeds[0], i) for i in range(1, 40)]


def test_a_long_list_of_seeds_is_cut_but_can_be_derived():
    seen, headers = ask(prompts=1000)
    listed = headers["x-corun-seed"].split(",")
    assert (len(listed), listed[-1]) == (http.MAX_LISTED + 1, "...")
    assert len(headers["x-corun-seed"]) < 2000
    assert seen["seeds"][999] == member_seed(int(listed[0]), 999)


def test_streams_pass_chunk_by_chunk_with_the_headers_first():
    seen: dict = {}
    app = app_for(make_request_class(), seen, chunks=5)
    status, headers, chunks = call(app, b'{"stream": true}')
    assert status == 200
    assert chunks == [b"x0", b"x1", b"x2", b"x3", b"x4"]
    assert headers["x-corun-seed"] == str(seen["seeds"][0])


def test_bodies_pass_untouched():
    big = json.dumps({"prompt": "x" * 3_000_000}).encode()
    for body in (big, b"not json", b"", b'{"seed": 1, "seed": 2}', b"\xff\xfe"):
        seen: dict = {}
        pieces = [body[i : i + 65536] for i in range(0, len(body), 65536)] or [b""]
        call(app_for(make_request_class(), seen), body, pieces=pieces)
        assert seen["body"] == body


def test_no_seed_header_where_nothing_was_sampled():
    status, headers, _ = call(app_for(make_request_class(), {}), b"not json")
    assert status == 400
    assert "x-corun-seed" not in headers


def test_policy_and_domain_are_reported_once_known():
    seen: dict = {}
    state = {"policy": "isolate", "domain": "corun1-abc"}
    _, headers, _ = call(app_for(make_request_class(), seen), b"{}", state=state)
    assert (headers["x-corun-policy"], headers["x-corun-domain"]) == ("isolate", "corun1-abc")
    _, headers, _ = call(app_for(make_request_class(), seen), b"{}")
    assert not {"x-corun-policy", "x-corun-domain"} & set(headers)


def test_outside_of_the_server_nothing_changes():
    request = make_request_class()()
    assert request.to_sampling_params(8).seed is None
    assert request.seed is None


def test_concurrent_requests_keep_their_seeds_apart():
    request_class = make_request_class()

    async def one(keys):
        seen: dict = {}
        sent = []

        async def receive():
            await asyncio.sleep(0)
            return {"type": "http.request", "body": json.dumps(keys).encode()}

        async def send(message):
            await asyncio.sleep(0)
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await http.SeedMiddleware(app_for(request_class, seen))(scope, receive, send)
        return seen["seeds"], dict(sent[0]["headers"])[b"x-corun-seed"].decode()

    async def everyone():
        return await asyncio.gather(*(one({"prompts": 1 + i % 3}) for i in range(60)))

    answers = asyncio.run(everyone())
    assert all(header == ",".join(map(str, seeds)) for seeds, header in answers)
    assert len({s for seeds, _ in answers for s in seeds}) == sum(len(s) for s, _ in answers)


def test_a_failing_request_leaves_no_trace():
    request_class = make_request_class()
    request = request_class(seed="boom")
    with pytest.raises(ValueError, match="boom"):
        request.to_sampling_params(8)
    with pytest.raises(ValueError, match="boom"):
        call(app_for(request_class, {}), b'{"seed": "boom"}')
    assert http._used.get() is None


def test_other_connections_pass():
    calls = []

    async def app(scope, receive, send):
        calls.append(scope["type"])

    asyncio.run(http.SeedMiddleware(app)({"type": "lifespan"}, None, None))
    assert calls == ["lifespan"]


REPORT = {"plan": {"policy": "isolate"}, "domain": {"x": 1}, "violations": []}


class FakeClient:
    def __init__(self):
        self.calls = []

    async def collective_rpc(self, method):
        self.calls.append(method)
        return [REPORT]


def fake_server(stack_built=True):
    """A module like vLLM's: ``build_app`` gives a Starlette app, ``init_app_state`` fills it."""
    starlette = pytest.importorskip("starlette.applications")
    responses = pytest.importorskip("starlette.responses")
    request_class = make_request_class()

    async def complete(request):
        params = request_class(**await request.json()).to_sampling_params(4)
        return responses.JSONResponse({"seed": params.seed})

    def build_app(args, supported_tasks=None):
        app = starlette.Starlette()
        app.add_route("/v1/completions", complete, methods=["POST"])
        if stack_built:  # as vLLM's own does
            app.middleware_stack = app.build_middleware_stack()
        return app

    async def init_app_state(engine_client, state, args, supported_tasks=None):
        state.engine_client = engine_client
        state.fingerprint = (args.fingerprint_mode, args.fingerprint_value)

    server = SimpleNamespace(build_app=build_app, init_app_state=init_app_state)
    http.hold_server(server)
    http.hold_server(server)
    return server


def arguments(policy, mode="full"):
    config = {"corun": {"policy": policy}} if policy else {}
    return SimpleNamespace(additional_config=config, fingerprint_mode=mode, fingerprint_value=None)


@pytest.mark.parametrize("mode", ["full", "none"])
def test_the_server_learns_its_domain_and_reports_it(mode):
    testclient = pytest.importorskip("starlette.testclient")
    server, client = fake_server(stack_built=mode == "full"), FakeClient()
    args = arguments("isolate", mode)
    app = server.build_app(args, ("generate",))
    asyncio.run(server.init_app_state(client, app.state, args))
    domain = http.fingerprint(REPORT["domain"])
    assert app.state.fingerprint == (("custom", domain) if mode == "full" else (mode, None))
    with testclient.TestClient(app) as http_client:
        answer = http_client.post("/v1/completions", json={"prompt": "a"})
        assert answer.headers["x-corun-seed"] == str(answer.json()["seed"])
        assert answer.headers["x-corun-domain"] == domain
        assert http_client.get("/corun/report").json() == {
            "policy": "isolate",
            "domain": domain,
            "workers": [REPORT],
        }
    assert client.calls == ["corun_report"] * 2


@pytest.mark.parametrize("policy", ["off", None])
def test_a_server_without_corun_is_left_alone(policy, monkeypatch):
    monkeypatch.delenv("CORUN_POLICY", raising=False)
    testclient = pytest.importorskip("starlette.testclient")
    server, client = fake_server(), FakeClient()
    args = arguments(policy)
    app = server.build_app(args, ("generate",))
    asyncio.run(server.init_app_state(client, app.state, args))
    assert app.user_middleware == []
    assert app.state.fingerprint == ("full", None)
    with testclient.TestClient(app) as http_client:
        answer = http_client.post("/v1/completions", json={"prompt": "a"})
        assert answer.json() == {"seed": None}
        assert http_client.get("/corun/report").status_code == 404
    assert client.calls == []


@pytest.mark.parametrize("name", [name for _, name in http.REQUESTS])
def test_vllms_own_request_classes(name):
    pytest.importorskip("vllm")
    module = importlib.import_module({n: m for m, n in http.REQUESTS}[name])
    request_class = getattr(module, name)
    prompt = {
        "CompletionRequest": {"prompt": "a"},
        "ChatCompletionRequest": {"messages": [{"role": "user", "content": "a"}]},
        "ResponsesRequest": {"input": "a"},
    }[name]
    http.hold_request(request_class)
    for given in ({}, {"seed": None}, {"seed": -1}, {"seed": 11}):
        request = request_class(model="m", **prompt, **given)
        used: list[int] = []
        token = http._used.set(used)
        try:
            seeds = [request.to_sampling_params(8, {}).seed for _ in range(2)]
        finally:
            http._used.reset(token)
        assert seeds == used
        assert (set(seeds) == {11}) == (given.get("seed") == 11)
        assert request.seed == given.get("seed")
        assert request.to_sampling_params(8, {}).seed == (11 if 11 in seeds else None)
