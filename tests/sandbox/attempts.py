"""Attempts to leave a sandbox: a table of small programs, and the machine that they would like to reach.

Each program prints `GOT ...` if it got through. `Bait` makes what it must not reach, and sees changes of it. The same
programs run without a sandbox, to show that an attempt can succeed: those in `BARE` do on any machine.

    python -m tests.sandbox.attempts FOLDER    # all of them, as this user; prints JSON
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from agentjet.client.command import CapturedProcess
from agentjet.sandbox import Limits, Sandbox

MIB = 2**20
LIMITS = Limits(memory=64 * MIB, processes=24, disk=16 * MIB, output=MIB, cpu_seconds=3.0, wall_seconds=5.0)
"""Of the attempts on limits. Others get a multiple of memory and time."""
PRELUDE = """
import ctypes, errno, fcntl, json, os, platform, resource, signal, socket, struct, subprocess, sys, threading, time
bait = json.loads(os.environ["BAIT"]); bait["token"] = "".join(bait["halves"])
libc = ctypes.CDLL(None, use_errno=True)
def got(what): print("GOT", str(what)[:200], flush=True)
def call(x86, arm, *arguments):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    code = libc.syscall(x86 if platform.machine() == "x86_64" else arm, *words)
    if code < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return code
def ask(request):
    link = socket.create_connection((bait["model"][0], bait["model"][1]), 3)
    link.sendall(request); link.settimeout(3); answer = b""
    try:
        while piece := link.recv(65536): answer += piece
    except OSError: pass
    if bait["token"].encode() in answer: got(answer)
    return answer
def get(target, *headers, host="localhost"):
    lines = [f"GET {target} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""]
    return ask("\\r\\n".join(lines).encode())
def allocate(size): return b"x" * size
"""

FILES = {
    "read a file": 'got(open(bait["secret"]).read())',
    "write a file": 'open(bait["writable"], "r+").write("x"); got("written")',
    "truncate a file": 'os.truncate(bait["writable"], 0); got("cut")',
    "create a file beside": 'open(bait["open"] + "/new", "w"); got("made")',
    "list a folder": 'got(os.listdir(bait["open"]))',
    "list the home": 'got(os.listdir(bait["home"]))',
    "read the home": 'got(open(bait["home"] + "/.key").read())',
    "read passwords": 'got(open("/etc/shadow").read())',
    "list /var": 'got(os.listdir("/var"))',
    "list /run": 'got(os.listdir("/run"))',
    "list /sys": 'got(os.listdir("/sys"))',
    "write below /usr": 'open("/usr/attempt", "w"); os.unlink("/usr/attempt"); got("made")',
    "write below /etc": 'open("/etc/attempt", "w"); os.unlink("/etc/attempt"); got("made")',
    "write into Python": 'n = sys.prefix + "/attempt"; open(n, "w"); os.unlink(n); got("made")',
    "climb by dots": 'got(open("../" * 20 + bait["secret"]).read())',
    "symbolic link": 'os.symlink(bait["secret"], "link"); got(open("link").read())',
    "hard link": 'os.link(bait["secret"], "hard"); got(open("hard").read())',
    "rename a file": 'os.rename(bait["open"] + "/kept", "mine"); got("moved")',
    "remove a file": 'os.unlink(bait["open"] + "/kept"); got("removed")',
    "root of this process": 'got(open("/proc/self/root" + bait["secret"]).read())',
    "root of the first process": 'got(open("/proc/1/root" + bait["secret"]).read())',
    "folder of the first process": 'got(open("/proc/1/cwd" + bait["secret"]).read())',
    "environment of the first process": 't = open("/proc/1/environ").read(); bait["token"] in t and got(t)',
    "descriptors of the first process": """
for name in os.listdir("/proc/1/fd"):
    try:
        text = open(f"/proc/1/fd/{name}", "rb").read(9999) if os.stat(f"/proc/1/fd/{name}").st_size else b""
        if bait["token"].encode() in text: got(text)
    except OSError: pass
""",
    "token of a data dir": 'got(open(bait["project"] + "/data/token").read())',
    "list of a data dir": 'n = os.listdir(bait["project"] + "/data"); n and got(n)',
    "write into a readable folder": 'open(bait["project"] + "/agent.py", "a").write("x"); got("written")',
    "create in a readable folder": 'open(bait["project"] + "/new.py", "w"); got("made")',
    "mode of a file": 'os.chmod(bait["writable"], 0o777); got("changed")',
    "mode of a readable file": 'os.chmod(bait["project"] + "/agent.py", 0o777); got("changed")',
    "owner of a file": 'os.chown(bait["writable"], os.getuid(), os.getgid()); got("changed")',
    "owner of an own file": 'open("f", "w"); os.chown("f", os.getuid() + 1, -1); got("changed")',
    "times of a file": 'os.utime(bait["writable"]); got("changed")',
    "times of a readable file": 'os.utime(bait["project"] + "/agent.py", (1, 1)); got("changed")',
    "attributes of a file": 'os.setxattr(bait["writable"], "user.x", b"1"); got("changed")',
    "write into a pipe": 'os.write(os.open(bait["pipe"], os.O_WRONLY | os.O_NONBLOCK), b"x"); got("written")',
    "watch a folder": """
fd = libc.inotify_init(); fd < 0 or libc.inotify_add_watch(fd, bait["open"].encode(), 0xfff) >= 0 and got("watching")
""",
    "watch a mount": 'call(300, 262, 0, 0); got("watching")',
    "shared memory file": 'got(open("/dev/shm/" + bait["name"]).read())',
    "block device": 'os.mknod("disk", 0o600 | 0o060000, os.makedev(254, 0)); got("made")',
    "character device": 'os.mknod("mem", 0o600 | 0o020000, os.makedev(1, 1)); got("made")',
    "disks": """
for name in ("vda", "sda", "nvme0n1", "mem", "kmem", "port", "kmsg", "fuse", "kvm", "loop-control", "net/tun", "vsock"):
    try: os.open("/dev/" + name, os.O_RDONLY); got(name)
    except OSError: pass
""",
    "memory of the kernel": 'got(open("/proc/kcore", "rb").read(9))',
    "file handle": """
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)); mount = ctypes.c_int()
call(303, 264, -100, b".", handle, ctypes.byref(mount), 0)
call(304, 265, os.open(".", os.O_RDONLY), handle, 0); got("opened")
""",
    "inherited descriptors": """
for name in os.listdir("/proc/self/fd"):
    try: target = os.readlink(f"/proc/self/fd/{name}")
    except OSError: continue
    int(name) > 2 and not target.endswith(f"/{os.getpid()}/fd") and got(target)
""",
    "setuid file": 'open("su", "w").write("#!/bin/sh"); os.chmod("su", 0o6777)',
    "link for the owner's change": 'os.symlink(bait["writable"], "out"); os.symlink(bait["open"], "folder")',
    "link race for the owner's change": """
if os.fork() == 0:
    os.setsid()
    while True:
        os.mkdir("d"); os.rmdir("d"); os.symlink(bait["open"], "d"); os.unlink("d")
time.sleep(0.3)
""",
}
PROCESSES = {
    "see a process": "got(open(f\"/proc/{bait['pid']}/cmdline\").read())",
    "environment of a process": "got(open(f\"/proc/{bait['pid']}/environ\").read())",
    "count of processes": 'n = [p for p in os.listdir("/proc") if p.isdecimal()]; len(n) > 8 and got(len(n))',
    "signal": 'os.kill(bait["pid"], 0); got("sent")',
    "end a process": 'os.kill(bait["victim"], 15); got("sent")',
    "signal to the caller": 'os.kill(bait["caller"], 0); got("sent")',
    "ptrace": 'call(101, 117, 16, bait["pid"], 0, 0); got("attached")',
    "ptrace seize": 'call(101, 117, 0x4206, bait["pid"], 0, 0); got("attached")',
    "read the memory": """
local = ctypes.create_string_buffer(8)
vector = struct.pack("QQ", ctypes.addressof(local), 8); there = struct.pack("QQ", bait["address"], 8)
call(310, 270, bait["pid"], vector, 1, there, 1, 0); got(local.raw)
""",
    "memory file": 'f = open(f"/proc/{bait[\'pid\']}/mem", "rb"); got("opened")',
    "descriptor of a process": 'os.pidfd_open(bait["pid"]); got("opened")',
    "priority": 'os.setpriority(os.PRIO_PROCESS, bait["pid"], 5); got("changed")',
    "limits of a process": 'got(resource.prlimit(bait["pid"], resource.RLIMIT_NOFILE))',
    "affinity of a process": 'os.sched_setaffinity(bait["pid"], {0}); got("changed")',
    "debug the first process": 'call(101, 117, 16, 1, 0, 0); os.waitpid(1, 0); got("attached")',
    "system V memory": """
libc.shmat.restype = ctypes.c_void_p
there = libc.shmget(bait["key"], 0, 0); there < 0 or got(there)
""",
    "terminal": 'fd = os.open("/dev/tty", os.O_RDWR); got("opened")',
    "type into the terminal": """
for fd in (0, 1, 2):
    try: fcntl.ioctl(fd, 0x5412, b"x"); got("typed")
    except OSError: pass
""",
    "secrets of the environment": 'bait["secret_name"] in os.environ and got(os.environ[bait["secret_name"]])',
    "core dump": """
if os.fork() == 0:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2); got("limit lifted"); os.abort()
os.wait()
""",
}
NETWORK = {
    "TCP on loopback": 'got(socket.create_connection(("127.0.0.1", bait["tcp"]), 2).recv(99))',
    "TCP on loopback, IPv6": 'got(socket.create_connection(("::1", bait["tcp6"]), 2).recv(99))',
    "TCP by address": 'got(socket.create_connection((bait["address_of_host"], bait["tcp"]), 2).recv(99))',
    "UDP on loopback": """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
s.sendto(b"x", ("127.0.0.1", bait["udp"])); got(s.recv(99))
""",
    "metadata address": 'got(socket.create_connection(("169.254.169.254", 80), 2))',
    "a server on the internet": 'got(socket.create_connection(("1.1.1.1", 443), 2))',
    "DNS": """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
s.sendto(b"\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\7example\\3com\\0\\0\\1\\0\\1", ("1.1.1.1", 53)); got(s.recv(99))
""",
    "ICMP": """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP); s.settimeout(1)
s.sendto(b"\\10\\0\\xf7\\xff\\0\\0\\0\\0", (bait["address_of_host"], 0)); got(s.recv(99))
""",
    "raw socket": 'socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); got("opened")',
    "packet socket": 'socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3); got("opened")',
    "interfaces": 'n = [n for _, n in socket.if_nameindex() if n != "lo"]; n and got(n)',
    "take loopback down": """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 0)); got("set")
""",
    "new interface": """
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.settimeout(1)
s.send(struct.pack("=IHHII", 32, 16, 0x605, 1, 0) + bytes(16)); code = struct.unpack_from("=i", s.recv(999), 16)[0]
code == -1 or got(code)
""",
    "UNIX socket": 's = socket.socket(socket.AF_UNIX); s.settimeout(2); s.connect(bait["socket"]); got(s.recv(99))',
    "UNIX socket in a readable folder": """
s = socket.socket(socket.AF_UNIX); s.settimeout(2); s.connect(bait["project"] + "/agent.sock"); got(s.recv(99))
""",
    "abstract socket": """
s = socket.socket(socket.AF_UNIX); s.settimeout(2); s.connect("\\0" + bait["name"]); got(s.recv(99))
""",
    "abstract datagrams": """
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect("\\0" + bait["name"] + "d"); s.send(b"x"); got("sent")
""",
    "bind beside": 'socket.socket(socket.AF_UNIX).bind(bait["open"] + "/s"); got("bound")',
    "socket of the virtual machine": """
s = socket.socket(40, socket.SOCK_STREAM); s.settimeout(1); got("opened")
""",
    "socket of the kernel's ciphers": 'socket.socket(38, socket.SOCK_SEQPACKET); got("opened")',
    "rarer sockets": """
for family in range(1, 46):
    if family not in (1, 2, 10, 16):
        try: socket.socket(family, socket.SOCK_DGRAM); got(family)
        except OSError: pass
""",
    "a namespace's file": """
for name in ("net", "mnt", "user", "pid"):
    try: call(308, 268, os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0); got(name)
    except OSError: pass
""",
    "low port": """
s = socket.socket(); s.bind(("127.0.0.1", 80)); got("bound")
""",
}
PROXY = {
    "path of another run": 'get("/runs/other/v1/models")',
    "path of the control API": 'get("/swarm/v1/episodes")',
    "the root": 'get("/")',
    "dots": 'get("/v1/../swarm/v1")',
    "encoded dots": 'get("/v1/%2e%2e/swarm/v1")',
    "encoded slash": 'get("/v1/..%2fswarm")',
    "twice encoded dots": 'get("/v1/%252e%252e/swarm")',
    "backslash": 'get("/v1/..\\\\swarm")',
    "parameters": 'get("/v1/..;/swarm")',
    "two slashes": 'get("//swarm/v1")',
    "longer name": 'get("/v1extra")',
    "whole address": 'get("http://127.0.0.1/swarm")',
    "whole address of another host": "get(f\"http://127.0.0.1:{bait['tcp']}/v1\")",
    "star": 'ask(b"OPTIONS * HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")',
    "tunnel": "ask(f\"CONNECT 127.0.0.1:{bait['tcp']} HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n\".encode())",
    "upgrade": 'get("/v1/x", "Upgrade: websocket", "Connection: Upgrade")',
    "other host": 'get("/v1/host", host="other.example")',
    "two hosts": 'get("/v1/host", "Host: other.example")',
    "absolute path in a header": 'get("/v1/x", "X-Original-URL: /swarm", "X-Rewrite-URL: /swarm")',
    "two lengths": """
body = b"GET /swarm HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n"
head = b"POST /v1/x HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 0\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
ask(head + body)
""",
    "length and chunks": """
body = b"0\\r\\n\\r\\nGET /swarm HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n"
head = b"POST /v1/x HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: %d\\r\\n" % len(body)
ask(head + b"Transfer-Encoding: chunked\\r\\n\\r\\n" + body)
""",
    "odd chunks": """
body = b"0\\r\\n\\r\\nGET /swarm HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n"
head = b"POST /v1/x HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: %d\\r\\n" % len(body)
ask(head + b"Transfer-Encoding: xchunked\\r\\n\\r\\n" + body)
""",
    "second request": """
first = b"GET /v1/x HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n"
ask(first + b"GET /swarm HTTP/1.1\\r\\nHost: a\\r\\nConnection: close\\r\\n\\r\\n")
""",
    "line feeds in the target": 'ask(b"GET /v1/x\\nGET /swarm HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")',
    "folded header": """
head = b"GET /v1/x HTTP/1.1\\r\\nHost: a\\r\\nX: 1\\r\\n Transfer-Encoding: chunked\\r\\n\\r\\n"
ask(head + b"0\\r\\n\\r\\nGET /swarm HTTP/1.1\\r\\n\\r\\n")
""",
    "no version": 'ask(b"GET /swarm\\r\\n")',
}
KERNEL = {
    "mount": 'call(165, 40, b"none", b"/tmp", b"tmpfs", 0, 0); got("mounted")',
    "bind mount": 'call(165, 40, b"/", b"/tmp", None, 4096, 0); got("mounted")',
    "new mount calls": 'call(430, 430, b"tmpfs", 0); got("opened")',
    "newest mount call": 'call(467, 467, -100, b"/", 0, bytes(32), 32); got("opened")',
    "clone a mount": 'call(428, 428, -100, b"/", 1); got("opened")',
    "unmount": 'call(166, 39, b"/proc", 2); got("unmounted")',
    "change the root": 'os.chroot("."); got("changed")',
    "pivot the root": 'call(155, 41, b".", b"."); got("changed")',
    "user namespace": 'call(272, 97, 0x10000000); got("made")',
    "user namespace, clone": """
pid = call(56, 220, 0x10000011, 0, 0, 0, 0)
if pid == 0: os._exit(0)
got("made")
""",
    "user namespace, clone3": """
given = struct.pack("8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0)
pid = call(435, 435, given, 64)
if pid == 0: os._exit(0)
got("made")
""",
    "user namespace, program": 'subprocess.run(["unshare", "-U", "true"], check=True); got("made")',
    "network namespace": 'call(272, 97, 0x40000000); got("made")',
    "mount namespace": 'call(272, 97, 0x00020000); got("made")',
    "keys": 'call(248, 217, b"user", b"k", b"v", 1, -4); got("added")',
    "session key ring": 'call(250, 219, 0, -3, 0); got("joined")',
    "BPF": 'call(321, 280, 0, struct.pack("IIIII", 2, 4, 4, 1, 0) + bytes(100), 72); got("made")',
    "profiling": 'call(298, 241, struct.pack("IIQ", 1, 112, 0) + bytes(96), 0, -1, -1, 0); got("opened")',
    "io_uring": 'call(425, 425, 4, bytes(120)); got("opened")',
    "user faults": 'call(323, 282, 1); got("opened")',
    "kernel module": 'call(313, 273, 0, b"", 0); got("loaded")',
    "kernel log": "b = ctypes.create_string_buffer(99); call(103, 116, 3, b, 99); got(b.value)",
    "become root": 'os.setresuid(0, 0, 0); got("root")',
    "capabilities": """
for line in open("/proc/self/status"):
    line.startswith(("CapEff", "CapPrm", "CapAmb")) and int(line.split()[1], 16) and got(line)
""",
    "setuid program": """
su = subprocess.Popen(["su", "-c", "sleep 2"], stdin=-1, stdout=-3, stderr=-3)
time.sleep(0.3)
uid = [line.split()[2] for line in open(f"/proc/{su.pid}/status") if line.startswith("Uid")]
uid == ["0"] and got("root")
su.kill()
""",
    "sysctl": 'open("/proc/sys/kernel/core_pattern", "w").write("core"); got("written")',
    "sysctl of memory": 'open("/proc/sys/vm/drop_caches", "w").write("1"); got("written")',
    "system request": 'open("/proc/sysrq-trigger", "w").write("h"); got("written")',
    "own out-of-memory score": 'open("/proc/self/oom_score_adj", "w").write("-1000"); got("written")',
    "clock": 'time.clock_settime(time.CLOCK_REALTIME, time.time()); got("set")',
    "name of the machine": 'socket.sethostname("attempt"); got("set")',
    "reboot": 'call(169, 142, 0xfee1dead, 672274793, 0x89abcdef, 0); got("changed")',
    "swap": 'open("s", "wb").write(bytes(40960)); call(167, 224, b"s", 0); got("added")',
    "accounting": 'call(163, 89, b"/dev/null"); got("set")',
    "ports": 'platform.machine() == "x86_64" and call(172, 0, 3) == 0 and got("opened")',
    "kernel to boot": 'call(246, 104, 0, 0, 0, 0); got("loaded")',
    "real-time": 'os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); got("set")',
    "locked memory": 'resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**40, 2**40)); got("lifted")',
    "limits lifted": 'resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)); got("lifted")',
    "write and run in 32 bits": """
libc.syscall.restype = ctypes.c_long
platform.machine() == "x86_64" and libc.syscall(0x40000000 | 39) > 0 and got("x32")
""",
}
USAGE = {
    "fork bomb": """
n = 0
try:
    while n < 2000:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        n += 1
except OSError: pass
n > 40 and got(n)
""",
    "fork bomb of forks": """
def bomb():
    for _ in range(400):
        try:
            if os.fork() == 0: bomb(); time.sleep(30); os._exit(0)
        except OSError: return
pid = os.fork()
if pid == 0: bomb(); time.sleep(30); os._exit(0)
time.sleep(1)
n = len([p for p in os.listdir("/proc") if p.isdecimal()]); n > 40 and got(n)
""",
    "threads": """
n = 0
try:
    while n < 2000: threading.Thread(target=time.sleep, args=(2,), daemon=True).start(); n += 1
except RuntimeError: pass
n > 40 and got(n)
""",
    "memory of one": 'x = allocate(256 << 20); time.sleep(1); got("allocated")',
    "mapped memory of one": """
import mmap
x = [mmap.mmap(-1, 32 << 20) for _ in range(8)]
for m in x:
    for o in range(0, 32 << 20, 4096): m[o] = 1
time.sleep(1); got("mapped")
""",
    "memory of many": """
for _ in range(8):
    if os.fork() == 0: x = allocate(32 << 20); time.sleep(1.5); got("allocated"); os._exit(0)
time.sleep(2)
""",
    "memory of short-lived parents": """
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: x = allocate(32 << 20); time.sleep(1.5); got("allocated")
        os._exit(0)
time.sleep(2)
""",
    "memory in /tmp": """
for n in range(64): open(f"/tmp/{n}", "wb").write(bytes(4 << 20))
got("written")
""",
    "memory in /dev/shm": """
for n in range(64): open(f"/dev/shm/{n}", "wb").write(bytes(4 << 20))
got("written")
""",
    "memory in other file systems": """
for place in ("/", "/dev", "/etc", "/usr", "/root", "/home", "/dev/mqueue", "/proc", "/dev/pts"):
    try: open(place + "/x", "wb").write(bytes(1 << 20)); got(place)
    except OSError: pass
""",
    "memory without a mapping": """
held = []
for _ in range(16):
    fd = os.memfd_create("x"); held.append(fd)
    for _ in range(2): os.write(fd, bytes(8 << 20))
time.sleep(1); got("written")
""",
    "memory of system V": """
libc.shmat.restype = ctypes.c_void_p
for _ in range(8):
    there = libc.shmget(0, 32 << 20, 0o1600)
    if there < 0: sys.exit()
    place = libc.shmat(there, None, 0)
    ctypes.memset(place, 1, 32 << 20); libc.shmdt(ctypes.c_void_p(place))
time.sleep(1); got("attached")
""",
    "memory of semaphores": """
n = 0
while n < 64 and libc.semget(0, 32000, 0o1600) >= 0: n += 1
time.sleep(1); n > 40 and got(n)
""",
    "memory of page tables": """
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3
there = libc.mmap(None, 64 << 30, 1, 0x4022, -1)
libc.madvise(ctypes.c_void_p(there), ctypes.c_size_t(64 << 30), 15)
for offset in range(0, 64 << 30, 2 << 20): ctypes.string_at(there + offset, 1)
time.sleep(1); got("mapped")
""",
    "memory of pipes": """
pipes = []
try:
    while len(pipes) < 400:
        pipes.append(os.pipe()); fcntl.fcntl(pipes[-1][1], 1031, 1 << 20); os.set_blocking(pipes[-1][1], False)
        os.write(pipes[-1][1], bytes(1 << 20))
except OSError: pass
time.sleep(1)
sum(fcntl.fcntl(w, 1032) for _, w in pipes) > 200 << 20 and got(len(pipes))
""",
    "one long file": """
with open("f", "wb") as f:
    for _ in range(64): f.write(bytes(1 << 20))
got("written")
""",
    "a hole": 'open("f", "wb").truncate(1 << 40); got("made")',
    "many files": """
for n in range(64): open(str(n), "wb").write(bytes(1 << 20)); time.sleep(0.02)
time.sleep(1); got("written")
""",
    "many empty files": """
for n in range(20000): open(str(n), "wb").close()
time.sleep(1); got("made")
""",
    "removed files": """
held = []
for n in range(16): f = open(str(n), "wb"); f.write(bytes(4 << 20)); f.flush(); os.unlink(str(n)); held.append(f)
time.sleep(1); got("held")
""",
    "files below a closed folder": """
os.mkdir("d")
for n in range(64): open(f"d/{n}", "wb").write(bytes(1 << 20)); n or os.chmod("d", 0o300); time.sleep(0.02)
time.sleep(1); got("written")
""",
    "files in deep folders": """
for n in range(64):
    for _ in range(30): os.mkdir("d" * 200); os.chdir("d" * 200)
    open("f", "wb").write(bytes(1 << 20)); time.sleep(0.02)
time.sleep(1); got("written")
""",
    "output": """
for _ in range(64): sys.stdout.write("x" * (1 << 20)); sys.stdout.flush()
time.sleep(1); sys.stderr.write("\\nGOT out")
""",
    "errors": """
for _ in range(64): sys.stderr.write("x" * (1 << 20)); sys.stderr.flush()
time.sleep(1); got("out")
""",
    "CPU time": """
os.fork()
while time.process_time() < 3.5: pass
got("burnt")
""",
    "wall time": 'time.sleep(7); got("slept")',
    "wall time without signals": """
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(7); got("slept")
""",
}
SURVIVORS = {
    "child": "os.execvp('sleep', ['sleep', bait['survivor']]) if os.fork() == 0 else None",
    "session": """
if os.fork() == 0: os.setsid(); os.execvp("sleep", ["sleep", bait["survivor"]])
time.sleep(0.2)
""",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for n in range(3): os.close(n)
        os.execvp("sleep", ["sleep", bait["survivor"]])
    os._exit(0)
os.wait(); time.sleep(0.2)
""",
    "without signals": """
if os.fork() == 0:
    for n in range(1, 65):
        try: signal.signal(n, signal.SIG_IGN)
        except (OSError, ValueError): pass
    os.setsid(); os.execvp("sleep", ["sleep", bait["survivor"]])
time.sleep(0.2); os.kill(os.getpid(), 9)
""",
    "without a death signal": """
if os.fork() == 0: libc.prctl(1, 0, 0, 0, 0); os.setsid(); os.execvp("sleep", ["sleep", bait["survivor"]])
time.sleep(0.2); os.kill(os.getppid(), 9); time.sleep(0.2)
""",
    "holder of the output": """
if os.fork() == 0: os.setsid(); os.execvp("sleep", ["sleep", bait["survivor"]])
os._exit(0)
""",
    "stopped": """
pid = os.fork()
if pid == 0: os.execvp("sleep", ["sleep", bait["survivor"]])
time.sleep(0.2); os.kill(pid, signal.SIGSTOP)
""",
}
ATTEMPTS = {
    f"{kind}: {name}": program
    for kind, programs in {
        "files": FILES,
        "processes": PROCESSES,
        "network": NETWORK,
        "proxy": PROXY,
        "kernel": KERNEL,
        "usage": USAGE,
        "survivors": SURVIVORS,
    }.items()
    for name, program in programs.items()
}
BARE = (
    *(
        "files: read a file",
        "files: write a file",
        "files: climb by dots",
        "files: symbolic link",
        "files: list the home",
    ),
    *("files: times of a file", "files: mode of a file", "files: inherited descriptors", "files: token of a data dir"),
    *("files: shared memory file", "files: watch a folder", "files: write into a pipe", "files: file handle"),
    *("processes: see a process", "processes: environment of a process", "processes: signal", "processes: ptrace"),
    *("processes: read the memory", "processes: priority", "processes: limits of a process", "processes: core dump"),
    *("processes: affinity of a process", "processes: descriptor of a process", "processes: system V memory"),
    *("processes: secrets of the environment", "network: TCP on loopback", "network: UDP on loopback"),
    *("network: UNIX socket", "network: UNIX socket in a readable folder", "network: abstract socket"),
    *("network: abstract datagrams", "network: bind beside", "network: TCP by address", "network: interfaces"),
    *("proxy: path of another run", "proxy: the root", "proxy: dots", "kernel: user namespace", "kernel: io_uring"),
    *("kernel: user faults", "kernel: keys", "usage: one long file", "usage: output", "usage: memory of one"),
    *("survivors: session", "survivors: daemon"),
)
"""Attempts that are harmless without a sandbox. As a user some fail there, too: chmod and chown of a file of others."""


class _Model(BaseHTTPRequestHandler):
    """A model's server, which gives its token away below every path but `/v1`, and to every other host."""

    protocol_version = "HTTP/1.1"
    token = ""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, hosts = self.path.partition("?")[0], self.headers.get_all("Host") or []
        is_model = path.startswith("/v1/") and ".." not in path and "%25" not in path and "\\" not in path
        is_own = hosts == [f"127.0.0.1:{self.server.server_address[1]}"]  # type: ignore[attr-defined]
        body = b"{}" if is_model and is_own else self.token.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_OPTIONS = do_CONNECT = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Bait:
    """What attempts must not reach. `changes` are those of its files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.token = secrets.token_hex(16)
        self.name = f"agentjet-{self.token[:8]}"
        self.survivor = f"{10**6 + secrets.randbelow(10**6)}.5"
        self.folder, self.stack, self.home = folder, stack, folder / "home"
        self.open, self.project = folder / "open", folder / "project"
        for made in (self.home, self.open, self.project / "data" / "runs" / "default"):
            made.mkdir(parents=True)
        self.secret, self.writable, self.pipe = (folder / name for name in ("secret", "writable", "pipe"))
        for file in (self.secret, self.home / ".key", self.project / "data" / "token", self.open / "kept"):
            file.write_text(self.token)
        self.writable.write_text("as it was")
        (self.project / "agent.py").write_text("x = 1")
        os.mkfifo(self.pipe)
        self.pipe_end = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)
        for path, mode in ((self.writable, 0o666), (self.pipe, 0o666), (self.open, 0o777)):
            path.chmod(mode)
        self.shared = Path("/dev/shm", self.name)
        self.shared.write_text(self.token)
        stack.callback(self.shared.unlink, missing_ok=True)
        os.environ[self.name] = self.token
        stack.callback(os.environ.pop, self.name)
        leaked = self.secret.open("rb")
        os.set_inheritable(leaked.fileno(), True)
        stack.enter_context(leaked)
        self.facts = self._processes() | self._servers()
        self.before = self.state()

    def _processes(self) -> dict[str, Any]:
        key = int(self.token[:7], 16)
        code = (
            "import ctypes, sys, time\nlibc = ctypes.CDLL(None)\nb = ctypes.create_string_buffer(b'"
            + self.token
            + "')\n"
            f"libc.prctl(0x59616d61, -1, 0, 0, 0)\nlibc.shmget({key}, 4096, 0o1666)\n"
            "print(ctypes.addressof(b), flush=True)\ntime.sleep(600)"
        )
        started = []
        for _ in range(2):
            process = subprocess.Popen([sys.executable, "-Ic", code], stdout=subprocess.PIPE)
            self.stack.callback(process.wait)
            self.stack.callback(process.kill)
            assert process.stdout is not None
            started.append((process.pid, int(process.stdout.readline())))
            process.stdout.close()
        self.pid, self.victim = started[0][0], started[1][0]
        self.stack.callback(subprocess.run, ["ipcrm", "-M", str(key)], capture_output=True, check=False)
        return {"pid": self.pid, "address": started[0][1], "victim": self.victim, "key": key}

    def _servers(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"socket": str(self.folder / "socket"), "tcp6": 1}
        names: list[tuple[str, socket.AddressFamily, Any]] = [
            ("tcp", socket.AF_INET, ("0.0.0.0", 0)),
            ("unix", socket.AF_UNIX, facts["socket"]),
            ("project", socket.AF_UNIX, str(self.project / "agent.sock")),
            ("abstract", socket.AF_UNIX, f"\0{self.name}"),
        ]
        if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
            names.append(("tcp6", socket.AF_INET6, ("::1", 0)))
        for name, family, address in names:
            listener = self.stack.enter_context(socket.socket(family))
            listener.bind(address)
            listener.listen()
            if name.startswith("tcp"):
                facts[name] = listener.getsockname()[1]
            elif name != "abstract":
                Path(address).chmod(0o777)
            threading.Thread(target=self._give, args=(listener,), daemon=True).start()
        datagrams = self.stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind(("127.0.0.1", 0))
        facts["udp"] = datagrams.getsockname()[1]
        threading.Thread(target=self._echo, args=(datagrams,), daemon=True).start()
        abstract = self.stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        abstract.bind(f"\0{self.name}d")
        handler = type("Model", (_Model,), {"token": self.token})
        model = self.stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        model.daemon_threads = True
        threading.Thread(target=model.serve_forever, daemon=True).start()
        self.stack.callback(model.shutdown)
        self.url = f"http://127.0.0.1:{model.server_address[1]}/v1"
        return facts | {"address_of_host": address_of_host()}

    def _give(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                link, _ = listener.accept()
                with suppress(OSError):
                    link.sendall(self.token.encode())
                link.close()

    def _echo(self, datagrams: socket.socket) -> None:
        with suppress(OSError):
            while True:
                _, address = datagrams.recvfrom(99)
                datagrams.sendto(self.token.encode(), address)

    def described(self, url: str) -> dict[str, Any]:
        """What a program learns about the bait. The model is at `url`."""
        host, _, port = url.split("/")[2].partition(":")
        names = ("home", "open", "project", "secret", "writable", "pipe")
        paths = {name: str(getattr(self, name)) for name in names}
        # The token in two halves: a program that prints its environment has not got it.
        halves = {"halves": [self.token[:16], self.token[16:]], "name": self.name, "secret_name": self.name}
        facts = {**self.facts, **paths, **halves, "survivor": self.survivor}
        return facts | {"model": [host, int(port)], "caller": os.getpid()}

    def state(self) -> dict[str, Any]:
        """The files, whole, and the processes that must not change."""
        found: dict[str, Any] = {}
        top = [path for path in self.folder.iterdir() if path.name != "work"]
        for path in (*top, *(inner for one in top if one.is_dir() for inner in one.rglob("*"))):
            status = path.lstat()
            is_file = stat.S_ISREG(status.st_mode)
            facts = (status.st_mode, status.st_uid, os.listxattr(path, follow_symlinks=False))
            found[str(path)] = (*facts, status.st_mtime_ns, path.read_bytes()) if is_file else facts
        found["pipe"] = self._piped()
        found["victim"] = Path(f"/proc/{self.victim}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        found["priority"] = os.getpriority(os.PRIO_PROCESS, self.pid)
        return found

    def _piped(self) -> bytes:
        with suppress(BlockingIOError):
            return os.read(self.pipe_end, 99)
        return b""

    def survivors(self) -> list[int]:
        """Processes that outlived their sandbox."""
        wanted, found = f"sleep\0{self.survivor}\0".encode(), []
        for place in Path("/proc").iterdir():
            with suppress(OSError):
                if place.name.isdecimal() and (place / "cmdline").read_bytes() == wanted:
                    found.append(int(place.name))
        return found


def address_of_host() -> str:
    """An address of this machine that is not on loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # Sends nothing.
        return str(probe.getsockname()[0])
    return "127.0.0.1"


@contextmanager
def bait(folder: Path) -> Iterator[Bait]:
    with ExitStack() as stack:
        yield Bait(folder, stack)


def attempt(bait: Bait, name: str, *, is_bare: bool = False) -> str:
    """Runs one attempt. Returns what it got, or ""."""
    work = bait.folder / "work"
    work.mkdir()
    program = [sys.executable, "-I", "-c", PRELUDE + ATTEMPTS[name]]
    limits = LIMITS if name.startswith("usage") else replace(LIMITS, memory=512 * MIB, cpu_seconds=10, wall_seconds=10)
    sandbox = Sandbox(folder=work, readable=(bait.project,), network="model", model_url=bait.url, limits=limits)
    if is_bare:
        told = {"BAIT": json.dumps(bait.described(bait.url)), bait.name: bait.token, "PATH": os.environ["PATH"]}
        captured = CapturedProcess(program, cwd=work, env=told, stdin=subprocess.DEVNULL, close_fds=False)
    else:
        told = {"BAIT": json.dumps(bait.described(sandbox.inside_url(bait.url)))}
        captured = CapturedProcess(program, sandbox=replace(sandbox, variables=told), stdin=subprocess.DEVNULL)
    captured.wait()
    printed = "\n".join(captured.text(name) for name in ("stdout", "stderr"))
    got = [line for line in printed.splitlines() if line.startswith("GOT")]
    got += [f"the token: {printed[-200:]}"] if bait.token in printed and not got else []
    if pids := bait.survivors():
        got.append(f"survivors: {pids}")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    if (now := bait.state()) != bait.before:
        changed = sorted(key for key in now.keys() | bait.before.keys() if now.get(key) != bait.before.get(key))
        got.append(f"changed: {changed}")
    odd = ["-perm", "/6000"] if os.getuid() else ["(", "-perm", "/6000", "-o", "-not", "-uid", "0", ")"]
    left = subprocess.run(["find", work, *odd, "-print", "-quit"], capture_output=True, check=False).stdout
    if (
        left and not is_bare and not (os.getuid() and name == "files: setuid file")
    ):  # A user may do that to an own file.
        got.append(f"left: {left.decode()[:200]}")
    subprocess.run(["chmod", "-R", "u+rwX", str(work)], check=False, capture_output=True)
    subprocess.run(["rm", "-rf", str(work)], check=True)
    return "; ".join(got)[:500]


def attempt_all(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """What each attempt got in a sandbox."""
    with bait(folder / "bait") as made:
        return {name: attempt(made, name) for name in names}


def attempt_bare(folder: Path) -> dict[str, str]:
    """What attempts got without a sandbox. Each has a bait of its own, because it may change it."""
    found = {}
    for number, name in enumerate(BARE):
        with bait(folder / f"bare{number}") as made:
            found[name] = attempt(made, name, is_bare=True)
    return found


def main() -> None:
    folder, started = Path(sys.argv[1]), time.monotonic()
    found = attempt_bare(folder) if "--bare" in sys.argv else attempt_all(folder, list(ATTEMPTS))
    print(json.dumps({"uid": os.getuid(), "seconds": round(time.monotonic() - started, 1), "got": found}))


if __name__ == "__main__":
    main()
