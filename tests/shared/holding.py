"""A process that hears no signal in Python."""

import ctypes


def hold() -> None:
    """Lock a mutex twice, which no signal ends, and let no other thread of Python run meanwhile."""
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)
