"""The certificates that are kept on this machine, for ``corun doctor``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corun.certify import planner, store
from corun.certify.certificate import Certificate, CertificateError
from corun.jobs.files import write_json

NAME = "name"  # of the model that was measured; a label beside the claims, in the file alone


def write_name(file: Path, model: str) -> None:
    """Note in a kept certificate's file which model it was measured with."""
    write_json(file, {**json.loads(file.read_text()), NAME: model})


def kept(here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each kept certificate is of and what it allows, as JSON values, by model name.

    here: this machine's device and software, as a certificate's subject has them.
    """
    found = [_describe(file, here) for file in sorted(store.path_of({}).parent.glob("*.json"))]
    return sorted(found, key=lambda c: (c["model"] or "", c["dtype"] or ""))


def _describe(file: Path, here: Mapping[str, Any]) -> dict[str, Any]:
    """One of them: "allows" lists policies, "differs" what is not as `here`; else "error"."""
    nothing = {"file": str(file), "model": None, "dtype": None, "device": None, "digest": None}
    try:
        given = json.loads(file.read_text())
        certificate = Certificate.from_mapping(given)
    except CertificateError as e:
        return {**nothing, "allows": [], "differs": [], "error": str(e)}
    except (OSError, ValueError) as e:
        return {**nothing, "allows": [], "differs": [], "error": f"it cannot be read: {e}"}
    domain = certificate.domain
    engine = planner.Engine.largest(certificate)
    return {
        "file": str(file),
        "model": given.get(NAME) or f"a model of shape {domain.get('model')}",
        "dtype": str(domain.get("dtype")).removeprefix("torch."),
        "device": domain.get("device"),
        "digest": certificate.digest,
        "allows": [v.policy for v in planner.verdicts(certificate, engine) if v.allowed],
        "differs": sorted(n for n in here if domain.get(n) != here[n]),
        "error": None,
    }
