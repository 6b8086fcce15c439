"""The message of an error in one line."""


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"
