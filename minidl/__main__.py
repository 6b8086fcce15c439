"""The command line, as `minidl` and as `python -m minidl`."""

import _signal as signal  # type: ignore[import-not-found]  # the module signal imports others first
import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command `minidl`. A signal prints no traceback, not even during imports."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    import contextlib

    from minidl import cli

    try:
        cli.main()
    except SystemExit as end:
        # With torch, Python takes up to a second to exit, and it cannot exit while another thread imports or reads.
        code, is_single = end.code or 0, len(sys._current_frames()) == 1
        if not isinstance(code, int) or (code != _INTERRUPTED and "torch" not in sys.modules and is_single):
            raise
        # Python would end by the signal itself if it arrived in exec'd source, such as that of a dataclass.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _stop(number: int, frame: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
