"""Certificates for tests: an authority, and a certificate of a host that it has signed."""

import trustme


def made_by_one_authority(directory, host):
    """Write both to files; return the certificate, which is in one file with its key, and the authority."""
    directory.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "authority.pem")
    made = authority.issue_cert(host)
    made.private_key_and_cert_chain_pem.write_to_path(directory / "host.pem")
    return directory / "host.pem", directory / "authority.pem"
