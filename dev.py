#!/usr/bin/env python3
"""The two commands of this repository, with all their set-up: ``python dev.py demo`` and ``python dev.py test``.

Pure standard library. The first run makes ``.venv`` beside this file and installs ``requirements-dev.txt`` into it;
later runs start at once.
"""

import os
import shutil
import sys

OLDEST, NEWEST = (3, 10), (3, 13)


def refuse_python(version):
    """Return why this Python cannot be used, an empty string when it can. Parses on any Python 3."""
    if OLDEST <= version[:2] <= NEWEST:
        return ""
    names = ["python3.%d" % minor for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]  # noqa: UP031
    found = [name for name in names if shutil.which(name)]
    if found:
        advice = "Run: %s dev.py ..." % found[0]  # noqa: UP031
    elif os.name == "nt":
        advice = "Install one from python.org, then run: py -3.12 dev.py ..."
    else:
        advice = "Install one, then run: python3.12 dev.py ..."
    return "Python %d.%d is not supported, 3.10 to 3.13 are. %s" % (  # noqa: UP031
        version[0],
        version[1],
        advice,
    )


if __name__ == "__main__":
    reason = refuse_python(sys.version_info)
    if reason:
        sys.exit("dev.py: " + reason)
    from dev_tools.commands import main

    sys.exit(main(sys.argv[1:]))
