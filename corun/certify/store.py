"""Where certificates are kept: one file for each subject, in the user's cache directory.

A *subject* is what a certificate speaks of, as far as it is known before an engine starts: the
model's shape, dtype, device, software and settings, but not the weights (kernels are chosen by
shape, so a trainer's next checkpoint needs no new certificate).
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corun.certify.certificate import Certificate, CertificateError
from corun.jobs.files import write_json

DIRECTORY_VARIABLE = "CORUN_CACHE"


def directory() -> Path:
    """``CORUN_CACHE``, else ``corun`` in the user's cache directory."""
    if given := os.environ.get(DIRECTORY_VARIABLE):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "corun"


def path_of(subject: Mapping[str, Any]) -> Path:
    """The file of the certificate of `subject` (JSON values)."""
    name = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:24]
    return directory() / "certificates" / f"{name}.json"


def count() -> int:
    """How many certificates are kept here."""
    return len(list((directory() / "certificates").glob("*.json")))


def load(subject: Mapping[str, Any]) -> Certificate | None:
    """The certificate of `subject`, or None. CertificateError where the file is of no use."""
    path = path_of(subject)
    try:
        given = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise CertificateError(
            f"the certificate {path} cannot be read ({e}); delete it, then 'corun certify' again"
        ) from e
    certificate = Certificate.from_mapping(given)
    check_subject(certificate, subject, str(path))
    return certificate


def check_subject(certificate: Certificate, subject: Mapping[str, Any], where: str) -> None:
    """CertificateError names what differs where `certificate` is not of `subject`."""
    if dict(certificate.domain) == dict(subject):
        return
    names = sorted(
        name
        for name in {*certificate.domain, *subject}
        if certificate.domain.get(name) != subject.get(name)
    )
    details = "; ".join(
        f"{name}: {certificate.domain.get(name)!r}, here {subject.get(name)!r}" for name in names
    )
    raise CertificateError(
        f"the certificate {where} is of another engine ({details}); run 'corun certify' here"
    )


def save(certificate: Certificate) -> Path:
    """Write a certificate to its place, whole or not at all; returns the file."""
    path = path_of(certificate.domain)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**certificate.to_mapping(), "digest": certificate.digest})
    return path
