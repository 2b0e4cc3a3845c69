"""Links a Python that is a shared library once more, as one executable, and prints its path.

Within a shared library each call of a function that others could replace goes through a table. A
Python that was built as one, as many managers of versions do, takes a third more time than the same
objects in an executable. Its static library is installed beside it, and linking takes a second. The
new one has the files of the old one. What cannot be linked is named, and stays as it is.

    python3.13 .ci/link_python.py build/python
"""

from __future__ import annotations

import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig

folder = pathlib.Path(sys.argv[1]).absolute()
get = {name: str(value) for name, value in sysconfig.get_config_vars().items()}
library = pathlib.Path(get["LIBPL"], get["LIBRARY"])
start = library.with_name("python.o")
compiler = shlex.split(get["CC"])
missing = [str(path) for path in (library, start) if not path.exists()]
missing += [] if shutil.which(compiler[0]) else [compiler[0]]
# Some are installed with a library that their executable doesn't use.
is_library = "libpython" in pathlib.Path("/proc/self/maps").read_text()
if not is_library or missing:
    why = f"there is no {', '.join(missing)}" if missing else "it is no shared library"
    print(f"{sys.executable} stays as it is: {why}", file=sys.stderr)
    print(sys.executable)
    sys.exit()
shutil.rmtree(folder, ignore_errors=True)
executable = folder / "bin" / f"python{get['VERSION']}"
executable.parent.mkdir(parents=True)
for name in ("lib", "include"):
    (folder / name).symlink_to(pathlib.Path(sys.base_prefix, name))
whole = ["-Wl,--whole-archive", str(library), "-Wl,--no-whole-archive"]
needed = [word for name in ("LINKFORSHARED", "LIBS", "SYSLIBS") for word in shlex.split(get[name])]
subprocess.run([*compiler, "-o", str(executable), str(start), *whole, *needed], check=True)
print(executable)
