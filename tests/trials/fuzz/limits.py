"""What a file may cost, whatever is in it. The one place that says so: `guard.py` measures it."""

MIB = 2**20

INPUT = 2**16  # bytes of an input that is tried
SECONDS = 5.0  # of the processor for one input, with coverage measured, which costs several times the work itself
HANG_SECONDS = 60.0  # by the clock, after which a worker that says nothing is ended
MESSAGE = 2000  # characters of an error's message

# Resident memory that one input of at most INPUT bytes may take beside what was there.
MEMORY = 128 * MIB
# A picture of the MAX_PIXELS of minidl/data/pictures.py may have few kilobytes: 4 bytes a pixel, twice, and some more.
PICTURE_MEMORY = 640 * MIB
# Gzipped data sets unpack to at most 64 MiB, which is held and parsed.
ARCHIVE_MEMORY = 256 * MIB
# Address space beyond what the worker had: a claim above it fails at once, and the machine stays whole.
ADDRESS_SPACE = 4 * 1024 * MIB
