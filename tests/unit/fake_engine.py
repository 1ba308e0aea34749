"""A stand-in for vLLM's LLMEngine and LLM that verification can be played on without vLLM."""

from types import SimpleNamespace


class FakeEngine:
    """Gives every admitted request one token a step; `rows` at a time, in order of arrival.

    Tokens and logprobs follow from the prompt, the seed and the position alone, unless `leak` says
    otherwise: leak(request, position, rows in the step) is added to the token's logprob. crash: the
    step at which it dies. refuse: called with (name, requests present); True refuses the request.
    """

    def __init__(self, rows=100, leak=lambda *_: 0.0, crash=None, refuse=lambda *_: False):
        self.rows, self.leak, self.crash, self.refuse = rows, leak, crash, refuse
        self.live = {}
        self.log = []
        self.steps = 0

    def add_request(self, request_id, prompt, params):
        name = request_id.partition("/")[2]
        if self.refuse(name, len(self.live)):
            raise ValueError("no room")
        assert request_id not in self.live
        self.log.append((self.steps, "add", request_id))
        n = params.get("n", 1)
        self.live[request_id] = {
            "name": name,
            "params": params,
            "prompt": prompt["prompt_token_ids"],
            "done": [[] for _ in range(n)],
            "logprobs": [[] for _ in range(n)],
        }

    def abort_request(self, request_ids):
        for request_id in request_ids:
            self.log.append((self.steps, "abort", request_id))
            del self.live[request_id]

    def has_unfinished_requests(self):
        return bool(self.live)

    def step(self):
        assert self.live, "stepped while idle"
        self.steps += 1
        if self.steps == self.crash:
            raise RuntimeError("the engine died")
        running = list(self.live.items())[: self.rows]
        outputs = []
        for request_id, state in running:
            for index in range(len(state["done"])):
                outputs.append(self._token(request_id, state, index, len(running)))
            if len(state["done"][0]) == state["params"]["max_tokens"]:
                del self.live[request_id]
        return outputs

    def _token(self, request_id, state, index, rows):
        tokens, logprobs, params = state["done"][index], state["logprobs"][index], state["params"]
        at = len(tokens)
        key = sum(state["prompt"]) + 31 * (params.get("seed") or 0) + 7 * at + index
        tokens.append(key % 1000)
        value = -(key % 64) / 8 + self.leak(state["name"], at, rows)
        logprobs.append({tokens[-1]: SimpleNamespace(logprob=value, rank=1)})
        ended = len(tokens) == params["max_tokens"]
        completion = SimpleNamespace(
            index=index,
            token_ids=list(tokens),
            logprobs=list(logprobs),
            finish_reason="length" if ended else None,
            stop_reason=None,
        )
        return SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=state["prompt"],
            prompt_logprobs=None,
            outputs=[completion],
            finished=ended and index == len(state["done"]) - 1,
        )


class FakeLLM:
    """What verification uses of vLLM's LLM. report: what corun_report returns, or None for none."""

    def __init__(self, engine, report=None):
        self.llm_engine = engine
        self.report = report
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 1000)

    def collective_rpc(self, method):
        assert method == "corun_report"
        if self.report is None:
            raise NotImplementedError("Method 'corun_report' is not implemented.")
        return [self.report]
