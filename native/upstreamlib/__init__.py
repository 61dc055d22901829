"""What upstream.py is made of. Standard library only: it runs before there is a virtual environment."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this is the message that an older Python gets to see
    sys.exit("upstream: error: MissingTool: Python 3.11 or later is needed")
