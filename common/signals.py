"""Requests to stop: SIGINT, SIGTERM and SIGUSR1 end a run at the end of its epoch."""

import contextlib
import os
import signal
import time

from common.mpi_tools import mpi_op, proc_id

_stop_signal = None  # the signal that asked this process to stop
_stop_time = 0.0


def catch_signals(on_second):
    """From now on SIGINT, SIGTERM and SIGUSR1 ask for a stop at the end of the epoch.

    Args:
        on_second: called with a line of text before a second signal ends the process at once.
    """

    def on_signal(signum, frame):
        global _stop_signal, _stop_time
        # A terminal's Ctrl-C comes twice, from the terminal and from mpirun: that is one request.
        if _stop_signal is not None and time.monotonic() - _stop_time > 1:
            on_second(f"signal {signum}, twice")
            os._exit(128 + signum)
        if _stop_signal is None:
            _stop_signal, _stop_time = signum, time.monotonic()
            if proc_id() == 0:
                name = signal.Signals(signum).name
                text = f"\n{name}: stopping at the end of this epoch; once more stops at once\n"
                with contextlib.suppress(OSError):  # where nobody reads any more
                    os.write(2, text.encode())  # a print here could interrupt another one

    proc_id()  # MPI installs a SIGUSR1 handler of its own when it starts: ours comes after it
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, on_signal)


def stop_signal():
    """The signal that asked this process to stop, or None."""
    return _stop_signal


def stop_requested():
    """Whether any rank was asked to stop; the same answer on all ranks."""
    return mpi_op(float(_stop_signal is not None), "MAX") > 0
