"""The first program of a sandbox: it restricts itself, then becomes the command.

    python -I -S -E inside.py UID CHANNEL PORT FOLDER -- WRITABLE... -- READABLE... -- COMMAND...

bubblewrap has made the namespaces and the mounts before. Landlock comes after it, because it forbids mounts. This file
is run at each start, so it imports no module in Python: `ctypes` would double the time of its imports.
"""

import _ctypes
import os
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
SET_NO_NEW_PRIVS = 38
PATH_BENEATH = 1
RIGHTS_BY_VERSION = (13, 14, 15, 15, 16)
"""Number of file rights in Landlock versions 1, 2, ...: so many lowest bits are set."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, IOCTL = 1, 2, 4, 8, 1 << 15
SCOPES = 3
"""Blocks abstract sockets of others and signals to others, from version 6 on."""
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/etc", "/proc")
DEVICES = ("null", "zero", "full", "urandom", "random", "tty", "ptmx", "pts")
PRIVATE = ("/tmp", "/dev/shm")
FAILED = 125

LIBC = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
SYSCALL = _ctypes.dlsym(LIBC, "syscall")


def syscall(*arguments: object) -> int:
    return int(_ctypes.call_function(SYSCALL, arguments))


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size, sys.byteorder)


def landlock_version() -> int:
    """Landlock version of the kernel; 0 if it has none."""
    return max(0, int(syscall(CREATE_RULESET, None, 0, 1)))


def restrict_files(writable: list[str], readable: list[str]) -> None:
    """Restricts this process and its children for good. Does nothing on a kernel without Landlock."""
    version = landlock_version()
    if not version:
        return
    everything = (1 << RIGHTS_BY_VERSION[min(version, len(RIGHTS_BY_VERSION)) - 1]) - 1
    handled = number(everything, 8) + number(0, 8) + number(SCOPES, 8)  # landlock_ruleset_attr: files, ports, scopes
    size = len(handled) if version >= 6 else 8  # Earlier kernels support the first field only.
    ruleset = syscall(CREATE_RULESET, handled, size, 0)

    def allow(path: str, rights: int) -> None:
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        if not os.path.isdir(path):
            rights &= EXECUTE | WRITE_FILE | READ_FILE | IOCTL
        rule = number(rights & everything, 8) + number(parent, 4)  # landlock_path_beneath_attr, which is packed
        checked(syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0), f"Landlock refuses {path}")
        os.close(parent)

    for path in (*SYSTEM, *readable):
        allow(path, EXECUTE | READ_FILE | READ_DIR)
    allow("/", READ_DIR)
    for name in DEVICES:
        allow(f"/dev/{name}", READ_FILE | WRITE_FILE | READ_DIR | IOCTL)
    for path in (*PRIVATE, *writable):
        allow(path, everything)
    checked(_ctypes.call_function(_ctypes.dlsym(LIBC, "prctl"), (SET_NO_NEW_PRIVS, 1, 0, 0, 0)), "no_new_privs")
    checked(syscall(RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(f"the kernel refuses: {what}")


def drop_rights(uid: int) -> None:
    """Becomes an unprivileged user, which clears all capabilities. A limit of processes does not act on uid 0."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def send_listener(channel: int, port: int) -> None:
    """Sends a listening socket of this network to the proxy outside, which answers there."""
    import _socket

    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    sender = _socket.socket(fileno=channel)
    sender.sendmsg([b"+"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, number(listener.fileno(), 4))])
    sender.close()
    listener.close()


def restrict(words: list[str], writable: list[str], readable: list[str]) -> None:
    uid, channel, port, folder = words
    if channel != "0":
        send_listener(int(channel), int(port))
    os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))
    if uid != "0":
        drop_rights(int(uid))
    os.chdir(folder)  # bubblewrap itself may not: it is not the owner, and has no rights over files.
    restrict_files(writable, readable)


def main(arguments: list[str]) -> None:
    groups: list[list[str]] = [[]]
    for position, word in enumerate(arguments):
        if word == "--":
            if len(groups) == 3:
                command = arguments[position + 1 :]
                break
            groups.append([])
        else:
            groups[-1].append(word)
    try:
        restrict(*groups)
    except OSError as error:
        os.write(2, f"the sandbox could not be closed: {error}\n".encode())
        os._exit(FAILED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} could not be started in the sandbox: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)


if __name__ == "__main__":
    main(sys.argv[1:])
