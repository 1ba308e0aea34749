"""CoRunConfig: the one typed configuration, whatever it was given through.

Sources, strongest first: keywords (``corun.LLM(corun=...)``), ``additional_config["corun"]`` (what
``vllm serve --additional-config`` sets), then the environment (``CORUN_POLICY``, ``CORUN_STRICT``,
``CORUN_STEP_LOG``, ``CORUN_CERTIFICATE``, ``CORUN_SPLIT_DECODE``). Nothing given anywhere means
that CoRun stays off.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

POLICIES = ("auto", "isolate", "pack", "certified", "off")
ENV_PREFIX = "CORUN_"
SPLIT_POLICIES = ("certified", "auto")
MEASURE = "measure"
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class CoRunConfig:
    """What the user asked CoRun to do.

    policy: one of ``POLICIES``; see docs/contract.md.
    strict: stop the engine at the first step outside the plan (True), or only count it (False).
    step_log: a file that receives one JSON line for each executed step; None for no log.
    certificate: a certificate's file; None for the one that ``corun certify`` keeps for this
        machine. MEASURE: start unproven, to be measured (what ``corun certify`` itself does).
    split_decode: under ``certified``, split the KV of long decode rows by their own length; see
        docs/contract.md. Legal with ``certified`` and ``auto`` only.
    """

    policy: str = "auto"
    strict: bool = True
    step_log: str | None = None
    certificate: str | None = None
    split_decode: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(
                f"CoRun has no policy {self.policy!r}; choose one of {', '.join(POLICIES)}"
            )
        for name in ("strict", "split_decode"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"CoRun's {name!r} is true or false, not {value!r}")
        for name in ("step_log", "certificate"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"CoRun's {name!r} is a file's path, not {value!r}")
        if self.certificate == MEASURE and self.policy != "certified":
            raise ValueError(
                f"the certificate {MEASURE!r} starts an engine that nothing was proven of, only "
                f"under the policy 'certified', not {self.policy!r}; leave it out"
            )
        if self.split_decode and self.policy not in SPLIT_POLICIES:
            raise ValueError(
                f"'split_decode' works under the policies {' and '.join(SPLIT_POLICIES)} only, not "
                f"under {self.policy!r}; take one of those, or leave split_decode off"
            )

    @property
    def enabled(self) -> bool:
        """Whether CoRun changes anything at all."""
        return self.policy != "off"

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "CoRunConfig":
        """A config from ``additional_config["corun"]``. ValueError names an unknown key."""
        if not isinstance(given, Mapping):
            raise ValueError(
                f"additional_config['corun'] must be a mapping such as "
                f'{{"policy": "auto"}}, not {given!r}'
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(
                f"CoRun does not know the setting(s) {', '.join(map(repr, unknown))}; "
                f"it has {', '.join(sorted(known))}"
            )
        return cls(**given)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "CoRunConfig | None":
        """A config from CORUN_* variables, or None where CORUN_POLICY is not set."""
        env = os.environ if environ is None else environ
        policy = env.get(ENV_PREFIX + "POLICY", "").strip().lower()
        if not policy:
            return None
        config = cls(policy=policy)
        if (strict := _switch(env, "STRICT")) is not None:
            config = replace(config, strict=strict)
        if (split := _switch(env, "SPLIT_DECODE")) is not None:
            config = replace(config, split_decode=split)
        if step_log := env.get(ENV_PREFIX + "STEP_LOG", "").strip():
            config = replace(config, step_log=step_log)
        if certificate := env.get(ENV_PREFIX + "CERTIFICATE", "").strip():
            config = replace(config, certificate=certificate)
        return config

    def to_mapping(self) -> dict[str, Any]:
        """The form that travels in ``additional_config["corun"]``."""
        return asdict(self)


def _switch(env: Mapping[str, str], name: str) -> bool | None:
    """A variable's truth value, None where it is not set. ValueError for any other text."""
    text = env.get(ENV_PREFIX + name, "").strip().lower()
    if text and text not in _TRUE | _FALSE:
        raise ValueError(f"{ENV_PREFIX}{name} is 1 or 0, not {text!r}")
    return text in _TRUE if text else None


def resolve(
    additional_config: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None
) -> CoRunConfig:
    """The config in force: additional_config first, then the environment, else off."""
    given = (additional_config or {}).get("corun")
    if given is not None:
        return CoRunConfig.from_mapping(given)
    return CoRunConfig.from_env(environ) or CoRunConfig(policy="off")
