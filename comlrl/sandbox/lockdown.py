# ruff: noqa: E501  (a table)
"""What a process inside the sandbox gives up before it runs anything: capabilities, resources, system calls.

Like values.py and inside.py, this file is part of the text that runs inside the sandbox.
"""

import ctypes
import os
import resource
import struct

libc = ctypes.CDLL(None, use_errno=True)

# System calls that no test needs, by their numbers on x86_64 and aarch64 (None: does not exist there): new processes and
# threads, other programs, signals, tracing, limits, sockets, shared memory, namespaces, mounts and kernel interfaces.
DENIED = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "socket": (41, 198), "socketpair": (53, 199), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "io_uring_setup": (425, 425), "personality": (135, 92), "init_module": (175, 105),
    "finit_module": (313, 273), "kexec_load": (246, 104), "open_by_handle_at": (304, 265), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "seccomp": (317, 277),
}  # fmt: skip
CLONE3 = 435
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
EPERM, ENOSYS = 1, 38


def drop_capabilities():
    """No capability now or after an exec, and no tracing by processes of the same user."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, data = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(libc.capset(header, data), "capset")
    _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def set_limits(memory_mb, cpu_seconds, file_mb):
    mib = 1 << 20
    for name, value in (
        (resource.RLIMIT_AS, memory_mb * mib),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_mb * mib),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    # The filter below is what forbids new processes; this does it too, but not for the machine's root.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def filter_system_calls():
    """Answers ``DENIED`` with EPERM from now on, for good. Returns whether this machine's numbers are known."""
    known = ARCHITECTURES.get(os.uname().machine)
    if known is None or struct.calcsize("P") != 8:
        return False
    column, architecture = known
    numbers = [pair[column] for pair in DENIED.values() if pair[column] is not None]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, errno_, kill = 0x7FFF0000, 0x00050000, 0x80000000
    code: list = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, errno_ | EPERM)]  # the x32 table
    code += [(equal, 0, 1, CLONE3), (answer, 0, 0, errno_ | ENOSYS)]  # its flags lie in memory; libc then calls clone
    for number in numbers:
        code += [(equal, 0, 1, number), (answer, 0, 0, errno_ | EPERM)]
    code.append((answer, 0, 0, allow))
    program = b"".join(struct.pack("=HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    pointer = struct.pack("@HP", len(code), ctypes.addressof(buffer))
    _check(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), pointer, 0, 0), "seccomp")
    return True


def _check(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what} failed")
