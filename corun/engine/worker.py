"""Seam: the worker. It attaches CoRun to the model runner and audits every step.

vLLM builds its runner inside ``init_device``; everything CoRun holds is attached to that one object
afterwards: attention once the KV cache exists (a captured graph bakes the kernel in), the rest once
warm-up is over.
"""

import os
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from corun.config import CoRunConfig
from corun.engine import (
    attention,
    collectives,
    domain,
    gemm,
    gemm_check,
    lm_head,
    padding,
    settings,
)
from corun.engine.arguments import PLAN_KEY
from corun.engine.audit import StepAudit
from corun.engine.probes import spot_check
from corun.engine.probes.measure import measure
from corun.engine.runner_state import RunnerState
from corun.engine.sampling import core
from corun.engine.scheduled import computed_before
from corun.engine.seeds import take_seed
from corun.engine.split_attention import SplitAttention
from corun.engine.split_latent import SplitLatent
from corun.engine.split_rows import unsplit
from corun.engine.split_steps import SplitSteps
from corun.plan import DECODE, PREFILL, Plan, StepShape

SEAMS: tuple[tuple, ...] = (
    ("vllm.config", "set_current_vllm_config"),
    ("vllm.v1.worker.gpu_worker", "Worker.init_device"),
    ("vllm.v1.worker.gpu_worker", "Worker.load_model"),
    ("vllm.v1.worker.gpu_worker", "Worker.get_model"),
    ("vllm.v1.core.sched.output", "SchedulerOutput", ("preempted_req_ids",)),
    ("vllm.v1.worker.gpu_worker", "Worker.initialize_from_config", ("kv_cache_config",)),
    ("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model"),
    ("vllm.v1.worker.gpu_worker", "Worker.execute_model", ("scheduler_output",)),
    ("vllm.v1.worker.gpu_worker", "Worker.sample_tokens", ("grammar_output",)),
    ("vllm.v1.core.sched.output", "NewRequestData.from_request"),
    ("vllm.v1.core.sched.output", "CachedRequestData.make_empty"),
)
SEAMS_BY_VERSION: dict[str, tuple[tuple, ...]] = {
    "0.32": (("vllm.v1.worker.cpu_worker", "CPUWorker.compile_or_warm_up_model"),),
}


def _prompt_len(new: Any) -> int:
    """Tokens in a new request's prompt, given as ids or as embeddings."""
    prompt = new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds
    return len(prompt)


class CoRunWorkerMixin:
    """CoRun over vLLM's worker (GPU or CPU)."""

    _corun_audit: StepAudit | None = None
    _corun_split: SplitSteps | None = None

    def init_device(self) -> None:
        """vLLM's, after the constraint on GEMMs that a certificate was measured under."""
        given = self.vllm_config.additional_config  # type: ignore[attr-defined]
        self._corun_config = CoRunConfig.from_mapping(given["corun"])
        self._corun_plan = Plan.from_mapping(given[PLAN_KEY])
        if self._corun_plan.constrained and not current_platform.is_cpu():
            gemm.install(os.environ)
        super().init_device()  # type: ignore[misc]
        gemm_check.check(self.device, self.vllm_config.model_config.dtype)  # type: ignore[attr-defined]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; on a CPU it also notes the weights before they are repacked."""
        # Read once, as the front end does: the files may be others later.
        self._corun_endings = settings.endings(self.vllm_config.model_config)  # type: ignore[attr-defined]
        self._corun_as_loaded: dict[str, list] = {}
        if current_platform.is_cpu():
            domain.note_loaded(self._corun_as_loaded)
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        plan = self._corun_plan
        if plan.split_beyond:
            latent = self.vllm_config.model_config.use_mla  # type: ignore[attr-defined]
            self._corun_split = (SplitLatent if latent else SplitAttention)(
                plan.split_beyond,
                plan.decode_rows,
                self.device,  # type: ignore[attr-defined]
            )
            self._corun_split.hold_layers(self.get_model())  # type: ignore[attr-defined]

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """vLLM's, then one split for decode attention and one order for all-reduces."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        plan, runner = self._corun_plan, self.model_runner  # type: ignore[attr-defined]
        runner.corun = self._corun = RunnerState(plan, split=self._corun_split)
        if self._corun_split is not None:
            self._corun_split.follow(runner, self._corun)
        self._corun_backends = attention.install(runner, self._corun)
        most = plan.decode_rows if plan.policy == "isolate" else plan.max_prefill_tokens
        collectives.install(get_tp_group(), most)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's, then the LM head, the sampler, padding and the audit."""
        config = self.vllm_config.model_config  # type: ignore[attr-defined]
        # First of all: vLLM's own warm-up ends by watching for kernels that are compiled later.
        core.warm_up(
            self._corun_plan.decode_rows,
            config.get_vocab_size(),
            config.dtype,
            self.device,  # type: ignore[attr-defined]
        )
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        runner, state = self.model_runner, self._corun  # type: ignore[attr-defined]
        self._corun_v2 = bool(getattr(self, "use_v2_model_runner", False))
        self._corun_logits = lm_head.install(runner.model, state)
        if self._corun_v2:
            from corun.engine.sampling import v2 as sampling

            padding.install_v2(runner, state)
        else:
            from corun.engine.sampling import v1 as sampling  # type: ignore[no-redef]

            padding.install_v1(runner, state)
        sampling.install(runner)
        self._corun_audit = StepAudit(
            self._corun_plan, self._corun_config.strict, self._corun_config.step_log
        )
        if self._corun_plan.certificate is not None:
            with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
                spot_check.run(runner, self.vllm_config, self._corun_logits, self._corun_plan)  # type: ignore[attr-defined]
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """One forward pass, after noting its shape and its new requests' seeds."""
        if self._corun_audit is None:  # vLLM's own warm-up
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        self._take_seeds(scheduler_output)
        tokens = scheduler_output.num_scheduled_tokens
        if not tokens:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        state = self._corun
        state.decode_step = max(tokens.values()) == 1
        state.padded_logits, state.rows, state.graph, state.sample_rows = None, 0, False, 0
        computed = computed_before(scheduler_output)
        state.spans = {name: (computed[name], computed[name] + n) for name, n in tokens.items()}
        self._corun_audit.note_reuse(
            len(scheduler_output.preempted_req_ids or ()),
            sum(new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs),
            self._split_rows(state.spans),
        )
        self._corun_pending = (
            len(tokens),
            scheduler_output.total_num_scheduled_tokens,
            self._prefills(state.spans),
        )
        try:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        finally:
            state.spans = None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sampling, then the audit of the step that it ends."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._corun_audit is not None:
            self._audit_step()
        return output

    def corun_report(self) -> dict[str, Any]:
        """RPC: the plan, the audit's counts and the domain, all JSON values."""
        runner = "V2" if self._corun_v2 else "CPU" if current_platform.is_cpu() else "V1"
        assert self._corun_audit is not None
        plan = self._corun_plan.to_mapping()
        return {
            "plan": plan,
            "one_split": self._corun_split.one_split if self._corun_split else {},
            **self._corun_audit.report(),
            "domain": domain.describe(
                self.vllm_config,  # type: ignore[attr-defined]
                self.get_model(),  # type: ignore[attr-defined]
                plan=plan,
                runner=runner,
                attention=self._corun_backends,
                as_loaded=self._corun_as_loaded,
                endings=self._corun_endings,
            ),
        }

    def corun_measure(self, subject: dict[str, Any], budget_s: float) -> dict[str, Any]:
        """RPC: a certificate of this engine, in JSON form; before any request came.

        subject: see ``corun.certify.store``. budget_s: about how many seconds to take.
        """
        vllm_config = self.vllm_config  # type: ignore[attr-defined]
        with set_current_vllm_config(vllm_config):
            certificate = measure(
                self.model_runner,  # type: ignore[attr-defined]
                vllm_config,
                self._corun_logits,
                subject,
                budget_s,
            )
        return certificate.to_mapping()

    def corun_adopt(self, plan: dict[str, Any]) -> None:
        """RPC: go on under another plan, one that needs no other graphs and no other scheduler."""
        assert self._corun_audit is not None
        self._corun_plan = self._corun.plan = self._corun_audit.plan = Plan.from_mapping(plan)

    def _take_seeds(self, scheduler_output: Any) -> None:
        seeds, prompt_lens = self._corun.seeds, self._corun.prompt_lens
        for request_id in scheduler_output.finished_req_ids:
            seeds.pop(request_id, None)
            prompt_lens.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is None:
                raise RuntimeError(f"CoRun: request {new.req_id} is not a generation request")
            seeds[new.req_id] = take_seed(new.sampling_params)
            prompt_lens[new.req_id] = _prompt_len(new)
            if not self._corun_v2:
                # No seed in the runner's copy: V1 would make a torch.Generator for it, whose state
                # moves with every step and which CPUs cannot rewind after a discarded chunk.
                new.sampling_params = new.sampling_params.clone()
                new.sampling_params.seed = None

    def _prefills(self, spans: dict[str, tuple[int, int]]) -> int:
        """How many of the scheduled requests bring prompt tokens, or tokens to be recomputed."""
        lens = self._corun.prompt_lens
        return sum(
            end - begin > 1 or begin < lens.get(name, 0) for name, (begin, end) in spans.items()
        )

    def _split_rows(self, spans: dict[str, tuple[int, int]]) -> int:
        """How many rows of the step are split."""
        if not (beyond := self._corun_plan.split_beyond):
            return 0
        lens = self._corun.prompt_lens
        return sum(
            max(0, end - max(begin, unsplit(lens[name], beyond)))
            for name, (begin, end) in spans.items()
        )

    def _audit_step(self) -> None:
        requests, tokens, prefills = self._corun_pending
        state = self._corun
        step = StepShape(
            kind=DECODE if state.decode_step else PREFILL,
            requests=requests,
            prefill_requests=prefills,
            tokens=tokens,
            rows=state.rows,
            sample_rows=state.sample_rows,
            graph=state.graph,
        )
        state.decode_step = False
        assert self._corun_audit is not None
        self._corun_audit.record(step)


class CoRunGPUWorker(CoRunWorkerMixin, Worker):
    """CoRun on a CUDA device (V1 and V2 runners)."""
