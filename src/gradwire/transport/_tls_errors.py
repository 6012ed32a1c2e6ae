"""What OpenSSL's errors mean for a worker, in words; pure."""

from __future__ import annotations

import ssl

from gradwire.errors import GradwireError, HandshakeRefused, RemoteProtocolError

__all__ = ["CERTIFICATE", "explain"]

CERTIFICATE = "certificate"
"""The code of `HandshakeRefused` for everything about certificates."""

_ABOUT_CERTIFICATES = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR")
_REMEDY = (
    "give all workers certificates of one authority, and its ca.pem ('gradwire certs')"
)


def explain(error: ssl.SSLError) -> GradwireError:
    """The error to raise in place of one of OpenSSL's, about the other end."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return HandshakeRefused(
            f"its certificate is not accepted here: {error.verify_message}; {_REMEDY}",
            code=CERTIFICATE,
        )
    reason = error.reason or str(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return HandshakeRefused(
            f"it presented no certificate; {_REMEDY}", code=CERTIFICATE
        )
    if "ALERT" in reason and any(word in reason for word in _ABOUT_CERTIFICATES):
        return HandshakeRefused(
            f"it does not accept the certificate of this worker ({reason}); its log says "
            f"why; {_REMEDY}",
            code=CERTIFICATE,
        )
    return RemoteProtocolError(
        f"it does not speak TLS 1.3 as this worker does ({reason}); check the address, "
        "and that all workers have certificates"
    )
