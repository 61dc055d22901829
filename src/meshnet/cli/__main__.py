"""``python -m meshnet.cli``: the command without an installed script."""

from meshnet.cli.main import app

app(prog_name="meshnet")
