"""Certificates for tests of HTTPS, self-signed. Nothing else uses them; clients compare them and do not verify."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """name: its common name. PEM texts."""

    name: str
    certificate: str
    key: str

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The files of the certificate and of its key."""
        files = folder / "cert.pem", folder / "key.pem"
        files[0].write_text(self.certificate)
        files[1].write_text(self.key)
        return files


ONE = Certificate(
    name="one.test",
    certificate="""\
-----BEGIN CERTIFICATE-----
MIIBmTCCAT+gAwIBAgIUXNq99KIhI2caJ1cW+WIWBzp/JQIwCgYIKoZIzj0EAwIw
EzERMA8GA1UEAwwIb25lLnRlc3QwIBcNMjYxMTIyMTk1MzQyWhgPMjEyNjEwMjkx
OTUzNDJaMBMxETAPBgNVBAMMCG9uZS50ZXN0MFkwEwYHKoZIzj0CAQYIKoZIzj0D
AQcDQgAEqK+jjW/YUBtWjHF1wuEzZl73UdfPdS8DhmvRTVCqlYzjYAI2GJBPdEbc
ndzIELX8CHqgnbhDk8azc11a2h15EaNvMG0wHQYDVR0OBBYEFCV8rUPYrQYv9MT/
gakOi1IkfpX7MB8GA1UdIwQYMBaAFCV8rUPYrQYv9MT/gakOi1IkfpX7MA8GA1Ud
EwEB/wQFMAMBAf8wGgYDVR0RBBMwEYcEfwAAAYIJbG9jYWxob3N0MAoGCCqGSM49
BAMCA0gAMEUCIQCfPUVS+h4s2FggniIRq6lKBXNvhWXbQRhCsDwYZqLGOAIgH22T
uq1XrAKX0BSl0Bc3EP1JicXHX8qUoRQ1XU7gavQ=
-----END CERTIFICATE-----
""",
    key="""\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgB9m2y1FdiOIIiQ3w
uD3AlFXCYdBl3OiwBP9gE3FCrZChRANCAASor6ONb9hQG1aMcXXC4TNmXvdR1891
LwOGa9FNUKqVjONgAjYYkE90Rtyd3MgQtfwIeqCduEOTxrNzXVraHXkR
-----END PRIVATE KEY-----
""",
)

TWO = Certificate(
    name="two.test",
    certificate="""\
-----BEGIN CERTIFICATE-----
MIIBmTCCAT+gAwIBAgIUBBk0n7z0YVUZFDx51fZUO5N1IeUwCgYIKoZIzj0EAwIw
EzERMA8GA1UEAwwIdHdvLnRlc3QwIBcNMjYxMTIyMTk1MzQyWhgPMjEyNjEwMjkx
OTUzNDJaMBMxETAPBgNVBAMMCHR3by50ZXN0MFkwEwYHKoZIzj0CAQYIKoZIzj0D
AQcDQgAEbSDSohzb/JTUF5GSRa31vSB3qFdasrlwzrTVVGPqbgJHtaOwJfc0bYKg
+/C1dHmYlmSR7pBXeiKYQys4bZ6C7qNvMG0wHQYDVR0OBBYEFOizRHEjjylwN8gD
RVWr8qEpm0j8MB8GA1UdIwQYMBaAFOizRHEjjylwN8gDRVWr8qEpm0j8MA8GA1Ud
EwEB/wQFMAMBAf8wGgYDVR0RBBMwEYcEfwAAAYIJbG9jYWxob3N0MAoGCCqGSM49
BAMCA0gAMEUCIApXd6d2HlHmA17+JYA+pVT3R8Z8K3HFBb2/mQLXfUSFAiEA7UOC
FPQPLX7ZXH+zzZvNCaQ55uJemYtqaNZULu2fJqw=
-----END CERTIFICATE-----
""",
    key="""\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgp625mXMzL2ZxYqBV
13qZobA8X43bj3fMwzKRUrrmqmmhRANCAARtINKiHNv8lNQXkZJFrfW9IHeoV1qy
uXDOtNVUY+puAke1o7Al9zRtgqD78LV0eZiWZJHukFd6IphDKzhtnoLu
-----END PRIVATE KEY-----
""",
)

# The key of ONE, encrypted with the password x.
ENCRYPTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAiXfLXQTtZEMgICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEIdUZfxINrbg0zZxP4kYS2UEgZCy
bJl3PAfrKOJh4uvVZgANO5tnVhllq7N4H9yOL/kDxQq4V+38XFFpRV6CpCr2EHBx
ZgDXJ4KsTsqzi4zn+qr86KbpVCHRJHRJdHNJaCJeO3YJHWQj9Zmah6ZYK6p0CN3C
Aq+XSFtjE+9SkSp/qrqoNKA91Du9I+s8NUWY7A5ooINZfldDrfpeIyg4J5ON6+0=
-----END ENCRYPTED PRIVATE KEY-----
"""
