"""The seccomp filter of a sandbox: system calls that no agent needs and that reach past namespaces.

It allows what it does not name, except system calls that are newer than this file. It denies new namespaces
(bubblewrap could forbid them for users, not for root), keys, BPF, profiling, io_uring, user faults, file handles and
socket families that no network namespace separates, such as those of virtual machines (vsock).
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import NamedTuple


class Platform(NamedTuple):
    """Numbers of one architecture."""

    audit: int
    clone: int
    unshare: int
    socket: int
    unmapped: tuple[int, ...]
    """memfd_create, memfd_secret, shmget, semget, msgget: memory that no process maps, which a sample misses."""
    denied: tuple[int, ...]


SHARED = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
"""io_uring_setup, _enter, _register; open_tree, move_mount, fsopen, fsconfig, fsmount, fspick; mount_setattr."""
CLONE3 = 435
MACHINES = {
    # mount, umount2, pivot_root, swapon, swapoff, reboot, init_module, delete_module, finit_module, kexec_load,
    # kexec_file_load, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, setns, open_by_handle_at,
    # acct, quotactl, syslog; on x86 also iopl and ioperm.
    "x86_64": Platform(
        0xC000003E,
        56,
        272,
        41,
        (319, 447, 29, 64, 68),
        (
            165,
            166,
            155,
            167,
            168,
            169,
            175,
            176,
            313,
            246,
            320,
            248,
            249,
            250,
            321,
            298,
            323,
            308,
            304,
            163,
            179,
            103,
            172,
            173,
        ),
    ),
    "aarch64": Platform(
        0xC00000B7,
        220,
        97,
        198,
        (279, 447, 194, 190, 186),
        (40, 39, 41, 224, 225, 142, 105, 106, 273, 104, 294, 217, 218, 219, 280, 241, 282, 268, 265, 89, 60, 116),
    ),
}
NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""
FAMILIES = (1, 2, 10, 16)
"""UNIX, IPv4, IPv6, netlink."""
FIRST_UNKNOWN = 463
"""The number after mseal, of Linux 6.10. Later calls are missing inside: open_tree_attr, and all of x32."""
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def refuse(code: int) -> bytes:
    return instruction(RETURN, ERRNO | code)


def filter_program(*, deny_unmapped: bool, machine: str = "") -> bytes:
    """The BPF program, or nothing for an architecture without numbers here.

    `deny_unmapped` also denies memory that no process has to map: needed where no cgroup counts it.
    """
    numbers = MACHINES.get(machine or platform.machine())
    if numbers is None:
        return b""
    allow = instruction(RETURN, ALLOW)
    program = [
        instruction(LOAD, 4),  # The architecture: a 32-bit call has other numbers.
        instruction(EQUAL, numbers.audit, 1, 0),
        refuse(errno.ENOSYS),
        instruction(LOAD, 0),  # The number of the call.
        instruction(AT_LEAST, FIRST_UNKNOWN, 0, 1),
        refuse(errno.ENOSYS),
    ]
    for number in (*SHARED, *numbers.denied):
        program += [instruction(EQUAL, number, 0, 1), refuse(errno.EPERM)]
    # The C library falls back to clone, whose flags a filter sees.
    for number in (CLONE3, *(numbers.unmapped if deny_unmapped else ())):
        program += [instruction(EQUAL, number, 0, 1), refuse(errno.ENOSYS)]
    for number, first in ((numbers.clone, 0), (numbers.unshare, 0)):
        program += [instruction(EQUAL, number, 0, 4), instruction(LOAD, 16 + first)]
        program += [instruction(ANY_BIT, NEW_NAMESPACES, 0, 1), refuse(errno.EPERM), allow]
    known = len(FAMILIES)
    program += [instruction(EQUAL, numbers.socket, 0, known + 2), instruction(LOAD, 16)]
    program += [instruction(EQUAL, family, known - index, 0) for index, family in enumerate(FAMILIES)]
    program += [refuse(errno.EAFNOSUPPORT), allow]
    return b"".join(program)
