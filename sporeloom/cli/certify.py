# SPDX-License-Identifier: Apache-2.0
"""One verdict before a cluster is booked: is this strategy right, does it fit, how fast will it be?

    sporeloom certify --model pangu --size 13b --strategy pangu_13b_dp4_tp8_pp2 \\
        --cluster ascend910b --fast --out certificate

It checks the strategy, proves that a scaled-down model under it (every axis, option and rule) equals one device, on real
processes, partitions the full size, checks its first, middle and last rank, and estimates time and memory. The folder gets
certificate.json, for tools/train.py --certificate, and certificate.html, a report. Exit code 1: refused. The certificate
is sealed by a hash against accidental changes. That is not a signature: whoever can write the file can make another one;
where you must know who made it, sign it with a tool of yours.
"""

from collections.abc import Sequence
from importlib import import_module

from sporeloom.certification.config import CertifyConfig, check
from sporeloom.core.command_line import parse_args
from sporeloom.core.locks import one_writer
from sporeloom.core.log import print_report
from sporeloom.runtime.environment import prepare_environment
from sporeloom.strategy.certificate import CERTIFIED, SEAL_NOTE

SHOWN = 4


def main(argv: Sequence[str]) -> int:
    asked = check(parse_args(CertifyConfig, __doc__, argv, check))
    prepare_environment()
    with one_writer(asked.config.out):
        values = import_module("sporeloom.certification.verdict").certify_decoder(asked)
    if "faults" in values:
        print_report("\n".join(import_module("sporeloom.certification.power").lines(values["faults"])))
    for reason in values["reasons"][:SHOWN]:
        print_report(f"refused: {reason}")
    if len(values["reasons"]) > SHOWN:
        print(f"refused: and {len(values['reasons']) - SHOWN} more such lines in the certificate")
    if values["verdict"] == CERTIFIED:
        print(f"certified: {asked.config.out / 'certificate.json'} ({SEAL_NOTE})")
    print(f"read it: {asked.config.out / 'certificate.html'}")
    if values["verdict"] == CERTIFIED:
        print_report("\n".join(values["run"]))
    return 0 if values["verdict"] == CERTIFIED else 1
