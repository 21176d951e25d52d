"""The command that makes certificates for servers and clients. It is apart from `serve`, which imports torch."""

import argparse
from pathlib import Path

from hoploom.cli.command import Arguments, Command, add_option, read_up_to
from hoploom.config.extras import needs

WHAT = {
    "ca.pem": "the CA, for everyone; its key is not kept",
    "server.pem": "the servers' certificate, for {hosts}",
    "server.key": "its key, secret, for the servers alone",
    "client.pem": "the trainers' certificate",
    "client.key": "its key, secret, for the trainers alone",
}


def _certs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where to write them; must not exist")
    parser.add_argument(
        "--hosts",
        required=True,
        metavar="HOST,...",
        help="host names and IP addresses that clients use to reach the servers",
    )
    text = "days until the certificates expire (default: 30)"
    add_option(parser, "--days", read_up_to(3650), default="30", metavar="N", help=text)


def _certs(arguments: Arguments) -> int:
    with needs("cluster"):
        from hoploom.serve.certs import write_certificates
    folder: Path = arguments.folder
    hosts = arguments.hosts.split(",")
    for path in write_certificates(folder, hosts, arguments.days):
        print(f"{path}: {WHAT[path.name].format(hosts=arguments.hosts)}")
    print(f"they are valid for {arguments.days} day{'s' * (arguments.days > 1)}\n")
    print("servers:")
    print(f"  hoploom serve STORE --part K --listen HOST:PORT --cert {folder}/server.pem --key {folder}/server.key \\")
    print(f"    --client-ca {folder}/ca.pem")
    print("trainers:")
    print(f'  hoploom.connect(servers, ca="{folder}/ca.pem", cert="{folder}/client.pem", key="{folder}/client.key")')
    return 0


COMMANDS = {"certs": Command(_certs_arguments, _certs)}
