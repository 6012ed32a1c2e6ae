"""Which workers and hosts a certificate stands for."""

from __future__ import annotations

import pytest

from gradwire._certificate_names import CertificateNames, check_pattern, names_in
from gradwire.errors import InvalidWorkerName


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("trainer0", "trainer0"),
        ("trainer*", "trainer0"),
        ("trainer*", "trainer"),
        ("trainer:*", "trainer:17"),
        ("*", "anybody"),
    ],
)
def test_certificate_allows_its_names(pattern, name):
    assert CertificateNames(("other", pattern)).objection_to_worker(name) is None


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("trainer0", "trainer"),
        ("trainer0", "trainer01"),
        ("trainer0", "Trainer0"),
        ("trainer*", "my-trainer"),
        ("*ner", "trainer"),  # only a star at the end means anything
        ("t*r", "trainer"),
    ],
)
def test_certificate_allows_no_other_name(pattern, name):
    objection = CertificateNames((pattern,)).objection_to_worker(name)

    assert objection is not None
    assert repr(name) in objection
    assert repr(pattern) in objection


def test_certificate_without_names_of_workers_is_nobody():
    names = CertificateNames((), ("host.example",), ())

    objection = names.objection_to_worker("w0")

    assert objection is not None
    assert "URI:gradwire:worker:w0" in objection


@pytest.mark.parametrize(
    ("hosts", "addresses", "host"),
    [
        ((), (), "anywhere.example"),
        (("node1.example",), (), "node1.example"),
        (("node1.example",), (), "NODE1.Example."),
        (("*.example",), (), "node1.example"),
        ((), ("10.0.0.5",), "10.0.0.5"),
        ((), ("FD00:0:0:0:0:0:0:1",), "fd00::1"),
        ((), ("FE80:0:0:0:0:0:0:1",), "fe80::1%eth0"),
    ],
)
def test_certificate_allows_its_hosts(hosts, addresses, host):
    names = CertificateNames(("*",), hosts, addresses)

    assert names.objection_to_host(host) is None


@pytest.mark.parametrize(
    ("hosts", "addresses", "host"),
    [
        (("node1.example",), (), "node2.example"),
        (("node1.example",), (), "10.0.0.5"),
        (("*.example",), (), "a.b.example"),
        (("*.example",), (), "example"),
        (("*.example",), (), ".example"),
        (("10.0.0.5",), (), "10.0.0.5"),  # an address must be one of the addresses
        ((), ("10.0.0.5",), "10.0.0.6"),
        ((), ("10.0.0.5",), "node1.example"),
    ],
)
def test_certificate_allows_no_other_host(hosts, addresses, host):
    objection = CertificateNames(("*",), hosts, addresses).objection_to_host(host)

    assert objection is not None
    assert repr(host) in objection
    assert "advertise_address" in objection


def test_names_come_from_the_alternative_names():
    found = names_in(
        {
            "subject": ((("commonName", "boss"),),),
            "subjectAltName": (
                ("DNS", "Node1.Example"),
                ("URI", "gradwire:worker:w0"),
                ("URI", "https://example/gradwire:worker:w1"),
                ("URI", "spiffe://example/w2"),
                ("IP Address", "10.0.0.5"),
                ("email", "gradwire:worker:w3"),
            ),
        }
    )

    assert found == CertificateNames(("w0",), ("node1.example",), ("10.0.0.5",))


@pytest.mark.parametrize("certificate", [None, {}])
def test_no_certificate_names_nobody(certificate):
    assert names_in(certificate) == CertificateNames()


@pytest.mark.parametrize("pattern", ["w0", "w*", "*", "a:b_c-d*"])
def test_pattern_may_end_with_a_star(pattern):
    assert check_pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", ["", "a b", "a*b", "**", "../w0", "w\u00f6", "a/b"])
def test_bad_pattern_is_refused(pattern):
    with pytest.raises(InvalidWorkerName):
        check_pattern(pattern)
