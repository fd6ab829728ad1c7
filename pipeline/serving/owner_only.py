"""Run a program whose files and shared memory are its user's alone: `python -I owner_only.py PROGRAM ARGUMENTS`.

A umask is not enough for tritonserver: the library that makes the shared memory of its Python processes, which
carries prompts, creates it under the umask and then sets the mode 0644 (Boost.Interprocess). So a filter makes that
one call, fchmod(_, 0644), do nothing, for the program and its children. Needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_ALLOW, _DO_NOTHING = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with the error 0: success
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# By machine: the kernel's identifier of it, and the number of fchmod.
_MACHINES = {"x86_64": (0xC000003E, 91), "aarch64": (0xC00000B7, 52)}
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


def main(command: list[str]) -> None:
    os.umask(0o077)
    failed = _keep_mode_of_created_files()
    if failed:
        os.write(2, f"warning: shared memory can be read by other users of this machine: {failed}\n".encode())
    os.execv(command[0], command)


def _keep_mode_of_created_files() -> str:
    """Install the filter. Returns the reason why it could not be installed, or an empty string."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        return f"no system call filter is known for {machine}"
    kernel_name, fchmod = _MACHINES[machine]
    steps = [
        (_LOAD, 0, 0, 4),  # the machine
        (_IF_EQUAL, 0, 4, kernel_name),
        (_LOAD, 0, 0, 0),  # the system call
        (_IF_EQUAL, 0, 2, fchmod),
        (_LOAD, 0, 0, 24),  # the call's second argument
        (_IF_EQUAL, 1, 0, 0o644),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DO_NOTHING),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    for option, argument, more in ((_NO_NEW_PRIVILEGES, 1, None), (_SECCOMP, _FILTER, program)):
        if libc.prctl(option, argument, more, 0, 0) != 0:
            return os.strerror(ctypes.get_errno())
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
