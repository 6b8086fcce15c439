"""The command line, as `minidl` and as `python -m minidl`."""

import _signal as signal  # type: ignore[import-not-found]  # signal itself imports other modules first
import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Entry point of the command `minidl`: a signal shows no traceback, not even while the rest is imported."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    import contextlib

    from minidl import cli

    try:
        cli.main()
    except SystemExit as end:
        # With torch, Python takes up to a second to end; and it cannot while a thread still imports or reads.
        code, alone = end.code or 0, len(sys._current_frames()) == 1
        if not isinstance(code, int) or (code != _INTERRUPTED and "torch" not in sys.modules and alone):
            raise
        # Python ends by the signal itself where one came in a text that it compiled, such as a dataclass.
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
