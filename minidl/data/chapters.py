"""Map the modules of Python's standard library to chapters of the Library Reference.

The table follows the order of the public library index (Python 3.12). Modules of later versions are in the chapter of
that version, private modules in the chapter of the public module that they implement (`_pydecimal` with `decimal`). A
package name covers its submodules, except those with an entry of their own. The table omits the chapter of superseded
modules, which has no common subject, and lib2to3 and distutils, which the index no longer lists.
"""

_INDEX: dict[str, str] = {
    "text processing": """
        string re difflib textwrap unicodedata stringprep readline rlcompleter sre_compile sre_constants sre_parse
        """,
    "binary data": "struct codecs encodings",
    "data types": """
        datetime zoneinfo calendar collections heapq bisect array weakref types copy pprint reprlib enum graphlib
        _collections_abc _pydatetime _strptime _weakrefset
        """,
    "numbers": "numbers math cmath decimal fractions random statistics _pydecimal _pylong",
    "functional programming": "itertools functools operator",
    "files and directories": """
        pathlib os.path posixpath ntpath genericpath fileinput stat filecmp tempfile glob fnmatch linecache shutil
        nturl2path
        """,
    "data persistence": "pickle copyreg shelve marshal dbm sqlite3 _compat_pickle",
    "compression": "zlib gzip bz2 lzma zipfile tarfile compression _compression",
    "file formats": "csv configparser tomllib netrc plistlib xdrlib",
    "cryptography": "hashlib hmac secrets",
    "operating system": """
        os io time argparse getopt logging getpass curses platform errno ctypes
        _pyio _aix_support _android_support _ios_support _osx_support
        """,
    "concurrency": "threading multiprocessing concurrent subprocess sched queue contextvars _threading_local",
    "networking": "asyncio socket ssl select selectors signal mmap",
    "internet data": "email json mailbox mimetypes base64 binascii quopri",
    "structured markup": "html xml _markupbase",
    "internet protocols": """
        webbrowser wsgiref urllib http ftplib poplib imaplib smtplib uuid socketserver xmlrpc ipaddress
        """,
    "multimedia": "wave colorsys",
    "internationalization": "gettext locale",
    "program frameworks": "turtle turtledemo cmd shlex",
    "graphical interfaces": "tkinter idlelib",
    "development tools": "typing pydoc pydoc_data doctest unittest",
    "debugging and profiling": """
        bdb faulthandler pdb profile cProfile profiling pstats timeit trace tracemalloc
        """,
    "packaging": "ensurepip venv zipapp",
    "runtime services": """
        sys sysconfig builtins warnings dataclasses contextlib abc atexit traceback __future__ gc inspect annotationlib
        site _py_abc _sitebuiltins
        """,
    "custom interpreters": "code codeop _pyrepl",
    "importing modules": "zipimport pkgutil modulefinder runpy importlib",
    "language services": """
        ast symtable token keyword tokenize tabnanny pyclbr py_compile compileall dis opcode pickletools
        """,
    "unix services": "pty tty termios pwd grp resource syslog",
}

CHAPTERS: dict[str, str] = {module: chapter for chapter, modules in _INDEX.items() for module in modules.split()}


def chapter_of(module: str) -> str | None:
    """Return the chapter of a dotted module name by its longest listed prefix, or None if no prefix is listed."""
    name = module
    while name:
        if name in CHAPTERS:
            return CHAPTERS[name]
        name = name.rpartition(".")[0]
    return None
